# SPDX-License-Identifier: Apache-2.0
"""Training: runs end with weights that detect, resume exactly, and report AP as it is."""

import copy
from dataclasses import replace

import pytest
import torch

from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.models.weights import save_weights
from quadtree_attention.tasks.detect import module as made
from quadtree_attention.tasks.detect.data import DetectData, GeneratedDetectData
from quadtree_attention.tasks.detect.generated import GeneratedShapes
from quadtree_attention.tasks.detect.metrics import DetectMetric
from quadtree_attention.tasks.detect.module import DetectModule, as_trained
from quadtree_attention.tasks.detect.predictor import Detector, detections
from quadtree_attention.tasks.detect.readers import open_source
from tests.support.training import SaveAt, fit, trainer
from tests.tasks.detect.files import SHARED, TINY, entry, write_split

pytestmark = pytest.mark.usefixtures("only_reference")
OPTIONS = {**TINY, "anchor_scale": 2.0}
MASKS = {**OPTIONS, "proposals": 20, "rois_per_image": 16}
LIKE_TRAINING = {"overlaps": made.OVERLAPS, "recalls": made.RECALLS}


def module(model="retinanet_test_quadtree", **more):
    options = MASKS if model.startswith("mask") else OPTIONS
    return DetectModule(model, {**options}, num_classes=3, **{"warmup_epochs": 0.5, **more})


def data(**more):
    options = {"generated_count": 8, "generated_size": 64, "workers": 0}
    return GeneratedDetectData(**{**options, "batch_size": 2, "jitter": 0.2, "crop": 0.5, **more})


def test_resume_is_exact_and_weights_detect(tmp_path):
    """A run that stopped in the middle of an epoch ends with the same weights, bit for bit."""
    checkpoint = tmp_path / "middle.ckpt"
    whole, resumed = module(), module(seed=5)  # other weights before the checkpoint is read
    first = fit(tmp_path, whole, data(), SaveAt(6, checkpoint), max_epochs=2)
    assert first.global_step == 8
    resumed.hparams["seed"] = 0
    fit(tmp_path, resumed, data(), checkpoint=checkpoint, max_epochs=2)
    again = resumed.model.state_dict()
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(again[name], tensor), name
    names = {"val/ap", "val/ap50", "val/ap75", "train/loss", "train/classification_loss"}
    assert names <= first.callback_metrics.keys()

    path = tmp_path / "best.safetensors"
    save_weights(path, whole.weights(whole.state_dict()), whole.card())
    detector = Detector.from_pretrained(path, device="cpu", threshold=0.0)
    assert detector.names == ["disc", "square", "triangle"]
    (image,) = data().open("val").images(0)
    pixels = torch.rand(3, 48, 64)
    with torch.no_grad():
        expected = whole.model.eval()([pixels])[0]
    assert torch.allclose(detector.network([pixels])[0]["boxes"], expected["boxes"], atol=1e-5)
    assert len(detector(image).boxes) == len(detector(image).names)


def test_mask_rcnn_trains_and_is_scored_by_masks(tmp_path):
    model = module("mask_rcnn_test_quadtree")
    before = copy.deepcopy(model.model.state_dict())
    run = fit(tmp_path, model, data(masks=True), max_epochs=1, limit_train_batches=2)
    names = {"val/ap", "val/mask_ap", "val/mask_ap50", "train/mask_loss"}
    assert names <= run.callback_metrics.keys()
    after = {name: p for name, p in model.model.named_parameters() if p.numel() > 1}
    # a choice among one level alone has no gradient
    assert not [name for name, p in after.items() if torch.equal(before[name], p)]
    with pytest.raises(OptionError, match=r"learns masks, .* --data\.masks true"):
        fit(tmp_path, model, data(), max_epochs=1)


