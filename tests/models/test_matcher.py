# SPDX-License-Identifier: Apache-2.0
"""The matcher: official numbers and names, and what it promises of sizes, masks and batches."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from quadtree_attention import CheckpointError, DTypeError, OptionError, ShapeError
from quadtree_attention.models.convert import check_fit
from quadtree_attention.models.matcher import Features, LoFTR
from quadtree_attention.models.matcher_convert import (
    convert_matcher,
    infer_matcher,
    is_official_matcher,
)
from quadtree_attention.models.parts.coarse_matching import CoarseMatches, matches_for_training
from quadtree_attention.models.registry import create, names
from tests.conftest import Golden, golden_files, golden_path
from tests.support import raises
from tests.support.official import load_official, manifest, recipe, shapes_of

pytestmark = pytest.mark.usefixtures("only_reference", "one_thread")

# ---- official numbers


def official_state(golden: Golden) -> dict[str, torch.Tensor]:
    """The weights behind a golden file, under official names."""
    name = {"ds_indoor": "loftr_linear_ds"}.get(golden.meta["model"])
    shapes = manifest(name or f"loftr_quadtree_{golden.meta['model']}")["state_dict"]
    stored = golden.with_prefix("sd:")
    state = {}
    for full_name, shape in shapes.items():
        key = full_name.removeprefix("matcher.")
        if key.endswith("num_batches_tracked"):
            state[full_name] = torch.zeros(shape, dtype=torch.int64)
        else:
            state[full_name] = stored.pop(key) if key in stored else recipe(key, shape)
    assert not stored
    return state


def official_model(golden: Golden, **options) -> LoFTR:
    name = {"ds_indoor": "loftr"}.get(golden.meta["model"])
    model = create(
        name or f"loftr_quadtree_{golden.meta['model']}",
        position="fixed" if golden.meta["temp_bug_fix"] else "legacy",
        border=golden.meta["border_rm"],
        threshold=golden.meta["thr"],
        dtype=torch.float64,
        **options,
    )
    if golden.meta["topks"]:
        assert list(model.coarse_transformer.layers[0].attn.topk) == golden.meta["topks"][:2]
    load_official(model, convert_matcher(official_state(golden)))
    return model.eval()


def golden_pair(golden: Golden) -> dict[str, torch.Tensor]:
    with np.load(golden_path("models/images.npz")) as arrays:
        texture = arrays["texture"]
    height, width = golden.meta["image_hw"]
    data = {}
    for name in ("image0", "image1"):
        crops = []
        for crop in golden.meta["crops"]:
            at = crop[name]
            part = texture[at["y"] : at["y"] + height, at["x"] : at["x"] + width]
            crops.append((part / 255 * at["gain"] + at["offset"]).astype(np.float32))
        data[name] = torch.from_numpy(np.stack(crops))[:, None].double()
    if "mask0" in golden.arrays:
        data["image0"][..., 208:, :] = 0
        data["image1"][..., 264:] = 0
        for name in ("mask0", "mask1"):
            mask = torch.from_numpy(golden.arrays[name])
            data[name] = mask.repeat_interleave(8, 1).repeat_interleave(8, 2)
    return data


def close(got: torch.Tensor, golden: Golden, key: str, atol: float = 2e-6) -> None:
    expected = golden.tensor(f"{key}_f64", torch.float64)
    torch.testing.assert_close(got, expected, rtol=0, atol=atol, msg=lambda m: f"{key}: {m}")


def check_coarse(model: LoFTR, golden: Golden, features: Features) -> None:
    for i, tokens in enumerate((features.coarse0, features.coarse1)):
        tokens = tokens.flatten(1, 2)
        close(tokens[:, ::16, ::4], golden, f"coarse{i}")
        close(tokens.mean(dim=2), golden, f"coarse{i}_token_mean")
    fine = torch.cat([features.fine0, features.fine1])
    close(fine[:, ::8, ::8, ::8], golden, "backbone_fine")
    confidence = model.confidence(features)
    rows = slice(None)
    if features.mask0 is not None:  # ours has 0 for pairs of hidden cells, the official 1 / (L L)
        rows = features.mask0[0].flatten()
        assert not confidence[:, ~rows].any()
        assert not confidence[..., ~features.mask1[0].flatten()].any()
    for key, got in {"sum": confidence.sum(2), "max": confidence.amax(2)}.items():
        expected = golden.tensor(f"conf_row_{key}_f64", torch.float64)
        torch.testing.assert_close(got[:, rows], expected[:, rows], rtol=0, atol=2e-6)
    best = golden.tensor("conf_row_argmax_f64", torch.int64)
    assert torch.equal(confidence.argmax(2)[:, rows], best[:, rows])
    matches = model.select(features, confidence)
    assert torch.equal(matches.batch_indexes, golden.tensor("b_ids_f64", torch.int64))
    assert torch.equal(matches.cells0, golden.tensor("i_ids_f64", torch.int64))
    assert torch.equal(matches.cells1, golden.tensor("j_ids_f64", torch.int64))


def check_matches(found: dict, golden: Golden) -> None:
    assert torch.equal(found["batch_indexes"], golden.tensor("b_ids_f64", torch.int64))
    close(found["confidence"], golden, "mconf")
    for i in range(2):
        points = found[f"keypoints{i}"]
        if f"scale{i}" in golden.arrays:
            points = points * golden.tensor(f"scale{i}", torch.float64)
        close(points, golden, f"mkpts{i}_f", atol=5e-5)


def matcher_files():
    """One file per path through the code; the rest before a release."""
    for file in golden_files("models/loftr_*.npz"):
        slow = any(name in (file.id or "") for name in ("480x640", "indoor_256x320"))
        marks = [*file.marks, *[pytest.mark.slow] * slow]
        yield pytest.param(*file.values, id=file.id, marks=marks)


@torch.no_grad()
@pytest.mark.parametrize("path", [*matcher_files()])
def test_official_matcher(path, monkeypatch):
    golden = Golden(path)
    # The official masks act in coarse matching only.
    model = official_model(golden, masks_in_attention="masked" not in golden.name)
    features = model.encode(golden_pair(golden))
    check_coarse(model, golden, features)
    model.coarse_matching.max_entries = 2**18  # several tiles
    parts, fine = [], model.fine
    monkeypatch.setattr(model, "fine", lambda *given: parts.append(fine(*given)) or parts[-1])
    check_matches(model.match(features), golden)
    close(torch.cat([torch.cat([x.offset, x.std[:, None]], 1) for x in parts]), golden, "expec_f")


@torch.no_grad()
@pytest.mark.parametrize("path", golden_files("models/loftr_*_masked.npz"))
def test_masks_act_in_ours(path):
    golden = Golden(path)
    ours, official = (official_model(golden, masks_in_attention=acting) for acting in (True, False))
    data = {name: tensor[..., :64, :96] for name, tensor in golden_pair(golden).items()}
    data["mask0"][:, 48:] = False
    without = {name: data[name] for name in ("image0", "image1")}
    expected = official.encode(without).coarse0
    assert torch.equal(official.encode(data).coarse0, expected)
    assert (ours.encode(data).coarse0[:, :6] - expected[:, :6]).abs().max() > 0.1


# ---- official names


@pytest.mark.parametrize("path", golden_files("manifests/loftr_*.json"))
def test_manifest_converts_with_nothing_left_over(path):
    official = manifest(path.stem)
    name = {"loftr_linear_ds": "loftr"}.get(path.stem, path.stem)
    model = create(name, device="meta")
    assert sum(p.numel() for p in model.parameters()) == official["parameters"]
    assert sum(b.numel() for b in model.buffers()) == official["buffers"]
    state = shapes_of(path.stem)
    assert is_official_matcher(state)
    converted = convert_matcher(state)
    assert len(converted) == official["tensors"]
    check_fit(model, converted)
    if name == "loftr":
        assert infer_matcher(converted) == "loftr"
    else:
        fits = r"indoor .* and .*outdoor .* pass the name"
        raises(CheckpointError, fits, infer_matcher, converted)


def test_names_that_are_not_official_are_refused():
    state = {
        "matcher.loftr_coarse.layers.0.merge.weight": torch.zeros(1),
        "matcher.loftr_coarse.layers.0.gate.weight": torch.zeros(1),
        "matcher.backbone.layer4.0.conv1.weight": torch.zeros(1),
    }
    message = r"^2 tensors are not part of an official matcher: backbone\.layer4.*, loftr_c.*gate"
    raises(CheckpointError, message, convert_matcher, state)
    assert not is_official_matcher({"backbone.conv1.weight": torch.zeros(1)})


def test_dustbin_score_has_an_official_name():
    model = create("loftr", matching="optimal_transport", device="meta")
    name = "coarse_matching.bin_score"
    assert name in model.state_dict()
    assert list(convert_matcher({f"matcher.{name}": torch.ones(())})) == [name]


# ---- what a small matcher promises

ATTENTIONS = ["linear", "full", "spatial_reduction", "quadtree_a", "quadtree_b"]
KINDS = [(attention, block) for attention in ATTENTIONS for block in ("loftr", "vit")]


def tiny(**options) -> LoFTR:
    """Random weights that tell cells apart, and match whatever is each other's best."""
    defaults = {"dims": (8, 16, 32), "num_pairs": 1, "num_heads": 2, "fine_heads": 2}
    defaults |= {"threshold": 0.0, "border": 0, "dtype": torch.float64}
    model = create("loftr_quadtree_small", **defaults | options)
    dtype = model.fine_windows.merge.weight.dtype
    with torch.no_grad():
        for block in model.coarse_transformer.layers:  # a fresh one hardly changes anything
            for parameter in block.parameters():
                parameter *= 3 if parameter.ndim == 2 and options.get("block") != "loftr" else 1
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                torch.nn.init.normal_(module.bias, std=0.3)
                module.momentum = 1.0
        model.train().backbone(torch.rand(2, 1, 128, 160, dtype=dtype))
    return model.eval()


