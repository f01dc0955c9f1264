# SPDX-License-Identifier: Apache-2.0
"""Whether operators that have fused kernels beside plain PyTorch take them."""

import os

import torch
from torch import Tensor

from quadtree_attention.ops.backends import default_backend
from quadtree_attention.ops.backends.triton.backend import TRITON_INSTALLED
from quadtree_attention.ops.tree import is_exporting


def runs_kernels(x: Tensor) -> bool:
    """Whether Triton's kernels run where this tensor is, and nobody has asked to do without.

    A compiled model does without: the compiler knows what comes before and after.
    """
    return (
        TRITON_INSTALLED
        and (x.is_cuda or os.environ.get("TRITON_INTERPRET", "0") == "1")
        and not torch.compiler.is_compiling()
        and not is_exporting()
        and default_backend() in ("auto", "triton")
    )
