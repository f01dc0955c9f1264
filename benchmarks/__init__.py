# SPDX-License-Identifier: Apache-2.0
"""Speed and memory of quadtree attention next to full attention; see README.md."""
