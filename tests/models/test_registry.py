# SPDX-License-Identifier: Apache-2.0
"""Networks by name: what is listed, what is refused, and weights that find their network."""

import json
import subprocess
import sys

import pytest
import torch

from quadtree_attention import CheckpointError, OptionError, models
from quadtree_attention.models.registry import SPECS, complete, create, load, load_with_card, names
from quadtree_attention.models.weights import card_path, read_checkpoint, save_weights
from tests.support import raises

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
    assert names("match") == [
        "loftr",
        "loftr_lite",
        "loftr_quadtree_indoor",
        "loftr_quadtree_outdoor",
        "loftr_quadtree_small",
    ]
    assert names("stereo") == ["sttr", "sttr_quadtree", "sttr_quadtree_small"]
    sizes = [f"quadtree_{letter}_b{i}" for letter in "ab" for i in range(5)]
    assert names("classify") == [*sizes, "swin_tiny_quadtree_b"]
    assert names("detect") == [
        f"{k}_{n}" for k in ("retinanet", "mask_rcnn") for n in names("classify")
    ]
    assert names("segment") == [f"semfpn_{name}" for name in names("classify")]
    assert len(names()) == sum(len(names(task)) for task in TINY) == len(set(names()))
    assert not any("test_quadtree" in name for name in names())  # which can be built all the same
    assert names(pretrained=True) == ["loftr_quadtree_small", "sttr_quadtree_small"]
    raises(OptionError, r"task must be one of classify, .*; did you mean stereo", names, "sterio")


def test_presets_name_options_of_their_class():
    for name, spec in SPECS.items():
        needed = {"num_classes": 3} if spec.backbone else {}
        assert complete(name, needed).keys() >= spec.options.keys(), name


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "loftr_light",
            {},
            r"model must be one of quadtree_a_b0, .*'loftr_light'; did you mean lof",
        ),
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
    assert (
        complete("semfpn_quadtree_b_b0", {"num_classes": 2, "attention": "window"})["topk"] is None
    )
    dense = complete("semfpn_quadtree_b_b0", {"num_classes": 2})
    assert (dense["topk"], dense["value_act"]) == (32, "relu")
    mean = complete("semfpn_quadtree_b_b0", {"num_classes": 2, "value_pyramid": "mean"})
    assert (mean["topk"], mean["value_act"]) == (32, None)
    assert complete("retinanet_swin_tiny_quadtree_b", {"num_classes": 2})["value_act"] is None
    assert complete("retinanet_quadtree_a_b0", {"num_classes": 2})["value_act"] is None


@pytest.mark.parametrize("task", ["match", "stereo"])
def test_without_timm(task):
    script = f"""
import sys
sys.modules["timm"] = sys.modules["torchvision"] = None
from quadtree_attention import models
print(type(models.load({TINY[task][0]!r}, task={task!r})).__name__, len(models.names()) > 40)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.split() == [{"match": "LoFTR", "stereo": "STTR"}[task], "True"], done.stderr


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


@pytest.mark.parametrize(
    ("task", "old"), [("match", "quadtree_small"), ("stereo", "quadtree_small")]
)
def test_cards_with_old_names(tmp_path, task, old):
    path, model = written(tmp_path, task)
    kwargs = TINY[task][1]
    tensors = read_checkpoint(path)
    safetensors_torch.save_file(
        tensors, path, {"card": json.dumps({"model": old, "kwargs": kwargs})}
    )
    card_path(path).unlink()  # it says no task either
    card, loaded = load_with_card(path, task=task)
    assert card["model"] == TINY[task][0] and card["kwargs"] == complete(card["model"], kwargs)
    assert type(loaded) is type(model)
    with pytest.raises(CheckpointError, match="for the task match or stereo, not for detect"):
        load(path, task="detect")
    raises(CheckpointError, r"was renamed; pass loftr_quadtree_small \(task m", load, path)


def test_packaged_weights():
    raises(CheckpointError, "no weights of sttr come with the package, only", load, "sttr")
    with pytest.raises(
        CheckpointError, match="no weights of the task detect come with the package"
    ):
        load_with_card(None, task="detect")
    raises(CheckpointError, "there is no file 'outdoor'", load, "outdoor")
    card, network = load_with_card(None, task="match")
    assert card["model"] == "loftr_quadtree_small" and network.symmetric
    assert (
        models.create("loftr_quadtree_small", pretrained=True, symmetric=False).symmetric is False
    )
