# SPDX-License-Identifier: Apache-2.0
"""Measures and compares: speed, quality, and attentions by training; makes the tables of docs/.

speed SUITE: time and memory.
quality SUITE: scores on real data, beside classical methods.
paper count: parameters and FLOPs by the counting rule of the paper's authors.
training NAME train|measure|evaluate|figures: attentions compared by training.
tables [--check]: bring the tables in docs/ up to date.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence

from benchmarks.options import OneLineParser
from benchmarks.result import ResultFileError, suites
from quadtree_attention.errors import QuadtreeAttentionError

PROGRAM = "python -m benchmarks"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; a mistake ends it with one line and exit code 2."""
    argv = sys.argv[1:] if argv is None else list(argv)
    options = parse(argv)
    try:
        return options.run(options, argv)
    except (QuadtreeAttentionError, ResultFileError, OSError) as error:
        print(f"{PROGRAM}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def parse(argv: Sequence[str]) -> Namespace:
    """The checked options. Only the suite that is asked for is imported."""
    parser = OneLineParser(prog=PROGRAM, description=__doc__)
    groups = parser.add_subparsers(required=True, metavar="speed|quality|paper|training|tables")
    for group in ("speed", "quality", "paper"):
        of_group = groups.add_parser(group, help=f"one of {', '.join(suites(group))}")
        known = of_group.add_subparsers(required=True, metavar="SUITE", dest="suite")
        for name in suites(group):
            suite = known.add_parser(name)
            if list(argv[:2]) == [group, name]:
                from benchmarks.suite import set_up

                set_up(suite, f"{group}/{name}")
    training = groups.add_parser("training", help="attentions compared by training")
    tables = groups.add_parser("tables", help="bring the tables in docs/ up to date")
    if argv[:1] == ["training"]:
        from benchmarks.training import compare

        compare.set_up(training)
    if argv[:1] == ["tables"]:
        from benchmarks.tables.write import write

        tables.add_argument("--check", action="store_true", help="change nothing, exit code 1 if "
                            "a page is out of date")  # fmt: skip
        tables.set_defaults(run=write)
    options = parser.parse_args(argv)
    if "check_options" in options:
        options.check_options(options)
    return options


if __name__ == "__main__":
    sys.exit(main())
