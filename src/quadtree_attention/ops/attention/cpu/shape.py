# SPDX-License-Identifier: Apache-2.0
"""Sizes of one level, as arguments of kernels."""

from typing import NamedTuple

LANES = 8  # numbers of a vector
BLOCK = 4  # rows that kernels process at a time


class Shape(NamedTuple):
    """Numbers of cells and widths of rows, all integers, so that Numba compiles one version.

    Level 0 is treated as a level whose families are `BLOCK` consecutive cells and whose
    queries keep every family of keys.

    Attributes:
        heads: Heads of one batch entry.
        families: Families of query cells of one head.
        children: Cells of a family, an even number.
        key_families: Families of key cells of one head.
        kept: Families of keys that are candidates of a family of queries.
        topk: Cells to keep; 0 at the finest level.
        width: Numbers in a row of queries or keys, a multiple of `LANES`.
        value_width: Numbers in a row of values, a multiple of `LANES`.
        is_a: 1 for variant A.
    """

    heads: int
    families: int
    children: int
    key_families: int
    kept: int
    topk: int
    width: int
    value_width: int
    is_a: int
