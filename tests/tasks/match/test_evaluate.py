# SPDX-License-Identifier: Apache-2.0
"""Scores of matches in files, of scenes whose truth is known."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

cv2 = pytest.importorskip("cv2", reason="estimators need the extra 'models'")
pytest.importorskip("poselib", reason="estimators need the extra 'models'")
Image = pytest.importorskip("PIL.Image")

from quadtree_attention.errors import DataError, OptionError  # noqa: E402
from quadtree_attention.tasks.match.evaluate import Settings, evaluate, unturned  # noqa: E402
from quadtree_attention.tasks.match.metrics import auc, transform  # noqa: E402
from quadtree_attention.tasks.match.pairs import read_pairs  # noqa: E402
from tests.tasks.match.geometry import K0, K1, POSE, points_of_a_scene  # noqa: E402

MATRIX = np.array([[0.9, 0.1, 20.0], [-0.05, 1.1, -10.0], [1e-4, -5e-5, 1.0]])
SIZES = {"wall0.png": (500, 400), "wall1.png": (800, 640)}
ESTIMATORS = ("opencv", "poselib")


def words(*matrices):
    return " ".join(repr(float(x)) for matrix in matrices for x in np.ravel(matrix))


def pose_line(name="a"):
    return f"{name}0.png {name}1.png 0 0 {words(K0, K1, POSE)}"


def homography_line():
    return f"wall0.png wall1.png {words(MATRIX)}"


def save(folder, name, points0, points1):
    folder.mkdir(exist_ok=True)
    arrays = {"keypoints0": points0, "keypoints1": points1, "confidence": np.ones(len(points0))}
    np.savez(folder / f"{name}.npz", **arrays)


def save_scene(folder, name="a0__a1", *, noise=0.0, wrong=0.0, count=200):
    """Matches of the scene with `POSE`, some of them wrong."""
    points0, points1 = points_of_a_scene(count)
    rng = np.random.default_rng(3)
    points1 = points1 + rng.normal(0, noise, points1.shape)
    bad = np.arange(count) < wrong * count
    points1[bad] = rng.uniform(0, 480, (bad.sum(), 2))
    save(folder, name, points0, points1)


def save_wall(folder, *, away=(0.0, 0.0)):
    """Matches of a plane, all of them the same way from where they belong."""
    points0 = np.random.default_rng(4).uniform([0, 0], [499, 399], (100, 2))
    save(folder, "wall0__wall1", points0, transform(points0, MATRIX) + away)
    for name, size in SIZES.items():
        Image.new("L", size).save(folder / name)


def scores_of(folder, *lines, **options):
    (folder / "pairs.txt").write_text("\n".join(lines) + "\n")
    return evaluate(read_pairs(folder / "pairs.txt"), folder, **options)


# ---- poses


def test_good_matches_give_the_pose(tmp_path):
    save_scene(tmp_path)
    scores = scores_of(tmp_path, pose_line())
    assert scores.homography is None
    assert (scores.pose.pairs, scores.pose.missing, scores.pose.matches) == (1, 0, 200)
    assert scores.pose.precision == 100
    for name in ESTIMATORS:
        found = scores.pose.estimators[name]
        assert found.median == scores.pairs[0].errors[name] < 0.05
        assert list(found.auc) == ["5", "10", "20"] and found.auc["5"] > 99
        assert found.failed == 0


def test_the_estimators_are_two_and_repeat_themselves(tmp_path):
    save_scene(tmp_path, noise=0.5, wrong=0.6)
    first = scores_of(tmp_path, pose_line())
    cv2.setRNGSeed(7)
    np.random.seed(7)
    assert scores_of(tmp_path, pose_line()) == first
    errors = first.pairs[0].errors
    assert list(errors) == list(ESTIMATORS) and errors["opencv"] != errors["poselib"]


def test_settings_of_poses_act(tmp_path):
    save_scene(tmp_path, noise=2.0, wrong=0.5)
    usual = scores_of(tmp_path, pose_line())
    assert 30 < usual.pose.precision < 100
    strict = scores_of(tmp_path, pose_line(), settings=Settings(epipolar=1e-7))
    assert strict.pose.precision < usual.pose.precision / 2
    assert strict.pairs[0].errors == usual.pairs[0].errors
    loose = scores_of(tmp_path, pose_line(), settings=Settings(pose_pixels=10.0))
    for name in ESTIMATORS:
        assert loose.pairs[0].errors[name] != usual.pairs[0].errors[name]


def test_points_of_turned_images(tmp_path):
    """What `np.rot90` does to an image is undone; the camera is that of the image before."""
    image = np.zeros((480, 640), bool)
    image[100, 30] = True
    for turns in range(4):
        y, x = np.argwhere(np.rot90(image, turns))[0]
        assert unturned([[x, y]], turns, (640, 480)).tolist() == [[30, 100]]

    points0, points1 = points_of_a_scene(100)
    turned1 = np.stack([480 - 1 - points1[:, 1], points1[:, 0]], axis=1)  # three quarters
    save(tmp_path, "a0__a1", points0, turned1)
    Image.new("L", (640, 480)).save(tmp_path / "a0.png")
    Image.new("L", (640, 480)).save(tmp_path / "a1.png")
    line = pose_line().replace(" 0 0 ", " 0 3 ", 1)
    scores = scores_of(tmp_path, line, images=tmp_path)
    assert scores.pose.precision == 100 and scores.pairs[0].errors["poselib"] < 0.05
    assert scores_of(tmp_path, pose_line()).pose.precision < 50
    with pytest.raises(OptionError, match=r"line 1 .* an image that is turned.* got none"):
        scores_of(tmp_path, line)


# ---- homographies


@pytest.mark.parametrize(
    ("side", "error", "correct"), [(480, 3.75, 0), (0, 5, 0), (240, 1.875, 100)]
)
def test_corners_are_measured_in_pixels_of_image_1_at_the_shorter_side(
    tmp_path, side, error, correct
):
    save_wall(tmp_path, away=(3.0, 4.0))
    settings = Settings(side=side)
    scores = scores_of(tmp_path, homography_line(), images=tmp_path, settings=settings)
    assert scores.pose is None and scores.homography.precision == correct
    for name in ESTIMATORS:
        found = scores.homography.estimators[name]
        assert found.median == pytest.approx(error, abs=1e-3)
        assert list(found.auc.values()) == pytest.approx(auc([found.median], (3, 5, 10)))


def test_turned_photos_are_measured_upright(tmp_path):
    save_wall(tmp_path, away=(3.0, 4.0))
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("L", (640, 1200)).save(tmp_path / "wall1.png", exif=exif)
    Image.new("L", (400, 500)).save(tmp_path / "wall0.png", exif=exif)
    turned = scores_of(tmp_path, homography_line(), images=tmp_path)
    assert turned.homography.estimators["opencv"].median == pytest.approx(3.75, abs=1e-3)


# ---- sets


def test_both_kinds_and_failures_in_one_set(tmp_path):
    save_scene(tmp_path)
    save_scene(tmp_path, "few0__few1", count=4)
    save(tmp_path, "empty0__empty1", np.zeros((0, 2)), np.zeros((0, 2)))
    save_wall(tmp_path)
    lines = [homography_line(), "# a remark", *map(pose_line, ("a", "gone", "few", "empty"))]
    scores = scores_of(tmp_path, *lines, images=tmp_path)
    assert scores.missing == ["gone0__gone1"]
    pose = scores.pose
    assert (pose.pairs, pose.missing, pose.matches, pose.precision) == (4, 1, 51, 50)
    for name in ESTIMATORS:
        found = pose.estimators[name]
        assert found.failed == 3 and math.isinf(found.median)
        assert 24.9 < found.auc["20"] <= 25
        assert scores.homography.estimators[name].median < 1e-3
    assert [(p.line, p.missing, p.matches) for p in scores.pairs] == [
        (1, False, 100), (3, False, 200), (4, True, 0), (5, False, 4), (6, False, 0),
    ]  # fmt: skip
    found = json.loads(json.dumps(scores.as_dict(), allow_nan=False))
    assert found["pairs"][2]["errors"] == {"opencv": None, "poselib": None}
    assert found["pose"]["estimators"]["opencv"]["median"] is None
    assert found["settings"] == {"pose_pixels": 0.5, "epipolar": 5e-4, "side": 480}


def test_an_unreadable_image_without_predictions_is_a_failed_pair(tmp_path):
    save_scene(tmp_path)
    scores = scores_of(tmp_path, pose_line(), homography_line(), images=tmp_path)
    assert scores.missing == ["wall0__wall1"] and scores.homography.missing == 1
    assert scores.homography.estimators["opencv"].auc == {"3": 0, "5": 0, "10": 0}


# ---- mistakes


def broken(path, content=b"no matches"):
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda d: {"predictions": d / "none"}, DataError, "there is no folder .*none of pred"),
        (lambda d: (d / "a0__a1.npz").unlink(), DataError, "for none of 2 pairs, such as a0__a1"),
        (lambda d: broken(d / "a0__a1.npz"), DataError, "a0__a1.npz"),
        (lambda d: broken(d / "a0__a1.npz", b""), DataError, "a0__a1.npz"),
        (lambda d: save(d, "a0__a1", *np.full((2, 9, 2), np.nan)), DataError, "a0__a1.* finite"),
        (lambda d: {"images": None}, OptionError, r"line 2 .* homography.* \(--images DIR\)"),
        (lambda d: (d / "wall1.png").unlink(), DataError, "wall1.png"),
    ],
    ids=["folder", "none", "broken", "empty", "nan", "images", "image"],
)
def test_mistakes(tmp_path, change, error, message):
    save_wall(tmp_path)
    save_scene(tmp_path)
    (tmp_path / "pairs.txt").write_text(f"{pose_line()}\n{homography_line()}\n")
    options = {"predictions": tmp_path, "images": tmp_path}
    changed = change(tmp_path)
    if "none of 2" in message:
        (tmp_path / "wall0__wall1.npz").unlink()
    options |= changed if isinstance(changed, dict) else {}
    with pytest.raises(error, match=message):
        evaluate(read_pairs(tmp_path / "pairs.txt"), **options)


def test_a_pair_without_truth(tmp_path: Path):
    save_scene(tmp_path)
    with pytest.raises(DataError, match="line 2 of the pairs, x0__x1, has no truth"):
        scores_of(tmp_path, pose_line(), f"x0.png x1.png 0 0 {words(K0, K1)}")


@pytest.mark.parametrize(
    "options", [{"pose_pixels": 0}, {"epipolar": -1}, {"pose_pixels": math.nan}, {"side": -1}]
)
def test_settings_that_make_no_sense(options):
    (name,) = options
    with pytest.raises(OptionError, match=f"{name} must be .* got {options[name]}"):
        Settings(**options)
