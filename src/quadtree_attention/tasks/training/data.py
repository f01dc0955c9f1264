# SPDX-License-Identifier: Apache-2.0
"""Data modules: batches of the samples of a source, and of scenes rendered on the device."""

import copy
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import pytorch_lightning as pl
import torch
from torch.utils.data import Dataset

from quadtree_attention.checks import at_least, known
from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.synthetic import MixedTextures, PhotoTextures, ProceduralTextures, Textures
from quadtree_attention.tasks.readers import refuse_if, summary
from quadtree_attention.tasks.training import loader
from quadtree_attention.tasks.training.loader import EpochSampler, ResumableLoader

if TYPE_CHECKING:
    from quadtree_attention.tasks.contract import Source

Batch = dict[str, Any]
Sample = dict[str, Any]
Split = Literal["train", "val"]
ATTEMPTS = 50  # maximum number of consecutive unreadable samples
FIX = "fix it, or leave out --data.strict"
PROCEDURAL = 96


class TaskData(pl.LightningDataModule):
    """Batches of the samples of a source, read in worker processes.

    Subclasses define `open`, `train_sample` and `val_sample`, and where needed `finish`, `collate`,
    `available` and `place`. Everything random in a sample is drawn from (seed, epoch, index).

    Args:
        batch_size: Training batch size per process.
        workers: Processes that read files; None: one per core, 8 at most; 0 reads in the process.
        strict: Fail at the first file that cannot be used instead of counting and replacing it.
        seed: Seed of order and augmentation.
        limit_images: Maximum number of samples per split, the first ones.
    """

    item: ClassVar[str] = "image"  # a sample, in messages
    more: ClassVar[str] = ""  # advice to fill a batch, such as "more --data.pairs or "
    # An unusable sample of validation is replaced by the next one, as in training; False: left out
    replaces: ClassVar[bool] = True
    floats: ClassVar[tuple[str, ...]] = ()  # entries of a batch that are copied as bytes
    val_pairs: int | None = None  # maximum number of validation samples, evenly spread

    def __init__(
        self,
        *,
        batch_size: int,
        workers: int | None = None,
        strict: bool = False,
        seed: int = 0,
        limit_images: int | None = None,
    ) -> None:
        super().__init__()
        at_least(1, batch_size=batch_size, limit_images=limit_images)
        at_least(0, workers=workers)
        self.batch_size = self.eval_batch_size = batch_size
        self.workers = min(8, os.cpu_count() or 1) if workers is None else workers
        self.strict, self.seed, self.limit_images = strict, seed, limit_images
        self._sources: dict[Split, Source[Any]] = {}

    def open(self, split: Split) -> "Source[Any]":
        """The samples of a split. Raises `DataError`, with `strict` for any unusable file."""
        raise NotImplementedError

    def train_sample(self, images: Any, truth: Any) -> Sample:
        """Tensors of one training sample; random generators are seeded for it."""
        raise NotImplementedError

    def val_sample(self, images: Any, truth: Any) -> Sample:
        """Tensors of one validation sample."""
        raise NotImplementedError

    def collate(self, samples: list[Sample], *, training: bool) -> Batch:
        """A batch of samples."""
        return stacked(samples)

    def finish(self, batch: Batch, *, training: bool) -> Batch:
        """A batch on its device as the network takes it, bytes turned into floats."""
        return batch | {name: batch[name].float() / 255 for name in self.floats}

    def available(self, split: Split) -> int:
        """Samples of an epoch without `limit_images`."""
        there = len(self.source(split))
        return there if split == "train" else min(there, self.val_pairs or sys.maxsize)

    def count(self, split: Split) -> int:
        """Samples of an epoch."""
        return min(self.available(split), self.limit_images or sys.maxsize)

    def place(self, split: Split, index: int) -> int:
        """Return the index in the source of sample `index` of an epoch; may be random."""
        return index * len(self.source(split)) // self.available(split)

    def source(self, split: Split) -> Any:
        """Open the samples of a split once; report skipped samples and compare classes."""
        if split not in self._sources:
            source = self.open(split)
            if source.skipped:
                tell(f"{split}: {self.report(source)}")
            for other in self._sources.values():
                if list(source.classes or ()) != list(other.classes or ()):
                    train, val = (source, other) if split == "train" else (other, source)
                    raise DataError(
                        f"train has the classes {', '.join(train.classes or ())}, val has "
                        f"{', '.join(val.classes or ())}; both need the same"
                    )
            self._sources[split] = source
        return self._sources[split]

    def report(self, source: Any) -> str:
        """Return a message about the samples that a source skips."""
        return f"skipped {len(source.skipped)} files: {summary(source.skipped)}"

    @property
    def classes(self) -> list[str]:
        """Names of the classes; none where the task has none."""
        return list(self.source("train").classes or ())

    @property
    def batches_per_epoch(self) -> int:
        """Training batches of one process."""
        return len(self.sampler("train")) // self.batch_size

    def setup(self, stage: str | None = None) -> None:
        if stage in (None, "fit"):
            self.source("train")
        self.source("val")

    def train_dataloader(self) -> ResumableLoader:
        if len(sampler := self.sampler("train")) == 0:
            raise OptionError(
                f"{sampler.size} training {self.item}s do not fill one batch of "
                f"{sampler.batch_size} on {sampler.world_size} processes; pass {self.more}a "
                "smaller --data.batch_size"
            )
        return self.loader("train")

    def val_dataloader(self) -> ResumableLoader:
        return self.loader("val")

    def sampler(self, split: Split) -> EpochSampler:
        """Return the sampler of this process for an epoch."""
        training = split == "train"
        return EpochSampler(
            self.count(split),
            self.batch_size if training else self.eval_batch_size,
            seed=self.seed,
            shuffle=training,
            rank=self.trainer.global_rank if self.trainer else 0,
            world_size=self.trainer.world_size if self.trainer else 1,
        )

    def loader(self, split: Split) -> ResumableLoader:
        """Batches of a split, made in the workers."""
        sampler, source = self.sampler(split), self.source(split)
        options: dict[str, Any] = {"pin_memory": torch.cuda.is_available()}
        if self.workers > 0:
            options |= {"num_workers": self.workers, "persistent_workers": True}
        alone = copy.copy(self)  # workers get no trainer and no network
        alone.trainer, alone._sources = None, {split: source}
        dataset = loader.SeededDataset(sampler.size, partial(alone.read, split), self.seed)
        collate = partial(alone.collate, training=split == "train")
        return ResumableLoader(dataset, sampler, collate_fn=collate, **options)

    def read(self, split: Split, index: int) -> Sample:
        """Sample `index` of an epoch, its place in the source, and why others were skipped."""
        source, place = self.source(split), self.place(split, index)
        skipped: list[str] = []
        if split == "train" or self.replaces:
            images, truth, place, skipped = read_or_replace(
                source, place, item=self.item, strict=self.strict
            )
        else:
            try:
                images, truth = source.images(place), source.truth(place)
            except DataError as error:
                return {"skipped": [refuse_if(self.strict, error, FIX)]}
        make = self.train_sample if split == "train" else self.val_sample
        return make(images, truth) | {"indices": place, "skipped": skipped}

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return self.finish(batch, training=self.trainer is not None and self.trainer.training)


