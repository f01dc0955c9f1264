# SPDX-License-Identifier: Apache-2.0
"""What must not change the matches: which image comes first, and padding."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from quadtree_attention.models.registry import create
from quadtree_attention.models.weights import save_weights
from quadtree_attention.synthetic import ProceduralTextures, homography_pairs
from quadtree_attention.tasks import Matcher, Matches

KWARGS = {"dims": [16, 24, 32], "num_pairs": 2, "num_heads": 2, "fine_heads": 2, "topk": 4}


@pytest.fixture(scope="module")
def loose(tmp_path_factory):
    """A tiny matcher that tells cells apart, and matches whatever is each other's best."""
    torch.manual_seed(0)
    model = create("loftr_quadtree_small", **KWARGS)
    with torch.no_grad():
        for layer in model.coarse_transformer.layers:  # a fresh one hardly changes anything
            for parameter in layer.parameters():
                parameter *= 3 if parameter.ndim == 2 else 1
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                torch.nn.init.normal_(module.bias, std=0.3)
                module.momentum = 1.0
        model.train().backbone(torch.rand(2, 1, 128, 160))
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    card = {"model": "loftr_quadtree_small", "kwargs": KWARGS, "task": "match"}
    save_weights(path, model.state_dict(), card)
    return Matcher.from_pretrained(path, threshold=0.0, guided="never", device="cpu")


@pytest.fixture(scope="module")
def photos():
    """Two views of a plane, of different sizes."""
    pair = homography_pairs(ProceduralTextures(4, size=256), [3], size=(232, 312))
    first, second = (
        Image.fromarray((image[0].permute(1, 2, 0).numpy() * 255).astype(np.uint8))
        for image in (pair.image0, pair.image1)
    )
    return first, second.crop((0, 8, 260, 232))


def in_order(matches: Matches, cells: np.ndarray) -> tuple[np.ndarray, ...]:
    """Cells, points and confidence, sorted by the cells."""
    order = np.lexsort(cells.T)
    arrays = (cells, matches.keypoints0, matches.keypoints1, matches.confidence)
    return tuple(array[order] for array in arrays)


def cells_of(loose, image0, image1) -> np.ndarray:
    """Pairs of coarse cells (N, 2) in the order of the matches."""
    found = []
    hook = loose.network.coarse_matching.register_forward_hook(lambda *args: found.append(args[2]))
    loose(image0, image1)
    hook.remove()
    return torch.stack([found[0].cells0, found[0].cells1], dim=1).numpy()


def test_swapped_images_give_swapped_cells_and_points_within_the_fine_window(loose, photos):
    """Coarse matching treats both images alike; the fine stage moves points of the second only.

    So the cells are the same. A point that was refined in one order is that of its cell in the
    other: they differ by at most the radius of the fine window, 4 pixels along x and along y.
    Confidence is the same up to the rounding of a matrix product and of its transpose.
    """
    first, second = photos
    there, back = loose(first, second), loose(second, first)
    cells, points0, points1, confidence = in_order(there, cells_of(loose, first, second))
    swapped = in_order(back, cells_of(loose, second, first)[:, ::-1])
    assert len(there) > 30
    assert np.array_equal(swapped[0], cells)
    np.testing.assert_allclose(swapped[3], confidence, rtol=2e-4)
    moved0, moved1 = np.abs(points0 - swapped[2]), np.abs(points1 - swapped[1])
    assert max(moved0.max(), moved1.max()) <= loose.network.window_radius == 4
    assert min(moved0.max(), moved1.max()) > 0.1  # the refinement is real, and one-sided
    assert (points0 % 8 == 0).all() and (swapped[1] % 8 == 0).all()


def test_swapped_images_give_swapped_points_where_both_are_refined(loose, photos, monkeypatch):
    first, second = photos
    one_sided = loose(first, second)
    monkeypatch.setattr(loose.network, "symmetric", True)
    there, back = loose(first, second), loose(second, first)
    _, points0, points1, confidence = in_order(there, cells_of(loose, first, second))
    _, *swapped = in_order(back, cells_of(loose, second, first)[:, ::-1])
    np.testing.assert_allclose(swapped[1], points0, rtol=0, atol=1e-4)
    np.testing.assert_allclose(swapped[0], points1, rtol=0, atol=1e-4)
    np.testing.assert_allclose(swapped[2], confidence, rtol=2e-4)
    moved = np.abs(there.keypoints0 - one_sided.keypoints0)
    assert 0.05 < moved.max() <= loose.network.window_radius / 2


def test_a_padded_batch_gives_what_single_images_give(loose, photos):
    """With masks: the same cells, and points within 0.001 pixels.

    Not bit by bit, since in float32 sums over a larger canvas are rounded in another order.
    """
    first, second = photos
    pairs = [(first, second), (second.crop((0, 0, 200, 170)), first.crop((30, 0, 312, 190)))]
    names = ("image0", "image1", "mask0", "mask1")
    batch: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for pair in pairs:
        for i, image in enumerate(pair):
            pixels = torch.from_numpy(np.asarray(image.convert("L"), np.float32) / 255)
            space = (0, 320 - image.width, 0, 240 - image.height)
            shown = torch.ones_like(pixels, dtype=torch.bool)
            batch[f"image{i}"].append(F.pad(pixels, space, value=1.0)[None])
            batch[f"mask{i}"].append(F.pad(shown, space))
    data = {name: torch.stack(tensors) for name, tensors in batch.items()}
    with torch.inference_mode():
        found = loose.network(data, threshold=0.0)
        unmasked = loose.network({name: data[name] for name in names[:2]}, threshold=0.0)
    for i, pair in enumerate(pairs):
        alone = loose(*pair)
        mine = found["batch_indexes"] == i
        assert mine.sum() == len(alone) > 20
        assert np.array_equal(found["keypoints0"][mine], alone.keypoints0)
        points1, confidence = found["keypoints1"][mine], found["confidence"][mine]
        np.testing.assert_allclose(points1, alone.keypoints1, rtol=0, atol=1e-3)
        np.testing.assert_allclose(confidence, alone.confidence, rtol=2e-4)
    assert len(unmasked["confidence"]) != len(found["confidence"])
