# SPDX-License-Identifier: Apache-2.0
"""Rays end on the first surface: checked by walking along them."""

import dataclasses

import pytest
import torch

from quadtree_attention.synthetic import SceneOptions, layout
from quadtree_attention.synthetic.draws import Draws
from quadtree_attention.synthetic.layout import first_camera, place, second_camera
from quadtree_attention.synthetic.probe import first_depth
from quadtree_attention.synthetic.solids import Solids, cast, see

SIZE = (19, 26)
OPTIONS = SceneOptions(objects=(8, 14))
HARD = SceneOptions(rotation=(30, 80), baseline=(0.5, 1.5), overlap=(0.5, 0.6))  # few cameras fit
CPU = torch.device("cpu")


def levels(solids, points):
    """(B, S, ...): below 1 inside a solid, 1 on its surface; `points` (B, ..., 3)."""
    result = []
    for i, kind in enumerate(solids.kinds):
        centre = solids.centre[:, i].reshape(len(points), *(1,) * (points.ndim - 2), 3)
        matrix = solids.rotation[:, i].reshape(len(points), *(1,) * (points.ndim - 3), 3, 3)
        local = (points - centre) @ matrix / solids.half[:, i].reshape(centre.shape)
        ball = local.norm(dim=-1)
        level = ball if kind == "ellipsoid" else local.abs().amax(dim=-1)
        active = solids.active[:, i].reshape(len(points), *(1,) * (level.ndim - 1))
        result.append(level.where(active, torch.inf))
    return torch.stack(result, dim=1)


@pytest.mark.parametrize("view", [0, 1])
def test_first_surface(view):
    draws = Draws(1, range(4))
    camera = first_camera(draws, SIZE, OPTIONS.focal)
    scene = place(draws, camera, OPTIONS, textures=3)
    if view:
        camera = second_camera(draws, scene, camera, SIZE, OPTIONS)
    solids = scene.solids
    x, y = camera.rays()
    depth, slot = cast(see(solids, camera, CPU, torch.float64), x, y)
    assert len(slot.unique()) > 4

    ray = torch.stack(torch.broadcast_tensors(x, y, torch.ones_like(depth)), dim=-1)
    level = levels(solids, camera.to_world(ray * depth[..., None]))
    on_surface = level.gather(1, slot.long()[:, None])[:, 0]
    assert torch.allclose(on_surface, torch.ones_like(depth), atol=1e-6)
    # Nothing before: all solids are yet to come, and the room is not left
    for share in torch.linspace(0, 1, 120)[:-1].tolist():
        at = ray * (0.05 + share * (depth - 0.05))[..., None]
        before = levels(solids, camera.to_world(at))
        assert (before[:, 0] < 1 + 1e-6).all()
        entered = (before[:, 1:] < 1 - 1e-6) & ~holds_camera(solids, camera)
        assert not entered.any()


def holds_camera(solids, camera):
    near = camera.to_world(torch.tensor([0.0, 0.0, 0.05], dtype=torch.float64).expand(4, 1, 3))
    return (levels(solids, near) < 1.2)[:, 1:, :, None]


def test_single_precision_is_enough():
    draws = Draws(2, range(4))
    camera = first_camera(draws, SIZE, OPTIONS.focal)
    solids = place(draws, camera, OPTIONS, textures=3).solids
    exact, slot = cast(see(solids, camera, CPU, torch.float64), *camera.rays())
    single = camera.to(CPU, torch.float32)
    depth, slot32 = cast(see(solids, camera, CPU, torch.float32), *single.rays())
    same = slot == slot32
    assert same.double().mean() > 0.999
    assert ((depth - exact).abs() / exact)[same].max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_ways_to_cast_give_the_same(dtype):
    """All slots together, as GPUs do it, and the kernel by which cameras are chosen."""
    draws = Draws(4, range(5))
    exact = first_camera(draws, SIZE, OPTIONS.focal)
    solids = place(draws, exact, OPTIONS, textures=3).solids
    camera, sight = exact.to(CPU, dtype), see(solids, exact, CPU, dtype)
    depth, slot = cast(sight, *camera.rays())
    together = cast(dataclasses.replace(sight, used=None), *camera.rays())
    assert torch.equal(together[0], depth) and torch.equal(together[1], slot)
    if dtype == torch.float64:
        assert torch.equal(first_depth(sight, *camera.rays()), depth)


@pytest.mark.parametrize("options", [OPTIONS, HARD])
def test_cameras_do_not_depend_on_how_many_are_tried_at_once(options, monkeypatch):
    def second():
        draws = Draws(6, range(12))
        camera = first_camera(draws, SIZE, options.focal)
        return second_camera(draws, place(draws, camera, options, 3), camera, SIZE, options)

    step_by_step = second()
    monkeypatch.setattr(layout, "ROUNDS", (0, layout.ATTEMPTS))
    at_once = second()
    for name in ("K", "rotation", "centre"):
        assert torch.equal(getattr(step_by_step, name), getattr(at_once, name))


def test_rays_along_a_face_give_numbers():
    eye = torch.eye(3, dtype=torch.float64).expand(1, 2, 3, 3)
    centre = torch.tensor([[[0.0, 0, 0], [0, 0, 3]]], dtype=torch.float64)
    half = torch.tensor([[[5.0, 5, 5], [1, 1, 1]]], dtype=torch.float64)
    active = torch.ones(1, 2, dtype=torch.bool)
    draws = Draws(0, [0])
    camera = first_camera(draws, SIZE, (1.0, 1.0))
    sight = see(Solids(("room", "box"), eye, centre, half, active), camera, CPU, torch.float32)
    x, y = torch.tensor([[[0.0, 0.4, 2.0]]]), torch.zeros(1, 1, 1)  # x = y = 0 exactly
    depth, slot = cast(sight, x, y)
    assert torch.allclose(depth, torch.tensor([[[2.0, 2.0, 2.5]]]))
    assert slot.tolist() == [[[1, 1, 0]]]
