# SPDX-License-Identifier: Apache-2.0
import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quadtree_attention import OptionError, ShapeError
from quadtree_attention.nn.baselines import BASELINES, MapAttention, make_attention
from tests.support import raises

DIM, HEADS = 12, 3
KINDS = {
    "spatial_reduction": ("spatial_reduction", {"sr_ratio": 2}),
    "spatial_reduction 1": ("spatial_reduction", {}),
    "linear_spatial_reduction": ("linear_spatial_reduction", {"pool_size": 3}),
    "window": ("window", {"window_size": 3}),
    "shifted window": ("window", {"window_size": 3, "shift_size": 1}),
    "focal": ("focal", {"window_size": 3, "expand_size": 1, "focal_window": 3}),
    "linear": ("linear", {}),
    "topk": ("topk", {"topk": 4}),
    "full": ("full", {}),
}


def build(kind: str, dim: int = DIM, **changes) -> MapAttention:
    """In float64, with every bias table large enough to matter."""
    name, options = KINDS[kind]
    options = {"qkv_bias": True, "dtype": torch.float64} | options | changes
    module = make_attention(name, dim, HEADS, **options)
    for key, parameter in module.named_parameters():
        if "bias" in key or key.startswith("pool."):
            nn.init.normal_(parameter, std=0.5)
    return module


def draw(height: int, width: int, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, height, width, DIM, dtype=torch.float64)


def one_by_one(module: MapAttention, x: torch.Tensor, keys_of) -> torch.Tensor:
    """Attention with a loop over cells: `keys_of(y, x)` gives keys, values, bias of a query."""
    head_dim = DIM // HEADS
    q = module.qkv(x)[..., :DIM].unflatten(-1, (HEADS, head_dim))
    out = torch.zeros_like(x)
    for i in range(x.shape[1]):
        for j in range(x.shape[2]):
            k, v, bias = keys_of(i, j)  # (B, T, C), (B, T, C), (T, N)
            k, v = (t.unflatten(-1, (HEADS, head_dim)) for t in (k, v))
            scores = (q[:, i, j, None] * k).sum(dim=-1) * head_dim**-0.5 + bias  # (B, T, N)
            out[:, i, j] = (scores.softmax(dim=1)[..., None] * v).sum(dim=1).flatten(1)
    return module.proj(out)


# against timm


