# SPDX-License-Identifier: Apache-2.0
"""The matcher with the interface of `kornia.feature.LoFTR`.

Replace `from kornia.feature import LoFTR` by `from quadtree_attention.integrations.kornia import
LoFTR`; kornia itself is not needed.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from quadtree_attention.errors import OptionError
from quadtree_attention.files import StrPath
from quadtree_attention.models import registry
from quadtree_attention.models.matcher import Maps

__all__ = ["LoFTR"]

DEFAULT = "loftr_quadtree_small"


class LoFTR(nn.Module):
    """Finds correspondences of two images, dictionary in, dictionary out.

    Keypoints are (x, y) pixels, the centre of the first pixel is (0, 0): kornia's own convention.
    (Points of `kornia.feature.LoFTR` are half a pixel further right and down.)

    Args:
        pretrained: Name of packaged weights or a `.safetensors` file with its card; the network is
            then in evaluation mode. None: random weights, in training mode.
        config: Options of `quadtree_attention.models.create`, with `name`, the network
            ("loftr_quadtree_small" by default). Only with `pretrained=None`: weights have a card.

    Raises:
        CheckpointError: The weights cannot be read.
        OptionError: An option is not accepted.

    Example:
        >>> import torch
        >>> loftr = LoFTR(None, {"dims": (16, 24, 32), "num_pairs": 1}).eval()
        >>> found = loftr({"image0": torch.rand(1, 1, 64, 80), "image1": torch.rand(1, 1, 48, 64)})
        >>> sorted(found)
        ['batch_indexes', 'confidence', 'keypoints0', 'keypoints1']
    """

    def __init__(
        self, pretrained: StrPath | None = DEFAULT, config: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        options = dict(config or {})
        self.pretrained = pretrained
        if pretrained is None:
            self.network: Any = registry.create(options.pop("name", DEFAULT), **options).train()
        elif options:
            raise OptionError(
                f"config is for pretrained=None, got {sorted(options)} with {pretrained=}; "
                "leave it out: the options of weights are in their card"
            )
        else:
            path = registry.weights_path(pretrained, "match")
            self.network = registry.load_with_card(path, task="match")[1].eval()
            self.eval()

    def extract_features(self, image: Tensor) -> dict[str, Tensor]:
        """Features of an image, for several pairs: pass them as `features0` or `features1`.

        Args:
            image: (B, 1, H, W), grey in [0, 1].

        Returns:
            `coarse` (B, C, H/8, W/8) and `fine` (B, c, H/2, W/2), sides rounded up.
        """
        maps = self.network.maps(image)
        return {"coarse": maps.coarse, "fine": maps.fine}

    def forward(self, data: Mapping[str, Any]) -> dict[str, Tensor]:
        """Matches a batch of pairs.

        Args:
            data: For either side i, `imagei` (B, 1, H, W), grey in [0, 1], with an optional
                `maski` (B, H, W), 0 where it is padded; or `featuresi` of `extract_features`.

        Returns:
            `keypoints0` and `keypoints1` (M, 2), `confidence` (M,) and `batch_indexes` (M,).

        Raises:
            OptionError: A side has both, or none, of image and features.
            ShapeError: An image or a mask has another shape.
        """
        for side in (0, 1):
            if (f"image{side}" in data) == (f"features{side}" in data):
                raise OptionError(
                    f"data must have one of image{side} and features{side}, got "
                    f"{sorted(data)}; pass exactly one"
                )
            if f"features{side}" in data and data.get(f"mask{side}") is not None:
                raise OptionError(
                    f"mask{side} belongs to image{side}, got it with features{side}; leave it out"
                )
        masks = {
            name: data[name].bool() for name in ("mask0", "mask1") if data.get(name) is not None
        }
        if "image0" in data and "image1" in data:
            images = {name: data[name] for name in ("image0", "image1")}
            return dict(self.network(images | masks))
        maps = [
            Maps(data[f"features{side}"]["coarse"], data[f"features{side}"]["fine"], None)
            if f"features{side}" in data
            else self.network.maps(data[f"image{side}"], masks.get(f"mask{side}"))
            for side in (0, 1)
        ]
        return dict(self.network.pair(*maps))
