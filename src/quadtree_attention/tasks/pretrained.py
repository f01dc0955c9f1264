# SPDX-License-Identifier: Apache-2.0
"""Weights that come with the package."""

from pathlib import Path

from quadtree_attention.errors import CheckpointError, OptionError

WEIGHTS = Path(__file__).parents[1] / "weights"
PRETRAINED = {  # by kind of model, then by name
    "matcher": {"default": WEIGHTS / "matcher.safetensors"},
    "stereo": {"default": WEIGHTS / "stereo.safetensors"},
}


def pretrained_path(kind: str, name: str = "default") -> Path:
    """Where weights lie that come with the package.

    Args:
        kind: "matcher" or "stereo".
        name: One of those there are of that kind.

    Raises:
        OptionError: There are no weights of that name.
        CheckpointError: They were not installed.
    """
    known = PRETRAINED[kind]
    if name not in known:
        raise OptionError(
            f"pretrained {kind} weights are {', '.join(known)}, got {name!r}; take one of them, or "
            "pass the path of other weights"
        )
    path = known[name]
    if not path.is_file():
        raise CheckpointError(
            f"the {name} {kind} weights are not installed: there is no file {path.name} in the "
            f"folder {WEIGHTS.name} of the package; pass other weights (--weights FILE), or "
            "install a version of quadtree-attention that has them"
        )
    return path
