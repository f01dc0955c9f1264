# SPDX-License-Identifier: Apache-2.0
"""What data sets of photographs with depth and pose have in common.

A scene lists pairs of photographs and reads them. Training draws as many pairs from every scene in
every epoch, large or small; which ones follows from the seed, the epoch and the number of the draw.

Pixels are those of the package: the centre of the first is (0, 0). When an image is resized its
edges stay in place, and the camera follows. Depth is looked up, never blended: between two surfaces
there is none.
"""

import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import pytorch_lightning as pl
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.tasks.readers import summary
from quadtree_attention.tasks.training.loader import (
    EpochSampler,
    ResumableLoader,
    loader_of,
    sampler_of,
)

Array: TypeAlias = np.ndarray[Any, Any]
Batch = dict[str, Any]
Split = Literal["train", "val"]
ATTEMPTS = 100  # pairs tried in the place of one that cannot be read
PER_SCENE = 4  # of them in one scene, whose folder may be missing as a whole


class Scene(Protocol):
    """Pairs of photographs of one place."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> Batch:
        """`image0`, `depth0`, `K0`, the same of 1, `T_0to1`, `T_1to0`, and masks if padded.

        Raises:
            DataError: A file of the pair cannot be read; names it.
        """


class PosedData(pl.LightningDataModule):
    """Batches of pairs from scenes. Subclasses say which scenes there are.

    Args:
        root: Folder of the data set.
        batch_size: Pairs of a batch on one process.
        pairs_per_scene: Pairs drawn from each scene in an epoch.
        val_pairs: Most pairs to validate on, evenly spread over those there are.
        val_scenes: Training scenes, the last ones, to validate on; 0: the official pairs.
        workers: Processes that read files; None: one per core, 8 at most; 0: no other process.
        strict: Fail at the first unreadable file instead of counting and replacing its pair.
        seed: Decides which pairs, and their order.
    """

    title: str  # of the data set, in messages

    def __init__(
        self,
        *,
        root: str | None,
        batch_size: int,
        pairs_per_scene: int,
        val_pairs: int,
        val_scenes: int,
        min_overlap: float,
        workers: int | None,
        strict: bool,
        seed: int,
    ) -> None:
        super().__init__()
        if root is None:
            raise OptionError(
                f"{self.title} needs the folder that holds it, got none; pass --data.root FOLDER"
            )
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("pairs_per_scene", pairs_per_scene, 1),
            ("val_pairs", val_pairs, 1),
            ("val_scenes", val_scenes, 0),
            ("workers", workers, 0),
        ):
            if value is not None and value < least:
                raise OptionError(f"{name} must be at least {least}, got {value}; pass more")
        if not 0 <= min_overlap < 1:
            raise OptionError(
                f"min_overlap must be from 0 to below 1, got {min_overlap}; pass such"
            )
        self.root = Path(root)
        self.batch_size = batch_size
        self.pairs_per_scene = pairs_per_scene
        self.val_pairs = val_pairs
        self.val_scenes = val_scenes
        self.min_overlap = min_overlap
        self.workers = min(8, os.cpu_count() or 1) if workers is None else workers
        self.strict = strict
        self.seed = seed
        self._scenes: dict[Split, Sequence[Scene]] = {}

    def training_scenes(self) -> Sequence[Scene]:
        """All scenes there are for training; some may be held out."""
        raise NotImplementedError

    def official_scenes(self) -> Sequence[Scene]:
        """The scenes that the authors of the index validate on."""
        raise NotImplementedError

    @property
    def batches_per_epoch(self) -> int:
        """Training batches of one process."""
        return len(self._sampler("train")) // self.batch_size

    def setup(self, stage: str | None = None) -> None:
        if self._scenes:
            return
        if not self.root.is_dir():
            raise DataError(
                f"there is no folder {self.root}; pass the one of {self.title} to --data.root"
            )
        scenes = [scene for scene in self.training_scenes() if len(scene)]
        if len(scenes) <= self.val_scenes:
            raise DataError(
                f"{len(scenes)} training scenes of {self.root} have pairs with an overlap above "
                f"{self.min_overlap}, {self.val_scenes} are held out for validation; pass a lower "
                "--data.min_overlap or --data.val_scenes"
            )
        kept = len(scenes) - self.val_scenes
        val = scenes[kept:] or [scene for scene in self.official_scenes() if len(scene)]
        self._scenes = {"train": scenes[:kept], "val": val}

    def train_dataloader(self) -> ResumableLoader:
        scenes, sampler = self._scenes["train"], self._sampler("train")
        if len(sampler) == 0:
            raise OptionError(
                f"{sampler.size} pairs of {len(scenes)} scenes do not fill one batch of "
                f"{self.batch_size} on {sampler.world_size} processes; pass more "
                "--data.pairs_per_scene or a smaller --data.batch_size"
            )
        read = partial(_read_drawn, scenes, self.pairs_per_scene, self.strict)
        return loader_of(self, sampler, read, collate)

    def val_dataloader(self) -> ResumableLoader:
        scenes, sampler = self._scenes["val"], self._sampler("val")
        return loader_of(
            self, sampler, partial(_read_spread, scenes, sampler.size, self.strict), collate
        )

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Images travel as bytes."""
        return batch | {name: batch[name].float() / 255 for name in ("image0", "image1")}

    def _sampler(self, split: Split) -> EpochSampler:
        scenes = self._scenes[split]
        if split == "train":
            size = len(scenes) * self.pairs_per_scene
        else:
            size = min(self.val_pairs, sum(len(scene) for scene in scenes))
        return sampler_of(self, size, self.batch_size, shuffle=split == "train")


