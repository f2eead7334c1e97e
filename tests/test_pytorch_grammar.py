"""Models of all kinds of norms, sums, branches and shortcuts: attach refuses truly, or forward and fold are right."""

from __future__ import annotations

import grammar
import pytest
from grammar import Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

KINDS = [
    *(Kind(norm=name) for name in grammar.NORMS),
    *(Kind(join=name) for name in grammar.JOINS),
    *(Kind(branch=name) for name in grammar.FOLDED),
    *(Kind(shortcut=name) for name in grammar.SHORTCUTS),
]


@pytest.mark.parametrize("kind", dict.fromkeys(KINDS), ids=lambda kind: "-".join(kind))
def test_it_is_attached_and_folded(kind):
    assert grammar.check(2 * [kind]) == "folded"


@pytest.mark.parametrize("branch", ["feed-forward", "attention", "x @ w + b", "LoRA", "halves of the channels"])
def test_layers_that_are_called_twice_share_omega(branch):
    assert grammar.check(2 * [Kind(branch=branch)], rounds=2) == "folded"


@pytest.mark.parametrize("name", grammar.KEPT_ONLY)
def test_it_is_refused_or_kept(name):
    assert grammar.check(2 * [Kind(branch=f"{name}, kept")]) == "kept"


@pytest.mark.parametrize("name", grammar.REFUSED)
def test_it_is_refused_with_the_line(name):
    reason = grammar.check(2 * [Kind(branch=f"{name}, refused")])
    assert r"has a branch" in reason and "grammar.py:" in reason or "no sum x + f(x)" in reason


@pytest.mark.parametrize("name", grammar.FACTORED)
def test_another_factor_at_the_shortcut_is_named(name):
    assert "reads a sum with a factor at the shortcut, as DeepNorm's" in grammar.check(2 * [Kind(join=name)])


def stacks(branches):
    """Stacks of one to three layers, each of a norm, a sum, a branch and a shortcut."""
    choices = (grammar.NORMS, grammar.JOINS, branches, grammar.SHORTCUTS)
    return st.lists(st.builds(Kind, *(st.sampled_from(sorted(names)) for names in choices)), min_size=1, max_size=3)


SEARCH = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None, "derandomize": True}


@settings(max_examples=12, **SEARCH)
@given(stacks(grammar.FOLDED), st.sampled_from([1, 1, 2]), st.integers(0, 99))
def test_any_of_them_are_folded(stack, rounds, seed):
    assert grammar.check(stack, rounds, seed) == "folded"


@pytest.mark.nightly
@settings(max_examples=100, **SEARCH)
@given(stacks(grammar.BRANCHES), st.sampled_from([1, 1, 2]), st.integers(0, 99))
def test_any_of_them_are_folded_or_kept_or_refused(stack, rounds, seed):
    names = {kind.branch for kind in stack}
    result = grammar.check(stack, rounds, seed)
    assert (result == "folded") or not names <= grammar.FOLDED.keys()
