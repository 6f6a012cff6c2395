"""Policy: how far down the tiers a call may go."""

from __future__ import annotations

import contextvars
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from processes import captured

import scan_registry
from scan_registry.dispatch import policy
from scan_registry.dispatch.fit import Tier
from scan_registry.dispatch.policy import LEVELS, Level, as_required, lowest, require


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Nothing is required by the environment unless a test says so; it is read anew for each."""
    monkeypatch.delenv(policy.VARIABLE, raising=False)
    policy._default.cache_clear()
    yield monkeypatch
    policy._default.cache_clear()


def test_everything_is_allowed_unless_something_is_required() -> None:
    assert lowest() is Tier.REFERENCE
    assert policy.required.get() is None


@pytest.mark.parametrize("outer", LEVELS)
@pytest.mark.parametrize("inner", LEVELS)
def test_the_strictest_of_nested_levels_holds(outer: Level, inner: Level) -> None:
    strictest = min(LEVELS[outer], LEVELS[inner])
    with require(outer):
        with require(inner):
            assert lowest() is strictest
        assert lowest() is LEVELS[outer]


@pytest.mark.parametrize(("variable", "inner"), [*zip(LEVELS, [*LEVELS][::-1], strict=True)])
def test_the_environment_is_one_more_level(
    environment: pytest.MonkeyPatch, variable: Level, inner: Level
) -> None:
    environment.setenv(policy.VARIABLE, variable)
    assert lowest() is LEVELS[variable]
    with require(inner):
        assert lowest() is min(LEVELS[variable], LEVELS[inner])


def test_the_environment_is_read_once(environment: pytest.MonkeyPatch) -> None:
    environment.setenv(policy.VARIABLE, "ptx")
    assert lowest() is Tier.PTX
    environment.setenv(policy.VARIABLE, "aot")
    assert lowest() is Tier.PTX


@pytest.mark.parametrize("value", ["AOT", "aot ", "0"])
def test_an_unknown_level_in_the_environment(environment: pytest.MonkeyPatch, value: str) -> None:
    environment.setenv(policy.VARIABLE, value)
    for _ in range(2):  # it stays wrong
        with pytest.raises(
            ValueError, match="accepted are exact, aot, same-major, ptx, jit, reference"
        ) as caught:
            lowest()
        assert f"{policy.VARIABLE} is {value!r}" in str(caught.value)


def test_a_mistyped_level_fails_the_first_call_on_the_cpu(
    environment: pytest.MonkeyPatch,
) -> None:
    """With a gradient and without, and in a problem that has no plan yet."""
    environment.setenv(policy.VARIABLE, "aott")
    for needs_gradient in (False, True):
        x = torch.rand(3, 5, 47, requires_grad=needs_gradient)
        for call in (scan_registry.linear_scan, scan_registry.min_gru):
            with pytest.raises(ValueError, match=r"REQUIRE is 'aott'; .*; did you mean aot\?"):
                call(x, x)


@pytest.mark.parametrize("value", ["closest", "", None, 1, ["aot"]])
def test_an_unknown_level(value: object) -> None:
    """It is refused before any block is entered, as a ``with`` may have been forgotten."""
    with pytest.raises(
        ValueError, match="accepted are exact, aot, same-major, ptx, jit, ref"
    ) as caught:
        require(value)  # type: ignore[arg-type]
    assert f"level is {value!r}" in str(caught.value)
    assert lowest() is Tier.REFERENCE


def test_one_object_is_a_decorator_and_no_more() -> None:
    """``contextmanager`` gives both; a decorated function requires its level at each call."""

    @require("ptx")
    def inside() -> Tier:
        return lowest()

    assert [inside(), inside()] == [Tier.PTX, Tier.PTX]
    assert lowest() is Tier.REFERENCE


def test_threads_have_levels_of_their_own() -> None:
    """A thread starts without its parent's level, and does not touch it; autograd copies it."""
    seen: list[Tier] = []

    def work() -> None:
        seen.append(lowest())
        with require("jit"):
            seen.append(lowest())

    with require("aot"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert lowest() is Tier.SAME_MAJOR
        copied = contextvars.copy_context()
    assert seen == [Tier.REFERENCE, Tier.JIT]
    assert copied.run(lowest) is Tier.SAME_MAJOR


def test_a_backward_pass_keeps_to_the_level_of_its_forward_pass() -> None:
    """``as_required`` is what was required elsewhere, whatever is required here."""
    with require("aot"):
        elsewhere = policy.required.get()
    with require("jit"):
        with as_required(elsewhere):
            assert lowest() is Tier.SAME_MAJOR
        with as_required(None):
            assert lowest() is Tier.REFERENCE
        assert lowest() is Tier.JIT


def test_it_is_read_in_a_fresh_process_without_torch(tmp_path: Path) -> None:
    script = """
import sys, scan_registry
import scan_registry
from scan_registry.dispatch import policy
print(policy.lowest(), "torch" in sys.modules)
"""
    done = captured(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, policy.VARIABLE: "aot"},
        check=True,
    )
    assert done.stdout.split() == ["same-major", "False"]
