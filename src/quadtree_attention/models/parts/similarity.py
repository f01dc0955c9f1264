# SPDX-License-Identifier: Apache-2.0
"""The similarity matrix of two maps, computed in tiles of rows if it is large.

At 2048x2048 pixels the maps have 65,536 cells each, and the matrix would take 17 GB.
It is never stored: sums and maxima over rows and columns are reduced tile by tile. Tiles
are recomputed for every pass, always of the same rows, so that all passes use the same values; and
the maxima of rows and of columns are taken in one pass, so that mutual nearest neighbours are
consistent for any rounding.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

# Similarity of hidden cells. Finite, so that sums over hidden cells only have gradients.
HIDDEN = -1e9


class Similarity:
    """Products of the features of two maps, `HIDDEN` for pairs with a hidden cell.

    Args:
        features0: (B, S, C)
        features1: (B, T, C)
        visible0: Boolean (B, S), or None.
        visible1: Boolean (B, T), or None.
        max_entries: Entries of a tile; None: the whole matrix. Temporary results take up to
            three times the same. Use None with gradients, which store every tile anyway.
        tile_entries: Entries of a tile, if that is less. A matrix of up to `max_entries` is then
            kept in such tiles: smaller temporary results, and memory that was freed is used again.
    """

    def __init__(
        self,
        features0: Tensor,
        features1: Tensor,
        visible0: Tensor | None = None,
        visible1: Tensor | None = None,
        *,
        max_entries: int | None = None,
        tile_entries: int | None = None,
    ) -> None:
        self.features0, self.features1 = features0, features1
        self.visible0, self.visible1 = visible0, visible1
        batch, self.num_rows, _ = features0.shape
        width = max(1, batch * features1.shape[1])
        rows = self.num_rows if max_entries is None else max_entries // width
        fits = rows >= self.num_rows
        if tile_entries is not None:
            rows = min(rows, tile_entries // width)
        self.rows_per_tile = max(1, rows)
        self._kept: list[tuple[slice, Tensor]] | None = None
        if fits:
            self._kept = list(self.tiles())

    def log_sums(self) -> tuple[Tensor, Tensor]:
        """Log-sum-exp over rows and over columns: (B, S), (B, T)."""
        rows: list[Tensor] = []
        columns: Tensor | None = None
        for _, tile in self.tiles():
            rows.append(tile.logsumexp(dim=2))
            columns = _add(columns, tile.logsumexp(dim=1))
            del tile  # free it before the next tile is computed
        assert columns is not None
        return torch.cat(rows, dim=1), columns

    def row_log_sums(self, of_columns: Tensor) -> Tensor:
        """Return log-sum-exp over rows (B, S), after adding (B, T) to every row."""
        added = of_columns[:, None]
        return torch.cat([(tile + added).logsumexp(dim=2) for _, tile in self.tiles()], dim=1)

    def column_log_sums(self, of_rows: Tensor) -> Tensor:
        """Return log-sum-exp over columns (B, T), after adding (B, S) to every column."""
        columns: Tensor | None = None
        for rows, tile in self.tiles():
            columns = _add(columns, (tile + of_rows[:, rows, None]).logsumexp(dim=1))
            del tile
        assert columns is not None
        return columns

    def best(
        self, gain: float, of_rows: Tensor, of_columns: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return maxima of `gain * similarity + of_rows + of_columns`, the first of equal ones.

        Returns:
            The maximum of every row (B, S), its column (B, S), the row of the maximum of every
            column (B, T).
        """
        values, places = [], []
        column_value: Tensor | None = None
        column_place: Tensor | None = None
        for rows, tile in self.tiles():
            scores = tile * gain
            scores += of_rows[:, rows, None]
            scores += of_columns[:, None]
            value, place = scores.max(dim=2)
            values.append(value)
            places.append(place)
            value, place = scores.max(dim=1)
            place += rows.start
            if column_value is None or column_place is None:
                column_value, column_place = value, place
            else:
                column_place = torch.where(value > column_value, place, column_place)
                column_value = torch.maximum(value, column_value)
            del tile, scores
        assert column_place is not None
        return torch.cat(values, dim=1), torch.cat(places, dim=1), column_place

    def tiles(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of rows and their similarities (B, rows, T)."""
        if self._kept is not None:
            yield from self._kept
            return
        whole = (
            self.rows_per_tile >= self.num_rows
        )  # also of a symbolic number of rows, in an export
        for start in (0,) if whole else range(0, self.num_rows, self.rows_per_tile):
            rows = slice(start, min(start + self.rows_per_tile, self.num_rows))
            tile = self._tile(rows)
            yield rows, tile
            del tile  # free it before the next tile is computed

    def _tile(self, rows: slice) -> Tensor:
        tile = self.features0[:, rows] @ self.features1.mT
        if self.visible0 is not None:
            tile = tile.masked_fill(~self.visible0[:, rows, None], HIDDEN)
        if self.visible1 is not None:
            tile = tile.masked_fill(~self.visible1[:, None], HIDDEN)
        return tile


def _add(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else torch.logaddexp(total, part)
