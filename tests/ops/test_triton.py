# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels against the reference: in Triton's interpreter here, for real on a GPU."""

from itertools import product

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from quadtree_attention import BackendUnsupportedError, quadtree_attention
from quadtree_attention.ops.attention.problem import make_problem
from quadtree_attention.ops.backends import TRITON
from tests.interpreter import kernels
from tests.ops.cases import CASES, Case, as_sets, check, every_case
from tests.support import raises

# Tiny: the interpreter runs one program after the other, in Python.
INTERPRETED = (
    Case("interpreted_b", 1, (4, 6), (4, 5), 1, 8, 8, 2, 2, "B", 0.0, 0.3),
    Case("interpreted_a", 1, (4, 6), (4, 5), 1, 8, 5, 2, 2, "A", 0.3, 0.3),
    Case("interpreted_row_b", 1, (7,), (9,), 2, 8, 8, 3, 3, "B"),
    Case("interpreted_row_a", 1, (7,), (9,), 2, 8, 8, 3, 3, "A"),
    # several families by program, the last one of which has room left, and heads that meet in one
    Case("interpreted_rows_b", 2, (11,), (9,), 2, 8, 5, 3, 4, "B", 0.3, 0.3),
    Case("interpreted_rows_a", 2, (11,), (9,), 2, 8, 5, 3, 4, "A", 0.3, 0.3),
    # candidates of a family in two parts
    Case("interpreted_parts_b", 1, (3, 4), (7, 6), 1, 8, 5, 3, (6, 5), "B", 0.0, 0.3),
    Case("interpreted_parts_a", 1, (3, 4), (7, 6), 1, 8, 5, 3, (6, 5), "A", 0.3, 0.3),
    Case("interpreted_volume_b", 1, (2, 3, 2), (3, 2, 2), 1, 8, 8, 2, 1, "B"),
    # halved once without a remainder, twice with one
    Case("interpreted_even_b", 1, (6, 2), (2, 6), 1, 8, 8, 3, 2, "B"),
    Case("interpreted_one_level_b", 1, (3, 4), (2, 5), 1, 8, 8, 1, 1, "B", 0.0, 0.5),
)


def _all_the_same(q, k):
    return q.fill_(0.5), k.fill_(0.5)


def _one_key_far_away(q, k):
    k[0, 3, 4] = 1e5  # the range of the scores says nothing about where the others lie
    return q, k


def _few_different_scores(q, k):
    return q.sign(), k.sign()


def _infinite(q, k):
    k[0, 3, 4] = float("inf")
    return q.abs(), k


def _not_a_number(q, k):
    q[0, 0, 0] = float("nan")
    k[0, 3, 4] = float("nan")
    return q, k


# Scores that a search by halving could stumble over.
HARD_TO_CHOOSE = {
    "all the same": _all_the_same,
    "one key far away": _one_key_far_away,
    "few different scores": _few_different_scores,
}


def check_choice(name: str, grid: tuple[int, ...], topk: int, device: str) -> None:
    """Which cells are kept, ties included, must be what the reference keeps.

    The scale is a power of two, so that scores which are equal stay equal when rounded.
    """
    rng = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, *grid, 1, 8, generator=rng).unbind()
    q, k = HARD_TO_CHOOSE[name](q, k)
    kept = {}
    for backend in ("triton", "reference"):
        options = {"num_levels": 2, "topk": topk, "scale": 0.25, "return_selection": True}
        maps = (x.to(device) for x in (q, k, v))
        _, (level,) = quadtree_attention(*maps, **options, backend=backend)
        kept[backend] = as_sets(level.cells)
    assert torch.equal(kept["triton"], kept["reference"])


def check_mode(case, deterministic):
    from quadtree_attention.ops.attention.triton import backward

    taken = set()

    def noting(name, function):
        return lambda *args, **options: taken.add(name) or function(*args, **options)

    torch.use_deterministic_algorithms(deterministic)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("sorted_users", "listed_users"):
            patch.setattr(backward, name, noting(name, getattr(backward, name)))
        check(case, "triton", torch.float32)
    if case.num_levels > 1:
        assert taken == {"sorted_users" if deterministic else "listed_users"}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", INTERPRETED, ids=lambda case: case.name)
def test_in_the_interpreter(case, deterministic, interpreter):
    interpreter(check_mode, case, deterministic)


@kernels(
    check_choice,
    product(HARD_TO_CHOOSE, [(16, 18)], [2]),
    product(HARD_TO_CHOOSE, [(60, 76)], [3, 20, 128]),
)
def test_choice(run):
    run()


