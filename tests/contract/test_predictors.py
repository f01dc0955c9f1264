# SPDX-License-Identifier: Apache-2.0
"""One constructor, one call, one kind of result for all tasks."""

import dataclasses
import json
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from quadtree_attention.errors import CheckpointError, DataError, OptionError
from quadtree_attention.models.weights import read_card, read_checkpoint, save_weights
from quadtree_attention.tasks.contract import NAMES, Result, get_task
from tests.support import raises, tiny
from tests.support.commands import refusal

pytestmark = pytest.mark.usefixtures("only_reference")
COMMON = ("images", "seen", "seconds", "warnings")


def arrays(found):
    """The fields of a result that are its own."""
    fields = (field.name for field in dataclasses.fields(found) if field.name not in COMMON)
    return {name: getattr(found, name) for name in fields}


def assert_same(found, other, **tolerance):
    for name, value in arrays(found).items():
        if isinstance(value, np.ndarray) and value.dtype.kind == "f" and tolerance:
            np.testing.assert_allclose(value, getattr(other, name), **tolerance, err_msg=name)
        elif isinstance(value, np.ndarray):
            assert np.array_equal(value, getattr(other, name)), name
        elif not (tolerance and isinstance(value, float)):
            assert value == getattr(other, name), name


def test_a_result(task, predictor):
    images = tiny.sample(task.name)
    found = predictor(*images)
    assert isinstance(found, Result) and found.task == task.name
    assert [image.tobytes() for image in found.images] == [image.tobytes() for image in images]
    assert len(found.seen) == len(images) and found.seconds > 0
    json.dumps(found.to_dict(), allow_nan=False)
    assert found.to_text().strip()
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.seconds = 0
    shown = repr(found)  # with the shapes of arrays, not their numbers
    assert "array(" not in shown and len(shown) < 600
    for name, value in arrays(found).items():
        if isinstance(value, np.ndarray):
            assert f"{name}={value.dtype}{list(value.shape)}" in shown


def test_many_are_one_by_one(task, predictor, tmp_path):
    sizes = [(72, 56), (88, 48), (72, 56), (72, 56)]
    samples = [tiny.sample(task.name, seed, size) for seed, size in enumerate(sizes)]
    alone = [predictor(*images) for images in samples]
    items = [tiny.item(images) for images in samples]
    for found, expected in zip(predictor.many(items, batch=1), alone, strict=True):
        assert_same(found, expected)
    if task.name in ("stereo", "classify", "segment"):  # whose numbers do not decide what is found
        together = list(predictor.many(items, batch=3))
        for found, expected in zip(together, alone, strict=True):
            assert_same(found, expected, atol=1e-3, rtol=1e-3)
    read = iter(items)
    first = next(predictor.many(read, batch=1))
    assert_same(first, alone[0])
    assert len(list(read)) == 3  # nothing was read ahead


def test_a_bad_sample_is_named_or_returned(task, predictor, tmp_path):
    images = tiny.sample(task.name)
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"no image")
    broken = (*images[:-1], bad)
    raises(DataError, r"cannot decode .*bad\.png", predictor, *broken)
    with pytest.raises(DataError, match=r"cannot read .*none\.png: No such file"):
        predictor(*images[:-1], tmp_path / "none.png")
    items = [tiny.item(images), tiny.item(broken), tiny.item(images)]
    outcomes = list(predictor.many(items, batch=2, errors="return"))
    assert [type(outcome) for outcome in outcomes[1:2]] == [DataError]
    assert_same(outcomes[0], outcomes[2])
    with pytest.raises(DataError):
        list(predictor.many(items))
    raises(DataError, rf"takes {len(images)} image", predictor, *images, images[0])


def test_weights_of_another_task(task, all_weights, tmp_path):
    """Their task is named, also where the card beside them is missing."""
    load = task.load("predictor").from_pretrained
    for name in NAMES:
        if name == task.name:
            continue
        alone = tmp_path / f"{name}.safetensors"
        beside = all_weights / alone.name
        alone.write_bytes(beside.read_bytes())
        for path in (beside, alone):
            said = refusal(CheckpointError, load, path)
            assert f"task {name}" in said and task.name in said and len(said) < 300


def test_weights_without_their_card(task, weights, tmp_path):
    alone = tmp_path / "alone.safetensors"
    alone.write_bytes(weights.read_bytes())
    own = tiny.OWN.get(task.name, {})
    images = tiny.sample(task.name)
    found, expected = (
        task.load("predictor").from_pretrained(path, **own)(*images) for path in (alone, weights)
    )
    assert_same(found, expected)


