# SPDX-License-Identifier: Apache-2.0
"""Colours of surfaces: the texels that a ray covers, and the light on them."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from quadtree_attention.synthetic import SceneOptions
from quadtree_attention.synthetic.cameras import unproject
from quadtree_attention.synthetic.draws import Draws
from quadtree_attention.synthetic.layout import first_camera, place
from quadtree_attention.synthetic.render import AMBIENT, face_table, paint, solid_table
from quadtree_attention.synthetic.solids import cast, see

SIZE = (48, 64)
CPU = torch.device("cpu")


class Looked:
    """A bank of one colour that remembers how many texels each point covers."""

    def __init__(self):
        self.footprints = []

    def look_up(self, index, u, v, footprint):
        self.footprints.append(footprint)
        return torch.full((3, len(u)), 0.5)


@pytest.fixture
def scene():
    draws = Draws(3, range(3))
    camera = first_camera(draws, SIZE, (0.8, 1.0))
    return place(draws, camera, SceneOptions(objects=(4, 8)), textures=3), camera


def painted(scene, camera, *, samples=1, light=None):
    """The image, and the bank it was looked up in."""
    if light is not None:
        scene = dataclasses.replace(scene, light=light.expand(3, 3))
    bank = Looked()
    tables = solid_table(scene).float(), face_table(scene.surfaces, 64).float()
    sight = see(scene.solids, camera, CPU, torch.float32)
    camera = camera.to(CPU, torch.float32)
    return paint(*tables, sight, camera, bank, samples, 0.0, 0.0), bank


def test_each_of_several_rays_covers_fewer_texels(scene):
    (one, _), (four, _) = (painted(*scene, samples=n)[1].footprints for n in (1, 4))
    assert torch.allclose(one, 2 * four, rtol=1e-5)


def seen(scene, camera):
    """Depth and solid of every pixel, normals that point to the camera, and where they are sure.

    Normals are those of the points around a pixel, (B, H, W, 3), where all are of one solid.
    """
    depth, slot = cast(see(scene.solids, camera, CPU, torch.float64), *camera.rays())
    points = unproject(depth, camera.K)  # (B, H, W, 3); the camera is at the origin of the world
    along, down = (x.roll(-1, axis) - x.roll(1, axis) for x, axis in ((points, 2), (points, 1)))
    normal = F.normalize(torch.linalg.cross(along, down), dim=-1)
    slots = F.pad(slot[:, None].float(), (1, 1, 1, 1), value=-1)
    inner = (F.max_pool2d(slots, 3, 1) == -F.max_pool2d(-slots, 3, 1))[:, 0]
    ray = F.normalize(points, dim=-1)
    return depth, slot.long(), normal * -(normal * ray).sum(-1, keepdim=True).sign(), ray, inner


def test_footprint(scene):
    """Texels per length, times the mean side of a pixel on a surface at that depth and slant."""
    scene, camera = scene
    depth, slot, normal, ray, inner = seen(scene, camera)
    footprint = painted(scene, camera)[1].footprints[0].reshape(depth.shape)
    slant = (normal * ray).sum(-1).abs()
    density = footprint * camera.K[:, 0, 0, None, None] / depth * slant.sqrt()
    faces = scene.surfaces.axes[..., 0, :].norm(dim=-1)  # (B, S, 6)
    of_faces = torch.stack([faces[b][slot[b]] for b in range(3)])  # (B, H, W, 6)
    error = (density[..., None] / of_faces - 1).abs().amin(dim=-1)[inner & (slant > 0.1)]
    assert error.median() < 1e-3 and (error < 0.02).float().mean() > 0.9


@pytest.mark.parametrize("towards", [(0.0, 0.0, -0.4), (0.3, 0.0, 0.0), (0.0, -0.3, 0.1)])
def test_what_faces_the_light_is_brighter(scene, towards):
    """By the cosine of the angle between the light and the normal that points to the camera."""
    scene, camera = scene
    light = torch.tensor(towards, dtype=torch.float64)
    dark, lit = (painted(scene, camera, light=x)[0].mean(dim=1) for x in (0 * light, light))
    _, _, normal, _, inner = seen(scene, camera)
    inner = inner & (dark > 0.05)
    error = (lit / dark - (AMBIENT + normal @ light) / AMBIENT).abs()[inner]
    assert inner.float().mean() > 0.5
    assert error.median() < 1e-3 and (error < 0.05).float().mean() > 0.9
