# SPDX-License-Identifier: Apache-2.0
"""Pairs of frames of ScanNet, from the indices that LoFTR was trained with.

Required files::

    <root>/scannet_indices/           or index/
        intrinsics.npz                camera matrix (3x3) of the depth images by name of the scene
        scene_data/train/<scene>.npz  name (N, 4): scene, sub-scene, frame, frame;
                                      score (N,): overlap of the two frames
        scene_data/train_list/scannet_all.txt   the npz files to use; without it, all
    <root>/train/scene0000_00/        as ScanNet's Python reader exports it
        color/<frame>.jpg             any size
        depth/<frame>.png             16 bits, in millimetres; 0: unknown
        pose/<frame>.txt              4x4, from the camera to the world
    <root>/scannet_test_1500/         the 1,500 pairs to validate on, unless val_scenes is given
        intrinsics.npz                as above
        test.npz                      name (1500, 4), as above, without scores
    <root>/test/scene0707_00/         their frames

Thresholds of poses are in pixels of images of 640x480, for any input size of the model.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from quadtree_attention.checks import at_least
from quadtree_attention.errors import DataError
from quadtree_attention.images import Array, to_image
from quadtree_attention.tasks.match import posed
from quadtree_attention.tasks.match.npz import read_npz
from quadtree_attention.tasks.match.posed import PosedTruth, folder_of
from quadtree_attention.tasks.readers import reading
from quadtree_attention.tasks.training.data import Sample

MILLIMETRES = 1000
MEASURED = (640, 480)  # width and height that published thresholds of poses refer to


class ScanNetData(posed.PosedData):
    """Pairs of frames of ScanNet, in the layout of LoFTR's indices.

    Args:
        source: "scannet".
        height: Height of the model's input in pixels.
        width: Width of the model's input in pixels.
        pairs_per_scene: Pairs drawn from each scene in an epoch.
        min_overlap: Minimum overlap of training pairs (exclusive); in the paper 0.4 to 0.8.
        **common: Arguments of `PosedData`; `root` has `scannet_indices`, `train`,
            `scannet_test_1500` and `test`.
    """

    title = "ScanNet"

    def __init__(
        self,
        source: Literal["scannet"] = "scannet",
        height: int = 480,
        width: int = 640,
        pairs_per_scene: int = 200,
        min_overlap: float = 0.4,
        **common: Any,
    ) -> None:
        super().__init__(pairs_per_scene=pairs_per_scene, min_overlap=min_overlap, **common)
        at_least(8, height=height, width=width)
        self.size = (width, height)

    def view(self, image: Image.Image, depth: Array, K: Array) -> tuple[Sample, Array]:
        view = {"image": posed.resized_image(image, *self.size)}
        view["depth"] = posed.resized_depth(depth, *self.size)
        view["pixels"] = posed.pixels(self.size, MEASURED)
        return view, posed.resized_camera(K, (depth.shape[1], depth.shape[0]), self.size)

    def training_scenes(self) -> list["ScanNetScene"]:
        index = folder_of(self.root, ("scannet_indices", "index"), "LoFTR's indices of ScanNet")
        frames = folder_of(self.root, ("train",), "the frames of the training scenes")
        data = index / "scene_data"
        files = posed.scene_files(data / "train", data / "train_list" / "scannet_all.txt")
        cameras = read_npz(index / "intrinsics.npz")
        return [ScanNetScene(read_pairs(f, self.overlap), frames, cameras) for f in files]

    def official_scenes(self) -> list["ScanNetScene"]:
        index = folder_of(self.root, ("scannet_test_1500",), "the pairs to validate on")
        frames = folder_of(self.root, ("test",), "the frames to validate on")
        cameras = read_npz(index / "intrinsics.npz")
        return [ScanNetScene(read_pairs(index / "test.npz", None), frames, cameras)]


@dataclass(eq=False)
class ScanNetScene(posed.Scene):
    """Pairs of frames."""

    pairs: Array  # (N, 4): scene, sub-scene, frame, frame
    frames: Path  # folder of the scenes
    cameras: dict[str, Array]  # camera matrices of depth images by name of the scene

    def __len__(self) -> int:
        return len(self.pairs)

    def images(self, index: int) -> tuple[Image.Image, Image.Image]:
        folder, frame0, frame1 = self._located(index)
        colour = folder / "color"
        return to_image(colour / f"{frame0}.jpg"), to_image(colour / f"{frame1}.jpg")

    def truth(self, index: int) -> PosedTruth:
        folder, *frames = self._located(index)
        if folder.name not in self.cameras or self.cameras[folder.name].size != 9:
            raise DataError(f"intrinsics.npz has no 3x3 camera of {folder.name}")
        K = np.asarray(self.cameras[folder.name], float).reshape(3, 3)
        depths = [read_depth(folder / "depth" / f"{frame}.png") for frame in frames]
        poses = [read_pose(folder / "pose" / f"{frame}.txt") for frame in frames]
        return posed.posed_truth(depths, [K, K], poses, f"frames {frames} in {folder}")

    def _located(self, index: int) -> tuple[Path, int, int]:
        """Return the folder of a pair, and its frames."""
        scene, part, frame0, frame1 = self.pairs[index].tolist()
        return self.frames / f"scene{scene:04d}_{part:02d}", frame0, frame1


def read_pairs(path: Path, overlap: tuple[float, float] | None) -> Array:
    """Read the pairs (N, 4) of an index with an overlap in (low, high], or all."""
    wanted = ("name",) if overlap is None else ("name", "score")
    arrays = read_npz(path, wanted)
    pairs = arrays["name"]
    if pairs.ndim != 2 or pairs.shape[1] != 4 or pairs.dtype.kind not in "iu":
        raise DataError(
            f"name of {path} must be (N, 4) whole numbers, got {pairs.shape} of {pairs.dtype}; "
            "get the file again"
        )
    if overlap is None:
        return pairs
    if arrays["score"].shape != pairs.shape[:1]:
        raise DataError(f"{path} has not one score for each name; get the file again")
    low, high = overlap
    return pairs[(arrays["score"] > low) & (arrays["score"] <= high)]


def read_depth(path: Path) -> Array:
    """Read depth (H, W) in metres from a 16-bit PNG in millimetres."""
    with reading(path, "get the depth again"), Image.open(path) as image:
        if not image.mode.startswith("I"):
            raise DataError(f"{path} must be grey with 16 bits, got the mode {image.mode}")
        return np.asarray(image).astype(np.float32) / MILLIMETRES


def read_pose(path: Path) -> Array:
    """Read the matrix (4, 4) from the world to the camera; the file contains its inverse."""
    with reading(path, "get the pose again"):
        pose = np.loadtxt(path)
        if pose.shape != (4, 4) or not np.isfinite(pose).all():
            raise DataError(f"the pose {path} must be 4x4 finite numbers, as tracking gives them")
        return np.linalg.inv(pose)
