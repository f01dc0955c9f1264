# SPDX-License-Identifier: Apache-2.0
"""`quadtree evaluate segment`: what is printed and written, mistakes on one line."""

import json
from pathlib import Path

import pytest

pytest.importorskip("timm", reason="models need timm")
typer_testing = pytest.importorskip("typer.testing", reason="the command needs typer")

from quadtree_attention.cli.main import app  # noqa: E402
from tests.tasks.segment.files import write_set, write_weights  # noqa: E402

pytestmark = pytest.mark.usefixtures("only_reference")
BASE = ("best.safetensors", "--data", "data", "--device", "cpu")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return write_weights(tmp_path_factory.mktemp("weights") / "best.safetensors")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, weights, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_set(Path("data"), count=2, splits=("val",))
    for path in (weights, weights.with_suffix(".json")):
        Path(path.name).symlink_to(path)


def run(*options: str):
    arguments = ["evaluate", "segment", *options]
    return typer_testing.CliRunner().invoke(app, arguments, prog_name="quadtree")


def refused(*options: str) -> str:
    result = run(*options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("quadtree: ") and result.stderr.count("\n") == 1
    return result.stderr


def test_text_then_the_same_scores_from_the_files():
    first = run(*BASE, "--save", "out")
    assert (first.exit_code, first.stderr) == (0, "")
    head, table = first.stdout.split("\n\n")
    rows = dict(line.split(maxsplit=1) for line in head.splitlines())
    assert list(rows) == ["images", "miou", "accuracy", "class_accuracy"] and rows["images"] == "2"
    titles, *classes = table.splitlines()
    assert titles.split() == ["class", "IoU", "%", "recall", "%", "pixels"]
    assert {line.split()[0] for line in classes} == {"sky", "road", "car"}

    scores = json.loads(run("--predictions", "out", "--data", "data", "--json").stdout)
    assert rows["miou"] == f"{scores['mean']['miou']:.2f}"
    listed = {line.split()[0]: float(line.split()[1]) for line in classes}
    assert listed == pytest.approx({r["name"]: r["iou"] for r in scores["rows"]}, abs=0.006)

    again = run(*BASE, "--save", "out", "--json")
    assert json.loads(again.stdout) == scores
    told = refused(*BASE, "--save", "out", "--window", "32")
    assert "window None there, 32 now; stride None there, 21 now" in told
    assert run(*BASE, "--save", "out", "--window", "32", "--force").exit_code == 0


def test_bad_images_are_told():
    Path("data/images/val/0.png").write_bytes(b"hello")
    Path("data/labels/val/2.png").write_bytes(b"hello")
    result = run(*BASE)
    assert result.exit_code == 0
    skipped, missing = result.stderr.splitlines()
    assert skipped.startswith("quadtree: skipped 2: data/labels/val/2.png: has no image in")
    assert "; cannot decode data/images/val/0.png" in skipped
    assert missing == "quadtree: 1 without predictions: 0"
    assert Path("segment-predictions/1.png").exists()
    Path("data/labels/val/2.png").unlink()
    strict = run(*BASE, "--strict", "--save", "other")
    assert strict.exit_code == 2 and "mend it, or leave out --strict" in strict.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "evaluating needs the data, got no --data"),
        (("--data", "data"), "no weights of the task segment come with the package"),
        (("--data", "nowhere", "best.safetensors"), "there is no folder nowhere"),
        (
            ("--data", "data", "--predictions", "nowhere"),
            "there is no folder 'nowhere' of predictions",
        ),
        ((*BASE, "--predictions", "out"), "--predictions excludes [WEIGHTS], --device"),
        ((*BASE, "--split", "test"), "there is no folder data/images/test"),
    ],
)
def test_mistakes(options, message):
    assert message in refused(*options)
