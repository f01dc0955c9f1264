# SPDX-License-Identifier: Apache-2.0
"""What data rendered on the device that trains have in common, whatever they show."""

from dataclasses import fields
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import Dataset

from quadtree_attention.errors import OptionError
from quadtree_attention.synthetic import MixedTextures, PhotoTextures, ProceduralTextures, Textures
from quadtree_attention.tasks.training.loader import (
    Draw,
    EpochSampler,
    ResumableLoader,
    sampler_of,
    seed_from,
)

Batch = dict[str, Any]
PROCEDURAL = 96


class SyntheticData(pl.LightningDataModule):
    """Pairs that are rendered on the device that trains; loaders give their numbers only.

    Subclasses define `render`.

    Args:
        textures: Folder of photographs to cover surfaces with; None: procedural textures only.
        procedural: Procedural textures, as `make_textures` takes them.
        texture_size: Pixels on a side of a texture.
        size: (height, width) of the images.
        pairs: Pairs of an epoch.
        val_pairs: Pairs to validate on, always the same.
        batch_size: Pairs of a batch on one process.
        seed: Decides scenes and order.
    """

    def __init__(
        self,
        *,
        textures: str | None,
        procedural: int | None,
        texture_size: int,
        size: tuple[int, int],
        pairs: int,
        val_pairs: int,
        batch_size: int,
        seed: int,
    ) -> None:
        super().__init__()
        check_counts(pairs=pairs, val_pairs=val_pairs, batch_size=batch_size)
        self.folder = textures
        self.procedural = procedural
        self.texture_size = texture_size
        self.size = size
        self.pairs = pairs
        self.val_pairs = val_pairs
        self.batch_size = batch_size
        self.seed = seed
        self._textures: Textures | None = None

    def render(self, textures: Textures, indices: list[int], *, training: bool) -> Batch:
        """The pairs with these numbers."""
        raise NotImplementedError

    @property
    def batches_per_epoch(self) -> int:
        """Training batches of one process."""
        return len(self._sampler(self.pairs, shuffle=True)) // self.batch_size

    def setup(self, stage: str | None = None) -> None:
        if self._textures is None:
            device = self.trainer.strategy.root_device if self.trainer else torch.device("cpu")
            given = self.folder, self.procedural, self.texture_size
            self._textures = make_textures(*given, device)

    def train_dataloader(self) -> ResumableLoader:
        if self.batches_per_epoch == 0:
            raise OptionError(
                f"{self.pairs} pairs do not fill one batch of {self.batch_size} on every process; "
                "pass more --data.pairs or a smaller --data.batch_size"
            )
        return self._loader(self.pairs, training=True)

    def val_dataloader(self) -> ResumableLoader:
        return self._loader(self.val_pairs, training=False)

    def transfer_batch_to_device(
        self, batch: Batch, device: torch.device, dataloader_idx: int
    ) -> Batch:
        """Leaves the numbers where they are: to read them back would wait for the device."""
        return {**batch, "device": device}

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Renders the pairs whose numbers the batch holds."""
        assert self._textures is not None
        textures = self._textures.to(batch.get("device", batch["indices"].device))
        return self.render(textures, batch["indices"].tolist(), training=batch["training"])

    def seeded(self, *, training: bool) -> dict[str, Any]:
        """Size and seed of scenes; validation has a seed whose scenes training does not see."""
        return {"size": self.size, "seed": seed_from(self.seed, 0 if training else 1)}

    def _loader(self, count: int, *, training: bool) -> ResumableLoader:
        sampler = self._sampler(count, shuffle=training)
        numbers = PairNumbers(count, training=training)
        return ResumableLoader(numbers, sampler, collate_fn=as_it_is)

    def _sampler(self, count: int, *, shuffle: bool) -> EpochSampler:
        return sampler_of(self, count, self.batch_size, shuffle=shuffle)


def check_counts(**counts: int) -> None:
    """Raises `OptionError` for what is not at least 1."""
    for name, value in counts.items():
        if value < 1:
            raise OptionError(f"{name} must be at least 1, got {value}; pass more")


class PairNumbers(Dataset[Batch]):
    """Numbers of pairs, new ones in every epoch of training."""

    def __init__(self, count: int, *, training: bool) -> None:
        self.count = count
        self.training = training

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, draws: list[Draw]) -> Batch:
        epoch = self.count if self.training else 0
        numbers = [draw.epoch * epoch + draw.sample for draw in draws]
        return {"indices": torch.tensor(numbers), "training": self.training}


def as_it_is(batch: Batch) -> Batch:
    """Collates what is a batch already."""
    return batch


def make_textures(
    folder: str | None, procedural: int | None, size: int, device: torch.device
) -> Textures:
    """Photographs of a folder, if there is one, and procedural textures.

    Made where they are used: a GPU takes seconds for what a CPU takes minutes for.

    Args:
        folder: Of photographs.
        procedural: Procedural textures; None: 96, but no more than photographs if those are there.
        size: Pixels on a side of a texture.
        device: Where they are used.
    """
    made = partial(ProceduralTextures, size=size, device=device)
    if folder is None:
        return made(PROCEDURAL if procedural is None else procedural)
    photos = PhotoTextures(folder, size=size).to(device)
    count = min(PROCEDURAL, len(photos)) if procedural is None else procedural
    return MixedTextures(photos, made(count)) if count else photos


def options_of(kind: Any, name: str, given: dict[str, Any] | None) -> Any:
    """Options of a dataclass from a recipe, whose ranges come as lists."""
    known = [field.name for field in fields(kind)]
    if unknown := [key for key in given or {} if key not in known]:
        raise OptionError(
            f"{name} must have options out of {', '.join(known)}, got {', '.join(unknown)}; "
            "leave out what is not among them"
        )
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in (given or {}).items()}
    return kind(**values)
