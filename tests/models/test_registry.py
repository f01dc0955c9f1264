# SPDX-License-Identifier: Apache-2.0
"""Networks by name: what is listed, what is refused, and weights that find their network."""

import json

import pytest
import torch

from quadtree_attention import CheckpointError, OptionError, models
from quadtree_attention.files import file_sha256
from quadtree_attention.models.registry import (
    PRETRAINED,
    SPECS,
    complete,
    create,
    load,
    load_with_card,
    names,
    weights_path,
)
from quadtree_attention.models.weights import card_path, read_card, read_checkpoint, save_weights
from tests.conftest import ROOT
from tests.support import raises
from tests.support.commands import python

safetensors_torch = pytest.importorskip("safetensors.torch", reason="weights need safetensors")
pytestmark = pytest.mark.usefixtures("only_reference")

LOFTR = {"dims": [8, 8, 16], "num_pairs": 1, "num_heads": 2, "fine_heads": 2}
STTR = {"dims": [8, 8, 8, 8], "dim": 16, "num_layers": 1, "num_heads": 2, "context": []}
TINY = {  # by task: name and options
    "classify": ("test_quadtree", {"num_classes": 3}),
    "detect": ("retinanet_test_quadtree", {"num_classes": 3, "channels": 16}),
    "segment": ("semfpn_test_quadtree", {"num_classes": 3, "channels": 16, "head_channels": 8}),
    "match": ("loftr_quadtree_small", LOFTR),
    "stereo": ("sttr_quadtree_small", STTR),
}


def written(folder, task, **card):
    name, kwargs = TINY[task]
    path, model = folder / f"{task}.safetensors", create(name, **kwargs)
    save_weights(path, model.state_dict(), {"model": name, "kwargs": kwargs, **card})
    return path, model


# ---- names


def test_names():
    quadtree = [f"loftr_quadtree_{kind}" for kind in ("indoor", "outdoor", "small")]
    assert names("match") == ["loftr", "loftr_lite", *quadtree]
    assert names("stereo") == ["sttr", "sttr_quadtree", "sttr_quadtree_small"]
    sizes = [f"quadtree_{letter}_b{i}" for letter in "ab" for i in range(5)]
    assert names("classify") == [*sizes, "swin_tiny_quadtree_b"]
    retinanet, mask_rcnn, semfpn = (
        [f"{kind}_{name}" for name in names("classify")]
        for kind in ("retinanet", "mask_rcnn", "semfpn")
    )
    assert names("detect") == retinanet + mask_rcnn and names("segment") == semfpn
    assert len(names()) == sum(len(names(task)) for task in TINY) == len(set(names()))
    assert not any("test_quadtree" in name for name in names())  # which can be built all the same
    assert names(pretrained=True) == [
        "loftr_quadtree_small",
        "sttr_quadtree_small",
        "sttr_quadtree_small.free",
    ]
    raises(OptionError, r"task must be one of classify, .*; did you mean stereo", names, "sterio")


def test_presets_name_options_of_their_class():
    for name, spec in SPECS.items():
        needed = {"num_classes": 3} if spec.backbone else {}
        assert complete(name, needed).keys() >= spec.options.keys(), name


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("loftr_light", {}, r"must be one of quadtree_a_b0, .*'loftr_light'; did you mean lof"),
        ("retinanet_quadtree_b0", {}, r"did you mean .*retinanet_quadtree_b_b0"),
        ("resnet18", {}, "pass one of them"),
        ("loftr", {"depth": 3}, r"an option of loftr must be one of dims, .*, got 'depth'"),
        ("sttr", {"strid": 3}, "got 'strid'; did you mean stride"),
        ("retinanet_test_quadtree", {}, "num_classes"),
        ("loftr", {"dims": 7}, r"loftr cannot be built with .*'dims': 7.*; change them"),
        ("quadtree_indoor", {}, r"was renamed; pass loftr_quadtree_indoor \(task match\)$"),
        ("quadtree_small", {}, r"loftr_.*small \(task match\) or sttr_.*small \(task stereo\)$"),
    ],
)
def test_what_cannot_be_built(name, options, message):
    raises(OptionError, message, create, name, **options)


