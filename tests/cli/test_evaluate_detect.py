# SPDX-License-Identifier: Apache-2.0
"""`quadtree evaluate detect`: results and scores, scores of a file alone, refusals."""

import json
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("timm", reason="models need timm")
pytest.importorskip("faster_coco_eval", reason="scores need faster-coco-eval")

from quadtree_attention.files import file_sha256
from tests.support.commands import invoke, refused
from tests.tasks.detect.files import entry, with_mask, write_split, write_weights

pytestmark = pytest.mark.usefixtures("only_reference")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("weights")
    return write_weights(folder / "w.safetensors", "mask_rcnn", detections_per_img=10)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    objects = [with_mask(entry(1, [2, 3, 10, 8])), with_mask(entry(2, [20, 9, 7, 8], category=7))]
    write_split("cells", annotations=[*objects, entry(3, [1, 1, 0, 0])])


def evaluate(*options, code=0):
    result = invoke("evaluate", "detect", *options)
    assert result.exit_code == code, result.output
    return result


def row(text, name):
    (line,) = (line for line in text.splitlines() if line.split()[:1] == [name])
    return line.removeprefix(name).strip()


def test_text_then_scores_of_the_file_alone(weights):
    run = (weights, "--data", "cells", "--device", "cpu", "--save", "results.json")
    shown = evaluate(*run)
    assert "annotation 3: the box 1, 1, 0, 0 has no width or no height" in shown.stderr
    text = shown.stdout
    assert [row(text, name) for name in ("images", "objects", "left_out")] == ["2", "2", "1"]
    assert row(text, "ap") and row(text, "mask_ap") and row(text, "mask_large") == "-"
    table = [line.split() for line in text.splitlines()]
    assert table[-4] == ["class", "objects", "AP", "mask", "AP"]
    assert {line[0] for line in table[-3:]} == {"square", "disc", "star"}

    written = Path("results.json").read_bytes()
    again = evaluate(*run, "--json")
    alone = evaluate("--predictions", "results.json", "--data", "cells", "--json")
    assert json.loads(alone.stdout) == json.loads(again.stdout)
    assert Path("results.json").read_bytes() == written
    settings = json.loads(alone.stdout)["settings"]
    assert settings["model"] == "mask_rcnn_test_quadtree"
    assert settings["weights_sha256"] == file_sha256(weights)


def test_results_of_another_program():
    found = {"image_id": 1, "category_id": 3, "bbox": [2, 3, 10, 8], "score": 0.9}
    Path("theirs.json").write_text(json.dumps([found]))
    text = evaluate("--predictions", "theirs.json", "--data", "cells").stdout
    names = ("ap", "ap50", "ap75", "small", "medium", "large")
    assert [row(text, name) for name in names] == ["50.00", "50.00", "50.00", "50.00", "-", "-"]
    assert row(text, "square").split() == ["1", "100.00"]
    assert row(text, "disc").split() == ["1", "0.00"]


def test_a_file_is_scored_without_the_images():
    found = {"image_id": 1, "category_id": 3, "bbox": [2, 3, 10, 8], "score": 0.9}
    found["segmentation"] = [[2, 3, 12, 3, 12, 11, 2, 11]]
    Path("theirs.json").write_text(json.dumps([found]))
    shutil.rmtree("cells/images")
    run = ("--predictions", "theirs.json", "--data", "cells")
    scores = json.loads(evaluate(*run, "--json").stdout)
    by_name = {c["name"]: (c["box"], c["mask"]) for c in scores["rows"]}
    assert by_name["square"] == (pytest.approx(100), pytest.approx(100))
    message = refused("evaluate", "detect", *run, "--strict")
    assert "has no width or no height" in message and "--strict" in message
    objects = [with_mask(entry(1, [2, 3, 10, 8])), entry(2, [20, 9, 7, 8])]
    write_split("cells", annotations=objects)
    shown = evaluate(*run)
    assert "counts for boxes alone: " in shown.stderr
    assert "annotation 2: there is no segmentation" in shown.stderr
    message = refused("evaluate", "detect", *run, "--strict")
    assert "annotation 2: there is no segmentation" in message and "--strict" in message


def test_refusals(weights):
    run = ("evaluate", "detect")
    assert "got no --data ROOT" in refused(*run, weights)
    assert "no weights of the task detect" in refused(*run, "--data", "cells")
    both = refused(*run, weights, "--data", "cells", "--size", 32, "--predictions", "results.json")
    assert "--size" in both and "WEIGHTS" in both
    message = refused(*run, weights, "--data", "cells", "--split", "test")
    assert "no JSON file of the test objects" in message
    assert "has no width or no height" in refused(*run, weights, "--data", "cells", "--strict")