def test_boxes_are_scored_as_they_are_trained_on(tmp_path):
    write_split(tmp_path, annotations=[entry(1, [-5, 20, 10, 30])])
    truth = open_source(tmp_path, split="val").truth(0)
    assert truth.annotations[0].given == (-5, 20, 10, 30)
    assert as_trained(truth).annotations[0].given == (0, 20, 5, 10)


def test_ap_of_the_truth_is_100_and_follows_mistakes():
    """Fed with the objects themselves, with and without their masks moved."""
    model, source = module("mask_rcnn_test_quadtree"), GeneratedShapes(2, 64, seed=1)
    for shift in (0, 6):
        metric = DetectMetric(source, **LIKE_TRAINING)
        for i in range(len(source)):
            answer = source.truth(i).target(masks=True)
            answer["masks"] = answer["masks"].roll(shift, dims=2)[:, None].float()
            answer["scores"] = torch.ones(len(answer["masks"]))
            metric.update(str(i), source.truth(i), detections(answer, source.classes))
        found = model.scores(metric)
        assert found["ap"] == pytest.approx(100)
        assert (found["mask_ap"] == pytest.approx(100)) == (shift == 0)
    nothing = DetectMetric(source)
    assert model.scores(nothing) == {}
    nothing.update("0", source.truth(0), None)
    assert set(model.scores(nothing).values()) == {0.0} and len(model.scores(nothing)) == 6
    empty = DetectMetric(source)
    empty.update("0", replace(source.truth(0), annotations=()), None)
    assert model.scores(empty)["ap"] == -100  # never the best epoch


def test_validation_images_that_cannot_be_read_do_not_count(tmp_path):
    """Batches may be empty; where all are, the run ends with the reason."""
    for split in ("train", "val"):
        write_split(tmp_path, split, annotations=[entry(1, [2, 3, 10, 8])])
    (tmp_path / "images" / "val" / "2.png").write_bytes(b"broken")
    seen = []

    class Counting(DetectModule):
        def on_validation_epoch_end(self):
            seen.append(len(self.metric.rows))
            super().on_validation_epoch_end()

    files = DetectData(root=str(tmp_path), batch_size=1, workers=0)
    model = Counting("retinanet_test_quadtree", OPTIONS, num_classes=3)
    trainer(tmp_path).validate(model, files, verbose=False)
    assert seen == [1] and len(model.skipped) == 1
    (tmp_path / "images" / "val" / "1.png").write_bytes(b"broken")
    with pytest.raises(DataError, match=r"none of the validation samples can be scored: .*1\.png"):
        trainer(tmp_path).validate(module(), files, verbose=False)


@pytest.mark.slow
def test_overfits_four_photographs(tmp_path):
    """13 objects of 7 classes; four minutes on one core."""
    if not (SHARED / "coco_mini").is_dir():
        pytest.skip("there is no ../shared/data/coco_mini beside the checkout")
    images = SHARED / "coco_mini" / "images" / "train"
    annotations = SHARED / "coco_mini" / "annotations" / "instances_train.json"
    paths = {"train_images": images, "val_images": images}
    paths |= {"train_annotations": annotations, "val_annotations": annotations}
    paths = {name: str(path) for name, path in paths.items()}
    photos = DetectData(**paths, limit_images=4, batch_size=4, flip=0.0, masks=True, workers=0)
    options = {"channels": 64, "min_size": 160, "max_size": 256, "anchor_scale": 4.0}
    options |= {"proposals": 100, "rois_per_image": 64, "embed_dims": (16, 32, 48, 64)}
    learning = {"lr": 8e-3, "warmup_epochs": 20, "weight_decay": 0.0, "schedule": "cosine"}
    model = DetectModule("mask_rcnn_test_quadtree", options, num_classes=80, **learning)
    epochs = {"max_epochs": 350, "check_val_every_n_epoch": 350}  # of one step
    run = fit(tmp_path, model, photos, gradient_clip_val=1.0, **epochs)
    assert run.callback_metrics["val/ap"] > 90
