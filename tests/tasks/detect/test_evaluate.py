# SPDX-License-Identifier: Apache-2.0
"""Scores: by hand, as the reference programs give them; results that are reused or refused."""

import contextlib
import importlib
import io
import json

import numpy as np
import pytest
import torch

pytest.importorskip("timm", reason="models need timm")
pytest.importorskip("faster_coco_eval", reason="scores need faster-coco-eval")

from quadtree_attention.errors import CheckpointError, DataError, OptionError
from quadtree_attention.tasks.detect.coco import CocoFile, open_split
from quadtree_attention.tasks.detect.evaluate import (
    match_classes,
    predict,
    read_results,
    score,
    settings_path,
)
from quadtree_attention.tasks.detect.masks import decode_mask, encode_mask, run_lengths
from quadtree_attention.tasks.detect.predictor import Detector
from tests.tasks.detect.files import SHARED, entry, with_mask, write_split, write_weights

pytestmark = pytest.mark.usefixtures("only_reference")
KEYS = ("ap", "ap50", "ap75", "small", "medium", "large")


def result(box, value, *, image=1, category=3, **more):
    return {"image_id": image, "category_id": category, "bbox": box, "score": value, **more}


def write_results(path, results):
    path.write_text(json.dumps(results))
    return path


# ---- scores


def test_by_hand(tmp_path):
    """One class has two objects: one found exactly, above it a wrong guess, one never found.

    Precision is 1/2 up to a recall of 1/2 and 0 above: 51 of 101 points of the curve, so
    AP = 51/101 * 0.5, at every overlap. The other class is found with an overlap of 16/20 = 0.8,
    which counts at 7 of the 10 overlaps (0.50 to 0.80).
    """
    truth = write_split(
        tmp_path,
        annotations=[
            entry(1, [2, 2, 10, 10]),
            entry(2, [20, 20, 10, 8]),
            entry(3, [5, 5, 5, 4], image=2, category=7),
        ],
    )
    results = [
        result([30, 2, 5, 5], 0.9),
        result([2, 2, 10, 10], 0.8),
        result([5, 5, 4, 4], 0.7, image=2, category=7),
    ]
    found = score(write_results(tmp_path / "r.json", results), truth)
    first, second = 51 / 101 * 50, 70.0
    by_name = {c.name: (c.objects, c.box) for c in found.classes}
    assert by_name["square"] == (2, pytest.approx(first, abs=1e-9))
    assert by_name["disc"] == (1, pytest.approx(second, abs=1e-9))
    assert by_name["star"] == (0, None)
    assert found.box.ap == pytest.approx((first + second) / 2, abs=1e-9)
    assert found.box.ap50 == pytest.approx((first + 100) / 2, abs=1e-9)
    assert found.box.small == pytest.approx(found.box.ap)
    assert (found.box.medium, found.box.large, found.mask) == (None, None, None)
    assert (found.images, found.objects, found.detections) == (2, 3, 3)
    assert found.settings == {}  # another program wrote it


def test_broken_objects_do_not_count(tmp_path):
    """Boxes are compared as they were given: one that sticks out of its image is not clipped."""
    broken = [entry(2, [5, 5, 0, 4]), entry(3, [1, 1, 3, 3], category=8)]
    truth = write_split(tmp_path, annotations=[entry(1, [-10, 5, 20, 10]), *broken])
    found = score(write_results(tmp_path / "r.json", [result([-10, 5, 20, 10], 0.9)]), truth)
    assert found.box.ap == pytest.approx(100)
    assert (found.objects, found.left_out) == (1, 2)


def test_ids_of_objects_do_not_matter(tmp_path):
    """COCO's programs take a match with the object of id 0 for none."""
    boxes = [[2, 2, 10, 10], [20, 20, 10, 8]]
    path = write_results(tmp_path / "r.json", [result(box, 0.9) for box in boxes])
    for ids in ((1, 2), (0, 1), (7, 0), (-3, 10**12)):
        objects = [with_mask(entry(i, box)) for i, box in zip(ids, boxes, strict=True)]
        assert score(path, write_split(tmp_path, annotations=objects)).box.ap == pytest.approx(100)


