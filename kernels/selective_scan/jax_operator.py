"""The operator ``selective_scan`` for JAX: how kernels are called, and what JAX's operators compute where none runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from scan_registry.base.tensor_facts import TensorFacts
from scan_registry.dispatch.fit import Tier
from scan_registry.dispatch.select import Backend
from scan_registry.jax import checks, packing
from scan_registry.jax.ffi import (
    CpuFunction,
    Outline,
    Selection,
    call_on_cpu,
    call_on_gpu,
    gpu,
    in_order,
    outline_of,
)
from scan_registry.jax.primitives import (
    FOLD,
    SHARED,
    Arrays,
    Operator,
    Pullback,
    compute_dtype,
    define,
    softplus,
)
from scan_registry.kernels.selective_scan.op import calls
from scan_registry.kernels.selective_scan.problem import (
    DTYPES,
    INTERVAL,
    Direction,
    SelectiveScanProblem,
)
from scan_registry.kernels.selective_scan.spec import FAMILY


class Options(NamedTuple):
    """The arguments that are no arrays. ``dim`` is -1 or -2; ``lowest`` is the lowest tier that was allowed; ``training`` asks for
    the states that the backward kernels start from."""

    dim: int
    softplus: bool
    final: bool
    backend: Backend
    lowest: Tier
    training: bool = False


class Operands(NamedTuple):
    """Arrays as the operator takes them: B and C of as many groups, A, D, bias and initial state in the dtype of the
    computation."""

    u: Any
    delta: Any
    A: Any
    B: Any
    C: Any
    D: Any
    z: Any
    delta_bias: Any
    initial_state: Any
    cu_seqlens: Any


def ordered(values: Sequence[int], dim: int) -> tuple[int, int, int]:
    """Values for (batch, channels, time), from values in the order of the array's dimensions."""
    batch, one, other = values
    return (batch, one, other) if dim == -1 else (batch, other, one)


