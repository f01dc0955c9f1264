# SPDX-License-Identifier: Apache-2.0
"""Rectified stereo pairs of synthetic scenes, with exact disparity and occlusion."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quadtree_attention.data.cameras import Camera
from quadtree_attention.data.draws import Draws
from quadtree_attention.data.layout import first_camera, place, transfer
from quadtree_attention.data.options import StereoOptions, check_size
from quadtree_attention.data.photometric import distort
from quadtree_attention.data.render import render
from quadtree_attention.data.solids import cast, see
from quadtree_attention.data.textures import Textures


@dataclass(frozen=True)
class StereoPair:
    """Left (0) and right (1) views; what is at x on the left is at x - disparity0 on the right."""

    image0: Tensor  # (B, 3, H, W) between 0 and 1
    image1: Tensor  # (B, 3, H, W)
    disparity0: Tensor  # (B, H, W) pixels, positive, also where occluded
    disparity1: Tensor  # (B, H, W): x on the right is x + disparity1 on the left
    occluded0: Tensor  # (B, H, W) bool: hidden in, or outside of, the other view
    occluded1: Tensor  # (B, H, W)
    depth0: Tensor  # (B, H, W)
    depth1: Tensor  # (B, H, W)
    K: Tensor  # (B, 3, 3) of both views
    baseline: Tensor  # (B,) way from the left camera to the right one


def stereo_pairs(
    textures: Textures,
    indices: Sequence[int],
    *,
    size: tuple[int, int] = (480, 640),
    seed: int = 0,
    options: StereoOptions | None = None,
) -> StereoPair:
    """Pairs of views by cameras side by side, made on the device of the textures.

    Args:
        textures: What surfaces are covered with.
        indices: Numbers of the pairs to make, one batch.
        size: (height, width).
        seed: Of the data set.
        options: What is seen, and how large disparities are.

    Raises:
        OptionError: A size, seed or index is not accepted.
    """
    options = StereoOptions() if options is None else options
    check_size("size", size)
    draws = Draws(seed, indices, stream=1)
    exact0 = first_camera(draws, size, options.focal)
    scene = place(draws, exact0, options, len(textures))
    share = draws.uniform(*options.disparity)

    place_ = textures.device, torch.float32
    camera0 = exact0.to(*place_)
    sight0 = see(scene.solids, exact0, *place_)
    depth0 = cast(sight0, *camera0.rays())[0]
    baseline = _baseline(depth0, exact0, share)
    exact1 = Camera(exact0.K, exact0.rotation, baseline[:, None] * torch.eye(3)[0], size)
    camera1, sight1 = exact1.to(*place_), see(scene.solids, exact1, *place_)
    depth1 = cast(sight1, *camera1.rays())[0]
    visible0 = transfer(depth0, camera0, camera1, sight1)[1]
    visible1 = transfer(depth1, camera1, camera0, sight0)[1]
    image0 = render(scene, sight0, camera0, textures, options.samples)
    image1 = render(scene, sight1, camera1, textures, options.samples)
    strength = options.photometric
    shift = (camera0.K[:, 0, 0] * baseline.to(*place_))[:, None, None]
    return StereoPair(
        image0=distort(image0, indices, seed=seed, view=2, strength=strength),
        image1=distort(image1, indices, seed=seed, view=3, strength=strength),
        disparity0=shift / depth0,
        disparity1=shift / depth1,
        occluded0=~visible0,
        occluded1=~visible1,
        depth0=depth0,
        depth1=depth1,
        K=camera0.K,
        baseline=baseline.to(*place_),
    )


def _baseline(depth: Tensor, camera: Camera, share: Tensor) -> Tensor:
    """(B,) so that the nearest pixel's disparity is `share` of the width."""
    nearest = depth.flatten(1).amin(dim=1).to(camera.K)
    return share * camera.size[1] * nearest / camera.K[:, 0, 0]
