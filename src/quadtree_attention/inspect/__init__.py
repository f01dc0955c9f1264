# SPDX-License-Identifier: Apache-2.0
"""Inspection of attention layers: recording, pictures, HTML pages, and K by attention mass."""

from quadtree_attention.inspect.calibrate import Calibration, calibrate_topk
from quadtree_attention.inspect.calibrate_error import ErrorCalibration
from quadtree_attention.inspect.recorder import Layer, Record, record
from quadtree_attention.inspect.still import draw_level_weights

__all__ = [
    "Calibration",
    "ErrorCalibration",
    "Layer",
    "Record",
    "calibrate_topk",
    "draw_level_weights",
    "record",
]
