# SPDX-License-Identifier: Apache-2.0
"""Pairs of views of synthetic scenes with ground truth depth, flow, visibility and cameras.

A scene is a room with planes, boxes, ellipsoids and thin bars at many depths, each face with its
own texture. A pair is determined by (seed, index): it is the same in any batch and, up to rounding,
on any device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quadtree_attention.synthetic.cameras import transform
from quadtree_attention.synthetic.draws import Draws
from quadtree_attention.synthetic.fused import apart, send
from quadtree_attention.synthetic.layout import first_camera, place, second_camera
from quadtree_attention.synthetic.options import SceneOptions, check_size
from quadtree_attention.synthetic.photometric import distort
from quadtree_attention.synthetic.textures import Textures
from quadtree_attention.synthetic.views import both_views


@dataclass(frozen=True)
class Pair:
    """Two views of each scene of a batch. Pixel centres are integers, points are (x, y)."""

    image0: Tensor  # (B, 3, H0, W0) between 0 and 1
    image1: Tensor  # (B, 3, H1, W1)
    depth0: Tensor  # (B, H0, W0) along the optical axis
    depth1: Tensor  # (B, H1, W1)
    K0: Tensor  # (B, 3, 3)
    K1: Tensor  # (B, 3, 3)
    T_0to1: Tensor  # (B, 4, 4), points of camera 0 to camera 1
    flow0to1: Tensor  # (B, H0, W0, 2) pixels; `BEHIND` where the point is behind camera 1
    flow1to0: Tensor  # (B, H1, W1, 2)
    visible0: Tensor  # (B, H0, W0) bool: the point is inside view 1 and not occluded there
    visible1: Tensor  # (B, H1, W1)


def scene_pairs(
    textures: Textures,
    indices: Sequence[int],
    *,
    size: tuple[int, int] = (480, 640),
    size1: tuple[int, int] | None = None,
    seed: int = 0,
    options: SceneOptions | None = None,
) -> Pair:
    """Render pairs of views of scenes, on the device of the textures.

    Args:
        textures: Textures of the surfaces.
        indices: Indices of the pairs of the batch.
        size: (height, width) of the first view.
        size1: (height, width) of the second view; None: as the first.
        seed: Seed of the data set.
        options: Content of the scenes and motion of the camera.

    Raises:
        OptionError: A size, seed or index is not accepted.

    Example:
        >>> from quadtree_attention.synthetic import ProceduralTextures, scene_pairs
        >>> pair = scene_pairs(ProceduralTextures(8, size=32), range(2), size=(24, 33))
        >>> pair.image0.shape, pair.flow0to1.shape
        (torch.Size([2, 3, 24, 33]), torch.Size([2, 24, 33, 2]))
    """
    options = SceneOptions() if options is None else options
    size1 = size if size1 is None else size1
    check_size("size", size)
    check_size("size1", size1)
    with apart(textures.device):
        draws = Draws(seed, indices)
        camera0 = first_camera(draws, size, options.focal)
        scene = place(draws, camera0, options, len(textures))
        camera1 = second_camera(draws, scene, camera0, size1, options)
        cameras = camera0, camera1
        view0, view1 = both_views(scene, cameras, textures, options.samples)
        image0, depth0, flow0to1, visible0 = view0
        image1, depth1, flow1to0, visible1 = view1
        matrices = (camera0.K, camera1.K, transform(*cameras))
        poses = torch.cat([matrix.flatten(1) for matrix in matrices], dim=1)
        poses = send(poses.float(), textures.device)
        strength = options.photometric
        return Pair(
            image0=distort(image0, indices, seed=seed, view=0, strength=strength),
            image1=distort(image1, indices, seed=seed, view=1, strength=strength),
            depth0=depth0,
            depth1=depth1,
            K0=poses[:, :9].unflatten(1, (3, 3)),
            K1=poses[:, 9:18].unflatten(1, (3, 3)),
            T_0to1=poses[:, 18:].unflatten(1, (4, 4)),
            flow0to1=flow0to1,
            flow1to0=flow1to0,
            visible0=visible0,
            visible1=visible1,
        )
