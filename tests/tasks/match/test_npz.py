# SPDX-License-Identifier: Apache-2.0
"""npz files of unknown origin are read as data, and run nothing."""

import pickle
import zipfile

import numpy as np
import pytest

from quadtree_attention.errors import DataError
from quadtree_attention.tasks.match.npz import read_npz
from tests.support import Hostile, raises
from tests.tasks.match.posed_files import objects


def test_objects_are_read_as_numpy_reads_them(tmp_path):
    values = [
        None, True, 3, 2.5, "naïve", b"\x00\xff", (1, [np.float32(0.5), (np.int64(-7),)]),
        np.arange(6.0).reshape(2, 3), np.arange(6, dtype=">i2").reshape(3, 2).T,
        objects([np.ones(2), "inner"]), np.array(["ab", "c"]), np.array(4.0),
    ]  # fmt: skip
    grid = np.empty((2, 3), object)
    grid[:] = [[1, 2, 3], [4, 5, "six"]]
    plain = np.arange(4).reshape(2, 2)
    np.savez(tmp_path / "a.npz", values=objects(values), grid=grid, plain=plain)
    found = read_npz(tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz", allow_pickle=True) as file:  # our own file
        expected = dict(file)
    assert list(found) == list(expected)
    assert np.array_equal(found["plain"], plain)
    assert found["grid"].tolist() == grid.tolist()
    for mine, theirs in zip(found["values"], expected["values"], strict=True):
        assert type(mine) is type(theirs)
        if isinstance(mine, np.ndarray) and mine.dtype != object:
            assert mine.dtype == theirs.dtype and np.array_equal(mine, theirs)
        else:
            assert pickle.dumps(mine) == pickle.dumps(theirs)


@pytest.mark.parametrize("nested", [False, True])
def test_code_in_a_file_does_not_run(tmp_path, nested):
    marker = tmp_path / "marker"
    hostile = Hostile(marker)
    np.savez(tmp_path / "a.npz", pair_infos=objects([((0, hostile), 1.0)] if nested else [hostile]))
    with pytest.raises(DataError, match=r"a\.npz wants to run \w+\.mkdir when pair_infos\.npy"):
        read_npz(tmp_path / "a.npz", ["pair_infos"])
    assert not marker.exists()
    np.load(tmp_path / "a.npz", allow_pickle=True)["pair_infos"]
    assert marker.exists()  # it would have run


def stored_as(tmp_path, content):
    """An npz file whose array of objects is the given pickle."""
    np.savez(tmp_path / "good.npz", a=objects([1]))
    with zipfile.ZipFile(tmp_path / "good.npz") as file:
        whole = file.read("a.npy")
    header = whole[: whole.index(b"\n") + 1]
    with zipfile.ZipFile(tmp_path / "bad.npz", "w") as file:
        file.writestr("a.npy", header + content)
    return tmp_path / "bad.npz"


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_files_of_older_numpy_are_read(tmp_path, protocol):
    stored = pickle.dumps(objects([(0, np.float64(0.5), np.eye(2))]), protocol=protocol)
    ((number, overlap, matrix),) = read_npz(stored_as(tmp_path, stored))["a"]
    assert (number, overlap) == (0, 0.5) and np.array_equal(matrix, np.eye(2))


@pytest.mark.parametrize(
    "made",
    [
        b"",  # no pickle
        pickle.dumps([1, 2]),  # no array
        pickle.dumps(objects([{"a": 1}]), protocol=4),  # a dictionary is not needed
        pickle.dumps(np.zeros(2, [("x", "f4"), ("y", "O")]), protocol=4),  # fields
        pickle.dumps(np.zeros(2, "M8[s]"), protocol=4),
    ],
)
def test_what_else_is_refused(tmp_path, made):
    raises(DataError, r"bad\.npz", read_npz, stored_as(tmp_path, made))


class Forged:
    """An array of objects whose contents are bytes, which NumPy might follow as addresses."""

    def __reduce__(self):
        made, arguments, (version, shape, dtype, order, _) = objects([None]).__reduce__()
        return made, arguments, (version, shape, dtype, order, b"A" * 8)


def test_missing_and_damaged_files(tmp_path):
    raises(DataError, r"there is no file .*a\.npz", read_npz, tmp_path / "a.npz")
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 and more")
    raises(DataError, r"cannot read .*a\.npz", read_npz, tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", x=np.zeros(2))
    with pytest.raises(DataError, match=r"b\.npz must hold x, y, got x; y is missing"):
        read_npz(tmp_path / "b.npz", ["x", "y"])
    with pytest.raises(DataError, match="an array of objects holds no list"):
        read_npz(stored_as(tmp_path, pickle.dumps(Forged(), protocol=4)))
