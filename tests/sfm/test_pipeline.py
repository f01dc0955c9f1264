# SPDX-License-Identifier: Apache-2.0
"""From a folder of photographs with known poses to a model, once; then what can be wrong."""

import json
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image

from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.sfm import Chosen, PairMatcher, build_model
from tests.support.commands import START, contents, environment, invoke, refusal
from tests.support.scene import write_photographs

pycolmap = pytest.importorskip("pycolmap", reason="the mapper is that of the extra 'sfm'")

FOCAL = 260.0
ROWS = {  # of COLMAP's database, in order
    "keypoints": "select image_id, rows, cols, data from keypoints order by image_id",
    "matches": "select pair_id, rows, data from matches order by pair_id",
    "two_view_geometries": "select pair_id, rows, data, config from two_view_geometries "
    "order by pair_id",
}


def rows(out):
    """All keypoints, matches and two-view geometries."""
    with closing(sqlite3.connect(out / "database.db")) as database:
        return {name: database.execute(query).fetchall() for name, query in ROWS.items()}


@pytest.fixture(scope="module")
def matcher():
    return PairMatcher.from_pretrained(device="cpu", size=256)


@pytest.fixture(scope="module")
def scene(tmp_path_factory, matcher):
    """Photographs, their poses, a copy and a file that is none; the model, and its report."""
    folder = tmp_path_factory.mktemp("scene")
    poses = write_photographs(folder / "photos", 4, focal=FOCAL)
    shutil.copy(folder / "photos" / "01.png", folder / "photos" / "copy.png")
    (folder / "photos" / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 and no more")
    report = build_model(
        folder / "photos", folder / "out", matcher=matcher, chosen=Chosen(focal=FOCAL)
    )
    return folder, poses, report


def test_all_photographs_are_registered_and_others_named(scene):
    folder, poses, report = scene
    assert report.registered == sorted(poses) and report.models == [4]
    assert report.left_out["copy.png"] == "the same file as 01.png"
    assert "broken.jpg" in report.left_out["broken.jpg"]
    assert report.points > 100 and report.track_length > 2.5 and 0 < report.error < 0.7
    assert sum(report.lengths.values()) == report.points
    assert json.loads((folder / "out" / "report.json").read_text())["points"] == report.points


def relative(first, second):
    """Rotation and direction from one pose (3, 4) to another."""
    rotation = second[:, :3] @ first[:, :3].T
    shift = second[:, 3] - rotation @ first[:, 3]
    return rotation, shift / np.linalg.norm(shift)


def test_relative_poses_are_true(scene):
    folder, poses, _ = scene
    model = pycolmap.Reconstruction(folder / "out" / "sparse" / "0")
    found = {image.name: image.cam_from_world().matrix() for image in model.images.values()}
    names = sorted(poses)
    for first, second in pairwise(names):
        (R, t), (R_true, t_true) = (relative(x[first], x[second]) for x in (found, poses))
        turn = np.degrees(np.arccos(np.clip((np.trace(R @ R_true.T) - 1) / 2, -1, 1)))
        angle = np.degrees(np.arccos(np.clip(t @ t_true, -1, 1)))
        assert turn < 1 and angle < 2, (first, second, turn, angle)


def test_files_agree_with_the_model(scene):
    folder, _, report = scene
    out = folder / "out"
    assert sorted(path.name for path in out.iterdir()) == [
        "database.db",
        "matches",
        "points.ply",
        "report.html",
        "report.json",
        "sparse",
        "transforms.json",
    ]
    model = pycolmap.Reconstruction(out / "sparse" / "0")
    head, _, body = (out / "points.ply").read_bytes().partition(b"end_header\n")
    assert f"element vertex {report.points}\n".encode() in head and len(body) == 15 * report.points
    first = next(iter(model.points3D.values()))
    np.testing.assert_allclose(np.frombuffer(body, "<f4", 3), first.xyz, rtol=1e-5)
    assert list(body[12:15]) == list(first.color) and max(body[12:15]) > 0
    cameras = json.loads((out / "transforms.json").read_text())
    assert (cameras["w"], cameras["h"], len(cameras["frames"])) == (256, 192, 4)
    for frame in cameras["frames"]:
        image = model.find_image_with_name(frame["file_path"].split("/")[-1])
        to_world = np.array(frame["transform_matrix"])
        np.testing.assert_allclose(to_world[:3, 3], image.projection_center(), atol=1e-6)
        np.testing.assert_allclose(-to_world[:3, 2], image.viewing_direction(), atol=1e-6)
    page = (out / "report.html").read_text()
    assert "{{" not in page and "http" not in page and "the same file as 01.png" in page


def test_a_second_run_matches_nothing_and_gives_the_same_rows(scene, matcher):
    folder, _, report = scene
    before, written = rows(folder / "out"), contents(folder / "out" / "matches")
    matcher.cache.clear()
    again = build_model(
        folder / "photos", folder / "out", matcher=matcher, chosen=Chosen(focal=FOCAL)
    )
    assert rows(folder / "out") == before and contents(folder / "out" / "matches") == written
    assert matcher.cache.get((str(folder / "photos" / "00.png"), (257, 193))) is None
    assert again.points == report.points and again.error == pytest.approx(report.error, rel=1e-4)


def test_a_known_camera_is_kept(scene, matcher, tmp_path):
    folder, _, _ = scene
    shutil.copytree(folder / "out" / "matches", tmp_path / "out" / "matches")
    K = np.array([[FOCAL, 0, 127.5], [0, FOCAL, 95.5], [0, 0, 1]])
    report = build_model(
        folder / "photos", tmp_path / "out", matcher=matcher, chosen=Chosen(camera=K)
    )
    model = pycolmap.Reconstruction(tmp_path / "out" / "sparse" / "0")
    (camera,) = model.cameras.values()
    assert camera.model.name == "PINHOLE" and list(camera.params) == [FOCAL, FOCAL, 128, 96]
    assert len(report.registered) == 4


def test_killed_and_started_again(scene, tmp_path):
    """SIGKILL while pairs are matched; the rows are those of the run that was not stopped."""
    folder, _, _ = scene
    out = tmp_path / "out"
    words = ["sfm", folder / "photos", out, "--focal", FOCAL, "--size", 256, "--device", "cpu"]
    running = subprocess.Popen(
        [sys.executable, "-c", START, *map(str, words)], env=environment(), stderr=-3, stdout=-3
    )
    deadline = time.monotonic() + 120
    while len(list(out.glob("matches/*.npz"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    running.send_signal(signal.SIGKILL)
    running.wait()
    left = len(list(out.glob("matches/*.npz")))
    assert 2 <= left < 6 and not (out / "database.db").exists()
    (out / ".unfinished").mkdir(exist_ok=True)  # of a run that was killed later
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    assert "4 of 6 photographs" in result.stdout
    assert rows(out) == rows(folder / "out")


# ---- what can be wrong


def test_photographs_without_overlap(tmp_path, matcher):
    for i in range(2):
        write_photographs(tmp_path / str(i), 1)
    (tmp_path / "photos").mkdir()
    shutil.copy(tmp_path / "0" / "00.png", tmp_path / "photos" / "a.png")
    noise = np.random.default_rng(0).integers(0, 256, (150, 200, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "photos" / "b.png")
    Image.new("RGB", (90, 120), "grey").save(tmp_path / "photos" / "c.png")
    result = invoke("sfm", tmp_path / "photos", tmp_path / "out", "--size", 256, "--device", "cpu")
    assert result.exit_code == 1, result.output
    assert "0 of 3 photographs" in result.stdout and "no model was found" in result.stderr
    assert "agree on a geometry" in (tmp_path / "out" / "report.html").read_text()
    assert not (tmp_path / "out" / "sparse").exists()


def test_too_few_photographs(tmp_path, matcher):
    write_photographs(tmp_path / "photos", 1)
    (tmp_path / "photos" / "b.png").write_bytes(b"no image")
    told = refusal(DataError, build_model, tmp_path / "photos", tmp_path / "out", matcher=matcher)
    assert "needs two photographs or more" in told and "b.png" in told
    assert not (tmp_path / "out").exists()


def test_a_folder_of_other_files_is_left_alone(scene, tmp_path, matcher):
    (tmp_path / "notes.txt").write_text("mine")
    told = refusal(OptionError, build_model, scene[0] / "photos", tmp_path, matcher=matcher)
    assert "holds notes.txt" in told and contents(tmp_path) == {tmp_path / "notes.txt": b"mine"}


def test_matches_of_other_settings_are_refused_and_replaced_by_force(scene):
    folder, _, _ = scene
    before = contents(folder / "out")
    other = PairMatcher.from_pretrained(device="cpu", size=192)
    told = refusal(OptionError, build_model, folder / "photos", folder / "out", matcher=other)
    assert "size 256 there, 192 now" in told and "--force" in told
    assert contents(folder / "out") == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mapper": "none"}, "mapper must be one of incremental, global"),
        ({"sequential": 0}, "sequential must be at least 1, got 0"),
        ({"sequential": 2, "nearest": 3}, "sequential and nearest exclude each other"),
        ({"focal": 100.0, "camera": np.eye(3)}, "focal and camera exclude each other"),
    ],
)
def test_options(options, words):
    assert words in refusal(OptionError, Chosen, **options)
