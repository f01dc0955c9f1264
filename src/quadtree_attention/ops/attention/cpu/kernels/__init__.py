# SPDX-License-Identifier: Apache-2.0
"""Numba kernels; nothing here is imported before the first call that needs it."""
