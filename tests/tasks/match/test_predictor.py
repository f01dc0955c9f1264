# SPDX-License-Identifier: Apache-2.0
"""Matching of images as users have them."""

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("poselib", reason="estimators need the extra 'models'")

from quadtree_attention.errors import CheckpointError, DataError, OptionError
from quadtree_attention.models.registry import PRETRAINED, create
from quadtree_attention.models.weights import save_weights
from quadtree_attention.synthetic import ProceduralTextures, homography_pairs
from quadtree_attention.tasks.match.metrics import transform
from quadtree_attention.tasks.match.predictor import Matcher, Matches, shrunk

KWARGS = {"dims": [16, 24, 32], "num_pairs": 1, "num_heads": 2, "fine_heads": 2, "topk": 4}


def write_weights(path, **changed):
    """A tiny untrained matcher, stored in half precision."""
    torch.manual_seed(0)
    state = create("loftr_quadtree_small", **KWARGS).state_dict() | changed
    card = {"model": "loftr_quadtree_small", "kwargs": KWARGS, "task": "match"}
    halves = {n: t.half() if t.is_floating_point() else t for n, t in state.items()}
    save_weights(path, halves, card)
    return path


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return write_weights(tmp_path_factory.mktemp("weights") / "tiny.safetensors")


@pytest.fixture(scope="module")
def photo():
    pair = homography_pairs(ProceduralTextures(4, size=128), [3], size=(120, 160))
    return Image.fromarray((pair.image0[0].permute(1, 2, 0).numpy() * 255).astype(np.uint8))


@pytest.fixture(scope="module")
def loose(weights):
    """Untrained weights match next to nothing with confidence."""
    return Matcher(weights, threshold=0.0)


def test_points_are_inside_of_the_images_given(loose, photo):
    other = photo.resize((200, 90))
    matches = loose(photo, other)
    assert len(matches) > 0
    for points, image in ((matches.keypoints0, photo), (matches.keypoints1, other)):
        assert (points >= -4.5).all() and (points <= np.array(image.size) + 4).all()
    assert matches.images[1].size == (200, 90)


def test_larger_images_are_matched_smaller_and_come_back_in_their_own_pixels(weights, photo):
    large = photo.resize((640, 480), Image.Resampling.NEAREST)
    small = Matcher(weights, threshold=0.0, size=160)
    assert shrunk(large, 160).size == (160, 120)
    matches = small(large, large)
    again = small(shrunk(large, 160), shrunk(large, 160))
    expected = (again.keypoints0 + 0.5) * 4 - 0.5
    assert np.allclose(matches.keypoints0, expected)


def test_a_turned_file_gives_the_points_of_its_upright_twin(loose, photo, tmp_path):
    turned = photo.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 270 degrees for display
    turned.save(tmp_path / "turned.png", exif=exif)
    photo.save(tmp_path / "upright.png")
    a = loose(tmp_path / "turned.png", photo)
    b = loose(tmp_path / "upright.png", photo)
    assert np.array_equal(a.keypoints0, b.keypoints0) and len(a)


def test_kinds_of_images_agree(loose, photo):
    array = np.asarray(photo)
    tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
    first, *others = (loose(image, photo) for image in (photo, array, tensor, array / 255.0))
    for matches in others:
        assert np.array_equal(matches.keypoints1, first.keypoints1)


def test_tiny_and_black_images_match_nothing_or_little(loose):
    assert len(loose(np.zeros((1, 1)), np.zeros((40, 40)))) == 0
    loose(np.zeros((64, 64)), np.zeros((64, 64)))


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((1, 1), (1, 1)),
        ((640, 3), (640, 3)),
        ((1296, 968), (640, 478)),
        ((968, 1296), (478, 640)),
        ((2_000, 500), (640, 160)),
        ((20_000, 1_000), (3_200, 160)),  # 640x32 would be nothing but borders
        ((20_000, 100), (12_800, 64)),
        ((300, 5_000), (160, 2_667)),
        ((20_000, 10), (20_000, 10)),
        ((1_000_000, 90), (95_406, 9)),  # no more pixels than two squares of the size
    ],
)
def test_working_size(size, expected):
    assert shrunk(Image.new("L", size), 640).size == expected


def test_images_of_20000_pixels(weights, photo):
    wide, tall = photo.resize((20_000, 400)), photo.resize((400, 20_000))
    loose = Matcher(weights, threshold=0.0, size=256)
    matches = loose(wide, wide)
    assert matches.sizes == ((2_560, 51), (2_560, 51)) and len(matches)
    assert matches.keypoints0[:, 0].max() > 10_000 and matches.keypoints0[:, 1].max() < 400
    assert loose(tall, wide).sizes == ((51, 2_560), (2_560, 51))


def test_identical_images_give_what_their_copies_give(loose, photo):
    same, copied = loose(photo, photo), loose(photo, photo.copy())
    assert len(same) and np.array_equal(same.keypoints1, copied.keypoints1)
    assert same.sizes == (photo.size, photo.size) and same.seconds > 0


