# SPDX-License-Identifier: Apache-2.0
"""Random numbers that belong to an item."""

import pytest
import torch

from quadtree_attention.errors import OptionError
from quadtree_attention.synthetic.draws import Draws, hash_noise
from tests.support import raises

CPU = torch.device("cpu")


def test_items_do_not_depend_on_their_batch():
    batch, single = Draws(3, [5, 9, 2]), Draws(3, [9])
    for _ in range(2):
        assert torch.equal(batch.uniform(0, 1, 4)[1:2], single.uniform(0, 1, 4))
        assert torch.equal(batch.noise(3, 5, device=CPU)[1:2], single.noise(3, 5, device=CPU))


@pytest.mark.parametrize("other", [Draws(4, [5]), Draws(3, [6]), Draws(3, [5], stream=1)])
def test_seed_index_and_stream_all_matter(other):
    assert not torch.equal(Draws(3, [5]).uniform(0, 1, 8), other.uniform(0, 1, 8))


def test_noise_is_about_normal_and_uncorrelated():
    noise = Draws(0, range(2)).noise(400, 500, device=CPU)
    assert noise.mean().abs() < 0.01 and (noise.std() - 1).abs() < 0.01
    assert ((noise.abs() < 1).float().mean() - 0.683).abs() < 0.02
    for moved in (noise.roll(1, -1), noise.roll(1, -2), noise.flip(0)):
        assert (noise * moved).mean().abs() < 0.01


def test_ranges():
    draws = Draws(0, range(50))
    assert draws.uniform(2, 3, 9).min() >= 2 and draws.uniform(2, 3, 9).max() < 3
    logs = draws.log_uniform(0.5, 2, 100)
    assert ((logs < 1).double().mean() - 0.5).abs() < 0.05
    assert set(draws.integers(1, 4, 20).flatten().tolist()) == {1, 2, 3}
    assert torch.allclose(draws.unit(7).norm(dim=-1), torch.ones(50, 7, dtype=torch.float64))


@pytest.mark.parametrize(("seed", "indices"), [(-1, [0]), (0, []), (0, [3, -2])])
def test_bad_numbers(seed, indices):
    raises(OptionError, "seed >= 0 and at least one index >= 0", Draws, seed, indices)


def test_noise_of_items_with_neighbouring_keys_is_not_shifted():
    one, other = hash_noise(torch.tensor([[5], [6]], dtype=torch.int32), 2000)
    assert abs(torch.corrcoef(torch.stack([one[1:], other[:-1]]))[0, 1]) < 0.1
