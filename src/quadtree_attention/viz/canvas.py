# SPDX-License-Identifier: Apache-2.0
"""What pictures of all tasks have in common: formats, and the colours of what is not the image."""

import io
import os
from pathlib import Path

from PIL import Image

from quadtree_attention.errors import OptionError
from quadtree_attention.files import write_whole

FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
BACKGROUND, TEXT, FAINT = (22, 24, 29), (240, 240, 240), (160, 165, 175)


def save_picture(picture: Image.Image, path: str | os.PathLike[str]) -> None:
    """Writes a picture, all or nothing.

    Raises:
        OptionError: The suffix is of no known format, or the file cannot be written.
    """
    content = io.BytesIO()
    picture.save(content, format=picture_format(path), quality=92)
    write_whole(path, content.getvalue())


def picture_format(path: str | os.PathLike[str]) -> str:
    """The format that a file is written in, by its suffix; else raises `OptionError`."""
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise OptionError(
            f"pictures are written as {', '.join(FORMATS)}, got {str(path)!r}; name it so"
        )
    return FORMATS[suffix]
