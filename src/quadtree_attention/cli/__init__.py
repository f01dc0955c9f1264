# SPDX-License-Identifier: Apache-2.0
"""The command `quadtree`."""

import sys


def main() -> None:
    """Runs the command; without typer, says in one line what to install."""
    try:
        import typer  # noqa: F401
    except ImportError:
        print(
            "quadtree: the command needs typer, which is not installed; "
            'pip install "quadtree-attention[models]"',
            file=sys.stderr,
        )
        raise SystemExit(1) from None
    from quadtree_attention.cli.main import app

    app(prog_name="quadtree")
