# SPDX-License-Identifier: Apache-2.0
"""Files of disparity, read and written, and what is said of bad ones."""

import io
import struct

import cv2
import numpy as np
import pytest
from PIL import Image

from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.tasks.stereo.formats import read_disparity
from quadtree_attention.tasks.stereo.result import Disparity
from tests.conftest import ROOT
from tests.support.commands import refusal as refused

VALUES = np.array([[1.5, 2.25, 0.75], [8.0, 100.0, 3.5]], np.float32)


def pfm(rows, order="<", header="Pf\n{width} {height}\n{scale}\n"):
    """The lower row first, a negative scale for little-endian numbers, which are not scaled."""
    rows = [list(row) for row in rows]
    text = header.format(width=len(rows[0]), height=len(rows), scale=-0.25 if order == "<" else 4.0)
    numbers = [value for row in reversed(rows) for value in row]
    return text.encode() + struct.pack(f"{order}{len(numbers)}f", *numbers)


def png(array, **options):
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG", **options)
    return file.getvalue()


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(
    "header", ["Pf\n{width} {height}\n{scale}\n", "Pf {width}\n{height} {scale} "]
)
def test_pfm_of_either_byte_order(tmp_path, order, header):
    path = tmp_path / "d.pfm"
    path.write_bytes(pfm(VALUES, order, header))
    found = read_disparity(path)
    assert np.array_equal(found.values, VALUES) and found.values.dtype == np.float32
    assert found.known.all()
    assert np.array_equal(read_disparity(path, scale=2).values, VALUES / 2)


@pytest.mark.parametrize("suffix", [".pfm", ".npy"])
def test_what_is_not_known(tmp_path, suffix):
    rows = np.array([[np.nan, np.inf, 0.0], [-np.inf, -4.0, 2.0]], np.float32)
    path = tmp_path / f"d{suffix}"
    if suffix == ".pfm":
        path.write_bytes(pfm(rows))
    else:
        np.save(path, rows)
    found = read_disparity(path)
    assert found.known.tolist() == [[False] * 3, [False, False, True]]
    assert found.values.tolist() == [[0.0] * 3, [0.0, 0.0, 2.0]]


def test_negative_disparities_and_predictions(tmp_path):
    """Those that are all negative are positive ones; predictions are taken as they are."""
    path = tmp_path / "d.pfm"
    path.write_bytes(pfm([[-1.0, np.inf], [0.0, -2.5]]))
    found = read_disparity(path)
    assert found.values.tolist() == [[1.0, 0.0], [0.0, 2.5]]
    assert found.known.tolist() == [[True, False], [False, True]]
    path = tmp_path / "found.npy"
    np.save(path, np.array([[-3.0, -1.0], [np.nan, np.inf]], np.float32))
    found = read_disparity(path, truth=False)
    assert found.values.tolist() == [[-3.0, -1.0], [0.0, 0.0]]
    path = tmp_path / "lines.pfm"  # that end as in Windows
    path.write_bytes(b"Pf\r\n3 2\r\n-1\r\n" + np.arange(1, 7, dtype="<f4").tobytes())
    assert read_disparity(path).values.tolist() == [[4.0, 5.0, 6.0], [1.0, 2.0, 3.0]]


def test_png_is_scaled(tmp_path):
    path = tmp_path / "d.png"
    path.write_bytes(png(np.array([[0, 256, 1], [65535, 640, 128]], np.uint16)))
    found = read_disparity(path)
    assert found.values.tolist() == [[0.0, 1.0, 1 / 256], [65535 / 256, 2.5, 0.5]]
    assert found.known.tolist() == [[False, True, True], [True] * 3]
    assert read_disparity(path, scale=100).values[1, 1] == np.float32(6.4)
    path = tmp_path / "d.png"
    path.write_bytes(png(np.array([[0, 3], [255, 4]], np.uint8)))
    assert read_disparity(path, scale=3).values.tolist() == [[0.0, 1.0], [85.0, np.float32(4 / 3)]]
    assert "pass the scale" in refused(DataError, read_disparity, path)
    assert "must be above 0, got 0" in refused(OptionError, read_disparity, path, scale=0)


def test_arrays(tmp_path):
    np.save(tmp_path / "d.npy", VALUES[None].astype(np.float64))
    np.savez(tmp_path / "one.npz", VALUES)
    np.savez(tmp_path / "named.npz", disparity=VALUES, occlusion=VALUES * 0)
    for name in ("d.npy", "one.npz", "named.npz"):
        assert np.array_equal(read_disparity(tmp_path / name).values, VALUES)
    np.savez(tmp_path / "two.npz", a=VALUES, b=VALUES)
    told = refused(DataError, read_disparity, tmp_path / "two.npz")
    assert "two.npz" in told and "called disparity" in told


def write_disparity(path, values):
    Disparity(disparity=values).save(path)


