# SPDX-License-Identifier: Apache-2.0
"""The Numba kernels against the reference, and their behaviour in threads, forks and compilers."""

import multiprocessing
import sys
import threading

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode

from quadtree_attention import ShapeError, quadtree_attention
from quadtree_attention.ops.attention import cpu, reference
from quadtree_attention.ops.attention import tree as plain
from quadtree_attention.ops.attention.cpu import operators, pyramids
from quadtree_attention.ops.attention.cpu import threads as helpers
from quadtree_attention.ops.attention.cpu.operators import attend as attend_level
from quadtree_attention.ops.attention.problem import make_problem
from quadtree_attention.ops.attention.tree import Tree
from tests.ops.cases import CASES, Case, check, every_case
from tests.support import raises
from tests.support.against_reference import rms
from tests.support.commands import python

pytest.importorskip("numba", reason="the cpu backend needs numba")

OPS = torch.ops.quadtree_attention
SMALL_SHARE = 50_000  # multiplications, so that small maps are shared out among threads
VARIANTS = pytest.mark.parametrize("variant", ["A", "B"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@every_case
def test_against_the_reference(case, dtype):
    check(case, "cpu", dtype)


@VARIANTS
def test_sizes_that_have_code_of_their_own(variant):
    """Families of four with rows 64 wide; those 32 wide are in the table of cases."""
    check(Case("", 2, (7, 10), (8, 7), 2, 64, 64, 3, 6, variant, 0.0, 0.2), "cpu", torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["odd_b", "odd_a", "masks_b", "masks_a", "values_differ_b"])
def test_low_precision(name, dtype):
    check(next(case for case in CASES if case.name == name), "cpu", dtype)


def draw(grid=(9, 14), heads=2, dim=16, dtype=torch.float32, batch=1):
    return [torch.randn(batch, *grid, heads, dim, dtype=dtype) for _ in range(3)]


def attend(q, k, v, variant="B", **options):
    options = {"num_levels": 3, "topk": 4, "backend": "cpu"} | options
    return quadtree_attention(q, k, v, variant=variant, **options)


def gradients(q, k, v, **options):
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, **options)
    return out.detach(), *torch.autograd.grad(out.square().sum(), leaves)


@VARIANTS
def test_the_same_bits_for_every_run_and_any_number_of_threads(variant, monkeypatch):
    monkeypatch.setattr(helpers, "SMALLEST_SHARE", SMALL_SHARE)
    inputs = draw((40, 56), heads=3)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (2, 2, 1, 5):
            torch.set_num_threads(threads)
            results.append(gradients(*inputs, variant=variant, topk=8))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("name", ["masks_b", "masks_a", "row_b", "volume_a", "one_level_b"])
def test_queries_in_parts(name, monkeypatch):
    """The backward pass of maps that are large enough for several cores."""
    monkeypatch.setattr(operators, "FEWEST_FAMILIES", 1)
    monkeypatch.setattr(operators, "PARTS", 11)
    case = next(case for case in CASES if case.name == name)
    check(case, "cpu", torch.float64)


def level_arguments(variant, dtype=torch.float32):
    """Arguments of the operator for a tiny level, as the coarsest one and as a finer one."""

    def leaf(*shape):
        return torch.randn(*shape, dtype=dtype, requires_grad=True)

    q, k, v = leaf(1, 2, 8, 5), leaf(1, 2, 12, 5), leaf(1, 2, 12, 3)
    visible = torch.rand(1, 12) > 0.3
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    weight = torch.tensor(0.7, dtype=accumulate, requires_grad=True) if variant == "B" else None
    parents = torch.stack([torch.randperm(3)[:2] for _ in range(4)]).view(1, 2, 2, 2).int()
    scores = torch.rand(1, 2, 2, 2, dtype=accumulate, requires_grad=True)
    inherited = torch.randn(1, 2, 2, 3, dtype=accumulate, requires_grad=True)
    above = (parents, scores if variant == "A" else None, inherited)
    level, options = (q, k, v, visible, weight), (0.4, 3, variant == "A", True)
    return (*level, None, None, None, *options), (*level, *above, *options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@VARIANTS
def test_operators_are_well_formed(variant, dtype):
    for arguments in level_arguments(variant, dtype):
        torch.library.opcheck(OPS.cpu_attend, arguments)


@pytest.mark.parametrize("topk", [None, 3])
@pytest.mark.parametrize("masked", [False, True])
@VARIANTS
def test_one_level_with_the_selection_given(variant, masked, topk):
    """Both functions of the backend, with gradients of all they return."""
    coarse, fine = level_arguments(variant, torch.float64)
    results = []
    for backend in (cpu, reference):
        found = []
        for function, arguments in (
            (backend.attend_coarse, coarse[:5]),
            (backend.attend_fine, fine[:8]),
        ):
            tensors = [
                x.detach().clone().requires_grad_(x.requires_grad) if x is not None else None
                for x in arguments
            ]
            if not masked:
                tensors[3] = None
            level = function(*tensors, scale=0.4, topk=topk, variant=variant, with_scores=True)
            wanted = [x for x in tensors if x is not None and x.requires_grad]
            total = level.total.sin().sum()
            if topk is not None:
                order = level.selection.long().sort(-1)  # nothing (-1) may be anywhere
                found += [order.values, level.scores.detach().gather(-1, order.indices)]
                if variant == "A":
                    total = total + level.scores.cos().sum()
            found += [level.total.detach(), *torch.autograd.grad(total, wanted)]
        results.append(found)
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


def test_gradient_of_the_scores_alone():
    """The total need not take part in a loss."""
    coarse, _ = level_arguments("A", torch.float64)
    results = []
    for backend in (cpu, reference):
        level = backend.attend_coarse(*coarse[:5], scale=0.4, topk=3, variant="A", with_scores=True)
        results.append(torch.autograd.grad(level.scores.sin().sum(), coarse[:2]))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("grid", "width"), [((11,), 8), ((6, 9), 11), ((8, 4), 19), ((3, 5, 4), 9)]
)
def test_pyramids(grid, width, masked):
    """Levels and gradients as PyTorch computes them; hidden cells enter no mean."""
    tree = Tree(grid, 3)
    mask = torch.rand(2, *grid) > 0.5 if masked else None
    visible = tree.visible(mask, 2, torch.device("cpu"))
    x = torch.randn(2, *grid, 3, width, dtype=torch.float64)
    if masked:
        x[~mask] = torch.nan
    x.requires_grad_()
    got, expected = cpu.pyramid(tree, x, visible), plain.pyramid(tree, x, visible)
    torch.testing.assert_close(got, expected, equal_nan=True)
    cotangents = [torch.randn_like(level) for level in got]
    gradients = (torch.autograd.grad(levels, x, cotangents) for levels in (got, expected))
    torch.testing.assert_close(*gradients)
    shown = [level for level in visible if level is not None]
    x = torch.randn_like(x, requires_grad=True)
    torch.library.opcheck(OPS.cpu_pyramid, (x, shown, list(grid), 3))


def same_bits(x, got, expected):
    """Results and gradients."""
    assert torch.equal(got, expected)
    (a,), (b,) = (torch.autograd.grad(y.square().sum(), x) for y in (got, expected))
    assert torch.equal(a, b)


def test_orders_of_trees_are_bounded(monkeypatch):
    monkeypatch.setattr(pyramids, "_orders", {})
    monkeypatch.setattr(pyramids, "MOST_BYTES", 3000)
    trees = [Tree((16, 16 + 2 * i), 2) for i in range(4)]  # above 1,024 bytes each
    orders = [pyramids._order(tree) for tree in trees]
    assert list(pyramids._orders) == trees[-2:]
    assert pyramids._order(trees[-2]) is orders[-2]
    assert list(pyramids._orders) == [trees[-1], trees[-2]], "the last one goes last"
    monkeypatch.setattr(pyramids, "MOST_ORDERS", 1)
    pyramids._order(trees[0])
    assert list(pyramids._orders) == trees[:1]


@pytest.mark.parametrize("grid", [(11,), (6, 9), (8, 4), (3, 5, 4)])
def test_levels_in_tree_order_and_back(grid):
    tree = Tree(grid, 3)
    for level in range(3):
        x = torch.randn(2, *tree.grid_at(level), 3, 11, requires_grad=True)
        same_bits(x, cpu.to_tree(tree, x, level), plain.to_tree(tree, x, level))
        if level:
            torch.library.opcheck(OPS.cpu_to_tree, (x, list(tree.grid_at(level)), level + 1))
    x = torch.randn(2, 3, tree.num_cells(2), 11, requires_grad=True)
    same_bits(x, cpu.to_grid(tree, x), plain.to_grid(tree, x))
    torch.library.opcheck(OPS.cpu_to_grid, (x, list(grid), 3))


def test_reasons(monkeypatch):
    q, k, v = (x.to("meta") for x in draw())
    problem = make_problem(q, k, v, num_levels=2, topk=3)
    assert cpu.CPU.reasons(problem) == []
    assert attend(q, k, v).shape == q.shape
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    assert cpu.CPU.reasons(problem) == ["exported programs use the reference"]


def test_gradient_that_is_expanded():
    q, k, v = (x.requires_grad_() for x in draw())
    (got,) = torch.autograd.grad(attend(q, k, v).sum(), q)
    (expected,) = torch.autograd.grad(attend(q, k, v, backend="reference").sum(), q)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@VARIANTS
def test_hidden_rows_are_never_read(variant):
    """A level whose hidden rows hold NaN gives the same as one that holds zeros there."""
    for number in range(2):
        results = []
        for bad in (torch.nan, 0.0):
            torch.manual_seed(1)
            q, k, v, visible, *rest = level_arguments(variant)[number]
            with torch.no_grad():
                for x in (k, v):
                    x[:, :, ~visible[0]] = bad
            outputs = attend_level(q, k, v, visible, *rest)
            assert outputs[0].isfinite().all()
            grads = torch.autograd.grad(outputs[0].square().sum(), (q, k, v))
            assert (grads[1][:, :, ~visible[0]] == 0).all()
            results.append((*(x.detach() for x in outputs[:3]), *grads))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@VARIANTS
def test_bad_numbers_never_lead_out_of_range(variant, dtype):
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e38, -1e38], dtype=dtype)
    for seed in range(20):
        rng = torch.Generator().manual_seed(seed)
        q, k, v = draw((7, 10), dtype=dtype)
        for x in (q, k, v):
            where = torch.rand(x.shape, generator=rng) < 0.3 * seed / 20
            x[where] = bad[torch.randint(5, (int(where.sum()),), generator=rng)]
        mask = torch.rand(1, 7, 10, generator=rng) > 0.3 if seed % 2 else None
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out, selection = attend(*leaves, variant, topk=6, key_mask=mask, return_selection=True)
        torch.autograd.grad(out.sum(), leaves)
        for level, size in zip(selection, ((2, 3), (4, 5)), strict=True):
            hidden = (level.cells < 0).any(-1)
            assert (level.cells[hidden] == -1).all()
            assert ((level.cells < torch.tensor(size)) & (level.cells >= -1)).all()
            flat = level.cells[..., 0] * 100 + level.cells[..., 1]
            first = flat.sort(-1).values
            assert ((first[..., 1:] > first[..., :-1]) | (first[..., 1:] == -1)).all()


