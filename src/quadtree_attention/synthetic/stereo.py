# SPDX-License-Identifier: Apache-2.0
"""Rectified stereo pairs of synthetic scenes, with exact disparity and occlusion."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quadtree_attention.synthetic.cameras import Camera
from quadtree_attention.synthetic.draws import Draws
from quadtree_attention.synthetic.fused import apart
from quadtree_attention.synthetic.layout import Scene, first_camera, place
from quadtree_attention.synthetic.options import StereoOptions, check_size
from quadtree_attention.synthetic.photometric import distort
from quadtree_attention.synthetic.solids import cast, see
from quadtree_attention.synthetic.textures import Textures
from quadtree_attention.synthetic.views import both_views


@dataclass(frozen=True)
class StereoPair:
    """Left (0) and right (1) views; left x corresponds to right x - disparity0."""

    image0: Tensor  # (B, 3, H, W) between 0 and 1
    image1: Tensor  # (B, 3, H, W)
    disparity0: Tensor  # (B, H, W) pixels, positive, also where occluded
    disparity1: Tensor  # (B, H, W): x in the right view corresponds to x + disparity1 in the left
    occluded0: Tensor  # (B, H, W) bool: occluded in, or outside of, the other view
    occluded1: Tensor  # (B, H, W)
    depth0: Tensor  # (B, H, W)
    depth1: Tensor  # (B, H, W)
    K: Tensor  # (B, 3, 3) of both views
    baseline: Tensor  # (B,) distance of the cameras


def stereo_pairs(
    textures: Textures,
    indices: Sequence[int],
    *,
    size: tuple[int, int] = (480, 640),
    seed: int = 0,
    options: StereoOptions | None = None,
) -> StereoPair:
    """Render rectified stereo pairs, on the device of the textures.

    Args:
        textures: Textures of the surfaces.
        indices: Indices of the pairs of the batch.
        size: (height, width).
        seed: Seed of the data set.
        options: Content of the scenes and range of disparities.

    Raises:
        OptionError: A size, seed or index is not accepted.

    Example:
        >>> from quadtree_attention.synthetic import ProceduralTextures, stereo_pairs
        >>> pair = stereo_pairs(ProceduralTextures(8, size=32), range(2), size=(24, 33))
        >>> pair.image0.shape, pair.disparity0.shape
        (torch.Size([2, 3, 24, 33]), torch.Size([2, 24, 33]))
    """
    options = StereoOptions() if options is None else options
    check_size("size", size)
    with apart(textures.device):
        draws = Draws(seed, indices, stream=1)
        camera0 = first_camera(draws, size, options.focal)
        scene = place(draws, camera0, options, len(textures))
        baseline = _baseline(scene, camera0, draws.uniform(*options.disparity), textures.device)
        centre = baseline[:, None] * torch.eye(3)[0]
        camera1 = Camera(camera0.K, camera0.rotation, centre, size)
        cameras = camera0, camera1
        view0, view1 = both_views(scene, cameras, textures, options.samples)
        image0, depth0, _, visible0 = view0
        image1, depth1, _, visible1 = view1
        strength = options.photometric
        K, baseline = camera0.K.to(depth0), baseline.to(depth0)
        shift = (K[:, 0, 0] * baseline)[:, None, None]
        return StereoPair(
            image0=distort(image0, indices, seed=seed, view=2, strength=strength),
            image1=distort(image1, indices, seed=seed, view=3, strength=strength),
            disparity0=shift / depth0,
            disparity1=shift / depth1,
            occluded0=~visible0,
            occluded1=~visible1,
            depth0=depth0,
            depth1=depth1,
            K=K,
            baseline=baseline,
        )


def _baseline(scene: Scene, camera: Camera, share: Tensor, device: torch.device) -> Tensor:
    """Return baselines (B,) so that the largest disparity is `share` of the width."""
    place_ = device, torch.float32
    depth = cast(see(scene.solids, camera, *place_), *camera.to(*place_).rays())[0]
    nearest = depth.flatten(1).amin(dim=1).to(camera.K)
    return share * camera.size[1] * nearest / camera.K[:, 0, 0]
