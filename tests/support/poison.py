# SPDX-License-Identifier: Apache-2.0
"""Memory that the package allocates and does not write, filled with NaN."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

ALLOCATORS = ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty"))


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill what the package allocates by `empty` with NaN, or with the largest integer."""

    def poison(make: Any) -> Any:
        def make_poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
            x = make(*args, **kwargs)
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.startswith("quadtree_attention") and not x.is_meta:
                x.fill_(torch.nan if x.is_floating_point() else _largest(x.dtype))
            return x

        return make_poisoned

    with ExitStack() as stack:
        for owner, name in ALLOCATORS:
            stack.enter_context(patch.object(owner, name, poison(getattr(owner, name))))
        yield


def _largest(dtype: torch.dtype) -> int:
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max