def test_crowds_excuse_and_nothing_found(tmp_path):
    crowd = entry(2, [0, 0, 40, 15], iscrowd=1)
    truth = write_split(tmp_path, annotations=[entry(1, [2, 20, 10, 8]), crowd])
    right = result([2, 20, 10, 8], 0.5)
    inside = [result([x, 2, 8, 8], 0.9) for x in (1, 12, 25)]  # wrong, were there no crowd
    path = write_results(tmp_path / "r.json", [*inside, right])
    assert score(path, truth).box.ap == pytest.approx(100)
    alone = write_split(tmp_path, annotations=[entry(1, [2, 20, 10, 8])])
    assert score(path, alone).box.ap == pytest.approx(25)
    nothing = score(write_results(tmp_path / "n.json", []), alone)
    assert (nothing.box.ap, nothing.detections) == (0, 0)


def test_masks_are_scored_by_their_own_shape(tmp_path):
    """The box is right, half of the mask missing: an overlap of 0.5 counts once in ten."""
    square = with_mask(entry(1, [4, 4, 10, 10]))
    truth = write_split(tmp_path, annotations=[square])
    half = np.zeros((30, 40), bool)
    half[4:9, 4:14] = True
    results = [result([4, 4, 10, 10], 0.9, segmentation=encode_mask(half))]
    found = score(write_results(tmp_path / "r.json", results), truth)
    assert found.box.ap == pytest.approx(100)
    assert found.mask.ap == pytest.approx(10)
    assert found.classes[0].mask == pytest.approx(10)


def test_masks_of_results_in_all_forms(tmp_path):
    square = with_mask(entry(1, [4, 4, 10, 10]))
    truth = write_split(tmp_path, annotations=[square])
    forms = [
        square["segmentation"],
        {"size": [30, 40], "counts": run_lengths(square["segmentation"]["counts"])},
        [[4, 4, 14, 4, 14, 14, 4, 14]],
    ]
    for form in forms:
        results = [result([4, 4, 10, 10], 0.9, segmentation=form)]
        found = score(write_results(tmp_path / "r.json", results), truth)
        assert found.mask.ap == pytest.approx(100), form


def test_true_masks_that_cannot_be_used_are_told(tmp_path):
    """Without its second object, all masks are found."""
    objects = [with_mask(entry(1, [4, 4, 10, 10])), entry(2, [20, 20, 10, 8], segmentation=[[1]])]
    truth = write_split(tmp_path, annotations=[*objects, entry(3, [5, 5, 0, 4])])
    mask = objects[0]["segmentation"]
    results = [result([4, 4, 10, 10], 0.9, segmentation=mask)]
    path = write_results(tmp_path / "r.json", results)
    found = score(path, truth)
    assert found.box.ap == pytest.approx(51 / 101 * 100) and found.mask.ap == pytest.approx(100)
    (reason,) = found.no_mask  # not the one without a box, which counts for nothing
    assert "annotation 2: a polygon must have pairs" in reason
    assert (found.left_out, found.as_dict()["no_mask"]) == (1, 1)
    truth = write_split(tmp_path, annotations=objects)
    with pytest.raises(DataError, match=r"1 entries .*annotation 2: a polygon.*--strict"):
        score(path, truth, strict=True)
    boxes = write_results(tmp_path / "b.json", [result([4, 4, 10, 10], 0.9)])
    assert score(boxes, truth, strict=True).no_mask == ()


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """Results on real images: true objects moved, doubled, dropped, renamed, with masks."""
    if not (SHARED / "coco_mini").is_dir():
        pytest.skip("there is no ../shared/data/coco_mini beside the checkout")
    coco = open_split(SHARED / "coco_mini", "val", masks=True)
    rng = np.random.default_rng(0)
    results = []
    for image in coco.images:
        for a in image.annotations:
            for _ in range(int(rng.integers(0, 3))):
                mask = decode_mask(a.segmentation, image.height, image.width)
                mask = np.roll(mask, tuple(rng.integers(-4, 5, 2)), (0, 1))
                if not mask.any():
                    continue
                box = np.array(a.given) + rng.normal(0, 0.06, 4) * np.repeat(a.given[2:], 2)
                label = a.label if rng.random() < 0.9 else int(rng.integers(1, 81))
                results.append(
                    result(
                        [round(float(x), 2) for x in np.maximum(box, 0.5)],
                        round(float(rng.random()), 4),
                        image=image.id,
                        category=coco.category_of[label],
                        segmentation=encode_mask(mask),
                    )
                )
    path = tmp_path_factory.mktemp("noisy") / "results.json"
    return coco.path, write_results(path, results)


