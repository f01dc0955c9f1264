# SPDX-License-Identifier: Apache-2.0
"""Variant C: one softmax over the unrefined cells of all levels."""
