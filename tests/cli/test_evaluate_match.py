# SPDX-License-Identifier: Apache-2.0
"""`quadtree evaluate match`: what is printed and written, mistakes on one line."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("cv2", reason="estimators need the extra 'models'")
pytest.importorskip("poselib", reason="estimators need the extra 'models'")
typer_testing = pytest.importorskip("typer.testing", reason="the command needs typer")

from quadtree_attention.cli.main import app  # noqa: E402
from quadtree_attention.tasks import Matches  # noqa: E402
from tests.cli.test_info import command  # noqa: E402
from tests.tasks.match.test_metrics import (  # noqa: E402
    homography_line,
    pose_line,
    save_scene,
    save_wall,
)
from tests.tasks.match.test_predictor import write_weights  # noqa: E402

BASE = ("--data", "pairs.txt", "--predictions", "out")


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
    assert result.stderr == "quadtree: 1 without predictions: gone0__gone1\n"
    above, table = result.stdout.strip().split("\n\n")
    found = dict(line.split() for line in above.splitlines())
    assert (found["pose_pairs"], found["pose_missing"], found["pose_matches"]) == (
        "2",
        "1",
        "100.00",
    )
    assert (found["pose_precision"], found["homography_precision"]) == ("50.00", "0.00")
    for name in ("opencv", "poselib"):
        areas = [float(found[f"pose_{name}_auc{threshold}"]) for threshold in (5, 10, 20)]
        assert areas == pytest.approx([50, 50, 50], abs=0.2)
        assert (found[f"pose_{name}_median"], found[f"pose_{name}_failed"]) == ("inf", "1")
        assert found[f"homography_{name}_median"] == "3.75"
    rows = [line.split() for line in table.splitlines()[1:]]
    assert [row[0] for row in rows] == ["a0__a1", "gone0__gone1", "wall0__wall1"]
    assert rows[2][1:] == ["homography", "100", "0.00", "3.75", "3.75"]


def test_json_is_what_is_written():
    result = run("--data", "poses.txt", "--predictions", "out", "--json", "--report", "scores.json")
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
        (["--data", "none.txt"], "none.txt"),
        (["--data", "bad.txt"], "bad.txt, line 2: "),
        (["--data", "untrue.txt"], "line 1 of the pairs, a0__a1, has no truth"),
        (["--predictions", "nothing"], "there is no folder 'nothing' of predictions"),
        (["--predictions", "empty"], "empty has predictions for none of 3 pairs, such as a0__a1"),
        (["--images", "empty"], "empty/wall0.png"),
        (["--images", "nowhere"], "there is no folder of images 'nowhere'; check"),
        (["--images", "out", "--side", "-5"], "side must be"),
        (["--images", "out", "--pose-pixels", "0"], "pose_pixels must be above 0, got 0"),
        (["--images", "out", "--epipolar", "nan"], "epipolar must be above 0, got nan"),
        (
            ["--images", "out", "--report", "no/scores.json"],
            "there is no directory 'no' to wri",
        ),
        (["--images", "out", "--report", "empty"], "'empty' is a directory; write to another"),
        (["--images", "out", "--report", "pairs.txt"], "'pairs.txt' is an input, it must not be"),
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
    result = run("--data", "poses.txt", "--predictions", "out")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("quadtree: ") and result.stderr.count("\n") == 1
    assert "a0__a1.npz" in result.stderr


def test_many_missing_pairs_are_counted_and_some_named():
    lines = [pose_line(), *(pose_line(f"gone{i}-") for i in range(7))]
    Path("poses.txt").write_text("\n".join(lines))
    result = run("--data", "poses.txt", "--predictions", "out")
    assert result.stderr.startswith("quadtree: 7 without predictions: ")
    assert result.stderr.count("gone") == 10 and result.stderr.endswith(", and 2 more\n")


def test_what_is_needed():
    result = run("--predictions", "out")
    assert result.exit_code == 2 and "got no --data ROOT" in result.stderr


def test_without_predictions_the_matcher_runs(tmp_path):
    weights = write_weights(tmp_path / "tiny.safetensors")
    options = ("--threshold", "0", "--device", "cpu", "--save", "mine", "--json")
    noise = np.random.default_rng(0).integers(0, 255, (400, 500), np.uint8)
    for name in ("wall0.png", "wall1.png"):
        Image.fromarray(noise).resize((160, 128)).save(name)
    Path("pairs.txt").write_text(f"{homography_line()}\n")
    result = run(str(weights), "--data", "pairs.txt", *options)
    assert result.exit_code == 0, result.output
    scores = json.loads(result.stdout)
    assert scores["rows"][0]["matches"] == len(Matches.load("mine/wall0__wall1.npz")) > 0
    assert scores["settings"]["options"]["threshold"] == 0
