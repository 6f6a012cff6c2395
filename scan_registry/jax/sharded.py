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


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _run_over(part: Part, axis_name: str, operands: Arrays, initial: Any) -> list[Any]:
    _, before, last = _entering(part, axis_name, operands, initial)
    return [*part.run(operands, before)[:-1], last]


@_run_over.defjvp
def _derivatives(part: Part, axis_name: str, primals: Any, tangents: Any) -> Any:
    operands, initial = primals
    of_operands, of_initial = tangents
    products, before, last = _entering(part, axis_name, operands, initial)
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
    finals = lax.all_gather(of_own[-1], axis_name)
    of_before, of_last = _handed_on(products, finals, of_initial, axis_name, part.reverse)
    of_state = tangent([jnp.zeros_like(x) for x in own], of_before)
    dots = [one + other for one, other in zip(of_own[:-1], of_state[:-1], strict=True)]
    return [*results[:-1], last], [*dots, of_last]


def _entering(part: Part, axis_name: str, operands: Arrays, initial: Any) -> tuple[Any, Any, Any]:
    """All parts' products, the state before this part, and the state after the last one."""
    products, finals = (lax.all_gather(x, axis_name) for x in part.summarize(operands))
    return products, *_handed_on(products, finals, initial, axis_name, part.reverse)


def _handed_on(
    products: Any, finals: Any, initial: Any, axis_name: str, reverse: bool
) -> tuple[Any, Any]:
    """The state before this part, and that after the last one, from all parts' summaries. Linear in finals and ``initial``."""
    count, own = finals.shape[0], lax.axis_index(axis_name)
    first, last = (count - 1, 0) if reverse else (0, count - 1)
    if initial is None:
        initial = jnp.zeros_like(finals[0])
    finals = finals.at[first].add(products[first] * initial)
    _, after = lax.associative_scan(packing.compose, (products, finals), reverse=reverse)
    earlier = after[jnp.clip(own + (1 if reverse else -1), 0, count - 1)]
    before = jnp.where(own == first, initial, earlier)
    # A sum, as JAX knows of its result that it is the same on all devices.
    return before, _psum(jnp.where(own == last, after[last], 0), axis_name)
