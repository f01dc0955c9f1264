# SPDX-License-Identifier: Apache-2.0
"""A small plain vision transformer with dense attention, trained on 20 classes of Tiny ImageNet.

    python -m benchmarks.vit --data tiny_imagenet_20 --out vit_tiny20.safetensors --device cuda

`quality accelerate` puts variant C into it. It has a class token, patches of 4 pixels, 28x28 tokens
at 112 pixels and positions that are interpolated at other sizes. It is trained at 14x14 tokens
first, then at 28x28, each for a number of minutes. A JSON file of the same name has the history.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_model, save_model
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.models import VisionTransformer
from timm.utils import ModelEmaV3, random_seed
from torch import Tensor, nn
from torchvision.transforms.functional import normalize

from quadtree_attention.tasks.classify.augment import BatchAugment
from quadtree_attention.tasks.classify.predictor import MEAN, STD
from quadtree_attention.tasks.classify.readers import open_source

PATCH, SIDE, CLASSES = 4, 112, 20  # pixels of a patch and of an image, classes
CROP = 0.35  # least share of an image that a training crop covers
LIGHT = 0.3  # most by which brightness and contrast of a training image change
LR, DECAY = 1e-3, 0.995  # highest learning rate, decay of the mean of the weights
MIXED = 0.2  # share of batches with boxes of other images
VALIDATE = 4  # epochs

SIDES = (28, 56, 112)  # tokens of the images it is measured on
VARIANTS: dict[str, dict[str, bool]] = {  # options of `accelerate`
    "C": {},
    "C exact queries": {"exact_queries": True},
    "C lookahead": {"lookahead": True},
}


def make_vit() -> VisionTransformer:
    """The network, with random weights."""
    return VisionTransformer(
        img_size=SIDE,
        patch_size=PATCH,
        num_classes=CLASSES,
        embed_dim=128,
        depth=6,
        num_heads=4,
        drop_path_rate=0.05,
        patch_drop_rate=0.5,
        dynamic_img_size=True,
    )


def load_vit(path: Path) -> VisionTransformer:
    """The trained network, ready to evaluate."""
    model = make_vit()
    load_model(model, path)
    return model.eval()


def read_images(root: Path, split: str, count: int | None = None) -> tuple[Tensor, Tensor]:
    """The first images (N, 3, H, W) uint8 and labels (N,) of a split of the data set."""
    source = open_source(root, split=split)
    labels = torch.tensor(source.labels[:count])
    images = [np.asarray(source.images(i)[0].convert("RGB")) for i in range(len(labels))]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2), labels


def normalised(images: Tensor, side: int) -> Tensor:
    """Images of bytes as the network takes them, enlarged to `side` pixels."""
    x = F.interpolate(images.float() / 255, (side, side), mode="bicubic", align_corners=False)
    return normalize(x.clamp(0, 1), MEAN, STD)


def augmented(images: Tensor, side: int) -> Tensor:
    """Random crops and flips with random brightness and contrast, one of each image."""
    x = BatchAugment(side, scale=(CROP, 1.0))(images.float() / 255)
    contrast, brightness = x.new_empty(2, len(x), 1, 1, 1).uniform_(-LIGHT, LIGHT)
    x = (x - 0.5) * (1 + contrast) + 0.5 + 0.5 * brightness
    return normalize(x.clamp(0, 1), MEAN, STD)


@torch.no_grad()
def top1(model: nn.Module, images: Tensor, labels: Tensor, side: int) -> float:
    """Share of images whose class is found, in percent."""
    right = 0
    for x, y in zip(images.split(100), labels.split(100), strict=True):
        with torch.autocast(x.device.type, torch.bfloat16):
            right += int((model(normalised(x, side)).argmax(-1) == y).sum())
    return 100 * right / len(images)


def train(options: argparse.Namespace) -> None:
    """Trains the network in two stages, and writes the mean of its weights and the history."""
    random_seed(options.seed)
    device = torch.device(options.device)
    images, labels = (x.to(device) for x in read_images(options.data, "train"))
    validation = [x.to(device) for x in read_images(options.data, "val")]
    model = make_vit().to(device)
    average = ModelEmaV3(model, decay=DECAY).eval()
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    known = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in known]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=LR, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=LR, weight_decay=0.0),
    ]
    mix = Mixup(mixup_alpha=0.0, cutmix_alpha=1.0, prob=MIXED, num_classes=CLASSES)
    loss_of = SoftTargetCrossEntropy()
    each, history = len(images) // options.batch, list[dict[str, Any]]()
    stages = zip(options.minutes, (SIDE // 2, SIDE), options.keep, (LR, LR / 2), strict=True)
    for minutes, side, keep, peak in stages:
        model.train().patch_drop.prob = 1 - keep
        seconds, step, total, since = 0.0, 0, torch.zeros((), device=device), 0
        while seconds < 60 * minutes:
            began, done = time.monotonic(), seconds / (60 * minutes)
            rate = peak * min(1, done / 0.05) * (0.5 + 0.5 * math.cos(math.pi * done)) + 1e-6
            for group in (group for one in optimizers for group in one.param_groups):
                group["lr"] = rate
            chosen = torch.randint(len(images), (options.batch,)).to(device)
            x, targets = mix(augmented(images[chosen], side), labels[chosen])
            with torch.autocast(device.type, torch.bfloat16):
                loss = loss_of(model(x).float(), targets)
            model.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
            average.update(model)
            step, total, since = step + 1, total + loss.detach(), since + 1
            seconds += time.monotonic() - began
            if step % (VALIDATE * each) == 0 or seconds >= 60 * minutes:
                history.append({
                    "tokens": (side // PATCH) ** 2, "epochs": round(step / each, 2),
                    "loss": round(total.item() / since, 4),
                    "top1": round(top1(average.module, *validation, side), 2),
                    "seconds": round(seconds),
                })  # fmt: skip
                print(json.dumps(history[-1]), flush=True)
                total, since = torch.zeros((), device=device), 0
    save_model(average.module, options.out)
    options.out.with_suffix(".json").write_text(json.dumps(history, indent=1) + "\n")
    print(f"written: {options.out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with train.npz and val.npz")
    add("--out", type=Path, required=True, help="safetensors file")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    numbers: Any = lambda text: [float(x) for x in text.split(",")]  # noqa: E731
    add("--minutes", type=numbers, default=[1.2, 2.6],
        help="time at 14x14 and at 28x28 tokens; default: 1.2,2.6")  # fmt: skip
    add("--keep", type=numbers, default=[0.5, 1.0],
        help="share of the patches that a step has, in each stage; default: 0.5,1")  # fmt: skip
    add("--batch", type=int, default=128)
    add("--seed", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
