# SPDX-License-Identifier: Apache-2.0
"""Kernels that are compiled before they are needed."""

import pytest
import torch

from quadtree_attention import OptionError, models
from tests.support import raises
from tests.support.commands import python
from tests.support.tiny import NETWORKS

OF_ATTENTION = ("logits", "pyramid", "coarse", "fine")


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("task", NETWORKS)
def test_a_network_stays_as_it_was(task, training):
    name, options = NETWORKS[task]
    model = models.create(name, **options).train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random = torch.get_rng_state()
    assert models.warmup(model, [(64, 96)], training=training) == 0
    assert model.training
    assert torch.equal(random, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_sizes_are_checked():
    model = models.create("test_quadtree")
    raises(OptionError, "height must be at least 1", models.warmup, model, [(0, 10)])


def compile_a_few() -> None:
    """With the driver of a GPU that is not there; some kernels take sizes after constants."""
    from triton.runtime import driver

    from quadtree_attention.ops.depthwise import launch
    from quadtree_attention.ops.norms import kernels
    from quadtree_attention.ops.warm import compile_launches, recorded
    from tests.ops.test_gpu_code import Hopper

    driver.set_active(Hopper())
    done: list[int] = []

    def run() -> None:
        for rows in (5, 7):
            x = torch.zeros(rows, 32)
            kernels.layer_norm(x, x[0], x[0], 1e-5, x.dtype)
        x, weight = torch.zeros(1, 5, 4), torch.zeros(4, 1, 3)
        launch.backward(x, [x], [weight], [x[0, 0]], None, launch.Options(), False)

    launches = recorded(run)
    assert len(launches) == 4
    compile_launches(launches, done=lambda: done.append(1))
    assert len(done) == 4
    (cache,) = kernels.layer_norm_fwd_kernel.jit.device_caches.values()
    assert len(cache[0]) == 1


def test_recorded_launches_are_compiled():
    pytest.importorskip("triton", reason="triton comes with the CUDA builds of torch for Linux")
    python("from tests.models.test_warm import compile_a_few; compile_a_few()")


def variants_of_sizes(training):
    """Variants at the sizes that `warmup` takes for 128x128, and at random ones.

    But for kernels of the attention itself.
    """
    import os
    import random

    from quadtree_attention.models.warm import ODD, run_once
    from quadtree_attention.nn import fuse_for_inference
    from quadtree_attention.ops.warm import recorded

    os.environ["QUADTREE_FUSED"] = "1"
    model = fuse_for_inference(models.create("quadtree_b_b0"))

    def variants(size):
        found = recorded(lambda: run_once(model, size, training=training))
        kernels = [x for x in found if not x.name.startswith(OF_ATTENTION)]
        return {launch.variant for launch in kernels if "users" not in launch.name}

    warm = variants((128, 128)) | variants((128 + ODD, 128 + ODD))
    rng = random.Random(0)
    for _ in range(8):
        size = rng.randint(64, 300), rng.randint(64, 300)
        more = variants(size) - warm
        assert not more, (size, more)
    return len(warm)


@pytest.mark.parametrize(("training", "most"), [(False, 15), (True, 45)])
def test_sizes_compile_nothing_anew(training, most, interpreter):
    interpreter(check_variants, training, most)


def check_variants(training, most):
    assert variants_of_sizes(training) <= most


def check_sizes_between():
    """Also of the attention: its coarsest level has other tiles where it has more cells."""
    import random

    from quadtree_attention.models.warm import ODD
    from quadtree_attention.nn import fuse_for_inference
    from quadtree_attention.ops.warm import recorded

    model = fuse_for_inference(models.create("quadtree_b_b0")).to("meta", torch.bfloat16).eval()

    def variants(height, width):
        images = torch.empty(1, 3, height, width, device="meta", dtype=torch.bfloat16)
        with torch.no_grad():
            return {launch.variant for launch in recorded(lambda: model(images))}

    warm = set()
    for side in (256, 800, 1400):
        warm |= variants(side, side) | variants(side + ODD, side + ODD)
    rng = random.Random(0)
    for _ in range(6):
        size = rng.randint(256, 1400), rng.randint(256, 1400)
        assert variants(*size) <= warm, size


def test_sizes_between_compile_nothing_anew(interpreter):
    interpreter(check_sizes_between)


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True])
def test_on_a_gpu(training):
    model = models.create("quadtree_b_b0").cuda()
    assert models.warmup(model, [(128, 128)], training=training) > 10
    assert torch.isfinite(model.eval()(torch.randn(1, 3, 90, 130, device="cuda"))).all()
