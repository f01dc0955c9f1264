# SPDX-License-Identifier: Apache-2.0
"""The data module that all tasks share, with a source whose samples are numbers."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentError, ArgumentParser

from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.tasks.contract import get_task
from quadtree_attention.tasks.training.data import SyntheticData, TaskData, listed, read_or_replace
from quadtree_attention.tasks.training.loader import Draw
from tests.support import raises
from tests.support.commands import refusal
from tests.support.training import batches


class Numbers:
    """Samples 0, 1, ...; those of `bad` cannot be read."""

    def __init__(self, count, bad=(), classes=None, skipped=()):
        self.count, self.bad, self.classes, self.skipped = count, bad, classes, skipped

    def __len__(self):
        return self.count

    def images(self, index):
        if index in self.bad:
            raise DataError(f"cannot decode {index}.png")
        return (float(index),)

    def truth(self, index):
        return index % 3


class NumberData(TaskData):
    def __init__(self, train=None, val=None, **options):
        super().__init__(**{"batch_size": 4, "workers": 0} | options)
        self.splits = {"train": train or Numbers(12), "val": val or Numbers(6)}
        self.opened = []

    def open(self, split):
        self.opened.append(split)
        return self.splits[split]

    def train_sample(self, images, truth):
        return {"images": torch.tensor(images[0]) + torch.rand(()), "labels": truth}

    def val_sample(self, images, truth):
        return {"images": torch.tensor(images[0]), "labels": truth}

    def finish(self, batch, *, training):
        return batch | {"training": training}


class Dropping(NumberData):
    replaces = False

    def collate(self, samples, *, training):
        return listed(samples, "images", "labels")


def test_batches():
    first = batches(NumberData(seed=1))
    assert all(batch["training"] for batch in first)
    assert [len(batch["images"]) for batch in first] == [4, 4, 4]
    assert sorted(torch.cat([batch["indices"] for batch in first]).tolist()) == list(range(12))
    for batch in first:
        assert batch["labels"].tolist() == [i % 3 for i in batch["indices"].tolist()]
        assert batch["images"].long().tolist() == batch["indices"].tolist()
    whole = batches(NumberData(), "val")
    assert [batch["images"].tolist() for batch in whole] == [[0, 1, 2, 3], [4, 5]]
    assert not any(batch["training"] for batch in whole)


def test_draws_follow_from_seed_epoch_and_index():
    def drawn(**options):
        epoch = options.pop("epoch", 0)
        return {
            index: image % 1
            for batch in batches(NumberData(**options), epoch=epoch)
            for index, image in zip(
                batch["indices"].tolist(), batch["images"].tolist(), strict=True
            )
        }

    first = drawn(seed=1)
    assert drawn(seed=1, batch_size=3) == pytest.approx(first)  # whatever batch a sample is in
    assert drawn(seed=1, workers=2) == first
    assert drawn(seed=2) != first and drawn(seed=1, epoch=1) != first
    assert len(set(first.values())) == len(first)


def test_workers_get_no_trainer():
    """Which would bring the network with it."""
    data = NumberData()
    data.setup("fit")
    data.trainer = SimpleNamespace(global_rank=0, world_size=1, model=lambda: "cannot be pickled")
    alone = pickle.loads(pickle.dumps(data.train_dataloader().dataset))
    assert alone[Draw(0, 5)]["indices"] == 5


def test_unusable_samples_are_replaced_or_left_out_and_reported():
    data = NumberData(train=Numbers(12, bad=(3, 4)))
    made = batches(data)
    assert sorted(torch.cat([b["indices"] for b in made]).tolist()) == sorted(
        [0, 1, 2, 5, 5, 5, 6, 7, 8, 9, 10, 11]
    )
    told = [reason for batch in made for reason in batch["skipped"]]
    assert sorted(told) == [f"cannot decode {i}.png" for i in (3, 4, 4)]
    val = batches(NumberData(val=Numbers(3, bad=(2,))), "val")
    assert val[0]["indices"].tolist() == [0, 1, 0]
    made = batches(Dropping(val=Numbers(5, bad=(1, 4))), "val")
    assert [batch["indices"].tolist() for batch in made] == [[0, 2, 3], []]
    assert [batch["skipped"] for batch in made] == [
        ["cannot decode 1.png"],
        ["cannot decode 4.png"],
    ]
    assert made[0]["labels"] == [0, 2, 0]


@pytest.mark.parametrize("kind", [NumberData, Dropping])
def test_strict_refuses_the_first_unusable_sample(kind):
    for split in ("train", "val"):
        data = kind(**{split: Numbers(8, bad=(3,)), "strict": True})
        told = refusal(DataError, batches, data, split)
        assert told == "cannot decode 3.png; fix it, or leave out --data.strict"


def test_what_replaces_what():
    source = Numbers(200, bad=range(60))
    assert read_or_replace(source, 11)[2] == 60
    with pytest.raises(DataError, match=r"50 images in a row cannot be read: .*, and 45 more"):
        read_or_replace(source, 10)
    with pytest.raises(DataError, match="3 pairs in a row cannot be read"):
        read_or_replace(Numbers(3, bad=range(3)), 1, item="pair")
    source = Numbers(12, bad=(5,))
    source.replacement = lambda index, step: index if step == 0 else 2
    made = batches(NumberData(source))
    assert sorted(torch.cat([batch["indices"] for batch in made]).tolist()).count(2) == 2


def test_limit_and_counts():
    data = NumberData(limit_images=5)
    assert [batch["indices"].tolist() for batch in batches(data, "val")] == [[0, 1, 2, 3], [4]]
    assert data.batches_per_epoch == len(batches(data)) == 1
    assert refusal(OptionError, batches, NumberData(batch_size=13)) == (
        "12 training images do not fill one batch of 13 on 1 processes; pass a smaller "
        "--data.batch_size"
    )


def test_sources_are_opened_once_reported_and_compared(capsys):
    data = NumberData(train=Numbers(12, skipped=("a.txt is no image",)))
    data.setup("fit")
    data.setup("fit")
    assert data.opened == ["train", "val"]
    assert capsys.readouterr().err == "quadtree: train: skipped 1 files: a.txt is no image\n"
    data = NumberData(Numbers(12, classes=["cat", "dog"]), Numbers(6, classes=["cat", "wolf"]))
    assert data.classes == ["cat", "dog"]
    told = refusal(DataError, data.setup, "fit")
    assert told == "train has the classes cat, dog, val has cat, wolf; both need the same"


class Scenes(SyntheticData):
    """Scenes of two colours.

    Args:
        source: "synthetic".
        height: Of the images.
    """

    def __init__(self, source="synthetic", height: int = 32, **common) -> None:
        super().__init__(size=(height, 2 * height), **common)


def test_shared_options_are_offered_and_misspelt_ones_refused():
    """The parser follows `**common` to the options of the base class."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Scenes, "data")
    shown = parser.format_help()
    assert "--data.textures" in shown and "Folder of photographs" in shown
    assert "--data.height" in shown and "--data.size" not in shown
    found = parser.instantiate_classes(parser.parse_args(["--data.pairs", "6"])).data
    assert (found.pairs, found.size) == (6, (32, 64))
    raises(ArgumentError, "pars", parser.parse_args, ["--data.pars", "6"])


def test_synthetic_pairs_are_new_in_every_epoch_and_others_in_validation():
    data = SyntheticData(size=(32, 48), pairs=4, val_pairs=3, batch_size=2)

    def numbers(split, epoch):
        loader = data.loader(split)
        loader.sampler.set_epoch(epoch)
        return sorted(number for batch in loader for number in batch["indices"].tolist())

    assert [numbers("train", epoch) for epoch in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [numbers("val", epoch) for epoch in (0, 1)] == [[0, 1, 2]] * 2
    training, validation = (data.seeded(training=x) for x in (True, False))
    assert training["size"] == validation["size"] == (32, 48)
    assert training["seed"] != validation["seed"]


@pytest.mark.parametrize("name", ["classify", "detect", "segment"])
def test_generated_validation_images_are_not_trained_on(name):
    data = get_task(name).load("data", "generated")(generated_count=16, batch_size=4, workers=0)
    data.setup("fit")
    train, val = (
        {np.asarray(source.images(i)[0]).tobytes() for i in range(len(source))}
        for source in map(data.source, ("train", "val"))
    )
    assert (len(train), len(val)) == (16, 4) and not train & val
