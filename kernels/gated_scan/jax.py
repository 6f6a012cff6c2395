"""``gated_scan`` and its kinds for JAX."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp

from scan_registry.dispatch.select import Backend
from scan_registry.jax import checks
from scan_registry.jax.primitives import compute_dtype
from scan_registry.kernels.gated_scan.jax_gates import check_kind
from scan_registry.kernels.gated_scan.jax_operator import scan_of
from scan_registry.kernels.gated_scan.kinds import KINDS, Kind
from scan_registry.kernels.gated_scan.problem import DTYPES
from scan_registry.kernels.linear_scan.jax import Options, linear_scan, state_shape

ACCEPTED = (*DTYPES, "float64")
Activation = Literal["positive", "identity"]


def gated_scan(
    kind: str, *inputs: Any, initial_state: Any = None, reset: Any = None, dim: int = -1,
    reverse: bool = False, cu_seqlens: Any = None, return_final_state: bool = False,
    backend: Backend = "auto", axis_name: str | None = None,
) -> Any:  # fmt: skip
    """States of h[t] = gate[t]·h[t-1] + token[t] along ``dim``. ``kind`` says how gate and token follow from the inputs, as in
    ``scan_registry.gated_scan``, which has the table of kinds.

    Args:
        kind: ``linear``, ``min_gru``, ``min_gru_identity``, ``min_lstm``, ``min_lstm_identity``, ``rg_lru`` or ``hgrn``.
        inputs: sequences (batch, channels, time), or with ``dim=1`` (batch, time, channels), of one shape and dtype: float32,
            bfloat16, float16 or float64; then channel parameters (channels,).
        initial_state: h[-1], or with ``reverse`` h[T]: broadcasts to the state's shape; zero if None.
        reset: bool, (batch, time): where a state starts anew.
        dim: the time dimension, -1 or 2, or 1 or -2.
        reverse: compute h[t] = gate[t]·h[t+1] + token[t] instead.
        cu_seqlens, return_final_state, backend, axis_name: as for ``linear_scan``.

    Raises:
        TypeError, ValueError: an argument is not accepted; the message says what is.
        NoKernelError: what ``backend`` or ``require`` allows has no kernel for this GPU; raised by what compiles the program.
    """
    checks.check_choice("kind", kind, tuple(KINDS))
    check_kind(kind)
    of = KINDS[kind]
    names = (*of.inputs, *of.parameters)
    if len(inputs) != len(names):
        raise TypeError(
            f"{kind} takes {len(names)} arrays, {', '.join(names)}; {len(inputs)} were given"
        )
    others = {"initial_state": initial_state, "reset": reset, "cu_seqlens": cu_seqlens}
    arrays = checks.as_arrays(dict(zip(names, inputs, strict=True)) | others, _accepted(of))
    options = Options(
        checks.check_time(dim),
        checks.check_bool("reverse", reverse),
        *checks.check_common(return_final_state, backend),
    )
    operands = _operands(of, arrays, options)
    if axis_name is not None:
        checks.check_axis(axis_name, cu_seqlens, operands[0].shape[options.dim])
    if kind == "linear" and reset is None:
        *sequences, initial, _, bounds = operands
        return linear_scan(
            *(*sequences, initial),
            dim=options.dim,
            reverse=options.reverse,
            cu_seqlens=bounds,
            return_final_state=options.final,
            backend=backend,
            axis_name=axis_name,
        )
    if axis_name is None:
        results = scan_of(kind)(operands, options)
    else:
        from scan_registry.kernels.gated_scan.jax_sharded import scan_over

        results = scan_over(kind, operands, axis_name, options)
    return tuple(results) if options.final else results[0]


def _accepted(kind: Kind) -> dict[str, checks.Parameter]:
    """What each array may be."""
    sequence = checks.Parameter(ACCEPTED, (3,), checks.SEQUENCES, optional=False)
    vector = checks.Parameter(ACCEPTED, (1,), "(channels,)", optional=False)
    return {
        **dict.fromkeys(kind.inputs, sequence),
        **dict.fromkeys(kind.parameters, vector),
        "initial_state": checks.Parameter(ACCEPTED),
        "reset": checks.Parameter(("bool",), (2,), "(batch, time)"),
        "cu_seqlens": checks.CU_SEQLENS,
    }


def _operands(kind: Kind, arrays: dict[str, Any], options: Options) -> list[Any]:
    """The checked arrays, parameters and the initial state in the dtype of the computation."""
    first = arrays[kind.inputs[0]]
    shape, compute = first.shape, compute_dtype(first)
    for name in kind.inputs:
        array = arrays[name]
        if array.shape != shape or array.dtype != first.dtype:
            raise ValueError(
                f"{name} is {array.dtype} of shape {array.shape}, {kind.inputs[0]} {first.dtype} of shape {shape}; "
                "all sequences must have one shape and dtype"
            )
    checks.check_precision(arrays, kind.inputs[0])
    channels = shape[-1 if options.dim == -2 else -2]
    time = shape[options.dim]
    expected = {**dict.fromkeys(kind.parameters, (channels,)), "reset": (shape[0], time)}
    checks.check_exact_shapes(arrays, expected)
    sequences = checks.check_cu_seqlens(arrays["cu_seqlens"], time)
    if (initial := arrays["initial_state"]) is not None:
        of_state = state_shape(shape, options.dim, sequences)
        checks.check_shape("initial_state", initial, of_state)
        initial = jnp.broadcast_to(initial.astype(compute), of_state)
    inputs = [arrays[name] for name in kind.inputs]
    parameters = [arrays[name].astype(compute) for name in kind.parameters]
    return [*inputs, *parameters, initial, arrays["reset"], arrays["cu_seqlens"]]


def min_gru(gate: Any, hidden: Any, *, activation: Activation = "positive", **options: Any) -> Any:
    """States of minGRU: with z = σ(gate), h[t] = (1 − z)·h[t-1] + z·g(hidden).

    Args:
        gate: (batch, channels, time), or with ``dim=1`` (batch, time, channels).
        hidden: like ``gate``, in its dtype.
        activation: ``positive`` or ``identity``: which g, as for ``scan_registry.min_gru``.
        options: those of ``gated_scan``.

    Raises:
        TypeError, ValueError, NoKernelError: as ``gated_scan``.
    """
    return gated_scan(_with_activation("min_gru", activation), gate, hidden, **options)


def min_lstm(
    forget: Any, input: Any, hidden: Any, *, activation: Activation = "positive", **options: Any
) -> Any:
    """States of minLSTM: with f = σ(forget) / (σ(forget) + σ(input)), h[t] = f·h[t-1] + (1 − f)·g(hidden).

    Args:
        forget: (batch, channels, time), or with ``dim=1`` (batch, time, channels).
        input: like ``forget``, in its dtype.
        hidden: like ``forget``, in its dtype.
        activation: ``positive`` or ``identity``: which g, as for ``scan_registry.min_lstm``.
        options: those of ``gated_scan``.

    Raises:
        TypeError, ValueError, NoKernelError: as ``gated_scan``.
    """
    return gated_scan(_with_activation("min_lstm", activation), forget, input, hidden, **options)


def rg_lru(
    x: Any, recurrence_gate: Any, input_gate: Any, a_param: Any, reset: Any = None, **options: Any
) -> Any:
    """States of RG-LRU, the recurrence of Griffin and RecurrentGemma: with a = exp(−8·σ(recurrence_gate)·softplus(a_param)),
    h[t] = a·h[t-1] + √(1 − a²)·σ(input_gate)·x; where ``reset`` is true, h[t] = σ(input_gate)·x.

    Args:
        x: (batch, channels, time), or with ``dim=1`` (batch, time, channels).
        recurrence_gate: like ``x``, in its dtype.
        input_gate: like ``x``, in its dtype.
        a_param: (channels,).
        reset: bool, (batch, time), or None. The first step of a sequence is no reset unless ``reset`` says so. In the published
            models it is one.
        options: those of ``gated_scan``.

    Raises:
        TypeError, ValueError, NoKernelError: as ``gated_scan``.
    """
    return gated_scan("rg_lru", x, recurrence_gate, input_gate, a_param, reset=reset, **options)


def hgrn(x: Any, forget: Any, lower_bound: Any = None, **options: Any) -> Any:
    """States of HGRN: with f = γ + (1 − γ)·σ(forget), h[t] = f·h[t-1] + (1 − f)·silu(x).

    Args:
        x: (batch, channels, time), or with ``dim=1`` (batch, time, channels).
        forget: like ``x``, in its dtype.
        lower_bound: γ: (channels,), of values from 0 to 1, which are not checked; or a number of Python or NumPy; or None for 0.
        options: those of ``gated_scan``.

    Raises:
        TypeError, ValueError, NoKernelError: as ``gated_scan``.
    """
    if lower_bound is None or checks.is_scalar(lower_bound):
        number = 0.0 if lower_bound is None else lower_bound
        number = checks.check_number("lower_bound", number, 0, 1)
        x = checks.as_arrays({"x": x}, _accepted(KINDS["hgrn"]))["x"]
        channels = x.shape[-1 if checks.check_time(options.get("dim", -1)) == -2 else -2]
        lower_bound = jnp.full(channels, number, compute_dtype(x))
    else:
        shapes = "(channels,), or a number of Python or NumPy that is no array"
        accepted = checks.Parameter(ACCEPTED, (1,), shapes)
        arrays = checks.as_arrays({"lower_bound": lower_bound}, {"lower_bound": accepted})
        lower_bound = arrays["lower_bound"]
    return gated_scan("hgrn", x, forget, lower_bound, **options)


def _with_activation(kind: str, activation: Any) -> str:
    endings = {"positive": "", "identity": "_identity"}
    checks.check_choice("activation", activation, tuple(endings))
    return kind + endings[activation]
