"""Checks of arguments, for the operators of all families. They raise before anything is traced, and name what is accepted."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scan_registry.base.frozen import dataclass
from scan_registry.dispatch import policy
from scan_registry.dispatch.fit import Tier
from scan_registry.dispatch.select import BACKENDS, Backend

#: Of the names that torch and JAX share.
NARROW = ("bfloat16", "float16")
WIDE = ("float64", "complex128")
#: Shapes of a batch of sequences.
SEQUENCES = "(batch, channels, time), or with dim=1 (batch, time, channels)"


@dataclass(frozen=True)
class Parameter:
    """What a parameter accepts that takes an array.

    dtypes    their names
    ndim      the numbers of dimensions; any if empty
    shapes    how an error describes the shapes
    optional  whether None is accepted, too
    """

    dtypes: tuple[str, ...]
    ndim: tuple[int, ...] = ()
    shapes: str = ""
    optional: bool = True


#: Every family's ``cu_seqlens``.
CU_SEQLENS = Parameter(("int32", "int64"), (1,), "(sequences + 1,)")


def as_arrays(arguments: Mapping[str, Any], accepted: Mapping[str, Parameter]) -> dict[str, Any]:
    """Arguments as JAX's arrays, with None where an argument is None. Arrays of NumPy become what ``jax.numpy.asarray`` makes of
    them. ``TypeError`` for what is no array or has another dtype, ``ValueError`` for another number of dimensions."""
    return {name: _as_array(name, value, accepted[name]) for name, value in arguments.items()}


def _as_array(name: str, value: Any, parameter: Parameter) -> Any:
    if value is None and parameter.optional:
        return None
    arrays = (jax.Array, np.ndarray, np.generic)
    if not isinstance(value, arrays) and hasattr(value, "__jax_array__"):
        value = value.__jax_array__()  # of a variable in a library of neural networks
    if not isinstance(value, arrays):
        accepted = "arrays of JAX and of NumPy" + (", and None" if parameter.optional else "")
        raise TypeError(
            f"{name} must be an array, not {_type_name(value)}; accepted are {accepted}"
        )
    if str(value.dtype) not in parameter.dtypes:
        raise TypeError(
            f"{name} has dtype {value.dtype}; accepted are {', '.join(parameter.dtypes)}"
        )
    if parameter.ndim and value.ndim not in parameter.ndim:
        raise ValueError(f"{name} has shape {value.shape}; it must be {parameter.shapes}")
    if not jnp.issubdtype(value.dtype, jnp.integer):
        return jnp.asarray(value)
    return value if isinstance(value, jax.Array) else _integers(name, value)


def _integers(name: str, value: Any) -> Any:
    """An array of JAX that has values also where a program is traced. ``ValueError`` if they do not fit in the dtype that JAX has for
    them, int32 unless it is told."""
    with jax.ensure_compile_time_eval():
        array = jnp.asarray(value)
    accepted = np.iinfo(array.dtype)
    if value.size and not accepted.min <= value.min() <= value.max() <= accepted.max:
        with np.printoptions(threshold=20):
            raise ValueError(
                f"{name} is {value}; accepted are numbers from {accepted.min} to {accepted.max}, those of {accepted.dtype}"
            )
    return array


def _type_name(value: Any) -> str:
    """The name of its class, with the package of a class that has a common name: torch.Tensor."""
    of = type(value)
    package = of.__module__.partition(".")[0]
    return of.__qualname__ if package == "builtins" else f"{package}.{of.__qualname__}"


def check_precision(arrays: Mapping[str, Any], first: str) -> None:
    """``TypeError`` if another array has float64 or complex128 and the first one does not: nothing is narrowed silently."""
    dtype = str(arrays[first].dtype)
    for name, array in arrays.items():
        if array is not None and str(array.dtype) in WIDE and dtype not in WIDE:
            raise TypeError(f"{name} has dtype {array.dtype}, {first} {dtype}; they do not mix")


def check_common(return_final_state: Any, backend: Any) -> tuple[bool, Backend, Tier]:
    """With what the options of every function end: whether the final state is asked for, the backend, and the lowest tier that is
    allowed. ``TypeError`` or ``ValueError`` for what is no such option."""
    check_choice("backend", backend, BACKENDS)
    return check_bool("return_final_state", return_final_state), backend, policy.lowest()


def check_choice(name: str, value: Any, choices: Sequence[str | None]) -> None:
    """``ValueError`` if it is none of these strings, or None where that is one of them."""
    if not (value is None or isinstance(value, str)) or value not in choices:
        raise ValueError(f"{name} is {value!r}; accepted are {', '.join(map(str, choices))}")


def check_bool(name: str, value: Any) -> bool:
    """``TypeError`` if it is none: a traced array, say."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be a bool, not {_type_name(value)}")
    return bool(value)


