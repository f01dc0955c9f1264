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


def tensors(q=(2, 4, 6, 3, 8), k=(2, 4, 6, 3, 8), v=(2, 4, 6, 3, 8)):
    return {"q": torch.randn(q), "k": torch.randn(k), "v": torch.randn(v)}


GOOD = {"num_levels": 2, "topk": 2}

BAD_SHAPES = [
    (
        tensors(q=(2, 4, 6)),
        "q must be (batch, *grid, heads, dim) with 1, 2 or 3 grid axes, got 3 axes: "
        "q.shape=(2, 4, 6); add or flatten axes to fit",
    ),
    (
        tensors(v=(2, 1, 1, 4, 6, 3, 8)),
        "v must be (batch, *grid, heads, dim) with 1, 2 or 3 grid axes, got 7 axes",
    ),
    (
        tensors(k=(2, 0, 6, 3, 8)),
        "every axis of k but the batch must have at least one entry, got axis 1 empty: "
        "k.shape=(2, 0, 6, 3, 8); pass a grid of size 1 or more",
    ),
    (
        tensors(q=(2, 24, 3, 8)),
        "q and k must have the same number of grid axes, got 1 and 2: q.shape=(2, 24, 3, 8)",
    ),
    (
        tensors(v=(2, 6, 4, 3, 8)),
        "k and v must lie on the same grid, got (4, 6) and (6, 4)",
    ),
    (
        tensors(q=(1, 4, 6, 3, 8)),
        "q, k and v must have the same batch size, got 1, 2 and 2",
    ),
    (
        tensors(v=(2, 4, 6, 1, 8)),
        "q, k and v must have the same number of heads, got 3, 3 and 1",
    ),
    (
        tensors(k=(2, 4, 6, 3, 16)),
        "q and k must have the same head dim, got 8 and 16",
    ),
]


@pytest.mark.parametrize(("arguments", "text"), BAD_SHAPES, ids=[t[:40] for _, t in BAD_SHAPES])
def test_bad_shapes(arguments, text):
    with pytest.raises(ShapeError, match=re.escape(text)) as caught:
        quadtree_attention(**arguments, **GOOD)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, QuadtreeAttentionError)


BAD_TYPES = [
    (
        tensors() | {"q": torch.ones(2, 4, 6, 3, 8, dtype=torch.int64)},
        "q must be float32, float64, float16 or bfloat16, got q.dtype=torch.int64, "
        "k.dtype=torch.float32, v.dtype=torch.float32; convert it, for example with q.float()",
    ),
    (
        tensors() | {"v": torch.randn(2, 4, 6, 3, 8).double()},
        "q, k and v must have one dtype, got q.dtype=torch.float32, k.dtype=torch.float32, "
        "v.dtype=torch.float64; convert them to the same",
    ),
    (
        tensors() | {"k": torch.randn(2, 4, 6, 3, 8, device="meta")},
        "q, k and v must be on one device, got q.device=cpu, k.device=meta, v.device=cpu; "
        "move them with Tensor.to",
    ),
    (tensors() | {"q": [1.0]}, "q must be a torch.Tensor, got list"),
    (
        tensors() | {"key_mask": torch.ones(2, 4, 6)},
        "key_mask must be a bool tensor with True = visible, got torch.float32",
    ),
    (
        tensors() | {"query_mask": [True]},
        "query_mask must be a bool tensor with True = visible, got list",
    ),
    (
        tensors() | {"key_mask": torch.ones(2, 4, 6, dtype=torch.bool, device="meta")},
        "key_mask and k must be on one device, got key_mask.device=meta, k.device=cpu",
    ),
    (
        tensors() | {"level_weights": torch.ones(2, dtype=torch.int64)},
        "level_weights must be a floating-point tensor of logits, got torch.int64",
    ),
    (
        tensors() | {"level_weights": torch.ones(2, device="meta")},
        "level_weights and q must be on one device",
    ),
]


@pytest.mark.parametrize(("arguments", "text"), BAD_TYPES, ids=[t[:40] for _, t in BAD_TYPES])
def test_bad_types(arguments, text):
    with pytest.raises(DTypeError, match=re.escape(text)) as caught:
        quadtree_attention(**arguments, **GOOD)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize(
    ("name", "owner", "shape"),
    [("query_mask", "q", (2, 6, 4)), ("key_mask", "k", (4, 6))],
)
def test_masks_of_the_wrong_shape(name, owner, shape):
    text = (
        f"{name} must be (batch, *grid) of {owner}, that is (2, 4, 6), got {name}.shape={shape}; "
        "use Tensor.expand to share one mask in the batch"
    )
    with pytest.raises(ShapeError, match=re.escape(text)):
        quadtree_attention(**tensors(), **GOOD, **{name: torch.ones(shape, dtype=torch.bool)})


