# SPDX-License-Identifier: Apache-2.0
"""The stereo network as a whole."""

import pytest
import torch
import torch.nn.functional as F

from quadtree_attention import use_backend
from quadtree_attention.errors import DTypeError, OptionError, ShapeError
from quadtree_attention.models.parts.stereo_features import ConvNorm, resampled
from quadtree_attention.models.registry import create, names
from tests.support import raises

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = {"dims": (8, 8, 8, 8), "dim": 16, "num_heads": 2, "refine_dim": 8}
SMALL = "sttr_quadtree_small"
PUBLISHED = ("sttr", "sttr_quadtree")


def tiny(name=SMALL, **options):
    torch.manual_seed(0)
    own = {"num_layers": 1, "context": (8, 8, 8, 8)} if name == SMALL else {"num_layers": 2}
    return create(name, **{**TINY, **own, **options}).eval()


def trained(name=SMALL, **options):
    """With weights that refinement might have after training; ours begins with changing nothing."""
    model = tiny(name, **options)
    if name != SMALL:
        return model
    context = model.refinement.context
    for layer in (model.refinement.head, *([] if context is None else [context.hourglass.out])):
        torch.nn.init.normal_(layer.weight, std=0.1)
    return model


def pair(height: int, width: int, count: int = 1, dtype=torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {name: torch.rand(count, 3, height, width, dtype=dtype) for name in ("image0", "image1")}


@pytest.mark.parametrize(
    ("name", "options"),
    [*((SMALL, {"stride": stride}) for stride in (2, 3, 4)), *((name, {}) for name in PUBLISHED)],
)
@pytest.mark.parametrize("size", [(16, 16), (17, 16), (17, 45), (50, 33), (132, 137)])
def test_any_size(size, name, options):
    model = trained(name, **options)
    with torch.no_grad():
        found = model(pair(*size, count=2))
    assert found.disparity.shape == found.occlusion.shape == (2, *size)
    assert (found.disparity >= 0).all() and found.disparity.isfinite().all()
    assert found.occlusion.min() >= 0 and found.occlusion.max() <= 1
    cells = [torch.arange(side)[model.offset :: model.stride] for side in size]
    assert found.raw_disparity.shape == found.raw_occlusion.shape == (2, *map(len, cells))
    columns = torch.arange(size[1]).expand(1, *size)
    assert torch.equal(model.at_cells(columns)[0, 0], cells[1])


def test_one_level_is_full_attention():
    """The same weights, with everything kept at a single level, in the whole network."""
    full = tiny(attention="full", dtype=torch.float64)
    ours = tiny(attention="quadtree_a", num_levels=1, dtype=torch.float64)
    ours.load_state_dict(full.state_dict())
    data = pair(32, 48, dtype=torch.float64)
    with torch.no_grad():
        one, other = full(data), ours(data)
    assert torch.allclose(one.disparity, other.disparity, atol=1e-9)
    assert torch.allclose(one.log_none, other.log_none, atol=1e-9)


@pytest.mark.parametrize(("name", "tolerance"), [(SMALL, 1e-4), *((x, 1e-3) for x in PUBLISHED)])
def test_a_batch_is_its_pairs(name, tolerance):
    model, data = trained(name), pair(24, 40, count=2)
    with torch.no_grad():
        together = model(data)
        alone = [model({view: x[i : i + 1] for view, x in data.items()}) for i in range(2)]
    for i in range(2):
        assert torch.allclose(together.raw_disparity[i], alone[i].raw_disparity[0], atol=1e-4)
        assert torch.allclose(together.disparity[i], alone[i].disparity[0], atol=tolerance)


def test_refinement_begins_by_changing_nothing():
    """What comes out at the pixels of cells is then what the assignment found."""
    with torch.no_grad():
        found = tiny(context=())(pair(32, 48))
    assert torch.allclose(found.disparity[:, ::2, ::2], found.raw_disparity, atol=1e-4)
    raw = found.raw_occlusion.clamp(1e-3, 1 - 1e-3)
    assert torch.allclose(found.occlusion[:, ::2, ::2], raw, atol=1e-4)


def reach(model, data):
    """Columns of the left image on which the refined disparity in the middle of it depends."""
    for module in model.refinement.modules():
        if isinstance(module, ConvNorm):
            module[1] = torch.nn.Identity()  # a norm's mean knows of all pixels, too
    image = data["image0"].clone().requires_grad_()
    size = image.shape[2:]
    disparity, occlusion = torch.rand(1, *size), torch.rand(1, *size)
    refined, _ = model.refinement(image, disparity, occlusion)
    refined[0, size[0] // 2, size[1] // 2].backward()
    return image.grad.abs().sum(dim=(0, 1, 2)).nonzero()[:, 0]


def test_context_tells_from_all_of_the_image():
    """Without it, refinement knows what is near only."""
    data = pair(64, 256)
    near, far = reach(trained(context=()), data), reach(trained(), data)
    assert near.max() - near.min() < 100
    assert far.min() < 8 and far.max() > 248


def test_context_begins_by_changing_little():
    plain, wide = tiny(context=()), tiny()
    wide.load_state_dict(plain.state_dict(), strict=False)
    with torch.no_grad():
        before, found = (model(pair(33, 50)) for model in (plain, wide))
    assert torch.allclose(found.occlusion, before.occlusion, atol=1e-4)
    moved = (found.disparity - before.disparity).abs().mean()
    assert 0 < moved < 0.1 * before.disparity.std()


def test_resampling_reads_at_multiples():
    x = torch.arange(12.0).view(1, 1, 3, 4)
    assert torch.allclose(resampled(x, (3, 4), 1.0), x, atol=1e-5)
    up = resampled(x, (5, 7), 0.5)[0, 0]
    assert torch.allclose(up[0], torch.arange(7) * 0.5, atol=1e-5)
    assert torch.allclose(up[:, 0], torch.arange(5) * 2.0, atol=1e-5)
    assert torch.allclose(resampled(x, (2, 2), 1.5)[0, 0, 0], torch.tensor([0.0, 1.5]), atol=1e-5)


def test_refinement_does_not_teach_the_assignment():
    model = trained().train()
    found = model(pair(32, 48))
    (found.disparity.sum() + found.occlusion.sum()).backward()
    assert all(p.grad is not None and p.grad.any() for p in model.refinement.parameters())
    for part in (model.features, model.transformer, model.assignment):
        assert all(p.grad is None for p in part.parameters())


def test_max_disparity_of_a_call():
    model, data = trained(), pair(32, 96)
    with torch.no_grad():
        free, short = model(data), model(data, max_disparity=8.0)
        model.max_disparity = 8.0
        assert torch.equal(model(data).disparity, short.disparity)
        assert torch.equal(model(data, max_disparity=96.0).disparity, free.disparity)
    assert short.raw_disparity.max() <= 8 < free.raw_disparity.max()
    assert model.max_disparity == 8.0


def test_packaged_weights_find_a_shift():
    """Numbers of the commit that wrote the weights; what it was trained with is part of them."""
    torch.manual_seed(0)
    texture = F.interpolate(torch.rand(1, 3, 24, 48), (48, 96), mode="bilinear")
    data = {"image0": texture[..., :-12], "image1": texture[..., 12:]}  # 12 pixels apart
    model = create("sttr_quadtree_small", pretrained=True).eval()
    with torch.no_grad(), use_backend("reference"):
        found = model(data)
    got = torch.stack([found.disparity[0, ::12, ::28], found.occlusion_logits[0, ::12, ::28]])
    expected = [  # disparities and logits of occlusion, three in a row
        *(6.8574, 12.0988, 11.9949, 13.0494, 11.9896, 12.0090),
        *(12.5340, 11.9517, 12.0289, 13.3819, 11.9774, 12.0014),
        *(5.6160, -9.3073, -9.0504, 6.1414, -10.0271, -9.9745),
        *(7.6160, -10.1583, -9.2752, 7.2898, -10.4305, -10.0610),
    ]
    torch.testing.assert_close(got.flatten(), torch.tensor(expected), rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        (SMALL, "full"),
        (SMALL, "quadtree_a"),
        (SMALL, "quadtree_b"),
        *((x, None) for x in PUBLISHED),
    ],
)
def test_gradients_reach_everything_that_learns(name, attention):
    options = {"attention": attention, "mlp_ratio": 1.0} if attention else {}
    model = trained(name, **options).train()
    model.set_grad_checkpointing(name == "sttr")
    found = model(pair(32, 48), true_disparity=torch.rand(1, 32, 48) * 8)
    parts = (found.disparity, found.occlusion, found.raw_disparity, found.log_true, found.log_none)
    sum(part.mean() for part in parts).backward()
    parameters = dict(model.named_parameters())
    idle = {key for key, parameter in parameters.items() if not parameter.requires_grad}
    assert idle == {f"transformer.norm.{x}" for x in ("weight", "bias") if name == "sttr"}
    for key in parameters.keys() - idle:
        gradient = parameters[key].grad
        assert gradient is not None and gradient.isfinite().all() and gradient.any(), key


def test_autocast():
    model, data = trained(), pair(32, 48)
    with torch.no_grad():
        exact = model(data)
        with torch.autocast("cpu", torch.bfloat16):
            found = model(data)
    assert found.raw_disparity.dtype == torch.float32
    assert (found.raw_occlusion - exact.raw_occlusion).abs().mean() < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    with torch.no_grad():
        found = trained().to(dtype)(pair(32, 48, dtype=dtype))
    assert found.disparity.isfinite().all() and found.raw_disparity.dtype == torch.float32


def test_places_are_exact_in_half_precision():
    """In bfloat16 columns of a wide map would run into each other."""
    x = torch.arange(480.0).expand(1, 1, 2, -1)
    exact = resampled(x, (2, 320), 1.5)
    assert torch.allclose(exact[0, 0, 0], torch.arange(320) * 1.5, atol=1e-3)
    read = resampled(x.bfloat16(), (2, 320), 1.5)
    assert (read - exact).abs().max() <= 2  # half of the last bit of numbers above 256, twice


def test_names():
    for name in names("stereo"):
        with torch.device("meta"):
            count = sum(p.numel() for p in create(name).parameters())
        assert count < 6e6, name  # 12 MB in half precision
    with torch.device("meta"):
        sttr, quadtree = create("sttr"), create("sttr_quadtree")
    assert (sttr.stride, sttr.offset, quadtree.stride, quadtree.offset) == (3, 1, 2, 0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"image1": torch.rand(1, 3, 32, 40)}, ShapeError, "the same shape"),
        ({"image0": torch.rand(1, 1, 32, 48)}, ShapeError, r"must be \(batch, 3, y, x\)"),
        ({"image0": torch.rand(1, 3, 8, 48)}, ShapeError, "at least 16 pixels"),
        ({"image0": torch.zeros(1, 3, 32, 48, dtype=torch.uint8)}, DTypeError, "divide bytes"),
    ],
)
def test_bad_images(change, error, message):
    raises(error, message, tiny(), {**pair(32, 48), **change})


def test_bad_options():
    raises(OptionError, "add image1", tiny(), {"image0": torch.rand(1, 3, 32, 48)})
    raises(OptionError, "no options of quadtree attention, got topk", create, "sttr", topk=3)
    raises(OptionError, "stride must be one of 2, 3, 4, got 5", create, "sttr", stride=5)
    raises(OptionError, "dims must be four numbers of channels", create, "sttr", dims=(8, 8, 8))
    message = r"context must be four .* 1/8, 1/16, 1/32, all"
    raises(OptionError, message, create, "sttr", context=(8, 8, 8, 12))
