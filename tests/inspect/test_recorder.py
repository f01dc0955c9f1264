"""Recording: outputs stay the same bits, nothing stays behind, selections are those of the op."""

import gc
import weakref

import numpy as np
import pytest
import torch

from quadtree_attention import OptionError, QuadtreeAttention, models, record
from quadtree_attention.models.parts.context_attention import FullAttention, LinearAttention
from quadtree_attention.models.parts.row_attention import RowAttention
from quadtree_attention.nn.baselines import make_attention
from quadtree_attention.ops import quadtree_attention
from tests.support import raises


def matcher(**options):
    torch.manual_seed(0)
    options |= {"dims": (16, 24, 32), "num_pairs": 1, "threshold": 0.0, "border": 0}
    return models.create("loftr_quadtree_small", **options).eval()


def pair(*shapes, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return {f"image{i}": torch.rand(1, 1, *s, generator=generator) for i, s in enumerate(shapes)}


def state(model):
    """All attributes of all modules, and hooks."""
    return {
        name: {k: id(v) if callable(v) else len(v) if hasattr(v, "__len__") else 0
               for k, v in vars(module).items()}
        for name, module in model.named_modules()
    }  # fmt: skip


NETWORKS = {
    "matcher": (lambda: matcher(), pair((97, 131), (97, 131))),
    "matcher of two sizes": (lambda: matcher(), pair((97, 131), (64, 80))),
    "matcher, one after the other": (lambda: matcher(block="loftr"), pair((97, 131), (97, 131))),
    "linear": (lambda: matcher(attention="linear"), pair((64, 72), (64, 72))),
    "full": (lambda: matcher(attention="full"), pair((64, 72), (64, 72))),
    "reduced": (lambda: matcher(attention="spatial_reduction"), pair((64, 72), (64, 72))),
    "variant A": (lambda: matcher(attention="quadtree_a"), pair((64, 72), (64, 72))),
    "backbone": (lambda: models.create("test_quadtree").eval(), torch.rand(1, 3, 70, 90)),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("autocast", [False, True])
@torch.no_grad()
def test_recording_changes_nothing(name, autocast):
    make, data = NETWORKS[name]
    torch.manual_seed(3)
    model = make()
    before = state(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = model(data)
        with record(model) as seen:
            found = model(data)
            again = model(data)
    for wanted, got, second in zip(*map(_tensors, (expected, found, again)), strict=True):
        assert torch.equal(wanted, got) and torch.equal(wanted, second)
    assert state(model) == before
    assert all(len(layer) for layer in seen.values())
    assert seen.nbytes == sum(
        x.numel() * x.element_size()
        for layer in seen.values() for part in layer.parts for x in part if x is not None
    )  # fmt: skip


def _tensors(result):
    return list(result.values()) if isinstance(result, dict) else [result]


@torch.no_grad()
def test_no_tensor_survives_the_record():
    layer = QuadtreeAttention(32, 2, topk=2)
    x = torch.randn(1, 12, 16, 32)
    with record(layer) as seen:
        layer(x)
    held = [weakref.ref(t) for part in seen[""].parts for t in part if t is not None]
    assert len(held) == 2 and all(ref() is not None for ref in held)
    del seen
    gc.collect()
    assert all(ref() is None for ref in held)


@torch.no_grad()
def test_selection_is_that_of_the_layer():
    torch.manual_seed(0)
    layer = QuadtreeAttention(32, 2, num_levels=3, topk=(5, 3), scale=1.5)
    x, context = torch.randn(2, 13, 18, 32), torch.randn(2, 9, 22, 32)
    mask = torch.rand(2, 9, 22) > 0.3
    with record(layer) as seen:
        layer(x, context, context_mask=mask)
    q = layer.q_proj(x).unflatten(-1, (2, 16))
    k = layer.k_proj(torch.where(mask[..., None], context, 0)).unflatten(-1, (2, 16))
    _, expected = quadtree_attention(
        q, k, k, num_levels=3, topk=(5, 3), scale=1.5, key_mask=mask, return_selection=True
    )
    for sample in range(2):
        for wanted, got in zip(expected, seen[""][sample].selection(), strict=True):
            assert torch.equal(wanted.cells[sample], got.cells[0])
            assert torch.equal(wanted.scores[sample], got.scores[0])


@pytest.mark.parametrize("variant", ["A", "B"])
@torch.no_grad()
def test_look_is_the_selection_of_one_query(variant):
    torch.manual_seed(0)
    options = {"topk": (6, 4), "variant": variant, "scale": 2.0}
    layer = QuadtreeAttention(32, 2, num_levels=3, qkv_bias=True, **options)
    mask = torch.ones(1, 13, 18, dtype=torch.bool)
    mask[:, :, 15:] = False
    with record(layer) as seen:
        layer(torch.randn(1, 13, 18, 32), mask=mask)
    attention = seen[""][0]
    for topk in (None, (9, 2)):
        selection = attention.selection(topk)
        for y, x, head in [(0, 0, 0), (12, 14, 1), (5, 9, 1), (7, 3, 0)]:
            for level, look in enumerate(attention.look((y, x), head, topk)[:-1]):
                cell = 2 ** (2 - level)
                cells = selection[level].cells[0, y // cell, x // cell, head].tolist()
                scores = selection[level].scores[0, y // cell, x // cell, head].sort().values
                assert sorted(look.cells[look.kept].tolist()) == sorted(cells)
                torch.testing.assert_close(look.scores[look.kept].sort().values, scores)
    at = torch.tensor([5 * 18 + 9, 12 * 18 + 14])
    for level, scores in enumerate(attention.scores(at)):
        for query, place in enumerate([(5, 9), (12, 14)]):
            for head in range(2):
                expected = attention.maps(place, head)[level][0]
                torch.testing.assert_close(scores[query, head], expected)


@torch.no_grad()
def test_mass_is_the_share_of_full_attention():
    torch.manual_seed(0)
    layer = QuadtreeAttention(16, 1, num_levels=3, topk=(3, 2), scale=3.0)
    with record(layer) as seen:
        layer(torch.randn(1, 8, 12, 16))
    attention = seen[""][0]
    q, k = (x[0, ..., 0, :].flatten(0, 1) for x in (attention.q, attention.k))
    full = (q @ k.T * 3.0).softmax(dim=-1).reshape(8, 12, 8, 12)
    for level, (found, kept) in enumerate(
        zip(seen.mass(queries=96)[""], attention.selection(), strict=True)
    ):
        cell, inside = 2 ** (2 - level), np.zeros((8, 12))
        for y, x in np.ndindex(8, 12):
            for row, column in kept.cells[0, y // cell, x // cell, 0].tolist():
                block = np.s_[row * cell : (row + 1) * cell, column * cell : (column + 1) * cell]
                inside[y, x] += float(full[y, x][block].sum())
        assert found == pytest.approx(inside.mean(), abs=1e-5)
        few = seen[""].mass(queries=8)[level]  # one of each row
        assert few == pytest.approx(inside[:, 0].mean(), abs=1e-5)
    assert seen[""].mass(1000) == pytest.approx((1.0, 1.0), abs=1e-5)
    assert seen[""].mass((1000, 1))[0] == pytest.approx(1.0, abs=1e-5)
    assert seen[""].mass((1000, 1))[1] < 0.9
    best, children = seen[""].mass((1, 1000))  # all children of the best cell, and no other cell
    assert children == pytest.approx(best, abs=1e-5) and best < 0.9


@pytest.mark.parametrize("kind", [QuadtreeAttention, FullAttention, LinearAttention])
@torch.no_grad()
def test_hidden_keys_carry_nothing(kind):
    torch.manual_seed(0)
    layer, mask = kind(16, 2), torch.rand(1, 8, 12) > 0.3
    mask[:, 4:] = False
    x, context = torch.randn(2, 1, 8, 12, 16)
    with record(layer) as seen:
        layer(x, context, context_mask=mask)
    scores = seen[""][0].dense(torch.arange(96))
    assert (scores[..., ~mask[0]] == 0).all()
    torch.testing.assert_close(scores.sum((-2, -1)), torch.ones(96, 2))
    if kind is QuadtreeAttention:
        assert max(seen[""].mass(1000)) <= 1 + 1e-5


@torch.no_grad()
def test_calls_of_one_pass_are_joined():
    model = matcher()
    with record(model, layers="coarse*") as seen:
        model(pair((97, 131), (97, 131)))
        assert [len(layer) for layer in seen.values()] == [2, 2]
        assert [layer.cross for layer in seen.values()] == [False, True]
        model(pair((97, 131), (64, 80)))
    cross = seen["coarse_transformer.layers.1.attn"]
    assert [tuple(sample.q.shape[:3]) for sample in cross] == [(1, 13, 17), (1, 8, 10)]
    assert [sample.key_grid for sample in cross] == [(8, 10), (13, 17)]


@torch.no_grad()
def test_rows_in_parts_are_joined(monkeypatch):
    from quadtree_attention.models.parts import row_attention

    torch.manual_seed(0)
    layer = RowAttention(32, 2, num_levels=3, topk=3)
    x = torch.randn(2, 7, 20, 32)
    with record(layer) as whole:
        expected = layer(x)
    monkeypatch.setattr(row_attention, "CPU_NUMBERS", 4 * 20 * 32)
    with record(layer) as parts:
        found = layer(x)
    assert torch.equal(expected, found)
    assert len(whole[""]) == len(parts[""]) == 14
    assert torch.equal(whole[""].parts[0].q, parts[""].parts[0].q)
    assert whole[""].mass() == parts[""].mass()


def test_a_layer_recomputed_in_backward_is_recorded_once():
    torch.manual_seed(0)
    model = models.create("sttr_quadtree_small", dim=24, num_heads=2, num_layers=1)
    model.set_grad_checkpointing()
    data = {"image0": torch.rand(1, 3, 32, 48), "image1": torch.rand(1, 3, 32, 48)}
    with record(model) as seen:
        model(data).raw_disparity.sum().backward()  # which reaches them
    assert [len(layer) for layer in seen.values()] == [32, 32]  # 2 views of 16 rows


DENSE = ["full", "linear", "spatial_reduction", "linear_spatial_reduction"]


@pytest.mark.parametrize("name", DENSE)
@torch.no_grad()
def test_dense_scores_are_those_of_the_attention(name, monkeypatch):
    torch.manual_seed(0)
    options = {"sr_ratio": 2} if name == "spatial_reduction" else {}
    layer = make_attention(name, 16, 2, **options).eval()
    layer.proj = torch.nn.Identity()
    original, values = type(layer).attend, []

    def attend(self, q, k, v, bias=None):
        values.append(v)
        return original(self, q, k, v, bias)

    monkeypatch.setattr(type(layer), "attend", attend)
    with record(layer) as seen:
        out = layer(torch.randn(1, 7, 9, 16))
    scores = seen[""][0].dense(torch.arange(63)).flatten(2)  # (Q, N, S)
    messages = torch.einsum("qns,snd->qnd", scores, values[0][0].flatten(0, 1))
    torch.testing.assert_close(messages.reshape(1, 7, 9, 16), out, atol=1e-5, rtol=1e-5)


def refused(model, **options):
    with record(model, **options):
        model(torch.randn(1, 16, 16, 16))


def test_compiled_models_are_refused():
    layer = QuadtreeAttention(16, 2)
    raises(OptionError, "eager", refused, torch.compile(layer))
    layer.compile()
    raises(OptionError, "eager", refused, torch.nn.Sequential(layer))


def test_bad_options():
    layer = QuadtreeAttention(16, 2)
    raises(OptionError, "no attention", refused, torch.nn.Linear(2, 2))
    raises(OptionError, "is called 'nothing'", refused, layer, layers="nothing")
    raises(OptionError, "heads must be from 0 to 1", refused, layer, heads=[2])
    raises(OptionError, "limit=1000", refused, layer, limit=1000)
    assert "attend" not in vars(layer)  # also after an error


@torch.no_grad()
def test_chosen_heads():
    torch.manual_seed(0)
    layer = QuadtreeAttention(32, 4, topk=2)
    x = torch.randn(1, 12, 16, 32)
    with record(layer) as every:
        layer(x)
    with record(layer, heads=[1, 3]) as some:
        layer(x)
    assert some.nbytes == every.nbytes // 2
    for whole, part in zip(every[""][0].selection(), some[""][0].selection(), strict=True):
        assert torch.equal(whole.cells[:, :, :, [1, 3]], part.cells)


@torch.no_grad()
def test_still_pictures(tmp_path):
    model = matcher()
    with record(model) as seen:
        model(pair((96, 128), (96, 128)))
    images = [np.full((96, 128, 3), 128, np.uint8)] * 2
    picture = seen.draw(images, (70, 40), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
    assert picture.size[0] > 5 * 300  # query, three levels, full attention
    assert np.asarray(picture).tobytes() != np.asarray(seen.draw(images, (10, 40))).tobytes()
    raises(OptionError, "outside", seen.draw, images, (128, 40))
    raises(OptionError, "head must be", seen.draw, images, (10, 40), head=9)
    raises(OptionError, "recorded layer", seen.draw, images, (10, 40), layers=["x"])


@torch.no_grad()
def test_cells_smaller_than_a_pixel_are_drawn():
    """Rows of a wide image: 1,000 cells in a panel of 300 pixels."""
    torch.manual_seed(0)
    layer = RowAttention(16, 2, num_levels=3, topk=3)
    with record(layer) as seen:
        layer(torch.randn(2, 4, 1000, 16), torch.randn(2, 4, 1000, 16))
    images = [np.full((64, 2000, 3), 128, np.uint8)] * 2
    pictures = [np.asarray(seen.draw(images, (x, 40), head=0)) for x in (0, 1003, 1999)]
    assert not np.array_equal(pictures[0], pictures[1])
    assert not np.array_equal(pictures[1], pictures[2])
