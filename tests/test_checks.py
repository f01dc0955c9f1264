# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest

from quadtree_attention import checks
from quadtree_attention.errors import MissingDependencyError, OptionError
from tests.support import raises


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: checks.at_least(1, batch=0), "batch must be at least 1, got 0"),
        (lambda: checks.at_least(0, decay=math.nan), "decay must be at least 0, got nan"),
        (lambda: checks.above(0, focal=0.0), "focal must be above 0, got 0"),
        (lambda: checks.above(0, focal=math.inf), "focal must be above 0, got inf"),
        (lambda: checks.between(0, 1, flip=1.01), r"flip must be in \[0, 1\], got 1.01"),
        (lambda: checks.between(0, 1, flip=math.nan), r"flip must be in \[0, 1\], got nan"),
        (lambda: checks.at_least(1, size="big"), "size must be a number at least 1, got 'big'"),
        (lambda: checks.count(1, top=0), "top must be at least 1, got 0; pass a larger"),
        (lambda: checks.count(1, top=1.0), "top must be an integer, got 1.0; pass 1 or more"),
        (lambda: checks.count(1, top=True), "top must be an integer, got True; pass 1 or more"),
        (lambda: checks.one_of(("a", "b"), kind="c"), "kind must be one of a, b, got 'c'; pass"),
        (lambda: checks.known("loftt", ("loftr", "sttr"), "model"), "did you mean loftr"),
    ],
)
def test_a_bad_value_is_named(check, message):
    raises(OptionError, message, check)


def test_limits_and_none_pass():
    checks.at_least(1, batch=1, other=None)
    checks.count(1, batch=np.int64(1), other=None)
    checks.above(0, focal=1e-9, other=None)
    checks.between(0, 1, low=0, high=1, other=None)
    checks.one_of(("a",), kind="a", other=None)
    checks.known("a", ("a",), "model")


def test_only_checksums_are_shortened():
    assert checks.shown("0123456789ab" + "c" * 52) == "0123456789ab"
    assert checks.shown("loftr_quadtree_small" * 4) == "loftr_quadtree_small" * 4
    assert checks.few(["a", "b", "c"]) == "a, b, c"
    assert checks.few(["a", "b", "c", "d"]) == "a, b, c and 1 more"
    assert checks.few([]) == "none"


def test_a_missing_module_names_its_extra():
    with (
        pytest.raises(MissingDependencyError, match=r"sfm needs no_such_module.*attention\[sfm\]"),
        checks.needs("sfm", "sfm"),
    ):
        import no_such_module  # noqa: F401
