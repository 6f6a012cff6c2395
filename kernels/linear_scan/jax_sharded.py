"""``linear_scan`` for JAX of a sequence whose time is cut between the devices of a mesh axis.

Each device summarises its part by two numbers a channel: the product of the gates, and the final state from a state of zero.
All gather these, compose those of the parts before their own, and scan their part from the state that this gives. A tangent is
such a scan, too; and a gradient, which JAX transposes from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from scan_registry.jax import packing
from scan_registry.jax.ffi import Outline, Selection, call_on_gpu
from scan_registry.jax.primitives import BROADCAST, FULL, Arrays, Operator, define
from scan_registry.kernels.linear_scan.jax import (
    Options,
    facts_of,
    preceding,
    scan,
    state_dtype_of,
    state_shape,
    written_gates,
)
from scan_registry.kernels.linear_scan.op import calls
from scan_registry.kernels.linear_scan.spec import FAMILY


class _Summary(Operator):
    """Operands: gates and tokens. Results: the product of the gates, and the final state."""

    name = "linear_scan_summary"
    roles = (BROADCAST, FULL)
    result_roles = (FULL, FULL)

    def shapes(self, operands: Arrays, options: Options) -> list[Outline]:
        tokens = operands[1]
        shape = state_shape(tokens.shape, options.dim, None)
        return [(shape, state_dtype_of(str(tokens.dtype)))] * 2

    def run(self, platform: str, operands: Arrays, options: Options) -> list[Any] | None:
        gates, tokens = operands
        if platform != "cuda" or options.backend == "reference" or tokens.size == 0:
            return None
        of_gates, of_tokens = facts_of(gates, platform), facts_of(tokens, platform)
        dense, how = of_tokens.strides, (options.dim, options.reverse)
        call = calls.make_summary_call(of_gates, of_tokens, dense, *how)
        (outline, _) = self.shapes(operands, options)
        kernel = Selection(FAMILY, call.problem, options.backend, options.lowest)
        inputs = {"gates": written_gates(gates, tokens, call), "tokens": tokens}
        outputs: dict[str, Outline | None] = {"final_gate": outline, "final_state": outline}
        written = call_on_gpu(kernel, inputs, lambda scalars: outputs)
        return None if written is None else [written["final_gate"], written["final_state"]]

    def composed(self, operands: Arrays, options: Options) -> list[Any]:
        gates, tokens = operands
        dim, compute = options.dim % tokens.ndim, state_dtype_of(str(tokens.dtype))
        wide = jnp.broadcast_to(gates.astype(compute), tokens.shape)
        final = scan((gates, tokens, None, None), options._replace(final=True))[1]
        return [wide.prod(dim), final]

    def adjoint(
        self,
        operands: Arrays,
        results: Arrays,
        cotangents: Arrays,
        wanted: Sequence[int],
        options: Options,
    ) -> list[Any]:
        """Of the final state with respect to tokens, in which it is linear: a scan back from its cotangent."""
        gates, tokens = operands
        if tuple(wanted) != (1,):
            return super().adjoint(operands, results, cotangents, wanted, options)
        dim = options.dim % tokens.ndim
        broadcast = jnp.broadcast_to(gates.astype(cotangents[1].dtype), tokens.shape)
        later = packing.following(broadcast, None, dim, options.reverse)
        back = options._replace(reverse=not options.reverse, final=False)
        return scan((later, jnp.zeros_like(tokens), cotangents[1], None), back)


_summary = define(_Summary())
_psum: Any = lax.psum  # which has no types for mypy


def _scan_over(
    gates: Any, tokens: Any, initial: Any, axis_name: str, options: Options
) -> list[Any]:
    """States of this device's part, and if asked for the state after the last part. ``initial`` is that before the first one."""
    states, last, *_ = _states_over(gates, tokens, initial, axis_name, options, None)
    return [states, last] if options.final else [states]


def _derivatives(axis_name: str, options: Options, primals: Any, tangents: Any) -> Any:
    gates, tokens, initial = primals
    of_gates, of_tokens, of_initial = tangents
    states, last, before, products = _states_over(gates, tokens, initial, axis_name, options, None)
    earlier = preceding(states, before, None, options)
    added = (of_tokens + of_gates * earlier).astype(tokens.dtype)
    moved, moved_last, *_ = _states_over(gates, added, of_initial, axis_name, options, products)
    if options.final:
        return [states, last], [moved, moved_last]
    return [states], [moved]


scan_over: Any = jax.custom_jvp(_scan_over, nondiff_argnums=(3, 4))
scan_over.defjvp(_derivatives)


def _states_over(
    gates: Any, tokens: Any, initial: Any, axis_name: str, options: Options, products: Any
) -> tuple[Any, Any, Any, Any]:
    """The states of this part, the state after the last part, the state before this part, and the products of all parts' gates,
    unless they are known. Linear in tokens and ``initial``."""
    alone = options._replace(final=False)
    product, final = _summary((gates, tokens), alone)
    if products is None:
        products = lax.all_gather(product, axis_name)
    finals = lax.all_gather(final, axis_name)
    (after,) = scan((products, finals, initial, None), alone._replace(dim=-products.ndim))
    own, end = lax.axis_index(axis_name), 0 if options.reverse else products.shape[0] - 1
    before = packing.preceding(after, initial, None, 0, options.reverse)[own]
    (states,) = scan((gates, tokens, before, None), alone)
    # A sum, as JAX knows of its result that it is the same everywhere.
    last = _psum(jnp.where(own == end, after[end], 0), axis_name)
    return states, last, before, products