def read_or_replace(
    source: Any, index: int, *, item: str = "image", strict: bool = False
) -> tuple[Any, Any, int, list[str]]:
    """Images and truth of a sample, its index, and why those before it cannot be read.

    The next readable sample replaces an unreadable one, so that batches stay whole. A source with a
    method `replacement(index, step)` returns the index of the sample to try at each step itself.

    Raises:
        DataError: 50 samples in a row, or all, cannot be read; with `strict`, one.
    """
    count = len(source)
    own = getattr(source, "replacement", None)  # which may try a sample again
    after = own or (lambda index, step: (index + step) % count)
    reasons: list[str] = []
    for step in range(ATTEMPTS if own else min(ATTEMPTS, count)):
        place = after(index, step)
        try:
            return source.images(place), source.truth(place), place, reasons
        except DataError as error:
            reasons.append(refuse_if(strict, error, FIX))
    raise DataError(
        f"{len(reasons)} {item}s in a row cannot be read: {summary(list(dict.fromkeys(reasons)))}; "
        "check the files"
    )


def stacked(samples: Sequence[Sample]) -> Batch:
    """Samples of equal sizes, by name: tensors with a batch axis; `skipped` of all."""
    batch: Batch = {}
    for name in (name for name in samples[0] if name != "skipped"):
        values = [sample[name] for sample in samples]
        is_tensor = isinstance(values[0], torch.Tensor)
        batch[name] = torch.stack(values) if is_tensor else torch.tensor(values)
    return batch | {"skipped": [reason for sample in samples for reason in sample["skipped"]]}