@pytest.mark.parametrize(
    ("package", "evaluator"),
    [("pycocotools", "cocoeval.COCOeval"), ("faster_coco_eval", "COCOeval_faster")],
)
@pytest.mark.parametrize("kind", ["bbox", "segm"])
def test_as_the_reference_programs(noisy, package, evaluator, kind):
    """On the same two files, read by the program itself; masks without boxes, as is usual."""
    pytest.importorskip(package, reason=f"{package} is not installed")
    module, _, name = f"{package}.{evaluator}".rpartition(".")
    coco_home = importlib.import_module(f"{package}.coco" if package == "pycocotools" else package)
    truth, results = noisy
    listed = json.loads(results.read_text())
    if kind == "segm":
        listed = [{k: v for k, v in one.items() if k != "bbox"} for one in listed]
    with contextlib.redirect_stdout(io.StringIO()):
        known = coco_home.COCO(str(truth))
        run = getattr(importlib.import_module(module), name)(known, known.loadRes(listed), kind)
        run.evaluate()
        run.accumulate()
        run.summarize()
    found = score(results, truth)
    ours = found.box if kind == "bbox" else found.mask
    assert [getattr(ours, key) / 100 for key in KEYS] == pytest.approx(run.stats[:6], abs=1e-6)
    assert 0.1 < run.stats[0] < 0.9


def test_perfect_results_have_ap_100(tmp_path):
    if not (SHARED / "bccd").is_dir():
        pytest.skip("there is no ../shared/data/bccd beside the checkout")
    coco = open_split(SHARED / "bccd", "val")
    results = [
        result(list(a.given), 1.0, image=image.id, category=coco.category_of[a.label])
        for image in coco.images
        for a in image.annotations
    ]
    found = score(write_results(tmp_path / "r.json", results), coco.path)
    assert found.box.ap == pytest.approx(100)
    assert (found.images, found.objects, found.left_out) == (87, 1137, 0)


# ---- results that cannot be scored


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{}", "holds no results: it must be a list"),
        ("[", "cannot be read as JSON"),
        ("[3]", "result 0 .* it must be an object"),
        (json.dumps([result([1, 1, 2, 2], 0.5, image=9)]), "does not list its image 9"),
        (json.dumps([result([1, 1, 2, 2], 0.5, category=4)]), "does not list its category 4"),
        (json.dumps([result([1, 1, 2], 0.5)]), "bbox of 4 finite numbers"),
        (json.dumps([result([1, 1, 2, 2], float("nan"))]), "bbox of 4 finite numbers"),
    ],
)
def test_results_that_are_none(tmp_path, content, reason):
    truth = CocoFile(write_split(tmp_path))
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(DataError, match=reason):
        read_results(tmp_path / "r.json", truth)
    with pytest.raises(DataError, match="there is no file"):
        read_results(tmp_path / "none.json", truth)


def test_masks_of_another_size_are_refused(tmp_path):
    truth = write_split(tmp_path, annotations=[with_mask(entry(1, [4, 4, 10, 10]))])
    wrong = encode_mask(np.ones((40, 30), bool))
    path = write_results(tmp_path / "r.json", [result([1, 1, 2, 2], 0.5, segmentation=wrong)])
    with pytest.raises(DataError, match=r"result 0 .* size \[40, 30\], the image is \[30, 40\]"):
        score(path, truth)


