# SPDX-License-Identifier: Apache-2.0
"""Batches determined by the seed, the epoch and their number.

All random numbers of a sample are drawn from `(seed, epoch, index)`, independently of the worker or
process. A run can therefore be resumed after any batch, and several processes together get the
same batches as one process with their total batch size.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from quadtree_attention.errors import QuadtreeAttentionError


class Draw(NamedTuple):
    """One sample, and the epoch it is drawn for."""

    epoch: int
    sample: int


def seed_from(*numbers: int) -> int:
    """One seed of 32 bits from several numbers, well mixed."""
    entropy = (len(numbers), *numbers)  # NumPy takes (3, 0) for (3,)
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def set_seed(seed: int) -> None:
    """Seed Python, NumPy and torch, all devices included."""
    random.seed(seed)
    np.random.seed(seed)  # transforms of libraries use it
    torch.manual_seed(seed)


@dataclass(eq=False)
class EpochSampler(Sampler[Draw]):
    """Sampler of the share of one process in the batches of an epoch.

    With `shuffle`, as in training, the order changes every epoch, and only batches that are
    complete on all processes are used. Otherwise every sample is used once, in order.
    """

    size: int  # samples of the data set
    batch_size: int  # on one process
    seed: int = 0  # seed of the order of every epoch
    shuffle: bool = False
    rank: int = 0  # this process
    world_size: int = 1
    epoch: int = 0
    skip_batches: int = 0  # of the next pass only

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        if not self.shuffle:
            return len(range(self.rank, self.size, self.world_size))
        return self.size // (self.batch_size * self.world_size) * self.batch_size

    def __iter__(self) -> Iterator[Draw]:
        skipped, self.skip_batches = self.skip_batches, 0
        mine = list(range(self.rank, self.size, self.world_size))
        if self.shuffle:
            rng = torch.Generator().manual_seed(seed_from(self.seed, self.epoch))
            together = self.batch_size * self.world_size
            whole = torch.randperm(self.size, generator=rng)[: self.size // together * together]
            batches = whole.view(-1, self.world_size, self.batch_size)
            mine = batches[:, self.rank].flatten().tolist()
        return iter([Draw(self.epoch, sample) for sample in mine[skipped * self.batch_size :]])


@dataclass(eq=False)
class SeededDataset(Dataset[Any]):
    """Dataset that seeds all generators from `(seed, epoch, index)` before it reads a sample."""

    size: int
    read: Callable[[int], Any]
    seed: int = 0  # the run's

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, draw: Draw) -> Any:
        set_seed(seed_from(self.seed, draw.epoch, draw.sample))
        return self.read(draw.sample)


class ResumableLoader(DataLoader[Any]):
    """A `DataLoader` that counts the yielded batches of the epoch.

    Lightning stores `state_dict()` in every checkpoint and restores it before the first batch.
    """

    sampler: EpochSampler

    def __init__(self, dataset: Dataset[Any], sampler: EpochSampler, **options: Any) -> None:
        super().__init__(dataset, batch_size=sampler.batch_size, sampler=sampler, **options)
        self.given = 0

    def __iter__(self) -> Any:
        self.given = self.sampler.skip_batches
        try:
            for batch in super().__iter__():
                self.given += 1
                yield batch
        except QuadtreeAttentionError as error:  # drop the traceback of the worker
            kind = f"{type(error).__module__}.{type(error).__qualname__}: "
            raise type(error)(str(error).rpartition(kind)[2].strip()) from error

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.sampler.epoch, "batches": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        finished = state["batches"] >= len(self)
        self.sampler.set_epoch(state["epoch"] + finished)
        self.sampler.skip_batches = 0 if finished else state["batches"]
