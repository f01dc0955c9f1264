# SPDX-License-Identifier: Apache-2.0
"""Scores: by hand, as the reference programs give them; results that are reused or refused."""

import contextlib
import importlib
import io
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.tasks import evaluate
from quadtree_attention.tasks.detect import TASK
from quadtree_attention.tasks.detect.metrics import DetectMetric
from quadtree_attention.tasks.detect.predictor import Detector
from quadtree_attention.tasks.detect.readers import CocoFile, open_source
from quadtree_attention.tasks.detect.result import DetectionsCodec
from quadtree_attention.tasks.detect.rle import decode_mask, encode_mask, run_lengths
from quadtree_attention.tasks.evaluation import score as score_store
from quadtree_attention.tasks.store import Store
from tests.support import raises
from tests.tasks.detect.files import SHARED, entry, with_mask, write_split, write_weights

pytestmark = pytest.mark.usefixtures("only_reference")
KEYS = ("ap", "ap50", "ap75", "small", "medium", "large")
TALL = encode_mask(np.ones((40, 30), bool))  # where images have 40x30 pixels


def score(path, truth, *, strict=False):
    source = CocoFile(truth, masks=None, strict=strict)
    return score_store(TASK, source, Store.open(path, TASK, source), strict=strict)


def by_class(scores):
    return {row["name"]: row for row in scores.rows}


def result(box, value, *, image=1, category=3, **more):
    return {"image_id": image, "category_id": category, "bbox": box, "score": value, **more}


def write_results(path, results):
    path.write_text(json.dumps(results))
    return path


def test_by_hand(tmp_path):
    """One class has two objects: one found exactly, above it a wrong guess, one never found.

    Precision is 1/2 up to a recall of 1/2 and 0 above: 51 of 101 points of the curve, so
    AP = 51/101 * 0.5, at every overlap. The other class is found with an overlap of 16/20 = 0.8,
    which counts at 7 of the 10 overlaps (0.50 to 0.80).
    """
    objects = [entry(1, [2, 2, 10, 10]), entry(2, [20, 20, 10, 8])]
    objects.append(entry(3, [5, 5, 5, 4], image=2, category=7))
    truth = write_split(tmp_path, annotations=objects)
    results = [result([30, 2, 5, 5], 0.9), result([2, 2, 10, 10], 0.8)]
    results.append(result([5, 5, 4, 4], 0.7, image=2, category=7))
    found = score(write_results(tmp_path / "r.json", results), truth)
    first, second = 51 / 101 * 50, 70.0
    assert found.rows == [  # worst first
        {"name": "square", "objects": 2, "box": pytest.approx(first, abs=1e-9)},
        {"name": "disc", "objects": 1, "box": pytest.approx(second, abs=1e-9)},
        {"name": "star", "objects": 0, "box": None},
    ]
    assert found.mean["ap"] == pytest.approx((first + second) / 2, abs=1e-9)
    assert found.mean["ap50"] == pytest.approx((first + 100) / 2, abs=1e-9)
    assert found.mean["small"] == pytest.approx(found.mean["ap"])
    assert (found.mean["medium"], found.mean["large"]) == (None, None)
    assert "mask_ap" not in found.mean
    counts = {"images": 2, "objects": 3, "detections": 3, "left_out": 0, "no_mask": 0}
    assert found.facts == counts and found.missing == []
    assert found.settings is None  # another program wrote it
    text = [line.split() for line in found.to_text().splitlines()]
    assert ["medium", "-"] in text and text[-4:-2] == [
        ["class", "objects", "AP"],
        ["square", "2", "25.25"],
    ]


def test_objects_that_do_not_count_and_ids_that_do_not_matter(tmp_path):
    """Boxes are compared as they were given: one that sticks out of its image is not clipped."""
    broken = [entry(2, [5, 5, 0, 4]), entry(3, [1, 1, 3, 3], category=8)]
    truth = write_split(tmp_path, annotations=[entry(1, [-10, 5, 20, 10]), *broken])
    found = score(write_results(tmp_path / "r.json", [result([-10, 5, 20, 10], 0.9)]), truth)
    assert found.mean["ap"] == pytest.approx(100)
    assert (found.facts["objects"], found.facts["left_out"]) == (1, 2)
    # COCO's programs take a match with the object of id 0 for none.
    boxes = [[2, 2, 10, 10], [20, 20, 10, 8]]
    path = write_results(tmp_path / "r.json", [result(box, 0.9) for box in boxes])
    for ids in ((1, 2), (0, 1), (7, 0), (-3, 10**12)):
        objects = [with_mask(entry(i, box)) for i, box in zip(ids, boxes, strict=True)]
        found = score(path, write_split(tmp_path, annotations=objects))
        assert found.mean["ap"] == pytest.approx(100)


