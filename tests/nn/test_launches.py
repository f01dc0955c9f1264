# SPDX-License-Identifier: Apache-2.0
"""How often kernels of norms, value pyramids and convolutions are launched by a block."""

from collections import Counter

import pytest
import torch

from quadtree_attention.nn import QuadtreeBlock, fuse_for_inference
from quadtree_attention.ops.launches import record

OPTIONS = {"num_levels": 4, "topk": 2, "value_pyramid": "conv", "lepe": True}
OF_ATTENTION = ("pyramid", "coarse", "fine", "users", "logits", "choose", "list")
FORWARD = {
    "layer_norm_fwd_kernel": 2,
    "map_moments_kernel": 6,  # two for each of three coarser levels
    "norm_linear_kernel": 6,
    "depthwise_fwd_kernel": 2,  # position encodings of all levels, and the MLP
}
BACKWARD = {
    "layer_norm_bwd_kernel": 2,
    "norm_linear_bwd_kernel": 6,
    "map_norm_bwd_kernel": 6,
    "pool_kernel": 1,
    "depthwise_bwd_sums_kernel": 2,
    "depthwise_bwd_weights_kernel": 2,
    "depthwise_bwd_kernel": 2,
}


def launched(run):
    """Launches by kernel, but for those of the attention itself."""
    with record() as launches:
        run()
    names = [x.name for x in launches if not x.name.startswith(OF_ATTENTION)]
    return dict(Counter(name for name in names if "users" not in name))


def build():
    block = QuadtreeBlock(16, 2, **OPTIONS)
    return fuse_for_inference(block), torch.randn(1, 9, 12, 16)


def check_inference():
    block, x = build()
    with torch.no_grad():
        assert launched(lambda: block(x)) == FORWARD


def check_training():
    block, x = build()
    out = []
    assert launched(lambda: out.append(block(x))) == FORWARD
    assert launched(lambda: out[0].sum().backward()) == BACKWARD


def check_gradients_change_nothing(device="cpu"):
    """Neither fused nor otherwise: the same kernels and products run with gradients and without."""
    torch.manual_seed(0)
    block = QuadtreeBlock(16, 2, **OPTIONS, device=device)
    x = torch.randn(1, 9, 12, 16, device=device)
    expected = block(x)
    with torch.no_grad():
        assert torch.equal(block(x), expected)
    with torch.inference_mode():
        assert torch.equal(block(x), expected)


CHECKS = (check_inference, check_training, check_gradients_change_nothing)


@pytest.mark.parametrize("check", CHECKS)
def test_in_the_interpreter(check, interpreter):
    interpreter(check)


def test_gradients_change_nothing_on_a_cpu():
    check_gradients_change_nothing()


@pytest.mark.gpu
def test_gradients_change_nothing_on_a_gpu():
    check_gradients_change_nothing("cuda")
