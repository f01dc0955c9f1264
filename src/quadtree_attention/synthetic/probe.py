# SPDX-License-Identifier: Apache-2.0
"""`cast` in Numba on a CPU, for the few rays that measure the overlap of cameras.

For so few rays the overhead of torch operations exceeds their arithmetic. Depths are bit-identical
to those of `cast`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from quadtree_attention.synthetic.solids import Sight

Array = NDArray[np.float64]
inlined: Any = njit(nogil=True, error_model="numpy")


def _kernel(python: Callable[..., Any]) -> Any:
    """Compile a function, cached on disk if there is a writable folder."""
    try:
        return njit(nogil=True, error_model="numpy", cache=True)(python)
    except RuntimeError:
        return inlined(python)


def first_depth(sight: Sight, x: Tensor, y: Tensor) -> Tensor:
    """Return the depths of `cast`, on the CPU in float64."""
    is_round = np.array([kind == "ellipsoid" for kind in sight.kinds])
    x, y = torch.broadcast_tensors(x, y)
    rays = (t.flatten(1).contiguous().numpy() for t in (x, y))
    solids = (t.contiguous().numpy() for t in (sight.slope, sight.origin, sight.nearest))
    return torch.from_numpy(_first_depths(*solids, is_round, *rays)).reshape(x.shape)


@inlined  # type: ignore[untyped-decorator]
def _slabs(slope: Any, origin: Any, x: float, y: float) -> tuple[float, float]:
    start, end = -np.inf, np.inf
    for axis in range(3):
        direction = slope[axis, 0] * x + (slope[axis, 1] * y + slope[axis, 2])
        step = 1 / (direction + 1e-20)
        middle = step * -origin[axis]
        reach = abs(step)
        start = max(start, middle - reach)
        end = min(end, middle + reach)
    return start, end


@inlined  # type: ignore[untyped-decorator]
def _ellipsoid(slope: Any, origin: Any, x: float, y: float) -> float:
    dx = slope[0, 0] * x + (slope[0, 1] * y + slope[0, 2])
    dy = slope[1, 0] * x + (slope[1, 1] * y + slope[1, 2])
    dz = slope[2, 0] * x + (slope[2, 1] * y + slope[2, 2])
    a = dx * dx + dy * dy + dz * dz
    b = dx * origin[0] + dy * origin[1] + dz * origin[2]
    t = b / a
    nx, ny, nz = origin[0] - t * dx, origin[1] - t * dy, origin[2] - t * dz
    miss = nx * nx + ny * ny + nz * nz
    return float(-t - np.sqrt((1 - miss) / a))


@_kernel
def _first_depths(
    slope: Array, origin: Array, nearest: Array, is_round: NDArray[np.bool_], x: Array, y: Array
) -> Array:
    """Return depths (B, N) of rays x, y (B, N); other arguments as in `Sight`."""
    depths = np.empty_like(x)
    for b in range(x.shape[0]):
        for n in range(x.shape[1]):
            depths[b, n] = _slabs(slope[b, 0], origin[b, 0], x[b, n], y[b, n])[1]
        for s in range(1, slope.shape[1]):
            if nearest[b, s] == np.inf:
                continue
            for n in range(x.shape[1]):
                if is_round[s]:
                    start = _ellipsoid(slope[b, s], origin[b, s], x[b, n], y[b, n])
                    end = np.inf
                else:
                    start, end = _slabs(slope[b, s], origin[b, s], x[b, n], y[b, n])
                if start < end and nearest[b, s] < start < depths[b, n]:
                    depths[b, n] = start
    return depths
