# SPDX-License-Identifier: Apache-2.0
import pytest

from quadtree_attention.errors import CheckpointError
from quadtree_attention.tasks.readers import match_classes, summary


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
    with pytest.raises(CheckpointError, match="take weights and data of the same classes"):
        match_classes(theirs, ours)
