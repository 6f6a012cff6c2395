"""``ssd_scan`` for JAX."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from scan_registry.dispatch import policy
from scan_registry.dispatch.select import Backend
from scan_registry.jax import checks
from scan_registry.kernels.ssd_scan.jax_operator import Operands, Options, compute_dtype, scan
from scan_registry.kernels.ssd_scan.problem import DTYPES

ACCEPTED = (*DTYPES, "float64")


def ssd_scan(
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any = None,
    z: Any = None,
    dt_bias: Any = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_state: Any = None,
    *,
    return_final_state: bool = False,
    backend: Backend = "auto",
) -> Any:
    """The state space dual scan of Mamba-2::

        δ    = clamp(softplus(dt + dt_bias), *dt_limit)   without softplus unless dt_softplus
        s[t] = exp(δ[t]·A)·s[t-1] + δ[t]·x[t] ⊗ B[t]
        out  = (s[t]·C[t] + D·x[t])·silu(z[t])            without what is None

    On a GPU, float32, bfloat16 and float16 run in kernels; all else is composed of JAX's matrix products, chunk by chunk.
    Sequences cannot be packed.

    Args:
        x: (batch, time, heads, P), float32, bfloat16, float16 or float64.
        dt: (batch, time, heads).
        A: (heads,), negative.
        B: (batch, time, groups, N); each group serves heads / groups consecutive heads.
        C: like ``B``.
        D: (heads,) or (heads, P).
        z: like ``x``.
        dt_bias: (heads,).
        dt_softplus: whether δ is softplus(dt + dt_bias), taken as dt + dt_bias above 20.
        dt_limit: the least and the greatest δ.
        initial_state: (batch, heads, P, N). Zeros by default.
        return_final_state: whether to return the final state, too, in float32 for narrower ``x``.
        backend: as for ``linear_scan``.

    Raises:
        TypeError, ValueError: an argument is not accepted; the message says what is.
        NoKernelError: what ``backend`` or ``require`` allows has no kernel for this GPU; raised by what compiles the program.
    """
    raw = Operands(x, dt, A, B, C, D, z, dt_bias, initial_state)
    checks.check_arrays(raw._asdict(), dict.fromkeys(Operands._fields, ACCEPTED))
    checks.check_backend(backend)
    low, high = (float(limit) for limit in dt_limit)
    if not low <= high:
        raise ValueError(f"dt_limit is {dt_limit}; the first must not exceed the second")
    options = Options(
        checks.check_bool("dt_softplus", dt_softplus),
        (low, high),
        checks.check_bool("return_final_state", return_final_state),
        backend,
        policy.lowest(),
    )
    every = Operands(*(None if array is None else jnp.asarray(array) for array in raw))
    results = scan(_converted(every), options)
    return tuple(results) if return_final_state else results[0]


def _converted(every: Operands) -> Operands:
    """The checked arrays, in the dtypes that the operator takes."""
    x = every.x
    if x.ndim != 4 or every.B.ndim != 4:
        raise ValueError(
            f"x has shape {x.shape}, B {every.B.shape}; they must be (batch, time, heads, P) and (batch, time, groups, N)"
        )
    batch, time, heads, size = x.shape
    groups, states = every.B.shape[2:]
    if groups == 0 or heads % groups:
        raise ValueError(f"B has {groups} groups, x {heads} heads; groups must divide heads")
    expected: dict[str, tuple[int, ...]] = {
        "dt": (batch, time, heads),
        "A": (heads,),
        "B": (batch, time, groups, states),
        "C": (batch, time, groups, states),
        "D": (heads, size) if every.D is not None and every.D.ndim == 2 else (heads,),
        "z": x.shape,
        "dt_bias": (heads,),
        "initial_state": (batch, heads, size, states),
    }
    for name, shape in expected.items():
        array = getattr(every, name)
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}; it must be {shape}")
    wide = compute_dtype(x)
    for name, array in every._asdict().items():
        if array is not None and array.dtype == "float64" and wide != "float64":
            raise TypeError(f"{name} has dtype float64, x {x.dtype}; they do not mix")

    def to(array: Any, dtype: Any) -> Any:
        return None if array is None else array.astype(dtype)

    return every._replace(
        dt=to(every.dt, x.dtype if every.dt.dtype == x.dtype else wide),
        A=to(every.A, wide),
        B=to(every.B, x.dtype),
        C=to(every.C, x.dtype),
        D=to(every.D, wide),
        z=to(every.z, x.dtype),
        dt_bias=to(every.dt_bias, wide),
        initial_state=to(every.initial_state, wide),
    )
