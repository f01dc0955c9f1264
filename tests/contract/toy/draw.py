# SPDX-License-Identifier: Apache-2.0
from PIL import Image


def draw(result, *, title=None):
    level = round(255 * min(max(result.value, 0), 1))
    return Image.new("RGB", result.images[0].size, (level,) * 3)
