# SPDX-License-Identifier: Apache-2.0
"""Small mistakes put into the code on purpose, and the tests that must notice them."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LISTS = Path(__file__).parent


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
        name: List and number, such as `ops:3`.
        what: What becomes wrong.
        file: Path from the root of the repository.
        old: Text that occurs once in the file.
        new: Text that replaces it.
        tests: Arguments of pytest; one of these tests must fail.
    """

    name: str
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def mistake(self, root: Path = ROOT) -> str | None:
        """Why the mutant cannot be applied to a checkout; None where it can."""
        path = root / self.file
        if not path.is_file():
            return f"{self.name}: there is no file {self.file}"
        count = path.read_text().count(self.old)
        if count != 1:
            return f"{self.name}: {self.old!r} occurs {count} times in {self.file}, not once"
        missing = [test for test in self.tests if not _exists(root, test)]
        return f"{self.name}: there is no {missing[0]}" if missing else None


def _exists(root: Path, test: str) -> bool:
    """Whether there is a test `path`, `path::function` or `path::function[parameters]`."""
    path, _, function = test.partition("::")
    if not (root / path).exists():
        return False
    return not function or f"def {function.partition('[')[0]}(" in (root / path).read_text()


def mutants() -> list[Mutant]:
    """All of them, in the order of the lists beside this file."""
    found = []
    for path in sorted(LISTS.glob("*.toml")):
        for number, entry in enumerate(tomllib.loads(path.read_text())["mutant"], start=1):
            tests = tuple(entry.pop("tests"))
            found.append(Mutant(name=f"{path.stem}:{number}", tests=tests, **entry))
    return found
