"""``linear_scan`` for JAX of a sequence whose time is cut between the devices of a mesh axis."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from scan_registry.jax.ffi import Outline, Selection, call_on_gpu, in_order
from scan_registry.jax.primitives import BROADCAST, FULL, Arrays, Operator, define
from scan_registry.jax.sharded import Part, run_over
from scan_registry.kernels.linear_scan.jax import (
    Options,
    facts_of,
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

    def outlines(self, operands: Arrays, options: Options) -> dict[str, Outline | None]:
        tokens = operands[1]
        shape = state_shape(tokens.shape, options.dim, None)
        return dict.fromkeys(
            ("final_gate", "final_state"), (shape, state_dtype_of(str(tokens.dtype)))
        )

    def run(self, platform: str, operands: Arrays, options: Options) -> list[Any] | None:
        gates, tokens = operands
        if platform != "cuda" or options.backend == "reference" or tokens.size == 0:
            return None
        of_gates, of_tokens = facts_of(gates, platform), facts_of(tokens, platform)
        dense, how = of_tokens.strides, (options.dim, options.reverse)
        call = calls.make_summary_call(of_gates, of_tokens, dense, *how)
        kernel = Selection(FAMILY, call.problem, options.backend, options.lowest)
        inputs = {"gates": written_gates(gates, tokens, call), "tokens": tokens}
        outputs = self.outlines(operands, options)
        return in_order(call_on_gpu(kernel, inputs, lambda scalars: outputs), outputs)

    def composed(self, operands: Arrays, options: Options) -> list[Any]:
        gates, tokens = operands
        dim, compute = options.dim % tokens.ndim, state_dtype_of(str(tokens.dtype))
        wide = jnp.broadcast_to(gates.astype(compute), tokens.shape)
        final = scan((gates, tokens, None, None), options._replace(final=True))[1]
        return [wide.prod(dim), final]


_summary = define(_Summary())


def scan_over(gates: Any, tokens: Any, initial: Any, axis_name: str, options: Options) -> list[Any]:
    """The states of this device's part, and the state after the whole sequence."""
    with_final = options._replace(final=True)

    def run(operands: Arrays, state: Any) -> list[Any]:
        return scan((*operands, state, None), with_final)

    def summarize(operands: Arrays) -> tuple[Any, Any]:
        product, final = _summary(operands, options)
        return product, final

    part = Part(run, summarize, options.reverse)
    return run_over(part, axis_name, (gates, tokens), initial)
