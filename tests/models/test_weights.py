# SPDX-License-Identifier: Apache-2.0
"""Files of weights: what is read, what is refused, and that nothing is lost in writing."""

import argparse
import hashlib
import json
import os
import pickle
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import quadtree_attention
from quadtree_attention import CheckpointError, OptionError

timm = pytest.importorskip("timm", reason="weights need timm (extra 'models')")
import quadtree_attention.models.backbone  # noqa: E402  registers the names

safetensors_torch = pytest.importorskip("safetensors.torch", reason="weights need safetensors")

from quadtree_attention.models import load, save_weights  # noqa: E402
from quadtree_attention.models.weights import card_path, read_card, read_checkpoint  # noqa: E402
from tests.support import raises  # noqa: E402
from tests.tasks.training.test_checkpoints import files_of_at_most  # noqa: E402

pytestmark = pytest.mark.usefixtures("only_reference")

KWARGS = {"num_classes": 5, "topk": 2, "value_act": "relu"}
CARD = {"model": "test_quadtree", "kwargs": KWARGS, "source": "a test"}
ONE = torch.zeros(1)
TENSORS = {"a.weight": torch.arange(6.0).view(2, 3), "b": torch.tensor(7)}


def tiny(**options) -> torch.nn.Module:
    return timm.create_model("test_quadtree", **KWARGS | options).eval()


def same(got: dict, expected: dict) -> bool:
    return got.keys() == expected.keys() and all(torch.equal(got[k], expected[k]) for k in got)


# ---- reading


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"model": state, "epoch": 3, "optimizer": {"lr": 1e-4}},
        lambda state: {"meta": {"CLASSES": ("cat",)}, "state_dict": state},
        lambda state: {f"module.{name}": x for name, x in state.items()},
        lambda state: {"model": {f"module._orig_mod.{name}": x for name, x in state.items()}},
        lambda state: {"model": state, "args": argparse.Namespace(lr=1e-4, data=["a"])},
        lambda state: {"state_dict": state, "best": [np.float64(0.5), np.int64(3), np.bool_(True)]},
    ],
    ids=["alone", "model", "state_dict", "module", "compiled", "arguments", "numpy"],
)
@pytest.mark.parametrize("zipped", [True, False])
def test_what_torch_writes(tmp_path, wrap, zipped):
    path = tmp_path / "weights.pth"
    torch.save(wrap(TENSORS), path, _use_new_zipfile_serialization=zipped)
    assert same(read_checkpoint(path), TENSORS)
    assert same(read_checkpoint(str(path)), TENSORS)


def test_a_prefix_of_some_names_stays(tmp_path):
    state = {"module.a": torch.zeros(1), "b": torch.ones(1)}
    torch.save(state, tmp_path / "x.pth")
    assert same(read_checkpoint(tmp_path / "x.pth"), state)


