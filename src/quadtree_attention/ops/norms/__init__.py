# SPDX-License-Identifier: Apache-2.0
"""Norms of tokens and of maps by fused kernels."""
