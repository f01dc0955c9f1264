# SPDX-License-Identifier: Apache-2.0
"""Updates the tables in docs/ and README.md.

A page holds blocks between `<!-- generated: KIND -->` and `<!-- end generated -->`, each with a
section for every result file of that kind.
"""

import re
import sys
from argparse import Namespace
from collections.abc import Sequence

from benchmarks.paper import page as paper
from benchmarks.result import KINDS, RESULTS, ROOT, ResultFileError, read_all
from benchmarks.tables import summary, training, views
from benchmarks.training.comparison import comparisons
from quadtree_attention.files import write_whole

DOCS = ROOT / "docs"
GROUPS = "speed|quality|paper|training|summary"
BLOCK = re.compile(
    rf"(<!-- generated: ((?:{GROUPS})/\S+) -->\n).*?(<!-- end generated -->)", re.DOTALL
)


def content(kind: str) -> str:
    """The content of a block.

    Raises:
        ResultFileError: The kind does not exist, or a file has another kind.
    """
    if kind == "paper/rows":
        return paper.page()
    if kind == "summary/main":
        return summary.table()
    known = [*(kind for kind in KINDS if not kind.startswith("training/")),
             *(comparison.kind for comparison in comparisons().values())]  # fmt: skip
    if kind not in known:
        raise ResultFileError(f"there is no kind {kind!r} of results; known: {', '.join(known)}")
    section = training.section if kind.startswith("training/") else views.section
    sections = [section(name, result) for name, result in read_all(kind, RESULTS).items()]
    return "\n\n".join(sections) or views.NOT_MEASURED


def updated(text: str) -> str:
    """The text of a page with all its blocks regenerated."""
    return BLOCK.sub(lambda match: f"{match[1]}\n{content(match[2])}\n\n{match[3]}", text)


def write(options: Namespace, argv: Sequence[str]) -> int:
    """Rewrites the pages; with `--check`, lists outdated pages and exits with code 1."""
    outdated = []
    for path in (DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))):
        text = path.read_text()
        if (new := updated(text)) != text:
            outdated.append(path.relative_to(DOCS.parent))
            if not options.check:
                write_whole(path, new.encode())
    for name in outdated:
        told = f"{name} is out of date: run python -m benchmarks tables"
        print(told if options.check else f"updated {name}", file=sys.stdout)
    return 1 if options.check and outdated else 0