def test_crowds_excuse_and_nothing_found(tmp_path):
    crowd = entry(2, [0, 0, 40, 15], iscrowd=1)
    truth = write_split(tmp_path, annotations=[entry(1, [2, 20, 10, 8]), crowd])
    right = result([2, 20, 10, 8], 0.5)
    inside = [result([x, 2, 8, 8], 0.9) for x in (1, 12, 25)]  # wrong, were there no crowd
    path = write_results(tmp_path / "r.json", [*inside, right])
    assert score(path, truth).mean["ap"] == pytest.approx(100)
    alone = write_split(tmp_path, annotations=[entry(1, [2, 20, 10, 8])])
    assert score(path, alone).mean["ap"] == pytest.approx(25)
    nothing = score(write_results(tmp_path / "n.json", []), alone, strict=True)
    assert (nothing.mean["ap"], nothing.facts["detections"], nothing.missing) == (0, 0, [])


def test_masks_are_scored_by_their_own_shape_in_all_forms(tmp_path):
    """The box is right, half of the mask missing: an overlap of 0.5 counts once in ten."""
    square = with_mask(entry(1, [4, 4, 10, 10]))
    truth = write_split(tmp_path, annotations=[square])
    half = np.zeros((30, 40), bool)
    half[4:9, 4:14] = True
    runs = {"size": [30, 40], "counts": run_lengths(square["segmentation"]["counts"])}
    polygon = [[4, 4, 14, 4, 14, 14, 4, 14]]
    for form in (encode_mask(half), square["segmentation"], runs, polygon):
        results = [result([4, 4, 10, 10], 0.9, segmentation=form)]
        found = score(write_results(tmp_path / "r.json", results), truth)
        expected = pytest.approx(10 if form == encode_mask(half) else 100)
        assert found.mean["ap"] == pytest.approx(100) and found.mean["mask_ap"] == expected
        assert by_class(found)["square"]["mask"] == expected


def test_true_masks_that_cannot_be_used_are_told(tmp_path):
    """Without its second object, all masks are found."""
    objects = [with_mask(entry(1, [4, 4, 10, 10])), entry(2, [20, 20, 10, 8], segmentation=[[1]])]
    truth = write_split(tmp_path, annotations=[*objects, entry(3, [5, 5, 0, 4])])
    mask = objects[0]["segmentation"]
    results = [result([4, 4, 10, 10], 0.9, segmentation=mask)]
    path = write_results(tmp_path / "r.json", results)
    found = score(path, truth)
    assert found.mean["ap"] == pytest.approx(51 / 101 * 100)
    assert found.mean["mask_ap"] == pytest.approx(100)
    (reason,) = found.skipped  # not the one without a box, which counts for nothing
    assert "annotation 2: a polygon must have pairs" in reason
    assert "counts for boxes alone: " in reason
    assert (found.facts["left_out"], found.facts["no_mask"]) == (1, 1)
    truth = write_split(tmp_path, annotations=objects)
    with pytest.raises(DataError, match=r"1 entries .*annotation 2: a polygon.*--strict"):
        score(path, truth, strict=True)
    boxes = write_results(tmp_path / "b.json", [result([4, 4, 10, 10], 0.9)])
    assert score(boxes, truth, strict=True).skipped == []


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """Results on real images: true objects moved, doubled, dropped, renamed, with masks."""
    if not (SHARED / "coco_mini").is_dir():
        pytest.skip("there is no ../shared/data/coco_mini beside the checkout")
    coco = open_source(SHARED / "coco_mini", split="val", masks=True)
    rng = np.random.default_rng(0)
    results = []
    for image in coco.truths:
        for a in (a for a in image.annotations for _ in range(int(rng.integers(0, 3)))):
            mask = decode_mask(a.segmentation, image.height, image.width)
            mask = np.roll(mask, tuple(rng.integers(-4, 5, 2)), (0, 1))
            if not mask.any():
                continue
            box = np.array(a.given) + rng.normal(0, 0.06, 4) * np.repeat(a.given[2:], 2)
            label = a.label if rng.random() < 0.9 else int(rng.integers(1, 81))
            of = {"image": image.id, "category": coco.category_of[label]}
            corners = [round(float(x), 2) for x in np.maximum(box, 0.5)]
            value = round(float(rng.random()), 4)
            results.append(result(corners, value, segmentation=encode_mask(mask), **of))
    path = tmp_path_factory.mktemp("noisy") / "results.json"
    return coco.path, write_results(path, results)


