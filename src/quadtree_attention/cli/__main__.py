# SPDX-License-Identifier: Apache-2.0
"""`python -m quadtree_attention.cli` is the command `quadtree`."""

from quadtree_attention.cli import main

main()
