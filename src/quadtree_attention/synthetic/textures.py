# SPDX-License-Identifier: Apache-2.0
"""Texture banks with mip levels, from photographs or other images."""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from quadtree_attention.errors import DataError, OptionError, ShapeError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm"})
SIZE = 320  # side in pixels: keeps the detail of photographs of 481 x 321
LANCZOS = 1  # Pillow's index of the filter
COARSEST = 8  # smallest side of a mip level


@dataclass(frozen=True)
class Bank:
    """Tensors of a texture bank, for look-ups."""

    texels: Tensor  # (N,) int32 of all levels, finest first, then by texture
    levels: Tensor  # (2, L) int64: offset and side of each level
    size: int  # side of the finest level

    def look_up(self, index: Tensor, u: Tensor, v: Tensor, footprint: Tensor) -> Tensor:
        """Return colours of points, interpolated between texels and between levels.

        Args:
            index: (N,) int64 indices of textures.
            u: (N,) texels from the left edge.
            v: (N,) texels from the upper edge.
            footprint: (N,) side of the area that the point covers, in texels.

        Returns:
            (3, N) float32 between 0 and 1.
        """
        level = footprint.clamp(min=1).log2().clamp(max=self.levels.shape[1] - 1)
        fine = level.floor()
        coarse = (fine + 1).clamp(max=self.levels.shape[1] - 1)
        blend = level - fine
        colour = torch.lerp(
            self._bilinear(index, u, v, fine.long()),
            self._bilinear(index, u, v, coarse.long()),
            blend,
        )
        return colour.mul_(1 / 255)

    def _bilinear(self, index: Tensor, u: Tensor, v: Tensor, level: Tensor) -> Tensor:
        start, size = self.levels.index_select(1, level)
        x0, x1, right = _neighbours(u, size, self.size)
        y0, y1, down = _neighbours(v, size, self.size)
        first = start + index * size * size
        upper, lower = first + y0 * size, first + y1 * size
        return torch.lerp(
            torch.lerp(self._texel(upper + x0), self._texel(upper + x1), right),
            torch.lerp(self._texel(lower + x0), self._texel(lower + x1), right),
            down,
        )

    def _texel(self, row: Tensor) -> Tensor:
        return _unpack(self.texels.index_select(0, row)).float()  # (3, N)


class Textures:
    """Square textures with their mip levels, on one device.

    Textures are mirrored beyond their edges.

    Args:
        images: (T, 3, S, S) uint8.

    Example:
        >>> Textures(torch.zeros(4, 3, 32, 32, dtype=torch.uint8)).count
        4
    """

    def __init__(self, images: Tensor) -> None:
        count, channels, size, width = images.shape if images.ndim == 4 else (0, 0, 0, 1)
        if not (count and channels == 3 and size == width and images.dtype == torch.uint8):
            raise ShapeError(
                "textures must be square uint8 images (T, 3, S, S), at least one, got "
                f"{tuple(images.shape)} {images.dtype}"
            )
        self.count = count
        self.sizes = level_sizes(size)
        areas = [count * side**2 for side in self.sizes]
        starts = [sum(areas[:level]) for level in range(len(areas))]
        levels = torch.tensor([starts, self.sizes], device=images.device)
        # A colour is packed into one integer, so that a look-up is one read
        texels = torch.cat([_pack(level).flatten() for level in _pyramid(images)])
        self.bank = Bank(texels, levels, size)

    def __len__(self) -> int:
        return self.count

    @property
    def size(self) -> int:
        return self.sizes[0]

    @property
    def device(self) -> torch.device:
        return self.bank.texels.device

    def images(self) -> Tensor:
        """Return the textures (T, 3, S, S) uint8."""
        finest = self.bank.texels[: self.count * self.size**2]
        channels = _unpack(finest.reshape(self.count, self.size, self.size))
        return channels.transpose(0, 1).to(torch.uint8)

    def to(self, device: torch.device | str) -> Self:
        """Move the bank to a device, in place as modules do; pairs are rendered on this device."""
        with torch.inference_mode(False):  # validation may run first; training uses the same bank
            bank = self.bank
            self.bank = Bank(bank.texels.to(device), bank.levels.to(device), bank.size)
        return self

    def look_up(self, index: Tensor, u: Tensor, v: Tensor, footprint: Tensor) -> Tensor:
        """See `Bank.look_up`."""
        return self.bank.look_up(index, u, v, footprint)


