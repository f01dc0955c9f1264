# SPDX-License-Identifier: Apache-2.0
"""What GPUs run compiled gives what CPUs compute, for batches of any number of items."""

import dataclasses
import shutil
import warnings

import pytest
import torch
from torch._dynamo.utils import counters

from quadtree_attention.synthetic import (
    HomographyOptions,
    ProceduralTextures,
    SceneOptions,
    distort,
    fused,
    homography_pairs,
    scene_pairs,
)
from quadtree_attention.synthetic.fused import Fused, compile_everywhere, compiles, plainly

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="torch.compile needs a C++ compiler on CPUs",
)


@pytest.fixture
def switch():
    """Compiling works again after a test in which it does not."""
    yield
    fused._Switch.works = True


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def assert_close(made, plain):
    for field in dataclasses.fields(plain):
        a, b = getattr(made, field.name), getattr(plain, field.name)
        assert a.shape == b.shape and a.dtype == b.dtype
        if a.dtype == torch.bool:
            assert (a == b).float().mean() > 0.999
            continue
        # Single pixels on an outline may fall to either side of it
        far = ((a - b).abs() > 1e-3 * (1 + b.abs())).float().mean()
        assert far < 1e-3, field.name


@needs_compiler
def test_compiled_photometry_is_that_of_the_plain_functions():
    image = torch.rand(5, 3, 21, 30)
    before = graphs()
    for count in (3, 5, 1):
        plain = distort(image[:count], range(count), jpeg=0)
        with compile_everywhere():
            made = distort(image[:count], range(count), jpeg=0)
        assert torch.allclose(made, plain, atol=1e-5)
    assert graphs() == before + 1


@needs_compiler
def test_a_failing_compiler_is_told_once(switch):
    def broken(x, y, twice=False):
        return x + 1 if x.sum().item() > 0 else x - y  # depends on values: no single graph

    function = Fused(broken, batched=1)
    x = torch.ones(3, 2)
    with compile_everywhere():
        with pytest.warns(RuntimeWarning, match=r"without torch.compile.* failed on broken \("):
            assert torch.equal(function(x, 1), x + 1)
        assert not compiles(CPU)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(function(-x, 1), -x - 1)


def test_nothing_is_compiled_on_cpus():
    before = graphs()
    distort(torch.rand(2, 3, 16, 16), range(2))
    assert graphs() == before and not compiles(CPU)


def test_a_training_loop_does_not_change_data(textures):
    def make():
        return [pairs(textures, [4], size=(24, 32)) for pairs in (scene_pairs, homography_pairs)]

    plain = make()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        made = make()
    for a, b in zip(made, plain, strict=True):
        for field in dataclasses.fields(b):
            assert torch.equal(getattr(a, field.name), getattr(b, field.name))
        assert not a.image0.is_inference()


@pytest.mark.slow
@needs_compiler
def test_compiled_views_are_those_of_the_plain_functions(textures):
    before = graphs()
    for count in (3, 5, 1):
        for make, kind in ((scene_pairs, SceneOptions), (homography_pairs, HomographyOptions)):
            options = {"size": (24, 33), "options": kind(photometric=0, samples=1)}
            plain = make(textures, range(count), **options)
            with compile_everywhere():
                made = make(textures, range(count), **options)
            assert_close(made, plain)
    assert graphs() == before + 3  # what is where, its colours, planes
    assert compiles(torch.device("cuda")), "the compiler failed"


@pytest.mark.gpu
def test_gpu_compiles_once_and_is_never_waited_for():
    textures = ProceduralTextures(16, size=128).to("cuda")

    def make(count, strength):
        kinds = ((scene_pairs, SceneOptions), (homography_pairs, HomographyOptions))
        return [
            pairs(textures, range(count), size=(97, 123), options=options(photometric=strength))
            for pairs, options in kinds
        ]

    with plainly():
        plain = make(4, 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # of a compiler that fails
        for made, expected in zip(make(4, 0.0), plain, strict=True):
            assert_close(made, expected)
        make(4, 1.0)
        before = graphs()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for count in (7, 1, 4):
                make(count, 1.0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert graphs() == before
