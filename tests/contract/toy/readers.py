# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

from quadtree_attention.errors import DataError
from quadtree_attention.images import images_inside, to_image
from quadtree_attention.tasks.contract import Source, file_identity


class BrightnessSource(Source):
    def __init__(self, root):
        self.paths = images_inside(Path(root))
        self.names = [Path(path).stem for path in self.paths]
        self.values = json.loads((Path(root) / "brightness.json").read_text())

    def identity(self, index):
        return file_identity(self.paths[index])

    def images(self, index):
        return (to_image(self.paths[index]),)

    def truth(self, index):
        if self.name(index) not in self.values:
            raise DataError(f"{self.paths[index]} has no brightness")
        return self.values[self.name(index)]


def open_source(root, *, split="val", strict=False):
    return BrightnessSource(root)