def test_best_and_save(tmp_path):
    points = np.arange(8.0).reshape(4, 2)
    matches = Matches(points, points + 1, np.array([0.3, 0.9, 0.3, 0.5]))
    assert matches.best(3).confidence.tolist() == [0.9, 0.5, 0.3]
    assert matches.best(3).keypoints0[2].tolist() == [0.0, 1.0]  # of equal ones the first
    matches.save(tmp_path / "m.npz")
    with np.load(tmp_path / "m.npz") as stored:
        assert sorted(stored) == ["confidence", "keypoints0", "keypoints1"]
        assert np.array_equal(stored["keypoints1"], points + 1)
    assert [p.name for p in tmp_path.iterdir()] == ["m.npz"]
    again = Matches.load(tmp_path / "m.npz")
    assert np.array_equal(again.keypoints0, points) and again.images is None
    assert again.confidence.tolist() == [0.3, 0.9, 0.3, 0.5]


def test_files_that_hold_no_matches(tmp_path):
    path, points = tmp_path / "m.npz", np.zeros((3, 2))
    with pytest.raises(DataError, match=r"there is no file '.*m.npz'; check the path"):
        Matches.load(path)
    for content, words in (
        (
            {"keypoints0": points, "keypoints1": points},
            "holds no matches: confidence is not a file",
        ),
        (
            {"keypoints0": points, "keypoints1": points[:2], "confidence": np.zeros(3)},
            r"must hold .* got \(3, 2\), \(2, 2\), \(3,\) of float64, float64, float64",
        ),
        (
            {"keypoints0": points, "keypoints1": points, "confidence": np.array([{}] * 3)},
            "cannot read .*: Object arrays cannot be loaded",
        ),
    ):
        np.savez(path, **content)
        with pytest.raises(DataError, match=words):
            Matches.load(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=r"cannot read .*m.npz: "):
        Matches.load(path)


def test_saving_where_nothing_can_be_written(tmp_path):
    nothing = Matches(np.zeros((0, 2)), np.zeros((0, 2)), np.zeros(0))
    with pytest.raises(OptionError, match="cannot be written: No such file or directory"):
        nothing.save(tmp_path / "missing" / "m.npz")
    with pytest.raises(OptionError, match="cannot be written: File name too long"):
        nothing.save(tmp_path / ("m" * 300 + ".npz"))
    assert not list(tmp_path.iterdir())


def test_homography_of_matches():
    matrix = np.array([[1.0, 0.05, 3], [-0.02, 1, 5], [0, 0, 1]])
    points = np.random.default_rng(0).uniform(0, 100, (40, 2))
    matches = Matches(points, transform(points, matrix), np.ones(40))
    assert np.allclose(matches.homography().matrix, matrix, atol=1e-3)
    assert Matches(points[:2], points[:2], np.ones(2)).homography() is None


def test_weights_that_come_with_the_package(tmp_path, monkeypatch, photo):
    monkeypatch.setitem(PRETRAINED, "loftr_quadtree_small", tmp_path / "matcher.safetensors")
    with pytest.raises(
        CheckpointError, match="the weights of loftr_quadtree_small are not installed"
    ):
        Matcher()
    write_weights(tmp_path / "matcher.safetensors")
    named = Matcher.from_pretrained("default", threshold=0.0)
    assert np.array_equal(
        named(photo, photo).keypoints1, Matcher(threshold=0.0)(photo, photo).keypoints1
    )
    with pytest.raises(CheckpointError, match="there is no file 'outdoor'"):
        Matcher.from_pretrained("outdoor")


def test_weights_that_are_broken(tmp_path):
    path = tmp_path / "broken.safetensors"
    write_weights(path, **{"fine_windows.merge.bias": torch.full((16,), 1e6)})  # too much for half
    with pytest.raises(
        CheckpointError, match=r"numbers that are not finite, in fine_windows.merge"
    ):
        Matcher(path)


def test_what_is_refused(weights, tmp_path):
    with pytest.raises(OptionError, match=r"there is no device 'gpu' here: .*; pass cpu"):
        Matcher(weights, device="gpu")
    with pytest.raises(OptionError, match="size must be at least 16 pixels, got 8"):
        Matcher(weights, size=8)
    with pytest.raises(OptionError, match="threshold must be from 0 to below 1, got 1"):
        Matcher(weights, threshold=1.0)
    with pytest.raises(CheckpointError):
        Matcher(tmp_path / "nowhere.safetensors")
    with pytest.raises(DataError, match="cannot read"):
        Matcher(weights)(tmp_path / "a.jpg", tmp_path / "b.jpg")
    other = tmp_path / "other.safetensors"
    save_weights(other, {"x": torch.zeros(1)}, {"model": "test_quadtree", "kwargs": {}})
    with pytest.raises(CheckpointError, match="holds weights for the task classify, not for match"):
        Matcher(other)
