# SPDX-License-Identifier: Apache-2.0
"""The command `quadtree`."""

import os
import signal
import sys


def main() -> None:
    """Run the command; without typer, print what to install."""
    signal.signal(signal.SIGINT, _stop)  # until a command has imported what it needs
    try:
        import typer  # noqa: F401
    except ImportError:
        print(
            "quadtree: the command needs typer, which is not installed; "
            'pip install "quadtree-attention[models]"',
            file=sys.stderr,
        )
        raise SystemExit(1) from None
    from quadtree_attention.cli.main import run

    run(sys.argv[1:])


def _stop(*_: object) -> None:
    """Exits immediately: an exception during an import may be replaced by another one."""
    os.write(2, b"quadtree: interrupted\n")
    os._exit(130)