def test_weights_that_are_missing_or_damaged(task, weights, tmp_path):
    load = task.load("predictor").from_pretrained
    raises(CheckpointError, "there is no file", load, tmp_path / "none.safetensors")
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(weights.read_bytes()[:1000])
    raises(CheckpointError, r"broken\.safetensors is not a checkpoint", load, broken)
    state = {
        name: x / 0 if x.is_floating_point() else x for name, x in read_checkpoint(weights).items()
    }
    save_weights(broken, state, read_card(weights), overwrite=True)
    raises(CheckpointError, "holds numbers that are not finite, in", load, broken)
    if task.name not in ("match", "stereo"):
        raises(CheckpointError, "pass the path of weights that quadtree train", load)


def test_options_that_are_refused(task, weights, predictor):
    load = task.load("predictor").from_pretrained
    for device in ("gpu", "mps", "meta", "cuda:99"):
        said = refusal(OptionError, load, weights, device=device)
        assert f"there is no device '{device}' on this machine" in said and len(said) < 250
    raises(OptionError, "one of float32, bfloat16, float16", load, weights, dtype="float8")
    raises(OptionError, "size must be at least", load, weights, size=0)
    raises(OptionError, "size must be an integer, got 'big'", load, weights, size="big")
    raises(OptionError, r"one of size, .*, got 'sise'; did you mean size", load, weights, sise=64)
    raises(OptionError, "size must be an integer, got True", load, weights, size=True)
    raises(OptionError, "batch must be an integer", list, predictor.many([], batch=1.5))
    for none in ("a.png", None, Image.new("RGB", (8, 8))):
        raises(OptionError, "takes a list of .*, got .*; pass", list, predictor.many(none))
    if len(task.images) > 1:
        raises(DataError, "takes 2 image.*, got 1;", list, predictor.many(["a.png"]))
        (error,) = predictor.many(["a.png"], errors="return")
        assert isinstance(error, DataError)


def test_half_precision_is_close(task, weights, predictor):
    images = tiny.sample(task.name)
    own = tiny.OWN.get(task.name, {})
    half = task.load("predictor").from_pretrained(weights, dtype=torch.bfloat16, **own)
    found = half(*images)
    assert half.settings()["dtype"] == "bfloat16"
    assert type(found) is type(predictor(*images))


def test_memory_that_is_short_halves_a_batch(task, predictor, monkeypatch):
    """The operation that fails is a real one: more memory than any machine has."""
    samples = [tiny.sample(task.name, seed) for seed in range(3)]
    alone = [predictor(*images) for images in samples]
    forward, sizes = predictor.forward, []

    def limited(batch):
        sizes.append(len(batch))
        if len(batch) > most:
            torch.empty(2**50)
        return forward(batch)

    monkeypatch.setattr(predictor, "forward", limited)
    most = 1
    items = [tiny.item(images) for images in samples]
    for found, expected in zip(predictor.many(items, batch=3), alone, strict=True):
        assert_same(found, expected)
    assert sizes == [3, 2, 1, 1, 1]
    most = 0
    told = refusal(OptionError, predictor, *samples[0])
    assert "72x56" in told and " does not fit into the memory of cpu" in told
    assert told.endswith(predictor.advice())


def test_pictures_and_files(task, predictor, tmp_path):
    found = predictor(*tiny.sample(task.name))
    drawn = found.draw(tmp_path / "picture.png", title="a title")
    with Image.open(tmp_path / "picture.png") as stored:
        assert stored.size == drawn.size
    raises(OptionError, r"pictures are written as \.png", found.draw, tmp_path / "picture.txt")
    codec = task.load("codec")()
    path = tmp_path / f"result{codec.suffixes[0]}"
    found.save(path)
    again = type(found).load(path)
    assert type(again) is type(found)
    if task.name != "stereo":  # whose pictures do without
        raises(OptionError, "have no image", again.draw)
    handed = {"match": {"images": found.images}, "segment": {"image": found.images[0]}}
    if task.name in handed:
        assert again.draw(**handed[task.name]).size == found.draw().size
    codec_bytes = path.read_bytes()
    again.save(path)
    assert len(path.read_bytes()) == len(codec_bytes)
    raises(OptionError, "results are written as", found.save, tmp_path / "result.doc")
    path.write_bytes(b"something else")
    raises(DataError, path.name, type(found).load, path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["picture.png", path.name]


def test_preprocessing_travels_and_settings_build_the_same(task, weights, predictor):
    images = tiny.sample(task.name)
    again = pickle.loads(pickle.dumps(predictor.preprocess))
    prepared = again(*images)
    assert prepared.key == predictor.preprocess(*images).key
    assert_same(predictor.run([prepared])[0], predictor(*images))
    settings = json.loads(json.dumps(predictor.settings()))
    rebuilt = task.load("predictor").from_pretrained(
        weights, dtype=settings["dtype"], **settings["options"]
    )
    assert rebuilt.settings() == settings
    assert_same(rebuilt(*images), predictor(*images))


def test_names_of_tasks_are_checked():
    raises(OptionError, r"the task must be one of .* did you mean stereo", get_task, "sterio")
