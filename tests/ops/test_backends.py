# SPDX-License-Identifier: Apache-2.0
"""How a backend is chosen, and what is said when none can run."""

import pytest
import torch

from quadtree_attention import (
    BackendUnsupportedError,
    OptionError,
    available_backends,
    quadtree_attention,
    use_backend,
)
from quadtree_attention.ops import backends
from quadtree_attention.ops.attention.problem import make_problem
from quadtree_attention.ops.backends import REFERENCE, choose, explain_backends
from tests.support import raises

PROBLEM = make_problem(*torch.randn(3, 1, 4, 6, 2, 8).unbind(), num_levels=2, topk=3)


@pytest.fixture
def picky(monkeypatch):
    """A table in which the preferred backend refuses everything with two reasons."""
    backend = REFERENCE._replace(name="picky", reasons=lambda problem: ["too early", "too small"])
    monkeypatch.setattr(backends, "BACKENDS", (backend, REFERENCE))
    monkeypatch.delenv("QUADTREE_BACKEND", raising=False)
    return backend


def test_auto_takes_the_first_without_reasons(picky):
    assert choose("auto", PROBLEM) is REFERENCE
    assert explain_backends(PROBLEM) == {"picky": ["too early", "too small"], "reference": []}


def test_named_backend_never_falls_back(picky):
    with pytest.raises(BackendUnsupportedError) as caught:
        choose("picky", PROBLEM)
    assert caught.value.reasons == ["picky: too early", "picky: too small"]
    assert str(caught.value) == (
        "backend 'picky' cannot run this problem (variant B, batch 1, query grid (4, 6), key grid "
        "(4, 6), 2 heads, head dim 8, value dim 8, 2 levels, topk (3,), torch.float32 on cpu):\n"
        "  - picky: too early\n  - picky: too small\n"
        "pass backend='auto' to take any backend that can, or backend='reference'"
    )
    assert isinstance(caught.value, RuntimeError)


def test_no_backend_at_all(picky, monkeypatch):
    monkeypatch.setattr(backends, "BACKENDS", (picky,))
    raises(BackendUnsupportedError, "no backend can run this problem", choose, "auto", PROBLEM)


def test_environment_replaces_auto_only(picky, monkeypatch):
    monkeypatch.setenv("QUADTREE_BACKEND", "picky")
    raises(BackendUnsupportedError, "cannot run", choose, "auto", PROBLEM)
    assert choose("reference", PROBLEM) is REFERENCE
    monkeypatch.setenv("QUADTREE_BACKEND", "")
    assert choose("auto", PROBLEM) is REFERENCE
    monkeypatch.setenv("QUADTREE_BACKEND", "nonsense")
    text = "environment variable QUADTREE_BACKEND must be one of"
    raises(OptionError, text, choose, "auto", PROBLEM)


def test_context_replaces_auto_and_wins_over_the_environment(picky, monkeypatch):
    monkeypatch.setenv("QUADTREE_BACKEND", "picky")
    with use_backend("reference"):
        assert choose("auto", PROBLEM) is REFERENCE
        raises(BackendUnsupportedError, "cannot run", choose, "picky", PROBLEM)
        with use_backend("picky"):
            raises(BackendUnsupportedError, "cannot run", choose, "auto", PROBLEM)
        assert choose("auto", PROBLEM) is REFERENCE
    raises(BackendUnsupportedError, "cannot run", choose, "auto", PROBLEM)


def test_unknown_names_list_the_known():
    with pytest.raises(OptionError, match="must be one of auto, "), use_backend("tirton"):
        pass


def test_available_backends_takes_the_options_of_the_call():
    q, k, v = torch.randn(3, 1, 4, 6, 2, 8).unbind()
    found = available_backends(q, k, v, num_levels=2, topk=3, variant="A", backend="reference")
    assert found["reference"] == []
    assert list(found)[-1] == "reference"


def test_named_reference_is_what_runs():
    q, k, v = torch.randn(3, 1, 4, 6, 2, 8).unbind()
    named = quadtree_attention(q, k, v, num_levels=2, topk=3, backend="reference")
    with use_backend("reference"):
        assert torch.equal(quadtree_attention(q, k, v, num_levels=2, topk=3), named)
