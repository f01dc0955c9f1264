# SPDX-License-Identifier: Apache-2.0
"""Coloured points as PLY."""

import numpy as np

from quadtree_attention.images import Array

_COORDINATES, _COLOURS = ("x", "y", "z"), ("red", "green", "blue")


def encode_ply(points: Array, colours: Array) -> bytes:
    """Encodes points (N, 3) with colours (N, 3), 0 to 255, as a binary PLY file."""
    kinds = [(name, "<f4") for name in _COORDINATES] + [(name, "u1") for name in _COLOURS]
    table = np.empty(len(points), np.dtype(kinds))
    for names, values in ((_COORDINATES, points), (_COLOURS, colours)):
        for column, name in enumerate(names):
            table[name] = values[:, column]
    lines = ["ply", "format binary_little_endian 1.0", f"element vertex {len(table)}"]
    lines += [f"property float {name}" for name in _COORDINATES]
    lines += [f"property uchar {name}" for name in _COLOURS]
    return ("\n".join([*lines, "end_header"]) + "\n").encode() + table.tobytes()