def image(height: int, width: int, batch: int = 1) -> torch.Tensor:
    return torch.rand(batch, 1, height, width, dtype=torch.float64)


def pair(size0: tuple[int, int], size1: tuple[int, int], batch: int = 1) -> dict[str, torch.Tensor]:
    return {"image0": image(*size0, batch), "image1": image(*size1, batch)}


def scene(size0: tuple[int, int], size1: tuple[int, int], batch: int = 1) -> dict:
    """Two cut-outs of the same noise."""
    both = image(max(size0[0], size1[0]) + 8, max(size0[1], size1[1]) + 8, batch)
    return {
        "image0": both[..., : size0[0], : size0[1]].clone(),
        "image1": both[..., 8 : 8 + size1[0], 8 : 8 + size1[1]].clone(),
    }


@torch.no_grad()
@pytest.mark.parametrize("sizes", [((97, 131), (120, 80)), ((17, 9), (64, 33)), ((40, 1), (3, 50))])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_any_two_sizes(attention, sizes):
    found = tiny(attention=attention)(scene(*sizes, batch=2))
    count = len(found["confidence"])
    assert count and found["batch_indexes"].unique().tolist() == [0, 1]
    for i, (height, width) in enumerate(sizes):
        points = found[f"keypoints{i}"]
        assert points.shape == (count, 2)
        slack = 4 * i  # the fine stage may look past the edge
        assert (points >= -slack).all()
        assert (points <= torch.tensor([width - 1 + slack, height - 1 + slack])).all()
    assert not (found["keypoints0"] % 8).any()
    assert (found["keypoints1"] % 8).any()