@pytest.mark.parametrize(
    ("sr_ratio", "size"),
    [*itertools.product([1, 2, 4, 8, None], [(16, 24), (9, 14)]), (None, (3, 5))],
)
def test_spatial_reduction_equals_timm(sr_ratio, size):
    pvt = pytest.importorskip("timm.models.pvt_v2", reason="timm comes with the models extra")
    linear, options = sr_ratio is None, {"sr_ratio": sr_ratio} if sr_ratio else {}
    theirs = pvt.Attention(DIM, HEADS, linear_attn=linear, **options, dtype=torch.float64)
    name = "linear_spatial_reduction" if linear else "spatial_reduction"
    ours = make_attention(name, DIM, HEADS, **options, qkv_bias=True, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    x = draw(*size)
    expected = theirs(x.flatten(1, 2), size).view_as(x)
    torch.testing.assert_close(ours(x), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("shift", [0, 2])
def test_window_equals_timm(shift):
    """On a size that divides; elsewhere timm lets cells attend to its padding."""
    swin = pytest.importorskip("timm.models.swin_transformer", reason="it is in the models extra")
    block = swin.SwinTransformerBlock(DIM, (8, 12), HEADS, window_size=4, shift_size=shift)
    nn.init.normal_(block.attn.relative_position_bias_table)
    options = {"window_size": 4, "shift_size": shift, "qkv_bias": True}
    ours = make_attention("window", DIM, HEADS, **options)
    ours.load_state_dict(block.attn.state_dict())
    x = draw(8, 12)
    expected = block.double()._attn(x)
    torch.testing.assert_close(ours.double()(x), expected, rtol=0, atol=1e-9)


# against the definition, cell by cell


@torch.no_grad()
@pytest.mark.parametrize("shift", [0, 1, 2])
@pytest.mark.parametrize("size", [(7, 11), (3, 8), (2, 10), (6, 9)])
def test_window_equals_a_loop(size, shift):
    side = 3
    module = build("window", window_size=side, shift_size=shift)
    x = draw(*size)
    k, v = module.qkv(x)[..., DIM:].chunk(2, dim=-1)
    table = module.relative_position_bias_table.view(2 * side - 1, 2 * side - 1, HEADS)
    offset = [shift if axis > side else 0 for axis in size]

    def window_of(i, j):
        return (i - offset[0]) // side, (j - offset[1]) // side

    def keys_of(i, j):
        cells = [(a, b) for a in range(size[0]) for b in range(size[1])
                 if window_of(a, b) == window_of(i, j)]  # fmt: skip
        bias = torch.stack([table[i - a + side - 1, j - b + side - 1] for a, b in cells])
        rows, columns = zip(*cells, strict=True)
        return k[:, rows, columns], v[:, rows, columns], bias

    torch.testing.assert_close(module(x), one_by_one(module, x, keys_of), rtol=0, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("size", [(7, 11), (2, 5), (6, 9)])
@pytest.mark.parametrize(("expand", "focal"), [(1, 3), (0, 1), (2, 5)])
def test_focal_equals_a_loop(size, expand, focal):
    side = 3
    module = build("focal", expand_size=expand, focal_window=focal)
    x = draw(*size)
    k, v = module.qkv(x)[..., DIM:].chunk(2, dim=-1)
    weights = module.pool.weight.view(side, side)
    windows = [-(-axis // side) for axis in size]

    pooled = {}
    for a in range(windows[0]):
        for b in range(windows[1]):
            cells = x[:, a * side : (a + 1) * side, b * side : (b + 1) * side]
            here = weights[: cells.shape[1], : cells.shape[2]]
            total = (cells * here[..., None]).sum(dim=(1, 2)) * side**2 / here.numel()
            pooled[a, b] = module.qkv(total + module.pool.bias)[..., DIM:].chunk(2, dim=-1)

    def keys_of(i, j):
        keys, values, bias = [], [], []
        top, left = i // side * side, j // side * side
        for a in range(max(top - expand, 0), min(top + side + expand, size[0])):
            for b in range(max(left - expand, 0), min(left + side + expand, size[1])):
                middle = side + expand - 1
                keys.append(k[:, a, b])
                values.append(v[:, a, b])
                bias.append(module.fine_bias[:, middle + i - a, middle + j - b])
        for (a, b), (key, value) in pooled.items():
            down, right = a - i // side + focal // 2, b - j // side + focal // 2
            if 0 <= down < focal and 0 <= right < focal:
                keys.append(key)
                values.append(value)
                bias.append(module.pooled_bias[:, down, right])
        return torch.stack(keys, 1), torch.stack(values, 1), torch.stack(bias)

    torch.testing.assert_close(module(x), one_by_one(module, x, keys_of), rtol=0, atol=1e-9)


def touched(module: MapAttention, x: torch.Tensor, cell: tuple[int, int]) -> torch.Tensor:
    """Boolean (H, W): the outputs that change with one cell of x."""
    changed = x.clone()
    changed[0, cell[0], cell[1]] += 1
    return (module(changed) != module(x)).any(dim=-1)[0]


def test_focal_sees_far_cells_only_pooled():
    module = build("focal")  # windows of 3, a margin of 1, pooled windows next to one's own
    x = draw(12, 15, batch=1)
    near, pooled = torch.zeros(2, 12, 15, dtype=torch.bool)
    near[3:9, 3:9] = True  # windows whose margin reaches the cell (5, 5), at its window's corner
    pooled[0:9, 0:9] = True  # windows next to the cell's
    assert torch.equal(touched(module, x, (5, 5)), pooled)
    with torch.no_grad():
        module.pool.weight.view(3, 3)[2, 2] = 0  # what (5, 5) gives to its pooled window
    assert torch.equal(touched(module, x, (5, 5)), near)


def test_linear_equals_the_quadratic_formula():
    module = build("linear")
    x = draw(7, 9)
    q, k, v = (
        t.flatten(1, 2).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for t in module.qkv(x).chunk(3, dim=-1)
    )
    weights = torch.einsum("bntd,bnsd->bnts", F.elu(q) + 1, F.elu(k) + 1)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    out = (weights @ v).transpose(1, 2).reshape(x.shape)
    torch.testing.assert_close(module(x), module.proj(out), rtol=0, atol=1e-9)


def test_linear_survives_queries_without_features():
    module = make_attention("linear", DIM, HEADS, qkv_bias=True)
    nn.init.constant_(module.qkv.bias[:DIM], -1000)
    out = module(torch.randn(1, 4, 5, DIM))
    torch.testing.assert_close(out, module.proj.bias.expand_as(out))


def test_full_equals_softmax():
    module = build("full")
    x = draw(5, 7)
    k, v = module.qkv(x).flatten(1, 2)[..., DIM:].chunk(2, dim=-1)
    zero = torch.zeros(35, HEADS, dtype=torch.float64)
    expected = one_by_one(module, x, lambda i, j: (k, v, zero))
    torch.testing.assert_close(module(x), expected, rtol=0, atol=1e-9)


def test_topk_of_all_is_full_attention():
    full, topk = build("full"), build("topk", topk=63)
    x = draw(7, 9)
    topk.load_state_dict(full.state_dict())
    torch.testing.assert_close(topk(x), full(x), rtol=0, atol=1e-9)
    topk.topk = 10**6
    torch.testing.assert_close(topk(x), full(x), rtol=0, atol=1e-9)
    topk.topk = 62
    assert not torch.allclose(topk(x), full(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("topk", [1, 5])
def test_topk_keeps_the_best(topk):
    module = build("topk", topk=topk)
    x = draw(5, 7, batch=1)
    q, k, v = (t.flatten(1, 2).view(35, HEADS, -1) for t in module.qkv(x).chunk(3, dim=-1))
    out = torch.zeros_like(q)
    for t in range(35):
        for n in range(HEADS):
            scores = k[:, n] @ q[t, n] * (DIM // HEADS) ** -0.5
            best = scores.argsort(descending=True)[:topk]
            out[t, n] = scores[best].softmax(dim=0) @ v[best, n]
    torch.testing.assert_close(module(x), module.proj(out.view(x.shape)), rtol=0, atol=1e-9)


# what all share


@pytest.mark.parametrize("kind", KINDS)
def test_own_weights_are_drawn_anew(kind):
    """All that is no layer; the rest is left to the layers."""
    torch.manual_seed(2)
    module = make_attention(KINDS[kind][0], DIM, HEADS, **KINDS[kind][1])
    own = [key for key, _ in module.named_parameters() if "." not in key or key.startswith("pool.")]
    before = {key: p.clone() for key, p in module.named_parameters()}
    for key in own:
        nn.init.constant_(module.get_parameter(key), torch.nan)
    module.init_own_weights()
    for key, parameter in module.named_parameters():
        if key in own:
            assert parameter.isfinite().all()
            assert parameter.mean().item() == pytest.approx(before[key].mean().item(), abs=0.01)
        else:
            assert torch.equal(parameter, before[key])


def test_every_name_is_tested():
    assert {name for name, _ in KINDS.values()} == set(BASELINES)


@pytest.mark.parametrize("size", [(1, 1), (1, 8), (7, 9), (14, 14)])
@pytest.mark.parametrize("lepe", [False, True])
@pytest.mark.parametrize("name", BASELINES)
def test_any_size_with_default_options(name, lepe, size):
    module = make_attention(name, DIM, HEADS, lepe=lepe)
    x = draw(*size).float().requires_grad_()
    out = module(x)
    out.square().sum().backward()
    assert out.shape == x.shape
    assert out.isfinite().all() and x.grad.isfinite().all() and x.grad.any()


@pytest.mark.parametrize("size", [(1, 1), (2, 9)])
def test_spatial_reduction_of_a_map_smaller_than_a_patch(size):
    module = build("spatial_reduction", sr_ratio=4)
    x = draw(*size)
    filled = F.pad(x, (0, 0, 0, max(4 - size[1], 0), 0, max(4 - size[0], 0)))
    torch.testing.assert_close(module(x), module(filled)[:, : size[0], : size[1]])


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind):
    module = build(kind, dim=6, lepe=True)
    names, parameters = zip(*module.named_parameters(), strict=True)
    x = torch.randn(1, 4, 5, 6, dtype=torch.float64, requires_grad=True)

    def call(x, *values):
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), x)

    assert torch.autograd.gradcheck(call, (x, *parameters), fast_mode=True)


@pytest.mark.parametrize("qkv_bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_lepe_is_a_convolution_of_the_values(kind, qkv_bias):
    module = build(kind, lepe=True, qkv_bias=qkv_bias)
    plain = build(kind, qkv_bias=qkv_bias)
    state = {k: v for k, v in module.state_dict().items() if not k.startswith("lepe.")}
    plain.load_state_dict(state)
    x = draw(7, 10)
    with_lepe, without = module(x), plain(x)
    assert not torch.allclose(with_lepe, without, rtol=0, atol=1e-3)

    projection = module.kv if hasattr(module, "kv") else module.qkv
    v = projection(x)[..., -DIM:].permute(0, 3, 1, 2)
    conv = module.lepe
    local = F.conv2d(v, conv.weight, conv.bias, padding=1, groups=DIM).permute(0, 2, 3, 1)
    expected = without + F.linear(local, module.proj.weight)
    torch.testing.assert_close(with_lepe, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_several_sizes_keep_their_places(kind):
    module = build(kind)
    x, sizes = draw(7, 9, batch=4), [(5, 9), (7, 4), (5, 9), (7, 4)]
    mask = torch.zeros(4, 7, 9, dtype=torch.bool)
    for sample, (height, width) in enumerate(sizes):
        mask[sample, :height, :width] = True
    out = module(x, mask=mask)
    for sample, (height, width) in enumerate(sizes):
        alone = module(x[sample : sample + 1, :height, :width])[0]
        torch.testing.assert_close(out[sample, :height, :width], alone)
    assert (out[~mask] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_drops_in_training_only(kind):
    module = build(kind, proj_drop=0.5)
    x = draw(7, 9)
    assert 0.4 < (module(x) == 0).double().mean() < 0.6
    assert not (module.eval()(x) == 0).any()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "linear"])
def test_dropout_of_weights_in_training_only(kind):
    module = build(kind, attn_drop=0.5)
    x = draw(7, 9)
    assert not torch.allclose(module(x), module(x))
    module.eval()
    plain = build(kind)
    plain.load_state_dict(module.state_dict())
    torch.testing.assert_close(module(x), plain(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_low_precision(kind, dtype):
    """Of the module; in float32 by autocast."""
    module = build(kind, lepe=True, dtype=dtype)
    x = draw(7, 10).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        out = module(x)
    assert out.dtype == (torch.bfloat16 if dtype == torch.float32 else dtype)
    out.float().square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad.dtype == dtype and parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
    if kind != "topk":  # the selection may turn over
        exact = module.double()(x.double())
        assert (out - exact).norm() / exact.norm() < 0.03


@pytest.mark.parametrize("kind", KINDS)
def test_meta_device_and_repr(kind):
    name, options = KINDS[kind]
    module = build(kind, lepe=True, device="meta")
    assert {p.device.type for p in module.parameters()} == {"meta"}
    text = repr(module).splitlines()[0] + repr(module).splitlines()[1]
    for option, value in {"dim": DIM, "num_heads": HEADS, **options}.items():
        assert f"{option}={value}" in text
    assert type(module) is BASELINES[name]


BAD = [
    ("windows", {}, "attention must be one of spatial_reduction, linear_spatial_reduction, "
     "window, focal, linear, topk, full, got 'windows'; did you mean 'window'?"),
    ("quadtree", {}, "linear, topk, full, got 'quadtree'; choose one of them"),
    ("focal", {"window": 3}, "attn_drop, proj_drop, got window; did you mean 'window_size'?"),
    ("window", {"sr_ratio": 2}, "attention 'window' accepts the options window_size, shift_size, "
     "device, dtype, qkv_bias, lepe, attn_drop, proj_drop, got sr_ratio; leave out"),
    ("linear", {"attn_drop": 0.1}, "attention 'linear' accepts the options qkv_bias, lepe, "
     "proj_drop, device, dtype, got attn_drop; leave out"),
    ("full", {"dim": 13}, "dim must be a positive multiple of num_heads, got dim=13, num_heads=3"),
    ("full", {"num_heads": 0}, "dim must be a positive multiple of num_heads, got dim=12, num_h"),
    ("topk", {"topk": 0}, "topk must be an integer of at least 1, got topk=0; 1 keeps the best"),
    ("topk", {"topk": True}, "topk must be an integer of at least 1, got topk=True"),
    ("spatial_reduction", {"sr_ratio": 0}, "sr_ratio must be an integer of at least 1, got sr_r"),
    ("linear_spatial_reduction", {"pool_size": 0}, "pool_size must be an integer of at least 1"),
    ("window", {"window_size": 0}, "window_size must be an integer of at least 1, got window_s"),
    ("window", {"shift_size": -1}, "shift_size must be an integer of at least 0, got shift_size=-"),
    ("window", {"shift_size": 7}, "shift_size must be less than window_size, got shift_size=7, "
     "window_size=7; Swin alternates 0 and window_size // 2"),
    ("focal", {"window_size": 2.5}, "window_size must be an integer of at least 1, got window_siz"),
    ("focal", {"expand_size": -1}, "expand_size must be an integer of at least 0, got expand_si"),
    ("focal", {"focal_window": 4}, "focal_window must be odd, the own window in the middle, got "
     "focal_window=4; the original has 7, 5, 3 and 1"),
    ("focal", {"focal_window": 0}, "focal_window must be an integer of at least 1, got focal_win"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "text"), BAD)
def test_bad_options(name, options, text):
    options = {"dim": DIM, "num_heads": HEADS} | options
    raises(OptionError, re.escape(text), make_attention, name, **options)


@pytest.mark.parametrize("shape", [(2, DIM, 5, 6), (2, 30, DIM), (2, 0, 6, DIM)])
def test_bad_inputs(shape):
    text = "x must be (batch, *, *, 12), channels last, with at least one cell, got "
    text += f"x.shape={shape}; images in (batch, channels, y, x) need x.permute(0, 2, 3, 1)"
    raises(ShapeError, re.escape(text), build("full"), torch.zeros(shape))


def test_topk_default_is_small_enough_to_matter():
    module, full = (make_attention(name, DIM, HEADS) for name in ("topk", "full"))
    full.load_state_dict(module.state_dict())
    x = draw(11, 13).float() * 3
    assert not torch.allclose(module(x), full(x))
