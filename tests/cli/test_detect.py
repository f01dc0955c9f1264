# SPDX-License-Identifier: Apache-2.0
"""`quadtree detect`: pictures and text, JSON, results."""

import json
from pathlib import Path

import pytest
from PIL import Image

pytestmark = pytest.mark.usefixtures("only_reference", "photos")
TASK = "detect"
ALL = ("--threshold", "0")


def test_one_image_is_drawn_and_printed(run):
    result = run("photos/0.png", *ALL)
    assert result.exit_code == 0, result.output
    path, first, *objects, written = result.stdout.splitlines()
    assert path == "photos/0.png" and first.endswith(" s)")
    assert len(objects) > 0 and all(" %  " in line and "  x " in line for line in objects)
    assert written == "  written  detections.png"
    assert Image.open("detections.png").size == (760, 135 + 60)  # enlarged, below a header
    assert "nothing found" in run("photos/0.png", "--threshold", "1").stdout


def test_results_in_json_and_in_one_file(run):
    """In COCO's format, with names in place of the ids that a file of objects would give."""
    result = run("photos", *ALL, "--save", "found.json", "--json")
    assert result.exit_code == 0, result.output
    first, second = json.loads(result.stdout)
    assert (first["image"], first["width"], first["height"]) == ("photos/0.png", 60, 45)
    assert second["width"] == 61 and first["objects"][0].keys() == {"name", "label", "score", "box"}
    assert first["written"] == [] and not Path("detections").exists()
    entries = json.loads(Path("found.json").read_text())
    keys = {"image_id", "category_id", "bbox", "score", "category_name"}
    assert {e["image_id"] for e in entries} == {"0", "1"} and entries[0].keys() == keys
    run("photos/0.png", *ALL, "--save", "one.json")
    assert json.loads(Path("one.json").read_text()) == [
        e | {"image_id": "one"} for e in entries if e["image_id"] == "0"
    ]


def test_thin_images_and_thresholds(run, fails):
    for name, size in (("thin", (4000, 2)), ("tall", (1, 1400))):
        Image.new("RGB", size, "red").save(f"photos/{name}.png")
    result = run("photos", *ALL, "--out", "out")
    assert (result.exit_code, result.stdout.count("written")) == (0, 4), result.output
    assert "threshold must be in [0, 1], got 2" in fails("photos/0.png", "--threshold", "2")
