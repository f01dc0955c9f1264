# SPDX-License-Identifier: Apache-2.0
"""A small plain vision transformer with dense attention, trained on 20 classes of Tiny ImageNet.

    python -m benchmarks.vit --data tiny_imagenet_20 --out vit_tiny20.safetensors --device cuda

`quality accelerate` puts variant C into it. It has a class token, patches of 4 pixels, 28x28 tokens
at 112 pixels and positions that are interpolated at other sizes. It is trained at 14x14 tokens
first, then at 28x28. Needs torch, torchvision, numpy, timm and safetensors only.
"""

import argparse
import math
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

PATCH, SIDE, CLASSES = 4, 112, 20  # pixels of a patch and of an image, classes
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CROP = 0.35  # least share of an image that a training crop covers


def make_vit() -> nn.Module:
    """The network, with random weights."""
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=SIDE, patch_size=PATCH, num_classes=CLASSES, embed_dim=128, depth=6, num_heads=4,
        drop_path_rate=0.05, dynamic_img_size=True,
    )  # fmt: skip


def load_vit(path: Path) -> nn.Module:
    """The trained network, ready to evaluate."""
    from safetensors.torch import load_file

    model = make_vit()
    model.load_state_dict(load_file(path))
    return model.eval()


def read_images(path: Path) -> tuple[Tensor, Tensor]:
    """Images (N, 3, 64, 64) uint8 and labels (N,) of a file of the data set."""
    from torchvision.io import ImageReadMode, decode_jpeg

    with np.load(path) as file:
        data, ends = torch.from_numpy(file["data"]), file["offsets"].tolist()
        labels = torch.from_numpy(file["labels"])
    images = [decode_jpeg(data[start:end], mode=ImageReadMode.RGB) for start, end in pairwise(ends)]
    return torch.stack(images), labels


def normalised(images: Tensor, side: int) -> Tensor:
    """Images of bytes as the network takes them, enlarged to `side` pixels."""
    x = F.interpolate(images.float() / 255, (side, side), mode="bicubic", align_corners=False)
    mean, std = (x.new_tensor(numbers).view(1, 3, 1, 1) for numbers in (MEAN, STD))
    return (x.clamp(0, 1) - mean) / std


def augmented(images: Tensor, side: int) -> Tensor:
    """Random crops and flips with random brightness and contrast, one of each image."""
    count, device = len(images), images.device
    scale = torch.empty(count, 1, device=device).uniform_(CROP, 1).sqrt()
    stretch = torch.empty(count, 1, device=device).uniform_(math.log(3 / 4), math.log(4 / 3)).exp()
    size = (scale * torch.cat([stretch.sqrt(), stretch.rsqrt()], 1)).clamp(max=1)  # of x and y
    shift = (torch.rand(count, 2, device=device) * 2 - 1) * (1 - size)
    flip = torch.where(torch.rand(count, device=device) < 0.5, -1.0, 1.0)
    theta = torch.zeros(count, 2, 3, device=device)
    theta[:, 0, 0], theta[:, 1, 1] = size[:, 0] * flip, size[:, 1]
    theta[:, :, 2] = shift
    grid = F.affine_grid(theta, [count, 3, side, side], align_corners=False)
    x = F.grid_sample(
        images.float() / 255, grid, mode="bilinear", padding_mode="reflection", align_corners=False
    )
    contrast, brightness = torch.empty(2, count, 1, 1, 1, device=device).uniform_(-0.3, 0.3)
    x = ((x - 0.5) * (1 + contrast) + 0.5 + 0.5 * brightness).clamp(0, 1)
    mean, std = (x.new_tensor(numbers).view(1, 3, 1, 1) for numbers in (MEAN, STD))
    return (x - mean) / std


def mixed(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """A batch with half of its images mixed by pasting boxes, and soft labels."""
    targets = F.one_hot(labels, CLASSES).float()
    if torch.rand(()) < 0.5:
        return x, targets
    share = float(torch.distributions.Beta(1.0, 1.0).sample())
    side = x.shape[-1]
    length = round(side * math.sqrt(1 - share))
    top, left = (int(torch.randint(0, side - length + 1, ())) for _ in range(2))
    order = torch.randperm(len(x), device=x.device)
    x = x.clone()
    box = (..., slice(top, top + length), slice(left, left + length))
    x[box] = x[order][box]
    kept = 1 - (length / side) ** 2
    return x, kept * targets + (1 - kept) * targets[order]


@torch.no_grad()
def top1(model: nn.Module, images: Tensor, labels: Tensor, side: int, batch: int = 100) -> float:
    """Share of images whose class is found, in percent."""
    right = 0
    for x, y in zip(images.split(batch), labels.split(batch), strict=True):
        right += int((model(normalised(x, side)).argmax(-1) == y).sum())
    return 100 * right / len(images)


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    device = torch.device(options.device)
    images, labels = (x.to(device) for x in read_images(options.data / "train.npz"))
    val_images, val_labels = (x.to(device) for x in read_images(options.data / "val.npz"))
    model = make_vit().to(device)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.998)
    )
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, fused=device.type == "cuda")
    steps_each = len(images) // options.batch
    for stage, (epochs, side) in enumerate(zip(options.epochs, (SIDE // 2, SIDE), strict=True)):
        peak = options.lr if stage == 0 else options.lr / 2
        for epoch in range(epochs):
            began, total = time.perf_counter(), torch.zeros((), device=device)
            model.train()
            order = torch.randperm(len(images), device=device)
            for step in range(steps_each):
                done = (epoch * steps_each + step) / (epochs * steps_each)
                rate = peak * min(1, done / 0.05) * (0.5 + 0.5 * math.cos(math.pi * done)) + 1e-6
                for group in optimizer.param_groups:
                    group["lr"] = rate
                chosen = order[step * options.batch : (step + 1) * options.batch]
                x, targets = mixed(augmented(images[chosen], side), labels[chosen])
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    loss = F.cross_entropy(model(x).float(), targets, label_smoothing=0.1)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                average.update_parameters(model)
                total += loss.detach()
            if epoch % 5 == 4 or epoch == epochs - 1:
                average.eval()
                score = top1(average.module, val_images, val_labels, side)
                print(
                    f"{side // PATCH}x{side // PATCH} tokens, epoch {epoch + 1}: loss "
                    f"{total.item() / steps_each:.3f}, top-1 {score:.1f} %, "
                    f"{time.perf_counter() - began:.1f} s",
                    flush=True,
                )
        save(average.module, options.out)
    print(f"written: {options.out}")


def save(model: nn.Module, path: Path) -> None:
    from safetensors.torch import save_file

    state: dict[str, Any] = {
        k: v.detach().cpu().contiguous() for k, v in model.state_dict().items()
    }
    save_file(state, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with train.npz and val.npz")
    add("--out", type=Path, required=True, help="safetensors file")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--epochs", type=lambda text: [int(x) for x in text.split(",")], default=[80, 30],
        help="at 14x14 and at 28x28 tokens; default: 80,30")  # fmt: skip
    add("--batch", type=int, default=256)
    add("--lr", type=float, default=1e-3)
    add("--seed", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
