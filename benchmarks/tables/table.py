# SPDX-License-Identifier: Apache-2.0
"""Tables of result rows: a `View` defines the lines and columns of a table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from benchmarks.result import OUT_OF_MEMORY, Row

Value = str | Callable[[Row], Any]

LONGEST = 12  # lines of a table that is never folded


def number(value: float | None) -> str:
    """A number with about three digits, without an exponent."""
    if value is None:
        return "-"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 3
    return f"{value:.{digits}f}"


@dataclass(frozen=True)
class Column:
    """A column."""

    heading: str
    value: Value  # path in a row, such as "values.median_ms", or a function of the row
    format: Callable[[Any], str] = number  # of a value; None becomes "-"
    # Entries of the case that select the row if a line joins several rows
    of: Mapping[str, Any] = field(default_factory=dict)
    # Entries of the case of the row to divide by, or a function that returns them
    relative: Mapping[str, Any] | Callable[[Row], Mapping[str, Any]] | None = None
    inverse: bool = False  # divide that row's value by this row's instead
    outcome: bool = False  # show the reason if there is no value
    words: bool = False  # the column is text; equal texts of the rows of a line are shown once

    def text(self, row: Row | None, rows: Sequence[Row]) -> str:
        """Text of a row's cell; `others` are the rows that `relative` refers to."""
        if row is None:
            return "-"
        if self.outcome and "error" in row:
            return OUT_OF_MEMORY if row["error"] == OUT_OF_MEMORY else "failed"
        value = _get(row, self.value)
        if self.relative is not None:
            entries = self.relative(row) if callable(self.relative) else self.relative
            other = find(rows, row["case"] | entries)
            base = None if other is None or other is row else _get(other, self.value)
            value = None if not (value and base) else base / value if self.inverse else value / base
        return "-" if value is None else self.format(value)


@dataclass(frozen=True)
class View:
    """A table.

    With `short`, entries of the case of some rows, one mapping per kind of row, a page shows the
    lines of these rows, and the whole table folded if it has more than LONGEST lines.
    """

    # From left to right, or a function of the rows that returns them
    columns: Sequence[Column] | Callable[[Sequence[Row]], Sequence[Column]]
    title: str | None = None
    by: Sequence[str] | None = None  # keys of the case shared by a line; None: one line per row
    # Values by a key of the case: a cell shows one number per value
    each: Mapping[str, Sequence[str]] = field(default_factory=dict)
    where: Mapping[str, Any] = field(default_factory=dict)  # entries of case or values of a row
    rows: Callable[[Sequence[Row]], Sequence[Row]] = lambda rows: rows  # from those of a result
    short: Sequence[Mapping[str, Any]] | None = None

    def of(self, rows: Sequence[Row]) -> list[Row]:
        """The rows of the table from those of a result."""
        wanted = self.where.items()
        return [r for r in self.rows(rows) if wanted <= (r["case"] | r.get("values", {})).items()]

    def markdown(self, rows: Sequence[Row]) -> list[str]:
        """Lines of a Markdown table; empty without rows."""
        rows = self.of(rows)
        if not rows:
            return []
        columns = self._columns(rows)
        lines = [f"#### {self.title}", ""] if self.title else []
        head = [_line([column.heading for column in columns])]
        head += [_line(["---" if column.words else "---:" for column in columns])]
        every = [_line(cells) for cells in self._cells(columns, rows)]
        some = [_line(cells) for cells in self._cells(columns, rows, self.short)]
        if len(every) <= LONGEST or not 0 < len(some) < len(every):
            return [*lines, *head, *every]
        return [*lines, *head, *some, "", *fold(f"All {len(every)} rows", [*head, *every])]

    def text(self, rows: Sequence[Row]) -> str:
        """Lines of a table aligned for a terminal."""
        rows = self.of(rows)
        columns = self._columns(rows)
        lines = [[column.heading for column in columns], *self._cells(columns, rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        return "\n".join([*([self.title] if self.title else []), *table])

    def _columns(self, rows: Sequence[Row]) -> Sequence[Column]:
        return self.columns(rows) if callable(self.columns) else self.columns

    def _cells(
        self,
        columns: Sequence[Column],
        rows: Sequence[Row],
        shown: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[list[str]]:
        lines: dict[Any, list[Row]] = {}
        for i, row in enumerate(rows):
            if shown and not any(case.items() <= row["case"].items() for case in shown):
                continue
            key = i if self.by is None else str([row["case"][name] for name in self.by])
            lines.setdefault(key, []).append(row)
        return [[self._cell(column, mine, rows) for column in columns] for mine in lines.values()]

    def _cell(self, column: Column, mine: Sequence[Row], rows: Sequence[Row]) -> str:
        cases = [{key: value} for key, values in self.each.items() for value in values]
        found = [find(mine, {**column.of, **case}) for case in cases or [{}]]
        texts = [column.text(row, rows) for row in found if row is not None or not column.words]
        return " / ".join(dict.fromkeys(texts) if column.words else texts)


def fold(summary: str, lines: Sequence[str]) -> list[str]:
    """Lines of Markdown that a page shows on request."""
    return [f'<details markdown="1"><summary>{summary}</summary>', "", *lines, "", "</details>"]


def find(rows: Sequence[Row], case: Mapping[str, Any]) -> Row | None:
    """The first row whose case has these entries."""
    return next((row for row in rows if case.items() <= row["case"].items()), None)


def name_of(case: Mapping[str, Any], separator: str = ", ") -> str:
    """Name of a case."""
    texts = (
        "x".join(map(str, value)) if isinstance(value, list) else value for value in case.values()
    )
    return separator.join(str(text) for text in texts if text is not None)


def outcome_of(row: Row) -> str:
    """Reason why a row has no values."""
    return f"skipped: {row['skipped']}" if "skipped" in row else f"failed: {row['error']}"


def _get(row: Row, value: Value) -> Any:
    if callable(value):
        return value(row)
    return reduce(lambda found, key: (found or {}).get(key), value.split("."), row)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
