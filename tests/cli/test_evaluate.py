# SPDX-License-Identifier: Apache-2.0
"""`quadtree evaluate`: what is printed and written, scores of files alone, mistakes on one line."""

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("poselib", reason="estimators need the extra 'models'")
pytest.importorskip("faster_coco_eval", reason="scores of detectors need the extra 'train'")

from quadtree_attention.files import file_sha256
from quadtree_attention.tasks.contract import NAMES
from tests.support import tiny
from tests.support.commands import START, command, invoke, printed, refused, row
from tests.tasks.classify.test_result import write_predictions
from tests.tasks.match.test_metrics import homography_line, pose_line, save_scene, save_wall

pytestmark = pytest.mark.usefixtures("only_reference")
WITHOUT_MODELS = f"""
import sys
for name in ("timm", "torchvision", "pytorch_lightning"):
    sys.modules[name] = None  # an import of it fails
{START}
"""


def cells(text):
    return [line.split() for line in text.splitlines()]


@pytest.mark.parametrize("task", NAMES)
def test_a_network_then_its_files(task, all_weights):
    """Text, JSON and a report of the same scores; a second run, and one without the network."""
    weights = all_weights / f"{task}.safetensors"
    given = tiny.write_data(task, Path("data"), count=2)
    data = ["--data", given["data"]]
    if task == "match":
        data += ["--images", given["reader"]["images"]]
    save = {"classify": "out.npz", "detect": "out.json"}.get(task, "out")
    run = ("evaluate", task, weights, *data, "--device", "cpu", "--save", save, "--size", 64)
    text = printed(*run)
    scores = json.loads(printed(*run, "--json", "--report", "report.json"))
    assert scores == json.loads(Path("report.json").read_text())
    assert scores["settings"]["options"]["size"] == 64
    assert scores["settings"]["weights_sha256"] == file_sha256(weights)
    for name, fact in scores["facts"].items():
        assert row(text, name) == str(fact)
    assert json.loads(printed("evaluate", task, "--predictions", save, *data, "--json")) == scores
    assert "size 64 there, 48 now" in refused(*run[:-1], 48)
    again = json.loads(printed(*run[:-1], 48, "--force", "--json"))
    assert again["settings"]["options"]["size"] == 48
    both = refused(*run, "--predictions", save)
    assert "--predictions excludes [WEIGHTS], --save, --size, --device" in both


def test_in_a_process(tmp_path, all_weights):
    given = tiny.write_data("classify", tmp_path / "pets", count=3)
    bad = tmp_path / "pets" / "val" / "disc" / "0.png"
    bad.write_bytes(b"no image")
    weights, out = all_weights / "classify.safetensors", tmp_path / "out.npz"
    options = ["evaluate", "classify", weights, "--data", given["data"], "--save", out, "--json"]
    first = invoke(*options)
    assert first.exit_code == 0 and f"cannot decode {bad}: " in first.stderr
    scores = json.loads(first.stdout)
    assert (scores["facts"]["images"], len(scores["skipped"])) == (2, 1)
    done = command("evaluate", "classify", "--predictions", out, "--json", code=WITHOUT_MODELS)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == scores | {"skipped": [], "missing": []}


# ---- each task


@pytest.fixture
def _pairs():
    save_scene(Path("out"))
    save_wall(Path("out"), away=(3.0, 4.0))
    Path("pairs.txt").write_text(f"{pose_line()}\n{pose_line('gone')}\n{homography_line()}\n")
    Path("empty").mkdir()
    Path("out/x.json").write_text("{}")
    Path("bad.txt").write_text(f"{pose_line()}\none.png\n")
    Path("untrue.txt").write_text("a0.png a1.png\n")


MATCH = ("evaluate", "match", "--data", "pairs.txt", "--predictions", "out")


