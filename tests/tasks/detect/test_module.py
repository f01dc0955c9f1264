# SPDX-License-Identifier: Apache-2.0
"""Training: runs end with weights that detect, resume exactly, and report AP as it is."""

import copy

import pytest
import torch

pl = pytest.importorskip("pytorch_lightning", reason="training needs the extra 'train'")
pytest.importorskip("faster_coco_eval", reason="AP needs faster-coco-eval")

from quadtree_attention.errors import DataError, OptionError  # noqa: E402
from quadtree_attention.models.weights import save_weights  # noqa: E402
from quadtree_attention.tasks.detect.data import DetectData  # noqa: E402
from quadtree_attention.tasks.detect.module import DetectModule, _metric, gather_states  # noqa: E402
from quadtree_attention.tasks.detect.predictor import Detector  # noqa: E402
from tests.tasks.detect.files import SHARED, TINY, entry, write_split  # noqa: E402

pytestmark = pytest.mark.usefixtures("only_reference")
OPTIONS = {**TINY, "anchor_scale": 2.0}
MASKS = {**OPTIONS, "proposals": 20, "rois_per_image": 16}


def module(model="retinanet_test_quadtree", **more):
    options = MASKS if model.startswith("mask") else OPTIONS
    return DetectModule(model, {**options}, num_classes=3, **{"warmup_epochs": 0.5, **more})


def data(**more):
    options = {"source": "generated", "generated_count": 8, "generated_size": 64, "workers": 0}
    return DetectData(**{**options, "batch_size": 2, "jitter": 0.2, "crop": 0.5, **more})


def trainer(folder, **more):
    options = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "logger": False,
        "enable_model_summary": False,
    }
    quiet = {"enable_progress_bar": False, "num_sanity_val_steps": 0}
    return pl.Trainer(**{**options, **quiet, "default_root_dir": str(folder), **more})


