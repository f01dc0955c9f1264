# SPDX-License-Identifier: Apache-2.0
"""The command that runs random problems, and what it notices."""

from dataclasses import replace

import pytest
import torch

from tests import problems
from tests.support import against_reference


def test_backend_for_the_cpu(capsys):
    pytest.importorskip("numba", reason="the cpu backend needs numba")
    assert problems.main(["--backend", "cpu", "--count", "150", "--cells", "60"]) == 0
    assert "150 problems on cpu" in capsys.readouterr().out


def factor(run):
    return 1.2 if run.out.dtype == torch.bfloat16 else 1.001


def wrong_result(run):
    return replace(run, out=run.out * factor(run))


def wrong_gradient(run):
    return replace(run, cotangent=run.cotangent * factor(run))


def wrong_cells(run):
    return replace(run, selection=tuple(x._replace(cells=x.cells + 1) for x in run.selection))


def wrong_scores(run):
    return replace(run, selection=tuple(x._replace(scores=x.scores / 2) for x in run.selection))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("mistake", [wrong_result, wrong_gradient, wrong_cells, wrong_scores])
def test_mistakes_are_found(monkeypatch, capsys, mistake, dtype):
    right = against_reference.run

    def run(case, backend, *args, **options):
        found = right(case, "reference", *args, **options)
        return found if backend == "reference" else mistake(found)

    monkeypatch.setattr(against_reference, "run", run)
    drawn = (problems.draw(0, i, cells=60, share=1) for i in range(100))
    number = next(i for i, x in enumerate(drawn) if x.num_levels > 2 and x.hide_keys == 0)
    wanted = ["--count", "1", "--first", str(number), "--cells", "60", "--dtypes", dtype]
    assert problems.main(wanted) == 1
    assert f"WRONG: Case(name='problem {number}'" in capsys.readouterr().out


def test_memory_that_grows_is_a_failure(monkeypatch, capsys):
    kept = iter(range(0, 10**12, 2**30))
    monkeypatch.setattr(problems.Watch, "now", lambda self: {"host": next(kept)})
    monkeypatch.setattr(problems, "check", lambda *args, **options: 1.0)
    assert problems.main(["--count", "10"]) == 1
    assert "memory grew by more than" in capsys.readouterr().out


def test_refused_problems_are_reported(capsys):
    assert problems.main(["--count", "1", "--backend", "triton"]) == 1
    assert "refused: problem 0" in capsys.readouterr().out


def test_problems_of_one_configuration():
    first, second = (problems.draw(3, i, cells=500, share=20) for i in (40, 41))
    assert first != second
    assert (first.dim, first.topk, first.variant) == (second.dim, second.topk, second.variant)
    assert first == problems.draw(3, 40, cells=500, share=20)


@pytest.mark.gpu
def test_backend_for_a_gpu():
    wanted = ["--backend", "triton", "--device", "cuda", "--count", "60"]
    assert problems.main(wanted) == 0


def test_problems_cover_what_is_accepted():
    drawn = [problems.draw(0, i, cells=200, share=1) for i in range(300)]
    assert {len(x.grid) for x in drawn} == {1, 2, 3}
    assert {x.variant for x in drawn} == {"A", "B", "C"}
    assert {x.pyramids for x in drawn} == {x.deterministic for x in drawn} == {True, False}
    assert any(x.grid != x.key_grid and x.hide_keys == 1 for x in drawn)
    assert torch.tensor([x.num_levels for x in drawn]).unique().tolist() == [1, 2, 3, 4]