def test_not_a_number_ranks_highest_and_ties_go_to_the_first():
    """As in the reference, also where many are alike and for lists of every length."""
    for keys in (5, 8, 9, 64, 301):
        for topk in (1, 3, 5, 64):
            for pattern in ("ties", "nan", "plain", "steep"):
                logits = {
                    "ties": torch.randint(3, (keys,)).float(),
                    "nan": torch.where(torch.rand(keys) < 0.2, torch.nan, torch.randn(keys)),
                    "plain": torch.randn(keys),
                    "steep": torch.randn(keys).mul(20).exp(),
                }[pattern]
                q, k = torch.ones(1, 1, 3, 1), logits.view(1, 1, keys, 1)
                kept = min(topk, keys)
                options = {"topk": kept, "scale": 1.0, "variant": "B", "with_scores": False}
                got, expected = (
                    backend.attend_coarse(q, k, k, None, None, **options).selection.long()
                    for backend in (cpu, reference)
                )
                assert torch.equal(got, expected), (keys, topk, pattern)


def test_callers_parents_out_of_range_are_ignored():
    _, fine = level_arguments("B")
    fine = list(fine)
    fine[5] = torch.tensor([[7, 1], [-5, 2]] * 2, dtype=torch.int64).view(1, 2, 2, 2)
    got = OPS.cpu_attend(*fine)
    fine[5] = torch.tensor([[-1, 1], [-1, 2]] * 2).view(1, 2, 2, 2)
    assert torch.equal(got[0], OPS.cpu_attend(*fine)[0])


