# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch import nn

from quadtree_attention import OptionError, QuadtreeBlock
from quadtree_attention.models.matcher_convert import convert_match_block
from quadtree_attention.models.parts.context_attention import ATTENTIONS, build_context_attention
from quadtree_attention.models.parts.match_transformer import MatchTransformer
from quadtree_attention.nn.block import ContextBlock, ConvMlp
from tests.conftest import Golden, golden_files
from tests.support import raises

KINDS = [(attention, block) for attention in ATTENTIONS for block in ("loftr", "vit")]


def build(dim=16, heads=2, attention="quadtree_b", block="vit", pairs=1, **options) -> nn.Module:
    def build_attention() -> nn.Module:
        return build_context_attention(attention, dim, heads, options, dtype=torch.float64)

    return MatchTransformer(dim, pairs, build_attention, block, dtype=torch.float64)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(2, *shape, 16, dtype=torch.float64)


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize("path", golden_files("modules/match_transformer_*.npz"))
def test_official_transformer(path):
    golden = Golden(path)
    meta, dtype = golden.meta, torch.float64
    quadtree = meta["block_type"] == "quadtree"
    kind = ("quadtree_b", "vit") if quadtree else ("linear", "loftr")
    options = {"topk": meta["topks"][:2]} if quadtree else {}
    pairs = len(meta["layer_names"]) // 2
    model = build(meta["d_model"], meta["nhead"], *kind, pairs, **options)
    for i, layer in enumerate(model.layers):
        layer.load_state_dict(convert_match_block(golden.with_prefix(f"sd:layers.{i}."))[0])
    leaves = [golden.tensor(f"in:feat{i}", dtype).requires_grad_() for i in range(2)]
    maps = [x.movedim(1, -1) if quadtree else x for x in leaves]
    outs = model(*maps)
    total = torch.zeros((), dtype=dtype)
    for i, out in enumerate(outs):
        out = out.flatten(1, -2)
        expected = golden.tensor(f"feat{i}_out", dtype)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
        total = total + (out * golden.tensor(f"cotangent:feat{i}_out", dtype)).sum()
    total.backward()
    for i, leaf in enumerate(leaves):
        expected = golden.tensor(f"grad:feat{i}", dtype)
        torch.testing.assert_close(leaf.grad, expected, rtol=0, atol=1e-6)


@pytest.mark.usefixtures("only_reference")
@pytest.mark.parametrize(("attention", "block"), KINDS)
def test_padding_changes_nothing(attention, block):
    model = build(attention=attention, block=block, pairs=2)
    map0, map1 = draw(5, 6), draw(4, 7)
    alone = model(map0, map1)
    canvas0, canvas1 = (torch.full((2, 8, 9, 16), x, dtype=torch.float64) for x in (7.0, -7.0))
    mask0, mask1 = torch.zeros(2, 2, 8, 9, dtype=torch.bool).unbind()
    canvas0[:, :5, :6], canvas1[:, :4, :7] = map0, map1
    mask0[:, :5, :6] = mask1[:, :4, :7] = True
    padded = model(canvas0, canvas1, mask0, mask1)
    torch.testing.assert_close(padded[0][:, :5, :6], alone[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(padded[1][:, :4, :7], alone[1], rtol=0, atol=1e-10)
    unmasked = model(canvas0, canvas1)
    assert (unmasked[0][:, :5, :6] - alone[0]).abs().max() > 1e-6


@pytest.mark.usefixtures("only_reference")
@pytest.mark.parametrize(("attention", "block"), KINDS)
def test_a_map_that_is_all_hidden_gives_finite_numbers(attention, block):
    map0, map1 = draw(5, 6), draw(4, 7).requires_grad_()
    mask1 = torch.ones(2, 4, 7, dtype=torch.bool)
    mask1[1] = False
    outs = build(attention=attention, block=block)(map0, map1, None, mask1)
    sum(out.sum() for out in outs).backward()
    assert all(out.isfinite().all() for out in outs) and map1.grad.isfinite().all()


@pytest.mark.usefixtures("only_reference")
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_no_map_comes_first_in_vit_blocks(attention):
    map0, map1 = draw(5, 6), draw(5, 6)
    for block, same in (("vit", True), ("loftr", False)):
        model = build(attention=attention, block=block)
        one, other = model(map0, map1), model(map1, map0)
        for out, swapped in zip(one, reversed(other), strict=True):
            assert torch.allclose(out, swapped, rtol=0, atol=1e-10) == same


@pytest.mark.usefixtures("only_reference")
def test_vit_block_is_the_quadtree_block_of_the_original():
    attn = build_context_attention("quadtree_b", 16, 2, {"topk": 3}, dtype=torch.float64)
    mlp = ConvMlp(16, 64, extra_relu=True, dtype=torch.float64)
    block = ContextBlock(16, attn, mlp, norm_eps=1e-5, dtype=torch.float64)
    options = {"extra_relu": True, "norm_eps": 1e-5, "dtype": torch.float64}
    other = QuadtreeBlock(16, 2, num_levels=3, topk=3, **options)
    other.load_state_dict(block.state_dict())
    x, context, mask = draw(5, 6), draw(4, 7), torch.rand(2, 4, 7) > 0.3
    assert torch.equal(block(x, context, context_mask=mask), other(x, context, context_mask=mask))


def test_how_blocks_start():
    vit, loftr = build(pairs=2), build(block="loftr", attention="linear", pairs=2)
    first = vit.layers[0].state_dict()
    for layer in vit.layers:
        assert all(torch.equal(first[name], value) for name, value in layer.state_dict().items())
        assert layer.attn.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.3)
        assert layer.mlp.dwconv.weight.std().item() == pytest.approx((2 / 9) ** 0.5, rel=0.2)
        assert not layer.mlp.fc1.bias.any() and not layer.attn.proj.bias.any()
    weights = [layer.attn.q_proj.weight for layer in loftr.layers]
    assert not torch.equal(weights[0], weights[1])


def test_unknown_block():
    raises(OptionError, r"one of loftr, vit, got 'vti'; did you mean vit", build, block="vti")


@torch.no_grad()
@pytest.mark.parametrize("block", ["loftr", "vit"])
def test_large_maps_go_one_by_one_on_a_cpu(block, monkeypatch):
    model = build(block=block, pairs=2)
    given = draw(9, 7), draw(9, 7), None, torch.rand(2, 9, 7) > 0.3
    batches: list[int] = []
    model.layers[0].register_forward_pre_hook(lambda _, inputs: batches.append(len(inputs[0])))
    together = model(*given)
    monkeypatch.setattr("quadtree_attention.models.parts.match_transformer.CPU_NUMBERS", 1)
    for one, expected in zip(model(*given), together, strict=True):
        torch.testing.assert_close(one, expected)
    assert batches == [4, 2, 2]
