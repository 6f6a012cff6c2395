"""``selective_scan`` for JAX of a sequence whose time is cut between the devices of a mesh axis."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from scan_registry.jax.primitives import Arrays
from scan_registry.jax.sharded import Part, run_over
from scan_registry.kernels.selective_scan.jax_operator import (
    Operands,
    Options,
    scan,
    step_sizes,
)


def scan_over(operands: Operands, axis_name: str, options: Options) -> list[Any]:
    """The output of this device's part, and the state after the whole sequence."""
    with_final = options._replace(final=True)

    def run(operands: Arrays, state: Any) -> list[Any]:
        return scan((*operands, state, None), with_final)

    def summarize(operands: Arrays) -> tuple[Any, Any]:
        of = Operands._make((*operands, None, None))
        time = step_sizes(of, options).sum(2)  # the gates' product is exp(Σδ·A)
        # What the final state does not depend on is left out.
        final = run(of._replace(D=None, z=None)[:-2], None)[-1]
        return jnp.exp(time[:, :, None] * of.A), final

    part = Part(run, summarize)
    return run_over(part, axis_name, operands[:-2], operands.initial_state)
