# SPDX-License-Identifier: Apache-2.0
"""Launches, variants and host time without a GPU."""

import os

import pytest
import torch

from benchmarks.speed import host
from quadtree_attention.ops import kernel

pytest.importorskip("triton", reason="triton comes with the CUDA builds of torch for Linux")


def test_operators_that_compute_are_counted():
    x = torch.randn(2, 3)
    assert host.count(lambda: (x @ x.T).relu().view(-1).detach()) == (0, 2)
    assert host.count(lambda: torch.empty(3).expand(2, 3)) == (0, 0)


def test_the_attention_alone(result):
    """Nothing stays behind: neither the stub of launches nor the environment."""
    names = host.SWITCH, "TRITON_INTERPRET"
    launch, before = kernel.Kernel.__getitem__, [os.environ.get(name) for name in names]
    options = "--parts", "attention forward,attention forward + backward"
    made = result("speed host --threads 1 --seconds-per-row 0.02", *options)
    forward, both = (row["values"] for row in made["rows"])
    assert 0 < forward["triton_launches"] <= forward["launches"] < both["launches"]
    assert forward["median_ms"] > 0
    assert kernel.Kernel.__getitem__ is launch
    assert [os.environ.get(name) for name in names] == before


def test_a_network_beside_its_baseline():
    plain, fused = host.plan(host.Namespace(parts=["b0 inference"]))
    assert [work["fused"] for work in plain + fused] == [False, False, True, True]
    assert [work["baseline"] for work in plain] == ["pvt_v2_b0", None]
    assert "variants" not in host.values(plain[1])
