# SPDX-License-Identifier: Apache-2.0
"""What data rendered on the device that trains have in common, whatever they show."""

from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset

from quadtree_attention.data import MixedTextures, PhotoTextures, ProceduralTextures, Textures
from quadtree_attention.errors import OptionError
from quadtree_attention.tasks.training.loader import Draw

Batch = dict[str, Any]
PROCEDURAL = 96


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
