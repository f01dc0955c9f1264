# SPDX-License-Identifier: Apache-2.0
"""The disparities of a pair, and their files."""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from quadtree_attention import checks
from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.files import StrPath, write_whole
from quadtree_attention.images import Array
from quadtree_attention.tasks.contract import Codec, Result, table
from quadtree_attention.tasks.readers import npz_bytes, read_npz
from quadtree_attention.tasks.stereo.formats import WRITTEN, encode_disparity, read_disparity
from quadtree_attention.viz.canvas import save_picture
from quadtree_attention.viz.ply import encode_ply

OCCLUDED = 0.5  # probability above which a pixel counts as occluded
SPREAD = "min", "median", "max"


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Disparity(Result):
    """The horizontal shift of each left pixel in the right image.

    Attributes:
        disparity: (H, W) float32, in pixels of the original images: (x, y) on the left corresponds
            to (x - disparity, y) on the right. Occluded pixels continue the background.
        occlusion: (H, W) float32, the probability that the pixel is occluded in the right image;
            None if a file has none.
    """

    task: ClassVar[str] = "stereo"

    disparity: Array
    occlusion: Array | None = None

    def depth(self, focal: float, baseline: float, *, offset: float = 0.0) -> Array:
        """Return the distance along the optical axis, (H, W) float32, in the unit of `baseline`.

        It is baseline * focal / (disparity + offset), or infinite if this is not positive.

        Args:
            focal: Focal length of the original rectified images, in pixels.
            baseline: Distance between the cameras.
            offset: Pixels by which the right camera's centre is further right than the left one's
                (`doffs` of Middlebury).

        Raises:
            OptionError: A length is not positive, or the offset not finite.
        """
        check_cameras(focal, baseline, offset)
        apart = self.disparity.astype(np.float64) + offset
        far = np.full(apart.shape, np.inf)
        return np.divide(focal * baseline, apart, out=far, where=apart > 0).astype(np.float32)

    def points(
        self,
        focal: float,
        baseline: float,
        *,
        offset: float = 0.0,
        centre: tuple[float, float] | None = None,
        occluded: bool = False,
        farthest: float | None = None,
    ) -> tuple[Array, Array]:
        """Return points (N, 3) float32 and colours (N, 3) uint8, one per pixel with a depth.

        x is to the right, y down and z along the optical axis, from the left camera, in the unit of
        `baseline`. Colours are from the left image, or grey if a file has no image.

        Args:
            focal: As for `depth`.
            baseline: As for `depth`.
            offset: As for `depth`.
            centre: Principal point (x, y) in pixels; None: the middle of the image.
            occluded: Include occluded pixels, whose disparity is extrapolated.
            farthest: Maximum z; None: no limit.

        Raises:
            OptionError: As for `depth`, `farthest` is not positive, or `centre` is no point.
        """
        checks.above(0, farthest=farthest)
        if centre is not None and np.shape(centre) != (2,):
            raise OptionError(f"centre must be x and y in pixels, got {centre!r}; pass two numbers")
        z = self.depth(focal, baseline, offset=offset)
        kept = np.isfinite(z)
        if farthest is not None:
            kept &= z <= farthest
        if self.occlusion is not None and not occluded:
            kept &= self.occlusion <= OCCLUDED
        height, width = z.shape
        x0, y0 = ((width - 1) / 2, (height - 1) / 2) if centre is None else centre
        rows, columns = np.nonzero(kept)
        far = z[kept].astype(np.float64)
        found = np.stack([(columns - x0) * far / focal, (rows - y0) * far / focal, far], axis=1)
        colours = np.full((len(far), 3), 128, np.uint8)
        if self.images:
            colours = np.asarray(self.images[0].convert("RGB"))[kept]
        return found.astype(np.float32), colours

    def save_points(self, path: StrPath, focal: float, baseline: float, **options: Any) -> None:
        """Write `points` as .ply, atomically."""
        if Path(path).suffix != ".ply":
            raise OptionError(f"points are written as .ply, got {str(path)!r}; name it so")
        write_whole(path, encode_ply(*self.points(focal, baseline, **options)))

    @property
    def occluded(self) -> float:
        """Share of pixels that are occluded."""
        return 0.0 if self.occlusion is None else float((self.occlusion > OCCLUDED).mean())

    def draw_occlusion(self, path: StrPath | None = None) -> Image.Image:
        """Draw occlusion as a grey picture of the size of the image, white if occluded."""
        shown = np.zeros_like(self.disparity) if self.occlusion is None else self.occlusion
        picture = Image.fromarray((np.clip(shown, 0, 1) * 255).round().astype(np.uint8))
        if path is not None:
            save_picture(picture, path)
        return picture

    def save_depth(self, path: StrPath, focal: float, baseline: float, **options: float) -> None:
        """Write `depth` as .npy, atomically."""
        if Path(path).suffix != ".npy":
            raise OptionError(f"depth is written as .npy, got {str(path)!r}; name it so")
        content = io.BytesIO()
        np.save(content, self.depth(focal, baseline, **options))
        write_whole(path, content.getvalue())

    def to_dict(self) -> dict[str, Any]:
        return {
            "width": self.disparity.shape[1],
            "height": self.disparity.shape[0],
            "disparity": dict(zip(SPREAD, spread(self.disparity), strict=True)),
            "occluded": round(self.occluded, 4),
            "seconds": round(self.seconds, 4),
            "matched_at": self.seen[0] if self.seen else None,
            "warnings": list(self.warnings),
        }

    def to_text(self) -> str:
        low, middle, high = spread(self.disparity)
        rows = {
            "disparity": f"{low:.1f} to {high:.1f} px, median {middle:.1f}",
            "occluded": f"{100 * self.occluded:.1f} % of the left image",
            "time": f"{self.seconds:.2f} s",
        }
        if self.seen:
            given = self.disparity.shape[::-1]
            at, of = ("{}x{}".format(*size) for size in (self.seen[0], given))
            rows["matched at"] = at if self.seen[0] == given else f"{at} (of {of})"
        return table(rows)


