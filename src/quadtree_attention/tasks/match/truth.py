# SPDX-License-Identifier: Apache-2.0
"""The true matches of a pair of images, from where its pixels go.

A coarse cell stands for one pixel, that at (stride * column, stride * row). Two cells match if each
is the nearest to where the pixel of the other goes, and both pixels can be seen in both images.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quadtree_attention.models.parts.coarse_matching import CoarseMatches
from quadtree_attention.synthetic.cameras import pixel_grid, project, rotate, unproject

DEPTH_TOLERANCE = 0.2  # share by which depths may differ and still be of one surface


@dataclass(frozen=True)
class View:
    """Positions of the pixels of an image in the other one.

    Attributes:
        target: (B, H, W, 2), pixels (x, y) of the other image.
        seen: (B, H, W) bool, whether what the pixel shows can be seen there.
    """

    target: Tensor
    seen: Tensor

    def at_cells(self, stride: int) -> "View":
        """The pixels that coarse cells stand for: ceil(H / stride) x ceil(W / stride)."""
        return View(self.target[:, ::stride, ::stride], self.seen[:, ::stride, ::stride])


def view_from_flow(flow: Tensor, seen: Tensor) -> View:
    """From how far every pixel moves, (B, H, W, 2)."""
    _, height, width, _ = flow.shape
    return View(pixel_grid(height, width, like=flow) + flow, seen)


def view_from_depth(depth: Tensor, other: Tensor, K: Tensor, other_K: Tensor, T: Tensor) -> View:
    """From measured depths; a point is seen if the depth found where it goes agrees with its own.

    Args:
        depth: (B, H, W) of this view, 0 where unknown.
        other: (B, h, w) of the other view, 0 where unknown.
        K: Camera (B, 3, 3) of this view.
        other_K: Camera of the other view.
        T: Motion (B, 4, 4) from this camera to the other.
    """
    # No matrix products: a training step runs in bfloat16, which would move points by pixels
    points = rotate(T[:, :3, :3], unproject(depth, K)) + T[:, None, None, :3, 3]
    target = project(points, other_K)
    found = depth_at(other, target)  # 0 where the point is behind the camera
    agrees = (found > 0) & ((found - points[..., 2]).abs() < DEPTH_TOLERANCE * found)
    return View(target, (depth > 0) & agrees)


def depth_at(depth: Tensor, points: Tensor) -> Tensor:
    """Depth (B, h, w) at the pixel nearest to each point (B, ..., 2); 0 outside of the image."""
    batch, height, width = depth.shape
    x, y = points.round().unbind(dim=-1)
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    cell = y.clamp(0, height - 1).long() * width + x.clamp(0, width - 1).long()
    found = depth.flatten(1).gather(1, cell.flatten(1)).view(batch, *points.shape[1:-1])
    return torch.where(inside, found, 0)


def true_matches(view0: View, view1: View, stride: int) -> tuple[CoarseMatches, Tensor]:
    """Coarse cells that match, by sample and then by cell of image 0.

    Args:
        view0: Image 0.
        view1: Image 1.
        stride: Pixels per coarse cell.

    Returns:
        The matches, and where in image 1 the pixel of each cell of image 0 truly is (M, 2).
    """
    cells0, cells1 = view0.at_cells(stride), view1.at_cells(stride)
    to1 = _nearest(cells0, cells1, stride)  # (B, L0)
    to0 = _nearest(cells1, cells0, stride)  # (B, L1)
    back = to0.gather(1, to1.clamp(min=0))
    here = torch.arange(to1.shape[1], device=to1.device)
    batch, cell0 = ((to1 >= 0) & (back == here)).nonzero(as_tuple=True)
    cell1 = to1[batch, cell0]
    points = cells0.target.flatten(1, 2)[batch, cell0]
    return CoarseMatches(batch, cell0, cell1, torch.zeros_like(points[:, 0])), points


def _nearest(cells: View, other: View, stride: int) -> Tensor:
    """The cell of the other map nearest to where each cell goes (B, L); -1 where it is not seen."""
    _, height, width, _ = other.target.shape
    x, y = (cells.target / stride).round().unbind(dim=-1)
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height) & cells.seen
    x, y = (torch.nan_to_num(v).clamp(-1, 2**24) for v in (x, y))
    return torch.where(inside, y * width + x, -1).long().flatten(1)
