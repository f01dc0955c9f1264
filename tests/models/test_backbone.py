# SPDX-License-Identifier: Apache-2.0
"""The backbones: official numbers and names, and what timm expects of a model."""

import math

import pytest
import torch
from torch import nn

from quadtree_attention import CheckpointError, OptionError, QuadtreeAttention, ShapeError
from quadtree_attention.models.convert import convert_backbone
from quadtree_attention.nn import BASELINES
from tests.conftest import Golden, golden_files
from tests.support import processes, raises
from tests.support.official import golden_image, load_official, recipe_state, shapes_of

timm = pytest.importorskip("timm", reason="the backbones need timm (extra 'models')")
import quadtree_attention.models.backbone  # noqa: E402, F401  registers the names

pytestmark = pytest.mark.usefixtures("only_reference", "one_thread")

NAMES = [f"quadtree_{letter}_b{i}" for letter in "ab" for i in range(5)]
NAMES += ["swin_tiny_quadtree_b", "test_quadtree"]


def tiny(**options) -> nn.Module:
    return timm.create_model("test_quadtree", **{"num_classes": 5} | options).eval()


def image(*size: int, dtype: torch.dtype = torch.float32, channels: int = 3) -> torch.Tensor:
    return torch.randn(2, channels, *size, dtype=dtype)


# ---- official numbers


