# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from quadtree_attention import OptionError
from quadtree_attention.models.parts.position import sine_table
from tests.conftest import Golden, golden_files
from tests.support import raises


@pytest.mark.parametrize("path", golden_files("modules/position_encoding.npz"))
def test_official_table(path):
    golden = Golden(path)
    for name in golden.arrays:
        _, dim, frequencies = name.split("_")
        table = sine_table(12, 16, int(dim[1:]), frequencies).movedim(-1, 0)
        torch.testing.assert_close(table, golden.tensor(name, torch.float32), rtol=0, atol=1e-6)


def test_a_larger_table_begins_with_the_smaller():
    assert torch.equal(sine_table(300, 270, 8)[:5, :7], sine_table(5, 7, 8))


def test_the_two_forms_differ():
    assert (sine_table(5, 7, 16) - sine_table(5, 7, 16, "legacy")).abs().max() > 0.1


def test_what_is_refused():
    raises(OptionError, r"multiple of 4, got dim=6; change", sine_table, 2, 3, 6)
    raises(OptionError, r"one of fixed, legacy, got 'new'", sine_table, 2, 3, 8, "new")
