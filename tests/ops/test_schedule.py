# SPDX-License-Identifier: Apache-2.0
"""What a call launches, and that it is worked out once; no GPU needed."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="triton comes with the CUDA builds of torch for Linux")

from quadtree_attention.ops import launches
from quadtree_attention.ops.attention.triton import layout, operator, schedule

LEVELS = 4
# launches of one call with four levels
FORWARD = {
    "pyramid_fwd_kernel": 1,
    "coarse_fwd_kernel": 1,
    "coarse_choose_kernel": 1,
    "fine_fwd_kernel": 3,
}
BACKWARD = {
    "fine_bwd_kernel": 3,
    "fine_bwd_keys_kernel": 3,
    "count_users_kernel": 1,
    "list_users_kernel": 1,
    "coarse_bwd_queries_kernel": 1,
    "coarse_bwd_keys_kernel": 1,
    "pyramid_bwd_kernel": 1,
    "logits_bwd_kernel": 1,
}


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


class Computes(TorchDispatchMode):
    """The names of operators of ATen that are no views and make no memory."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if not function.is_view and name not in ("new_empty", "empty_like", "empty"):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def coarser(x):
    return meta(x.shape[0], *(side // 2 for side in x.shape[1:-2]), *x.shape[-2:])


def record(q, k, v, variant="B", *, given=False):
    """Forward and backward: launches of each, and other operators; `given`: maps of two levels."""
    maps = [[coarser(x), x] if given else [x] for x in (q, k, v)]
    topk = [8] * (1 if given else LEVELS - 1)
    logits = meta(len(topk) + 1) if variant == "B" else None
    lists = *maps, [], [], logits
    options = topk, 0.2, variant, variant == "A"
    with launches.record() as forward, Computes() as first:
        out, rest = operator._run(*lists, *options, True)
    with launches.record() as backward, Computes() as second:
        operator._run_backward(out, None, rest, *lists, *options, False)
    return forward, backward, first.names + second.names


def names(recorded):
    return Counter(x.name for x in recorded)


def test_launches_of_a_call():
    q, k, v = (meta(2, 56, 56, 2, 32) for _ in range(3))
    forward, backward, others = record(q, k, v)
    assert names(forward) == FORWARD
    assert names(backward) == BACKWARD
    assert not others  # on meta tensors, counters are neither zeroed nor summed


def test_maps_that_differ_are_averaged_apart():
    q, k, v = meta(2, 56, 56, 2, 32), meta(2, 28, 60, 2, 32), meta(2, 28, 60, 2, 16)
    forward, backward, _ = record(q, k, v)
    assert names(forward) == FORWARD | {"pyramid_fwd_kernel": 3}
    assert names(backward) == BACKWARD | {"pyramid_bwd_kernel": 3}
    forward, _, _ = record(q, k, k, "A")
    assert names(forward) == FORWARD | {"pyramid_fwd_kernel": 2}


def test_maps_of_other_strides_are_averaged_apart():
    q = meta(1, 56, 56, 3, 1, 32)[:, :, :, 0]
    forward, _, _ = record(q, meta(1, 56, 56, 1, 32), meta(1, 56, 56, 1, 32))
    assert names(forward) == FORWARD | {"pyramid_fwd_kernel": 2}


def test_maps_of_all_levels_are_not_averaged():
    forward, backward, _ = record(*(meta(1, 16, 16, 1, 8) for _ in range(3)), given=True)
    assert "pyramid_fwd_kernel" not in names(forward)
    assert "pyramid_bwd_kernel" not in names(backward)


def test_users_of_many_levels_are_listed_a_few_at_a_time():
    q = meta(1, 2**12, 1, 8)
    topk = [2] * 11
    lists = [q], [q], [q], [], [], None
    with launches.record():
        out, rest = operator._run(*lists, topk, 1.0, "B", False, True)
    with launches.record() as backward:
        operator._run_backward(out, None, rest, *lists, topk, 1.0, "B", False, False)
    assert names(backward)["count_users_kernel"] == names(backward)["list_users_kernel"] == 2
    above = [x.arguments["above"] for x in backward if x.name == "count_users_kernel"]
    assert above == [11, 11 - schedule.LEVELS_AT_ONCE]


def test_it_is_worked_out_once_per_shape():
    schedule.forward_schedule.cache_clear()
    schedule.backward_schedule.cache_clear()
    for width in (56, 60, 56):
        record(*(meta(1, 56, width, 1, 32) for _ in range(3)))
    for cached in (schedule.forward_schedule, schedule.backward_schedule):
        assert (cached.cache_info().misses, cached.cache_info().hits) == (2, 1)


@pytest.mark.parametrize("grid", [(1, 7), (7, 1), (1, 1), (5, 6), (3,), (2, 1, 4)], ids=str)
def test_rows(grid):
    """Strides of rows are those of a view by torch, where it is one."""
    whole = torch.arange(2 * 64 * 3 * 3 * 8).view(2, -1, 3, 3, 8)
    x = whole[:, : torch.Size(grid).numel(), :, 1].unflatten(1, grid)
    rows = x.flatten(1, -3).transpose(1, 2)
    found = layout.row_strides(x.shape, x.stride())
    assert torch.equal(rows, x.as_strided(rows.shape, (*found, 1), x.storage_offset()))
    assert layout.row_strides(x.shape, x.contiguous().stride()) == layout.dense_strides(x.shape)


def test_what_is_not_rows_is_copied():
    x = torch.zeros(2, 5, 6, 3, 8)
    for other in (x.transpose(1, 2), x.transpose(-1, -2), x[:, :, ::2].transpose(1, 2)):
        assert layout.row_strides(other.shape, other.stride()) is None
    assert layout.row_strides(x[..., :1].shape, x[..., :1].stride()) is not None
