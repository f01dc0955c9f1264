# SPDX-License-Identifier: Apache-2.0
"""`quadtree evaluate`: runs, scores alone, mistakes on one line."""

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("timm", reason="models need timm")
typer_testing = pytest.importorskip("typer.testing", reason="the command needs typer")

from quadtree_attention.cli.main import app  # noqa: E402
from quadtree_attention.files import file_sha256  # noqa: E402
from tests.cli.test_info import START, command  # noqa: E402
from tests.tasks.classify.test_evaluate import write_images, write_predictions  # noqa: E402
from tests.tasks.classify.test_predictor import CLASSES, jpeg, write_weights  # noqa: E402

pytestmark = pytest.mark.usefixtures("only_reference")

WITHOUT_MODELS = f"""
import sys
for name in ("timm", "torchvision", "PIL", "pytorch_lightning"):
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


def run(*options: str):
    arguments = ["evaluate", "classify", *options]
    return typer_testing.CliRunner().invoke(app, arguments, prog_name="quadtree")


def printed(*options: str) -> str:
    result = run(*options)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*options: str) -> str:
    """The one line that says why not; no file appears."""
    before = sorted(os.listdir())
    result = run(*options)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith("quadtree: ") and result.stderr.count("\n") == 1
    assert sorted(os.listdir()) == before
    return result.stderr


def row(text: str, name: str) -> str:
    (line,) = (line for line in text.splitlines() if line.startswith(f"{name:11}  "))
    return line.removeprefix(name).strip()


# ---- in a process


def test_in_a_process(tmp_path, weights):
    bad = tmp_path / "pets" / "val" / "cat" / "0.png"
    bad.write_bytes(jpeg()[:600])
    data, out = str(tmp_path / "pets"), str(tmp_path / "out.npz")
    options = [str(tmp_path / weights), "--data", data, "--out", out, "--device", "cpu"]
    done = command("evaluate", "classify", *options, "--json", QUADTREE_BACKEND="reference")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"quadtree: skipped: cannot decode {bad}: ")
    assert done.stderr.count("\n") == 1
    scores = json.loads(done.stdout)
    assert (scores["images"], scores["skipped"]) == (11, 1)
    assert 0 <= scores["top1"] <= scores["top5"] == 100
    assert [c["name"] for c in scores["classes"]] == CLASSES
    assert scores["settings"]["weights_sha256"] == file_sha256(weights)
    assert scores["settings"]["data"] == "pets/val"

    again = command("evaluate", "classify", "--predictions", out, "--json", code=WITHOUT_MODELS)
    assert (again.returncode, again.stderr) == (0, "")
    assert json.loads(again.stdout) == scores


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
    text = printed(weights, "--data", "pets", "--device", "cpu", "--size", "64")
    assert row(text, "model") == f"test_quadtree, sha256 {file_sha256(weights)[:12]}"
    assert row(text, "data") == "pets/val, 12 images, 0 skipped"
    assert row(text, "input") == "64 pixels, the middle 90 % of the image"
    assert row(text, "top-5") == "100.00 %"
    assert row(text, "throughput").endswith("images/s with reading, cpu, float32")
    assert row(text, "predictions") == "predictions.npz"
    listed = text.split("top-1 by class\n")[1].splitlines()
    assert sorted(line.split()[-1] for line in listed) == CLASSES
    assert [float(line.split()[0]) for line in listed] == sorted(
        float(line.split()[0]) for line in listed
    )


def test_scores_by_hand():
    write_predictions(Path("p.npz"))
    text = printed("--predictions", "p.npz")
    assert row(text, "top-1") == "66.67 %"
    assert row(text, "data") == "pets/val, 6 images, 2 skipped"
    assert text.splitlines()[-3:] == [
        "   50.00 %      2 images  x",
        "   66.67 %      3 images  y",
        "  100.00 %      1 images  z",
    ]


def test_output_without_the_characters(tmp_path):
    write_predictions(Path("p.npz"))
    Path("ä.npz").write_bytes(Path("p.npz").read_bytes())
    options = ["--predictions", str(tmp_path / "ä.npz")]
    done = command("evaluate", "classify", *options, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "?.npz" in done.stdout


# ---- files that are there


def test_predictions_are_used_again_or_refused(weights):
    options = [weights, "--data", "pets", "--device", "cpu"]
    first = printed(*options)
    again = run(*options)
    assert again.stdout == first
    assert again.stderr == (
        "quadtree: predictions.npz holds these predictions already; --force makes them again\n"
    )
    assert "image size 48 there, 64 now" in refused(*options, "--size", "64")
    assert "64 pixels" in printed(*options, "--size", "64", "--force")


def test_strict(weights):
    Path("pets/val/cat/notes.txt").write_text("hello")
    assert "1 files are no images" in refused(weights, "--data", "pets", "--strict")
    result = run(weights, "--data", "pets", "--device", "cpu")
    assert result.exit_code == 0
    assert "left out 1 files: " in result.stderr and "notes.txt" in result.stderr


def test_other_splits(weights):
    Path("pets/val").rename("pets/test")
    assert row(printed(weights, "--data", "pets", "--split", "test"), "data").startswith(
        "pets/test"
    )
    assert "there is no folder pets/val" in refused(weights, "--data", "pets")


# ---- mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "needs WEIGHTS and --data ROOT, got no WEIGHTS; or score a file"),
        (["best.safetensors"], "got no --data"),
        (["best.safetensors", "--data", "nothing"], "there is no folder nothing"),
        (["--predictions", "none.npz"], "there is no file 'none.npz'"),
        (["best.safetensors", "--predictions", "p.npz"], "got WEIGHTS as well"),
        (["--predictions", "p.npz", "--size", "64", "--force"], "got --size, --force as well"),
        (["best.safetensors", "--data", "pets", "--size", "0"], "image_size must be at least 1"),
        (["best.safetensors", "--data", "pets", "--batch-size", "0"], "batch_size must be at"),
        (["best.safetensors", "--data", "pets", "--dtype", "int8"], "float32 or bfloat16, got"),
        (["best.safetensors", "--data", "pets", "--device", "abacus"], "there is no device"),
        (["best.safetensors", "--data", "pets", "--out", "p.txt"], "written as .npz"),
        (["best.ckpt", "--data", "pets"], "pass the run's best.safetensors"),
    ],
)
def test_mistakes(tmp_path, options, message):
    write_images(tmp_path / "pets", per_class=1)
    write_predictions(Path("p.npz"))
    if "best.ckpt" in options:
        Path("best.ckpt").write_bytes(b"anything")
    else:
        write_weights(Path("best.safetensors"))
    assert message in refused(*options)


def test_other_classes(weights, tmp_path):
    write_images(tmp_path / "cars", classes=["bus", "van"])
    assert "it does not know bus, van" in refused(weights, "--data", "cars")


def test_help():
    text = printed("--help")
    assert "Examples:\n    quadtree evaluate classify runs/" in text
    group = typer_testing.CliRunner().invoke(app, ["evaluate", "--help"], prog_name="quadtree")
    assert "classify  Measure the accuracy" in group.stdout