@torch.no_grad()
def test_one_shift_everywhere():
    """Cells of image 1 are found where they are: one cell up and to the left."""
    found = tiny(num_pairs=0)(scene((96, 120), (96, 120)))
    moved = found["keypoints0"] - found["keypoints1"]
    near = (moved - 8).abs().amax(dim=1) <= 4
    assert near.double().mean() > 0.5


@pytest.mark.parametrize("matching", ["dual_softmax", "optimal_transport"])
@pytest.mark.parametrize(("attention", "block"), KINDS)
def test_every_parameter_gets_a_gradient(attention, block, matching):
    model = tiny(attention=attention, block=block, matching=matching).train()
    features = model.encode(scene((33, 49), (40, 33), batch=2))
    confidence = model.confidence(features)
    assert confidence.shape == (2, 5 * 7, 5 * 5)
    truth = CoarseMatches(*torch.tensor([[0, 1], [3, 4], [5, 6]]), torch.zeros(2))
    predicted = model.select(features, confidence)
    matches = matches_for_training(predicted, truth, count=12, least_true=4)
    assert len(matches) == 12
    fine = model.fine(features, matches)
    (confidence.square().sum() + fine.offset.square().sum() + fine.std.sum()).backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert missing == []


def test_without_matches_there_are_gradients_of_zero():
    """So that no process of a distributed run waits for those of another."""
    model = tiny(threshold=1.0).train()
    features = model.encode(pair((33, 49), (40, 33)))
    matches = model.select(features, model.confidence(features))
    assert len(matches) == 0
    fine = model.fine(features, matches)
    (fine.offset.sum() + fine.std.sum()).backward()
    assert all(p.grad is not None for p in model.fine_transformer.parameters())


@torch.no_grad()
def test_forward_is_the_steps_of_training(monkeypatch):
    model = tiny(max_entries=100)
    data = scene((97, 131), (120, 80), batch=2)
    features = model.encode(data)
    matches = model.select(features, model.confidence(features))
    fine = model.fine(features, matches)
    monkeypatch.setattr("quadtree_attention.models.matcher._MATCHES_AT_ONCE_ON_CPU", 7)
    found = model(data)
    assert len(matches) > 14
    assert torch.equal(found["batch_indexes"], matches.batch_indexes)
    torch.testing.assert_close(found["confidence"], matches.confidence)
    torch.testing.assert_close(found["keypoints0"], fine.keypoints0)
    torch.testing.assert_close(found["keypoints1"], fine.keypoints1)


