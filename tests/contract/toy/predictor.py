# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass

import numpy as np
import torch

from quadtree_attention.images import to_image
from quadtree_attention.tasks.contract import Prepared
from quadtree_attention.tasks.predictor import Predictor
from quadtree_attention.tasks.toy import TASK
from quadtree_attention.tasks.toy.result import Brightness


def pixels(image):
    return torch.from_numpy(np.asarray(image, np.float32) / 255).permute(2, 0, 1)


@dataclass(frozen=True)
class Preprocess:
    def __call__(self, image):
        given = to_image(image)
        seen = pixels(given)
        return Prepared((given,), (seen,), key=seen.shape)


class Photometer(Predictor[Brightness]):
    task = TASK

    def __init__(self, network, card, *, size=None, **common):
        super().__init__(network, card, size=size, **common)
        self.preprocess = Preprocess()

    def forward(self, batch):
        (images,) = self.stack(batch)
        return self.network(images).tolist()

    def finish(self, raw, item):
        return Brightness(value=raw)