@pytest.mark.parametrize("backend", ["reference", pytest.param("cpu", marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", golden_files("models/cls_quadtree_b*.npz"))
def test_official_classifier(path, backend):
    golden = Golden(path)
    size = golden.name.removeprefix("cls_quadtree_")
    model = timm.create_model(f"quadtree_b_{size}", backend=backend, dtype=torch.float64).eval()
    load_official(model, convert_backbone(recipe_state(f"classification_quadtree_{size}")))
    cases = golden.meta["cases"]
    if size != "b0":  # the larger model once; its two cases take the same path
        cases = {"256x320": cases["256x320"]}
    for name, case in cases.items():
        with torch.no_grad():
            logits = model(golden_image(case).double())
        expected = golden.tensor(f"{name}:logits_f64", torch.float64)
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("path", golden_files("models/det_quadtree_b0_*.npz"))
def test_official_detection_maps(path):
    golden = Golden(path)
    options = {"num_classes": 0, "topk": golden.meta["topks"][0], "value_act": "relu"}
    model = timm.create_model("quadtree_b_b0", dtype=torch.float64, **options).eval()
    load_official(model, convert_backbone(recipe_state("detection_quadtree_b0")))
    x = golden_image(golden.meta).double()
    with torch.no_grad():
        maps = model.forward_intermediates(x, intermediates_only=True)
    assert len(maps) == len(golden.meta["maps"])
    for i, (got, about) in enumerate(zip(maps, golden.meta["maps"], strict=True), start=1):
        assert list(got.shape) == about["full_shape"]
        stride = about["stored_spatial_stride"]
        expected = golden.tensor(f"map{i}_f64", torch.float64)
        torch.testing.assert_close(got[..., ::stride, ::stride], expected, rtol=0, atol=2e-6)
        means = golden.tensor(f"map{i}_channel_mean_f64", torch.float64)
        torch.testing.assert_close(got.mean(dim=(0, 2, 3)), means, rtol=0, atol=2e-6)


class DroppingAttention(nn.Module):
    """One level of variant A as the original has it: the strongest keys are lost."""

    def __init__(self, attn: QuadtreeAttention, dropped: int) -> None:
        super().__init__()
        assert attn.num_levels == 1
        self.attn, self.dropped = attn, dropped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attn, shape = self.attn, x.shape
        q, k, v = (
            project(x).flatten(1, 2).unflatten(-1, (attn.num_heads, -1)).transpose(1, 2)
            for project in (attn.q_proj, attn.k_proj, attn.v_proj)
        )  # (B, N, T, D)
        scores = (q @ k.transpose(-2, -1) * attn.scale).softmax(dim=-1)
        strongest = scores.topk(self.dropped, dim=-1).indices
        message = scores.scatter(-1, strongest, 0.0) @ v
        return attn.proj(message.transpose(1, 2).reshape(shape))


@pytest.mark.parametrize("path", golden_files("models/cls_quadtreeA_b0.npz"))
def test_official_variant_a_differs_in_stage_4_only(path):
    golden = Golden(path)
    model = timm.create_model("quadtree_a_b0", dtype=torch.float64).eval()
    load_official(model, convert_backbone(recipe_state("classification_quadtreeA_b0")))
    x = golden_image(golden.meta["cases"]["224"]).double()
    expected = golden.tensor("224:logits_f64", torch.float64)
    with torch.no_grad():
        assert (model(x) - expected).abs().max() > 0.1
        for block in model.stages[3].blocks:
            block.attn = DroppingAttention(block.attn, dropped=8)
        torch.testing.assert_close(model(x), expected, rtol=0, atol=2e-6)


# ---- official names


def test_timm_loads_official_weights(tmp_path):
    state = recipe_state("classification_quadtree_b0")
    torch.save(state, tmp_path / "official.pth")
    overlay = {"file": str(tmp_path / "official.pth")}
    model = timm.create_model("quadtree_b_b0", pretrained=True, pretrained_cfg_overlay=overlay)
    expected = convert_backbone(state)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        ("classification_quadtree_b1", r"must be \(32, 3, 7, 7\), .* and 302 more; build the mod"),
        ("detection_quadtree_b0", r"Transformer: 2 missing: head\.weight, head\.bias; build"),
        ("classification_quadtreeA_b0", r"144 missing: stages\.0\.blocks\.0\.attn\.level_logits, "),
        ("classification_quadtree_b2", r"278 unexpected: stages\.0.*2\.norm1.*mismatched: patch_"),
    ],
)
def test_checkpoint_that_does_not_fit(checkpoint, message):
    model = timm.create_model("quadtree_b_b0", device="meta")
    with pytest.raises(CheckpointError, match=message) as caught:
        load_official(model, convert_backbone(shapes_of(checkpoint)))
    assert str(caught.value).startswith("the checkpoint does not fit PyramidTransformer: ")
    assert len(str(caught.value)) < 2000


# ---- registration


def test_all_names_are_registered():
    assert set(NAMES) == set(timm.list_models(module="backbone"))
    for name in NAMES:
        cfg = timm.get_pretrained_cfg(name)
        assert not cfg.has_weights
        assert (cfg.first_conv, cfg.classifier) == ("patch_embed.proj", "head")
    raises(RuntimeError, "No pretrained weights exist for test_quadtree", tiny, pretrained=True)


SLOW = ("_b2", "_b3", "_b4")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n.endswith(SLOW) else ()) for n in NAMES]
)
def test_every_model_trains_at_an_odd_size(name):
    model = timm.create_model(name, num_classes=3)
    model(image(65, 97)).square().sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key


@pytest.mark.parametrize(
    ("name", "levels", "heads", "parameters"),
    [
        ("quadtree_a_b4", [4, 3, 2, 1], [1, 2, 5, 8], None),
        ("quadtree_b_b4", [4, 3, 2, 1], [1, 2, 5, 8], 64_196_997),
        ("swin_tiny_quadtree_b", [4, 3, 2, 1], [3, 6, 12, 24], 28_345_700),
    ],
)
def test_layout(name, levels, heads, parameters):
    model = timm.create_model(name, device="meta")
    first = [stage.blocks[0].attn for stage in model.stages]
    assert [attn.num_levels for attn in first] == levels
    assert [attn.num_heads for attn in first] == heads
    assert [attn.topk for attn in first] == [(8,) * (level - 1) for level in levels]
    if parameters is not None:
        assert sum(p.numel() for p in model.parameters()) == parameters


# ---- what timm expects


