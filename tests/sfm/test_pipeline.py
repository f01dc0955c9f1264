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
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.sfm import Chosen, PairMatcher, build_model
from quadtree_attention.sfm.matching import _turned_back, seems_sure
from quadtree_attention.sfm.reconstruct import KNOWN, map_images
from quadtree_attention.tasks.match.result import Matches
from tests.support.commands import (
    START,
    command,
    contents,
    environment,
    invoke,
    refusal,
    refused,
)
from tests.support.scene import write_photographs

pycolmap = pytest.importorskip("pycolmap", reason="the mapper is that of the extra 'sfm'")

FOCAL = 260.0
STREETS = sorted((Path(__file__).parents[2] / "examples" / "images").glob("street*.jpg"))
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
    assert report.points > 100 and report.track_length > 2.5 and 0 < report.error < 0.1
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
        assert turn < 0.1 and angle < 0.2, (first, second, turn, angle)


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


@pytest.mark.parametrize("size", [(1280, 900), (390, 844)], ids=["wide", "phone"])
def test_the_report_in_a_browser(scene, chromium, size):
    """It draws points and cameras, turns, zooms, names cameras, fits the window, is accessible."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="extra 'dev'")
    width, height = size
    context = chromium.new_context(
        offline=True, viewport={"width": width, "height": height}, has_touch=width < 500
    )
    page, complaints = context.new_page(), []
    page.on("console", lambda message: message.type == "error" and complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto((scene[0] / "out" / "report.html").as_uri())
    page.wait_for_function("() => document.getElementById('view').width > 300")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # Share of pixels that are drawn, whether they change, and the width that they span
    drawn = """() => {
      const view = document.getElementById('view');
      const data = view.getContext('2d').getImageData(0, 0, view.width, view.height).data;
      let count = 0, sum = 0, left = view.width, right = 0;
      for (let i = 0; i < data.length; i += 4)
        if (data[i] !== 0x14 || data[i + 1] !== 0x16) {
          count += 1; sum = (sum * 31 + i) % 1e9;
          left = Math.min(left, i / 4 % view.width); right = Math.max(right, i / 4 % view.width);
        }
      return [count / (data.length / 4), sum, right - left];
    }"""
    share, first, _ = page.evaluate(drawn)
    assert 0.002 < share < 0.6
    seen = {first}
    page.locator("#view").focus()
    for key in ("ArrowLeft", "+"):
        page.keyboard.press(key)
        page.wait_for_timeout(100)
        seen.add(page.evaluate(drawn)[1])
    page.locator("#cameras").uncheck()
    page.wait_for_timeout(100)
    seen.add(page.evaluate(drawn)[1])
    page.locator("#cameras").check()
    box = page.locator("#view").bounding_box()
    middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(*middle)
    page.mouse.down()
    page.mouse.move(middle[0] + 40, middle[1] + 20)
    page.mouse.up()
    page.wait_for_timeout(100)
    seen.add(page.evaluate(drawn)[1])
    assert len(seen) == 5
    if width < 500:  # two fingers, a third as far apart
        before = page.evaluate(drawn)[2]
        page.evaluate("""() => {
          const view = document.getElementById('view'), box = view.getBoundingClientRect();
          view.setPointerCapture = () => {};
          const send = (type, id, x) => view.dispatchEvent(new PointerEvent(type, {
            pointerId: id, clientX: box.left + x, clientY: box.top + 100, bubbles: true }));
          send('pointerdown', 11, 100); send('pointerdown', 12, 250);
          send('pointermove', 12, 150); send('pointerup', 11, 100); send('pointerup', 12, 150);
        }""")
        page.wait_for_timeout(100)
        assert page.evaluate(drawn)[2] < 0.6 * before
    found = axe.Axe().run(page).response["violations"]
    assert not found, [violation["id"] for violation in found]
    assert not complaints
    context.close()


def test_a_second_run_matches_nothing_and_gives_the_same_rows(scene, matcher):
    folder, _, report = scene
    before, written = rows(folder / "out"), contents(folder / "out" / "matches")
    matcher.cache.clear()
    again = build_model(
        folder / "photos", folder / "out", matcher=matcher, chosen=Chosen(focal=FOCAL)
    )
    assert rows(folder / "out") == before and contents(folder / "out" / "matches") == written
    assert matcher.cache.get((str(folder / "photos" / "00.png"), (257, 193), 0)) is None
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


@pytest.mark.parametrize(("long_tracks", "count"), [(0, 1), (10, 1), (10**6, 2)])
def test_a_model_that_keeps_few_of_the_tracks_is_made_again(scene, tmp_path, long_tracks, count):
    options = {"scale": 1.0, "linked": 4, "long_tracks": long_tracks}
    database = shutil.copy(scene[0] / "out" / "database.db", tmp_path)
    models, _ = map_images(Path(database), tmp_path / "sparse", attempts=KNOWN[:2], **options)
    assert models[0].num_reg_images() == 4
    assert len(list((tmp_path / "sparse").iterdir())) == count


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


KILLED = f"""
import importlib, os, signal, sys

