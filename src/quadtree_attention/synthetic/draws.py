# SPDX-License-Identifier: Apache-2.0
"""Random numbers that belong to an item, not to the batch it happens to be in."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quadtree_attention.errors import OptionError

BYTE_SUM_STD = math.sqrt((256**2 - 1) / 3)  # of the sum of four independent bytes


class Draws:
    """Random numbers for a batch; item i reads the stream named by (seed, indices[i], stream).

    Parameters of scenes are drawn in float64 on the CPU: they are few, and so they are the same
    whatever device renders them. Noise per pixel is hashed on the device.

    Args:
        seed: Of the data set.
        indices: Numbers of the items.
        stream: Separates uses, so that one can change without moving the others.
    """

    def __init__(self, seed: int, indices: Sequence[int], stream: int = 0) -> None:
        if seed < 0 or not len(indices) or min(indices) < 0:
            raise OptionError(
                "scenes are numbered by a seed >= 0 and at least one index >= 0, got "
                f"seed={seed}, indices={list(indices)[:8]}; pass e.g. indices=range(4)"
            )
        self._generators = [np.random.default_rng([seed, index, stream]) for index in indices]

    def __len__(self) -> int:
        return len(self._generators)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """(B, *shape) between `low` and `high`."""
        values = np.empty((len(self), math.prod(shape)))
        for generator, row in zip(self._generators, values, strict=True):
            generator.random(out=row)
        return torch.from_numpy(values.reshape(-1, *shape)) * (high - low) + low

    def log_uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """(B, *shape) whose logarithm is uniform: as often half as double."""
        return self.uniform(math.log(low), math.log(high), *shape).exp()

    def normal(self, *shape: int) -> Tensor:
        """(B, *shape) with mean 0 and deviation 1."""
        values = np.empty((len(self), math.prod(shape)))
        for generator, row in zip(self._generators, values, strict=True):
            generator.standard_normal(out=row)
        return torch.from_numpy(values.reshape(-1, *shape))

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """(B, *shape) int64 of `low`, ..., `high` - 1."""
        values = [generator.integers(low, high, shape) for generator in self._generators]
        return torch.from_numpy(np.stack(values))

    def chance(self, probability: float, *shape: int) -> Tensor:
        """(B, *shape) bool, True with `probability`."""
        return self.uniform(0, 1, *shape) < probability

    def unit(self, *shape: int) -> Tensor:
        """(B, *shape, 3) directions, none preferred."""
        return torch.nn.functional.normalize(self.normal(*shape, 3), dim=-1)

    def noise(self, *shape: int, device: torch.device) -> Tensor:
        """(B, *shape) float32, near enough to normal, for every pixel of an image."""
        return hash_noise(self.keys().to(device), *shape)

    def keys(self) -> Tensor:
        """(B, 1) int32 of which `hash_noise` makes the noise of the items."""
        return self.integers(-(2**31), 2**31, 1).to(torch.int32)


def hash_noise(keys: Tensor, *shape: int) -> Tensor:
    """(B, *shape) float32 of (B, 1) int32, each item by its key."""
    count = math.prod(shape)
    place = torch.arange(count, dtype=torch.int32, device=keys.device)
    bits = hash_bits(place + keys)  # (B, count)
    bits = hash_bits(bits + keys * 7919)  # overlapping ranges of two items part here
    total = bits & 255
    for shift in (8, 16, 24):
        total = total + ((bits >> shift) & 255)
    return ((total - 510).float() / BYTE_SUM_STD).reshape(-1, *shape)


def hash_bits(x: Tensor) -> Tensor:
    """A well mixed int32 for every int32 (the hash "lowbias32" of Chris Wellons)."""
    x = x ^ ((x >> 16) & 0xFFFF)  # >> keeps the sign: mask what it brings in
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * -0x7B935975
    return x ^ ((x >> 16) & 0xFFFF)
