"""Checks of arguments that operators for JAX share. They raise before anything is traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from scan_registry.dispatch.select import BACKENDS

#: Of the names that torch and JAX share.
NARROW = ("bfloat16", "float16")
WIDE = ("float64", "complex128")


def check_arrays(arrays: Mapping[str, Any], accepted: Mapping[str, Sequence[str]]) -> None:
    """Refuse what is no array, or of a dtype that is not accepted; ``TypeError`` names it. None is left out."""
    for name, array in arrays.items():
        if array is None:
            continue
        if not (isinstance(array, jax.Array) or hasattr(array, "__array__")):
            raise TypeError(f"{name} must be an array, not {type(array).__name__}")
        dtype = str(jnp.dtype(array.dtype))
        if name in accepted and dtype not in accepted[name]:
            raise TypeError(f"{name} has dtype {dtype}; accepted are {', '.join(accepted[name])}")


def check_backend(backend: Any) -> None:
    """``ValueError`` if there is no such backend."""
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; accepted are {', '.join(BACKENDS)}")


def check_bool(name: str, value: Any) -> bool:
    """``TypeError`` if it is none: a traced array, say."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, not {type(value).__name__}")
    return value


def check_dim(dim: Any, ndim: int) -> int:
    """The negative number of a dimension."""
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim must be an int, not {type(dim).__name__}")
    if not -ndim <= dim < ndim:
        raise ValueError(f"dim is {dim}; arrays of {ndim} dimensions accept {-ndim} to {ndim - 1}")
    return dim if dim < 0 else dim - ndim


def check_shape(name: str, array: Any, shape: tuple[int, ...]) -> None:
    """``ValueError`` if it does not broadcast to the shape."""
    own = tuple(jnp.shape(array))
    pairs = zip(own[::-1], shape[::-1], strict=False)
    if len(own) > len(shape) or any(size not in (1, wanted) for size, wanted in pairs):
        raise ValueError(f"{name} has shape {own}; it must broadcast to {shape}")


def check_cu_seqlens(cu_seqlens: Any) -> None:
    """``TypeError`` or ``ValueError`` if they cannot be bounds. Their values are not looked at."""
    if str(cu_seqlens.dtype) not in ("int32", "int64"):
        raise TypeError(f"cu_seqlens has dtype {cu_seqlens.dtype}; accepted are int32, int64")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"cu_seqlens has shape {tuple(cu_seqlens.shape)}; it must have one dimension of at least 2 elements"
        )


def as_int64(numbers: Any) -> Any:
    """The bytes of int64, as kernels read them, of numbers that are not negative. JAX has no such array unless it is told."""
    if numbers.dtype == jnp.dtype("int64"):
        return numbers
    pairs = jnp.stack([numbers, jnp.zeros_like(numbers)], axis=-1)  # the lower half comes first
    return pairs.astype("int32")
