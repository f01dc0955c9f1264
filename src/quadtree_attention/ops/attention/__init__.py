# SPDX-License-Identifier: Apache-2.0
"""Quadtree attention: the functions, and the backends that compute it."""
