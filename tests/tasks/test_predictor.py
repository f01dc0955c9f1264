# SPDX-License-Identifier: Apache-2.0
"""Devices that are not there, and memory that is not enough."""

import pytest
import torch

from quadtree_attention.errors import OptionError
from quadtree_attention.tasks.predictor import out_of_memory, usable_device


def test_devices():
    assert usable_device("cpu") == torch.device("cpu")
    assert usable_device(None).type in ("cpu", "cuda")
    for name in ("meta", "gpu", "cuda:99"):
        with pytest.raises(OptionError, match=f"there is no device '{name}' on this machine: "):
            usable_device(name)


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
