# SPDX-License-Identifier: Apache-2.0
"""Random numbers that depend on the item only, not on its batch."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quadtree_attention.errors import OptionError

BYTE_SUM_STD = math.sqrt((256**2 - 1) / 3)  # of the sum of four independent bytes


class Draws:
    """Random numbers for a batch; item i uses the generator of (seed, indices[i], stream).

    Scene parameters are drawn in float64 on the CPU, so that they do not depend on the device that
    renders. Noise per pixel is computed by a hash on the device.

    Args:
        seed: Seed of the data set.
        indices: Indices of the items.
        stream: Index of an independent stream; streams do not affect each other.
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
        """Draw (B, *shape), uniform in [low, high)."""
        values = np.empty((len(self), math.prod(shape)))
        for generator, row in zip(self._generators, values, strict=True):
            generator.random(out=row)
        return torch.from_numpy(values.reshape(-1, *shape)) * (high - low) + low

    def log_uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """Draw (B, *shape), log-uniform in [low, high)."""
        return self.uniform(math.log(low), math.log(high), *shape).exp()

    def normal(self, *shape: int) -> Tensor:
        """Draw (B, *shape), normal with mean 0 and standard deviation 1."""
        values = np.empty((len(self), math.prod(shape)))
        for generator, row in zip(self._generators, values, strict=True):
            generator.standard_normal(out=row)
        return torch.from_numpy(values.reshape(-1, *shape))

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Draw (B, *shape) int64, uniform in [low, high)."""
        values = [generator.integers(low, high, shape) for generator in self._generators]
        return torch.from_numpy(np.stack(values))

    def chance(self, probability: float, *shape: int) -> Tensor:
        """Draw (B, *shape) bool, True with the given probability."""
        return self.uniform(0, 1, *shape) < probability

    def unit(self, *shape: int) -> Tensor:
        """Draw unit vectors (B, *shape, 3), uniform on the sphere."""
        return torch.nn.functional.normalize(self.normal(*shape, 3), dim=-1)

    def noise(self, *shape: int, device: torch.device) -> Tensor:
        """Draw (B, *shape) float32, approximately normal, on a device."""
        return hash_noise(self.keys().to(device), *shape)

    def keys(self) -> Tensor:
        """Draw the keys (B, 1) int32 of `hash_noise`."""
        return self.integers(-(2**31), 2**31, 1).to(torch.int32)


def hash_noise(keys: Tensor, *shape: int) -> Tensor:
    """Return approximately normal noise (B, *shape) float32 from keys (B, 1) int32."""
    count = math.prod(shape)
    place = torch.arange(count, dtype=torch.int32, device=keys.device)
    bits = hash_bits(place + keys)  # (B, count)
    bits = hash_bits(bits + keys * 7919)  # separates items whose ranges of `place + keys` overlap
    total = bits & 255
    for shift in (8, 16, 24):
        total = total + ((bits >> shift) & 255)
    return ((total - 510).float() / BYTE_SUM_STD).reshape(-1, *shape)


def hash_bits(x: Tensor) -> Tensor:
    """Hash int32 to int32 (the hash "lowbias32" of Chris Wellons)."""
    x = x ^ ((x >> 16) & 0xFFFF)  # the mask makes the arithmetic shift logical
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * -0x7B935975
    return x ^ ((x >> 16) & 0xFFFF)