module, _, name = sys.argv.pop(1).rpartition(".")
module = importlib.import_module(module)
setattr(module, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
{START}
"""


@pytest.mark.parametrize(
    ("moment", "earlier"),
    [
        ("sfm.pipeline.build", False),  # all pairs are matched
        ("sfm.database.geometry", True),  # in the middle of the transaction of the database
        ("sfm.pipeline.triangulated", False),  # the database has the extended tracks
        ("sfm.pipeline.refined", False),  # the mapper has written its models
        ("sfm.pipeline.write_all", True),  # sparse and database are replaced, other files are not
    ],
)
def test_killed_at_a_moment(scene, tmp_path, moment, earlier):
    """SIGKILL after matching, in a new folder or in that of an earlier run."""
    folder, _, _ = scene
    out = tmp_path / "out"
    if earlier:
        shutil.copytree(folder / "out", out)
    else:
        shutil.copytree(folder / "out" / "matches", out / "matches")
    words = ["sfm", folder / "photos", out, "--focal", FOCAL, "--size", 256, "--device", "cpu"]
    ended = command(f"quadtree_attention.{moment}", *words, code=KILLED)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    if earlier and moment != "sfm.pipeline.write_all":  # the model of the earlier run is whole
        before, after = (
            {path.relative_to(where): data for path, data in contents(where).items()}
            for where in (folder / "out", out)
        )
        assert {name: after.get(name) for name in before} == before
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    assert rows(out) == rows(folder / "out")
    assert sorted(p.name for p in out.iterdir()) == sorted(
        p.name for p in (folder / "out").iterdir()
    )


def test_mixed_sizes_and_orientations(scene, tmp_path, matcher):
    """One photograph is smaller, one is stored turned, one is of another camera."""
    folder, _, report = scene
    photos = tmp_path / "photos"
    shutil.copytree(folder / "photos", photos, ignore=shutil.ignore_patterns("c*", "b*"))
    with Image.open(photos / "01.png") as image:
        smaller = image.resize((192, 144), Image.Resampling.BICUBIC)
    with Image.open(photos / "02.png") as image:
        turned = image.transpose(Image.Transpose.ROTATE_90)
    smaller.save(photos / "01.png")
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    turned.save(photos / "02.png", exif=exif)
    found = build_model(photos, tmp_path / "out", matcher=matcher)
    assert len(found.registered) == 4 and found.points > 0.5 * report.points
    assert found.focal == pytest.approx([FOCAL, FOCAL * 0.75], rel=0.1)
    (warning,) = found.warnings
    assert warning.startswith("02.png: EXIF says that the pixels are stored turned")
    model = pycolmap.Reconstruction(tmp_path / "out" / "sparse" / "0")
    sizes = {image.name: model.cameras[image.camera_id] for image in model.images.values()}
    assert {name: (c.width, c.height) for name, c in sizes.items()} == {
        name: (192, 144) if name == "01.png" else (256, 192) for name in sizes
    }


def test_turned_photographs(scene, tmp_path, matcher):
    """Upside down or on its side, which no EXIF tells: without guided matching they are lost."""
    folder, _, report = scene
    photos = tmp_path / "photos"
    shutil.copytree(folder / "photos", photos, ignore=shutil.ignore_patterns("c*", "b*"))
    for name, turn in (
        ("01.png", Image.Transpose.ROTATE_180),
        ("02.png", Image.Transpose.ROTATE_90),
    ):
        with Image.open(photos / name) as image:
            turned = image.transpose(turn)
        turned.save(photos / name)
    chosen = Chosen(focal=FOCAL)
    found = build_model(photos, tmp_path / "out", matcher=matcher, chosen=chosen)
    assert len(found.registered) == 4 and found.error < 0.7
    assert found.points > 0.8 * report.points and found.track_length > 2.5
    never = PairMatcher.from_pretrained(device="cpu", size=256, guided="never")
    lost = build_model(photos, tmp_path / "never", matcher=never, chosen=chosen)
    for name in ("01.png", "02.png"):
        points = lost.views.get(name, {"points": 0})["points"]
        assert points < 0.2 * found.views[name]["points"], name


@pytest.mark.parametrize("turn", range(4))
def test_points_are_turned_back(turn):
    values = np.arange(5 * 7).reshape(5, 7)
    turned = np.rot90(values, turn)
    y, x = np.mgrid[: turned.shape[0], : turned.shape[1]].reshape(2, -1)
    column, row = _turned_back(np.stack([x, y], axis=1), turn, (7, 5)).T
    assert (values[row, column] == turned[y, x]).all()


@pytest.mark.parametrize(("share", "sure"), [(0.9, True), (0.3, False), (0.0, False)])
@pytest.mark.parametrize("count", [100, 3000])
def test_some_matches_tell_whether_most_agree(share, sure, count):
    """Points seen by a camera that moves sideways; the wrong ones are anywhere."""
    random = np.random.default_rng(0)
    points0 = random.uniform(0, 640, (count, 2))
    points1 = points0 + np.stack([random.uniform(5, 60, count), np.zeros(count)], axis=1)
    wrong = random.random(count) >= share
    points1[wrong] = random.uniform(0, 640, (int(wrong.sum()), 2))
    both = Matches(np.tile(points0, (2, 1)), np.tile(points1, (2, 1)), np.ones(2 * count))
    assert seems_sure(both, 1.0) == sure


def test_too_few_matches_are_not_sure():
    points = np.random.default_rng(0).uniform(0, 640, (20, 2))
    assert not seems_sure(Matches(points, points, np.ones(20)), 1.0)


PHOTOGRAPHS, MOST_GIB = 200, 3.0
MEASURED = f"""
import re, sys
try:
    {START}
finally:
    status = open("/proc/self/status").read()
    print("peak", *re.findall(r"VmHWM:\\s+(\\d+)", status), file=sys.stderr)
"""


@pytest.mark.slow
def test_memory_of_200_photographs(tmp_path):
    """Crops of a photograph, whose maps together exceed the cache."""
    (tmp_path / "photos").mkdir()
    random = np.random.default_rng(0)
    for i in range(PHOTOGRAPHS):
        with Image.open(STREETS[i % 2]) as image:
            width, height = (round(0.7 * side) for side in image.size)
            left, top = (int(random.integers(0, 0.3 * side)) for side in image.size)
            crop = image.crop((left, top, left + width, top + height))
            crop.resize((640, 640 * height // width), Image.Resampling.BICUBIC).save(
                tmp_path / "photos" / f"{i:03d}.jpg"
            )
    words = ["sfm", tmp_path / "photos", tmp_path / "out", "--nearest", 3, "--size", 480]
    run = command(*words, "--device", "cpu", "--json", code=MEASURED, timeout=3000)
    assert run.returncode in (0, 1), run.stderr
    report = json.loads(run.stdout)
    assert len(report["registered"]) + len(report["left_out"]) == PHOTOGRAPHS
    assert report["verified"] >= PHOTOGRAPHS
    (peak,) = (line.split()[1] for line in run.stderr.splitlines() if line.startswith("peak"))
    gib = int(peak) / 2**20
    print(f"{gib:.2f} GiB, {report['pairs']} pairs, {report['seconds']}")
    assert 1 < gib < MOST_GIB


# ---- what can be wrong


def test_without_pycolmap(scene, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pycolmap", None)
    monkeypatch.chdir(tmp_path)
    told = refused("sfm", scene[0] / "photos", "out")
    assert "a reconstruction needs pycolmap" in told
    assert "pip install 'quadtree-attention[sfm]'" in told


def test_a_folder_that_is_missing_or_empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("text")
    assert "none" in refused("sfm", "none", "out")
    assert "batch must be at least 1, got 0" in refused("sfm", "empty", "out", "--batch", 0)
    assert "empty" in refused("sfm", "empty", "out")
    assert "file" in refused("sfm", "file", "out")


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