@pytest.mark.parametrize("name", ["test_quadtree", "swin_tiny_quadtree_b"])
@pytest.mark.parametrize("size", [(1, 1), (3, 130), (47, 66), (64, 96)])
def test_any_image_size(name, size):
    model = timm.create_model(name, num_classes=0, features_only=True).eval()
    maps = model(image(*size))
    channels, reductions = model.feature_info.channels(), model.feature_info.reduction()
    assert reductions == [4, 8, 16, 32]
    for got, width, reduction in zip(maps, channels, reductions, strict=True):
        assert got.shape == (2, width, *(math.ceil(side / reduction) for side in size))
        assert got.isfinite().all()


def test_swin_pads_with_zeros():
    model = timm.create_model("swin_tiny_quadtree_b", num_classes=0, depths=(1, 1, 1, 1)).eval()
    x = image(30, 61)
    padded = nn.functional.pad(x, (0, 3, 0, 2))
    torch.testing.assert_close(model.patch_embed(x), model.patch_embed(padded))
    merge = model.stages[1].downsample
    y = torch.randn(1, 96, 3, 5)
    y_padded = nn.functional.pad(y, (0, 1, 0, 1))
    torch.testing.assert_close(merge(y), merge(y_padded))
    # The four cells of the first patch, column by column.
    cells = torch.cat([y[0, :, 0, 0], y[0, :, 1, 0], y[0, :, 0, 1], y[0, :, 1, 1]])
    torch.testing.assert_close(merge(y)[0, :, 0, 0], merge.reduction(merge.norm(cells)))


@pytest.mark.parametrize("feature_cls", [None, "getter"])
def test_features_only_gives_the_maps_of_the_stages(feature_cls):
    model = tiny()
    options = {"out_indices": (1, 3)} | ({"feature_cls": feature_cls} if feature_cls else {})
    features = tiny(features_only=True, **options)
    state = {k: v for k, v in model.state_dict().items() if not k.startswith("head.")}
    if feature_cls:
        features.model.load_state_dict(state)
    else:
        features.load_state_dict({k.replace("stages.", "stages_"): v for k, v in state.items()})
    x = image(66, 47)
    _, expected = model.forward_intermediates(x, indices=[1, 3])
    assert features.feature_info.channels() == [16, 32]
    for got, wanted in zip(features(x), expected, strict=True):
        assert torch.equal(got, wanted)


def test_features_only_drops_stages_nobody_asked_for():
    few = tiny(features_only=True, out_indices=[0, 1])
    names = {key.split(".")[0] for key, _ in few.named_parameters()}
    assert names == {"patch_embed", "stages_0", "stages_1"}
    model = tiny()
    assert model.prune_intermediate_layers([-3]) == [1]
    assert len(model.stages) == 2 and isinstance(model.head, nn.Identity)


def test_forward_intermediates():
    model, x = tiny(), image(66, 47)
    last, maps = model.forward_intermediates(x)
    assert len(maps) == 4 and torch.equal(last, maps[3])
    assert torch.equal(last, model.forward_features(x))
    assert torch.equal(maps[1], model.stages[1](maps[0]))
    two = model.forward_intermediates(x, indices=2, intermediates_only=True)
    assert [m.shape for m in two] == [maps[2].shape, maps[3].shape]
    stopped, only = model.forward_intermediates(x, indices=[-4], stop_early=True)
    assert torch.equal(stopped, maps[0]) and len(only) == 1
    _, (channels_last,) = model.forward_intermediates(x, indices=[2], output_fmt="NHWC")
    assert torch.equal(channels_last, maps[2].permute(0, 2, 3, 1))


def test_global_pool_and_num_classes():
    x = image(66, 47)
    model = tiny()
    state = model.state_dict()
    features = model.forward_features(x)
    assert features.shape == (2, 32, 3, 2)
    pooled = model.forward_head(features, pre_logits=True)
    torch.testing.assert_close(pooled, features.mean(dim=(2, 3)))
    torch.testing.assert_close(model(x), model.head(pooled))
    headless = {key: value for key, value in state.items() if not key.startswith("head.")}
    by_max = tiny(global_pool="max", num_classes=0)
    by_max.load_state_dict(headless)
    torch.testing.assert_close(by_max(x), features.amax(dim=(2, 3)))
    unpooled = tiny(global_pool="", num_classes=0)
    unpooled.load_state_dict(headless)
    torch.testing.assert_close(unpooled(x), features)
    dense = tiny(global_pool="")
    dense.load_state_dict(state)
    assert dense(x).shape == (2, 5, 3, 2)
    torch.testing.assert_close(dense(x).mean(dim=(2, 3)), model(x))


