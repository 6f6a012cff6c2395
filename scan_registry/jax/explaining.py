"""Which kernels a call on JAX's arrays would run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scan_registry.dispatch.select import Decision
from scan_registry.jax import ffi


def is_for_jax(function: Any) -> bool:
    """Whether it is a public function of this package."""
    from scan_registry import jax as package

    return any(getattr(package, name) is function for name in package.__all__)


def _is_traced(argument: Any) -> bool:
    """Whether its values do not matter: neither a number of NumPy nor bounds of sequences, which the call checks."""
    dtype = getattr(argument, "dtype", None)
    if dtype is None or isinstance(argument, np.generic):
        return False
    return isinstance(argument, jax.ShapeDtypeStruct) or not jnp.issubdtype(dtype, jnp.integer)


def decisions_of(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Decision], int | None]:
    """The decisions for the kernels of a call and of its gradient, and the ordinal of the GPU; None on the CPU. Arrays may be
    outlines (``jax.ShapeDtypeStruct``). The call is compiled for the platform that JAX prefers here, and not run."""
    platform = "cuda" if jax.default_backend() == "gpu" else "cpu"
    named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    arrays = {name: value for name, value in named.items() if _is_traced(value)}
    inexact = [n for n, a in arrays.items() if jnp.issubdtype(a.dtype, jnp.inexact)]

    def call(*values: Any) -> Any:
        every = {**named, **dict(zip(arrays, values, strict=True))}
        return function(*(every[i] for i in range(len(args))), **{n: every[n] for n in kwargs})

    def with_gradient(*values: Any) -> Any:
        def of_inexact(*own: Any) -> Any:
            every = {
                **dict(zip(arrays, values, strict=True)),
                **dict(zip(inexact, own, strict=True)),
            }
            return call(*every.values())

        results, pull = jax.vjp(
            of_inexact, *(v for n, v in zip(arrays, values, strict=True) if n in inexact)
        )
        return results, pull(jax.tree.map(jnp.ones_like, results))

    recorded: list[Decision] = []
    token = ffi.decisions.set(recorded)
    try:
        jax.jit(with_gradient).trace(*arrays.values()).lower(lowering_platforms=(platform,))
    finally:
        ffi.decisions.reset(token)
    return recorded, None if platform == "cpu" else ffi.first_gpu()