class Hostile:
    """Asks whoever unpickles it to make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["zip", "legacy", "pickle0", "pickle2", "pickle5"])
def test_code_in_a_pickle_is_not_run(tmp_path, kind):
    trap, path = tmp_path / "was_run", tmp_path / "hostile.pth"
    content = {"model": TENSORS, "extra": Hostile(trap)}
    if kind.startswith("pickle"):
        path.write_bytes(pickle.dumps({"extra": Hostile(trap)}, protocol=int(kind[-1])))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=kind == "zip")
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)
    assert not trap.exists()
    message = str(caught.value)
    if kind in ("zip", "legacy", "pickle2"):
        assert f"loading it would call {os.mkdir.__module__}.mkdir; nothing was run" in message
    else:  # torch reads no such pickle far enough to see
        assert "is not a checkpoint, or a damaged one" in message
    assert "weights_only" not in message  # torch's advice to run it
    if kind != "zip":
        pickle.loads(pickle.dumps(Hostile(trap)))
        assert trap.exists()  # it would have been


def written(content: object) -> Callable[[Path], Path]:
    """A function that saves it in a folder, and gives the path."""
    return lambda folder: torch.save(content, folder / "x.pth") or folder / "x.pth"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: d / "none.pth", "there is no file '{path}'; check the path"),
        (lambda d: d, "'{path}' is not a file; pass the checkpoint file"),
        (written([1]), "alone or under 'state_dict' or 'model', got a list"),
        (written(ONE), "got a Tensor"),
        (written({}), "got nothing"),
        (written({"model": {}}), "got nothing"),
        (
            written({"epoch": 1, "lr": 2, "a": ONE}),
            "got 2 other entries, such as epoch, lr; save",
        ),
        (written({"a": torch.eye(3).to_sparse()}), "got 1 other entries, such as a;"),
        (written({1: ONE}), "got 1 other entries, such as 1"),
    ],
)
def test_what_holds_no_weights(tmp_path, make, words):
    path = make(tmp_path)
    raises(CheckpointError, re.escape(words.format(path=path)), read_checkpoint, path)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize(
    "content",
    [b"", b"\x80", b"hello, no checkpoint\n", b"<!DOCTYPE html>404", b"PK\x03\x04", bytes(100)],
)
def test_files_of_something_else(tmp_path, content, suffix):
    path = tmp_path / f"x{suffix}"
    path.write_bytes(content)
    message = "is empty; get" if not content else "is not a checkpoint, or a damaged one: it cannot"
    raises(CheckpointError, message, read_checkpoint, path)


@pytest.mark.parametrize("unpacked", [80, 40])
def test_archives_out_of_proportion_are_not_unpacked(tmp_path, monkeypatch, unpacked):
    path = tmp_path / "bomb.pth"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}, protocol=2))
        with archive.open("archive/data/0", "w") as file:
            for _ in range(unpacked):
                file.write(bytes(2**20))
    assert path.stat().st_size < 2**17
    asked = []
    monkeypatch.setattr(torch, "load", lambda *_, **__: asked.append(1) or {"a": torch.zeros(1)})
    if unpacked == 40:  # below 64 MiB there is nothing to be afraid of
        assert read_checkpoint(path) and asked
        return
    message = r"has 0\.1 MiB and unpacks to 80 MiB.*; nothing was"
    raises(CheckpointError, message, read_checkpoint, path)
    assert not asked


@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors"])
def test_truncated_files(tmp_path, kind):
    path, state = tmp_path / "x", {"a": torch.randn(500), "b": torch.randn(20, 30)}
    if kind == "safetensors":
        path = path.with_suffix(".safetensors")
        safetensors_torch.save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=kind == "zip")
    whole = path.read_bytes()
    for length in (1, 9, 60, len(whole) // 3, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        raises(CheckpointError, "not a checkpoint, or a damaged one", read_checkpoint, path)
    path.write_bytes(whole)
    assert same(read_checkpoint(path), state)


# ---- writing


def test_round_trip(tmp_path):
    model, path = tiny(), tmp_path / "tiny.safetensors"
    card = save_weights(path, model.state_dict(), CARD)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tiny.json", "tiny.safetensors"]
    assert card == read_card(path) == json.loads((tmp_path / "tiny.json").read_text())
    assert card["kwargs"].items() >= {**KWARGS, "depths": [1, 1, 2, 1], "in_chans": 3}.items()
    assert not card["kwargs"].keys() & {"device", "dtype", "backend"}
    assert card == CARD | {
        "kwargs": card["kwargs"],
        "task": "classify",
        "tensors": len(model.state_dict()),
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "version": quadtree_attention.__version__,
    }
    x = torch.randn(1, 3, 130, 97)
    loaded = load(path)
    assert loaded.training and same(loaded.state_dict(), model.state_dict())
    assert torch.equal(loaded.eval()(x), model(x))
    other = load(path, topk=1, value_act="gelu").eval()  # both change what it computes
    assert not torch.allclose(other(x), model(x))
    assert {p.dtype for p in load(path, dtype=torch.float64).parameters()} == {torch.float64}


def test_the_same_weights_have_the_same_checksum(tmp_path):
    cards = [save_weights(tmp_path / f"{i}.safetensors", TENSORS, CARD) for i in range(8)]
    assert len({card["sha256"] for card in cards}) == 1


def test_one_file_is_enough(tmp_path):
    path = tmp_path / "tiny.safetensors"
    more = {"classes": list("abcde"), "image_size": 64, "eval_crop": 0.9, "base_size": None}
    card = save_weights(path, tiny().state_dict(), {**CARD, **more})
    card_path(path).unlink()
    inside = ("model", "kwargs", "task", "classes", "image_size", "eval_crop")
    assert read_card(path) == {key: card[key] for key in inside}
    moved = path.rename(tmp_path / "elsewhere.safetensors")
    assert load(moved).num_classes == 5


def test_timm_takes_the_file(tmp_path):
    model, path = tiny(), tmp_path / "tiny.safetensors"
    save_weights(path, model.state_dict(), CARD)
    loaded = timm.create_model("test_quadtree", checkpoint_path=str(path), **KWARGS).eval()
    x = torch.randn(1, 3, 70, 97)
    assert torch.equal(loaded(x), model(x))


def test_views_and_shared_tensors(tmp_path):
    base = torch.randn(6, 4)
    tensors = {"a": base, "b": base, "c": base.T, "d": base[1:3], "e": torch.nn.Parameter(base)}
    save_weights(tmp_path / "x.safetensors", tensors, CARD)
    assert same(read_checkpoint(tmp_path / "x.safetensors"), tensors)


def test_others_may_read_what_the_umask_lets_them(tmp_path):
    before = os.umask(0o022)
    try:
        save_weights(tmp_path / "x.safetensors", TENSORS, CARD)
    finally:
        os.umask(before)
    assert {p.stat().st_mode & 0o777 for p in tmp_path.iterdir()} == {0o644}


@pytest.mark.parametrize("there", ["x.safetensors", "x.json"])
def test_nothing_is_overwritten_unasked(tmp_path, there):
    path = tmp_path / "x.safetensors"
    (tmp_path / there).write_text("precious")
    message = rf"{there}' is there already; write to another name, or"
    raises(OptionError, message, save_weights, path, TENSORS, CARD)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [(there, "precious")]
    save_weights(path, TENSORS, CARD, overwrite=True)
    assert same(read_checkpoint(path), TENSORS) and read_card(path)["source"] == "a test"


def test_targets_that_do_not_do(tmp_path):
    (tmp_path / "y.json").mkdir()
    for name, message in (
        ("x.pth", r"written as \.safetensors, got '.*x\.pth'; name it so"),
        ("none/x.safetensors", r"there is no directory '.*none' to write to; make it"),
        ("y.safetensors", r"y\.json' is a directory; write to another name"),
    ):
        raises(OptionError, message, save_weights, tmp_path / name, TENSORS, CARD, overwrite=True)


# 20 kB of weights and 40 kB of card: the first limit stops the one, the second the other.
@pytest.mark.skipif(sys.platform == "win32", reason="limits of a process are a Unix matter")
@pytest.mark.parametrize("limit", [10_000, 30_000])
def test_a_full_disk_leaves_everything_as_it_was(tmp_path, limit):
    path = tmp_path / "x.safetensors"
    save_weights(path, TENSORS, CARD)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    larger = {"a": torch.zeros(5_000)}, CARD | {"long": "x" * 40_000}
    full = f"{path}, {card_path(path)} cannot be written: File too large; what"
    with files_of_at_most(limit):
        raises(CheckpointError, re.escape(full), save_weights, path, *larger, overwrite=True)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may do all")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o555)
    call = save_weights, tmp_path / "x.safetensors", TENSORS, CARD
    raises(CheckpointError, "cannot be written: Permission denied", *call)


# ---- cards and models


def test_a_card_of_other_weights(tmp_path):
    path = tmp_path / "x.safetensors"
    save_weights(path, TENSORS, CARD)
    mine = card_path(path).read_text()
    save_weights(path, {"a": torch.zeros(1)}, CARD, overwrite=True)
    card_path(path).write_text(mine)
    raises(CheckpointError, r"x\.json is the card of other weights: it has sha", read_card, path)
    card_path(path).write_text("[1, 2]")
    raises(CheckpointError, r"x\.json is not a card", read_card, path)


def test_a_card_does_not_override_the_weights(tmp_path):
    path = tmp_path / "x.safetensors"
    card = save_weights(path, tiny().state_dict(), CARD | {"classes": list("abcde")})
    other = {"model": "quadtree_b_b4", "kwargs": {"topk": 99}, "task": "stereo"}
    edited = card | other | {"classes": list("vwxyz")}  # names are for people to change
    card_path(path).write_text(json.dumps(edited))
    assert read_card(path) == card | {"classes": list("vwxyz")}
    assert load(path).stages[0].blocks[0].attn.topk == (2, 2, 2)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (None, "must have a card with model and kwargs, got no card; write it with save_weights"),
        ({"format": "pt"}, "got no card;"),
        ({"card": "{"}, "got {;"),
        ({"card": "[" * 100_000}, "got [[[["),
        ({"card": '{"model": "test_quadtree"}'}, 'got {"model": "test_quadtree"};'),
        ({"card": '{"model": "test_quadtree", "kwargs": [1]}'}, '"kwargs": [1]};'),
    ],
)
def test_weights_without_a_card(tmp_path, metadata, words):
    path = tmp_path / "x.safetensors"
    safetensors_torch.save_file(TENSORS, path, metadata)
    for read in (read_card, load):
        raises(CheckpointError, re.escape(words), read, path)


@pytest.mark.parametrize(
    ("model", "kwargs", "words"),
    [
        ("resnet18", {}, "model must be one of quadtree_a_b0, "),
        ("hf-hub:someone/something", {}, "got 'hf-hub:someone/something'; pass one of them"),
        ("quadtre_b_b2", {}, "did you mean quadtree_b_b2"),
        ("test_quadtree", {"pretrained": True}, "dtype, got 'pretrained'; "),
        ("test_quadtree", {"checkpoint_path": "/etc/passwd"}, "dtype, got 'checkpoint_path'; "),
        ("test_quadtree", {"colour": "red"}, "an option of test_quadtree must be one of in_chans"),
        ("retinanet_test_quadtree", {}, "retinanet_test_quadtree needs num_classes; pass it"),
    ],
)
def test_cards_that_are_not_followed(tmp_path, model, kwargs, words):
    path, card = tmp_path / "x.safetensors", {"model": model, "kwargs": kwargs}
    raises(OptionError, words, save_weights, path, TENSORS, card)
    assert not path.exists()
    safetensors_torch.save_file(TENSORS, path, {"card": json.dumps(card)})
    raises(CheckpointError, f"the card of {path} does not.*{words}", load, path)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_one_number_that_is_not_finite(tmp_path, number):
    path, state = tmp_path / "x.safetensors", tiny().state_dict()
    state["head.weight"][2, 3] = number
    save_weights(path, state, CARD)
    raises(CheckpointError, r"x\.safetensors holds numbers .*, in head\.weight;", load, path)


def test_loading_is_strict(tmp_path):
    path, state = tmp_path / "x.safetensors", tiny().state_dict()
    state["extra"] = state.pop("head.bias")
    state["head.weight"] = torch.zeros(6, 32)
    save_weights(path, state, CARD)
    wrong = r"1 mismatched: head\.weight is \(6, 32\), must be \(5, 32\)"
    raises(CheckpointError, rf"1 missing: head\.bias; 1 unexpected: extra; {wrong}", load, path)
    torch.save(state, tmp_path / "x.pth")
    raises(CheckpointError, r"must be a \.safetensors file, got .*x\.pth", load, tmp_path / "x.pth")
