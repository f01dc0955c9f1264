# SPDX-License-Identifier: Apache-2.0
"""Pairs of frames of ScanNet, by the indices that LoFTR was trained with.

What a folder must hold::

    <root>/scannet_indices/           or index/
        intrinsics.npz                camera matrix (3x3) of the depth images by name of the scene
        scene_data/train/<scene>.npz  name (N, 4): scene, sub-scene, frame, frame;
                                      score (N,): overlap of the two frames
        scene_data/train_list/scannet_all.txt   the npz files to use; without it, all
    <root>/train/scene0000_00/        as ScanNet's Python reader exports it
        color/<frame>.jpg             any size
        depth/<frame>.png             16 bits, in millimetres; 0: unknown
        pose/<frame>.txt              4x4, from the camera to the world
    <root>/scannet_test_1500/         pairs to validate on, unless val_scenes is given
        intrinsics.npz, test.npz      as above, without scores
    <root>/test/scene0707_00/         their frames
"""

from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.images import to_image
from quadtree_attention.tasks.match.npz import read_npz
from quadtree_attention.tasks.match.posed import (
    Array,
    Batch,
    PosedData,
    folder_of,
    geometry,
    resized_camera,
    resized_depth,
    resized_image,
    scene_files,
)

MILLIMETRES = 1000


class ScanNetData(PosedData):
    """Pairs of frames of ScanNet, in the layout of LoFTR's indices.

    Args:
        source: "scannet".
        root: Folder with `scannet_indices`, `train`, `scannet_test_1500` and `test`.
        height: Of what the model sees.
        width: Of what the model sees.
        batch_size: Pairs of a batch on one process.
        pairs_per_scene: Pairs drawn from each scene in an epoch.
        min_overlap: Training pairs have a larger overlap.
        val_pairs: Most pairs to validate on, evenly spread over those there are.
        val_scenes: Training scenes, the last ones, to validate on; 0: the official pairs.
        workers: Processes that read files; None: one per core, 8 at most; 0: no other process.
        strict: Fail at the first unreadable file instead of counting and replacing its pair.
        seed: Decides which pairs, and their order.
    """

    title = "ScanNet"

    def __init__(
        self,
        source: Literal["scannet"] = "scannet",
        root: str | None = None,
        height: int = 480,
        width: int = 640,
        batch_size: int = 1,
        pairs_per_scene: int = 200,
        min_overlap: float = 0.4,
        val_pairs: int = 1500,
        val_scenes: int = 0,
        workers: int | None = None,
        strict: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(
            root=root,
            batch_size=batch_size,
            pairs_per_scene=pairs_per_scene,
            val_pairs=val_pairs,
            val_scenes=val_scenes,
            min_overlap=min_overlap,
            workers=workers,
            strict=strict,
            seed=seed,
        )
        if min(height, width) < 8:
            raise OptionError(
                f"height and width must be at least 8, got {height} and {width}; pass more"
            )
        self.size = (height, width)

    def training_scenes(self) -> list["ScanNetScene"]:
        index = folder_of(self.root, ("scannet_indices", "index"), "LoFTR's indices of ScanNet")
        frames = folder_of(self.root, ("train",), "the frames of the training scenes")
        data = index / "scene_data"
        files = scene_files(data / "train", data / "train_list" / "scannet_all.txt")
        cameras = read_npz(index / "intrinsics.npz")
        return [self._scene(file, frames, cameras, self.min_overlap) for file in files]

    def official_scenes(self) -> list["ScanNetScene"]:
        try:
            index = folder_of(self.root, ("scannet_test_1500",), "the pairs to validate on")
            frames = folder_of(self.root, ("test",), "the frames to validate on")
        except DataError as error:
            raise DataError(
                f"{error}, or pass --data.val_scenes to hold out training ones"
            ) from None
        cameras = read_npz(index / "intrinsics.npz")
        return [self._scene(index / "test.npz", frames, cameras, None)]

    def _scene(
        self, file: Path, frames: Path, cameras: dict[str, Array], min_overlap: float | None
    ) -> "ScanNetScene":
        return ScanNetScene(read_pairs(file, min_overlap), frames, cameras, self.size)


class ScanNetScene:
    """Pairs of frames.

    Args:
        pairs: (N, 4): scene, sub-scene, frame, frame.
        frames: Folder of the scenes.
        cameras: Camera matrices of depth images by name of the scene.
        size: Height and width to give out.
    """

    def __init__(
        self, pairs: Array, frames: Path, cameras: dict[str, Array], size: tuple[int, int]
    ) -> None:
        self.pairs = pairs
        self.frames = frames
        self.cameras = cameras
        self.size = size

    def __len__(self) -> int:
        return len(self.pairs)

    def read(self, index: int) -> Batch:
        scene, part, *frames = self.pairs[index].tolist()
        name = f"scene{scene:04d}_{part:02d}"
        if name not in self.cameras or self.cameras[name].size != 9:
            raise DataError(f"intrinsics.npz has no 3x3 camera of {name}")
        K = np.asarray(self.cameras[name], float).reshape(3, 3)
        folder = self.frames / name
        batch: Batch = {}
        cameras, poses = [], []
        height, width = self.size
        for i, frame in enumerate(frames):
            image = to_image(folder / "color" / f"{frame}.jpg")
            batch[f"image{i}"] = resized_image(image, width, height)
            depth = read_depth(folder / "depth" / f"{frame}.png")
            batch[f"depth{i}"] = resized_depth(depth, width, height)
            old = (depth.shape[1], depth.shape[0])
            cameras.append(resized_camera(K, old, (width, height)))
            poses.append(read_pose(folder / "pose" / f"{frame}.txt"))
        return batch | geometry(cameras, poses, f"frames {frames} in {folder}")


def read_pairs(path: Path, min_overlap: float | None) -> Array:
    """The pairs (N, 4) of an index whose overlap is above the least; all of them for None."""
    wanted = ("name",) if min_overlap is None else ("name", "score")
    arrays = read_npz(path, wanted)
    pairs = arrays["name"]
    if pairs.ndim != 2 or pairs.shape[1] != 4 or pairs.dtype.kind not in "iu":
        raise DataError(
            f"name of {path} must be (N, 4) whole numbers, got {pairs.shape} of {pairs.dtype}; "
            "get the file again"
        )
    if min_overlap is None:
        return pairs
    if arrays["score"].shape != pairs.shape[:1]:
        raise DataError(f"{path} has not one score for each name; get the file again")
    return pairs[arrays["score"] > min_overlap]


def read_depth(path: Path) -> Array:
    """Depth (H, W) in metres from a PNG of 16 bits in millimetres."""
    try:
        with Image.open(path) as image:
            if not image.mode.startswith("I"):
                raise DataError(f"{path} must be grey with 16 bits, got the mode {image.mode}")
            return np.asarray(image).astype(np.float32) / MILLIMETRES
    except DataError:
        raise
    except Exception as error:  # damaged files fail in every possible way
        reason = getattr(error, "strerror", None) or (str(error).splitlines() or ["damaged"])[0]
        raise DataError(f"cannot read the depth {path}: {reason}") from error


def read_pose(path: Path) -> Array:
    """The matrix (4, 4) from the world to the camera; the file has its inverse."""
    try:
        pose = np.loadtxt(path)
        if pose.shape != (4, 4) or not np.isfinite(pose).all():
            raise DataError(f"the pose {path} must be 4x4 finite numbers, as tracking gives them")
        return np.linalg.inv(pose)
    except DataError:
        raise
    except (OSError, ValueError) as error:  # LinAlgError is a ValueError
        raise DataError(f"cannot read the pose {path}: {error}") from error
