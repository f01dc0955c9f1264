# SPDX-License-Identifier: Apache-2.0
"""Mutants can be applied: whoever changes the code moves them (`python -m tests.mutants`)."""

from tests.mutants import Mutant, mutants


def test_every_mutant_can_be_applied():
    assert [mistake for mutant in mutants() if (mistake := mutant.mistake())] == []


def test_mutants_are_different_and_change_something():
    found = mutants()
    assert all(mutant.old != mutant.new and mutant.tests and mutant.what for mutant in found)
    assert len({(m.file, m.old, m.new) for m in found}) == len(found)


def test_what_cannot_be_applied_is_named(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\ny = 1\n")
    (tmp_path / "test_a.py").write_text("def test_x(): ...")

    def mistake(file="a.py", old="x = 1", test="test_a.py::test_x"):
        return Mutant("a:1", "wrong", file, old, "x = 2", (test,)).mistake(tmp_path)

    assert mistake() is None
    assert mistake(old="= 1") == "a:1: '= 1' occurs 2 times in a.py, not once"
    assert mistake(old="z = 1") == "a:1: 'z = 1' occurs 0 times in a.py, not once"
    assert mistake(file="b.py") == "a:1: there is no file b.py"
    for test in ("test_b.py", "test_b.py::test_x", "test_a.py::test_y", "test_a.py::test_y[1]"):
        assert mistake(test=test) == f"a:1: there is no {test}"
