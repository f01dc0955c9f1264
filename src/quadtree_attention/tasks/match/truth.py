# SPDX-License-Identifier: Apache-2.0
"""The true matches of a pair of images, from the positions of its pixels in the other image.

A coarse cell represents the pixel at (stride * column, stride * row). Two cells match if each is
the nearest cell to the position of the other cell's pixel, and both pixels are visible in both
images.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quadtree_attention.models.parts.coarse_matching import CoarseMatches
from quadtree_attention.synthetic.cameras import pixel_grid, project, rotate, unproject

DEPTH_TOLERANCE = 0.2  # maximum relative difference of depths of one surface


@dataclass(frozen=True)
class View:
    """Positions of the pixels of an image in the other one.

    Attributes:
        target: (B, H, W, 2), pixels (x, y) of the other image.
        seen: (B, H, W) bool, True for pixels visible in the other image.
    """

    target: Tensor
    seen: Tensor

    def at_cells(self, stride: int) -> "View":
        """Return the view at the pixels of coarse cells: ceil(H / stride) x ceil(W / stride)."""
        return View(self.target[:, ::stride, ::stride], self.seen[:, ::stride, ::stride])


def view_from_flow(flow: Tensor, seen: Tensor) -> View:
    """Return the view from the flow (B, H, W, 2) of pixels."""
    _, height, width, _ = flow.shape
    return View(pixel_grid(height, width, like=flow) + flow, seen)


def view_from_depth(depth: Tensor, other: Tensor, K: Tensor, other_K: Tensor, T: Tensor) -> View:
    """Return the view from measured depths; a point is visible if the depth at its target agrees.

    Args:
        depth: (B, H, W) of this view, 0 where unknown.
        other: (B, h, w) of the other view, 0 where unknown.
        K: Camera (B, 3, 3) of this view.
        other_K: Camera of the other view.
        T: Motion (B, 4, 4) from this camera to the other.
    """
    # No matrix products: autocast would run them in bfloat16, which moves points by pixels
    points = rotate(T[:, :3, :3], unproject(depth, K)) + T[:, None, None, :3, 3]
    target = project(points, other_K)
    found = depth_at(other, target)  # 0 for points behind the camera
    agrees = (found > 0) & ((found - points[..., 2]).abs() < DEPTH_TOLERANCE * found)
    return View(target, (depth > 0) & agrees)


def depth_at(depth: Tensor, points: Tensor) -> Tensor:
    """Depth (B, h, w) at the pixel nearest to each point (B, ..., 2); 0 outside the image."""
    batch, height, width = depth.shape
    x, y = points.round().unbind(dim=-1)
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    cell = y.clamp(0, height - 1).long() * width + x.clamp(0, width - 1).long()
    found = depth.flatten(1).gather(1, cell.flatten(1)).view(batch, *points.shape[1:-1])
    return torch.where(inside, found, 0)


def true_matches(view0: View, view1: View, stride: int) -> tuple[CoarseMatches, Tensor]:
    """Return matching coarse cells, sorted by sample and by cell of image 0.

    Args:
        view0: Image 0.
        view1: Image 1.
        stride: Pixels per coarse cell.

    Returns:
        The matches, and the true position in image 1 of the pixel of each cell of image 0 (M, 2).
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
    """Return the cell of the other map nearest to each cell's target (B, L); -1 if not visible."""
    _, height, width, _ = other.target.shape
    x, y = (cells.target / stride).round().unbind(dim=-1)
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height) & cells.seen
    x, y = (torch.nan_to_num(v).clamp(-1, 2**24) for v in (x, y))
    return torch.where(inside, y * width + x, -1).long().flatten(1)
