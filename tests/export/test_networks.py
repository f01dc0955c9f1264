# SPDX-License-Identifier: Apache-2.0
"""Whole networks as ONNX files, in a real ONNX runtime beside PyTorch and the predictors."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("timm", reason="networks need the extra 'models'")
pytest.importorskip("onnxruntime", reason="needs the extra 'export'")

import onnxruntime

from quadtree_attention import models, tasks
from quadtree_attention.errors import ExportError, OptionError
from quadtree_attention.export import to_onnx
from quadtree_attention.export.networks import batched_nms, exportable, topk
from quadtree_attention.export.onnx import (
    LEAST_AGREEMENT,
    LEAST_COMMON,
    compare_rows,
    compare_values,
    pictures,
)
from quadtree_attention.models.weights import save_weights
from quadtree_attention.tasks.contract import NAMES, get_task
from tests.conftest import ROOT
from tests.support import tiny
from tests.support.commands import environment, refusal

OTHER_SIZES = ((97, 131), (40, 72), (160, 96))  # beside those of the export's own check


def small_classifier(**options):
    """One level per stage, so that an export takes seconds."""
    torch.manual_seed(0)
    return models.create(
        "test_quadtree", num_classes=2, depths=(1, 1, 1, 1), num_levels=1, **options
    )


@pytest.fixture(scope="module")
def classifier_file(tmp_path_factory):
    network = small_classifier()
    path = tmp_path_factory.mktemp("export") / "classifier.onnx"
    card = {"model": "test_quadtree", "kwargs": {}, "classes": ["cat", "dog"]}
    predictor = tasks.Classifier(network, card, size=64, device="cpu")
    return network, predictor, path, to_onnx(predictor, path)


def test_a_file_is_right_at_other_sizes_and_batches(classifier_file):
    network, _, path, exported = classifier_file
    assert len(exported.checks) == 3 and exported.fixed == ""
    assert all(check.agreement == 1 and check.results > 0 for check in exported.checks)
    session = onnxruntime.InferenceSession(path)
    for batch, (height, width) in enumerate(OTHER_SIZES, start=1):
        image = torch.rand(batch, 3, height, width)
        (got,) = session.run(None, {"image": image.numpy()})
        with torch.no_grad():
            wanted = exportable(network)(image)[0]
        torch.testing.assert_close(torch.from_numpy(got), wanted, rtol=0, atol=1e-5)


def test_a_file_says_what_it_needs(classifier_file):
    network, predictor, path, exported = classifier_file
    about = onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map
    assert (about["task"], about["model"]) == ("classify", "test_quadtree")
    assert json.loads(about["classes"]) == ["cat", "dog"]
    how = json.loads(about["preprocessing"])
    assert (how["size"], how["channels"], how["range"]) == (64, "RGB", [0, 1])
    assert json.loads(about["inputs"]) == exported.inputs == {"image": "(B, 3, H, W)"}
    assert not network.training  # it is as before
    assert len(predictor(np.zeros((70, 45, 3), np.uint8)).names) == 2


def test_a_file_that_disagrees_is_not_written(tmp_path, monkeypatch):
    """An output that differs from PyTorch's at one size."""

    class Changing(type(exportable(small_classifier()))):
        calls = 0

        def forward(self, image):
            (logits,) = super().forward(image)
            if not torch.compiler.is_compiling():
                type(self).calls += 1
                logits = logits + (type(self).calls == 2)
            return (logits,)

    network = small_classifier()
    monkeypatch.setattr("quadtree_attention.export.onnx.exportable", lambda *_: Changing(network))
    message = refusal(ExportError, to_onnx, network, tmp_path / "a.onnx", fixed=(64, 64))
    assert "disagrees with PyTorch at 64x64" in message and "nothing was written" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "options", "text"),
    [
        (torch.nn.Linear(2, 2), {}, "only networks of quadtree_attention.models"),
        ("matcher", {}, "takes a network or a predictor, got str"),
        (small_classifier, {"threshold": 0.5}, "a threshold is for matchers and detectors"),
        (small_classifier, {"fixed": (63, 80)}, "height must be at least 64"),
    ],
)
def test_mistakes(given, options, text, tmp_path):
    network = given() if given is small_classifier else given
    assert text in refusal(OptionError, to_onnx, network, tmp_path / "a.onnx", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_library_is_named(tmp_path):
    """Without onnxscript, which is hidden from a new process."""
    code = (
        "import sys; sys.modules['onnxscript'] = None\n"
        "from quadtree_attention import models, export\n"
        "network = models.create('test_quadtree', num_classes=2)\n"
        f"export.to_onnx(network, {str(tmp_path / 'a.onnx')!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False
    )
    last = done.stderr.strip().splitlines()[-1]
    assert "exporting needs onnxscript" in last and "quadtree-attention[export]" in last


# ---- the comparison and the selection of detections


def test_comparison_of_values():
    wanted = {"a": np.linspace(0, 1, 200).reshape(2, 100)}
    assert compare_values({"a": wanted["a"] + 5e-4}, wanted)[:2] == (1.0, 200)
    changed = wanted["a"].copy()
    changed[0, :3] += 0.1
    assert compare_values({"a": changed}, wanted)[0] == pytest.approx(0.985)
    assert compare_values({"a": wanted["a"][:1]}, wanted)[0] == 0
    assert compare_values({"a": np.full((2, 100), np.nan)}, wanted)[0] == 0


def test_comparison_of_rows():
    """In any order; a missing, an additional and a moved row count as wrong."""
    rng = np.random.default_rng(0)
    wanted = {
        "boxes": rng.random((50, 4)) * 100,
        "scores": rng.random(50),
        "labels": rng.integers(1, 3, 50),
    }
    order = rng.permutation(50)
    assert compare_rows({k: v[order] for k, v in wanted.items()}, wanted)[:2] == (1.0, 50)
    assert compare_rows({k: v[:49] for k, v in wanted.items()}, wanted)[0] == 0.98
    assert compare_rows(wanted, {k: v[:49] for k, v in wanted.items()})[0] == 0.98
    moved = wanted | {"boxes": wanted["boxes"] + [[1, 0, 0, 0]] * 50}
    assert compare_rows(moved, wanted)[0] == 0
    assert compare_rows(wanted | {"labels": 3 - wanted["labels"]}, wanted)[0] == 0
    none = {k: v[:0] for k, v in wanted.items()}
    assert compare_rows(none, none) == (1.0, 0, 0.0)
    assert compare_rows(none, wanted)[0] == 0


def test_top_k_of_fewer():
    values, place = topk(torch.tensor([0.2, 0.7]), 4)
    assert values[:2].tolist() == pytest.approx([0.7, 0.2]) and place[:2].tolist() == [1, 0]
    assert values[2:].tolist() == [-1, -1] and place[2:].tolist() == [0, 0]


@pytest.mark.parametrize("name", ["retinanet", "mask_rcnn"])
def test_detections_are_those_of_the_detector(name):
    """The exported form selects what torchvision selects; images are not resized."""
    network = detector(name, min_size=96, max_size=200)
    image = torch.rand(1, 3, 96, 130)
    with torch.no_grad():
        boxes, scores, labels, *_ = exportable(network)(image, torch.tensor(0.0))
        (wanted,) = network([image[0]])
    agreement, count, _ = compare_rows(
        {"boxes": boxes.numpy(), "scores": scores.numpy(), "labels": labels.numpy()},
        {key: wanted[key].numpy() for key in ("boxes", "scores", "labels")},
    )
    assert count == 100 and agreement >= 0.99


def test_nms_keeps_groups_apart():
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 10], [0, 0, 10, 9]])
    scores, groups = torch.tensor([0.5, 0.9, 0.8]), torch.tensor([0, 1, 1])
    assert batched_nms(boxes, scores, groups, 0.5).tolist() == [1, 0]
    assert batched_nms(boxes[:0], scores[:0], groups[:0], 0.5).tolist() == []


