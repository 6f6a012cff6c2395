"""``causal_conv1d`` for JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from scan_registry.base.strides import dense_strides
from scan_registry.dispatch.fit import Tier
from scan_registry.dispatch.select import Backend
from scan_registry.jax import checks, ffi, packing
from scan_registry.jax.primitives import FOLD, SHARED, Arrays, Operator, Pullback, define
from scan_registry.kernels.causal_conv1d.problem import (
    DTYPES,
    WIDTHS,
    ConvProblem,
    Direction,
    Strides,
    layout_of,
)
from scan_registry.kernels.causal_conv1d.spec import FAMILY

ACCEPTED = (*DTYPES, "float64")
ACTIVATIONS = (None, "silu", "swish")
PARAMETERS = {
    "x": checks.Parameter(ACCEPTED, (3,), checks.SEQUENCES, optional=False),
    "weight": checks.Parameter(ACCEPTED, (2,), "(channels, width)", optional=False),
    "bias": checks.Parameter(ACCEPTED, (1,), "(channels,)"),
    "initial_state": checks.Parameter(
        ACCEPTED,
        (3,),
        "(batch, channels, width-1), or with cu_seqlens (sequences, channels, width-1)",
    ),
    "cu_seqlens": checks.CU_SEQLENS,
}


class Options(NamedTuple):
    """The arguments that are no arrays. ``dim`` is -1 or -2; ``lowest`` is the lowest tier that was allowed."""

    dim: int
    silu: bool
    final: bool
    backend: Backend
    lowest: Tier


def causal_conv1d(
    x: Any, weight: Any, bias: Any = None, *, initial_state: Any = None, dim: int = -1,
    cu_seqlens: Any = None, return_final_state: bool = False, activation: str | None = None,
    backend: Backend = "auto", axis_name: str | None = None,
) -> Any:  # fmt: skip
    """y[t] = act(bias + Σ weight[width-1-j] · x[t-j]) over j from 0 to width-1, for each channel by itself.

    Args:
        x: (batch, channels, time), or with ``dim=1`` (batch, time, channels); float32, bfloat16, float16 or float64.
        weight: (channels, width), of a width from 2 to 8. float32 weights go with narrower x as they are.
        bias: (channels,); None for zeros.
        initial_state: (batch, channels, width-1), the inputs before the first step, the oldest first; with ``cu_seqlens``
            (sequences, channels, width-1). None for zeros.
        dim: the time dimension, -1 or 2, or 1 or -2.
        cu_seqlens: (sequences + 1,), int32 or int64: where sequences that are packed along time begin, and where the last one
            ends, as for ``linear_scan``. The batch is 1 then.
        return_final_state: return the last width-1 inputs, too, those of the initial state among them.
        activation: None, or ``"silu"`` or ``"swish"``, which are the same.
        backend: as for ``linear_scan``.
        axis_name: as for ``linear_scan``. Each device has at least width-1 steps.

    Raises:
        TypeError, ValueError: an argument is not accepted; the message says what is.
        NoKernelError: what ``backend`` or ``require`` allows has no kernel for this GPU; raised by what compiles the program.
    """
    arguments = x, weight, bias, initial_state, cu_seqlens
    arrays = checks.as_arrays(dict(zip(PARAMETERS, arguments, strict=True)), PARAMETERS)
    checks.check_choice("activation", activation, ACTIVATIONS)
    options = Options(
        checks.check_time(dim),
        activation is not None,
        *checks.check_common(return_final_state, backend),
    )
    operands = _converted(arrays, options.dim)
    if axis_name is None:
        results = convolve(operands, options)
    else:
        devices = checks.check_axis(axis_name, cu_seqlens, operands[0].shape[options.dim])
        from scan_registry.kernels.causal_conv1d.jax_sharded import convolve_over

        results = convolve_over(operands, axis_name, devices, options)
    return tuple(results) if options.final else results[0]


def _converted(arrays: dict[str, Any], dim: int) -> list[Any]:
    """The checked arrays, in the dtypes that the operator takes."""
    x, weight, bias, initial, cu_seqlens = arrays.values()
    batch, channels = x.shape[0], x.shape[-1 if dim == -2 else -2]
    if weight.shape[0] != channels or weight.shape[1] not in WIDTHS:
        raise ValueError(
            f"weight has shape {weight.shape}; it must be (channels, width), here ({channels}, {WIDTHS[0]} to {WIDTHS[-1]})"
        )
    checks.check_precision(arrays, "x")
    checks.check_precision({"weight": weight, "x": x}, "weight")
    wide = jnp.promote_types(x.dtype, "float32")
    weight = weight.astype(x.dtype if weight.dtype == x.dtype else wide)
    sequences = checks.check_cu_seqlens(cu_seqlens, x.shape[dim])
    if sequences is not None and batch != 1:
        raise ValueError(f"x has shape {x.shape}; with cu_seqlens the batch must be 1")
    rows = batch if sequences is None else sequences
    of_state = rows, channels, weight.shape[1] - 1
    checks.check_exact_shapes(arrays, {"bias": (channels,), "initial_state": of_state})
    return [
        x,
        weight,
        None if bias is None else bias.astype(weight.dtype),
        None if initial is None else initial.astype(x.dtype),
        cu_seqlens,
    ]


class _CausalConv1d(Operator):
    """Operands: x, weight, bias, initial state, cu_seqlens. Results: y, and maybe the final state."""

    name = "causal_conv1d"
    roles = (FOLD, SHARED, SHARED, FOLD, SHARED)
    result_roles = (FOLD, FOLD)

    def outlines(self, operands: Arrays, options: Options) -> dict[str, ffi.Outline | None]:
        of_state = self._state(operands, options)
        return {
            "y": ffi.outline_of(operands[0]),
            "final_state": of_state if options.final else None,
        }

    @staticmethod
    def _state(operands: Arrays, options: Options) -> ffi.Outline:
        x, weight, _, _, cu_seqlens = operands
        rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        return (rows, weight.shape[0], weight.shape[1] - 1), str(x.dtype)

    def folds(self, operands: Arrays) -> bool:
        return operands[4] is None  # sequences are packed in a batch of 1

    def bounds(self, groups: Sequence[Arrays], options: Options) -> tuple[int, int] | None:
        return 4, groups[0][0].shape[options.dim]

    def composed(self, operands: Arrays, options: Options) -> list[Any]:
        x, weight, bias, state, cu_seqlens = operands
        compute = "float64" if x.dtype == "float64" else "float32"
        rows = x if options.dim == -1 else x.swapaxes(1, 2)
        wide, time, width = rows.astype(compute), rows.shape[2], weight.shape[1]
        of_state, dtype = self._state(operands, options)
        before = jnp.zeros(of_state, compute) if state is None else state.astype(compute)
        inputs = _Inputs(wide, before, cu_seqlens)
        steps = jnp.arange(time)
        taps = (inputs.at(steps, j) * weight[:, width - 1 - j, None] for j in range(width))
        y: Any = sum(taps)
        if bias is not None:
            y = y + bias[:, None]
        if options.silu:
            y = jax.nn.silu(y)
        results = [(y if options.dim == -1 else y.swapaxes(1, 2)).astype(x.dtype)]
        if options.final:
            results.append(inputs.last(width - 1).astype(dtype))
        return results

    def saved(self, operands: Arrays, results: Arrays) -> tuple[Arrays, Arrays]:
        return operands, [None for _ in results]

    def run(self, platform: str, operands: Arrays, options: Options) -> list[Any] | None:
        if not _has_kernels(operands, options):
            return None
        of_state = self._state(operands, options)
        outputs = self.outlines(operands, options)
        starts = {"final_state": packing.leaving(operands[3], *of_state, operands[4])}
        written = _call(platform, "forward", _inputs(operands), outputs, starts, operands, options)
        return ffi.in_order(written, outputs)

    def run_adjoint(self, platform: str, of: Pullback, options: Options) -> list[Any] | None:
        operands, wanted = of.operands, of.wanted
        if not _has_kernels(operands, options):
            return None
        x, weight = operands[0], operands[1]
        of_y, of_final = of.cotangents_like(x)
        of_state = self._state(operands, options)
        inputs = {
            **_inputs(operands),
            "y_grad": of_y,
            "final_state_grad": of_final,
        }
        outputs: dict[str, ffi.Outline | None] = {
            "x_grad": ffi.outline_of(x),
            "weight_grad": ffi.outline_of(weight) if 1 in wanted else None,
            "bias_grad": ffi.outline_of(weight[:, 0]) if 2 in wanted else None,
            "initial_state_grad": of_state if 3 in wanted else None,
        }
        starts = {"initial_state_grad": packing.leaving(of_final, *of_state, operands[4])}
        written = _call(platform, "backward", inputs, outputs, starts, operands, options)
        if written is None:
            return None
        if "partials" in written:
            sums, width = written["partials"].sum(0), weight.shape[1]
            written["weight_grad"] = sums[:width][::-1].T.astype(weight.dtype)
            written["bias_grad"] = sums[width].astype(weight.dtype)
        return [written[tuple(outputs)[i]] for i in wanted]


class _Inputs:
    """x (B, C, T), with what comes before: a state for each batch, or for each packed sequence."""

    def __init__(self, x: Any, state: Any, cu_seqlens: Any) -> None:
        self._x, self._state, self._bounds = x, state, cu_seqlens
        self._steps = jnp.arange(x.shape[2])
        self._numbers = self._begins = jnp.zeros_like(self._steps)
        if cu_seqlens is not None:
            self._numbers = jnp.searchsorted(cu_seqlens[1:], self._steps, side="right")
            self._begins = cu_seqlens[:-1][self._numbers]

    def at(self, steps: Any, back: int) -> Any:
        """The inputs so many steps back from each step of x."""
        places = steps - back
        own = jnp.take(self._x, places, axis=2, mode="clip")
        before = places - self._begins  # of the sequence's first step; below zero in the state
        earlier = jnp.clip(self._state.shape[2] + before, 0, self._state.shape[2] - 1)
        if self._bounds is None:
            of_state = jnp.take(self._state, earlier, axis=2)
        else:
            of_state = self._state[self._numbers, :, earlier].T[None]
        return jnp.where(before >= 0, own, of_state)

    def last(self, count: int) -> Any:
        """The last inputs of each sequence."""
        length = self._x.shape[2]
        if self._bounds is None:
            return jnp.concatenate([self._state, self._x], axis=2)[:, :, length:]
        if len(self._bounds) == 1:
            return self._state
        begins, ends = self._bounds[:-1, None], self._bounds[1:, None]
        places = ends - count + jnp.arange(count)
        own = jnp.take(self._x[0], places, axis=1, mode="clip").swapaxes(0, 1)
        earlier = jnp.clip(count + places - begins, 0, count - 1)[:, None]
        of_state = jnp.take_along_axis(self._state, earlier, axis=2)
        return jnp.where((places >= begins)[:, None], own, of_state)


def _has_kernels(operands: Arrays, options: Options) -> bool:
    x = operands[0]
    return str(x.dtype) in DTYPES and x.size > 0 and options.backend in ("auto", "cuda")


def _inputs(operands: Arrays) -> dict[str, Any]:
    x, weight, bias, state, cu_seqlens = operands
    offsets = None if cu_seqlens is None else checks.as_int64(cu_seqlens)
    return {"x": x, "weight": weight, "bias": bias, "initial_state": state, "cu_seqlens": offsets}


def problem_of(direction: Direction, operands: Arrays, options: Options) -> ConvProblem:
    """What one pass poses to a kernel."""
    x, weight, _, _, cu_seqlens = operands
    shape, strides = _ordered(x.shape, options.dim), _ordered(dense_strides(x.shape), options.dim)
    layout = layout_of(shape, [strides])
    assert layout is not None  # arrays lie in order
    return ConvProblem(
        *(direction, layout, str(x.dtype)),
        *(*shape, weight.shape[1]),
        strides=(Strides(*strides),) * (2 if direction == "forward" else 3),
        alignment=16,
        sequences=packing.sequences_of(cu_seqlens) or 0,
        silu=options.silu,
        wide_weights=weight.dtype != x.dtype,
    )


def _ordered(values: Sequence[int], dim: int) -> tuple[int, int, int]:
    """Values for (batch, channels, time), from values in the order of the array's dimensions."""
    batch, one, other = values
    return (batch, one, other) if dim == -1 else (batch, other, one)


