# SPDX-License-Identifier: Apache-2.0
"""Order, shares and random numbers: functions of the seed, the epoch and the sample alone."""

import random
from itertools import chain

import numpy as np
import pytest
import torch

from quadtree_attention.errors import DataError
from quadtree_attention.tasks.training.loader import (
    Draw,
    EpochSampler,
    ResumableLoader,
    SeededDataset,
    seed_from,
)
from tests.support.commands import refusal


def order(size=37, batch_size=4, epoch=0, **options):
    sampler = EpochSampler(size, batch_size, shuffle=True, **options)
    sampler.set_epoch(epoch)
    return [draw.sample for draw in sampler]


def in_batches(samples, size):
    return [samples[i : i + size] for i in range(0, len(samples), size)]


def numbers(sample):
    """Everything that can be drawn, by the libraries that transforms draw from."""
    return [sample, random.random(), np.random.rand(), float(torch.rand(()))]


def as_lists(samples):
    return torch.tensor(samples, dtype=torch.float64)


def loader(seed=0, workers=0, size=22, batch_size=4):
    sampler = EpochSampler(size, batch_size, seed=seed, shuffle=True)
    dataset = SeededDataset(size, numbers, seed)
    return ResumableLoader(dataset, sampler, num_workers=workers, collate_fn=as_lists)


def epochs(loader, count=1):
    """What Lightning does: tells the sampler the epoch, then goes through the loader."""
    batches = []
    for _ in range(count):
        batches.append([batch.tolist() for batch in loader])
        loader.sampler.set_epoch(loader.sampler.epoch + 1)
    return batches


def test_order_is_a_function_of_seed_and_epoch():
    first = order(seed=5, epoch=2)
    torch.manual_seed(99)
    assert order(seed=5, epoch=2) == first
    assert order(seed=5, epoch=3) != first
    assert order(seed=6, epoch=2) != first


@pytest.mark.parametrize(("size", "batch_size", "world"), [(37, 4, 2), (40, 2, 5), (9, 3, 3)])
def test_ranks_share_every_batch_of_one_process(size, batch_size, world):
    together = in_batches(order(size, batch_size * world, seed=1, epoch=3), batch_size * world)
    shares = [
        in_batches(
            order(size, batch_size, seed=1, epoch=3, rank=rank, world_size=world), batch_size
        )
        for rank in range(world)
    ]
    assert [list(chain(*batch)) for batch in zip(*shares, strict=True)] == together
    everything = list(chain(*together))
    assert len(set(everything)) == len(everything)
    assert len(everything) == size // (batch_size * world) * batch_size * world


def test_what_a_sampler_gives():
    for world in (1, 2, 3):
        for shuffle in (True, False):
            sampler = EpochSampler(23, 4, shuffle=shuffle, rank=world - 1, world_size=world)
            assert len(list(sampler)) == len(sampler)
    shares = [[d.sample for d in EpochSampler(11, 4, rank=r, world_size=3)] for r in range(3)]
    assert sorted(chain(*shares)) == list(range(11))
    assert all(share == sorted(share) for share in shares)
    sampler = EpochSampler(20, 4, shuffle=True)
    whole = list(sampler)
    sampler.skip_batches = 2
    assert list(sampler) == whole[8:]
    assert list(sampler) == whole
    assert len(sampler) == 20


def test_loader_goes_on_after_any_batch():
    whole = epochs(loader(), 2)
    for given in range(1, 5):
        stopped = loader()
        iterator = iter(stopped)
        for _ in range(given):
            next(iterator)
        state = stopped.state_dict()
        assert state == {"epoch": 0, "batches": given}
        resumed = loader()
        resumed.load_state_dict(state)
        assert epochs(resumed, 2) == [whole[0][given:], whole[1]]
    resumed = loader()
    resumed.load_state_dict({"epoch": 3, "batches": 2})
    iterator = iter(resumed)
    next(iterator)
    assert resumed.state_dict() == {"epoch": 3, "batches": 3}
    finished = loader()
    list(finished)
    resumed = loader()
    resumed.load_state_dict(finished.state_dict())
    assert resumed.sampler.epoch == 1
    assert epochs(resumed) == epochs(loader(), 2)[1:]


def test_random_numbers_follow_seed_epoch_and_sample_alone():
    alone = epochs(loader(workers=0), 2)
    torch.manual_seed(7)
    random.seed(7)
    assert epochs(loader(workers=2), 2) == alone
    assert epochs(loader(seed=1), 2) != alone
    dataset = SeededDataset(9, numbers)
    assert dataset[Draw(0, 4)] == dataset[Draw(0, 4)]
    drawn = [dataset[Draw(epoch, sample)][1:] for epoch in range(3) for sample in range(9)]
    for values in zip(*drawn, strict=True):
        assert len(set(values)) == len(drawn)
    keys = [(), (3,), (3, 0), (3, 0, 0), (0, 3), (2**32,), (0, 1), (1, 0), (3, 0, 0, 0), (2**40, 1)]
    seeds = [seed_from(*key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert seed_from(3, 1, 4) == seed_from(3, 1, 4)


def unreadable(sample):
    raise DataError(f"cannot read {sample}: it is gone; get it again")


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_of_workers_come_without_a_traceback(workers):
    sampler = EpochSampler(2, 1)
    broken = ResumableLoader(SeededDataset(2, unreadable), sampler, num_workers=workers)
    assert refusal(DataError, list, broken) == "cannot read 0: it is gone; get it again"
