# SPDX-License-Identifier: Apache-2.0
"""Writes rendered scenes as files of ScanNet and MegaDepth, in the layout of LoFTR's indices."""

from unittest.mock import patch

import numpy as np
import yaml
from PIL import Image

from quadtree_attention.synthetic import ProceduralTextures, SceneOptions, layout, scene_pairs
from tests.support import tiny
from tests.tasks.match.geometry import rotation

OPTIONS = SceneOptions(
    objects=(1, 3), samples=1, photometric=0.0, textureless=0.0, baseline=(0.05, 0.2),
    rotation=(0, 5), roll=(0, 10),
)  # fmt: skip
TEXTURES = ProceduralTextures(8, size=64)
SMALL = tiny.NETWORKS["match"][1] | {"num_levels": 2, "topk": 4}
WORLD = np.eye(4)  # some camera in some world
WORLD[:3, :3] = rotation([0.3, -1.0, 0.4], 70.0)
WORLD[:3, 3] = [4.0, -2.0, 1.5]


def pair_of_one_camera(index, size):
    """Both views have the same intrinsics, as in ScanNet."""

    def same(draws, camera, *_):
        return camera.K.repeat_interleave(layout.ATTEMPTS, 0)

    with patch.object(layout, "_second_intrinsics", same):
        return scene_pairs(TEXTURES, [index], size=size, options=OPTIONS)


def photograph(image, factor=1):
    """(1, 3, H, W) -> PIL, enlarged."""
    pixels = (image[0].permute(1, 2, 0).numpy() * 255).round().astype(np.uint8)
    picture = Image.fromarray(pixels)
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.BOX)


def write_scannet(root, pairs, scores):
    """Scene i holds pair i as frames 0 and 7, and `scores[i]` as overlaps of both directions."""
    index, cameras = root / "scannet_indices", {}
    (index / "scene_data" / "train").mkdir(parents=True)
    for i, (pair, score) in enumerate(zip(pairs, scores, strict=True)):
        name = f"scene{i:04d}_02"
        folder = root / "train" / name
        for kind in ("color", "depth", "pose"):
            (folder / kind).mkdir(parents=True)
        poses = [WORLD, WORLD @ np.linalg.inv(pair.T_0to1[0].double().numpy())]
        images, depths = (pair.image0, pair.image1), (pair.depth0, pair.depth1)
        for frame, image, depth, pose in zip((0, 7), images, depths, poses, strict=True):
            photograph(image, 2).save(folder / "color" / f"{frame}.jpg", quality=98)
            millimetres = (depth[0].numpy() * 1000).round().astype(np.uint16)
            Image.fromarray(millimetres).save(folder / "depth" / f"{frame}.png")
            np.savetxt(folder / "pose" / f"{frame}.txt", pose)
        cameras[name] = pair.K0[0].numpy()
        names = np.array([[i, 2, 0, 7], [i, 2, 7, 0]], np.uint16)
        path = index / "scene_data" / "train" / f"{name}.npz"
        np.savez(path, name=names, score=np.array(score, np.float32))
    np.savez(index / "intrinsics.npz", **cameras)


def scannet_pairs(count, size=(96, 128)):
    return [pair_of_one_camera(index, size) for index in range(count)]


def megadepth_pairs(count, size=(288, 384)):
    """Landscape beside portrait."""
    return [
        scene_pairs(TEXTURES, [i], size=size, size1=size[::-1], options=OPTIONS)
        for i in range(count)
    ]


def objects(values):
    """An array of objects, one each."""
    array = np.empty(len(values), object)
    array[:] = values
    return array


def write_megadepth(root, pairs, overlaps, h5py, folder="scene_info_0.1_0.7"):
    """Scene i holds pair i as photographs 1 and 2; photograph 0 is one that is not used."""
    index = root / "index" / folder
    index.mkdir(parents=True, exist_ok=True)
    for i, (pair, overlap) in enumerate(zip(pairs, overlaps, strict=True)):
        images, depths = [None], [None]
        stored = root / "train" / "phoenix" / f"{i:04d}"
        stored.mkdir(parents=True, exist_ok=True)
        for view in range(2):
            images.append(f"phoenix/{i:04d}/{view}.jpg")
            depths.append(f"phoenix/{i:04d}/{view}.h5")
            image, depth = getattr(pair, f"image{view}"), getattr(pair, f"depth{view}")
            photograph(image).save(root / "train" / images[-1], quality=98)
            with h5py.File(root / "train" / depths[-1], "w") as file:
                file["depth"] = depth[0].numpy()
        world_to_camera = np.linalg.inv(WORLD)
        poses = [None, world_to_camera, pair.T_0to1[0].double().numpy() @ world_to_camera]
        centre = np.zeros((3, 4), np.float32)  # LoFTR's third entry of a pair, for nothing here
        np.savez(
            index / f"{i:04d}_0.1_0.3.npz",
            image_paths=objects(images),
            depth_paths=objects(depths),
            intrinsics=objects([None, pair.K0[0].numpy(), pair.K1[0].numpy()]),
            poses=objects(poses),
            pair_infos=objects([
                ((1, 2), np.float64(overlap[0]), centre),
                ((np.int64(2), np.int64(1)), overlap[1], centre),
            ]),
        )  # fmt: skip


def write_recipe(folder, **data):
    """A recipe of one epoch with a tiny network; `data` goes into its group of that name."""
    data |= {"batch_size": 2, "pairs_per_scene": 2, "workers": 0}
    settings = {
        "model": {"model": "loftr_quadtree_small", "options": SMALL, "warmup_epochs": 1,
                  "fine_matches": 32},
        "data": data,
        "trainer": {"max_epochs": 1, "accelerator": "cpu", "enable_progress_bar": False},
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(settings))
    return folder / "recipe.yaml"
