# SPDX-License-Identifier: Apache-2.0
"""Launches that are repeated give what launching anew gives: in the interpreter, and on a GPU."""

import gc
import random
import weakref
from functools import partial
from itertools import combinations

import pytest
import torch

from quadtree_attention import OptionError, quadtree_attention, quadtree_attention_pyramid
from quadtree_attention.ops.norms.functional import layer_norm, map_norm
from tests.interpreter import kernels
from tests.support import raises

pytest.importorskip("triton", reason="triton comes with the CUDA builds of torch for Linux")

from triton import knobs
from triton.compiler import CompiledKernel

from quadtree_attention.ops import replay

OPTIONS = {"num_levels": 2, "topk": 2, "backend": "triton"}


def attention(draw, *, value_dim=8, **options):
    q, k, v = draw(1, 2, 3, 1, 8), draw(1, 2, 3, 1, 8), draw(1, 2, 3, 1, value_dim)
    return quadtree_attention(q, k, v, **OPTIONS | options)


def of_itself(draw):
    x = draw(1, 2, 3, 1, 8)
    return quadtree_attention(x, x, x, **OPTIONS)


def in_one_tensor(draw):
    q, k, v = draw(1, 2, 3, 3, 1, 8).unbind(3)
    return quadtree_attention(q, k, v, **OPTIONS)


def unaligned(draw):
    q = draw(1 + 2 * 3 * 8)[1:].view(1, 2, 3, 1, 8)
    return quadtree_attention(q, draw(1, 2, 3, 1, 8), draw(1, 2, 3, 1, 8), **OPTIONS)


def with_selection(draw):
    out, (level,) = attention(draw, return_selection=True)
    return torch.cat([out.flatten(), level.cells.flatten().float(), level.scores.flatten()])


def masked(draw):
    q, k, v = draw(1, 2, 3, 2, 8), draw(1, 3, 4, 2, 8), draw(1, 3, 4, 2, 8)
    masks = {"query_mask": draw(1, 2, 3) > -0.5, "key_mask": draw(1, 3, 4) > -0.5}
    return quadtree_attention(
        q, k, v, level_weights=draw(3), **masks, **OPTIONS | {"num_levels": 3}
    )


def pyramids(draw):
    qs, ks, vs = ([draw(1, 1, 2, 1, 8), draw(1, 2, 3, 1, 8)] for _ in range(3))
    return quadtree_attention_pyramid(qs, ks, vs, topk=2, backend="triton")


def norm_of_maps(draw, *, grid=(4, 6), eps=1e-5, activation="relu", by_parent=True):
    return map_norm(draw(2, *grid, 8), draw(8), draw(8), eps, activation, by_parent=by_parent)


def norm_of_tokens(draw, *, eps=1e-5, dtype=torch.float32):
    return layer_norm(draw(2, 5, 8), draw(8), draw(8), eps, dtype).float()


def gradients(draw, **options):
    q, k, v = (draw(1, 2, 3, 1, 8).requires_grad_() for _ in range(3))
    loss = quadtree_attention(q, k, v, **OPTIONS | {"num_levels": 3} | options).square().sum()
    return torch.cat(torch.autograd.grad(loss, (q, k, v)))


def gradients_with_mask(draw):
    q, k, v = (draw(1, 3, 4, 2, 8).requires_grad_() for _ in range(3))
    weights, mask = draw(3).requires_grad_(), draw(1, 3, 4) > -0.5
    out = quadtree_attention(
        q, k, v, level_weights=weights, key_mask=mask, **OPTIONS | {"num_levels": 3}
    )
    return torch.cat([x.flatten() for x in torch.autograd.grad(out.square().sum(), (q, weights))])


# No two of them may be taken for each other, however little they differ.
REPEATED = (
    attention,
    of_itself,
    in_one_tensor,
    unaligned,
    partial(attention, value_dim=5),
    partial(attention, scale=0.1),
    partial(attention, topk=1),
    partial(attention, variant="A"),
    with_selection,
    masked,
    pyramids,
    norm_of_maps,
    partial(norm_of_maps, eps=0.5),
    partial(norm_of_maps, activation="gelu"),
    partial(norm_of_maps, by_parent=False),
    partial(norm_of_maps, grid=(3, 5)),  # zeros past the edge
    norm_of_tokens,
    partial(norm_of_tokens, eps=0.5),
    partial(norm_of_tokens, dtype=torch.bfloat16),
)
# Two plans each, of forward and of backward
DIFFERENTIATED = (gradients, partial(gradients, variant="A"), gradients_with_mask)


