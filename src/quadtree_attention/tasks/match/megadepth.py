# SPDX-License-Identifier: Apache-2.0
"""Pairs of photographs of MegaDepth, from the indices that LoFTR was trained with.

Required files::

    <root>/index/                               or megadepth_indices/
        scene_info_0.1_0.7/<scene>.npz          training, see below
        scene_info_val_1500/<scene>.npz         validation, unless val_scenes is given
        trainvaltest_list/{train,val}_list.txt  the scenes to use, one a line; without it, all
    <root>/train/, or <root> itself             base of the relative paths in the index
        Undistorted_SfM/...jpg                  photographs, undistorted by D2-Net
        phoenix/...h5                           depth maps of MegaDepth, under the key "depth"

An npz file has `image_paths` and `depth_paths` (N,), `intrinsics` (N, 3, 3), `poses` (N, 4, 4) from
the world to the cameras, and `pair_infos`: ((i, j), overlap, ...) of every pair. These are arrays
of objects, which `npz.py` reads without executing code. Unused photographs have None.

Thresholds of poses are in pixels of the stored photographs.
"""

import importlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from quadtree_attention.checks import needs
from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.images import Array, to_image
from quadtree_attention.models.matcher import COARSE_STRIDE
from quadtree_attention.tasks.match import posed
from quadtree_attention.tasks.match.npz import read_npz
from quadtree_attention.tasks.match.posed import PosedTruth
from quadtree_attention.tasks.readers import reading
from quadtree_attention.tasks.training.data import Sample

KEYS = ("image_paths", "depth_paths", "intrinsics", "poses", "pair_infos")


class MegaDepthData(posed.PosedData):
    """Pairs of photographs of MegaDepth, in the layout of LoFTR's indices.

    Args:
        source: "megadepth".
        size: Side of the square input in pixels: the shorter side is padded, with a mask.
        **common: Arguments of `PosedData`; `root` has `index` and `train`.
    """

    title = "MegaDepth"

    def __init__(
        self, source: Literal["megadepth"] = "megadepth", size: int = 840, **common: Any
    ) -> None:
        super().__init__(**common)
        if size < COARSE_STRIDE or size % COARSE_STRIDE:
            raise OptionError(
                f"size must be a multiple of {COARSE_STRIDE}, got {size}; pass for example 840"
            )
        self.size = size

    def view(self, image: Image.Image, depth: Array, K: Array) -> tuple[Sample, Array]:
        size = width, height = fitted(image.size, self.size)
        pad = (0, self.size - width, 0, self.size - height)
        view = {
            "image": F.pad(posed.resized_image(image, *size), pad),
            "depth": F.pad(posed.resized_depth(depth, *size), pad),
            "mask": F.pad(torch.ones(height, width, dtype=torch.bool), pad),
            "pixels": posed.pixels(size, image.size),
        }
        return view, posed.resized_camera(K, image.size, size)

    def training_scenes(self) -> list["MegaDepthScene"]:
        return self._read_scenes("scene_info_0.1_0.7", "train_list.txt", self.overlap)

    def official_scenes(self) -> list["MegaDepthScene"]:
        return self._read_scenes("scene_info_val_1500", "val_list.txt", None)

    def _read_scenes(
        self, folder: str, listed: str, overlap: tuple[float, float] | None
    ) -> list["MegaDepthScene"]:
        index = posed.folder_of(
            self.root, ("index", "megadepth_indices"), "LoFTR's indices of MegaDepth"
        )
        files = posed.scene_files(index / folder, index / "trainvaltest_list" / listed)
        import_h5py()
        photographs = self.root / "train" if (self.root / "train").is_dir() else self.root
        return [MegaDepthScene(file, photographs, overlap) for file in files]


class MegaDepthScene(posed.Scene):
    """Pairs of photographs of one index file, with paths relative to `root`.

    Pairs have an overlap in (low, high]; None: all pairs are used.
    """

    def __init__(self, path: Path, root: Path, overlap: tuple[float, float] | None) -> None:
        arrays = read_npz(path, KEYS)
        self.path, self.root = path, root
        self.image_paths, self.depth_paths = (arrays[name].tolist() for name in KEYS[:2])
        self.intrinsics, self.poses = arrays["intrinsics"], arrays["poses"]
        low, high = (-np.inf, np.inf) if overlap is None else overlap
        with reading(path, "pair_infos must be ((i, j), overlap, ...) each; get the file again"):
            infos = arrays["pair_infos"]
            kept = [(int(i), int(j)) for (i, j), share, *_ in infos if low < float(share) <= high]
        self.pairs = np.array(kept, np.int64).reshape(-1, 2)
        every = self.image_paths, self.depth_paths, self.intrinsics, self.poses
        counts = {len(array) for array in every}
        fit = not len(self.pairs) or 0 <= self.pairs.min() <= self.pairs.max() < max(counts)
        if len(counts) > 1 or not fit:
            raise DataError(f"arrays and pairs of {path} do not fit together; get the file again")

    def __len__(self) -> int:
        return len(self.pairs)

    def images(self, index: int) -> tuple[Image.Image, Image.Image]:
        (path0, *_), (path1, *_) = map(self._photograph, self.pairs[index].tolist())
        return to_image(path0), to_image(path1)

    def truth(self, index: int) -> PosedTruth:
        pair = self.pairs[index].tolist()
        _, depths, cameras = zip(*map(self._photograph, pair), strict=True)
        poses = [np.asarray(self.poses[photograph], float) for photograph in pair]
        name = f"{self.pairs[index]} in {self.path}"
        return posed.posed_truth([read_depth(path) for path in depths], cameras, poses, name)

    def _photograph(self, number: int) -> tuple[Path, Path, Array]:
        """Return the paths of image and depth, and the camera, of a photograph."""
        image, depth = self.image_paths[number], self.depth_paths[number]
        K = self.intrinsics[number]
        named = isinstance(image, str) and isinstance(depth, str)
        if not named or np.shape(K) != (3, 3):
            raise DataError(f"{self.path} has no path or no 3x3 camera of photograph {number}")
        return self.root / image, self.root / depth, np.asarray(K, float)


def fitted(old: tuple[int, int], size: int) -> tuple[int, int]:
    """Return (width, height) with the longer side `size`, both multiples of the coarse stride."""
    cell, longer = COARSE_STRIDE, max(old)
    width, height = (max(cell, round(side * size / longer) // cell * cell) for side in old)
    return width, height


def read_depth(path: Path) -> Array:
    """Read depth (H, W), 0 where unknown."""
    h5py = import_h5py()
    with reading(path, "get the depth again"), h5py.File(path, "r") as file:
        depth: Array = np.asarray(file["depth"], np.float32)
    if depth.ndim != 2 or depth.size == 0:
        raise DataError(f"the depth {path} must be (H, W), got {depth.shape}")
    return depth


def import_h5py() -> Any:
    with needs("train", "reading depth maps of MegaDepth"):
        return importlib.import_module("h5py")
