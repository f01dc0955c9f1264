# SPDX-License-Identifier: Apache-2.0
"""`quadtree detect`: pictures and text, folders, images that cannot be read, JSON, results."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("timm", reason="models need timm")

from tests.support.commands import invoke, refused
from tests.tasks.detect.files import write_weights

pytestmark = pytest.mark.usefixtures("only_reference")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    torch.manual_seed(1)
    return write_weights(tmp_path_factory.mktemp("weights") / "w.safetensors")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    for i in range(2):
        noise = np.random.default_rng(i).integers(0, 255, (45, 60 + i, 3), dtype=np.uint8)
        Image.fromarray(noise).save(f"photos/{i}.png")
    Path("bad.jpg").write_bytes(b"\xff\xd8 no more")


@pytest.fixture
def options(weights):
    return ["--weights", weights, "--device", "cpu", "--threshold", 0]


def test_one_image_is_drawn_and_printed(options):
    result = invoke("detect", "photos/0.png", *options)
    assert result.exit_code == 0, result.output
    path, first, *objects, written = result.stdout.splitlines()
    assert path == "photos/0.png" and first.endswith(" s)")
    assert len(objects) > 0 and all(" %  " in line and "  x " in line for line in objects)
    assert written == "  written  detections.png"
    assert Image.open("detections.png").size == (760, 135 + 60)  # enlarged, below a header


def test_nothing_found(options):
    result = invoke("detect", "photos/0.png", *options, "--threshold", 1)
    assert "nothing found" in result.stdout


def test_json(options):
    result = invoke("detect", "photos", *options, "--json")
    first, second = json.loads(result.stdout)
    assert (first["image"], first["width"], first["height"]) == ("photos/0.png", 60, 45)
    assert second["width"] == 61
    assert first["objects"][0].keys() == {"name", "label", "score", "box"}
    assert first["written"] == [] and not Path("detections").exists()


def test_results_of_many_images_in_one_file(options):
    """In COCO's format, with names in place of the ids that a file of objects would give."""
    result = invoke("detect", "photos", *options, "--save", "found.json")
    assert result.exit_code == 0, result.output
    entries = json.loads(Path("found.json").read_text())
    keys = {"image_id", "category_id", "bbox", "score", "category_name"}
    assert {e["image_id"] for e in entries} == {"0", "1"} and entries[0].keys() == keys
    again = invoke("detect", "photos", *options, "--save", "found.json")
    assert "2 there already" in again.stdout
    invoke("detect", "photos/0.png", *options, "--save", "one.json")
    assert json.loads(Path("one.json").read_text()) == [
        e | {"image_id": "one"} for e in entries if e["image_id"] == "0"
    ]


def test_several_images_go_to_a_folder_and_bad_ones_are_named(options):
    result = invoke("detect", "photos", "bad.jpg", "none.png", *options, "--out", "out")
    assert result.exit_code == 1
    assert sorted(p.name for p in Path("out").iterdir()) == ["0.png", "1.png"]
    complaints = result.stderr.splitlines()
    assert len(complaints) == 2
    assert complaints[0].startswith("quadtree: cannot decode bad.jpg")
    assert complaints[1].startswith("quadtree: cannot read none.png")
    assert result.stdout.count("written") == 2


def test_thin_images_do_not_end_the_run(options):
    for name, size in (("thin", (4000, 2)), ("tall", (1, 1400))):
        Image.new("RGB", size, "red").save(f"{name}.png")
    result = invoke("detect", "thin.png", "tall.png", "photos/0.png", *options, "--out", "out")
    assert (result.exit_code, result.stdout.count("written")) == (0, 3), result.output
    assert sorted(p.name for p in Path("out").iterdir()) == ["0.png", "tall.png", "thin.png"]


def test_refusals(options):
    message = refused("detect", "photos/0.png")
    assert "no weights of the task detect come with the package" in message
    assert "must be a folder for 2 images" in refused(
        "detect", "photos", *options, "--out", "a.png"
    )
    assert "is an input" in refused("detect", "photos", *options, "--out", "photos")
    one = ("detect", "photos/0.png", *options)
    assert "is an input" in refused(*one, "--out", "photos/0.png")
    assert "pictures are written as" in refused(*one, "--out", "a.gif")
    assert "threshold must be in [0, 1], got 2" in refused(*one, "--threshold", 2)
    assert "results are written as .json" in refused(*one, "--save", "a.npz")