def check_replays(device: str) -> None:
    """Every call thrice: the second is noted, the third repeats it on the numbers of the first."""
    replay._plans.clear()
    expected = 0
    for call in (*REPEATED, *DIFFERENTIATED):
        expected += 2 if call in DIFFERENTIATED else 1
        first = _numbers(call, 0, device)
        results = [_numbers(call, seed, device) for seed in (1, 0)]
        assert len(replay._plans) == expected, call
        truth = [_numbers(call, 1, device, on=False), first]
        assert first.isfinite().all()
        torch.testing.assert_close(results, truth, rtol=1e-6, atol=1e-6)
    assert all(isinstance(plan, replay.Plan) for plan in replay._plans.values())


def _numbers(call, seed, device, *, on=True):
    replay.SWITCHED_ON = on
    rng = torch.Generator().manual_seed(seed)
    return call(lambda *shape: torch.randn(shape, generator=rng).to(device))


def check_what_is_not_repeated(device: str) -> None:
    """Copies are no launches of ours, and nothing has nothing to launch."""
    replay.SWITCHED_ON = True
    replay._plans.clear()
    x = torch.randn(1, 5, 3, 1, 8, device=device).transpose(1, 2)
    expected = quadtree_attention(x.contiguous(), x.contiguous(), x.contiguous(), **OPTIONS)
    replay._plans.clear()
    torch.testing.assert_close(quadtree_attention(x, x, x, **OPTIONS), expected)
    empty = x[:0].contiguous()
    assert quadtree_attention(empty, empty, empty, **OPTIONS).shape == empty.shape
    assert list(replay._plans.values()) == [None, None]


def check_too_many(device: str) -> None:
    replay.SWITCHED_ON, replay.MOST_PLANS = True, 2
    replay._plans.clear()
    counts = []
    for width in range(3, 7):
        x = torch.randn(1, 2, width, 1, 8, device=device)
        quadtree_attention(x, x, x, **OPTIONS)
        counts.append(len(replay._plans))
    assert counts == [1, 2, 1, 2]


def check_apart(check, device):
    """With plans and switches that go when it ends."""
    assert replay.SWITCHED_ON
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("SWITCHED_ON", True),
            ("MOST_PLANS", replay.MOST_PLANS),
            ("_plans", {}),
        ):
            patch.setattr(replay, name, value)
        check(device)


CHECKS = [(check_replays,), (check_what_is_not_repeated,), (check_too_many,)]


@kernels(check_apart, CHECKS, CHECKS)
def test_replay(run):
    run()


@pytest.fixture(autouse=True)
def _apart(monkeypatch):
    """Plans and switches that go with the test."""
    monkeypatch.setattr(replay, "SWITCHED_ON", True)
    monkeypatch.setattr(replay, "MOST_PLANS", replay.MOST_PLANS)
    monkeypatch.setattr(replay, "_plans", {})