@pytest.mark.parametrize(
    ("package", "evaluator"),
    [("pycocotools", "cocoeval.COCOeval"), ("faster_coco_eval", "COCOeval_faster")],
)
@pytest.mark.parametrize("kind", ["bbox", "segm"])
@pytest.mark.parametrize(
    "thresholds", [{}, {"overlaps": (0.5, 0.6, 0.75, 0.9), "recalls": (0.0, 0.3, 0.5, 1.0)}]
)
def test_as_the_reference_programs(noisy, package, evaluator, kind, thresholds):
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
        if thresholds:
            run.params.iouThrs, run.params.recThrs = map(np.array, thresholds.values())
        run.evaluate()
        run.accumulate()
    precision = run.eval["precision"]  # (overlaps, recalls, classes, areas, limits)
    half, strict = (np.isclose(run.params.iouThrs, overlap) for overlap in (0.5, 0.75))
    expected = [precision[chosen, ..., 0, -1] for chosen in (slice(None), half, strict)]
    expected += [precision[..., area, -1] for area in (1, 2, 3)]
    source = CocoFile(truth, masks=None)
    store = Store.open(results, TASK, source)
    metric = DetectMetric(source, store.classes, **thresholds)
    for i in range(len(source)):
        metric.update(source.name(i), source.truth(i), store.get(source.name(i)))
    found = metric.compute()
    ours = [found.mean[key if kind == "bbox" else f"mask_{key}"] / 100 for key in KEYS]
    assert ours == pytest.approx([values[values > -1].mean() for values in expected], abs=1e-6)
    assert 0.1 < ours[0] < 0.9


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{}", "it must be a list of results, got a dict"),
        ("[", "cannot read"),
        ("[3]", "result 0 .* it must be an object"),
        (json.dumps([result([1, 1, 2, 2], 0.5, image=9)]), "does not list its image 9"),
        (json.dumps([result([1, 1, 2, 2], 0.5, category=4)]), "does not list its category 4"),
        (json.dumps([result([1, 1, 2], 0.5)]), "bbox of 4 finite numbers"),
        (json.dumps([result([1, 1, 2, 2], float("nan"))]), "bbox of 4 finite numbers"),
        (json.dumps([result([1, 1, 2, 2], 0.5, segmentation=TALL)]), r"\[40, 30\], the image is "),
    ],
)
def test_results_that_are_none(tmp_path, content, reason):
    truth = write_split(tmp_path, annotations=[with_mask(entry(1, [4, 4, 10, 10]))])
    (tmp_path / "r.json").write_text(content)
    raises(DataError, reason, score, tmp_path / "r.json", truth)


def test_labels_stand_for_the_classes_of_the_network(tmp_path):
    coco = CocoFile(write_split(tmp_path, annotations=[entry(1, [2, 2, 10, 10], category=7)]))
    path = write_results(tmp_path / "r.json", [result([2, 2, 10, 10], 0.9, category=7)])
    names = ["cat", "star", "disc", "square"]
    (found,) = DetectionsCodec(coco, names).decode(path).values()
    assert (found.labels.tolist(), found.names) == ([3], ("disc",))
    metric = DetectMetric(coco, names)
    metric.update("1.png", coco.truth(0), found)
    assert by_class(metric.compute())["disc"]["box"] == pytest.approx(100)
    again = DetectionsCodec(coco, names).encode({"1.png": found}, ".json")
    assert json.loads(again) == json.loads(path.read_text())
    unknown = replace(found, labels=np.array([1]), names=("cat",))  # no category of the data
    assert DetectionsCodec(coco, names).encode({"1.png": unknown}, ".json") == b"[]"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    torch.manual_seed(0)
    write_split(root, annotations=[with_mask(entry(1, [2, 3, 10, 8], category=7))])
    write_weights(root / "w.safetensors", "mask_rcnn", detections_per_img=20)
    return root


def run(root, out, weights="w.safetensors", **options):
    return evaluate("detect", root / weights, data=root, save=out, device="cpu", **options)


def test_images_without_detections_are_not_run_again(data, tmp_path, monkeypatch):
    """Their absence from a file of results is a result."""
    out = tmp_path / "r.json"
    scores = run(data, out)  # everything that a detector finds is scored
    assert "mask_ap" in scores.mean and scores.settings["options"]["threshold"] == 0
    scores = run(data, out, threshold=1.0, force=True)
    assert out.read_text() == "[]"
    assert (scores.missing, scores.facts["detections"]) == ([], 0)
    written = out.stat().st_mtime_ns
    monkeypatch.setattr(Detector, "forward", None)
    assert run(data, out, threshold=1.0).missing == [] and out.stat().st_mtime_ns == written


def test_a_file_that_was_changed_is_refused(data, tmp_path):
    out = tmp_path / "r.json"
    run(data, out)
    out.write_text("[]")  # no longer what the note is of
    assert evaluate("detect", data=data, predictions=out).settings is None
    raises(OptionError, r"without a r\.settings\.json that", run, data, out, force=True)
    truth = data / "annotations" / "instances_val.json"
    raises(OptionError, r"instances_val\.json' exists without a", run, data, truth, force=True)
