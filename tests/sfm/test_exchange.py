# SPDX-License-Identifier: Apache-2.0
"""`quadtree match --colmap` and `--export hloc`."""

import sqlite3
from contextlib import closing

import h5py
import numpy as np
import pytest

from tests.support.commands import invoke, refused
from tests.support.scene import write_photographs

pycolmap = pytest.importorskip("pycolmap", reason="the database is that of the extra 'sfm'")
OPTIONS = ("--pairs", "pairs.txt", "--images", "photos", "--save", "OUT", "--size", 256)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exchange")
    write_photographs(folder / "photos", 3)
    (folder / "pairs.txt").write_text("00.png 01.png\n02.png 01.png\n")
    return folder


@pytest.fixture(autouse=True)
def inside(folder, monkeypatch):
    monkeypatch.chdir(folder)


def counts(path):
    tables = ("keypoints", "matches", "two_view_geometries")
    with closing(sqlite3.connect(path)) as database:
        return [database.execute(f"select sum(rows) from {t}").fetchone()[0] for t in tables]


def test_a_database_of_colmap_gets_matches_once_and_keeps_its_keypoints(folder):
    path = folder / "database.db"
    with pycolmap.Database.open(path):
        pass
    pycolmap.import_images(path, folder / "photos")
    with pycolmap.Database.open(path) as database:
        image = database.read_image_with_name("01.png")
        database.write_keypoints(image.image_id, np.array([[3, 4, 1, 0], [9, 9, 2, 0]], np.float32))
    result = invoke("match", *OPTIONS, "--colmap", path)
    assert result.exit_code == 0, result.output
    assert "in 3 pairs" in result.stdout
    with pycolmap.Database.open(path) as database:
        stored = np.asarray(database.read_keypoints(image.image_id))
        assert stored[:2].tolist() == [[3, 4, 1, 0], [9, 9, 2, 0]] and len(stored) > 200
        first, second = (database.read_image_with_name(n).image_id for n in ("00.png", "01.png"))
        matches = np.asarray(database.read_matches(first, second))
        geometry = database.read_two_view_geometry(first, second)
        points = np.asarray(database.read_keypoints(first))
    assert matches[:, 1].min() >= 2 and matches[:, 0].max() < len(points)
    assert len(geometry.inlier_matches) > 0.9 * len(matches) > 100
    before = counts(path)
    assert invoke("match", *OPTIONS, "--colmap", path).exit_code == 0
    assert counts(path) == before


def test_files_of_hloc(folder):
    result = invoke("match", *OPTIONS, "--export", "hloc")
    assert result.exit_code == 0, result.output
    with h5py.File("OUT/features.h5") as features, h5py.File("OUT/matches.h5") as matches:
        points = {name: group["keypoints"][:] for name, group in features.items()}
        assert sorted(points) == ["00.png", "01.png", "02.png"]
        assert sorted(matches) == ["00.png", "01.png"]
        found = matches["00.png/01.png"]["matches0"][:]
    assert len(found) == len(points["00.png"]) and found.max() < len(points["01.png"])
    kept = found >= 0
    stored = np.load("OUT/00__01.npz")
    pairs = np.concatenate([stored["keypoints0"], stored["keypoints1"]], axis=1)
    exported = np.concatenate([points["00.png"][kept], points["01.png"][found[kept]]], axis=1)
    apart = np.abs(exported[:, None] - pairs[None]).max(axis=2).min(axis=1)
    assert (apart < 0.01).mean() > 0.5  # others are measured from a cell of the third image


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--export", "none"], "export must be one of hloc, got 'none'"),
        (["--colmap", "none.db"], "there is no database 'none.db'"),
    ],
)
def test_mistakes(folder, options, words):
    assert words in refused("match", *OPTIONS, *options)


def test_rotations_and_foreign_files_are_refused(folder, tmp_path):
    (tmp_path / "turned.txt").write_text("00.png 01.png 0 1\n")
    given = ["--pairs", tmp_path / "turned.txt", "--images", "photos", "--save", tmp_path / "OUT"]
    assert "got rotations for 00__01" in refused("match", *given, "--export", "hloc")
    (tmp_path / "text.db").write_text("no database at all")
    told = invoke("match", *OPTIONS, "--colmap", tmp_path / "text.db")
    assert told.exit_code == 2 and "no database of COLMAP" in told.stderr
