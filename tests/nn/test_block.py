# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quadtree_attention import QuadtreeAttention, QuadtreeBlock
from quadtree_attention.nn import BASELINES, make_attention
from quadtree_attention.nn.block import Block, ConvMlp, DropPath

OPTIONS = {"num_levels": 2, "topk": 3, "dtype": torch.float64}


def test_padding_does_not_reach_the_map():
    """Neither through attention nor through the convolution in the MLP."""
    block = QuadtreeBlock(16, 2, **OPTIONS, value_pyramid="conv", lepe=True)
    x = torch.randn(1, 5, 6, 16, dtype=torch.float64)
    mask = torch.ones(1, 5, 6, dtype=torch.bool)
    canvas = F.pad(x, (0, 0, 0, 4, 0, 3), value=5.0)
    out = block(canvas, mask=F.pad(mask, (0, 4, 0, 3)))[:, :5, :6]
    torch.testing.assert_close(out, block(x), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("ndim", "grid"), [(1, (13,)), (2, (5, 6)), (3, (3, 4, 5))])
def test_every_parameter_gets_a_gradient(ndim, grid):
    options = {"value_pyramid": "conv", "lepe": True, "extra_relu": True}
    block = QuadtreeBlock(16, 2, ndim=ndim, **OPTIONS, **options)
    x = torch.randn(2, *grid, 16, dtype=torch.float64)
    out = block(x)
    assert out.shape == x.shape
    out.square().sum().backward()
    assert [n for n, p in block.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_quadtree_block_is_a_block_of_its_parts():
    block = QuadtreeBlock(16, 2, **OPTIONS, mlp_ratio=2, norm_eps=1e-3, drop_path=0.2)
    names = dict.fromkeys(name.split(".")[0] for name in block.state_dict())
    assert list(names) == ["norm1", "attn", "norm2", "mlp"]
    parts = QuadtreeAttention(16, 2, **OPTIONS), ConvMlp(16, 32, dtype=torch.float64)
    plain = Block(16, *parts, norm_eps=1e-3, drop_path=0.2, dtype=torch.float64)
    plain.load_state_dict(block.state_dict())
    x = torch.randn(2, 5, 6, 16, dtype=torch.float64)
    assert torch.equal(block.eval()(x), plain.eval()(x))
    assert block.drop_path.rate == plain.drop_path.rate == 0.2


@pytest.mark.parametrize("name", BASELINES)
def test_block_around_a_rival(name):
    attn, mlp = make_attention(name, 16, 2), ConvMlp(16, 32)
    block = Block(16, attn, mlp)
    x = torch.randn(2, 5, 6, 16)
    after = x + attn(block.norm1(x))
    torch.testing.assert_close(block(x), after + mlp(block.norm2(after)))


class LowRank(nn.Module):
    """A frozen layer and what is learned beside it, as LoRA does."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)

    @property
    def weight(self):
        return self.layer.weight

    @property
    def bias(self):
        return self.layer.bias

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


def replaced(mlp, name, layer):
    setattr(mlp, name, layer)


def doubled(*arguments):
    """What a hook returns in place of an output, or of inputs."""
    return tuple(2 * x for x in arguments[1]) if len(arguments) == 2 else 2 * arguments[2]


CHANGES = {
    "low rank": lambda mlp: replaced(mlp, "fc2", LowRank(mlp.fc2)),
    "no bias": lambda mlp: replaced(mlp, "fc2", nn.Linear(32, 16, bias=False)),
    "hook of dwconv": lambda mlp: mlp.dwconv.register_forward_hook(doubled),
    "no dropout": lambda mlp: replaced(mlp, "drop", nn.Identity()),
    "hook of fc2": lambda mlp: mlp.fc2.register_forward_hook(doubled),
    "pre-hook of fc2": lambda mlp: mlp.fc2.register_forward_pre_hook(doubled),
    "hook of drop": lambda mlp: mlp.drop.register_forward_hook(doubled),
    "other forward": lambda mlp: replaced(mlp.fc2, "forward", lambda x: x[..., :16]),
    "parametrised": lambda mlp: nn.utils.parametrizations.weight_norm(mlp.fc2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_layers_of_an_mlp_may_be_replaced_or_have_hooks(change):
    """Gradients on or off: every layer that is there is called, and learns."""
    mlp = ConvMlp(16, 32)
    x = torch.randn(2, 5, 6, 16)
    CHANGES[change](mlp)
    out = mlp(x)
    with torch.no_grad():
        hidden = mlp.dwconv(mlp.fc1(x))
        assert torch.equal(out, mlp(x))
        assert torch.equal(out, mlp.drop(mlp.fc2(mlp.drop(hidden))))
    out.square().sum().backward()
    learned = [p for p in mlp.parameters() if p.requires_grad and change != "other forward"]
    assert all(p.grad is not None and p.grad.any() for p in learned)


@pytest.mark.parametrize("kind", ["hook", "pre_hook"])
def test_backward_hooks_in_an_mlp_run(kind):
    mlp = ConvMlp(16, 32)
    seen = []
    for layer in (mlp.fc2, mlp.dwconv):
        getattr(layer, f"register_full_backward_{kind}")(lambda layer, *_: seen.append(layer))
    mlp(torch.randn(2, 5, 6, 16)).sum().backward()
    assert seen == [mlp.fc2, mlp.dwconv]


def test_drop_path_drops_whole_samples_and_keeps_the_mean():
    x = torch.ones(4000, 2, 3)
    drop = DropPath(0.25)
    out = drop(x)
    per_sample = out.flatten(1)
    assert ((per_sample == per_sample[:, :1]).all(1)).all()
    assert (per_sample[:, 0] == 0).float().mean() == pytest.approx(0.25, abs=0.03)
    assert out.mean() == pytest.approx(1.0, abs=0.04)
    assert torch.equal(drop.eval()(x), x)
