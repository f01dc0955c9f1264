# SPDX-License-Identifier: Apache-2.0
"""Every error a user can meet: its class and its words."""

import re

import pytest
import torch

from quadtree_attention import (
    DTypeError,
    OptionError,
    QuadtreeAttentionError,
    ShapeError,
    quadtree_attention,
    quadtree_attention_pyramid,
)
from quadtree_attention.ops.attention.problem import check_topk, effective_topk
from quadtree_attention.ops.attention.tree import Tree
from tests.support import raises

SHAPE = (2, 4, 6, 3, 8)
GOOD = {"num_levels": 2, "topk": 2}
BAD = [  # error, what is changed in a good call (tensors by their shapes), text
    (ShapeError, {"q": (2, 4, 6)}, "q must be (batch, *grid, heads, dim) with 1, 2 or 3 grid axes, "
     "got 3 axes: q.shape=(2, 4, 6); add or flatten axes to fit"),
    (ShapeError, {"v": (2, 1, 1, 4, 6, 3, 8)}, "v must be (batch, *grid, heads, dim) with 1, 2 or "
     "3 grid axes, got 7 axes"),
    (ShapeError, {"k": (2, 0, 6, 3, 8)}, "every axis of k but the batch must have at least one "
     "entry, got axis 1 empty: k.shape=(2, 0, 6, 3, 8); pass a grid of size 1 or more"),
    (ShapeError, {"q": (2, 24, 3, 8)}, "q and k must have the same number of grid axes, got 1 and "
     "2: q.shape=(2, 24, 3, 8)"),
    (ShapeError, {"v": (2, 6, 4, 3, 8)}, "must lie on the same grid, got (4, 6) and (6, 4)"),
    (ShapeError, {"q": (1, 4, 6, 3, 8)}, "must have the same batch size, got 1, 2 and 2"),
    (ShapeError, {"v": (2, 4, 6, 1, 8)}, "must have the same number of heads, got 3, 3 and 1"),
    (ShapeError, {"k": (2, 4, 6, 3, 16)}, "q and k must have the same head dim, got 8 and 16"),
    (ShapeError, {"query_mask": torch.ones(2, 6, 4).bool()}, "query_mask must be (batch, *grid) of "
     "q, that is (2, 4, 6), got query_mask.shape=(2, 6, 4); use Tensor.expand to share one mask in "
     "the batch"),
    (ShapeError, {"key_mask": torch.ones(4, 6).bool()}, "key_mask must be (batch, *grid) of k, "
     "that is (2, 4, 6), got key_mask.shape=(4, 6); use Tensor.expand to share one mask in the"),
    (ShapeError, {"level_weights": torch.zeros(3)}, "level_weights must hold one logit per level, "
     "coarse -> fine: (2,), got level_weights.sh"),
    (DTypeError, {"q": torch.ones(SHAPE).long()}, "q must be float32, float64, float16 or "
     "bfloat16, got q.dtype=torch.int64, k.dtype=torch.float32, v.dtype=torch.float32; convert it, "
     "for example with q.float()"),
    (DTypeError, {"v": torch.randn(SHAPE).double()}, "q, k and v must have one dtype, got "
     "q.dtype=torch.float32, k.dtype=torch.float32, v.dtype=torch.float64; convert them to the"),
    (DTypeError, {"k": torch.ones(SHAPE, device="meta")}, "q, k and v must be on one device, got "
     "q.device=cpu, k.device=meta, v.device=cpu; move them with Tensor.to"),
    (DTypeError, {"q": [1.0]}, "q must be a torch.Tensor, got list"),
    (DTypeError, {"key_mask": torch.ones(2, 4, 6)}, "key_mask must be a bool tensor with True = "
     "visible, got torch.float32"),
    (DTypeError, {"query_mask": [True]}, "query_mask must be a bool tensor with True = visible, "
     "got list"),
    (DTypeError, {"key_mask": torch.ones(2, 4, 6, device="meta").bool()}, "key_mask and k must be "
     "on one device, got key_mask.device=meta, k.device=cpu"),
    (DTypeError, {"level_weights": torch.ones(2).long()}, "level_weights must be a floating-point "
     "tensor of logits, got torch.int64"),
    (DTypeError, {"level_weights": torch.ones(2, device="meta")}, "level_weights and q must be on "
     "one device"),
    (OptionError, {"num_levels": 0}, "num_levels must be an integer of at least 1, got num_level"),
    (OptionError, {"num_levels": 2.0}, "an integer of at least 1, got num_levels=2.0"),
    (OptionError, {"topk": 0}, "topk must be at least 1 at every level, got topk=0"),
    (OptionError, {"topk": [-1]}, "topk must be at least 1 at every level, got topk=[-1]"),
    (OptionError, {"topk": [2.5]}, "topk must be at least 1 at every level, got topk=[2.5]"),
    (OptionError, {"topk": [4, 4]}, "topk must have one entry per level that selects, coarse -> "
     "fine: 1 for num_levels=2, got 2: topk=[4, 4]; the finest level selects nothing, leave it "
     "out, or pass one int for all"),
    (OptionError, {"topk": "8"}, "topk must be an int or a sequence of ints, got '8'"),
    (OptionError, {"topk": None}, "topk must be an int or a sequence of ints, got None"),
    (OptionError, {"variant": "D"}, "variant must be 'A', 'B' or 'C', got variant='D'"),
    (OptionError, {"variant": None}, "variant must be 'A', 'B' or 'C', got variant=None"),
    (OptionError, {"scale": float("nan")}, "scale must be a finite number, got scale=nan"),
    (OptionError, {"scale": "1"}, "scale must be a finite number, got scale='1'"),
    (OptionError, {"variant": "A", "level_weights": torch.zeros(2)}, "level_weights belong to "
     "variant 'B', got them with variant='A'"),
    (OptionError, {"backend": "cuda"}, "backend must be one of auto,"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "change", "text"), BAD, ids=[text[:50] for *_, text in BAD])
