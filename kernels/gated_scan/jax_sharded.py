"""``gated_scan`` for JAX of a sequence whose time is cut between the devices of a mesh axis."""

from __future__ import annotations

from typing import Any

from scan_registry.jax.primitives import Arrays
from scan_registry.jax.sharded import Part, run_over
from scan_registry.kernels.gated_scan.jax_operator import operator_of, scan_of
from scan_registry.kernels.linear_scan.jax import Options


def scan_over(kind: str, operands: Arrays, axis_name: str, options: Options) -> list[Any]:
    """The states of this device's part, and the state after the whole sequence."""
    *inputs, initial, reset, _ = operands
    scan, operator = scan_of(kind), operator_of(kind)
    with_final = options._replace(final=True)

    def run(operands: Arrays, state: Any) -> list[Any]:
        *inputs, reset = operands
        return scan((*inputs, state, reset, None), with_final)

    def summarize(operands: Arrays) -> tuple[Any, Any]:
        *inputs, reset = operands
        gates, _ = operator.gates((*inputs, None, reset, None), options)
        return gates.prod(options.dim), run(operands, None)[-1]

    part = Part(run, summarize, options.reverse)
    return run_over(part, axis_name, (*inputs, reset), initial)