def test_reasons_are_all_given():
    q, k, v = torch.randn(3, 1, 4, 6, 1, 300, dtype=torch.float64).unbind()
    problem = make_problem(q, k, v, num_levels=2, topk=500)
    reasons = TRITON.reasons(problem)
    assert "it needs a CUDA device, the tensors are on cpu" in reasons
    assert "it computes in float32 at most, the tensors are float64" in reasons
    assert "head dims go up to 256, got 300 and 300" in reasons
    words = "backend 'triton' cannot run this problem"
    raises(BackendUnsupportedError, words, attention, q, k, v, num_levels=2, topk=500)


def attention(q, k, v, **options):
    return quadtree_attention(q, k, v, **{"num_levels": 3, "topk": 4} | options, backend="triton")


def draw(*shape, dtype=torch.float32, seed=0, **options):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=rng).to("cuda", dtype).requires_grad_(**options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@every_case
def test_on_a_gpu(case, dtype):
    check(case, "triton", dtype, "cuda")


def check_families_are_apart(device):
    """What is not finite in one batch entry stays there, though a program has families of both."""
    for variant, spoilt in (("A", 1), ("A", 2), ("B", 1), ("B", 2)):  # keys, or values
        rng = torch.Generator().manual_seed(0)
        q, *maps = (torch.randn(2, 7, 1, 8, generator=rng).to(device) for _ in range(3))
        q.requires_grad_()
        results = []
        for value in (0.5, float("inf")):
            maps[spoilt - 1][0, 3, 0, 0] = value
            out = attention(q, *maps, variant=variant, topk=3, num_levels=2)
            (dq,) = torch.autograd.grad(out.square().sum(), q)
            results.append((out[1], dq[1]))
        assert spoilt == 1 or not out[0].isfinite().all()
        for x, y in zip(*results, strict=True):
            assert torch.equal(x, y)


@kernels(check_families_are_apart)
def test_families_are_apart(run):
    run()


@pytest.mark.gpu
@pytest.mark.parametrize("spoil", [_infinite, _not_a_number])
@pytest.mark.parametrize("variant", ["A", "B"])
def test_selections_stay_on_the_grid_whatever_comes(spoil, variant):
    for seed in range(20):
        q, k, v = (draw(2, 21, 34, 2, 16, seed=seed + i) for i in (0, 100, 200))
        with torch.no_grad():
            spoil(q, k)
        out, selection = attention(q, k, v, variant=variant, topk=(9, 5), return_selection=True)
        out.nan_to_num().sum().backward()
        torch.cuda.synchronize()
        for level, size in zip(selection, [(6, 9), (11, 17)], strict=True):
            assert level.cells.min() >= -1
            assert (level.cells < torch.tensor(size, device="cuda")).all()


@pytest.mark.gpu
def test_more_parents_than_a_grid_axis_holds():
    q, k, v = (draw(1, 700, 400, 1, 8, seed=i).detach() for i in range(3))  # 70,000 parents
    got = attention(q, k, v, num_levels=4)
    expected = quadtree_attention(q, k, v, num_levels=4, topk=4, backend="reference")
    close = (got - expected).abs().amax(-1) < 1e-4  # near ties may be decided differently
    assert close.float().mean() > 0.999


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "topk"), [(256, 128), (8, 128), (256, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_largest_sizes(dim, topk, dtype):
    case = Case("largest", 1, (30, 34), (34, 30), 1, dim, dim, 2, topk, "B")
    check(case, "triton", dtype, "cuda")


@pytest.mark.gpu
def test_deterministic_backward_is_bitwise_equal():
    case = next(case for case in CASES if case.name == "four_levels_b")
    q = draw(2, *case.grid, 2, 16, requires_grad=True)

    def gradient():
        out = attention(q, q, q, num_levels=4, topk=3)
        return torch.autograd.grad(out.square().sum(), q)[0]

    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(gradient(), gradient())
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [False, True])
def test_runs_in_a_cuda_graph(backward):
    q, k, v = (draw(1, 20, 28, 2, 32, dtype=torch.bfloat16, seed=i) for i in range(3))

    def run():
        out = attention(q, k, v)
        return torch.autograd.grad(out, (q, k, v), out.detach()) if backward else (out.detach(),)

    expected = run()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for x in got:
        x.zero_()
    graph.replay()
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
def test_runs_on_the_current_stream():
    q, k, v = (draw(1, 40, 56, 2, 32, seed=i) for i in range(3))
    expected = attention(q, k, v)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # a kernel on another stream would not wait for this
        shifted = attention(q + 1, k, v)
        again = attention(q, k, v)
    torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close(again, expected)
    assert not torch.allclose(shifted, expected)


@pytest.mark.gpu
def test_runs_on_the_device_of_its_tensors():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    q, k, v = (draw(1, 20, 28, 2, 32, seed=i) for i in range(3))
    there = [x.to("cuda:1") for x in (q, k, v)]
    torch.testing.assert_close(attention(*there).cpu(), attention(q, k, v).cpu())


@pytest.mark.gpu
def test_any_strides():
    qkv = draw(2, 18, 26, 3, 2, 40, requires_grad=True)
    views = [x[..., 4:36] for x in qkv.unbind(3)]
    copies = [x.detach().contiguous().requires_grad_() for x in views]
    cotangent = draw(2, 18, 26, 1, 32).expand(-1, -1, -1, 2, -1)
    out = attention(*views)
    expected = attention(*copies)
    torch.testing.assert_close(out, expected)
    (grad,) = torch.autograd.grad(out, qkv, cotangent)
    grads = torch.autograd.grad(expected, copies, cotangent)
    torch.testing.assert_close(grad[..., 4:36], torch.stack(grads, dim=3), rtol=1e-5, atol=1e-6)
    crop = attention(*(x[:, 1:14, 3:25] for x in views))
    torch.testing.assert_close(crop, attention(*(x[:, 1:14, 3:25].clone() for x in views)))


@pytest.mark.gpu
def test_out_of_memory_is_the_error_of_torch_and_leaves_all_usable():
    q, k, v = (draw(1, 64, 64, 2, 32, seed=i) for i in range(3))
    expected = attention(q, k, v)
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**26) / total)
    big = [x.expand(256, -1, -1, -1, -1) for x in (q, k, v)]  # a result of 256 MiB
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            attention(*big)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.testing.assert_close(attention(q, k, v), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["A", "B"])
def test_opcheck(variant):
    q, k, v = ([draw(1, 9, 14, 2, 16, seed=i)] for i in range(3))
    shown = [torch.rand(1, n, device="cuda") > 0.3 for n in (12, 35, 126)]
    weights = None if variant == "A" else torch.rand(3, device="cuda")
    op = torch.ops.quadtree_attention.triton.default
    for masks in ([], shown):
        arguments = (q, k, v, masks, masks, weights, [3, 2], 0.25, variant, variant == "A")
        torch.library.opcheck(op, (*arguments, False))
        # not what lies between the parts of the rest, which is not defined
        tests = "test_schema", "test_autograd_registration", "test_faketensor"
        torch.library.opcheck(op, (*arguments, True), test_utils=tests)


