# SPDX-License-Identifier: Apache-2.0
"""The detectors: what they promise of padded batches, names, weights and training."""

import pytest
import torch
from torch import Tensor, nn

from quadtree_attention import CheckpointError, DTypeError, OptionError, ShapeError

timm = pytest.importorskip("timm", reason="the backbones need timm (extra 'models')")
pytest.importorskip("torchvision", reason="the detectors need torchvision (extra 'models')")

from torchvision.models.detection.image_list import ImageList  # noqa: E402
from torchvision.ops import box_iou  # noqa: E402

from quadtree_attention.models.detection import MaskRCNN, RetinaNet  # noqa: E402
from quadtree_attention.models.parts.padded_detection import PyramidAnchors  # noqa: E402
from quadtree_attention.models.registry import create  # noqa: E402
from quadtree_attention.models.weights import save_weights  # noqa: E402
from tests.support import raises  # noqa: E402

pytestmark = pytest.mark.usefixtures("only_reference", "one_thread")

KINDS = ["retinanet", "mask_rcnn"]
SIZES = [(70, 45), (33, 91), (8, 50)]
SMALL = {"min_size": 48, "max_size": 96, "channels": 16, "score_thresh": 0.0}


def tiny(kind: str, *, gain: float = 1.5, **options) -> RetinaNet | MaskRCNN:
    """A detector whose random weights tell cells, boxes and classes apart."""
    options = SMALL | options
    if kind == "mask_rcnn":
        options = {"proposals": 100, "rois_per_image": 32, "detections_per_img": 30} | options
    model = create(f"{kind}_test_quadtree", num_classes=3, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith("backbone.body."):
                fan_in = parameter[0].numel()
                parameter.normal_(std=gain / fan_in**0.5 if parameter.ndim > 1 else 0.2 * gain)
    return model.eval()


def images(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.rand(3, *size, dtype=dtype) for size in SIZES]


def targets() -> list[dict[str, Tensor]]:
    """Two objects, one object, none."""
    found = []
    for (height, width), labels in zip(SIZES, ([1, 3], [2], []), strict=True):
        boxes = [[4.0, 5, 30, 31], [11, 2, 40, 28]][: len(labels)]
        masks = torch.zeros(len(labels), height, width, dtype=torch.uint8)
        masks[:, 6:25, 12:26] = 1
        boxes = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
        labels = torch.tensor(labels, dtype=torch.int64)
        found.append({"boxes": boxes, "labels": labels, "masks": masks})
    return found


def check_same(got: dict[str, Tensor], wanted: dict[str, Tensor], box: float, score: float) -> None:
    assert got.keys() == wanted.keys() and len(wanted["boxes"]) > 20
    assert torch.equal(got["labels"], wanted["labels"])
    torch.testing.assert_close(got["boxes"], wanted["boxes"], rtol=0, atol=box)
    for name in wanted.keys() - {"boxes", "labels"}:
        torch.testing.assert_close(got[name], wanted[name], rtol=0, atol=score)


# ---- thin images


@pytest.mark.parametrize("size", [(2, 4000), (1400, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_thin_images(kind, size):
    """At the size that the longer side allows, the shorter one would have no pixel left."""
    model = tiny(kind)
    pixels, (height, width) = torch.rand(3, *size), size
    with torch.no_grad():
        (found,) = model([pixels])
    assert len(found["boxes"]) > 0 and found["boxes"].isfinite().all()
    assert (found["boxes"] <= torch.tensor([width, height, width, height])).all()
    if kind == "mask_rcnn":
        assert found["masks"].shape[-2:] == size
    mask = torch.zeros(1, *size, dtype=torch.uint8)
    mask[:, height // 2 :, width // 2 :] = 1
    box = torch.tensor([[width // 2, height // 2, width, height]], dtype=torch.float32)
    target = {"boxes": box, "labels": torch.tensor([2]), "masks": mask}
    batch, (scaled,) = model.train().transform([pixels], [target])
    assert sorted(batch.image_sizes[0]) == [1, 96]
    assert scaled["masks"].shape[1:] == batch.tensors.shape[2:] == batch.image_sizes[0]
    share = torch.tensor([batch.image_sizes[0][1] / width, batch.image_sizes[0][0] / height])
    torch.testing.assert_close(scaled["boxes"], box * share.repeat(2))
    assert all(loss.isfinite() for loss in model([pixels], [target]).values())
    usual, _ = model.eval().transform([torch.rand(3, 70, 45)])  # and others as ever
    assert usual.image_sizes == [(74, 48)]


# ---- padding


@torch.no_grad()
@pytest.mark.parametrize(
    ("attention", "gain", "dtype", "box", "score"),
    [
        *(
            (x, 1.5, torch.float64, 1e-9, 1e-10)
            for x in ("quadtree", "spatial_reduction", "window")
        ),
        ("quadtree", 0.7, torch.float32, 1e-4, 1e-5),  # more would magnify rounding errors
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_an_image_gives_the_same_alone_and_in_a_batch(kind, attention, gain, dtype, box, score):
    model = tiny(kind, gain=gain, attention=attention).to(dtype)
    batch = images(dtype)
    for image, found in zip(batch, model(batch), strict=True):
        (alone,) = model([image])
        check_same(found, alone, box, score)
        assert len(alone["scores"].unique()) > 20
        assert set(alone["labels"].tolist()) == {1, 2, 3} or dtype == torch.float32
        # masks are pasted with corners rounded to pixels
        assert ("masks" in alone) == (kind == "mask_rcnn")


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_the_padding_is_seen(kind):
    model = tiny(kind).double()
    batch, _ = model.transform(images())
    filled = batch.tensors.clone()
    for canvas, (height, width) in zip(filled, batch.image_sizes, strict=True):
        canvas[:, height:] = torch.nan
        canvas[:, :, width:] = torch.inf
    expected = model.backbone(batch)
    found = model.backbone(ImageList(filled, batch.image_sizes))
    unmasked = model.backbone(batch.tensors)
    assert [torch.equal(found[name], expected[name]) for name in expected] == [True] * 5
    assert all((unmasked[name] - expected[name]).abs().max() > 1e-3 for name in expected)


@pytest.mark.parametrize("attention", ["quadtree", "focal"])
def test_padding_is_part_of_no_loss(attention):
    """The loss of a batch is the mean of those of its images."""
    model = tiny("retinanet", attention=attention).double().train()
    batch, truth = images(), targets()
    together = model(batch, truth)
    alone = [model([image], [target]) for image, target in zip(batch, truth, strict=True)]
    for name, loss in together.items():
        mean = torch.stack([losses[name] for losses in alone]).mean()
        assert mean > 0.1
        torch.testing.assert_close(loss, mean, rtol=1e-9, atol=0)


def test_anchors_of_the_padding_are_not_proposed_or_learnt_from():
    """With samples for all anchors there is no chance in the losses: they are means over them."""
    model = tiny("mask_rcnn").double().train()
    model.rpn.fg_bg_sampler.batch_size_per_image = 100_000
    model.rpn.fg_bg_sampler.positive_fraction = 1.0
    batch, truth = images()[:2], targets()[:2]

    def proposed(chosen: slice) -> tuple[list[Tensor], dict[str, Tensor], int]:
        """Boxes, losses, and on how many anchors; every one of the canvas."""
        resized, wanted = model.transform(batch[chosen], truth[chosen])
        maps = model.backbone(resized)
        boxes, losses = model.rpn(resized, maps, wanted)
        anchors = model.rpn.anchor_generator(resized, list(maps.values()))
        labels, _ = model.rpn.assign_targets_to_anchors(anchors, wanted)
        return boxes, losses, int((torch.cat(labels) >= 0).sum())

    boxes, losses, on_the_canvas = proposed(slice(2))
    (boxes0, losses0, count0), (boxes1, losses1, count1) = (
        proposed(slice(i, i + 1)) for i in range(2)
    )
    for got, alone in zip(boxes, [*boxes0, *boxes1], strict=True):
        torch.testing.assert_close(got, alone, rtol=0, atol=1e-9)
    assert count0 + count1 < on_the_canvas
    for name, loss in losses.items():
        mean = (losses0[name] * count0 + losses1[name] * count1) / (count0 + count1)
        torch.testing.assert_close(loss, mean, rtol=1e-6, atol=0)  # labels are in float32


# ---- training


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_learns(kind, checkpointing):
    model = tiny(kind, drop_path_rate=0.1).train()
    model.set_grad_checkpointing(checkpointing)
    assert model.backbone.body.stages[0].grad_checkpointing is checkpointing
    losses = model(images(torch.float32), targets())
    assert len(losses) == {"retinanet": 2, "mask_rcnn": 5}[kind]
    assert all(loss.isfinite() and loss > 0 for loss in losses.values())
    sum(losses.values()).backward()
    without = {
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None or not parameter.grad.any() or not parameter.grad.isfinite().all()
    }
    assert without == {"backbone.body.stages.3.blocks.0.attn.level_logits"}  # only one level


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16(kind):
    model = tiny(kind)
    batch = images(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            found = model(batch)
        losses = model.train()(batch, targets())
    with torch.no_grad():  # also as a whole
        found += tiny(kind).bfloat16()([image.bfloat16() for image in batch])
    for one in found:
        assert {x.dtype for name, x in one.items() if name != "labels"} == {torch.float32}
        assert all(x.isfinite().all() for x in one.values())
    assert len(found[0]["boxes"].frac().unique()) > 30  # not what half precision leaves of pixels
    sum(losses.values()).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("label", [1, 3])
def test_labels_count_from_1(label):
    """A head that knows one class: it is found under that label, and learnt from it."""
    model = tiny("retinanet")
    head = model.head.classification_head
    with torch.no_grad():
        head.cls_logits.weight.zero_()
        head.cls_logits.bias.unflatten(0, (-1, 3)).fill_(-8.0)[:, label - 1] = 0.0
        found = model(images(torch.float32))
    assert all(set(one["labels"].tolist()) == {label} for one in found)
    image, target = images(torch.float32)[0], targets()[1]
    losses = [
        model.train()([image], [target | {"labels": torch.tensor([wanted])}])["classification"]
        for wanted in (1, 2, 3)
    ]
    assert losses.index(min(losses)) == label - 1
    with torch.no_grad():
        mask_rcnn = tiny("mask_rcnn", score_thresh=0.5)
        predictor = mask_rcnn.roi_heads.box_predictor.cls_score
        predictor.weight.zero_()
        predictor.bias.fill_(-8.0)[label] = 0.0
        assert all(set(one["labels"].tolist()) == {label} for one in mask_rcnn([image]))
        predictor.bias[0] = 8.0  # background
        (nothing,) = mask_rcnn([image])
    assert nothing["boxes"].shape == (0, 4) and nothing["masks"].shape == (0, 1, 70, 45)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "steps"), [("retinanet", 150), ("mask_rcnn", 60)])
def test_learns_where_things_are_and_what(kind, steps):
    """Two images of different size with a bright and a dark square."""
    torch.manual_seed(1)
    batch, truth = [], []
    for (height, width), corners in (
        ((64, 48), [(8, 4), (36, 20)]),
        ((40, 72), [(12, 40), (8, 8)]),
    ):
        image = torch.full((3, height, width), 0.5) + 0.02 * torch.randn(3, height, width)
        masks = torch.zeros(2, height, width, dtype=torch.uint8)
        for i, (y, x) in enumerate(corners):
            image[:, y : y + 20, x : x + 24] = float(i)
            masks[i, y : y + 20, x : x + 24] = 1
        boxes = torch.tensor([[x, y, x + 24.0, y + 20.0] for y, x in corners])
        batch.append(image)
        truth.append({"boxes": boxes, "labels": torch.tensor([3, 1]), "masks": masks})
    options = {"min_size": 32, "max_size": 64, "channels": 32, "anchor_scale": 2.0}
    if kind == "mask_rcnn":
        options |= {"proposals": 50, "rois_per_image": 32, "anchor_scale": 4.0}
    model = create(f"{kind}_test_quadtree", num_classes=3, **options).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        optimizer.zero_grad()
        sum(model(batch, truth).values()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        found = model.eval()(batch)
    for one, wanted in zip(found, truth, strict=True):
        order = one["labels"][:2].sort(descending=True).indices  # of the two best
        assert one["labels"][order].tolist() == [3, 1] and one["scores"][1] > 0.2
        assert (box_iou(one["boxes"][order], wanted["boxes"]).diag() > 0.7).all()
        if kind == "mask_rcnn":
            masks, true = one["masks"][order, 0] > 0.5, wanted["masks"] > 0
            assert ((masks & true).sum((1, 2)) / (masks | true).sum((1, 2)) > 0.7).all()


def test_training_looks_at_twice_as_many_proposals():
    model = tiny("mask_rcnn", proposals=7)
    batch, truth = model.transform(images(torch.float32), targets())
    maps = model.backbone(batch)
    with torch.no_grad():
        assert max(len(one) for one in model.eval().rpn(batch, maps)[0]) == 7
        assert max(len(one) for one in model.train().rpn(batch, maps, truth)[0]) == 14


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_thresholds_and_sizes_of_a_call(kind):
    model, batch = tiny(kind).float(), images(torch.float32)[:2]
    every = model(batch)
    least = every[0]["scores"].median().item()
    for one, all_of_it in zip(model(batch, score_threshold=least), every, strict=True):
        assert torch.equal(one["scores"], all_of_it["scores"][all_of_it["scores"] >= least])
    heads = getattr(model, "roi_heads", model)
    heads.score_thresh = least  # which no call goes below
    for one, all_of_it in zip(model(batch, score_threshold=0.0), every, strict=True):
        assert torch.equal(one["scores"], all_of_it["scores"][all_of_it["scores"] > least])
    heads.score_thresh = 0.0
    other = create(f"{kind}_test_quadtree", num_classes=3, **SMALL | {"min_size": 64}).float()
    other.load_state_dict(model.state_dict(), strict=kind == "retinanet")
    for one, wanted in zip(model(batch, sides=(64, 96)), other.eval()(batch), strict=True):
        if kind == "retinanet":  # of the others, fewer proposals are looked at
            assert torch.equal(one["boxes"], wanted["boxes"])
        assert not torch.equal(one["scores"][:5], every[0]["scores"][:5])
    again = model(batch)
    assert all(torch.equal(a["boxes"], b["boxes"]) for a, b in zip(again, every, strict=True))


# ---- how they are built


@pytest.mark.parametrize(
    ("name", "params"),
    [
        # 3,332,468 of the backbone; PVTv2-b0 has 13.0 M in RetinaNet, with other keys and values
        ("retinanet_quadtree_b_b0", 12_869_736),
        ("mask_rcnn_quadtree_b_b0", 23_373_161),
    ],
)
def test_parameters_of_the_published_detectors(name, params):
    model = create(name, num_classes=80)
    assert sum(p.numel() for p in model.parameters()) == params
    assert sum(p.numel() for p in model.backbone.body.parameters()) == 3_332_468
    blocks = [block for stage in model.backbone.body.stages for block in stage.blocks]
    assert {k for block in blocks for k in block.attn.topk} == {32}
    assert blocks[0].attn.value_branches[0].activation == "relu"


def test_maps_and_anchors():
    x = torch.randn(1, 3, 100, 140)
    retina, mask = tiny("retinanet"), tiny("mask_rcnn")
    assert retina.backbone.strides == [8, 16, 32, 64, 128]
    assert mask.backbone.strides == [4, 8, 16, 32, 64]
    for model in (retina, mask):
        maps = model.backbone(x)
        for level, stride in zip(maps.values(), model.backbone.strides, strict=True):
            assert level.shape == (1, 16, -(-100 // stride), -(-140 // stride))
    levels = retina.anchor_generator.by_level(list(retina.backbone(x).values()))
    assert [level.shape[1:] for level in levels[:2]] == [(13, 18, 9, 4), (7, 9, 9, 4)]
    sides = levels[0][0, 2, 3]  # around the pixel (24, 16)
    side = 32 * 2 ** (1 / 3)
    torch.testing.assert_close(sides[3], torch.tensor([8.0, 0.0, 40.0, 32.0]))
    half = torch.tensor([-side / 2**0.5, -side * 2**0.5, side / 2**0.5, side * 2**0.5]) / 2
    torch.testing.assert_close(sides[7], torch.tensor([24.0, 16, 24, 16]) + half)
    (coarse, *_) = mask.rpn.anchor_generator.by_level([x[:, :, :2, :2]] * 5)
    torch.testing.assert_close(coarse[0, 1, 0, 1], torch.tensor([-16.0, -12, 16, 20]))


def test_anchors_are_not_rounded_to_the_dtype_of_maps():
    maps = [torch.zeros(1, 1, 2, 300, dtype=torch.bfloat16)]
    (level,) = PyramidAnchors([4], [1.0], [1.0]).by_level(maps)
    assert level.dtype == torch.float32
    torch.testing.assert_close(level[0, 1, 299, 0], torch.tensor([1194.0, 2, 1198, 6]))


def test_extra_maps_come_from_the_last_map_of_the_backbone():
    """Also where the pyramid has as many channels: torchvision would take its own."""
    model = tiny("retinanet", channels=32)
    x = torch.randn(1, 3, 100, 140)
    last = model.backbone.body.forward_features(x)
    p6 = model.backbone.fpn.extra_blocks.p6(last)
    assert last.shape[1] == 32 and torch.equal(model.backbone(x)["p6"], p6)


def test_options_reach_detector_and_backbone():
    options = {"channels": 16, "min_size": (40, 48), "max_size": 64, "image_mean": (0.1, 0.2, 0.3)}
    inner = {"topk": 2, "value_act": "gelu", "backend": "reference", "lepe": False}
    model = create("retinanet_test_quadtree", num_classes=3, **options, **inner)
    attn = model.backbone.body.stages[0].blocks[0].attn
    assert (attn.topk, attn.backend, len(attn.lepe)) == ((2, 2, 2), "reference", 0)
    assert attn.value_branches[0].activation == "gelu"
    assert model.transform.image_mean == [0.1, 0.2, 0.3] and model.transform.max_size == 64
    assert tuple(model.transform.min_size) == (40, 48)
    plain = tiny("mask_rcnn", variant="A")  # has no learned value pyramid, and K 32 all the same
    assert plain.backbone.body.stages[0].blocks[0].attn.topk == (32, 32, 32)
    windows = tiny("retinanet", attention="window", attention_options={"window_size": 5})
    assert windows.backbone.body.stages[0].blocks[0].attn.window_size == 5
    names = model.no_weight_decay()
    assert len(names) == 5 and names < dict(model.named_parameters()).keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topq": 3}, "got 'topq'; did you mean topk"),
        ({"num_classes": 0}, "num_classes must be at least 1, got 0"),
        ({"min_size": ()}, "min_size must be one size or several, got none"),
        ({"min_size": (64, 0)}, "min_size must be at least 1, got 0"),
        ({"anchor_scale": 0}, r"above 0, got 0 and \(0\.5, 1\.0, 2\.0\)"),
        ({"global_pool": "avg"}, "got 'global_pool'; "),
        (
            {"attention": "window", "topk": 3},
            "accept options of quadtree attention, got topk=3",
        ),
    ],
)
def test_options_that_are_refused(options, message):
    options = {"num_classes": 3} | options
    raises(OptionError, message, create, "retinanet_test_quadtree", **options)


# ---- weights of a backbone


def test_backbone_weights_of_a_classifier(tmp_path):
    classifier = timm.create_model("test_quadtree", num_classes=7)
    path = tmp_path / "best.safetensors"
    card = {"model": "test_quadtree", "kwargs": {"num_classes": 7}}
    save_weights(path, classifier.state_dict(), card)
    model = create("mask_rcnn_test_quadtree", num_classes=3, channels=16, backbone_weights=path)
    for name, parameter in model.backbone.body.named_parameters():
        assert torch.equal(parameter, classifier.get_parameter(name)), name

    def refused(message, name="retinanet_test_quadtree", path=path, **options):
        options |= {"num_classes": 3, "backbone_weights": path}
        raises(CheckpointError, message, create, name, **options)

    refused(r"best\.safetensors holds no weights of this .* mis", "retinanet_quadtree_b_b0")
    refused(r"no weights of this .*stages\.0\.blocks\.0\.attn", attention="window")
    refused("there is no file", path=tmp_path / "none.safetensors")
    official = {"backbone.patch_embed1.proj.weight": torch.zeros(1)}
    torch.save({"state_dict": official}, tmp_path / "official.pth")
    refused(r"an official checkpoint, .* quadtree convert ", path=tmp_path / "official.pth")
    state = model.backbone.body.state_dict()
    state["stages.0.norm.bias"] = torch.full((8,), torch.nan)
    torch.save(state, tmp_path / "nan.pth")
    refused(r"not finite, in stages\.0\.norm\.bias", path=tmp_path / "nan.pth")


# ---- bad input


def test_images_that_are_refused():
    model = tiny("retinanet")
    image = torch.rand(3, 4, 5)
    raises(ShapeError, r"list of \(3, y, x\), .* a tensor \(1, 3, 4, 5\)", model, image[None])
    raises(ShapeError, "one or more, got nothing", model, [])
    raises(ShapeError, r"images\[1\]\.shape=\(1, 4, 5\)", model, [image, image[:1]])
    message = r"images\[0\]\.dtype=torch\.uint8; divide bytes by 255"
    raises(DTypeError, message, model, [image.byte()])


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"labels": torch.tensor([0, 1])}, OptionError, r"in .1, num_classes=3., 0 is .* got 0 in"),
        ({"labels": torch.tensor([4, 1])}, OptionError, r"got 4 in targets\[0\]; count"),
        ({"labels": torch.tensor([1])}, ShapeError, r"labels must be \(2,\) here, got targets\[0"),
        ({"labels": torch.tensor([1.0, 1.0])}, DTypeError, "int64, got .* torch.float32; convert"),
        ({"boxes": torch.tensor([[4.0, 5, 4, 9]] * 2)}, OptionError, r"got \[4\.0, 5\.0, 4\.0, 9"),
        ({"boxes": torch.zeros(2, 5)}, ShapeError, r"boxes must be \(2, 4\) here"),
        ({"masks": torch.zeros(2, 7, 7)}, ShapeError, r"masks must be \(2, 70, 45\) here, got tar"),
    ],
)
def test_targets_that_are_refused(change, kind, message):
    model = tiny("mask_rcnn").train()
    raises(kind, message, model, images(torch.float32)[:1], [targets()[0] | change])


def test_targets_that_are_missing():
    model = tiny("mask_rcnn").train()
    batch, truth = images(torch.float32), targets()
    raises(ShapeError, "one target for each of the 3 images, got none; pass", model, batch)
    raises(ShapeError, "each of the 3 images, got 2", model, batch, truth[:2])
    del truth[1]["masks"]
    raises(ShapeError, r"boxes, labels, masks, got targets\[1\] without masks", model, batch, truth)
