# SPDX-License-Identifier: Apache-2.0
"""Stereo: disparity and occlusion from rectified pairs of images."""