def listed(samples: Sequence[Sample], *names: str) -> Batch:
    """Samples of any sizes, by name: lists; without those that could not be read."""
    usable = [sample for sample in samples if "indices" in sample]
    return {name: [sample[name] for sample in usable] for name in names} | {
        "indices": torch.tensor([sample["indices"] for sample in usable], dtype=torch.int64),
        "skipped": [reason for sample in samples for reason in sample["skipped"]],
    }


def tell(message: str) -> None:
    print(f"quadtree: {message}", file=sys.stderr)


class SyntheticData(TaskData):
    """Pairs that are rendered on the training device; loaders only yield their numbers.

    Subclasses define `render`.

    Args:
        textures: Folder of photographs used as textures; None: procedural textures only.
        procedural: Number of procedural textures; by default 96, or at most the number of
            photographs.
        texture_size: Side of a texture in pixels.
        size: (height, width) of the images.
        pairs: Pairs per epoch.
        val_pairs: Validation pairs, the same in every epoch.
        batch_size: Batch size per process.
        seed: Seed of scenes and order.
    """

    item = "pair"
    more = "more --data.pairs or "
    classes = ()  # type: ignore[assignment]
    val_pairs: int

    def __init__(
        self,
        *,
        size: tuple[int, int],
        textures: str | None = None,
        procedural: int | None = None,
        texture_size: int = 320,
        pairs: int = 4000,
        val_pairs: int = 200,
        batch_size: int = 4,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size=batch_size, workers=0, seed=seed)
        at_least(1, pairs=pairs, val_pairs=val_pairs)
        self.size, self.pairs, self.val_pairs = size, pairs, val_pairs
        self.folder, self.procedural, self.texture_size = textures, procedural, texture_size
        self._textures: Textures | None = None

    def render(self, textures: Textures, indices: list[int], *, training: bool) -> Batch:
        """The pairs with these numbers."""
        raise NotImplementedError

    def available(self, split: Split) -> int:
        return self.pairs if split == "train" else self.val_pairs

    def setup(self, stage: str | None = None) -> None:
        """Create the textures on the training device: a GPU takes seconds, a CPU minutes."""
        if self._textures is not None:
            return
        device = self.trainer.strategy.root_device if self.trainer else torch.device("cpu")
        made = partial(ProceduralTextures, size=self.texture_size, device=device)
        if self.folder is None:
            self._textures = made(PROCEDURAL if self.procedural is None else self.procedural)
            return
        photos = PhotoTextures(self.folder, size=self.texture_size).to(device)
        count = min(PROCEDURAL, len(photos)) if self.procedural is None else self.procedural
        self._textures = MixedTextures(photos, made(count)) if count else photos

    def loader(self, split: Split) -> ResumableLoader:
        numbers = PairNumbers(self.count(split), training=split == "train")
        return ResumableLoader(numbers, self.sampler(split), collate_fn=dict)  # a sample is a batch

    def transfer_batch_to_device(
        self, batch: Batch, device: torch.device, dataloader_idx: int
    ) -> Batch:
        """Keep the numbers on the CPU: reading them back would synchronise with the device."""
        return {**batch, "device": device}

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Render the pairs whose numbers the batch holds."""
        assert self._textures is not None
        textures = self._textures.to(batch.get("device", batch["indices"].device))
        training = batch["training"]
        batch = self.render(textures, batch["indices"].tolist(), training=training)
        return self.finish(batch, training=training)

    def seeded(self, *, training: bool) -> dict[str, Any]:
        """Size and seed of scenes; training and validation have different seeds."""
        return {"size": self.size, "seed": loader.seed_from(self.seed, 0 if training else 1)}


@dataclass(eq=False)
class PairNumbers(Dataset[Batch]):
    """Numbers of pairs, different in every training epoch."""

    count: int
    training: bool

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, draws: list[loader.Draw]) -> Batch:
        epoch = self.count if self.training else 0
        numbers = [draw.epoch * epoch + draw.sample for draw in draws]
        return {"indices": torch.tensor(numbers), "training": self.training}


def options_of(kind: Any, name: str, given: dict[str, Any] | None) -> Any:
    """Create options of a dataclass from a recipe, in which ranges are lists."""
    for key in given or {}:
        known(key, [field.name for field in fields(kind)], f"an option of {name}")
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in (given or {}).items()}
    return kind(**values)
