"""``ssd_scan`` for JAX of a sequence whose time is cut between the devices of a mesh axis."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from scan_registry.jax.sharded import exponentials_over
from scan_registry.kernels.ssd_scan.jax_operator import Operands, Options, scan, step_sizes


def scan_over(operands: Operands, axis_name: str, options: Options) -> list[Any]:
    """The output of this device's part, and the state after the whole sequence."""
    return exponentials_over(scan, _product, operands, axis_name, options)


def _product(of: Operands, options: Options) -> Any:
    """That of all gates, exp(Σδ·A)."""
    return jnp.exp(step_sizes(of, options).sum(1) * of.A)[..., None, None]
