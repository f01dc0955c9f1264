# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quadtree_attention import OptionError
from quadtree_attention.models.parts import coarse_matching
from quadtree_attention.models.parts.coarse_matching import CoarseMatches, CoarseMatching
from quadtree_attention.models.parts.fine_matching import FineWindows, expected_offset
from tests.conftest import Golden, golden_files
from tests.support import raises

METHODS = ["dual_softmax", "optimal_transport"]


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(2, *shape, 8, dtype=dtype) * 2


def masks(*shape: int) -> torch.Tensor:
    return torch.rand(2, *shape) > 0.2


@pytest.mark.parametrize("path", golden_files("modules/matching_heads*.npz"))
def test_official_heads(path):
    golden = Golden(path)
    meta, dtype = golden.meta, torch.float64
    coarse = [golden.tensor(f"in:feat_c{i}", dtype).unflatten(1, meta["hw_c"]) for i in range(2)]
    fine = [golden.tensor(f"in:feat_f{i}", dtype) for i in range(2)]
    shown: list[torch.Tensor | None] = [None, None]
    scales = [torch.ones(2, dtype=dtype)] * 2
    if meta["masked"]:
        shown = [torch.from_numpy(golden.arrays[f"in:mask{i}"]) for i in range(2)]
        scales = [golden.tensor(f"in:scale{i}", dtype) for i in range(2)]
    matching = CoarseMatching(
        temperature=meta["temperature"], threshold=meta["thr"], border=meta["border_rm"]
    )
    confidence = matching.confidence(*coarse, *shown)
    expected = golden.tensor("conf_matrix", dtype)
    if meta["masked"]:  # pairs of hidden cells have 0 here, 1 / (number of pairs) there
        hidden = ~shown[0].flatten()[:, None] & ~shown[1].flatten()
        assert not confidence[:, hidden].any()
        expected[:, hidden] = 0
    torch.testing.assert_close(confidence, expected, rtol=0, atol=1e-6)
    grid = tuple(meta["hw_c"])
    chosen = matching.select(confidence, grid, grid, *shown)
    matching.max_entries = 1000
    for matches in (chosen, matching(*coarse, *shown)):
        assert matches.batch_indexes.tolist() == golden.arrays["b_ids"].tolist()
        assert matches.cells0.tolist() == golden.arrays["i_ids"].tolist()
        assert matches.cells1.tolist() == golden.arrays["j_ids"].tolist()
        expected = golden.tensor("mconf", dtype)
        torch.testing.assert_close(matches.confidence, expected, rtol=0, atol=1e-6)

    windows = FineWindows(coarse[0].shape[-1], fine[0].shape[1], meta["fine_window"], dtype=dtype)
    names = {"down_proj": "project", "merge_feat": "merge"}
    state = golden.with_prefix("sd:fine_preprocess.")
    parts = {key: key.split(".") for key in state}
    windows.load_state_dict({f"{names[a]}.{b}": state[key] for key, (a, b) in parts.items()})
    cells = (matches.cells0, matches.cells1)
    both = [windows(fine[i], coarse[i], matches.batch_indexes, cells[i]) for i in range(2)]
    for i in range(2):
        expected = golden.tensor(f"fine_window{i}", dtype)
        torch.testing.assert_close(both[i], expected, rtol=0, atol=1e-6)
    offset, std = expected_offset(*both)
    found = torch.cat([offset, std[:, None]], dim=1)
    torch.testing.assert_close(found, golden.tensor("expec_f", dtype), rtol=0, atol=1e-6)
    points = [
        torch.stack([c % grid[1], c // grid[1]], 1) * 8.0 * s
        for c, s in zip(cells, scales, strict=True)
    ]
    points[1] = points[1] + offset * 4 * scales[1]
    for i in range(2):
        expected = golden.tensor(f"mkpts{i}_f", dtype)
        torch.testing.assert_close(points[i], expected, rtol=0, atol=5e-5)


def transport_by_hand(matching, map0, map1, iterations) -> torch.Tensor:
    """SuperGlue's form: the matrix with its dustbins, normalised by turns, in probabilities."""
    scores = map0.flatten(1, 2) @ map1.flatten(1, 2).mT / map0.shape[-1]
    batch, rows, columns = scores.shape
    kernel = torch.full((batch, rows + 1, columns + 1), matching.bin_score.item()).double()
    kernel[:, :rows, :columns] = scores
    kernel = kernel.exp()
    row_mass = torch.ones(rows + 1, 1).double()
    column_mass = torch.ones(1, columns + 1).double()
    row_mass[-1], column_mass[0, -1] = columns, rows
    for _ in range(iterations):
        kernel = kernel * (row_mass / kernel.sum(2, keepdim=True))
        kernel = kernel * (column_mass / kernel.sum(1, keepdim=True))
    return kernel[:, :rows, :columns]


@pytest.mark.parametrize("iterations", [1, 3, 20])
def test_optimal_transport_against_the_formula(iterations):
    matching = CoarseMatching("optimal_transport", iterations=iterations)
    torch.nn.init.constant_(matching.bin_score, 0.7)
    map0, map1 = draw(3, 5), draw(4, 6)
    got = matching.confidence(map0, map1, None, None)
    torch.testing.assert_close(got, transport_by_hand(matching, map0, map1, iterations))


def test_dual_softmax_against_the_formula():
    map0, map1 = draw(3, 5), draw(4, 6)
    scores = map0.flatten(1, 2) @ map1.flatten(1, 2).mT / 8 / 0.3
    got = CoarseMatching(temperature=0.3).confidence(map0, map1, None, None)
    torch.testing.assert_close(got, scores.softmax(1) * scores.softmax(2))


@pytest.mark.parametrize("method", METHODS)
def test_gradients(method):
    matching = CoarseMatching(method, temperature=1.0, dtype=torch.float64)
    map0, map1 = draw(2, 3).requires_grad_(), draw(3, 2).requires_grad_()
    mask0 = torch.ones(2, 2, 3, dtype=torch.bool)
    mask0[0, 0, 1] = mask0[1] = False  # of sample 1, nothing is left
    inputs = (map0, map1, *matching.parameters())
    assert torch.autograd.gradcheck(lambda a, b, *_: matching.confidence(a, b, mask0, None), inputs)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
def test_padding_changes_nothing(method, dtype, masked):
    matching = CoarseMatching(method, threshold=0.0)
    map0, map1 = draw(5, 6, dtype=dtype), draw(4, 7, dtype=dtype)
    canvas0, canvas1 = draw(8, 9, dtype=dtype), draw(8, 9, dtype=dtype)
    canvas0[:, :5, :6], canvas1[:, :4, :7] = map0, map1
    mask0, mask1 = torch.zeros(2, 2, 8, 9, dtype=torch.bool).unbind()
    mask0[:, :5, :6] = masks(5, 6) if masked else True
    mask1[:, :4, :7] = masks(4, 7) if masked else True
    small = (mask0[:, :5, :6], mask1[:, :4, :7]) if masked else (None, None)
    alone = matching.confidence(map0, map1, *small).unflatten(2, (4, 7)).unflatten(1, (5, 6))
    padded = matching.confidence(canvas0, canvas1, mask0, mask1)
    padded = padded.unflatten(2, (8, 9)).unflatten(1, (8, 9))
    torch.testing.assert_close(padded[:, :5, :6, :4, :7], alone, rtol=1e-4, atol=1e-6)
    assert padded.sum().item() == pytest.approx(alone.sum().item(), rel=1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("max_entries", "part"), [(1, 1), (100, 200), (2000, 600), (10**6, 900)])
def test_tiles_give_what_the_matrix_gives(method, dtype, masked, max_entries, part, monkeypatch):
    monkeypatch.setattr(coarse_matching, "CPU_ENTRIES", part)
    matching = CoarseMatching(method, threshold=1e-3, border=1, max_entries=max_entries)
    map0, map1 = draw(9, 11, dtype=dtype), draw(7, 13, dtype=dtype)
    shown = (masks(9, 11), masks(7, 13)) if masked else (None, None)
    plain = matching.select(matching.confidence(map0, map1, *shown), (9, 11), (7, 13), *shown)
    tiled = matching(map0, map1, *shown)
    assert len(plain) > 10
    for name in ("batch_indexes", "cells0", "cells1"):
        assert torch.equal(getattr(tiled, name), getattr(plain, name))
    torch.testing.assert_close(tiled.confidence, plain.confidence, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("max_entries", [1, 2000, 10**6])
def test_ties_give_what_the_matrix_gives(method, dtype, masked, max_entries):
    """Maps of a few kinds of cells: the same kinds match, and no cell is in two matches.

    Which cells of a kind do is up to the last bit of their sums, in the matrix as in its tiles.
    """
    kinds = torch.randint(-3, 4, (24, 8)).to(dtype)
    kinds0, kinds1 = torch.randint(24, (2, 9, 11)), torch.randint(24, (2, 7, 13))
    maps = kinds[kinds0], kinds[kinds1]
    shown = (masks(9, 11), masks(7, 13)) if masked else (None, None)
    matching = CoarseMatching(method, threshold=0.0, border=0, max_entries=max_entries)
    confidence = matching.confidence(*maps, *shown)
    near = confidence > 0.999 * confidence.amax(dim=2, keepdim=True)
    assert (near.sum(dim=2) > 1).float().mean() > 0.5  # most cells have several best ones
    found = []
    for matches in (matching.select(confidence, (9, 11), (7, 13), *shown), matching(*maps, *shown)):
        samples = matches.batch_indexes
        for cells in (matches.cells0, matches.cells1):
            once = set(zip(samples.tolist(), cells.tolist(), strict=True))
            assert len(once) == len(matches)
        pairs = zip(
            samples.tolist(),
            kinds0.flatten(1)[samples, matches.cells0].tolist(),
            kinds1.flatten(1)[samples, matches.cells1].tolist(),
            strict=True,
        )
        found.append(dict(zip(pairs, matches.confidence.tolist(), strict=True)))
    plain, tiled = found
    assert len(plain) > 10
    assert tiled == pytest.approx(plain, rel=1e-4)


class LargestTensor(TorchDispatchMode):
    """Remembers how many entries the largest tensor has that any operation returns."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.entries = max(self.entries, leaf.numel())
        return out


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("masked", [False, True])
def test_no_more_of_the_matrix_than_allowed(method, masked):
    map0, map1 = draw(30, 31, dtype=torch.float32), draw(20, 41, dtype=torch.float32)
    shown = (masks(30, 31), masks(20, 41)) if masked else (None, None)
    matching = CoarseMatching(method, max_entries=50_000)
    with LargestTensor() as largest:
        matching(map0, map1, *shown)
    assert 40_000 < largest.entries <= 50_000
    with LargestTensor() as largest:
        matching.confidence(map0, map1, *shown)
    assert largest.entries == 2 * 930 * 820


@pytest.mark.parametrize("max_entries", [1, 40, 10**6])
def test_equal_cells_match_once(max_entries):
    """Of equal maxima the first counts, so that no cell is in two matches."""
    constant = torch.ones(1, 2, 3, 8)
    matching = CoarseMatching(threshold=0.0, border=0, max_entries=max_entries)
    matches = matching(constant, constant, None, None)
    assert (matches.cells0.tolist(), matches.cells1.tolist()) == ([0], [0])


def test_border_follows_the_mask():
    x = torch.eye(63).reshape(1, 7, 9, 63) * 40
    matching = CoarseMatching(border=2)
    mask = torch.zeros(1, 7, 9, dtype=torch.bool)
    mask[:, :6, :7] = True
    assert len(matching(x, x, None, None)) == 3 * 5
    cells = [9 * row + column for row in (2, 3) for column in (2, 3, 4)]
    assert matching(x, x, mask, None).cells0.tolist() == cells
    assert matching(x, x, None, mask).cells1.tolist() == cells
    assert len(CoarseMatching(border=0)(x, x, mask, None)) == 42
    assert len(CoarseMatching(border=4)(x, x, None, None)) == 0


def test_threshold_is_strict():
    x = torch.zeros(1, 1, 1, 8)
    assert len(CoarseMatching(border=0, threshold=1.0)(x, x, None, None)) == 0
    assert len(CoarseMatching(border=0, threshold=0.999)(x, x, None, None)) == 1


def some(count: int, confidence: float) -> CoarseMatches:
    cells = torch.arange(count)
    return CoarseMatches(cells * 0, cells, cells, torch.full((count,), confidence))


@pytest.mark.parametrize(
    ("predicted", "truth", "expected"),
    [(3, 50, (3, 17)), (100, 50, (15, 5)), (0, 2, (0, 20)), (8, 0, (8, 0)), (0, 0, (0, 0))],
)
def test_matches_for_training(predicted, truth, expected):
    given = some(predicted, 0.5), some(truth, 0.0)
    got = coarse_matching.matches_for_training(*given, count=20, least_true=5)
    assert ((got.confidence > 0).sum().item(), (got.confidence == 0).sum().item()) == expected
    assert len(set(got.cells0[got.confidence > 0].tolist())) == expected[0]
    assert torch.equal(got.cells0, got.cells1)


def test_what_is_refused():
    methods = r"one of dual_softmax, optimal_transport, got 'sinkhorn'"
    raises(OptionError, methods, CoarseMatching, "sinkhorn")
    raises(OptionError, r"temperature must be above 0, got 0;", CoarseMatching, temperature=0)
    raises(OptionError, r"border must be at least 0, got -1;", CoarseMatching, border=-1)