def test_reset_classifier():
    model = tiny(dtype=torch.float64).train()
    x = image(66, 47, dtype=torch.float64)
    model.reset_classifier(7)
    assert model(x).shape == (2, 7) and model.num_classes == 7
    assert model.get_classifier() is model.head and model.head.training
    assert model.head.weight.dtype == torch.float64 and not model.head.bias.any()
    model.reset_classifier(0, "")
    assert model(x).shape == (2, 32, 3, 2)
    model.reset_classifier(0, "max")
    assert model(x).shape == (2, 32)


def test_no_weight_decay_and_group_matcher():
    model = tiny()
    logits = {key for key, _ in model.named_parameters() if "logits" in key}
    assert model.no_weight_decay() == logits and len(logits) == 5
    assert tiny(variant="A").no_weight_decay() == set()
    layers = timm.models.group_parameters(model, model.group_matcher(), reverse=True)
    assert layers.keys() == dict(model.named_parameters()).keys()
    picked = {
        "patch_embed.proj.weight": 0,
        "stages.0.blocks.0.norm1.weight": 1,
        "stages.0.norm.weight": 1,
        "stages.1.downsample.proj.weight": 2,
        "stages.2.blocks.0.attn.level_logits": 3,
        "stages.2.blocks.1.mlp.fc1.weight": 4,
        "stages.3.norm.bias": 5,
        "head.weight": 6,
    }
    assert {key: layers[key] for key in picked} == picked
    coarse = timm.models.group_parameters(model, model.group_matcher(coarse=True), reverse=True)
    assert coarse["stages.2.blocks.1.mlp.fc1.weight"] == coarse["stages.2.norm.weight"] == 3


@pytest.mark.parametrize("attention", ["quadtree", *BASELINES])
@pytest.mark.parametrize("layout", ["pvt", "swin"])
def test_built_on_the_meta_device(attention, layout):
    """Materialised and initialised, it is what a model built on the CPU is, and trains."""
    options = {"attention": attention, "layout": layout, "lepe": True}
    model = tiny(device="meta", drop_path_rate=0.1, **options)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert not list(model.buffers())  # nothing that init_weights would not reach
    model.to_empty(device="cpu").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    original = tiny(**options)
    for one in (model, original):
        torch.manual_seed(5)
        one.init_weights()
    for name, parameter in original.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name
    x = image(66, 47)
    out = model(x)
    assert torch.equal(out, original(x)) and out.isfinite().all()
    kinds = {type(block.attn) for stage in model.stages for block in stage.blocks}
    assert kinds == {BASELINES.get(attention, QuadtreeAttention)}
    out.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


def build_under_the_meta_device():
    with torch.device("meta"):
        for name in ("test_quadtree", "swin_tiny_quadtree_b"):
            model = timm.create_model(name, drop_path_rate=0.1, features_only=True)
            print({p.device.type for p in model.parameters()})


def test_built_under_the_meta_device(tmp_path):
    # In a process of its own: conftest replaces torch.empty, which hides it from the context.
    process = processes.start(build_under_the_meta_device, output=tmp_path / "said")
    assert processes.finish(process, tmp_path / "said").splitlines() == ["{'meta'}"] * 2


def test_initial_weights():
    model = timm.create_model("quadtree_b_b0", dtype=torch.bfloat16)
    attn = model.stages[2].blocks[0].attn
    for weight, std in (
        (model.head.weight, 0.02),
        (attn.q_proj.weight, 0.02),
        (model.patch_embed.proj.weight, math.sqrt(2 / (7 * 7 * 32))),
        (model.stages[0].blocks[0].mlp.dwconv.weight, math.sqrt(2 / 9)),
    ):
        assert weight.float().std().item() == pytest.approx(std, rel=0.05)
        assert weight.float().abs().max() < 6 * std
    attentions = [m for m in model.modules() if isinstance(m, QuadtreeAttention)]
    logits = torch.cat([m.level_logits for m in attentions])
    assert len(logits.unique()) > 15 and 0.5 < logits.float().std() < 1.5
    for key, parameter in model.named_parameters():
        if key.endswith("bias"):
            assert not parameter.any(), key
        elif "norm" in key:
            assert (parameter == 1).all(), key


