# SPDX-License-Identifier: Apache-2.0
"""Attentions compared by training: `python -m benchmarks training NAME train`."""
