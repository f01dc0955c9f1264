# SPDX-License-Identifier: Apache-2.0
"""`quadtree evaluate match`: what is printed and written, mistakes on one line."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cv2", reason="estimators need the extra 'models'")
pytest.importorskip("poselib", reason="estimators need the extra 'models'")
typer_testing = pytest.importorskip("typer.testing", reason="the command needs typer")

from quadtree_attention.cli.main import app  # noqa: E402
from tests.cli.test_info import command  # noqa: E402
from tests.tasks.match.test_metrics import (  # noqa: E402
    homography_line,
    pose_line,
    save_scene,
    save_wall,
)

BASE = ("--pairs", "pairs.txt", "--predictions", "out")


@pytest.fixture(autouse=True)
def _in_a_folder_with_pairs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_scene(Path("out"))
    save_wall(Path("out"), away=(3.0, 4.0))
    Path("pairs.txt").write_text(f"{pose_line()}\n{pose_line('gone')}\n{homography_line()}\n")
    Path("poses.txt").write_text(f"{pose_line()}\n{pose_line('gone')}\n")


def run(*options: str):
    arguments = ["evaluate", "match", *options]
    return typer_testing.CliRunner().invoke(app, arguments, prog_name="quadtree")


def test_text():
    result = run(*BASE, "--images", "out")
    assert result.exit_code == 0, result.output
    assert result.stderr == (
        "quadtree: 1 pair has no predictions and counts as failed: gone0__gone1\n"
    )
    pose, homography = (part.splitlines() for part in result.stdout.strip().split("\n\n"))
    assert pose[0] == "pose: 2 pairs, 1 of them without predictions"
    assert pose[1].split() == ["estimator", "AUC@5°", "AUC@10°", "AUC@20°", "median", "failed"]
    for line, name in zip(pose[2:4], ("OpenCV RANSAC", "poselib LO-RANSAC"), strict=True):
        cells = line.removeprefix(f"  {name}").split()
        assert [float(cell) for cell in cells[:3]] == pytest.approx([50, 50, 50], abs=0.2)
        assert cells[3:] == ["inf°", "1"]
    assert pose[4].strip() == (
        "100.0 matches per pair, 50.00 % of them correct (squared epipolar distance below 0.0005)"
    )
    assert homography[1].split()[1:4:2] == ["AUC@3", "AUC@5"]
    assert all("3.75 px" in line for line in homography[2:4])
    assert homography[4].endswith("0.00 % of them correct (within 3 px at a shorter side of 480)")


def test_json_is_what_is_written():
    result = run("--pairs", "poses.txt", "--predictions", "out", "--json", "--out", "scores.json")
    assert result.exit_code == 0, result.output
    scores = json.loads(result.stdout)
    assert scores == json.loads(Path("scores.json").read_text())
    assert sorted(os.listdir()) == ["out", "pairs.txt", "poses.txt", "scores.json"]
    assert "homography_pairs" not in scores["facts"]
    assert (scores["facts"]["pose_pairs"], scores["facts"]["pose_missing"]) == (2, 1)
    assert scores["rows"][0]["matches"] == 200
    assert [scores["rows"][1][f"error_{name}"] for name in ("opencv", "poselib")] == [None, None]


def test_options_act():
    options = ("--images", "out", "--json", "--side", "0", "--pose-pixels", "2", "--epipolar", "1")
    scores = json.loads(run(*BASE, *options).stdout)
    assert {"pose_pixels": 2.0, "epipolar": 1.0, "side": 0}.items() <= scores["facts"].items()
    assert scores["mean"]["homography_poselib_median"] == pytest.approx(5, abs=1e-3)


def test_in_a_process(tmp_path):
    options = [str(tmp_path / name) if name in ("pairs.txt", "out") else name for name in BASE]
    done = command("evaluate", "match", *options, "--images", str(tmp_path / "out"), "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 1 and "gone0__gone1" in done.stderr
    assert [pair["kind"] for pair in json.loads(done.stdout)["rows"]] == [
        "pose",
        "pose",
        "homography",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "cannot read wall0.png: No such file"),
        (["--pairs", "none.txt"], "none.txt"),
        (["--pairs", "bad.txt"], "bad.txt, line 2: "),
        (["--pairs", "untrue.txt"], "line 1 of the pairs, a0__a1, has no truth"),
        (["--predictions", "nothing"], "there is no folder 'nothing' of predictions"),
        (["--predictions", "empty"], "empty has predictions for none of 3 pairs, such as a0__a1"),
        (["--images", "empty"], "empty/wall0.png"),
        (["--images", "nowhere"], "there is no folder of images 'nowhere'; check"),
        (["--images", "out", "--side", "-5"], "side must be"),
        (["--images", "out", "--pose-pixels", "0"], "pose_pixels must be above 0, got 0"),
        (["--images", "out", "--epipolar", "nan"], "epipolar must be above 0, got nan"),
        (["--images", "out", "--out", "no/scores.json"], "there is no directory 'no' to write to"),
        (["--images", "out", "--out", "empty"], "'empty' is a directory; write to another"),
        (["--images", "out", "--out", "pairs.txt"], "'pairs.txt' is an input, it must not be"),
    ],
)
def test_mistakes(options, message):
    Path("empty").mkdir()
    Path("bad.txt").write_text(f"{pose_line()}\none.png\n")
    Path("untrue.txt").write_text("a0.png a1.png\n")
    before = sorted(os.listdir())
    result = run(*BASE, *options)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith("quadtree: ") and result.stderr.count("\n") == 1
    assert message in result.stderr
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize("content", [b"", b"no matches", b"PK\x03\x04 broken", None])
def test_a_file_without_matches(content):
    path = Path("out/a0__a1.npz")
    if content is None:
        np.savez(path, keypoints0=np.zeros((3, 2)))
    else:
        path.write_bytes(content)
    result = run("--pairs", "poses.txt", "--predictions", "out")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("quadtree: ") and result.stderr.count("\n") == 1
    assert "a0__a1.npz" in result.stderr


def test_many_missing_pairs_are_counted_and_some_named():
    lines = [pose_line(), *(pose_line(f"gone{i}-") for i in range(7))]
    Path("poses.txt").write_text("\n".join(lines))
    result = run("--pairs", "poses.txt", "--predictions", "out")
    assert result.stderr.startswith("quadtree: 7 pairs have no predictions and count as failed: ")
    assert result.stderr.count("gone") == 10 and result.stderr.endswith(", ...\n")


def test_what_is_needed():
    result = run("--pairs", "pairs.txt")
    assert result.exit_code == 2 and "--predictions" in result.stderr
