"""``explain`` for calls on JAX's arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scan_registry.diagnostics.explanation import Explanation, Step
from scan_registry.jax.explaining import decisions_of, is_for_jax
from scan_registry.runtime.loader import system


def explained_for_jax(function: Callable[..., Any], args: Any, kwargs: Any) -> Explanation | None:
    """What a call and the gradient of all its arrays would run; None if it is no function of ``scan_registry.jax``."""
    if not is_for_jax(function):
        return None
    decisions, ordinal = decisions_of(function, args, kwargs)
    steps = tuple(Step(decision.problem.kernel, (), decision) for decision in decisions)
    first = decisions[0].problem if decisions else None
    nothing = "no kernel of this package runs: what there is to compute, JAX's own operators do"
    return Explanation(
        *(f"jax.{function.__name__}", system(ordinal).device, steps, first), nothing=nothing
    )