def test_initial_weights_that_are_no_layers():
    windows = tiny(attention="window", num_heads=(8, 8, 8, 8)).stages[0].blocks[0].attn
    focal = tiny(attention="focal", num_heads=(8, 8, 8, 8)).stages[0].blocks[0].attn
    for table in (windows.relative_position_bias_table, focal.fine_bias, focal.pooled_bias):
        assert table.std().item() == pytest.approx(0.02, rel=0.15)
    assert (focal.pool.weight == 1 / 49).all() and not focal.pool.bias.any()  # the mean


@pytest.mark.slow
def test_compiles_without_a_graph_break():
    model, x = tiny(), image(66, 47)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))


# ---- options


def test_options_reach_the_attention():
    x = image(128, 160, dtype=torch.float64)
    model = tiny(dtype=torch.float64)
    state, base = model.state_dict(), model(x)
    for options in ({"topk": 1}, {"topk": (1, 4, 4, 4)}, {"value_act": "relu"}):
        other = tiny(dtype=torch.float64, **options)
        other.load_state_dict(state)
        assert (other(x) - base).abs().max() > 1e-9, options
    same = tiny(dtype=torch.float64, topk=(4, 4, 4, 99), value_act="gelu")
    same.load_state_dict(state)
    assert torch.equal(same(x), base)
    raises(OptionError, "nonsense", tiny(backend="nonsense"), x.float())


def test_drop_path_and_dropout():
    model = tiny(drop_path_rate=0.4, drop_rate=0.5)
    rates = [block.drop_path.rate for stage in model.stages for block in stage.blocks]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    features = torch.ones(2, 32, 3, 2)
    assert (model.forward_head(features, pre_logits=True) == 1).all()
    dropped = model.train().forward_head(features, pre_logits=True)
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    assert tiny(proj_drop_rate=0.25).stages[0].blocks[0].attn.proj_drop.p == 0.25


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topk": (1, 2)}, r"topk must be one value, or one per stage \(4\), got topk=\(1, 2\);"),
        ({"num_heads": (1, 2)}, r"one value of each option, got depths=.* num_heads=\(1, 2\),"),
        ({"layout": "vgg"}, "layout must be one of pvt, swin, got 'vgg'"),
        ({"global_pool": "sum"}, "global_pool must be one of 'avg', 'max', '', got global_pool='s"),
        ({"variant": "A", "value_act": "relu"}, "value_act belongs to value_pyramid='conv'"),
        ({"value_act": "tanh"}, "value_act must be one of gelu, relu, got 'tanh'"),
        ({"variant": "D"}, "variant must be 'A', 'B' or 'C'"),
    ],
)
def test_options_that_are_refused(options, message):
    raises(OptionError, message, tiny, **options)


def test_calls_that_are_refused():
    model, x = tiny(), image(66, 47)
    raises(ShapeError, r"\(batch, 3, y, x\).* got x\.shape=\(2, 1, 66, 47\); pass", model, x[:, :1])
    raises(ShapeError, r"got x\.shape=\(3, 66, 47\)", model, x[0])
    raises(ShapeError, r"at least 1 pixels, got x\.shape=\(2, 3, 66, 0\)", model, x[..., :0])
    inner = model.forward_intermediates
    raises(OptionError, r"from -4 to 3, got indices=\[4\]", inner, x, indices=[4])
    raises(OptionError, r"must be 1 to 4 .* got indices=0", inner, x, indices=0)
    raises(OptionError, "'NCHW' or 'NHWC', got output_fmt='NLC'", inner, x, output_fmt="NLC")
    raises(OptionError, "got global_pool='sum'", model.reset_classifier, 3, "sum")
