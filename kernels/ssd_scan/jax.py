"""``ssd_scan`` for JAX."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scan_registry.dispatch.select import Backend
from scan_registry.jax import checks
from scan_registry.jax.primitives import compute_dtype
from scan_registry.kernels.ssd_scan.jax_operator import Operands, Options, scan
from scan_registry.kernels.ssd_scan.problem import DTYPES

ACCEPTED = (*DTYPES, "float64")
_SEQUENCE = checks.Parameter(ACCEPTED, (4,), "(batch, time, heads, P)", optional=False)
_PROJECTION = checks.Parameter(ACCEPTED, (4,), "(batch, time, groups, N)", optional=False)
_VECTOR = checks.Parameter(ACCEPTED, (1,), "(heads,)")
PARAMETERS = {
    "x": _SEQUENCE,
    "dt": checks.Parameter(ACCEPTED, (3,), "(batch, time, heads)", optional=False),
    "A": replace(_VECTOR, optional=False),
    "B": _PROJECTION,
    "C": _PROJECTION,
    "D": checks.Parameter(ACCEPTED, (1, 2), "(heads,) or (heads, P)"),
    "z": replace(_SEQUENCE, optional=True),
    "dt_bias": _VECTOR,
    "initial_state": checks.Parameter(ACCEPTED, (4,), "(batch, heads, P, N)"),
}


def ssd_scan(
    x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any = None, z: Any = None, dt_bias: Any = None,
    dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_state: Any = None, *, return_final_state: bool = False, backend: Backend = "auto",
    axis_name: str | None = None,
) -> Any:  # fmt: skip
    """The state space dual scan of Mamba-2::

        δ    = clamp(softplus(dt + dt_bias), *dt_limit)   without softplus unless dt_softplus
        s[t] = exp(δ[t]·A)·s[t-1] + δ[t]·x[t] ⊗ B[t]
        out  = (s[t]·C[t] + D·x[t])·silu(z[t])            without what is None

    On a GPU, float32, bfloat16 and float16 run in kernels. All else, and all calls on the CPU, are composed of JAX's matrix products,
    chunk by chunk. Sequences cannot be packed.

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
        backend, axis_name: as for ``linear_scan``.

    Raises:
        TypeError, ValueError: an argument is not accepted; the message says what is.
        NoKernelError: what ``backend`` or ``require`` allows has no kernel for this GPU; raised by what compiles the program.
    """
    raw = Operands(x, dt, A, B, C, D, z, dt_bias, initial_state)
    every = Operands(**checks.as_arrays(raw._asdict(), PARAMETERS))
    options = Options(
        checks.check_bool("dt_softplus", dt_softplus),
        checks.check_limits("dt_limit", dt_limit),
        *checks.check_common(return_final_state, backend),
    )
    operands = _converted(every)
    if axis_name is None:
        results = scan(operands, options)
    else:
        checks.check_axis(axis_name, None, operands.x.shape[1])
        from scan_registry.kernels.ssd_scan.jax_sharded import scan_over

        results = scan_over(operands, axis_name, options)
    return tuple(results) if options.final else results[0]


def _converted(every: Operands) -> Operands:
    """The checked arrays, in the dtypes that the operator takes."""
    x = every.x
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
    checks.check_exact_shapes(every._asdict(), expected)
    checks.check_precision(every._asdict(), "x")
    wide = compute_dtype(x)

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
