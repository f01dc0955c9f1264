# SPDX-License-Identifier: Apache-2.0
"""Where models run, and how it shows that there is too little memory there."""

import torch

from quadtree_attention.errors import OptionError


def usable_device(device: str | torch.device | None) -> torch.device:
    """The device of that name; None takes a GPU if there is one.

    Raises:
        OptionError: It is not there, or holds no tensors.
    """
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=chosen).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise OptionError(
            f"there is no device {str(device)!r} here: {str(error).splitlines()[0]}; pass cpu, or "
            "leave it out"
        ) from error
    return chosen


def out_of_memory(error: Exception) -> bool:
    """Whether an operation failed for want of memory; torch has a class for that on GPUs only."""
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or "can't allocate memory" in str(error)