BAD_OPTIONS = [
    ({"num_levels": 0}, "num_levels must be an integer of at least 1, got num_levels=0"),
    ({"num_levels": 2.0}, "num_levels must be an integer of at least 1, got num_levels=2.0"),
    ({"topk": 0}, "topk must be at least 1 at every level, got topk=0"),
    ({"topk": [-1]}, "topk must be at least 1 at every level, got topk=[-1]"),
    ({"topk": [2.5]}, "topk must be at least 1 at every level, got topk=[2.5]"),
    (
        {"topk": [4, 4]},
        "topk must have one entry per level that selects, coarse -> fine: 1 for num_levels=2, got "
        "2: topk=[4, 4]; the finest level selects nothing, leave it out, or pass one int for all",
    ),
    ({"topk": "8"}, "topk must be an int or a sequence of ints, got '8'"),
    ({"topk": None}, "topk must be an int or a sequence of ints, got None"),
    ({"variant": "D"}, "variant must be 'A', 'B' or 'C', got variant='D'"),
    ({"variant": None}, "variant must be 'A', 'B' or 'C', got variant=None"),
    ({"scale": float("nan")}, "scale must be a finite number, got scale=nan"),
    ({"scale": "1"}, "scale must be a finite number, got scale='1'"),
    (
        {"variant": "A", "level_weights": torch.zeros(2)},
        "level_weights belong to variant 'B', got them with variant='A'",
    ),
    ({"backend": "cuda"}, "backend must be one of auto,"),
]


@pytest.mark.parametrize(("options", "text"), BAD_OPTIONS, ids=[t[:50] for _, t in BAD_OPTIONS])
def test_bad_options(options, text):
    with pytest.raises(OptionError, match=re.escape(text)) as caught:
        quadtree_attention(**tensors(), **(GOOD | options))
    assert isinstance(caught.value, ValueError)


def test_level_weights_of_the_wrong_shape():
    text = "level_weights must hold one logit per level, coarse -> fine: (2,), got level_weights.sh"
    with pytest.raises(ShapeError, match=re.escape(text)):
        quadtree_attention(**tensors(), **GOOD, level_weights=torch.zeros(3))


def pyramid(*grids):
    return [torch.randn(1, *g, 2, 4) for g in grids]


GOOD_PYRAMID = ((2, 2), (3, 4), (5, 7))

BAD_PYRAMIDS = [
    (
        (pyramid((5, 7), (3, 4), (2, 2)), pyramid(*GOOD_PYRAMID), pyramid(*GOOD_PYRAMID)),
        "qs must halve from level to level, rounding up, and run coarse -> fine: qs[0] must be "
        "(1, 1, 1, 2, 4) under a finest map (1, 2, 2, 2, 4), got (1, 5, 7, 2, 4); "
        "is the list reversed or pooled without ceil_mode?",
    ),
    (
        (pyramid(*GOOD_PYRAMID), pyramid(*GOOD_PYRAMID), pyramid((1, 1), (2, 3), (5, 7))),
        "vs must halve from level to level, rounding up",
    ),
    (
        (pyramid((3, 4), (5, 7)), pyramid(*GOOD_PYRAMID), pyramid(*GOOD_PYRAMID)),
        "qs, ks and vs must have the same number of levels, got 2, 3 and 3",
    ),
    (
        (torch.randn(1, 5, 7, 2, 4), pyramid(*GOOD_PYRAMID), pyramid(*GOOD_PYRAMID)),
        "qs must be a list of maps, coarse -> fine, with at least one level, got Tensor",
    ),
    (
        ([], [], []),
        "qs must be a list of maps, coarse -> fine, with at least one level, got list",
    ),
    (
        (pyramid(*GOOD_PYRAMID), pyramid(*GOOD_PYRAMID), pyramid((2, 2), (3, 4), (4, 7))),
        "k and v must lie on the same grid, got (5, 7) and (4, 7)",
    ),
]


@pytest.mark.parametrize(("pyramids", "text"), BAD_PYRAMIDS, ids=[t[:40] for _, t in BAD_PYRAMIDS])
def test_bad_pyramids(pyramids, text):
    with pytest.raises(ShapeError, match=re.escape(text)):
        quadtree_attention_pyramid(*pyramids, topk=2)


def test_pyramid_of_mixed_dtypes():
    qs = pyramid(*GOOD_PYRAMID)
    qs[1] = qs[1].double()
    text = "qs[0], qs[1] and qs[2] must have one dtype"
    with pytest.raises(DTypeError, match=re.escape(text)):
        quadtree_attention_pyramid(qs, pyramid(*GOOD_PYRAMID), pyramid(*GOOD_PYRAMID), topk=2)


def test_topk_for_all_levels_or_each():
    assert check_topk(8, 4) == (8, 8, 8)
    assert check_topk([32, 16], 3) == (32, 16)
    assert check_topk(8, 1) == ()
    assert check_topk([], 1) == ()


def test_effective_topk_stops_at_what_there_is():
    assert effective_topk((32, 16, 99), Tree((8, 24), num_levels=4)) == (3, 12, 48)
    assert effective_topk((2, 9), Tree((9,), num_levels=3)) == (2, 4)
