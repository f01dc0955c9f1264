# SPDX-License-Identifier: Apache-2.0
"""Variant C: one softmax over the cells that were not refined."""
