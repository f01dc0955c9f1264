# SPDX-License-Identifier: Apache-2.0
"""The paper's numbers: counted by its own rule, and beside ours in docs/paper.md.

`python -m benchmarks paper count` counts; `python -m benchmarks tables` writes the page from
rows.yaml, which has the paper's numbers, and the result files.
"""

from argparse import ArgumentParser, Namespace

from benchmarks.options import add_out
from benchmarks.result import RESULTS


def set_up(parser: ArgumentParser, name: str) -> None:
    """Gives the parser of a suite its options, and what to do with them."""
    import importlib

    from benchmarks.speed import run

    suite = importlib.import_module(f"benchmarks.paper.{name}")
    parser.description = suite.__doc__
    suite.add_options(parser)
    add_out(parser, f"paper/{name}")
    parser.set_defaults(
        run=lambda options, argv: run(suite, options, argv), check_options=check_options,
        device="cpu", threads=1,
    )  # fmt: skip


def check_options(options: Namespace) -> None:
    options.out = options.out or RESULTS / "paper" / "count.json"  # of any machine