def detector(name, **options):
    """A detector with scores and boxes that differ; those of new weights are almost equal."""
    torch.manual_seed(0)
    options = {"num_classes": 2, "channels": 16, "score_thresh": 0.0, **options}
    network = models.create(f"{name}_test_quadtree", **options).eval()
    for part, layer in network.named_modules():
        if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear) and "backbone.body" not in part:
            torch.nn.init.kaiming_normal_(layer.weight)
            if part.endswith("bbox_pred"):  # else masks of boxes far off change with rounding
                layer.weight.data.mul_(0.1)
    return network


# ---- every task, and the code of the documentation


LIGHT = {  # attentions that are quick to export, where only the code around a network is tested
    "match": {"attention": "linear"},
    "stereo": {"attention": "full"},
    "classify": {"depths": [1, 1, 1, 1], "num_levels": 1},
    "detect": {"depths": [1, 1, 1, 1], "num_levels": 1},
    "segment": {"depths": [1, 1, 1, 1], "num_levels": 1},
}


def reference(task, folder, **changed):
    """The predictor of tiny weights; `changed` replaces options of the network."""
    own = dict(tiny.OWN.get(task, {}))
    if task == "match":
        own["guided"] = "never"
    name, options = tiny.NETWORKS[task]
    torch.manual_seed(3)
    network = models.create(name, **{**options, **changed})
    for part, layer in network.named_modules():  # scores and classes that differ
        is_head = task in ("detect", "segment") and "stages" not in part
        if is_head and isinstance(layer, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(layer.weight)
    card = {"model": name, "kwargs": {**options, **changed}, "task": task}
    if task in tiny.HAS_CLASSES:
        card["classes"] = tiny.CLASSES
    weights = folder / f"{task}.safetensors"
    save_weights(weights, network.state_dict(), card)
    return get_task(task).load("predictor").from_pretrained(weights, device="cpu", **own)


@pytest.mark.slow
@pytest.mark.parametrize("task", [*NAMES, "mask_rcnn"])
def test_every_network(task, tmp_path):
    """Sizes and batches that vary, checked by the export at three sizes and here at others."""
    if task == "mask_rcnn":
        given: object = detector("mask_rcnn", proposals=50)
        network = given
    else:
        given = reference(task, tmp_path)
        network = given.network
    path = tmp_path / "network.onnx"
    exported = to_onnx(given, path)
    assert len(exported.checks) == 3 and all(check.results for check in exported.checks)
    wrapped = exportable(network)
    assert exported.fixed == ("" if wrapped.dynamic_batch else "batch size 1")
    session = onnxruntime.InferenceSession(path)
    for size in OTHER_SIZES:
        images = pictures((size,) * len(wrapped.images), wrapped.channels, 1, 9)
        zero = () if wrapped.threshold is None else (torch.tensor(0.0),)
        with torch.inference_mode():
            wanted = wrapped(*images, *zero)
        names = (*wrapped.images, "threshold")
        feed = {n: x.numpy() for n, x in zip(names, (*images, *zero), strict=False)}
        found = session.run(list(wrapped.outputs), feed)
        compare = compare_values if wrapped.threshold is None else compare_rows
        pairs = (
            dict(zip(wrapped.outputs, found, strict=True)),
            dict(zip(wrapped.outputs, (x.numpy() for x in wanted), strict=True)),
        )
        least = LEAST_AGREEMENT if wrapped.threshold is None else LEAST_COMMON
        assert compare(*pairs)[0] >= least, size


def block(title):
    """The code under a heading of docs/export.md."""
    text = (ROOT / "docs/export.md").read_text()
    return re.search(rf"## {title}\n.*?```python\n(.*?)```", text, flags=re.DOTALL)[1]


@pytest.mark.slow
@pytest.mark.parametrize("task", NAMES)
def test_code_of_the_documentation(task, tmp_path, monkeypatch):
    """It finds what the predictor finds, on images that it has to resize."""
    monkeypatch.chdir(tmp_path)
    predictor = reference(task, tmp_path, **LIGHT[task])
    names = {"match": "matcher", "classify": "classifier", "detect": "detector"}
    fixed = (280, 400) if task == "stereo" else None  # its working size; quicker to export
    to_onnx(
        predictor,
        f"{names.get(task, 'segmenter' if task == 'segment' else task)}.onnx",
        fixed=fixed,
    )
    images = tiny.sample(task, size=(760, 520) if task == "match" else (200, 140))
    files = {"match": ("a.jpg", "b.jpg"), "stereo": ("left.png", "right.png")}
    paths = files.get(task, ("cat.jpg" if task == "classify" else "street.jpg",))
    for path, image in zip(paths, images, strict=True):
        image.save(path)
    found: dict[str, object] = {}
    exec(block(task.capitalize()), found)
    wanted = predictor(*paths)
    if task == "match":
        pairs = (
            {"points0": found["points0"], "points1": found["points1"]},
            {"points0": wanted.keypoints0, "points1": wanted.keypoints1},
        )
        assert len(wanted) > 5
        assert close_rows(*pairs, 0.2) >= 0.95
    elif task == "detect":
        kept = wanted.scores >= 0.5
        assert kept.any()
        pair = {"boxes": found["boxes"]}, {"boxes": wanted.boxes[kept]}
        assert close_rows(*pair, 1.0) >= 0.95
    elif task == "classify":
        assert found["best"] == wanted.names[0]
        np.testing.assert_allclose(found["logits"][0], wanted.logits, atol=1e-3)
    elif task == "segment":
        assert (found["labels"] == wanted.labels).mean() >= 0.99
    else:
        item = predictor.preprocess(*paths)
        with torch.inference_mode():
            ((disparity, occlusion),) = predictor.forward([item])
        bilinear = Image.Resampling.BILINEAR  # without filling, as on the page
        for ours, theirs in zip(found["maps"], (disparity, occlusion), strict=True):
            resized = Image.fromarray(theirs.numpy()).resize(images[0].size, bilinear)
            pair = {"map": np.asarray(ours)}, {"map": np.asarray(resized)}
            assert (
                compare_values(*pair)[0] >= LEAST_AGREEMENT
            )  # rounding decides between equal matches
        shown = np.isfinite(found["disparity"])
        scaled = np.asarray(found["maps"][0]) * images[0].width / item.inputs[0].shape[-1]
        np.testing.assert_allclose(found["disparity"][shown], scaled[shown], rtol=1e-5)
        hidden = found["occlusion"] > 0.5  # of which the page shows no disparity
        np.testing.assert_array_equal(np.isnan(found["disparity"]), hidden)


@pytest.mark.slow
def test_layer_of_the_documentation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found: dict[str, object] = {}
    exec(block("Layers"), found)
    session = onnxruntime.InferenceSession("layer.onnx")
    (name,) = (x.name for x in session.get_inputs())
    x = torch.randn(3, 7, 10, 32)
    (got,) = session.run(None, {name: x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(got), found["layer"](x), rtol=0, atol=1e-5)


def close_rows(found, wanted, tolerance):
    """Share of rows that the other has within a distance, of the worse side."""
    ours = np.concatenate([np.asarray(x) for x in found.values()], axis=1)
    theirs = np.concatenate([np.asarray(x) for x in wanted.values()], axis=1)
    distance = np.abs(ours[:, None] - theirs[None]).max(axis=2)
    return min((distance.min(axis=i) <= tolerance).mean() for i in range(2))


def test_images_of_checks_have_something_to_match():
    first, second = pictures(((64, 80), (72, 64)), 1, 2, 0)
    assert (first.shape, second.shape) == ((2, 1, 64, 80), (2, 1, 72, 64))
    assert torch.equal(first[:, :, :, 4:64], second[:, :, :64, :60])
    assert first.min() >= 0 and first.max() <= 1 and first.std() > 0.1
    assert isinstance(Image.fromarray((first[0, 0].numpy() * 255).astype(np.uint8)), Image.Image)