@pytest.mark.gpu
def test_compiles_without_a_break():
    q, k, v = (draw(1, 18, 26, 2, 32, seed=i, requires_grad=True) for i in range(3))
    out = attention(q, k, v)
    compiled = torch.compile(attention, fullgraph=True)(q, k, v)
    torch.testing.assert_close(compiled, out)
    grads = torch.autograd.grad(compiled.sum(), (q, k, v))
    for x, y in zip(grads, torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.gpu
def test_autocast_runs_in_its_dtype():
    q, k, v = (draw(1, 18, 26, 2, 32, seed=i) for i in range(3))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = attention(q, k, v)
    assert out.dtype == torch.bfloat16
    halves = (x.bfloat16() for x in (q, k, v))
    torch.testing.assert_close(out, attention(*halves), rtol=0, atol=0)


@pytest.mark.gpu
def test_flops_are_those_of_the_reference():
    q, k, v = (draw(1, 18, 26, 2, 32, seed=i, requires_grad=True) for i in range(3))
    counts = {}
    for backend in ("triton", "reference"):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            quadtree_attention(q, k, v, num_levels=2, topk=4, backend=backend)
        counts[backend] = counter.get_total_flops()
    assert counts["triton"] == counts["reference"]
    with FlopCounterMode(display=False) as counter:
        attention(q, k, v, num_levels=2).sum().backward()
    assert counter.get_total_flops() == counts["triton"] * 7 // 2


def check_an_empty_batch(device):
    q = torch.randn(0, 9, 14, 2, 16, device=device, requires_grad=True)
    out = attention(q, q, q)
    assert out.shape == q.shape
    out.sum().backward()
    assert q.grad.shape == q.shape


@kernels(check_an_empty_batch)
def test_an_empty_batch(run):
    run()