@pytest.mark.usefixtures("_pairs")
def test_match():
    result = invoke(*MATCH, "--images", "out")
    assert result.exit_code == 0, result.output
    assert result.stderr == "quadtree: 1 without predictions: gone0__gone1\n"
    text = result.stdout
    names = ("pose_pairs", "pose_missing", "pose_matches", "pose_precision", "homography_precision")
    assert [row(text, name) for name in names] == ["2", "1", "100.00", "50.00", "0.00"]
    table = {" ".join(row[:3]): row[3:] for row in cells(text) if "by" in row}
    for name in ("opencv", "poselib"):
        assert table[f"pose by {name}"][3:] == ["inf"] and row(text, f"pose_{name}_failed") == "1"
        assert table[f"homography by {name}"][-1] == "3.75"
    assert ["auc5", "auc10", "auc20", "median"] in cells(text)
    rows = cells(text)[-3:]
    assert [row[0] for row in rows] == ["a0__a1", "gone0__gone1", "wall0__wall1"]
    assert rows[2][1:] == ["homography", "100", "0.00", "3.75", "3.75"]
    options = ("--images", "out", "--json", "--side", "0", "--pose-pixels", "2", "--epipolar", "1")
    facts = json.loads(invoke(*MATCH, *options).stdout)["facts"]
    assert {"pose_pixels": 2.0, "epipolar": 1.0, "side": 0}.items() <= facts.items()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "cannot read wall0.png: No such file"),
        (["--data", "none.txt"], "none.txt"),
        (["--data", "bad.txt"], "bad.txt, line 2: "),
        (["--data", "untrue.txt"], "line 1 of the pairs, a0__a1, has no truth"),
        (["--images", "empty"], "empty/wall0.png"),
        (["--images", "out", "--side", "-5"], "side must be"),
        (["--images", "out", "--pose-pixels", "0"], "pose_pixels must be above 0, got 0"),
        (["--images", "out", "--epipolar", "nan"], "epipolar must be above 0, got nan"),
        (["--images", "out", "--report", "no/s.json"], "there is no directory 'no' to write to"),
        (["--images", "out", "--report", "empty"], "'empty' is a directory; write to another"),
        (["--images", "out", "--report", "pairs.txt"], "'pairs.txt' exists and is no report;"),
        (["--images", "out", "--report", "out/x.json"], "exists and is no report; write"),
    ],
)
@pytest.mark.usefixtures("_pairs")
def test_mistakes_with_matches(options, message):
    assert message in refused(*MATCH, *options)


def test_segment(all_weights):
    """Predictions have a place of their own, and options that other tasks do not have."""
    tiny.write_data("segment", Path("data"))
    run = ("evaluate", "segment", all_weights / "segment.safetensors", "--data", "data")
    titles, *classes = cells(printed(*run))[-3:]
    assert titles == ["class", "IoU", "%", "recall", "%", "pixels"]
    assert {line[0] for line in classes} == set(tiny.CLASSES)
    assert sorted(os.listdir("segment-predictions"))[:3] == ["0.png", "1.png", "2.png"]
    told = refused(*run, "--window", "32")
    assert "window None there, 32 now; stride None there, 21 now" in told


# ---- mistakes

PETS = ("ours.safetensors", "--data", "pets")


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("classify", [], "evaluation needs data, got no --data ROOT"),
        ("match", ["--predictions", "p.npz"], "got no --data ROOT"),
        ("classify", ["best.ckpt", "--data", "pets"], "best.safetensors"),
        ("classify", ["w.safetensors", "--data", "pets"], "there is no file 'w.safetensors'"),
        ("classify", ["--predictions", "none.npz"], "there is no file 'none.npz'"),
        ("classify", ["--predictions", "p.npz", "--size", "64"], "excludes --size; pass only one"),
        ("detect", ["--data", "pets"], "no weights of the task detect"),
        ("stereo", ["--data", "pets", "--batch", "0"], "there are no pairs"),
        ("classify", [*PETS, "--size", "0"], "size must be at least 1"),
        ("classify", [*PETS, "--batch", "0"], "batch must be at least 1"),
        ("classify", [*PETS, "--device", "abacus"], "there is no device"),
        ("classify", [*PETS, "--save", "p.txt"], "written as .npz"),
    ],
)
def test_mistakes(task, options, message, all_weights):
    Path("ours.safetensors").symlink_to(all_weights / "classify.safetensors")
    Path("ours.json").symlink_to(all_weights / "classify.json")
    tiny.write_data("classify", Path("pets"))
    tiny.write_data("detect", Path("pets"))
    write_predictions(Path("p.npz"))
    Path("best.ckpt").write_bytes(b"anything")
    assert message in refused("evaluate", task, *options)
