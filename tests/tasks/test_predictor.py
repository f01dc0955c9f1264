# SPDX-License-Identifier: Apache-2.0
"""Memory that is not enough."""

import pytest
import torch

from quadtree_attention.tasks.predictor import out_of_memory


def test_too_little_memory_is_told_from_other_failures():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert out_of_memory(caught.value)
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory")) and out_of_memory(
        MemoryError()
    )
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(2) @ torch.zeros(3)
    assert not out_of_memory(caught.value)
