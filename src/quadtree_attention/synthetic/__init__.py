# SPDX-License-Identifier: Apache-2.0
"""Synthetic image pairs with exact ground truth, for training matchers and stereo networks."""

from quadtree_attention.synthetic.cameras import depth_to_flow, warp
from quadtree_attention.synthetic.homography import HomographyPair, homography_pairs
from quadtree_attention.synthetic.options import HomographyOptions, SceneOptions, StereoOptions
from quadtree_attention.synthetic.photometric import distort
from quadtree_attention.synthetic.procedural import ProceduralTextures
from quadtree_attention.synthetic.scenes import Pair, scene_pairs
from quadtree_attention.synthetic.stereo import StereoPair, stereo_pairs
from quadtree_attention.synthetic.textures import MixedTextures, PhotoTextures, Textures

__all__ = [
    "HomographyOptions",
    "HomographyPair",
    "MixedTextures",
    "Pair",
    "PhotoTextures",
    "ProceduralTextures",
    "SceneOptions",
    "StereoOptions",
    "StereoPair",
    "Textures",
    "depth_to_flow",
    "distort",
    "homography_pairs",
    "scene_pairs",
    "stereo_pairs",
    "warp",
]
