"""Operators of a sequence whose time is cut between the devices of a mesh axis, in ``shard_map``: one schedule for all families.

A scan maps the state before a part of the sequence to ``product``·state + ``final``, the state after that part. Each device
computes these two of its part, its summary. All devices gather all summaries, compose those of the parts before their own, and
scan their part from the state that this gives.

Tangents pass by the same schedule, with the same products. JAX transposes it for a gradient: each device computes the gradient of the
state before its part, as if no part followed; devices exchange these gradients; and each device runs its backward kernels from the
gradient of the state after its part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scan_registry.jax import packing

Arrays = Sequence[Any]
_psum: Any = lax.psum  # which has no types for mypy


class Part(NamedTuple):
    """What a family says of its operator on one device.

    run        results of operands and the state before them; the last result is the state after them
    summarize  ``product`` and ``final`` of operands; the product broadcasts to a state
    reverse    whether the last device's part comes first
    """

    run: Callable[[Arrays, Any], Arrays]
    summarize: Callable[[Arrays], tuple[Any, Any]]
    reverse: bool = False


def run_over(part: Part, axis_name: str, operands: Arrays, initial: Any) -> list[Any]:
    """The results of this device's part. The last one is the state after the whole sequence, which all devices have.
    ``initial`` is the state before the sequence, or None for zeros."""
    return list(_run_over(part, axis_name, tuple(operands), initial))


def exponentials_over(
    scan: Callable[[Any, Any], list[Any]],
    product: Callable[[Any, Any], Any],
    operands: Any,
    axis_name: str,
    options: Any,
) -> list[Any]:
    """Likewise, of a ``scan`` of operands and options, named tuples, whose gates are exponentials of step sizes. ``product``
    is that of all gates; operands' D and z have no part in states."""
    kind, with_final = type(operands), options._replace(final=True)

    def run(arrays: Arrays, state: Any) -> list[Any]:
        return scan(kind._make(arrays)._replace(initial_state=state), with_final)

    def summarize(arrays: Arrays) -> tuple[Any, Any]:
        of = kind._make(arrays)
        return product(of, options), run(of._replace(D=None, z=None), None)[-1]

    others = operands._replace(initial_state=None)
    return run_over(Part(run, summarize), axis_name, others, operands.initial_state)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _run_over(part: Part, axis_name: str, operands: Arrays, initial: Any) -> list[Any]:
    *_, before, last = _entering(part, axis_name, operands, initial)
    return [*part.run(operands, before)[:-1], last]


@_run_over.defjvp
def _derivatives(part: Part, axis_name: str, primals: Any, tangents: Any) -> Any:
    operands, initial = primals
    of_operands, of_initial = tangents
    products, finals, before, last = _entering(part, axis_name, operands, initial)
    places = [
        i for i, x in enumerate(operands) if x is not None and jnp.issubdtype(x.dtype, jnp.inexact)
    ]

    def alone(values: Arrays, state: Any) -> list[Any]:
        every = list(operands)
        for place, value in zip(places, values, strict=True):
            every[place] = value
        return list(part.run(every, state))

    own = [operands[i] for i in places]
    results, tangent = jax.linearize(alone, own, before)
    # Apart, so that the gradient of the state before this part is a pass of its own, which no other gradient waits for.
    of_own = tangent([of_operands[i] for i in places], jnp.zeros_like(before))
    maps = (products, finals, lax.all_gather(of_own[-1], axis_name))
    start = None if initial is None else (initial, of_initial)
    of_before, of_last = _handed_on(_compose_tangents, maps, start, axis_name, part.reverse)
    of_state = tangent([jnp.zeros_like(x) for x in own], of_before)
    dots = [one + other for one, other in zip(of_own[:-1], of_state[:-1], strict=True)]
    return [*results[:-1], last], [*dots, of_last]


def _entering(part: Part, axis_name: str, operands: Arrays, initial: Any) -> tuple[Any, ...]:
    """All parts' products and finals, the state before this part, and the state after the last one."""
    products, finals = (lax.all_gather(x, axis_name) for x in part.summarize(operands))
    start = None if initial is None else (initial,)
    states = _handed_on(_compose, (products, finals), start, axis_name, part.reverse)
    return products, finals, *states


def _compose(first: Any, second: Any) -> Any:
    """Of two parts' maps, as ``packing.compose``."""
    (gate, state), (later, added) = first, second
    return (
        _times(later, packing.let_through(later, gate)),
        _times(later, packing.let_through(later, state)) + added,
    )


def _compose_tangents(first: Any, second: Any) -> Any:
    """The same with the states' tangents, in which it is linear."""
    *one, dot = first
    *other, added = second
    later, state = other[0], one[1]
    moved = _times(later, packing.let_through(later, state, dot)) + added
    return *_compose(one, other), moved


def _times(later: Any, value: Any) -> Any:
    """A product of many gates may overflow: it leaves 0 as it is, as its gates do one by one. So infinity is two finite factors,
    which no other number stays finite with."""
    greatest = np.finfo(later.dtype).max
    first = jnp.nan_to_num(later, nan=jnp.nan) * value
    return first * jnp.where(jnp.isinf(later), greatest, 1)


def _handed_on(
    compose: Callable[[Any, Any], Any],
    maps: tuple[Any, ...],
    start: tuple[Any, ...] | None,
    axis_name: str,
    reverse: bool,
) -> tuple[Any, Any]:
    """The state before this part, and that after the last one, from all parts' maps; or with tangents beside the states, those of
    the two. ``start`` is what there is before the first part; None for zeros."""
    count, own = maps[0].shape[0], lax.axis_index(axis_name)
    first, last = (count - 1, 0) if reverse else (0, count - 1)
    initial = jnp.zeros_like(maps[-1][0]) if start is None else start[-1]
    if start is not None:
        of_first = [array[first] for array in maps]
        _, *entered = compose((jnp.ones_like(of_first[0]), *start), of_first)
        pairs = zip(maps[1:], entered, strict=True)
        maps = (maps[0], *(array.at[first].set(value) for array, value in pairs))
    after = lax.associative_scan(compose, maps, reverse=reverse)[-1]
    earlier = after[jnp.clip(own + (1 if reverse else -1), 0, count - 1)]
    before = jnp.where(own == first, initial, earlier)
    # A sum, as JAX knows of its result that it is the same on all devices.
    return before, _psum(jnp.where(own == last, after[last], 0), axis_name)