def test_names_of_another_attention():
    other = create("loftr_quadtree_indoor", attention="full", device="meta")  # which has no topk
    assert type(other.coarse_transformer.layers[0].attn).__name__ == "FullAttention"
    assert complete("quadtree_a_b0", {"attention": "window"})["variant"] is None
    for name, options, topk, act in (
        ("semfpn_quadtree_b_b0", {"attention": "window"}, None, None),
        ("semfpn_quadtree_b_b0", {}, 32, "relu"),
        ("semfpn_quadtree_b_b0", {"value_pyramid": "mean"}, 32, None),
        ("retinanet_swin_tiny_quadtree_b", {}, 32, None),
        ("retinanet_quadtree_a_b0", {}, 32, None),
    ):
        found = complete(name, {"num_classes": 2} | options)
        assert (found["topk"], found["value_act"]) == (topk, act), (name, options)


@pytest.mark.parametrize("task", ["match", "stereo"])
def test_without_timm(task):
    script = f"""
import sys
sys.modules["timm"] = sys.modules["torchvision"] = None
from quadtree_attention import models
print(type(models.load({TINY[task][0]!r}, task={task!r})).__name__, len(models.names()) > 40)
"""
    assert python(script).split() == [{"match": "LoFTR", "stereo": "STTR"}[task], "True"]


# ---- weights


@pytest.mark.parametrize("task", TINY)
def test_weights_find_their_network(tmp_path, task):
    path, model = written(tmp_path, task)
    card, loaded = load_with_card(path, task=task)
    assert type(loaded) is type(model) and card["task"] == task
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(x, expected[name]) for name, x in loaded.state_dict().items())
    name, kwargs = TINY[task]
    assert card["kwargs"].items() >= kwargs.items()
    assert card["kwargs"] == json.loads(json.dumps(complete(name, kwargs)))


@pytest.mark.parametrize("task", TINY)
@pytest.mark.parametrize("alone", [False, True])
def test_weights_of_another_task(tmp_path, task, alone):
    path, _ = written(tmp_path, task)
    if alone:
        card_path(path).unlink()
    for other in TINY.keys() - {task}:
        with pytest.raises(CheckpointError) as caught:
            load(path, task=other)
        message = str(caught.value)
        assert f"{path} holds weights for the task {task}, not for {other}; pass" in message
        assert "\n" not in message and "__init__" not in message


@pytest.mark.parametrize("task", ["match", "stereo"])
def test_cards_with_old_names(tmp_path, task):
    path, model = written(tmp_path, task)
    kwargs = TINY[task][1]
    old = {"card": json.dumps({"model": "quadtree_small", "kwargs": kwargs})}
    safetensors_torch.save_file(read_checkpoint(path), path, old)
    card_path(path).unlink()  # it says no task either
    card, loaded = load_with_card(path, task=task)
    assert card["model"] == TINY[task][0] and card["kwargs"] == complete(card["model"], kwargs)
    assert type(loaded) is type(model)
    raises(CheckpointError, "task match or stereo, not for detect", load, path, task="detect")
    raises(CheckpointError, r"was renamed; pass loftr_quadtree_small \(task m", load, path)


def test_packaged_weights():
    raises(CheckpointError, "no weights of sttr come with the package, only", load, "sttr")
    none = "no weights of the task detect come with the package"
    raises(CheckpointError, none, load_with_card, None, task="detect")
    raises(CheckpointError, "there is no file 'outdoor'", load, "outdoor")
    card, network = load_with_card(None, task="match")
    assert card["model"] == "loftr_quadtree_small" and network.symmetric
    other = models.create(card["model"], pretrained=True, symmetric=False)
    assert other.symmetric is False
    free = models.create("sttr_quadtree_small.free", pretrained=True).state_dict()
    saved = read_checkpoint(weights_path("sttr_quadtree_small.free"))
    assert all(torch.equal(free[name], x.float()) for name, x in saved.items())


@pytest.mark.parametrize("name", PRETRAINED)
def test_card_tells_what_the_weights_are(name):
    path = weights_path(name)
    card = read_card(path)
    assert card["sha256"] == file_sha256(path)
    assert path.stat().st_size < 12e6
    assert {"recipe", "commands", "commit", "data", "metrics"} <= card.keys()
    assert all(data["terms"] for data in card["data"])
    assert (ROOT / card["recipe"]).is_file()
