# SPDX-License-Identifier: Apache-2.0
"""`quadtree warmup`."""

import json

import pytest

from tests.support.commands import invoke, refused


def test_kernels_are_compiled():
    done = invoke("warmup", "test_quadtree", "--sizes", "40x48,33x64", "--device", "cpu", "--json")
    report = json.loads(done.stdout)
    assert (report["model"], report["device"], report["kernels"]) == ("test_quadtree", "cpu", 0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["test_quadtree", "--sizes", "640"], "--sizes must be like 480x640"),
        (["test_quadtree", "--sizes", "0x640"], "--sizes must be like 480x640"),
        (["quadtree_b_b7"], "did you mean quadtree_b_b"),
        (["test_quadtree", "--dtype", "int8"], "dtype must be one of"),
        (["no.safetensors"], "no.safetensors"),
    ],
)
def test_mistakes(options, text):
    assert text in refused("warmup", *options)
