# SPDX-License-Identifier: Apache-2.0
"""Base of data sets of photographs with depth and pose.

A scene lists pairs of photographs and reads them. In every epoch, training draws the same number of
pairs from every scene; the draws depend on the seed, the epoch and the index only.

The centre of the first pixel is (0, 0). Resizing keeps the edges of an image fixed, and the camera
is adapted. Depth is sampled by nearest neighbour: a mean of two surfaces is on neither of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor
from tqdm import tqdm

from quadtree_attention.checks import at_least
from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.images import Array, ImageLike
from quadtree_attention.tasks.contract import Source
from quadtree_attention.tasks.readers import check_folder, reading
from quadtree_attention.tasks.training.data import Sample, Split, TaskData

PER_SCENE = 4  # maximum attempts in one scene, whose whole folder may be missing


@dataclass(frozen=True, eq=False)
class PosedTruth:
    """Stored depth, cameras and motion of a pair."""

    depths: Sequence[Array]  # (H, W) of each photograph, 0 or not finite where unknown
    cameras: Sequence[Array]  # camera (3, 3) of each photograph
    T_0to1: Array  # motion (4, 4) from camera 0 to camera 1
    T_1to0: Array  # its inverse


Scene = Source[PosedTruth]  # pairs of photographs of one place


class PosedSource(Source[PosedTruth]):
    """The concatenated pairs of several scenes, as a source for `TaskData`."""

    def __init__(self, scenes: Sequence[Scene]) -> None:
        self.scenes = scenes
        self.starts = np.cumsum([0, *(len(scene) for scene in scenes)]).tolist()

    def __len__(self) -> int:
        return int(self.starts[-1])

    def images(self, index: int) -> tuple[ImageLike, ...]:
        number, pair = self._located(index)
        return self.scenes[number].images(pair)

    def truth(self, index: int) -> PosedTruth:
        number, pair = self._located(index)
        return self.scenes[number].truth(pair)

    def replacement(self, index: int, step: int) -> int:
        """Return a pair to read in place of an unreadable one, of this scene or a later one."""
        number, pair = self._located(index)
        number = (number + step // PER_SCENE) % len(self.scenes)
        return int(self.starts[number]) + (pair + step) % len(self.scenes[number])

    def _located(self, index: int) -> tuple[int, int]:
        """Return the index of the scene of a pair, and its index in the scene."""
        number = int(np.searchsorted(self.starts, index, side="right")) - 1
        return number, index - self.starts[number]


class PosedData(TaskData):
    """Batches of pairs from scenes. Subclasses define the scenes and `view`.

    Args:
        root: Folder of the data set.
        batch_size: Batch size per process.
        pairs_per_scene: Pairs drawn from each scene in an epoch.
        min_overlap: Minimum overlap of training pairs (exclusive).
        max_overlap: Maximum overlap of training pairs.
        scenes: Number of training scenes, evenly spread over all scenes; None: all.
        val_pairs: Maximum number of validation pairs, evenly spread over all pairs.
        val_scenes: Number of last training scenes held out for validation; 0: the official pairs.
        **common: Arguments of `TaskData`.
    """

    title: str  # name of the data set in messages
    item = "pair"
    more = "more --data.pairs_per_scene or "
    floats = ("image0", "image1")

    def __init__(
        self,
        *,
        root: str | None = None,
        batch_size: int = 1,
        pairs_per_scene: int = 100,
        min_overlap: float = 0.0,
        max_overlap: float = 1.0,
        scenes: int | None = None,
        val_pairs: int = 1500,
        val_scenes: int = 0,
        **common: Any,
    ) -> None:
        super().__init__(batch_size=batch_size, **common)
        if root is None:
            raise OptionError(
                f"{self.title} needs the folder that holds it, got none; pass --data.root FOLDER"
            )
        at_least(1, pairs_per_scene=pairs_per_scene, val_pairs=val_pairs, scenes=scenes)
        at_least(0, val_scenes=val_scenes)
        if not 0 <= min_overlap < max_overlap <= 1:
            raise OptionError(
                "overlaps must satisfy 0 <= min_overlap < max_overlap <= 1, got "
                f"{min_overlap=} and {max_overlap=}"
            )
        self.root, self.pairs_per_scene, self.scenes = Path(root), pairs_per_scene, scenes
        self.overlap = min_overlap, max_overlap
        self.val_pairs, self.val_scenes = val_pairs, val_scenes

    def training_scenes(self) -> Sequence[Scene]:
        """Return all training scenes, including held-out ones."""
        raise NotImplementedError

    def official_scenes(self) -> Sequence[Scene]:
        """Return the official validation scenes."""
        raise NotImplementedError

    def view(self, image: Image.Image, depth: Array, K: Array) -> tuple[Sample, Array]:
        """Return `image`, `depth` and, if padded, `mask` of a photograph for the model; its camera.

        `pixels` (2,) is the width and height of an input pixel, in the pixels that thresholds of
        poses refer to.
        """
        raise NotImplementedError

    def open(self, split: Split) -> Any:
        check_folder(self.root, f"pass the one of {self.title} to --data.root")
        scenes = [scene for scene in self.training_scenes() if len(scene)]
        if self.scenes is not None and self.scenes < len(scenes):
            scenes = [scenes[i * len(scenes) // self.scenes] for i in range(self.scenes)]
        if len(scenes) <= self.val_scenes:
            raise DataError(
                f"{len(scenes)} training scenes of {self.root} have pairs with an overlap above "
                f"{self.overlap[0]}, {self.val_scenes} are held out for validation; pass a lower "
                "--data.min_overlap or --data.val_scenes"
            )
        kept = len(scenes) - self.val_scenes
        try:
            val = scenes[kept:] or [scene for scene in self.official_scenes() if len(scene)]
        except DataError as error:
            advice = "pass --data.val_scenes to hold out training ones"
            raise DataError(f"{error}, or {advice}") from None
        # Open both splits at once, since the indices of a data set are large
        both: dict[Split, Any] = {"train": PosedSource(scenes[:kept]), "val": PosedSource(val)}
        self._sources = both
        return both[split]

    def available(self, split: Split) -> int:
        if split == "val":
            return super().available(split)
        return len(self.source(split).scenes) * self.pairs_per_scene

    def place(self, split: Split, index: int) -> int:
        if split == "val":
            return super().place(split, index)
        source = self.source(split)
        number = index // self.pairs_per_scene
        return source.starts[number] + int(torch.randint(len(source.scenes[number]), ()))

    def val_sample(self, images: Sequence[Image.Image], truth: PosedTruth) -> Sample:
        """`image0`, `depth0`, `K0`, `pixels0`, `mask0` if padded; same of 1; `T_0to1`, `T_1to0`."""
        arrays = {"T_0to1": truth.T_0to1, "T_1to0": truth.T_1to0}
        sample: Sample = {}
        for i, given in enumerate(zip(images, truth.depths, truth.cameras, strict=True)):
            view, arrays[f"K{i}"] = self.view(*given)
            sample |= {f"{name}{i}": value for name, value in view.items()}
        return sample | {
            name: torch.from_numpy(array.astype(np.float32)) for name, array in arrays.items()
        }

    train_sample = val_sample


def folder_of(root: Path, names: Sequence[str], what: str) -> Path:
    """Return the first existing folder of a root."""
    folders = [root / name for name in names]
    if found := next((folder for folder in folders if folder.is_dir()), None):
        return found
    raise DataError(f"there is no folder {' or '.join(map(str, folders))}; put {what} there")


def scene_files(folder: Path, listed: Path) -> Iterable[Path]:
    """Yield the npz files of scenes: those in a list, or without a list all files of the folder.

    Iteration shows a progress bar: the files are many and large.
    """
    check_folder(folder, "put the indices of the scenes there")
    if not listed.exists():
        files = sorted(folder.glob("*.npz"))
    else:
        with reading(listed, "get it again"):
            stems = [line.split()[0] for line in listed.read_text().splitlines() if line.strip()]
        files = [folder / f"{stem.removesuffix('.npz')}.npz" for stem in stems]
    if not files:
        raise DataError(f"{folder} has no npz file to use; put the indices of the scenes there")
    bar: Iterable[Path] = tqdm(files, desc=f"reading {folder.name}", leave=False, disable=None)
    return bar


def resized_image(image: Image.Image, width: int, height: int) -> Tensor:
    """Resize an image; return (3, H, W) uint8."""
    return pil_to_tensor(image.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=3.0))


def resized_depth(depth: Array, width: int, height: int) -> Tensor:
    """Resize depth (H, W) by nearest neighbour; 0 where unknown."""
    rows, columns = (
        ((np.arange(new) + 0.5) * old / new).astype(np.int64)
        for new, old in zip((height, width), depth.shape, strict=True)
    )
    looked_up = depth[rows[:, None], columns].astype(np.float32)
    return torch.from_numpy(np.where(np.isfinite(looked_up) & (looked_up > 0), looked_up, 0))


def resized_camera(K: Array, old: tuple[int, int], new: tuple[int, int]) -> Array:
    """Return the camera (3, 3) of an image resized from and to (width, height)."""
    scale = np.array([new[0] / old[0], new[1] / old[1], 1.0])
    moved = K * scale[:, None]
    moved[:2, 2] += (scale[:2] - 1) / 2
    return moved


def pixels(seen: tuple[int, int], measured: tuple[int, int]) -> Tensor:
    """Width and height (2,) of an input pixel, in pixels of an image of the size `measured`."""
    return torch.tensor(measured) / torch.tensor(seen)


def posed_truth(
    depths: Sequence[Array], cameras: Sequence[Array], poses: Sequence[Array], name: str
) -> PosedTruth:
    """Return the ground truth of a pair from two poses, which map the world to the cameras.

    Raises:
        DataError: Cameras or poses are invalid; ScanNet has infinities where tracking failed.
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
    return PosedTruth(depths, cameras, T_0to1, T_1to0)
