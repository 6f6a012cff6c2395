"""Sequences along time, in JAX's own operators: one, or several that are packed, as ``cu_seqlens`` says.

``dim`` is not negative. A state lies as the states do without ``dim``; with ``cu_seqlens``, ``dim`` counts sequences.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax


def sequences_of(cu_seqlens: Any) -> int | None:
    """How many are packed along time; None if none are."""
    return None if cu_seqlens is None else cu_seqlens.shape[0] - 1


def compose(first: Any, second: Any) -> Any:
    """Of two affine maps (gate, token), the first of which is applied first. A gate of 0 stops what is infinite, too."""
    (gate, token), (later, added) = first, second
    return later * let_through(later, gate), later * let_through(later, token) + added


def let_through(gate: Any, value: Any, dot: Any = None) -> Any:
    """What a gate is multiplied by: a value, or its tangent ``dot``. It is 0 in place of what 0 does not take to 0. Only there does the
    derivative by the gate differ from that of a product; elsewhere a gate of 0 has the value as its derivative."""
    infinite = (gate == 0) & ~jnp.isfinite(value)
    return jnp.where(infinite, 0, value if dot is None else dot)


def confined(cu_seqlens: Any, time: int) -> Any:
    """Bounds that rise from 0 to ``time``, and are what they were if they did so before. Values that a compiled program gets are
    not known before it runs, and may be anything: the first bound then counts as 0, the last one as ``time``, and each as
    the greatest of 0 and those before it, up to ``time``."""
    inside = jnp.clip(cu_seqlens, 0, time).at[0].set(0).at[-1].set(time)
    return lax.cummax(inside)


def _ends(cu_seqlens: Any, time: int) -> tuple[Any, Any]:
    """Where sequences begin and where they end."""
    if cu_seqlens is None:
        return jnp.array([0]), jnp.array([time])
    return cu_seqlens[:-1], cu_seqlens[1:]


def _along(values: Any, ndim: int, dim: int) -> Any:
    """Values along ``dim``, to broadcast with arrays of so many dimensions."""
    return values.reshape([-1 if d == dim else 1 for d in range(ndim)])


def _starting(cu_seqlens: Any, time: int, reverse: bool) -> tuple[Any, Any]:
    """Whether each step is the first of its sequence in the scan's order, and the number of its sequence."""
    begins, ends = _ends(cu_seqlens, time)
    steps = jnp.arange(time)
    number = jnp.searchsorted(ends, steps, side="right")
    first = ends[number] - 1 if reverse else begins[number]
    return steps == first, number


def _of_steps(state: Any, number: Any, cu_seqlens: Any, dim: int) -> Any:
    """The state of each step's sequence."""
    if cu_seqlens is None:
        return jnp.expand_dims(state, dim)
    return jnp.take(state, number, axis=dim)


def enter(
    gates: Any, tokens: Any, initial: Any, cu_seqlens: Any, dim: int, reverse: bool
) -> tuple[Any, Any]:
    """Gates and tokens of one sequence that begins with a state of zero, and has the same states."""
    starts, number = _starting(cu_seqlens, tokens.shape[dim], reverse)
    at_start = _along(starts, tokens.ndim, dim)
    if initial is not None:
        entering = gates * _of_steps(initial, number, cu_seqlens, dim)
        tokens = tokens + jnp.where(at_start, entering, 0)
    return jnp.where(at_start, 0, gates), tokens


def _at(values: Any, places: Any, cu_seqlens: Any, dim: int) -> Any:
    taken = jnp.take(values, places, axis=dim, mode="clip")
    return taken.squeeze(dim) if cu_seqlens is None else taken


def last(states: Any, initial: Any, cu_seqlens: Any, dim: int, reverse: bool) -> Any:
    """The state after each sequence; that before it where it has no steps."""
    begins, ends = _ends(cu_seqlens, states.shape[dim])
    if states.shape[dim] == 0:
        shape = list(states.shape)
        shape[dim : dim + 1] = [] if cu_seqlens is None else [begins.shape[0]]
        return jnp.zeros(shape, states.dtype) if initial is None else initial
    final = _at(states, begins if reverse else ends - 1, cu_seqlens, dim)
    if cu_seqlens is None:
        return final
    empty = _along(begins == ends, states.ndim, dim)
    return jnp.where(empty, 0 if initial is None else initial, final)


def preceding(states: Any, initial: Any, cu_seqlens: Any, dim: int, reverse: bool) -> Any:
    """The state before each step."""
    shifted = _shifted(states, dim, reverse)
    starts, number = _starting(cu_seqlens, states.shape[dim], reverse)
    entering = (
        jnp.zeros((), states.dtype)
        if initial is None
        else _of_steps(initial, number, cu_seqlens, dim)
    )
    return jnp.where(_along(starts, states.ndim, dim), entering, shifted)


def following(gates: Any, cu_seqlens: Any, dim: int, reverse: bool) -> Any:
    """The gate of the step after each step in the scan's order; 1 after a sequence's last step."""
    shifted = _shifted(gates, dim, not reverse)
    ends, _ = _starting(cu_seqlens, gates.shape[dim], not reverse)
    return jnp.where(_along(ends, gates.ndim, dim), 1, shifted)


def first_products(
    gates: Any, adjoint: Any, of_final: Any, cu_seqlens: Any, dim: int, reverse: bool
) -> Any:
    """The gradient of the initial state: that of the first step times its gate; that of the final state where a
    sequence has no steps."""
    begins, ends = _ends(cu_seqlens, gates.shape[dim])
    if gates.shape[dim] == 0 and of_final is not None:
        return of_final
    places = ends - 1 if reverse else begins
    product = _at(gates, places, cu_seqlens, dim) * _at(adjoint, places, cu_seqlens, dim)
    if cu_seqlens is None:
        return product
    empty = _along(begins == ends, gates.ndim, dim)
    return jnp.where(empty, 0 if of_final is None else of_final, product)


def leaving(entering: Any, shape: tuple[int, ...], dtype: str, cu_seqlens: Any) -> Any:
    """What a state that leaves holds before the scan; None where it does not matter. Kernels write none for packed
    sequences without steps, which leave what enters them."""
    if cu_seqlens is None:
        return None
    return jnp.zeros(shape, dtype) if entering is None else entering


def _shifted(values: Any, dim: int, reverse: bool) -> Any:
    """Each step has the value of the step before it in the scan's order; the first has zero."""
    time = values.shape[dim]
    if time == 0:
        return values
    zero = jnp.zeros_like(lax.slice_in_dim(values, 0, 1, axis=dim))
    if reverse:
        return jnp.concatenate([lax.slice_in_dim(values, 1, time, axis=dim), zero], axis=dim)
    return jnp.concatenate([zero, lax.slice_in_dim(values, 0, time - 1, axis=dim)], axis=dim)