def check_dim(dim: Any, ndim: int) -> int:
    """The negative number of a dimension."""
    if isinstance(dim, bool) or not isinstance(dim, (int, np.integer)):
        raise TypeError(f"dim must be an int, not {_type_name(dim)}")
    if not -ndim <= dim < ndim:
        raise ValueError(f"dim is {dim}; arrays of {ndim} dimensions accept {-ndim} to {ndim - 1}")
    return int(dim if dim < 0 else dim - ndim)


def check_time(dim: Any) -> int:
    """-1 or -2: the time dimension of sequences of three dimensions, the first of which is the batch."""
    if (negative := check_dim(dim, 3)) == -3:
        raise ValueError(f"dim is {dim}; accepted are -1 or 2, and 1 or -2")
    return negative


def is_scalar(value: Any) -> bool:
    """Whether it is a number of Python or NumPy, or a bool, and no array of JAX, whose value may not be known."""
    return isinstance(value, (numbers.Real, np.bool_))


def check_number(name: str, value: Any, low: float, high: float) -> float:
    """``TypeError`` if it is no number of Python or NumPy, ``ValueError`` if it lies outside."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, not {_type_name(value)}")
    if not low <= (number := float(value)) <= high:
        raise ValueError(f"{name} is {value}; accepted are numbers from {low} to {high}")
    return number


def check_limits(name: str, value: Any) -> tuple[float, float]:
    """Two numbers, the first of which does not exceed the second."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(f"{name} is {value!r}; it must be two numbers, the least and the greatest")
    for number in value:
        check_number(f"each of {name}", number, -math.inf, math.inf)
    low, high = map(float, value)
    if low > high:
        raise ValueError(f"{name} is {value}; the first must not exceed the second")
    return low, high


def check_axis(axis_name: Any, cu_seqlens: Any, steps: int) -> int:
    """How many devices the axis of the mesh has. ``TypeError`` or ``ValueError`` if it is none of the ``shard_map`` around, or if a
    device has no ``steps``."""
    if not isinstance(axis_name, str):
        raise TypeError(f"axis_name must be a str, not {_type_name(axis_name)}")
    if cu_seqlens is not None:
        raise ValueError("cu_seqlens does not go with axis_name")
    try:
        size: Any = lax.axis_size(axis_name)
    except NameError as error:
        raise ValueError(
            f"axis_name is {axis_name!r}; it must be an axis of the mesh of a jax.shard_map around the call"
        ) from error
    if steps == 0:
        raise ValueError("the arrays have no steps; with axis_name each device must have some")
    return int(size)


def check_shape(name: str, array: Any, shape: tuple[int, ...]) -> None:
    """``ValueError`` if it does not broadcast to the shape."""
    own = tuple(jnp.shape(array))
    pairs = zip(own[::-1], shape[::-1], strict=False)
    if len(own) > len(shape) or any(size not in (1, wanted) for size, wanted in pairs):
        raise ValueError(f"{name} has shape {own}; it must broadcast to {shape}")


def check_exact_shapes(arrays: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]]) -> None:
    """``ValueError`` if an array has another shape than expected. None is left out."""
    for name, shape in expected.items():
        array = arrays[name]
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}; it must be {shape}")


def check_cu_seqlens(cu_seqlens: Any, time: int) -> int | None:
    """How many sequences are packed along time; None if none are. ``ValueError`` if the bounds do not rise from 0 to ``time``.

    Under ``jit`` or another transformation that traces ``cu_seqlens``, its values are not known: ``packing.confined`` then defines
    the results."""
    if cu_seqlens is None:
        return None
    least = 2 if time else 1  # there may be no sequence where there is no step
    if cu_seqlens.shape[0] < least:
        raise ValueError(
            f"cu_seqlens has shape {cu_seqlens.shape}; it must have one dimension of at least {least} elements"
        )
    if not isinstance(cu_seqlens, jax.core.Tracer) and cu_seqlens.is_fully_addressable:
        bounds = np.asarray(cu_seqlens).astype(np.int64)
        if bounds[0] != 0 or bounds[-1] != time or (np.diff(bounds) < 0).any():
            with np.printoptions(threshold=20):
                raise ValueError(
                    f"cu_seqlens is {bounds}; it must begin with 0, end with the number of steps, {time}, and never fall"
                )
    return int(cu_seqlens.shape[0]) - 1


def as_int64(numbers: Any) -> Any:
    """The bytes of int64, as kernels read them, of numbers that are not negative. JAX has no such array unless it is told."""
    if numbers.dtype == jnp.dtype("int64"):
        return numbers
    pairs = jnp.stack([numbers, jnp.zeros_like(numbers)], axis=-1)  # the lower half comes first
    return pairs.astype("int32")
