# SPDX-License-Identifier: Apache-2.0
"""A small plain vision transformer with dense attention, trained on 20 classes of Tiny ImageNet.

    python -m benchmarks.vit --data tiny_imagenet_20 --out vit_tiny20.safetensors --device cuda

`quality accelerate` puts variant C into it. It has a class token, patches of 4 pixels, 28x28 tokens
at 112 pixels and positions that are interpolated at other sizes. It is trained at 14x14 tokens
first, then at 28x28. A JSON file of the same name has the history. Needs torch, numpy, pillow and
safetensors only.
"""

import argparse
import io
import json
import math
import time
from collections import OrderedDict
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

PATCH, SIDE, CLASSES = 4, 112, 20  # pixels of a patch and of an image, classes
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CROP = 0.35  # least share of an image that a training crop covers


class Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).transpose(1, 3)  # (B, N, 3, T, D)
        out = F.scaled_dot_product_attention(*qkv.unbind(2))
        return self.proj(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and an MLP, both left out at random for some samples in training."""

    def __init__(self, dim: int, num_heads: int, drop_path: float) -> None:
        super().__init__()
        self.drop_path = drop_path
        self.norm1, self.attn = nn.LayerNorm(dim, eps=1e-6), Attention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        layers = {"fc1": nn.Linear(dim, 4 * dim), "act": nn.GELU(), "fc2": nn.Linear(4 * dim, dim)}
        self.mlp = nn.Sequential(OrderedDict(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._dropped(self.attn(self.norm1(x)))
        return x + self._dropped(self.mlp(self.norm2(x)))

    def _dropped(self, x: Tensor) -> Tensor:
        if not self.training or not self.drop_path:
            return x
        keep = 1 - self.drop_path
        return x * x.new_empty(len(x), 1, 1).bernoulli_(keep) / keep


class PatchEmbed(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, dim, PATCH, PATCH)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


class PlainViT(nn.Module):
    """timm's VisionTransformer with `dynamic_img_size`, by names and results of its weights."""

    def __init__(self, dim: int, depth: int, num_heads: int, drop_path: float) -> None:
        super().__init__()
        self.keep = 1.0  # share of the patches that a training step has
        self.patch_embed = PatchEmbed(dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 1 + (SIDE // PATCH) ** 2, dim))
        rates = torch.linspace(0, drop_path, depth).tolist()
        self.blocks = nn.Sequential(*(Block(dim, num_heads, rate) for rate in rates))
        self.norm, self.head = nn.LayerNorm(dim, eps=1e-6), nn.Linear(dim, CLASSES)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)

    def forward_features(self, x: Tensor) -> Tensor:
        """Features (B, 1 + T, C) of the class token and the patches."""
        x = self.patch_embed(x)
        first, places = self.pos_embed[:, :1], self.pos_embed[:, 1:]
        if x.shape[-2:] != (SIDE // PATCH, SIDE // PATCH):
            places = places.unflatten(1, (SIDE // PATCH, -1)).permute(0, 3, 1, 2)
            places = F.interpolate(places, x.shape[-2:], mode="bicubic", antialias=True)
            places = places.permute(0, 2, 3, 1).flatten(1, 2)
        x = x.flatten(2).transpose(1, 2) + places
        if self.training and self.keep < 1:  # patch dropout: the same patches for a whole batch
            x = x[:, torch.randperm(x.shape[1], device=x.device)[: round(self.keep * x.shape[1])]]
        x = torch.cat([(self.cls_token + first).expand(len(x), -1, -1), x], dim=1)
        return self.norm(self.blocks(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.forward_features(x)[:, 0])


def make_vit() -> PlainViT:
    """The network, with random weights."""
    return PlainViT(dim=128, depth=6, num_heads=4, drop_path=0.05)


def load_vit(path: Path) -> PlainViT:
    """The trained network, ready to evaluate."""
    model = make_vit()
    model.load_state_dict(load_file(path))
    return model.eval()


def read_images(path: Path, count: int | None = None) -> tuple[Tensor, Tensor]:
    """The first images (N, 3, 64, 64) uint8 and labels (N,) of a file of the data set."""
    with np.load(path) as file:
        data, ends, labels = file["data"], file["offsets"].tolist(), file["labels"][:count]
    images = [
        np.asarray(Image.open(io.BytesIO(data[start:end].tobytes())).convert("RGB"))
        for start, end in islice(pairwise(ends), count)
    ]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2), torch.from_numpy(labels).long()


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


def mixed(x: Tensor, labels: Tensor, often: float) -> tuple[Tensor, Tensor]:
    """A batch, mixed by pasting boxes with probability `often`, and soft labels."""
    targets = F.one_hot(labels, CLASSES).float()
    if torch.rand(()) >= often:
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
        with torch.autocast(x.device.type, torch.bfloat16):
            right += int((model(normalised(x, side)).argmax(-1) == y).sum())
    return 100 * right / len(images)


class Training:
    """The state of a training: all that a checkpoint has."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.model = make_vit().to(device)
        self.average = torch.optim.swa_utils.AveragedModel(
            self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(options.average)
        )
        matrices = [p for p in self.model.blocks.parameters() if p.ndim == 2]
        known = {id(p) for p in matrices}
        others = [p for p in self.model.parameters() if id(p) not in known]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices, lr=options.lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, lr=options.lr, weight_decay=0.0),
        ]
        self.stage, self.step, self.seconds = 0, 0, 0.0  # step and seconds within the stage
        self.history: list[dict[str, Any]] = []

    def save(self, path: Path) -> None:
        new = path.with_suffix(".new")
        state = {"model": self.model.state_dict(), "average": self.average.state_dict()}
        state |= {"optimizers": [x.state_dict() for x in self.optimizers]}
        state |= {key: getattr(self, key) for key in ("stage", "step", "seconds", "history")}
        torch.save(state | {"rng": torch.get_rng_state()}, new)
        new.replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        for optimizer, own in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(own)
        for key in ("stage", "step", "seconds", "history"):
            setattr(self, key, state[key])
        torch.set_rng_state(state["rng"])


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    device = torch.device(options.device)
    images, labels = (x.to(device) for x in read_images(options.data / "train.npz"))
    val_images, val_labels = (x.to(device) for x in read_images(options.data / "val.npz"))
    state, checkpoint = Training(options, device), options.out.with_suffix(".checkpoint")
    if checkpoint.exists():
        state.load(checkpoint)
        print(f"continues {checkpoint} at step {state.step} of stage {state.stage}", flush=True)
    each = len(images) // options.batch
    stages = list(zip(options.minutes, (SIDE // 2, SIDE), options.keep, strict=True))
    for minutes, side, keep in stages[state.stage :]:
        peak = options.lr if state.stage == 0 else options.lr / 2
        state.model.keep = keep
        state.model.train()
        total, since, saved = torch.zeros((), device=device), 0, time.monotonic()
        while state.seconds < 60 * minutes:
            began = time.monotonic()
            done = state.seconds / (60 * minutes)
            rate = peak * min(1, done / 0.05) * (0.5 + 0.5 * math.cos(math.pi * done)) + 1e-6
            for group in (group for x in state.optimizers for group in x.param_groups):
                group["lr"] = rate
            chosen = torch.randint(len(images), (options.batch,)).to(device)
            x, targets = mixed(augmented(images[chosen], side), labels[chosen], options.mix)
            with torch.autocast(device.type, torch.bfloat16):
                loss = F.cross_entropy(state.model(x).float(), targets, label_smoothing=0.1)
            state.model.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
            for optimizer in state.optimizers:
                optimizer.step()
            state.average.update_parameters(state.model)
            total, since = total + loss.detach(), since + 1
            state.step += 1
            state.seconds += time.monotonic() - began
            if state.step % (4 * each) == 0 or state.seconds >= 60 * minutes:
                state.average.eval()
                score = top1(state.average.module, val_images, val_labels, side)
                state.history.append({
                    "tokens": (side // PATCH) ** 2, "epochs": round(state.step / each, 2),
                    "loss": round(total.item() / since, 4), "top1": round(score, 2),
                    "seconds": round(state.seconds),
                })  # fmt: skip
                print(json.dumps(state.history[-1]), flush=True)
                total, since = torch.zeros((), device=device), 0
            if time.monotonic() > saved + 60:
                state.save(checkpoint)
                saved = time.monotonic()
        state.stage, state.step, state.seconds = state.stage + 1, 0, 0.0
        state.save(checkpoint)
        options.out.with_suffix(".json").write_text(json.dumps(state.history, indent=1) + "\n")
        save(state.average.module, options.out)
    print(f"written: {options.out}")


def save(model: nn.Module, path: Path) -> None:
    save_file({k: v.detach().cpu().contiguous() for k, v in model.state_dict().items()}, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with train.npz and val.npz")
    add("--out", type=Path, required=True, help="safetensors file")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    numbers: Any = lambda text: [float(x) for x in text.split(",")]  # noqa: E731
    add("--minutes", type=numbers, default=[40, 40],
        help="time at 14x14 and at 28x28 tokens; default: 40,40")  # fmt: skip
    add("--keep", type=numbers, default=[0.5, 0.5],
        help="share of the patches that a step has, in each stage; default: 0.5,0.5")  # fmt: skip
    add("--mix", type=float, default=0.2, help="share of batches with mixed images; default: 0.2")
    add("--average", type=float, default=0.995, help="decay of the mean of the weights")
    add("--batch", type=int, default=64)
    add("--lr", type=float, default=1e-3)
    add("--seed", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
