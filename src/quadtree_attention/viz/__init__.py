# SPDX-License-Identifier: Apache-2.0
"""Visualisation of results."""
