"""``selective_scan`` for JAX."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from scan_registry.dispatch.select import Backend
from scan_registry.jax import checks
from scan_registry.jax.primitives import compute_dtype
from scan_registry.kernels.selective_scan.jax_operator import (
    Operands,
    Options,
    ordered,
    scan,
)
from scan_registry.kernels.selective_scan.problem import DTYPES, MOST_STATES

ACCEPTED = (*DTYPES, "float64")
_SEQUENCE = checks.Parameter(ACCEPTED, (3,), checks.SEQUENCES, optional=False)
_PROJECTION = checks.Parameter(
    *(ACCEPTED, (3, 4), "(batch, states, time), or (batch, groups, states, time)"),
    optional=False,
)
_VECTOR = checks.Parameter(ACCEPTED, (1,), "(channels,)")
PARAMETERS = {
    "u": _SEQUENCE,
    "delta": _SEQUENCE,
    "A": checks.Parameter(ACCEPTED, (2,), "(channels, states)", optional=False),
    "B": _PROJECTION,
    "C": _PROJECTION,
    "D": _VECTOR,
    "z": replace(_SEQUENCE, optional=True),
    "delta_bias": _VECTOR,
    "initial_state": checks.Parameter(
        ACCEPTED,
        (3, 4),
        "(batch, channels, states), or with cu_seqlens (batch, sequences, channels, states)",
    ),
    "cu_seqlens": checks.CU_SEQLENS,
}


def selective_scan(
    u: Any, delta: Any, A: Any, B: Any, C: Any, D: Any = None, z: Any = None,
    delta_bias: Any = None, delta_softplus: bool = False, initial_state: Any = None, *,
    dim: int = -1, cu_seqlens: Any = None, return_final_state: bool = False,
    backend: Backend = "auto", axis_name: str | None = None,
) -> Any:  # fmt: skip
    """The output of a selective scan; with ``return_final_state`` also the state after the last step.

    With δ = delta + delta_bias, or its softplus (the identity above 20), for each of Dm channels and N states:

        h[t] = exp(δ[t]·A)·h[t-1] + δ[t]·B[t]·u[t]
        y[t] = Σ_n C[t]·h[t] + D·u[t]
        out  = y, or y·silu(z)

    Args:
        u: (batch, Dm, L), or with ``dim=1`` (batch, L, Dm); float32, bfloat16, float16 or float64.
        delta: like ``u``.
        A: (Dm, N), real; N up to 256.
        B: (batch, N, L), or (batch, G, N, L), where group g has Dm / G channels from g·Dm / G on; with ``dim=1`` (batch, L, N) or
            (batch, L, G, N).
        C: of the shapes that ``B`` may have.
        D: (Dm,), or None for zeros.
        z: like ``u``, or None for no gate.
        delta_bias: (Dm,), or None for zeros.
        delta_softplus: whether step sizes are the softplus of ``delta + delta_bias``.
        initial_state: (batch, Dm, N), or None for zeros; with ``cu_seqlens`` (batch, sequences, Dm, N).
        dim: the time dimension of ``u``, -1 or 2, or 1 or -2.
        cu_seqlens: (sequences + 1,), bounds of sequences that are packed along time, from 0 to L, as for ``linear_scan``.
        return_final_state: whether to return the state after the last step, or after each sequence, too.
        backend, axis_name: as for ``linear_scan``.

    Raises:
        TypeError, ValueError: an argument is not accepted; the message says what is.
        NoKernelError: what ``backend`` or ``require`` allows has no kernel for this GPU; raised by what compiles the program.
    """
    present = Operands(u, delta, A, B, C, D, z, delta_bias, initial_state, cu_seqlens)
    every = Operands(**checks.as_arrays(present._asdict(), PARAMETERS))
    options = Options(
        checks.check_time(dim),
        checks.check_bool("delta_softplus", delta_softplus),
        *checks.check_common(return_final_state, backend),
    )
    operands = _converted(every, options.dim)
    if axis_name is None:
        results = scan(operands, options)
    else:
        checks.check_axis(axis_name, cu_seqlens, operands.u.shape[options.dim])
        from scan_registry.kernels.selective_scan.jax_sharded import scan_over

        results = scan_over(operands, axis_name, options)
    return tuple(results) if options.final else results[0]


def _converted(every: Operands, dim: int) -> Operands:
    """The checked arrays, in the shapes and dtypes of ``Operands``."""
    u, wide = every.u, compute_dtype(every.u)
    batch, channels, time = ordered(u.shape, dim)
    states = every.A.shape[-1]
    if every.A.shape != (channels, states) or not 1 <= states <= MOST_STATES:
        raise ValueError(
            f"A has shape {every.A.shape}; it must be ({channels}, 1 to {MOST_STATES})"
        )
    sequences = checks.check_cu_seqlens(every.cu_seqlens, time)
    between = () if sequences is None else (sequences,)
    expected = {
        "delta": u.shape,
        "z": u.shape,
        "D": (channels,),
        "delta_bias": (channels,),
        "initial_state": (batch, *between, channels, states),
    }
    checks.check_exact_shapes(every._asdict(), expected)
    checks.check_precision(every._asdict(), "u")
    B, C = (
        _grouped(name, getattr(every, name), batch, channels, time, states, dim) for name in "BC"
    )
    along = 1 if dim == -1 else 2
    groups = max(B.shape[along], C.shape[along])
    B, C = (jnp.repeat(x, groups // x.shape[along], axis=along) for x in (B, C))

    def computed(array: Any) -> Any:
        return None if array is None else array.astype(wide)

    return Operands(
        u,
        every.delta.astype(u.dtype),
        computed(every.A),
        B.astype(u.dtype),
        C.astype(u.dtype),
        computed(every.D),
        None if every.z is None else every.z.astype(u.dtype),
        computed(every.delta_bias),
        computed(every.initial_state),
        every.cu_seqlens,
    )


def _grouped(
    name: str, array: Any, batch: int, channels: int, time: int, states: int, dim: int
) -> Any:
    """B or C with a dimension of groups."""
    if array.ndim == 3:
        array = jnp.expand_dims(array, 1 if dim == -1 else 2)
    groups = array.shape[1 if dim == -1 else 2] if array.ndim == 4 else 1
    expected = (batch, groups, states, time) if dim == -1 else (batch, time, groups, states)
    if array.shape != expected or groups == 0 or channels % groups:
        words = "(batch, groups, states, time)" if dim == -1 else "(batch, time, groups, states)"
        raise ValueError(
            f"{name} has shape {array.shape}; it must be {words}, or without groups, here {expected}, with groups that "
            f"divide {channels}"
        )
    return array