def on_canvas(data: dict, size: tuple[int, int]) -> dict[str, torch.Tensor]:
    """The pair on larger images, with masks; what is hidden is bright."""
    padded = {}
    for i in range(2):
        inner = data[f"image{i}"]
        _, _, height, width = inner.shape
        below_and_right = (0, size[1] - width, 0, size[0] - height)
        padded[f"image{i}"] = F.pad(inner, below_and_right, value=1.0)
        shown = torch.ones(len(inner), height, width, dtype=torch.bool)
        padded[f"mask{i}"] = F.pad(shown, below_and_right)
    return padded


@torch.no_grad()
@pytest.mark.parametrize("matching", ["dual_softmax", "optimal_transport"])
@pytest.mark.parametrize(("attention", "block"), KINDS)
def test_a_padded_batch_gives_what_single_images_give(attention, block, matching):
    model = tiny(attention=attention, block=block, matching=matching, border=1)
    singles = [scene((97, 131), (120, 80)), scene((64, 72), (88, 121))]
    alone = [model(single) for single in singles]
    padded = [on_canvas(single, (125, 140)) for single in singles]
    batch = {name: torch.cat([data[name] for data in padded]) for name in padded[0]}
    found = model(batch)
    for i, expected in enumerate(alone):
        mine = found["batch_indexes"] == i
        assert mine.sum() == len(expected["confidence"]) > 3
        for name in ("keypoints0", "keypoints1", "confidence"):
            torch.testing.assert_close(found[name][mine], expected[name], rtol=0, atol=1e-4)
    unmasked = model({name: batch[name] for name in ("image0", "image1")})
    assert len(unmasked["confidence"]) != len(found["confidence"])


@torch.no_grad()
def test_masks_of_one_image_only():
    data = scene((64, 72), (64, 72))
    data["mask1"] = torch.ones(1, 64, 72, dtype=torch.bool)
    model = tiny()
    plain = model({name: data[name] for name in ("image0", "image1")})
    torch.testing.assert_close(model(data)["keypoints1"], plain["keypoints1"])
    data["mask1"][:, :, 40:] = False
    assert (model(data)["keypoints1"][:, 0] < 40 + 4).all()
    assert (plain["keypoints1"][:, 0] > 48).any()


@torch.no_grad()
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_swapped_images_give_swapped_matches(attention):
    """The coarse matches: the fine stage keeps the point of image 0, and moves that of image 1.

    So a point moves by at most the radius of the fine window, 4 pixels, along x and along y.
    """
    model = tiny(attention=attention, block="vit")
    data = scene((97, 131), (120, 80), batch=2)
    swapped = {"image0": data["image1"], "image1": data["image0"]}
    one, other = (model.encode(d) for d in (data, swapped))
    matches, back = (model.select(f, model.confidence(f)) for f in (one, other))
    assert len(matches) > 20
    pairs = torch.stack([matches.batch_indexes, matches.cells0, matches.cells1], 1).tolist()
    pairs_back = torch.stack([back.batch_indexes, back.cells1, back.cells0], 1).tolist()
    assert pairs == sorted(pairs_back)
    order = sorted(range(len(back)), key=pairs_back.__getitem__)
    torch.testing.assert_close(matches.confidence, back.confidence[order])
    there, again = model(data), model(swapped)
    for i in range(2):
        moved = there[f"keypoints{i}"] - again[f"keypoints{1 - i}"][order]
        assert moved.abs().max() <= model.window_radius == 4


@torch.no_grad()
def test_nothing_to_match():
    for model, data in (
        (tiny(threshold=1.0), pair((64, 72), (40, 33))),
        (tiny(border=2), pair((1, 1), (1, 1))),
        (tiny(border=2), pair((1, 1), (64, 72))),
        (tiny(), pair((64, 72), (40, 33)) | {"mask0": torch.zeros(1, 64, 72, dtype=torch.bool)}),
        (tiny(), pair((64, 72), (40, 33), batch=0)),
    ):
        found = model(data)
        assert found["keypoints0"].shape == found["keypoints1"].shape == (0, 2)
        assert found["confidence"].shape == found["batch_indexes"].shape == (0,)
        assert found["batch_indexes"].dtype == torch.int64


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_runs_give_the_same(dtype):
    model = tiny(dtype=torch.float32)
    data = {name: tensor.float() for name, tensor in scene((64, 72), (88, 121)).items()}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        first, second = model(data), model(data)
    assert len(first["confidence"]) > 5
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name])
        assert tensor.dtype == (torch.int64 if name == "batch_indexes" else torch.float32)


