# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from quadtree_attention.errors import CheckpointError, DataError
from quadtree_attention.tasks.readers import class_names, match_classes, read_npz, summary
from tests.support import raises
from tests.support.commands import refusal


def test_summary_names_the_first_and_counts_the_rest():
    assert summary(["a: x", "b: y"]) == "a: x; b: y"
    assert summary(list("abcdefg")) == "a; b; c; d; e, and 2 more"


CLASSES = ["ant", "bee", "cat", "dog"]
NUMBERS = ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("ours", "theirs", "labels"),
    [
        (CLASSES, CLASSES, [0, 1, 2, 3]),
        (CLASSES, ["dog", "ant"], [3, 0]),
        (CLASSES, ["0", "1", "2"], [0, 1, 2]),  # data that only have numbers
        (NUMBERS, ["n01", "n02", "n03", "n04"], [0, 1, 2, 3]),  # weights that only have numbers
        (NUMBERS, ["2", "0"], [2, 0]),
        (["crane", "bee", "crane", "dog"], ["crane", "bee", "crane", "dog"], [0, 1, 2, 3]),
    ],
)
def test_classes_are_matched_by_name(ours, theirs, labels):
    assert match_classes(theirs, ours) == labels


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (CLASSES, ["ant", "bee", "cat", "elk"]),
        (CLASSES, [*CLASSES, "elk"]),
        (CLASSES, ["0", "1", "2", "3", "4"]),
        (NUMBERS, ["ant", "bee"]),  # sorted folders of a part of the classes say nothing of labels
        (["crane", "bee", "crane", "dog"], ["crane", "bee"]),
    ],
)
def test_classes_that_do_not_match(ours, theirs):
    raises(CheckpointError, "use weights and data of the same classes", match_classes, theirs, ours)


@pytest.mark.parametrize("names", [["cat"], ["cat", "dog", "elk"], "cd"])
def test_a_card_names_every_class(names):
    with pytest.raises(CheckpointError, match=r"must have names of the 2 classes"):
        class_names({"classes": names}, 2, None)
    assert class_names({"classes": ["cat", "dog"]}, 2, None) == ["cat", "dog"]
    assert class_names({}, 2, None, first=1) == ["1", "2"]


def test_arrays_of_npz_files_alone(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(3))
    assert read_npz(tmp_path / "a.npz", ["x"], ["y"])["x"].tolist() == [0, 1, 2]
    np.save(tmp_path / "b.npy", np.arange(3))
    (tmp_path / "c.npz").write_bytes(b"\xff\xd8 a photograph")
    for name, told in (("a.npz", "got no y"), ("b.npy", "not an npz"), ("c.npz", "not an npz")):
        refused = refusal(DataError, read_npz, tmp_path / name, ["y"])
        assert name in refused and told in refused and "pickle" not in refused
