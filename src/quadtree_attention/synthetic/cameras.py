# SPDX-License-Identifier: Apache-2.0
"""Pinhole cameras: rotations, intrinsics, projection, and flow from depth.

Conventions: the centre of the top left pixel is (0, 0); cameras look along +z, x points right
and y down; `T_0to1` maps points of camera 0 to camera 1.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quadtree_attention.errors import ShapeError

BEHIND = -1e6  # pixel coordinate of points that are not in front of the other camera
ROUNDING = 2e-3  # pixels by which rounding may move a point across the edge of an image
NEAR = 1e-4  # minimum depth of points in front of a camera


@dataclass(frozen=True)
class Camera:
    """Intrinsics and world poses of the cameras of a batch."""

    K: Tensor  # (B, 3, 3)
    rotation: Tensor  # (B, 3, 3), its columns are the camera's axes
    centre: Tensor  # (B, 3)
    size: tuple[int, int]  # height, width

    def to_world(self, points: Tensor) -> Tensor:
        """Transform points (B, ..., 3) from camera to world coordinates."""
        return rotate(self.rotation, points) + _spread(self.centre, points)

    def from_world(self, points: Tensor) -> Tensor:
        """Transform points (B, ..., 3) from world to camera coordinates."""
        return rotate(self.rotation.mT, points - _spread(self.centre, points))

    def rays(self, dx: float | Tensor = 0.0, dy: float | Tensor = 0.0) -> tuple[Tensor, Tensor]:
        """Return x (B, 1, W) and y (B, H, 1) at depth 1 of every pixel, shifted by (dx, dy)."""
        height, width = self.size
        columns = torch.arange(width, device=self.K.device) + dx
        rows = torch.arange(height, device=self.K.device) + dy
        x = (columns - self.K[:, 0, 2, None]) / self.K[:, 0, 0, None]
        y = (rows - self.K[:, 1, 2, None]) / self.K[:, 1, 1, None]
        return x.to(self.K)[:, None, :], y.to(self.K)[:, :, None]

    def to(self, device: torch.device, dtype: torch.dtype) -> "Camera":
        return self.map(lambda t: t.to(device, dtype))

    def map(self, function: Callable[[Tensor], Tensor]) -> "Camera":
        """Apply a function to all tensors."""
        K, rotation, centre = (function(t) for t in (self.K, self.rotation, self.centre))
        return Camera(K, rotation, centre, self.size)

    def resized(self, height: int, width: int) -> "Camera":
        """Return the camera of the same view at another resolution."""
        scale = torch.tensor([width / self.size[1], height / self.size[0], 1.0]).to(self.K)
        K = self.K * scale[:, None]
        # The edges of the image stay fixed, not the centres of its corner pixels
        K[:, :2, 2] += (scale[:2] - 1) / 2
        return Camera(K, self.rotation, self.centre, (height, width))


def _spread(vector: Tensor, like: Tensor) -> Tensor:
    """Reshape (B, C) to (B, 1, ..., C) with as many axes as `like`."""
    return vector.reshape(vector.shape[0], *(1,) * (like.ndim - 2), vector.shape[-1])


def rotate(matrix: Tensor, points: Tensor) -> Tensor:
    """Multiply matrices (B, 3, 3) with points (B, ..., 3).

    Uses sums instead of a matrix product, which may run in TF32 or bfloat16 and move points by
    pixels.
    """
    columns = (_spread(matrix[..., i], points) * points[..., i, None] for i in range(3))
    first, second, third = columns
    return first + second + third


def intrinsics(focal: Tensor, centre: Tensor) -> Tensor:
    """Return camera matrices (B, 3, 3) from focal lengths (B,) and principal points (B, 2)."""
    K = torch.zeros(len(focal), 3, 3).to(focal)
    K[:, 0, 0] = K[:, 1, 1] = focal
    K[:, :2, 2] = centre
    K[:, 2, 2] = 1
    return K


def transform(camera0: Camera, camera1: Camera) -> Tensor:
    """Return `T_0to1` (B, 4, 4)."""
    T = torch.eye(4).to(camera0.K).repeat(len(camera0.K), 1, 1)
    turn = camera1.rotation.mT
    T[:, :3, :3] = torch.stack([rotate(turn, camera0.rotation[..., i]) for i in range(3)], dim=-1)
    T[:, :3, 3] = rotate(turn, camera0.centre - camera1.centre)
    return T


def from_axis_angle(vector: Tensor) -> Tensor:
    """Return rotation matrices (..., 3, 3) from axes times angles in radians (..., 3)."""
    angle = vector.norm(dim=-1, keepdim=True)
    x, y, z = (vector / angle.clamp(min=1e-12)).unbind(-1)
    zero = torch.zeros_like(x)
    cross = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], dim=-1).unflatten(-1, (3, 3))
    angle = angle[..., None]
    eye = torch.eye(3).to(vector)
    return eye + angle.sin() * cross + (1 - angle.cos()) * (cross @ cross)


def from_quaternion(quaternion: Tensor) -> Tensor:
    """Return rotation matrices (..., 3, 3) from quaternions (..., 4) of any norm."""
    w, x, y, z = F.normalize(quaternion, dim=-1).unbind(-1)
    rows = [
        *(1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
        *(2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
        *(2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
    ]
    return torch.stack(rows, dim=-1).unflatten(-1, (3, 3))


def pixel_grid(height: int, width: int, like: Tensor) -> Tensor:
    """Return coordinates (x, y) of pixel centres, (H, W, 2)."""
    rows = torch.arange(height, device=like.device, dtype=like.dtype)
    columns = torch.arange(width, device=like.device, dtype=like.dtype)
    y, x = torch.meshgrid(rows, columns, indexing="ij")
    return torch.stack([x, y], dim=-1)


def unproject(depth: Tensor, K: Tensor) -> Tensor:
    """Back-project depths (B, H, W) to points (B, H, W, 3) of the camera."""
    x, y = Camera(K, K, K[:, 0], (depth.shape[1], depth.shape[2])).rays()
    return torch.stack([x * depth, y * depth, depth], dim=-1)


def project(points: Tensor, K: Tensor) -> Tensor:
    """Project points (B, ..., 3) of a camera to pixels (B, ..., 2); `BEHIND` if not in front."""
    depth = points[..., 2:]
    in_front = depth > NEAR
    focal = _spread(torch.stack([K[:, 0, 0], K[:, 1, 1]], dim=-1), points)
    pixels = points[..., :2] / depth.where(in_front, 1) * focal + _spread(K[:, :2, 2], points)
    return pixels.where(in_front, BEHIND)


def inside(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """Return True for pixels (..., 2) inside an image of (height, width), up to rounding."""
    x, y = pixels.unbind(-1)
    in_x = (x >= -ROUNDING) & (x <= size[1] - 1 + ROUNDING)
    in_y = (y >= -ROUNDING) & (y <= size[0] - 1 + ROUNDING)
    return in_x & in_y


def depth_to_flow(depth: Tensor, K0: Tensor, K1: Tensor, T_0to1: Tensor) -> Tensor:
    """Compute the flow from view 0 to view 1 from depth and cameras.

    Args:
        depth: (B, H, W) of view 0, along its optical axis.
        K0: (B, 3, 3).
        K1: (B, 3, 3).
        T_0to1: (B, 4, 4).

    Returns:
        (B, H, W, 2), (x, y) in pixels; points behind camera 1 map to `BEHIND`, outside any image.

    Raises:
        ShapeError: The shapes do not fit.
    """
    batch = depth.shape[0] if depth.ndim == 3 else -1
    if K0.shape != (batch, 3, 3) or K1.shape != (batch, 3, 3) or T_0to1.shape != (batch, 4, 4):
        raise ShapeError(
            "depth_to_flow needs depth (B, H, W), K0 and K1 (B, 3, 3) and T_0to1 (B, 4, 4), got "
            f"{tuple(depth.shape)}, {tuple(K0.shape)}, {tuple(K1.shape)}, {tuple(T_0to1.shape)}"
        )
    points = unproject(depth, K0)
    points = rotate(T_0to1[:, :3, :3], points) + _spread(T_0to1[:, :3, 3], points)
    return project(points, K1) - pixel_grid(depth.shape[1], depth.shape[2], like=depth)


def warp(image: Tensor, flow: Tensor) -> Tensor:
    """Warp view 1 to view 0 by a flow, with bilinear interpolation.

    Args:
        image: (B, C, H1, W1), view 1.
        flow: (B, H, W, 2), from view 0 to view 1, in pixels.

    Returns:
        (B, C, H, W), bilinear; 0 outside.

    Raises:
        ShapeError: The shapes do not fit.

    Example:
        >>> image = torch.rand(1, 3, 24, 32)
        >>> camera = torch.tensor([[30.0, 0, 16], [0, 30, 12], [0, 0, 1]])[None]
        >>> flow = depth_to_flow(torch.ones(1, 24, 32), camera, camera, torch.eye(4)[None])
        >>> bool((warp(image, flow) - image).abs().max() < 1e-3)  # the camera did not move
        True
    """
    fits = image.ndim == 4 and flow.ndim == 4 and flow.shape[-1] == 2
    if not fits or image.shape[0] != flow.shape[0]:
        raise ShapeError(
            "warp needs an image (B, C, H1, W1) and a flow (B, H, W, 2), got "
            f"{tuple(image.shape)} and {tuple(flow.shape)}"
        )
    last = torch.tensor([image.shape[3] - 1, image.shape[2] - 1]).clamp(min=1).to(flow)
    pixels = flow + pixel_grid(flow.shape[1], flow.shape[2], like=flow)
    return F.grid_sample(image, pixels / last * 2 - 1, align_corners=True)
