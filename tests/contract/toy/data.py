# SPDX-License-Identifier: Apache-2.0
import torch

from quadtree_attention.tasks.toy.predictor import pixels
from quadtree_attention.tasks.toy.readers import open_source
from quadtree_attention.tasks.training.data import TaskData


class BrightnessData(TaskData):
    def __init__(self, root: str, batch_size: int = 2, workers: int = 0, seed: int = 0) -> None:
        super().__init__(batch_size=batch_size, workers=workers, seed=seed)
        self.root = root

    def open(self, split):
        return open_source(self.root)

    def train_sample(self, images, truth):
        return {"images": pixels(images[0]), "truth": torch.tensor(truth)}

    val_sample = train_sample