class SaveAt(pl.Callback):
    """Stores the state after a step, as a run that is killed there would have it."""

    def __init__(self, step, path):
        self.step = step
        self.path = path

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def test_resume_is_exact_and_weights_detect(tmp_path):
    """A run that stopped in the middle of an epoch ends with the same weights, bit for bit."""
    checkpoint = tmp_path / "middle.ckpt"
    whole = module()
    first = trainer(tmp_path, callbacks=[SaveAt(6, checkpoint)], enable_checkpointing=False)
    first.fit(whole, datamodule=data())
    assert first.global_step == 8
    resumed = module(seed=5)  # other weights before the checkpoint is read
    again = trainer(tmp_path, enable_checkpointing=False)
    resumed.hparams["seed"] = 0
    again.fit(resumed, datamodule=data(), ckpt_path=checkpoint)
    for (name, a), b in zip(
        whole.model.state_dict().items(), resumed.model.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name
    names = {"val/ap", "val/ap50", "val/ap75", "train/loss", "train/classification_loss"}
    assert names <= first.callback_metrics.keys()

    path = tmp_path / "best.safetensors"
    save_weights(path, whole.weights(whole.state_dict()), whole.card())
    detector = Detector(path, device="cpu", score=0.0)
    assert detector.names == ["disc", "square", "triangle"]
    image, _ = data()._open("val").read(0)
    pixels = torch.rand(3, 48, 64)
    with torch.no_grad():
        expected = whole.eval()([pixels])[0]
    assert torch.allclose(detector.model([pixels])[0]["boxes"], expected["boxes"], atol=1e-5)
    assert len(detector(image).boxes) == len(detector(image).names)


def test_mask_rcnn_trains_and_is_scored_by_masks(tmp_path):
    model = module("mask_rcnn_test_quadtree")
    before = copy.deepcopy(model.model.state_dict())
    run = trainer(tmp_path, max_epochs=1, limit_train_batches=2, enable_checkpointing=False)
    run.fit(model, datamodule=data(masks=True))
    assert {
        "val/ap",
        "val/mask_ap",
        "val/mask_ap50",
        "train/mask_loss",
    } <= run.callback_metrics.keys()
    after = model.model.state_dict()
    untouched = [
        name
        for name, p in model.model.named_parameters()
        if p.numel() > 1 and torch.equal(before[name], after[name])
    ]  # a choice among one level alone has no gradient
    assert not untouched
    with pytest.raises(OptionError, match=r"learns masks, .* --data\.masks true"):
        trainer(tmp_path, enable_checkpointing=False).fit(model, datamodule=data())


def test_ap_of_the_truth_is_100_and_follows_mistakes():
    """Fed with the objects themselves, with and without their masks moved."""
    logged = {}

    class Recorder(DetectModule):
        def log(self, name, value, **_):
            logged[name] = float(value)

    model = Recorder("mask_rcnn_test_quadtree", MASKS, num_classes=3)
    source = data(masks=True)._open("val")
    targets = [source.read(i)[1] for i in range(len(source))]
    for shift in (0, 6):
        for target in targets:
            masks = target["masks"].roll(shift, dims=2)[:, None].float()
            answer = {k: target[k] for k in ("boxes", "labels")} | {"masks": masks}
            answer["scores"] = torch.ones(len(masks))
            model.ap.update([model._on_cpu(answer)], [model._on_cpu(target)])
        model.on_validation_epoch_end()
        assert logged["val/ap"] == pytest.approx(100)
        assert (logged["val/mask_ap"] == pytest.approx(100)) == (shift == 0)


def seen_by_metric(images):
    """A metric that has seen some of three images of shapes, found more or less well."""
    metric = _metric(masks=True)
    source = data(masks=True, generated_count=12)._open("val")
    for i in images:
        target = source.read(i)[1]
        scores = torch.arange(1, len(target["labels"]) + 1) / (10 * (i + 1))
        found = {"boxes": target["boxes"] + 3 * i, "labels": target["labels"], "scores": scores}
        found["masks"] = target["masks"].roll(2 * i, dims=2)
        metric.update([found], [target])
    return metric


def on_one_of_two(rank, folder):
    """What one process makes of its share: the first has one image more."""
    distributed = torch.distributed
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    metric = seen_by_metric(range(rank, 3, 2))
    gather_states(metric)
    torch.save(metric.compute(), folder / f"{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


def test_ap_of_two_processes_is_that_of_one(tmp_path):
    expected = seen_by_metric(range(3)).compute()
    alone = seen_by_metric(range(0, 3, 2)).compute()
    assert 0 < expected["bbox_map"] < 1 and expected["bbox_map"] != alone["bbox_map"]
    torch.multiprocessing.spawn(on_one_of_two, args=(tmp_path,), nprocs=2)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


def test_validation_images_that_cannot_be_read_do_not_count(tmp_path):
    """Batches may be empty; where all are, the run ends with the reason."""
    for split in ("train", "val"):
        write_split(tmp_path, split, annotations=[entry(1, [2, 3, 10, 8])])
    (tmp_path / "images" / "val" / "2.png").write_bytes(b"broken")
    seen = []

    class Counting(DetectModule):
        def on_validation_epoch_end(self):
            seen.append(len(self.ap.groundtruth_labels))
            super().on_validation_epoch_end()

    files = DetectData(root=str(tmp_path), batch_size=1, workers=0)
    model = Counting("retinanet_test_quadtree", OPTIONS, num_classes=3)
    trainer(tmp_path, enable_checkpointing=False).validate(model, files, verbose=False)
    assert seen == [1] and len(model.skipped) == 1
    (tmp_path / "images" / "val" / "1.png").write_bytes(b"broken")
    with pytest.raises(DataError, match=r"none of the validation images can be read: .*1\.png"):
        trainer(tmp_path, enable_checkpointing=False).validate(module(), files, verbose=False)


def rates(tmp_path, **options):
    """Learning rates of all steps of a run."""
    seen = []

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer, *_):
            seen.append(trainer.optimizers[0].param_groups[0]["lr"])

    class Idle(DetectModule):
        def training_step(self, batch):
            return sum(p.sum() for p in self.parameters()) * 0

    model = Idle("retinanet_test_quadtree", OPTIONS, lr=1.6, warmup_epochs=0.5, **options)
    run = trainer(tmp_path, max_epochs=4, limit_val_batches=0, enable_checkpointing=False)
    run.callbacks.append(Watch())
    run.fit(model, datamodule=data(crop=0.0))
    return [rate / (1.6 * 2 / 16) for rate in seen]  # 4 steps an epoch, 2 images a batch


def test_schedules(tmp_path):
    steps = rates(tmp_path, schedule="step", decay_epochs=[2, 3])
    assert steps[0] < 1e-5 and steps[1] == pytest.approx(0.5, abs=1e-4)  # half an epoch of warm-up
    assert steps[2:] == pytest.approx([1] * 6 + [0.1] * 4 + [0.01] * 4)
    cosine = rates(tmp_path, schedule="cosine", min_lr=0.0)
    assert cosine[2] > cosine[8] > cosine[15] > 0 and cosine[8] == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("num_classes", "the data"),
        ("backbone_weights", "--model.backbone_weights"),
        ("grad_checkpointing", "--model.grad_checkpointing"),
    ],
)
def test_options_that_the_module_has_itself(name, instead):
    with pytest.raises(OptionError, match=f"must not name {name}, which is set by {instead}; "):
        DetectModule("retinanet_test_quadtree", {**OPTIONS, name: 3})


def test_options_that_do_not_do():
    with pytest.raises(OptionError, match="schedule must be step or cosine, got 'poly'"):
        module(schedule="poly")
    with pytest.raises(OptionError, match="decay_epochs must be above 0 and rise"):
        module(decay_epochs=[11, 8])
    with pytest.raises(OptionError, match="did you mean retinanet_test_quadtree"):
        module("retinanet_test_quadtre")


@pytest.mark.slow
def test_overfits_four_photographs(tmp_path):
    """13 objects of 7 classes; four minutes on one core."""
    if not (SHARED / "coco_mini").is_dir():
        pytest.skip("there is no ../shared/data/coco_mini beside the checkout")
    root = SHARED / "coco_mini"
    paths = {
        f"{split}_{what}": str(path)
        for split in ("train", "val")
        for what, path in (
            ("images", root / "images" / "train"),
            ("annotations", root / "annotations" / "instances_train.json"),
        )
    }
    photos = DetectData(**paths, limit_images=4, batch_size=4, flip=0.0, masks=True, workers=0)
    options = {"channels": 64, "min_size": 160, "max_size": 256, "anchor_scale": 4.0}
    model = DetectModule(
        "mask_rcnn_test_quadtree",
        {**options, "proposals": 100, "rois_per_image": 64, "embed_dims": (16, 32, 48, 64)},
        num_classes=80,
        lr=8e-3,  # 2e-3 at a batch of 4
        warmup_epochs=20,
        weight_decay=0.0,
        schedule="cosine",
    )
    run = trainer(
        tmp_path,
        max_epochs=350,  # of one step
        check_val_every_n_epoch=350,
        gradient_clip_val=1.0,
        enable_checkpointing=False,
    )
    run.fit(model, datamodule=photos)
    assert run.callback_metrics["val/ap"] > 90
