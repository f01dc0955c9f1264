# SPDX-License-Identifier: Apache-2.0
"""`quadtree evaluate`: runs, scores alone, mistakes on one line."""

import json
from pathlib import Path

import pytest

pytest.importorskip("timm", reason="models need timm")

from quadtree_attention.files import file_sha256
from tests.support.commands import START, command, invoke, refused
from tests.tasks.classify.test_predictor import CLASSES, jpeg, write_weights
from tests.tasks.classify.test_result import write_images, write_predictions

pytestmark = pytest.mark.usefixtures("only_reference")

WITHOUT_MODELS = f"""
import sys
for name in ("timm", "torchvision", "pytorch_lightning"):
    sys.modules[name] = None  # an import of it fails
{START}
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def weights() -> str:
    write_images(Path("pets"))
    return str(write_weights(Path("best.safetensors")))


def run(*options):
    return invoke("evaluate", "classify", *options)


def printed(*options) -> str:
    result = run(*options)
    assert result.exit_code == 0, result.output
    return result.stdout


def row(text: str, name: str) -> str:
    (line,) = (line for line in text.splitlines() if line.split()[:1] == [name])
    return line.removeprefix(name).strip()


# ---- in a process


def test_in_a_process(tmp_path, weights):
    bad = tmp_path / "pets" / "val" / "cat" / "0.png"
    bad.write_bytes(jpeg()[:600])
    data, out = str(tmp_path / "pets"), str(tmp_path / "out.npz")
    options = [str(tmp_path / weights), "--data", data, "--save", out, "--device", "cpu"]
    done = command("evaluate", "classify", *options, "--json", QUADTREE_BACKEND="reference")
    assert done.returncode == 0, done.stderr
    assert f"cannot decode {bad}: " in done.stderr
    scores = json.loads(done.stdout)
    assert (scores["facts"]["images"], len(scores["skipped"])) == (11, 1)
    assert 0 <= scores["mean"]["top1"] <= scores["mean"]["top5"] == 100
    assert sorted(c["name"] for c in scores["rows"]) == CLASSES
    assert scores["settings"]["weights_sha256"] == file_sha256(weights)

    again = command("evaluate", "classify", "--predictions", out, "--json", code=WITHOUT_MODELS)
    assert (again.returncode, again.stderr) == (0, "")
    alone = json.loads(again.stdout)  # of the images that have a prediction
    assert alone == scores | {"skipped": [], "missing": []}


def test_mistake_in_a_process(tmp_path):
    path = str(tmp_path / "none.safetensors")
    Path("pets/val/ant").mkdir(parents=True)
    done = command("evaluate", "classify", path, "--data", str(tmp_path / "pets"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("quadtree: there are no images in")
    write_images(tmp_path / "cars")
    done = command("evaluate", "classify", path, "--data", str(tmp_path / "cars"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"quadtree: there is no file {path!r}; check the path\n"


# ---- what is printed


def test_text(weights):
    text = printed(weights, "--data", "pets", "--device", "cpu", "--size", "64", "--save", "p.npz")
    assert (row(text, "images"), row(text, "top5")) == ("12", "100.00")
    titles, *classes = [line.split() for line in text.splitlines()[-5:]]
    assert titles == ["class", "images", "top-1", "%"]
    assert sorted(line[0] for line in classes) == CLASSES
    shown = [float(line[-1]) for line in classes]
    assert shown == sorted(shown)  # worst first


def test_scores_by_hand():
    write_predictions(Path("p.npz"))
    text = printed("--predictions", "p.npz")
    assert row(text, "top1") == "66.67"
    assert [row(text, name).split() for name in "xyz"] == [
        ["2", "50.00"],
        ["3", "66.67"],
        ["1", "100.00"],
    ]


# ---- files that are there


def test_predictions_are_used_again_or_refused(weights):
    options = [weights, "--data", "pets", "--device", "cpu", "--save", "p.npz"]
    first = printed(*options)
    assert printed(*options) == first
    other = ("evaluate", "classify", *options, "--size", "64")
    assert "size None there, 64 now" in refused(*other)
    assert row(printed(*other[2:], "--force"), "images") == "12"


def test_strict(weights):
    Path("pets/val/cat/notes.txt").write_text("hello")
    options = (weights, "--data", "pets", "--device", "cpu", "--save", "p.npz")
    assert "1 files are no images" in refused("evaluate", "classify", *options, "--strict")
    result = run(*options)
    assert result.exit_code == 0
    assert "skipped 1: " in result.stderr and "notes.txt" in result.stderr


def test_other_splits(weights):
    Path("pets/val").rename("pets/test")
    options = (weights, "--data", "pets", "--save", "p.npz")
    assert row(printed(*options, "--split", "test"), "images") == "12"
    assert "there is no folder pets/val" in refused("evaluate", "classify", *options)


# ---- mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "evaluating needs the data, got no --data ROOT"),
        (["best.safetensors"], "got no --data"),
        (["best.safetensors", "--data", "nothing"], "there is no folder nothing"),
        (["--predictions", "none.npz"], "there is no file 'none.npz'"),
        (["best.safetensors", "--predictions", "p.npz"], "WEIGHTS"),
        (["--predictions", "p.npz", "--size", "64", "--force"], "--size"),
        (["best.safetensors", "--data", "pets", "--size", "0"], "size must be at least 1"),
        (["best.safetensors", "--data", "pets", "--batch", "0"], "batch must be at least 1"),
        (["best.safetensors", "--data", "pets", "--dtype", "int8"], "dtype"),
        (["best.safetensors", "--data", "pets", "--device", "abacus"], "there is no device"),
        (["best.safetensors", "--data", "pets", "--save", "p.txt"], "written as .npz"),
        (["best.ckpt", "--data", "pets"], "best.safetensors"),
    ],
)
def test_mistakes(tmp_path, options, message):
    write_images(tmp_path / "pets", per_class=1)
    write_predictions(Path("p.npz"))
    if "best.ckpt" in options:
        Path("best.ckpt").write_bytes(b"anything")
    else:
        write_weights(Path("best.safetensors"))
    assert message in refused("evaluate", "classify", *options)


def test_other_classes(weights, tmp_path):
    write_images(tmp_path / "cars", classes=["bus", "van"])
    message = refused("evaluate", "classify", weights, "--data", "cars")
    assert "it does not know bus, van" in message


def test_help():
    text = printed("--help")
    assert "Examples:\n    quadtree evaluate classify runs/" in text
    assert "classify  Measure the accuracy" in invoke("evaluate", "--help").stdout
