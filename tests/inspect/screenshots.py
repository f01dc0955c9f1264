# SPDX-License-Identifier: Apache-2.0
"""Draws the screenshots of the docs, with Chromium.

python -m tests.inspect.screenshots docs/explore.html docs/images
"""

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.conftest import CHROMIUM

SIZES = {"wide": (1280, 1180, 1), "narrow": (375, 1010, 2)}  # width, height, pixels per CSS pixel


def main(page_file: str, folder: str) -> None:
    with sync_playwright() as playwright:
        path = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=path, args=CHROMIUM)
        for name, (width, height, ratio) in SIZES.items():
            for scheme in ("light", "dark"):
                page = browser.new_page(
                    viewport={"width": width, "height": height},
                    color_scheme=scheme, device_scale_factor=ratio,
                )  # fmt: skip
                page.goto(Path(page_file).resolve().as_uri())
                page.wait_for_function("() => globalThis.explorer?.frames.length > 0")
                page.wait_for_timeout(300)  # thumbnails have their size
                picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
                path = Path(folder) / f"explore-{name}-{scheme}.jpg"
                picture.save(path, quality=85, optimize=True, progressive=True)
                page.close()
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
