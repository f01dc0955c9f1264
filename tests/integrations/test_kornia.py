# SPDX-License-Identifier: Apache-2.0
"""The interface of kornia's LoFTR, beside the installed kornia where there is one."""

import inspect

import pytest
import torch

from quadtree_attention.errors import OptionError
from quadtree_attention.integrations.kornia import LoFTR

TINY = {"dims": (16, 24, 32), "num_pairs": 1, "num_heads": 2, "fine_heads": 2, "threshold": 0.0}


@pytest.fixture(scope="module")
def loftr():
    torch.manual_seed(0)
    return LoFTR(None, TINY).eval()


def images(*sizes):
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(2, 1, *size, generator=generator) for size in sizes]


@torch.inference_mode()
def test_images_features_and_masks(loftr):
    image0, image1 = images((64, 80), (56, 72))
    found = loftr({"image0": image0, "image1": image1})
    assert sorted(found) == ["batch_indexes", "confidence", "keypoints0", "keypoints1"]
    count = len(found["confidence"])
    assert count and found["keypoints0"].shape == found["keypoints1"].shape == (count, 2)
    assert loftr.extract_features(image0)["coarse"].shape == (2, 32, 8, 10)
    features = [loftr.extract_features(image) for image in (image0, image1)]
    pairs = [
        {"features0": features[0], "features1": features[1]},
        {"features0": features[0], "image1": image1},
        {"image0": image0, "features1": features[1]},
    ]
    for pair in pairs:
        again = loftr(pair)
        for name in found:
            torch.testing.assert_close(again[name], found[name], rtol=0, atol=1e-4)
    # Padding that a mask hides changes nothing
    wide = torch.nn.functional.pad(image1, (0, 24))
    mask = torch.zeros(2, 56, 96)
    mask[..., :72] = 1
    masked = loftr({"image0": image0, "image1": wide, "mask1": mask})
    torch.testing.assert_close(masked["keypoints1"], found["keypoints1"], rtol=0, atol=1e-3)


def test_pretrained():
    packaged = LoFTR()
    assert not packaged.training and LoFTR(None, TINY).training
    (image,) = images((64, 64))
    with torch.inference_mode():
        found = packaged({"image0": image, "image1": image})
    torch.testing.assert_close(found["keypoints0"], found["keypoints1"], rtol=0, atol=0.5)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("image0",), "one of image1 and features1"),
        (("image0", "features0", "image1"), "one of image0 and features0"),
        (("features0", "mask0", "image1"), "mask0 belongs to image0"),
    ],
)
def test_what_is_refused(loftr, names, told):
    with pytest.raises(OptionError, match=told):
        loftr(dict.fromkeys(names, torch.zeros(1)))
    with pytest.raises(OptionError, match="config is for pretrained=None"):
        LoFTR("loftr_quadtree_small", {"topk": 4})


@torch.inference_mode()
def test_interface_of_kornia(loftr):
    kornia = pytest.importorskip("kornia.feature", reason="needs kornia, of the extra 'compare'")
    theirs = kornia.LoFTR(None).eval()
    for name in ("__init__", "forward", "extract_features"):
        ours = inspect.signature(getattr(LoFTR, name)).parameters
        assert list(ours) == list(inspect.signature(getattr(kornia.LoFTR, name)).parameters)
    image0, image1 = images((64, 80), (56, 72))
    expected, found = (model({"image0": image0, "image1": image1}) for model in (theirs, loftr))
    assert {k: (v.dtype, v.ndim) for k, v in found.items()} == {
        k: (v.dtype, v.ndim) for k, v in expected.items()
    }
    sides = (model.extract_features(image0) for model in (theirs, loftr))
    shapes = [{k: (len(v), *v.shape[2:]) for k, v in side.items()} for side in sides]
    assert shapes[0] == shapes[1]