#: The pointers of the C code for CPUs.
_POINTERS: dict[Direction, tuple[str, ...]] = {
    "forward": (
        *("x", "y", "weight", "bias", "initial_state", "seq_idx", "cu_seqlens"),
        "final_state",
    ),
    "backward": (
        *("x", "y_grad", "weight", "bias", "initial_state", "seq_idx", "cu_seqlens", "x_grad"),
        *("final_state_grad", "weight_grad", "bias_grad", "initial_state_grad"),
    ),
}


def _call(
    platform: str, direction: Direction, inputs: Any, outputs: dict[str, ffi.Outline | None],
    starts: Any, operands: Arrays, options: Options,
) -> dict[str, Any] | None:  # fmt: skip
    """What a kernel writes; on a GPU ``partials`` in the place of the gradients of weight and bias."""
    problem = problem_of(direction, operands, options)
    selection = ffi.Selection(FAMILY, problem, options.backend, options.lowest)
    if platform == "cpu":
        sizes = problem.batch, problem.channels, problem.time, problem.width, problem.sequences
        strides = [step for own in problem.strides for step in vars(own).values()]
        function = ffi.CpuFunction(
            f"causal_conv1d_{direction}",
            _POINTERS[direction],
            (problem.dtype, str(operands[1].dtype)),
            (*sizes, int(problem.silu), *strides),
            (),
            selection,
        )
        return ffi.call_on_cpu(function, inputs, outputs, starts)

    def in_pieces(scalars: Any) -> dict[str, ffi.Outline | None]:
        sums = outputs.get("weight_grad") or outputs.get("bias_grad")
        others = {n: o for n, o in outputs.items() if n not in ("weight_grad", "bias_grad")}
        if sums is None:
            return others
        shape = problem.batch * scalars["pieces"], problem.width + 1, problem.channels
        return {**others, "partials": (shape, "float32")}

    return ffi.call_on_gpu(selection, inputs, in_pieces, starts)


convolve = define(_CausalConv1d())
