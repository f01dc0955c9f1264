# SPDX-License-Identifier: Apache-2.0
from quadtree_attention.tasks.readers import summary


def test_summary_names_the_first_and_counts_the_rest():
    assert summary(["a: x", "b: y"]) == "a: x; b: y"
    assert summary(list("abcdefg")) == "a; b; c; d; e, and 2 more"
