# SPDX-License-Identifier: Apache-2.0
"""Self-contained HTML: one file with its styles, scripts, pictures and data, and no network."""

import base64
import gzip
import html
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from PIL import Image

from quadtree_attention.errors import OptionError
from quadtree_attention.files import StrPath, write_whole

SUFFIXES = (".html", ".htm")
QUALITY = 82  # of JPEGs
FRAME = 900  # pixels of the height of a page in a notebook


@dataclass(frozen=True)
class Page:
    """A self-contained HTML page; a notebook shows it in a frame."""

    html: str

    def save(self, path: StrPath) -> None:
        """Write the page atomically.

        Raises:
            OptionError: The suffix is not .html, or the file cannot be written.
        """
        check_suffix(path)
        write_whole(path, self.html.encode())

    def _repr_html_(self) -> str:
        content = html.escape(self.html)
        return (
            f'<iframe srcdoc="{content}" title="explorer" sandbox="allow-scripts allow-downloads" '
            f'style="width:100%;height:{FRAME}px;border:0"></iframe>'
        )


def check_suffix(path: StrPath) -> None:
    """Raises `OptionError` unless the suffix of a file is .html."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise OptionError(f"pages are written as .html, got {str(path)!r}; change the suffix")


def make_page(
    folder: str,
    template: str,
    styles: Sequence[str],
    modules: Sequence[str],
    fields: Mapping[str, str],
    about: Mapping[str, Any],
    data: bytes,
) -> Page:
    """Fill a template of the package.

    Args:
        folder: Folder of the sources in `quadtree_attention.viz`.
        template: HTML with `{{name}}` for every field, and for styles, script, about and data.
        styles: CSS files.
        modules: JavaScript modules, each after its imports.
        fields: HTML by name.
        about: JSON for the script.
        data: Bytes for the script; stored as gzip in base64.
    """
    source = files("quadtree_attention.viz") / folder
    parts = {
        **fields,
        "styles": "\n".join((source / name).read_text("utf-8") for name in styles),
        "script": "\n".join(inlined((source / name).read_text("utf-8")) for name in modules),
        "about": json.dumps(about, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        "data": base64.b64encode(gzip.compress(data, 9, mtime=0)).decode(),
    }
    text = (source / template).read_text("utf-8")
    return Page(re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], text))


def inlined(module: str) -> str:
    """Removes imports and exports of a module, for a single script of all modules."""
    lines = (line.removeprefix("export ") for line in module.splitlines())
    return "\n".join(line for line in lines if not line.startswith("import "))


def data_uri(image: Image.Image) -> str:
    """Encodes an image as a JPEG data URI."""
    content = io.BytesIO()
    image.convert("RGB").save(content, "JPEG", quality=QUALITY, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(content.getvalue()).decode()