def test_autocast():
    q, k, v = draw()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(q, k, v)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, attend(*(x.bfloat16() for x in (q, k, v))))


@VARIANTS
def test_flop_counter(variant):
    q, k, v = (x.requires_grad_() for x in draw((8, 12), heads=3, dim=16))
    with FlopCounterMode(display=False) as counter:
        attend(q, k, v, variant, num_levels=2, topk=4).sum().backward()
    counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    coarse, fine = 2 * 3 * 24 * 24 * 32, 2 * 3 * 96 * 16 * 32
    total = coarse + fine
    expected = {"cpu_attend": total, "cpu_attend_backward": total * 5 // 2}
    assert counts == {f"quadtree_attention.{name}": n for name, n in expected.items()}


def test_flop_counter_that_is_imported_late():
    """Formulas reach a counter although the package did not import the counter's module."""
    source = """
import torch
import quadtree_attention as qa
from torch.utils.flop_counter import FlopCounterMode
q, k, v = torch.randn(3, 1, 4, 6, 1, 8).unbind()
with FlopCounterMode(display=False) as counter:
    qa.quadtree_attention(q, k, v, num_levels=1, topk=1, backend="cpu")
print(counter.get_total_flops())
"""
    assert last_line(source) == str(2 * 24 * 24 * 16)


# ---- threads, processes, installations -----------------------------------------------------------


def last_line(source, **environment):
    return python(source, **environment).splitlines()[-1]


class Attended(Dataset):
    """Items that are computed with the kernels, several threads wide."""

    def __len__(self):
        return 6

    def __getitem__(self, i):
        rng = torch.Generator().manual_seed(i)
        q, k, v = torch.randn(3, 1, 40, 56, 2, 16, generator=rng).unbind()
        with pytest.MonkeyPatch.context() as patch:
            # PyTorch itself is limited to one thread in a worker; the kernels need not be.
            patch.setattr(torch, "get_num_threads", lambda: 3)
            patch.setattr(helpers, "SMALLEST_SHARE", SMALL_SHARE)
            return attend(q, k, v)  # PyTorch's autograd itself does not survive a fork


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork on Windows")
def test_forked_workers_after_the_parent_has_used_its_threads():
    expected = [Attended()[i] for i in range(6)]
    assert helpers._pool is not None
    loader = DataLoader(
        Attended(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60
    )
    for got, wanted in zip(loader, expected, strict=True):
        assert torch.equal(got, wanted)
    assert torch.equal(Attended()[0], expected[0])


def _meet(first, last, barrier):
    """A kernel whose pieces end only if two threads are at work."""
    barrier.wait(timeout=10)


def _run_on_two_threads():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 2)
        helpers.run(_meet, 2, 10 * helpers.SMALLEST_SHARE, threading.Barrier(2))


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork on Windows")
def test_a_forked_process_starts_threads_of_its_own():
    """It has none of its parent's, though it has their pool, in which nobody would work."""
    _run_on_two_threads()
    assert helpers._pool is not None
    child = multiprocessing.get_context("fork").Process(target=_run_on_two_threads)
    child.start()
    child.join(timeout=60)
    assert child.exitcode == 0


def test_several_python_threads_at_once(monkeypatch):
    monkeypatch.setattr(helpers, "SMALLEST_SHARE", SMALL_SHARE)
    inputs = [draw((40, 56)) for _ in range(4)]
    expected = [gradients(*x) for x in inputs]
    failures = []

    def work(number):
        torch.set_num_threads(2)
        for _ in range(10):
            got = gradients(*inputs[number])
            if not all(torch.equal(a, b) for a, b in zip(got, expected[number], strict=True)):
                failures.append(number)

    before = torch.get_num_threads()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    torch.set_num_threads(before)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures


ONE_LEVEL = """
import torch
from quadtree_attention.ops.attention.cpu.kernels.trees import grid_to_tree
from quadtree_attention.ops.attention.cpu.pyramids import grid_to_finest
print(grid_to_tree.stats.cache_path)
map = torch.arange(4.0).view(1, 2, 2, 1, 1).expand(1, 2, 2, 1, 8)
print(grid_to_finest(map.contiguous(), [2, 2], 2)[..., 0].flatten().tolist())
"""


def test_compiled_code_that_cannot_be_kept(tmp_path):
    """No place for the cache: kernels are compiled anew, and work."""
    (tmp_path / "file").write_text("")
    nowhere = str(tmp_path / "file" / "cache")
    # The directory of the package may well be writable for whoever runs this test.
    only_the_named_place = (
        "from numba.core.caching import CacheImpl;"
        "CacheImpl._locator_classes = ["
        "    c for c in CacheImpl._locator_classes if 'UserProvided' in c.__name__];"
    )
    expected = "[0.0, 1.0, 2.0, 3.0]"
    source = only_the_named_place + ONE_LEVEL
    assert last_line(source, NUMBA_CACHE_DIR=nowhere) == expected
    assert last_line(ONE_LEVEL, NUMBA_CACHE_DIR=nowhere) == expected
    assert last_line(source, NUMBA_CACHE_DIR=str(tmp_path / "cache")) == expected
    assert list((tmp_path / "cache").rglob("*.nbi"))


def test_without_numba():
    source = """
import sys
sys.modules["numba"] = None
import torch
from quadtree_attention import BackendUnsupportedError, quadtree_attention
q, k, v = torch.randn(3, 1, 4, 6, 1, 8).unbind()
assert quadtree_attention(q, k, v, num_levels=2, topk=2).shape == q.shape
try:
    quadtree_attention(q, k, v, num_levels=2, topk=2, backend="cpu")
except BackendUnsupportedError as error:
    print(error.reasons)
"""
    assert last_line(source) == "['cpu: numba is not installed; pip install numba']"


def test_import_does_not_import_numba():
    name = "quadtree_attention.ops.attention.cpu"
    assert last_line(f"import sys, {name}; print('numba' in sys.modules)") == "False"


def test_operators_refuse_rows_too_narrow_for_their_vectors():
    message = "rows need 8 numbers or more, got 5"
    raises(ShapeError, message, OPS.cpu_pyramid, torch.randn(1, 4, 6, 1, 5), [], [4, 6], 2)
    raises(ShapeError, message, OPS.cpu_to_grid, torch.randn(1, 1, 24, 5), [4, 6], 2)


def test_one_term_with_all_the_weight_gives_no_gradient_in_variant_c():
    q, k, v = (torch.randn(1, n, 3, d, requires_grad=True) for n, d in ((155, 2), (1, 2), (1, 20)))
    out = quadtree_attention(q, k, v, num_levels=1, topk=1, variant="C", backend="cpu")
    for x in torch.autograd.grad(out, (q, k), torch.randn_like(out)):
        assert torch.equal(x, torch.zeros_like(x))


def test_gradients_of_variant_c_are_as_exact_as_those_of_the_reference():
    """Large logits: the rounding of their log-sum-exp must not enter the mean of the gradients."""
    torch.manual_seed(0)
    q, k, v, cotangent = (torch.randn(1, 16, 15, 2, 16) for _ in range(4))

    def gradients(backend, dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        options = {"num_levels": 3, "topk": 4, "variant": "C", "scale": 8.0, "backend": backend}
        out = quadtree_attention(*leaves, **options)
        return torch.autograd.grad(out, leaves, cotangent.to(dtype))

    exact = gradients("reference", torch.float64)
    ours, plain = (gradients(backend, torch.float32) for backend in ("cpu", "reference"))
    for truth, found, other in zip(exact[:2], ours, plain, strict=False):
        assert rms(found - truth) <= 1.5 * rms(other - truth)
