# SPDX-License-Identifier: Apache-2.0
from torch import Tensor, nn


class Brightness(nn.Module):
    """(B, 3, H, W) -> (B,)"""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.mix = nn.Linear(channels, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.mix(images.mean(dim=(2, 3)))[:, 0]