@torch.no_grad()
def test_large_images_go_through_the_cnn_one_by_one(monkeypatch):
    model, data = tiny(), scene((64, 72), (64, 72))
    together = model(data)
    monkeypatch.setattr("quadtree_attention.models.matcher._PIXELS_AT_ONCE_ON_CPU", 100)
    for name, tensor in model(data).items():
        torch.testing.assert_close(tensor, together[name])


@torch.no_grad()
def test_maps_can_be_made_one_by_one():
    model = tiny()
    data = scene((64, 72), (80, 64))
    masks = {f"mask{i}": torch.ones_like(data[f"image{i}"][:, 0]) > 0 for i in range(2)}
    masks["mask1"][:, 56:] = False
    for given in (data, data | masks):
        images = [(given[f"image{i}"], given.get(f"mask{i}")) for i in range(2)]
        found = model.pair(*(model.maps(*one) for one in images))
        expected = model(given)  # images of two sizes are no batch there either
        assert len(found["confidence"]) > 10
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        attended = [model.attend(model.maps(*one)) for one in images]
        again = model.pair(*attended)
        assert all(torch.equal(again[name], expected[name]) for name in expected)
        attended[0].attended.zero_()  # it is what the transformer goes on from
        assert not torch.equal(model.pair(*attended)["keypoints1"], found["keypoints1"])
    assert not torch.equal(model(data)["keypoints1"], found["keypoints1"])
    maps = [model.maps(image(32, 32, batch=batch)) for batch in (1, 2)]
    raises(ShapeError, "same batch size, got 1 and 2; convert one", model.pair, *maps)
    raises(ShapeError, r"image must be \(batch, 1, y, x\)", model.maps, torch.rand(1, 3, 9, 9))


@torch.no_grad()
def test_threshold_of_a_call():
    model, data = tiny(), scene((64, 72), (64, 72))
    every = model(data)
    least = every["confidence"].median().item()
    few = model(data, threshold=least)
    assert torch.equal(few["confidence"], every["confidence"][every["confidence"] > least])
    assert 0 < len(few["confidence"]) < len(every["confidence"])
    assert model.coarse_matching.threshold == 0.0
    assert len(model(data, threshold=1.0)["confidence"]) == 0
    maps = [model.maps(data[f"image{i}"]) for i in range(2)]
    assert len(model.pair(*maps, threshold=1.0)["confidence"]) == 0


# ---- names and options


@pytest.mark.parametrize("name", names("match"))
def test_names(name):
    model = create(name, device="meta")
    parameters = sum(p.numel() for p in model.parameters())
    if name == "loftr_quadtree_small":  # half precision in 12 MB, with room for the header
        assert 2_500_000 < parameters < 5_000_000
        assert 2 * sum(t.numel() for t in model.state_dict().values()) < 11_900_000
    for attention in ATTENTIONS:
        assert create(name, attention=attention, device="meta")


def test_lite_has_half_of_all_channels():
    full, lite = (create(name, device="meta").state_dict() for name in ("loftr", "loftr_lite"))
    assert full.keys() == lite.keys()
    for name in full:
        for a, b in zip(full[name].shape, lite[name].shape, strict=True):
            assert a in (2 * b, 1, 3, 7)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"image1": None}, OptionError, r"must have image0 and image1, got image0; add image1"),
        ({"image0": torch.rand(1, 3, 9, 9)}, ShapeError, r"image0 must be \(batch, 1, y, x\)"),
        ({"image1": torch.rand(1, 1, 0, 9)}, ShapeError, r"image1 must be .*\(1, 1, 0, 9\)"),
        ({"image1": torch.rand(2, 1, 9, 9)}, ShapeError, r"the same batch size, got 1 and 2"),
        ({"image0": torch.ones(1, 1, 9, 9).byte()}, DTypeError, r"in \[0, 1\], got .*uint8; div"),
        ({"mask0": torch.ones(1, 2, 2) > 0}, ShapeError, r"mask0"),
        ({"mask1": torch.ones(1, 9, 9)}, DTypeError, r"mask1"),
    ],
)
def test_bad_input(change, error, message):
    data = {"image0": torch.rand(1, 1, 9, 9), "image1": torch.rand(1, 1, 9, 9)} | change
    data = {name: tensor for name, tensor in data.items() if tensor is not None}
    raises(error, message, tiny(dtype=torch.float32), data)