def test_bad_calls(error, change, text):
    given = dict.fromkeys("qkv", SHAPE) | GOOD | change
    tensors = {x: torch.randn(given[x]) for x in "qkv" if isinstance(given[x], tuple)}
    with pytest.raises(error, match=re.escape(text)) as caught:
        quadtree_attention(**given | tensors)
    assert isinstance(caught.value, QuadtreeAttentionError)
    assert isinstance(caught.value, TypeError if error is DTypeError else ValueError)


def pyramid(*grids):
    return [torch.randn(1, *g, 2, 4) for g in grids]


GRIDS = ((2, 2), (3, 4), (5, 7))
BAD_PYRAMIDS = [
    ({"qs": pyramid((5, 7), (3, 4), (2, 2))}, "qs must halve from level to level, rounding up, and "
     "run coarse -> fine: qs[0] must be (1, 1, 1, 2, 4) under a finest map (1, 2, 2, 2, 4), got "
     "(1, 5, 7, 2, 4); is the list reversed or pooled without ceil_mode?"),
    ({"vs": pyramid((1, 1), (2, 3), (5, 7))}, "vs must halve from level to level, rounding up"),
    ({"qs": pyramid((3, 4), (5, 7))}, "qs, ks and vs must have the same number of levels, got 2, 3 "
     "and 3"),
    ({"qs": torch.randn(1, 5, 7, 2, 4)}, "qs must be a list of maps, coarse -> fine, with at least "
     "one level, got Tensor"),
    ({"qs": [], "ks": [], "vs": []}, "qs must be a list of maps, coarse -> fine, with at least one "
     "level, got list"),
    ({"vs": pyramid((2, 2), (3, 4), (4, 7))}, "k and v must lie on the same grid, got (5, 7) and "
     "(4, 7)"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "text"), BAD_PYRAMIDS, ids=[t[:40] for _, t in BAD_PYRAMIDS])
def test_bad_pyramids(change, text):
    given = {name: pyramid(*GRIDS) for name in ("qs", "ks", "vs")} | change
    raises(ShapeError, re.escape(text), quadtree_attention_pyramid, **given, topk=2)


def test_pyramid_of_mixed_dtypes():
    qs, ks, vs = (pyramid(*GRIDS) for _ in range(3))
    qs[1] = qs[1].double()
    text = r"qs\[0\], qs\[1\] and qs\[2\] must have one dtype"
    raises(DTypeError, text, quadtree_attention_pyramid, qs, ks, vs, topk=2)


def test_topk_for_all_levels_or_each():
    assert check_topk(8, 4) == (8, 8, 8)
    assert check_topk([32, 16], 3) == (32, 16)
    assert check_topk(8, 1) == check_topk([], 1) == ()


def test_effective_topk_stops_at_what_there_is():
    assert effective_topk((32, 16, 99), Tree((8, 24), num_levels=4)) == (3, 12, 48)
    assert effective_topk((2, 9), Tree((9,), num_levels=3)) == (2, 4)
