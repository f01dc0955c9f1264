# SPDX-License-Identifier: Apache-2.0
"""`quadtree evaluate detect`: results and scores, scores of a file alone, refusals."""

import json
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("timm", reason="models need timm")
pytest.importorskip("typer", reason="the command needs typer")
pytest.importorskip("faster_coco_eval", reason="scores need faster-coco-eval")

from quadtree_attention.cli.evaluate_detect import DetectRequest, run
from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.files import file_sha256
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


def evaluate(capsys, *, as_json=False, **options):
    run(DetectRequest(**{"data": Path("cells"), **options}), as_json=as_json)
    return capsys.readouterr()


def row(text, name):
    (line,) = (line for line in text.splitlines() if line.startswith(f"{name:11}  "))
    return line.removeprefix(name).strip()


def test_text_then_scores_of_the_file_alone(weights, capsys):
    shown = evaluate(capsys, weights=weights, device="cpu")
    assert shown.err.startswith("quadtree: 1 entries cannot be used as they are (1 empty box): ")
    text = shown.out
    assert row(text, "model") == f"mask_rcnn_test_quadtree, sha256 {file_sha256(weights)[:12]}"
    assert row(text, "data") == "cells/val, 2 images, 2 objects"
    assert row(text, "input") == "shorter side 48 pixels, longer at most 64"
    assert row(text, "results") == "results.json"
    table = [line.split() for line in text.splitlines()]
    assert ["AP", "AP50", "AP75", "AP", "small", "AP", "medium", "AP", "large"] in table
    assert [line[0] for line in table if len(line) == 7] == ["box", "mask"]
    assert text.split("AP by class, box and mask\n")[1].count(" objects  ") == 2

    written = Path("results.json").read_bytes()
    again = evaluate(capsys, weights=weights, device="cpu", as_json=True)
    assert "holds these results already; --force makes them again" in again.err
    alone = evaluate(capsys, predictions=Path("results.json"), as_json=True)
    assert json.loads(alone.out) == json.loads(again.out)
    assert Path("results.json").read_bytes() == written
    assert [c["name"] for c in json.loads(alone.out)["classes"]] == ["square", "disc", "star"]


def test_results_of_another_program(capsys):
    found = {"image_id": 1, "category_id": 3, "bbox": [2, 3, 10, 8], "score": 0.9}
    Path("theirs.json").write_text(json.dumps([found]))
    text = evaluate(capsys, predictions=Path("theirs.json")).out
    assert row(text, "data") == "2 images, 2 objects"
    (box,) = (line.split() for line in text.splitlines() if line.startswith("box "))
    assert box[1:] == ["50.00", "50.00", "50.00", "50.00", "-", "-"]
    assert "100.00      1 objects  square" in text and "  0.00      1 objects  disc" in text


def test_a_file_is_scored_without_the_images(capsys):
    found = {"image_id": 1, "category_id": 3, "bbox": [2, 3, 10, 8], "score": 0.9}
    found["segmentation"] = [[2, 3, 12, 3, 12, 11, 2, 11]]
    Path("theirs.json").write_text(json.dumps([found]))
    shutil.rmtree("cells/images")
    scores = json.loads(evaluate(capsys, predictions=Path("theirs.json"), as_json=True).out)
    by_name = {c["name"]: (c["box"], c["mask"]) for c in scores["classes"]}
    assert by_name["square"] == (pytest.approx(100), pytest.approx(100))
    with pytest.raises(DataError, match=r"has no width or no height.*--strict"):
        evaluate(capsys, predictions=Path("theirs.json"), strict=True)
    objects = [with_mask(entry(1, [2, 3, 10, 8])), entry(2, [20, 9, 7, 8])]
    write_split("cells", annotations=objects)
    shown = evaluate(capsys, predictions=Path("theirs.json"))
    assert "1 objects count for boxes alone, as their masks cannot be used: " in shown.err
    assert "annotation 2: there is no segmentation" in shown.err
    with pytest.raises(DataError, match=r"annotation 2: there is no segmentation.*--strict"):
        evaluate(capsys, predictions=Path("theirs.json"), strict=True)


def test_refusals(weights, capsys):
    with pytest.raises(OptionError, match="got no --data ROOT"):
        evaluate(capsys, weights=weights, data=None)
    with pytest.raises(OptionError, match="needs WEIGHTS, got none; train some"):
        evaluate(capsys)
    with pytest.raises(OptionError, match="got WEIGHTS, --size as well"):
        evaluate(capsys, weights=weights, size=32, predictions=Path("results.json"))
    with pytest.raises(DataError, match="no JSON file of the test objects"):
        evaluate(capsys, weights=weights, split="test")
    with pytest.raises(DataError, match=r"has no width or no height.*--strict"):
        evaluate(capsys, weights=weights, strict=True)
    assert not Path("results.json").exists()
