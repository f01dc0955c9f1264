# SPDX-License-Identifier: Apache-2.0
"""Networks built on quadtree attention, and the import of official checkpoints.

Importing this package registers the backbones with timm, where timm is installed.
"""

from importlib.util import find_spec

if find_spec("timm") is not None:
    from quadtree_attention.models import backbone as backbone