class _SelectiveScan(Operator):
    """Operands as ``Operands``. Results: the output, maybe the final state, and in training the states that the backward kernels
    start from."""

    name = "selective_scan"
    roles = (FOLD, FOLD, SHARED, FOLD, FOLD, SHARED, FOLD, SHARED, FOLD, SHARED)
    result_roles = (FOLD, FOLD, FOLD)

    def outlines(self, operands: Arrays, options: Options) -> dict[str, Outline | None]:
        of = Operands(*operands)
        batch, _, time = ordered(of.u.shape, options.dim)
        sequences = packing.sequences_of(of.cu_seqlens)
        between = () if sequences is None else (sequences,)
        kept = batch, time // INTERVAL + (sequences or 1), *of.A.shape
        return {
            "out": outline_of(of.u),
            "final_state": ((batch, *between, *of.A.shape), compute_dtype(of.u))
            if options.final
            else None,
            "checkpoints": (kept, "float32") if options.training else None,
        }

    def recorded(self, options: Options) -> Options:
        return options._replace(training=True)

    def saved(self, operands: Arrays, results: Arrays) -> tuple[Arrays, Arrays]:
        return operands, (*(None for _ in results[:-1]), results[-1])

    def bounds(self, groups: Sequence[Arrays], options: Options) -> tuple[int, int] | None:
        return 9, groups[0][0].shape[options.dim]

    def composed(self, operands: Arrays, options: Options) -> list[Any]:
        of = Operands(*operands)
        wide = compute_dtype(of.u)

        def of_channels(array: Any) -> Any:
            """(batch, channels, states, time)"""
            array = array if options.dim == -1 else jnp.moveaxis(array, 1, 3)
            return jnp.repeat(array.astype(wide), of.A.shape[0] // array.shape[1], axis=1)

        u, step = _rows(of.u, options.dim), step_sizes(of, options)
        gates = jnp.exp(step[:, :, None] * of.A[:, :, None])
        tokens = (step * u)[:, :, None] * of_channels(of.B)
        initial = of.initial_state
        if initial is not None and of.cu_seqlens is not None:
            initial = jnp.moveaxis(initial, 1, 3)
        maps = packing.enter(gates, tokens, initial, of.cu_seqlens, 3, False)
        _, states = lax.associative_scan(packing.compose, maps, axis=3)
        y = (of_channels(of.C) * states).sum(2)
        if of.D is not None:
            y = y + of.D[:, None] * u
        if of.z is not None:
            y = y * jax.nn.silu(_rows(of.z, options.dim))
        results = [(y if options.dim == -1 else y.swapaxes(1, 2)).astype(of.u.dtype)]
        if options.final:
            last = packing.last(states, initial, of.cu_seqlens, 3, False)
            results.append(last if of.cu_seqlens is None else jnp.moveaxis(last, 3, 1))
        if options.training:
            results.append(jnp.zeros(*self._shape_kept(of, options)))  # only kernels read them
        return results

    def _shape_kept(self, of: Operands, options: Options) -> Outline:
        kept = self.outlines(of, options)["checkpoints"]
        assert kept is not None
        return kept

    def run(self, platform: str, operands: Arrays, options: Options) -> list[Any] | None:
        of = Operands(*operands)
        if not _has_kernels(of, options):
            return None
        outputs = self.outlines(of, options)
        if platform == "cpu":
            final = self.outlines(of, options._replace(final=True))["final_state"]
            own = {"out": outputs["out"], "final_state": final}
            written = call_on_cpu(_function("forward", of, options), _inputs(of), own)
            if options.training:
                written["checkpoints"] = jnp.zeros(*self._shape_kept(of, options))
        else:
            problem = problem_of("forward", of, options, platform)
            launched = _launch(problem, of, options, _inputs(of), outputs)
            if launched is None:
                return None
            written = launched
        return in_order(written, outputs)

    def run_adjoint(self, platform: str, pullback: Pullback, options: Options) -> list[Any] | None:
        of, wanted = Operands(*pullback.operands), pullback.wanted
        if not _has_kernels(of, options):
            return None
        of_out, of_final = pullback.cotangents_like(of.u)
        inputs = {
            **_inputs(of),
            "out_grad": of_out,
            "final_grad": of_final,
        }
        if platform == "cpu":
            outputs = _gradients_on_cpu(of, options, wanted)
            function = _function("backward", of, options)
            written = call_on_cpu(function, inputs, outputs)
        else:
            inputs["checkpoints"] = pullback.results[-1]
            launched = _launch_backward(of, options, inputs, platform)
            if launched is None:
                return None
            written = launched
        gradients = []
        for i in wanted:
            gradient = written[_GRADIENTS[i]]
            if i in (3, 4) and options.dim == -2:
                gradient = jnp.moveaxis(gradient, 3, 1)
            gradients.append(gradient.astype(of[i].dtype))
        return gradients


#: The kernels' names of the gradients of ``Operands``.
_GRADIENTS = (
    *("u_grad", "delta_grad", "A_grad", "B_grad", "C_grad", "D_grad", "z_grad", "bias_grad"),
    "initial_grad",
)


def _rows(array: Any, dim: int) -> Any:
    """(batch, channels, time), in the dtype of the computation."""
    return (array if dim == -1 else array.swapaxes(1, 2)).astype(compute_dtype(array))


def step_sizes(of: Operands, options: Options) -> Any:
    """δ (batch, channels, time)."""
    step = _rows(of.delta, options.dim)
    if of.delta_bias is not None:
        step = step + of.delta_bias[:, None]
    if options.softplus:
        step = softplus(step)
    return step


def _has_kernels(of: Operands, options: Options) -> bool:
    return str(of.u.dtype) in DTYPES and of.u.size > 0 and options.backend in ("auto", "cuda")


def _inputs(of: Operands) -> dict[str, Any]:
    offsets = None if of.cu_seqlens is None else checks.as_int64(of.cu_seqlens)
    return {**of._asdict(), "cu_seqlens": offsets}


def _projection_shape(of: Operands, dim: int) -> tuple[int, ...]:
    """(batch, groups, states, time)"""
    shape: tuple[int, ...] = of.B.shape
    return shape if dim == -1 else (shape[0], *shape[2:], shape[1])


# --- On GPUs ----------------------------------------------------------------------------------


def problem_of(
    direction: Direction, of: Operands, options: Options, platform: str, parts: int = 1
) -> SelectiveScanProblem:
    """What one pass poses to a kernel."""

    def sequence(array: Any) -> TensorFacts:
        facts = TensorFacts.dense(*outline_of(array), platform)
        shape, strides = (ordered(own, options.dim) for own in (facts.shape, facts.strides))
        return replace(facts, shape=shape, strides=strides)

    def projection(array: Any) -> TensorFacts:
        facts = TensorFacts.dense(*outline_of(array), platform)
        if options.dim == -1:
            return facts
        order = (0, 2, 3, 1)
        shape, strides = (tuple(own[d] for d in order) for own in (facts.shape, facts.strides))
        return replace(facts, shape=shape, strides=strides)

    others = {"forward": ("out",), "adjoint": ("grad",), "backward": ("grad", "u_grad")}[direction]
    tensors = {name: sequence(of.u) for name in ("u", "delta", *others)}
    if of.z is not None:
        tensors["z"] = sequence(of.z)
    tensors |= {"B": projection(of.B), "C": projection(of.C)}
    return calls.make_problem(
        direction,
        tensors,
        states=of.A.shape[1],
        layout="time_last" if options.dim == -1 or of.u.shape[2] == 1 else "channel_last",
        softplus=options.softplus,
        sequences=packing.sequences_of(of.cu_seqlens),
        addresses=0,
        parts=parts,
    )


def _launch(
    problem: SelectiveScanProblem, of: Operands, options: Options, inputs: Mapping[str, Any],
    outputs: Mapping[str, Outline | None],
) -> dict[str, Any] | None:  # fmt: skip
    selection = Selection(FAMILY, problem, options.backend, options.lowest)
    return call_on_gpu(selection, inputs, lambda scalars: outputs)


def _launch_backward(
    of: Operands, options: Options, inputs: Mapping[str, Any], platform: str
) -> dict[str, Any] | None:
    """The gradients by their names, summed up where kernels write terms."""
    whole = problem_of("backward", of, options, platform)
    problem = replace(whole, parts=whole.parts_for(gpu().sm_count))
    rows = problem.batch * max(1, problem.sequences) * problem.parts
    channels, states = of.A.shape
    read = dict(inputs)
    if problem.parts > 1:
        before = problem_of("adjoint", of, options, platform, problem.parts)
        handed = {
            "adjoints": ((rows * channels * states,), "float32"),
            "sizes": ((rows * channels,), "float32"),
        }
        first = _launch(before, of, options, inputs, handed)
        if first is None:
            return None
        read |= {name: first[name] for name in handed}
    projection = (problem.ctas_of_group, *_projection_shape(of, options.dim)), "float32"
    vector = (rows, channels), "float32"
    outputs: dict[str, Outline | None] = {
        "u_grad": outline_of(of.u),
        "delta_grad": outline_of(of.u),
        "z_grad": None if of.z is None else outline_of(of.u),
        "A_grad": ((rows, channels, states), "float32"),
        "B_grad": projection,
        "C_grad": projection,
        "D_grad": None if of.D is None else vector,
        "bias_grad": None if of.delta_bias is None else vector,
        "initial_grad": None if of.initial_state is None else outline_of(of.initial_state),
        "carries": ((problem.carried,), "float32") if problem.carried else None,
    }
    written = _launch(problem, of, options, read, outputs)
    if written is None:
        return None
    terms = ("A_grad", "B_grad", "C_grad", "D_grad", "bias_grad")
    return written | {name: written[name].sum(0) for name in terms if name in written}


# --- On the CPU -------------------------------------------------------------------------------

_DENSE = ("A", "D", "delta_bias", "initial_state", "cu_seqlens")
_STRIDED: dict[Direction, tuple[str, ...]] = {
    "forward": ("u", "delta", "z", "out", "B", "C"),
    "backward": ("u", "delta", "z", "out_grad", "u_grad", "delta_grad", "z_grad", "B", "C"),
}
_OTHERS: dict[Direction, tuple[str, ...]] = {
    "forward": ("final_state",),
    "backward": (
        *("final_grad", "initial_grad"),
        *("A_grad", "D_grad", "bias_grad", "B_grad", "C_grad"),
    ),
}


def _function(direction: Direction, of: Operands, options: Options) -> CpuFunction:
    """The C code's pointers and numbers."""
    problem = problem_of("forward", of, options, "cpu")
    width = {"z": 3, "z_grad": 3, "B": 4, "C": 4}
    steps = dict(zip(("u", "delta", "z", "out", "B", "C"), _split(problem.strides), strict=True))
    strides: list[int] = []
    for name in _STRIDED[direction]:
        own = steps["z"] if name == "z_grad" else steps.get(name, steps["u"])
        strides += own[: width.get(name, 3)]
    groups = problem.groups, problem.groups
    sizes = problem.batch, problem.channels, problem.time, problem.states, *groups
    return CpuFunction(
        f"selective_scan_{direction}",
        (*_STRIDED[direction], *_DENSE, *_OTHERS[direction]),
        (problem.dtype,),
        (*sizes, problem.sequences, int(options.softplus), *strides),
        (),
        Selection(FAMILY, replace(problem, direction=direction), options.backend, options.lowest),
    )


def _split(strides: Sequence[int]) -> list[Sequence[int]]:
    """Of u, delta, z and out three each, of B and C four."""
    ends = (0, 3, 6, 9, 12, 16, 20)
    return [strides[begin:end] for begin, end in pairwise(ends)]


def _gradients_on_cpu(
    of: Operands, options: Options, wanted: Sequence[int]
) -> dict[str, Outline | None]:
    """Outlines by the kernels' names. Those of u and delta are always written."""
    projection = _projection_shape(of, options.dim), str(of.B.dtype)
    outputs: dict[str, Outline | None] = {
        name: (projection if i in (3, 4) else outline_of(of[i])) if i in (0, 1, *wanted) else None
        for i, name in enumerate(_GRADIENTS)
    }
    return outputs


scan = define(_SelectiveScan())