@pytest.mark.parametrize("name", ["d.pfm", "d.npy", "d.png"])
def test_what_is_written_is_read_back(tmp_path, name):
    path = tmp_path / name
    given = VALUES.copy()
    given[0, 1], given[1, 2] = np.nan, -np.inf
    write_disparity(path, given)
    found = read_disparity(path)
    assert found.known.tolist() == [[True, False, True], [True, True, False]]
    assert np.array_equal(found.values, np.where(found.known, VALUES, 0))
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_others_read_what_is_written(tmp_path):
    write_disparity(tmp_path / "d.pfm", VALUES)
    write_disparity(tmp_path / "d.png", VALUES)
    read = {s: cv2.imread(str(tmp_path / f"d.{s}"), cv2.IMREAD_UNCHANGED) for s in ("pfm", "png")}
    assert np.array_equal(read["pfm"], VALUES)
    assert read["png"].dtype == np.uint16 and np.array_equal(read["png"], VALUES * 256)
    write_disparity(tmp_path / "d.png", np.zeros((2, 3)))  # 0 stays known
    found = read_disparity(tmp_path / "d.png")
    assert found.known.all() and (found.values == 1 / 256).all()


def test_what_does_not_fit_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "d.png"
    path.write_bytes(b"old")
    for wrong in (256.0, -1.0):
        told = refused(OptionError, write_disparity, path, np.full((2, 2), wrong))
        assert all(x in told for x in ("from 0 to 256.00", f"{wrong:.2f}", "write .pfm or .npy"))
    assert "must be (height, width)" in refused(OptionError, write_disparity, path, VALUES[0])
    told = refused(OptionError, write_disparity, tmp_path / "d.tif", VALUES)
    assert told.startswith("results are written as .npz, .npy, .pfm, .png, got ")
    told = refused(OptionError, write_disparity, tmp_path / "nowhere" / "d.npy", VALUES)
    assert "cannot be written" in told
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["d.png"]


def test_every_truncated_file_is_refused_by_name(tmp_path):
    contents = {"pfm": pfm(VALUES), "png": png(np.arange(48, dtype=np.uint16).reshape(6, 8))}
    file = io.BytesIO()
    np.save(file, VALUES)
    contents["npy"] = file.getvalue()
    for suffix, whole in contents.items():
        path = tmp_path / f"d.{suffix}"
        path.write_bytes(whole)
        read_disparity(path)
        # The last 20 bytes of a PNG are checksums and a chunk that holds nothing
        for length in range(len(whole) - (20 if suffix == "png" else 0)):
            path.write_bytes(whole[:length])
            assert str(path) in refused(DataError, read_disparity, path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.pfm", b"P6\n3 2\n255\n" + bytes(18), "does not start as a PFM file"),
        ("d.pfm", b"Pf\n3 -2\n-1\n" + bytes(24), "does not start as a PFM file"),
        ("d.pfm", b"Pf\n3 x\n-1\n" + bytes(24), "does not start as a PFM file"),
        ("d.pfm", pfm(VALUES).replace(b"Pf", b"PF"), "has three channels"),
        ("d.png", png(np.zeros((2, 2, 3), np.uint8)), "one channel of 8 or 16 bits"),
        ("d.png", b"not a picture", "cannot decode"),
        ("d.exr", b"x", "disparity is read from .pfm, .png, .npy, .npz"),
    ],
)
def test_other_files_are_refused(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    told = refused(DataError, read_disparity, path)
    assert message in told and str(path) in told


@pytest.mark.parametrize(
    "array", [np.zeros(3), np.zeros((0, 3)), np.zeros((2, 3, 3)), np.array([[None]]), np.eye(2) > 0]
)
def test_other_arrays_are_refused(tmp_path, array):
    np.save(tmp_path / "d.npy", array, allow_pickle=True)
    assert "d.npy" in refused(DataError, read_disparity, tmp_path / "d.npy")
    told = refused(DataError, read_disparity, tmp_path / "d.pfm")
    assert told == f"cannot read {tmp_path / 'd.pfm'}: No such file or directory; check the path"


MOTORCYCLE = ROOT.parent / "shared/data/stereo/MIDDLEBURY_2014/trainingQ/Motorcycle/disp0GT.pfm"


def test_a_real_pfm_as_another_reader_reads_it():
    if not MOTORCYCLE.exists():
        pytest.skip("the stereo pairs are not at ../shared/data/stereo beside the checkout")
    found, other = read_disparity(MOTORCYCLE), cv2.imread(str(MOTORCYCLE), cv2.IMREAD_UNCHANGED)
    assert np.array_equal(found.known, np.isfinite(other)) and not found.known.all()
    # OpenCV divides by the scale of the header, which calib.txt contradicts: vmax is 65 there
    there = other[found.known] * np.float32(0.003922)
    assert found.values.max() < 65 and np.allclose(found.values[found.known], there, rtol=1e-6)
    assert (found.values[~found.known] == 0).all()