# ---- running the model


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    torch.manual_seed(0)
    write_split(root, annotations=[with_mask(entry(1, [2, 3, 10, 8], category=7))])
    write_weights(root / "w.safetensors", "mask_rcnn", detections_per_img=20)
    return root


def run(root, out, **options):
    return predict(root / "w.safetensors", open_split(root, "val"), out, device="cpu", **options)


def test_results_say_what_the_detector_finds(data, tmp_path):
    out = tmp_path / "r.json"
    done = run(data, out, data="tiny/val")
    assert (done.reused, done.skipped) == (False, ())
    written = json.loads(out.read_text())
    found = Detector(data / "w.safetensors", device="cpu", score=0.0)(data / "images/val/1.png")
    mine = [one for one in written if one["image_id"] == 1]
    assert len(mine) == len(found) > 0
    categories = {"square": 3, "disc": 7, "star": 90}
    for i, one in enumerate(mine):
        x, y, width, height = one["bbox"]
        assert np.allclose([x, y, x + width, y + height], found.boxes[i], atol=3e-3)
        assert one["category_id"] == categories[found.names[i]]
        assert (decode_mask(one["segmentation"], 30, 40) == found.masks[i]).all()
    scores = score(out, data / "annotations" / "instances_val.json")
    assert scores.mask is not None and scores.settings["data"] == "tiny/val"
    assert scores.settings["model"] == "mask_rcnn_test_quadtree"


def test_results_are_reused_only_where_nothing_changed(data, tmp_path):
    out = tmp_path / "r.json"
    run(data, out)
    written = out.stat().st_mtime_ns
    assert run(data, out).reused and out.stat().st_mtime_ns == written
    with pytest.raises(OptionError, match="other settings: size 48 there, 64 now; limit of the l"):
        run(data, out, size=64)
    assert not run(data, out, size=64, force=True).reused
    out.write_text("[]")  # no longer what the settings are of
    with pytest.raises(OptionError, match="is there already"):
        run(data, out, force=True)
    settings_path(out).unlink()
    with pytest.raises(OptionError, match=r"no r\.settings\.json beside it"):
        run(data, out)
    with pytest.raises(OptionError, match=r"written as \.json"):
        run(data, tmp_path / "r.npz")
    with pytest.raises(OptionError, match="is an input"):
        run(data, data / "annotations" / "instances_val.json")


def test_images_that_cannot_be_read_are_named(data, tmp_path):
    root = tmp_path / "copy"
    write_split(root, annotations=[entry(1, [2, 3, 10, 8])])
    (root / "images" / "val" / "2.png").write_bytes(b"broken")
    source = open_split(root, "val")
    done = predict(data / "w.safetensors", source, tmp_path / "r.json", device="cpu", batch_size=2)
    assert len(done.skipped) == 1 and "2.png" in done.skipped[0]
    again = predict(data / "w.safetensors", source, tmp_path / "r.json", device="cpu")
    assert again.reused and again.skipped == done.skipped
    with pytest.raises(OptionError, match="made without --strict and leaves out 1 images"):
        predict(data / "w.safetensors", source, tmp_path / "r.json", device="cpu", strict=True)
    with pytest.raises(DataError, match=r"2\.png.*leave out --strict"):
        predict(data / "w.safetensors", source, tmp_path / "s.json", device="cpu", strict=True)
    assert not (tmp_path / "s.json").exists()


def test_classes_are_matched_by_name(data, tmp_path):
    coco = CocoFile(data / "annotations" / "instances_val.json")
    assert match_classes(coco, Detector(data / "w.safetensors")) == {1: 3, 2: 7, 3: 90}
    names = ("cat", "star", "disc", "square")
    more = Detector(write_weights(tmp_path / "m.safetensors", classes=names))
    assert match_classes(coco, more) == {2: 90, 3: 7, 4: 3}
    fewer = Detector(write_weights(tmp_path / "f.safetensors", classes=("square", "disc")))
    with pytest.raises(CheckpointError, match="it does not know star"):
        match_classes(coco, fewer)
