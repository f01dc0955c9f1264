# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from quadtree_attention.ops.attention.tree import Tree, mean_pyramid, pool, repeat

GRIDS = [((11,), 3), ((4, 8), 3), ((5, 7), 1), ((5, 3), 4), ((3, 2, 5), 2), ((1, 1), 3)]


@pytest.mark.parametrize(("grid", "levels"), GRIDS)
def test_round_trip(grid, levels):
    tree = Tree(grid, levels)
    for level in range(levels):
        x = torch.randn(2, 3, *tree.grid_at(level), 4)
        flat = tree.to_tree(x, level, axis=2)
        assert flat.shape == (2, 3, tree.num_cells(level), 4)
        assert torch.equal(tree.from_tree(flat, level, axis=2), x)


def test_tree_order_of_an_image():
    """Children of cell i are 4i ... 4i+3 in row-major order; the coarsest level is row-major."""
    tree = Tree((4, 8), 2)
    x = torch.arange(32).reshape(1, 4, 8)
    flat = tree.to_tree(x, 1, axis=1).reshape(8, 4)
    assert flat[0].tolist() == [0, 1, 8, 9]
    assert flat[3].tolist() == [6, 7, 14, 15]
    assert flat[4].tolist() == [16, 17, 24, 25]


@pytest.mark.parametrize(("grid", "levels"), GRIDS)
def test_coordinates(grid, levels):
    tree = Tree(grid, levels)
    for level in range(levels):
        axes = [torch.arange(s) for s in tree.grid_at(level)]
        where = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1)  # (*grid, ndim)
        cells = torch.arange(tree.num_cells(level))
        there = tree.from_tree(cells[None], level, axis=1)[0]  # cell number at each place
        assert torch.equal(tree.coordinates(there, level), where)
    assert tree.coordinates(torch.tensor([-1]), 0).tolist() == [[-1] * len(grid)]


@pytest.mark.parametrize(("grid", "levels"), GRIDS)
def test_pooling_in_tree_order_is_pooling_on_the_grid(grid, levels):
    tree = Tree(grid, levels)
    x = torch.randn(1, 1, *grid, 3, dtype=torch.float64)
    shown = tree.visible(None, 1, x.device)
    maps = mean_pyramid(tree.to_tree(x, tree.finest, axis=2), tree.num_children, shown)
    pool_on_grid = (
        torch.nn.functional.avg_pool1d,
        torch.nn.functional.avg_pool2d,
        torch.nn.functional.avg_pool3d,
    )[len(grid) - 1]
    expected = x[:, 0].movedim(-1, 1)  # (1, 3, *grid)
    for level in reversed(range(levels)):
        got = tree.from_tree(maps[level], level, axis=2)[:, 0].movedim(-1, 1)
        torch.testing.assert_close(got, expected)
        if level > 0:
            expected = pool_on_grid(expected, 2, ceil_mode=True, count_include_pad=False)


def test_a_cell_is_visible_if_a_child_is():
    tree = Tree((4, 6), 2)
    mask = torch.zeros(1, 4, 6, dtype=torch.bool)
    mask[0, 3, 5] = mask[0, 0, 2] = True
    coarse, fine = tree.visible(mask, 1, mask.device)
    assert coarse.tolist() == [[False, True, False, False, False, True]]
    assert fine.sum() == 2


def test_nothing_to_hide_needs_no_mask():
    assert Tree((4, 8), 3).visible(None, 1, torch.device("cpu")) == [None] * 3
    assert Tree((4, 9), 3).visible(None, 1, torch.device("cpu"))[0] is not None


def test_masked_pool_averages_visible_children():
    x = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8]).reshape(1, 1, 8, 1)
    visible = torch.tensor([[True, False, False, True, False, False, False, False]])
    assert pool(x, 4, visible).flatten().tolist() == [2.5, 0.0]


def test_repeat_hands_rows_to_children():
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert repeat(x, 2).tolist() == [[1, 2], [1, 2], [3, 4], [3, 4]]