def collate(samples: list[Batch]) -> Batch:
    batch: Batch = {
        name: torch.stack([sample[name] for sample in samples])
        for name in samples[0]
        if name != "skipped"
    }
    batch["skipped"] = [reason for sample in samples for reason in sample["skipped"]]
    return batch


def _read_drawn(scenes: Sequence[Scene], per_scene: int, strict: bool, index: int) -> Batch:
    """Any pair of the scene that the draw is for; generators are seeded for the draw."""
    number = index // per_scene
    pair = int(torch.randint(len(scenes[number]), ()))
    return read_or_replace(scenes, number, pair, strict=strict)


def _read_spread(scenes: Sequence[Scene], count: int, strict: bool, index: int) -> Batch:
    """One of `count` pairs that are evenly spread over all."""
    ends = np.cumsum([len(scene) for scene in scenes])
    place = index * int(ends[-1]) // count
    number = int(np.searchsorted(ends, place, side="right"))
    return read_or_replace(scenes, number, place - int(ends[number]), strict=strict)


def read_or_replace(scenes: Sequence[Scene], number: int, pair: int, *, strict: bool) -> Batch:
    """A pair of a scene, and why those before it could not be read (`skipped`).

    The next readable pair, of this scene or a later one, takes the place of one that is not, so
    that batches stay whole.
    """
    reasons: list[str] = []
    for attempt in range(ATTEMPTS):
        scene = scenes[(number + attempt // PER_SCENE) % len(scenes)]
        try:
            return scene.read((pair + attempt) % len(scene)) | {"skipped": reasons}
        except DataError as error:
            if strict:
                raise DataError(f"{error}; mend it, or leave out --data.strict") from error
            reasons.append(str(error))
    unique = list(dict.fromkeys(reasons))
    raise DataError(f"{ATTEMPTS} pairs in a row cannot be read: {summary(unique)}; check the files")


def folder_of(root: Path, names: Sequence[str], what: str) -> Path:
    """The first folder of a root that exists."""
    for name in names:
        if (root / name).is_dir():
            return root / name
    raise DataError(
        f"there is no folder {' or '.join(str(root / name) for name in names)}; put {what} there"
    )


def scene_files(folder: Path, listed: Path) -> Iterable[Path]:
    """The npz files of scenes: those that a list names, all of the folder where there is none.

    Going through them shows a progress bar: there are many, and they are large.
    """
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}; put the indices of the scenes there")
    if not listed.exists():
        files = sorted(folder.glob("*.npz"))
    else:
        try:
            stems = [line.split()[0] for line in listed.read_text().splitlines() if line.strip()]
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read {listed}: {error}; get it again") from error
        files = [folder / f"{stem.removesuffix('.npz')}.npz" for stem in stems]
    if not files:
        raise DataError(f"{folder} has no npz file to use; put the indices of the scenes there")
    bar: Iterable[Path] = tqdm(files, desc=f"reading {folder.name}", leave=False, disable=None)
    return bar


def resized_image(image: Image.Image, width: int, height: int) -> Tensor:
    """(3, H, W) in bytes."""
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=3.0)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def resized_depth(depth: Array, width: int, height: int) -> Tensor:
    """Depth (H, W) at the pixels of a resized image; 0 where it is not known."""
    rows, columns = (
        ((np.arange(new) + 0.5) * old / new).astype(np.int64)
        for new, old in zip((height, width), depth.shape, strict=True)
    )
    looked_up = depth[rows[:, None], columns].astype(np.float32)
    return torch.from_numpy(np.where(np.isfinite(looked_up) & (looked_up > 0), looked_up, 0))


def resized_camera(K: Array, old: tuple[int, int], new: tuple[int, int]) -> Array:
    """The camera (3, 3) of an image whose (width, height) changed."""
    scale = np.array([new[0] / old[0], new[1] / old[1], 1.0])
    moved = K * scale[:, None]
    moved[:2, 2] += (scale[:2] - 1) / 2
    return moved


def geometry(cameras: Sequence[Array], poses: Sequence[Array], name: str) -> Batch:
    """Cameras and motions of a pair from two poses that take the world to the cameras.

    Raises:
        DataError: They are no cameras and poses; ScanNet writes infinities where tracking failed.
    """
    given = [*cameras, *poses]
    shapes = [array.shape for array in given]
    if shapes != [(3, 3)] * 2 + [(4, 4)] * 2 or not all(np.isfinite(a).all() for a in given):
        raise DataError(f"cameras or poses of {name} are not finite 3x3 and 4x4 matrices")
    try:
        T_0to1 = poses[1] @ np.linalg.inv(poses[0])
        T_1to0 = poses[0] @ np.linalg.inv(poses[1])
    except np.linalg.LinAlgError as error:
        raise DataError(f"a pose of {name} is singular") from error
    arrays = {"K0": cameras[0], "K1": cameras[1], "T_0to1": T_0to1, "T_1to0": T_1to0}
    return {key: torch.from_numpy(array.astype(np.float32)) for key, array in arrays.items()}
