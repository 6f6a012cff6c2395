"""``causal_conv1d`` for JAX of a sequence whose time is cut between the devices of a mesh axis.

Each device sends the last inputs of its part to the next one, which convolves its part from them. JAX derives the gradient from
that: what each part owes to the inputs before it goes back to the device that has them.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from scan_registry.jax.primitives import Arrays
from scan_registry.kernels.causal_conv1d.jax import Options, convolve

#: JAX's own, which have no types for mypy.
_psum: Any = lax.psum
_ppermute: Any = lax.ppermute


def convolve_over(operands: Arrays, axis_name: str, devices: int, options: Options) -> list[Any]:
    """y of this device's part, and the last inputs of the whole sequence."""
    x, weight, bias, initial, _ = operands
    count, steps = weight.shape[1] - 1, x.shape[options.dim]
    if steps < count:
        raise ValueError(
            f"x has {steps} steps on each device; with axis_name it must have at least width-1, here {count}"
        )
    last = lax.slice_in_dim(x, steps - count, steps, axis=options.dim)
    last = last if options.dim == -1 else last.swapaxes(1, 2)
    own = lax.axis_index(axis_name)
    # The first device gets zeros.
    before = _ppermute(last, axis_name, [(i, i + 1) for i in range(devices - 1)])
    if initial is not None:
        before = jnp.where(own == 0, initial, before)
    (y,) = convolve((x, weight, bias, before, None), options._replace(final=False))
    # A sum, as JAX knows of its result that it is the same on all devices.
    return [y, _psum(jnp.where(own == devices - 1, last, 0), axis_name)]