@pytest.mark.gpu
def test_in_a_cuda_graph():
    x = torch.randn(1, 20, 28, 2, 32, device="cuda")
    for _ in range(2):
        quadtree_attention(x, x, x, **OPTIONS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = quadtree_attention(x, x, x, **OPTIONS)
    x.copy_(torch.randn_like(x))
    graph.replay()
    (plan,) = replay._plans.values()
    assert isinstance(plan, replay.Plan)
    replay.SWITCHED_ON = False
    torch.testing.assert_close(got, quadtree_attention(x, x, x, **OPTIONS))


def test_a_call_that_fails_is_not_noted():
    def fail():
        raise RuntimeError("of the call")

    for _ in range(3):
        raises(RuntimeError, "of the call", replay.replayed, fail, [torch.zeros(3)], ())
        assert not replay.is_noting()
    assert list(replay._plans.values()) == [replay._SEEN_ONCE]


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_nothing_is_repeated_while_somebody_listens(name):
    x, hooks, calls = torch.zeros(3), getattr(knobs.runtime, name), []

    def call():
        calls.append(replay.is_noting())
        return [x.clone()]

    hooks.add(print)
    try:
        for _ in range(3):
            replay.replayed(call, [x], ())
    finally:
        hooks.remove(print)
    assert calls == [False, False, False] and not replay._plans
    for _ in range(2):
        replay.replayed(call, [x], ())
    assert calls[3:] == [False, True]


class StandIn(CompiledKernel):
    """A kernel as Triton compiles it, that tells what it is launched with."""

    def __init__(self):
        self.module, self.function, self.packed_metadata = "module", "function", "metadata"
        self.launches = []
        self._run = lambda *arguments, launches=self.launches: launches.append(arguments)

    def launch_metadata(self, *arguments):
        return None

    def __del__(self):
        """There is nothing to unload."""


def test_kernels_are_launched_as_triton_launches_them():
    compiled, x = StandIn(), torch.ones(3)
    held = weakref.ref(compiled)
    compiled[(4, 5, 6)](x.data_ptr(), 7, stream=9)
    (of_triton,), launches = compiled.launches, compiled.launches
    launch_hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    assert of_triton[replay.STREAM] == 9 and of_triton[7:9] == launch_hooks
    replay._here.noted = []
    replay.note_kernel(compiled, (4, 5, 6), [x, 7])
    plan, replay._here.noted = replay._Planner([x], []).plan(replay._here.noted), None
    del compiled
    gc.collect()
    assert held() is not None, "Triton would unload it"
    other = torch.zeros(3)
    plan([other], [other.data_ptr()])
    repeated = launches[-1]
    no_stream, no_hooks = (None,), (None, None)
    assert repeated == (*of_triton[:3], *no_stream, *of_triton[4:7], *no_hooks, other.data_ptr(), 7)


@pytest.mark.parametrize("by_address", [False, True])
def test_between_tensors_share_memory_where_they_can(by_address):
    """And what a kernel gets is what it got the first time."""
    x, out = torch.zeros(3), torch.zeros(2, 2)
    a, b, c = torch.zeros(80), torch.zeros(5), torch.zeros(70)
    seen = []
    launches = [[x, a[4:], None], [a, b, 7], [b, c], [c, out, x]]

    before = [None] * (replay.STREAM + 1) if by_address else []  # grid and stream

    def run(*got):
        seen.append([getattr(y, "data_ptr", lambda y=y: y)() for y in got[len(before) :]])

    def call():
        for arguments in launches:
            if replay.is_noting():
                replay.note(run, before + arguments, by_address=by_address)
        return [out]

    for _ in range(2):
        replay.replayed(call, [x], ())
    other = torch.ones(3)
    (result,) = replay.replayed(call, [other], ())
    (plan,) = replay._plans.values()
    # a is not needed any more when c is: b lies behind both
    assert plan.offsets == [0, 512, 0] and plan.nbytes == 512 + 5 * 4
    (x1, a1, none), (a2, b1, seven), (b2, c1), (c2, out1, x2) = seen
    assert x1 == x2 == other.data_ptr() and out1 == result.data_ptr()
    assert (none, seven) == (None, 7)
    assert a1 == a2 + 16 and b1 == b2 == a2 + 512 and c1 == c2 == a2
    assert result.shape == out.shape and result is not out


def test_memory_of_tensors_that_are_needed_at_once_does_not_overlap():
    rng = random.Random(0)
    for _ in range(200):
        sizes = [rng.randint(1, 2000) for _ in range(rng.randint(1, 9))]
        spans = [tuple(sorted((rng.randint(0, 5), rng.randint(0, 5)))) for _ in sizes]
        offsets = replay._offsets(sizes, spans)
        assert min(offsets) == 0
        assert all(offset % replay.ALIGNMENT == 0 for offset in offsets)
        for (i, one), (j, two) in combinations(enumerate(zip(sizes, spans, strict=True)), 2):
            if one[1][0] <= two[1][1] and two[1][0] <= one[1][1]:
                first, second = sorted([(offsets[i], one[0]), (offsets[j], two[0])])
                assert first[0] + first[1] <= second[0]


@pytest.mark.parametrize("spoil", ["part of an image", "whose part", "left out", "not compiled"])
def test_what_a_plan_cannot_hold_is_made_anew(spoil):
    x, row, out, calls = torch.zeros(3, 2), torch.zeros(6), torch.zeros(4), []
    inputs = [x, row[:3], row[3:]] if spoil == "whose part" else [x, row]
    argument = {"part of an image": x[1:], "whose part": row[4:]}
    given = [argument.get(spoil, x), *([] if spoil == "left out" else [out])]

    def call():
        calls.append(replay.is_noting())
        if replay.is_noting():
            run = None if spoil == "not compiled" else (lambda *got: None)
            replay.note(run, given, by_address=False)
        return [out]

    for _ in range(4):
        (result,) = replay.replayed(call, inputs, ())
        assert result is out
    assert calls == [False, True, False, False]
    assert list(replay._plans.values()) == [None]


def test_part_of_a_row_that_comes_in():
    seen, out = [], torch.zeros(2)

    def call(row):
        if replay.is_noting():
            replay.note(lambda *got: seen.append(got), [row[4:], out], by_address=False)
        return [out]

    for row in (torch.zeros(6), torch.arange(6.0), torch.arange(6.0) + 10):
        replay.replayed(partial(call, row), [row], ())
    ((part, _),) = seen
    assert part.tolist() == [14, 15]


def test_a_switch_has_two_positions(monkeypatch):
    for value, expected in (("", True), ("0", False), ("1", True)):
        monkeypatch.setenv("QUADTREE_REPLAY", value)
        assert replay.is_asked_for() == expected
    monkeypatch.setenv("QUADTREE_REPLAY", "yes")
    raises(OptionError, "QUADTREE_REPLAY must be 0 or 1, got 'yes'", replay.is_asked_for)