def level_sizes(size: int) -> list[int]:
    """Return the sides of the mip levels of a texture, finest first."""
    sizes = [size]
    while sizes[-1] % 2 == 0 and sizes[-1] >= 2 * COARSEST:
        sizes.append(sizes[-1] // 2)
    return sizes


def _pyramid(images: Tensor) -> list[Tensor]:
    """Yield (T, 3, S, S) uint8 of every level, finest first."""
    levels = [images]
    for _ in level_sizes(images.shape[-1])[1:]:
        levels.append((F.avg_pool2d(levels[-1].float(), 2) + 0.5).to(torch.uint8))
    return levels


def _pack(images: Tensor) -> Tensor:
    """Pack colours (T, 3, S, S) uint8 into (T, S, S) int32."""
    red, green, blue = images.to(torch.int32).unbind(1)
    return red | (green << 8) | (blue << 16)


def _unpack(colours: Tensor) -> Tensor:
    """Unpack colours (...) into (3, ...) in 0 ... 255."""
    return torch.stack([(colours >> shift) & 255 for shift in (0, 8, 16)])


def _neighbours(position: Tensor, size: Tensor, finest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the two texels around a position on one axis, and the weight of the second."""
    period = position.remainder(2 * finest)
    mirrored = torch.minimum(period, 2 * finest - period)  # 0 ... finest
    along = mirrored * (size / finest) - 0.5
    low = along.floor()
    first = low.long()
    return first.clamp(min=0), torch.minimum(first + 1, size - 1), along - low


class MixedTextures(Textures):
    """The textures of several banks of equal size; a bank given twice is sampled twice as often."""

    def __init__(self, *banks: Textures) -> None:
        sizes = {bank.size for bank in banks}
        if len(sizes) != 1:
            raise OptionError(
                f"banks of textures must be of one size to be mixed, got {sorted(sizes)}; "
                "make them with the same size="
            )
        super().__init__(torch.cat([bank.images() for bank in banks]))


class PhotoTextures(Textures):
    """Square crops of all photographs in a folder and its subfolders, read once.

    A photograph with a large aspect ratio gives two crops, one at each end. Unreadable files are
    skipped with a warning and listed in `skipped`.

    Args:
        folder: Folder of the photographs.
        size: Side of a texture in pixels.
        limit: Maximum number of photographs, in the order of their names.

    Raises:
        DataError: The folder is missing, or contains no readable photograph.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, size: int = SIZE, limit: int | None = None
    ) -> None:
        root = Path(folder)
        if not root.is_dir():
            raise DataError(f"no folder of photographs at {root}; check the path")
        paths = sorted(p for p in root.rglob("*") if p.suffix.lower() in SUFFIXES)[:limit]
        self.skipped: list[str] = []
        cuts: list[Tensor] = []
        for path in paths:
            try:
                cuts += _square_cuts(path, size)
            except DataError as error:
                self.skipped.append(str(error))
        if not cuts:
            raise DataError(
                f"no photographs that can be read in {root}: {len(paths)} with a known suffix "
                f"({', '.join(sorted(SUFFIXES))}), {len(self.skipped)} of them unreadable; "
                "put JPEG or PNG files there"
            )
        self._report()
        super().__init__(torch.stack(cuts))

    def _report(self) -> None:
        if self.skipped:
            shown = "; ".join(self.skipped[:3]) + ("; ..." if len(self.skipped) > 3 else "")
            warnings.warn(
                f"{len(self.skipped)} photographs cannot be read and are left out: {shown}",
                stacklevel=3,
            )


def _square_cuts(path: Path, size: int) -> list[Tensor]:
    """Return one or two crops (3, S, S) uint8."""
    from quadtree_attention.images import to_image  # only photographs need Pillow

    upright = to_image(path)
    boxes = _square_boxes(*upright.size)
    cuts = [upright.resize((size, size), LANCZOS, box=box) for box in boxes]
    return [
        torch.frombuffer(bytearray(cut.tobytes()), dtype=torch.uint8)
        .reshape(size, size, 3)
        .permute(2, 0, 1)
        for cut in cuts
    ]


def _square_boxes(width: int, height: int) -> Sequence[tuple[int, int, int, int]]:
    side = min(width, height)
    spare = max(width, height) - side
    starts = [0, spare] if spare > side / 4 else [spare // 2]
    if width >= height:
        return [(start, 0, start + side, side) for start in starts]
    return [(0, start, side, start + side) for start in starts]