def spread(values: Array) -> tuple[float, float, float]:
    """Minimum, median and maximum; 0 without values."""
    if not values.size:
        return 0.0, 0.0, 0.0
    return float(values.min()), float(np.median(values)), float(values.max())


def check_cameras(focal: float, baseline: float, offset: float = 0.0) -> None:
    """Raise `OptionError` for cameras that have no depth; see `Disparity.depth`."""
    checks.above(0, focal=focal, baseline=baseline)
    if not np.isfinite(offset):
        raise OptionError(f"offset must be finite, got {offset}; pass that of the cameras")


class DisparityCodec(Codec[Disparity]):
    """`disparity` and `occlusion` as .npz, or disparity alone in the formats of other programs."""

    suffixes = (".npz", *WRITTEN)

    def encode(self, found: Mapping[str, Disparity], suffix: str) -> bytes:
        (result,) = found.values()
        if suffix != ".npz":
            return encode_disparity(result.disparity, suffix)
        arrays = {"disparity": result.disparity}
        if result.occlusion is not None:
            arrays["occlusion"] = result.occlusion.astype(np.float16)
        return npz_bytes(**arrays)

    def decode(self, path: Path) -> dict[str, Disparity]:
        disparity = read_disparity(path, truth=False).values
        stored = read_npz(path, (), ("occlusion",)) if path.suffix == ".npz" else {}
        if (occlusion := stored.get("occlusion")) is None:
            return {path.stem: Disparity(disparity=disparity)}
        if occlusion.shape != disparity.shape or occlusion.dtype.kind not in "fbiu":
            raise DataError(
                f"{path} must hold an occlusion {disparity.shape} as its disparity, got "
                f"{occlusion.shape} of {occlusion.dtype}; write it again"
            )
        found = Disparity(disparity=disparity, occlusion=occlusion.astype(np.float32))
        return {path.stem: found}
