"""The operator ``gated_scan`` for JAX: how kernels are called, and what JAX's operators compute where none runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax.numpy as jnp
from jax import lax

from scan_registry.base.strides import dense_strides
from scan_registry.base.tensor_facts import TensorFacts
from scan_registry.jax import checks, packing, primitives
from scan_registry.jax.ffi import (
    CpuFunction,
    Outline,
    Selection,
    call_on_cpu,
    call_on_gpu,
    in_order,
    outline_of,
)
from scan_registry.jax.primitives import FOLD, SHARED, Arrays, Operator, Pullback, define
from scan_registry.kernels.gated_scan.jax_gates import GATES
from scan_registry.kernels.gated_scan.kinds import KINDS, Kind
from scan_registry.kernels.gated_scan.op import calls
from scan_registry.kernels.gated_scan.problem import (
    DTYPES,
    MOST_INPUTS,
    Direction,
    GatedScanProblem,
)
from scan_registry.kernels.gated_scan.spec import FAMILY
from scan_registry.kernels.linear_scan.jax import Options, state_shape
from scan_registry.ops import _cpu


class GatedScan(Operator):
    """Operands: inputs, channel parameters, initial state, reset, cu_seqlens. Results: states, and maybe the final state."""

    result_roles = (FOLD, FOLD)

    def __init__(self, kind: Kind) -> None:
        self.kind, self.count = kind, len(kind.inputs)
        self.end = self.count + len(kind.parameters)
        self.name = f"gated_scan_{kind.name}"
        parameters = (SHARED,) * len(kind.parameters)
        self.roles = (*(FOLD,) * self.count, *parameters, FOLD, FOLD, SHARED)

    def outlines(self, operands: Arrays, options: Options) -> dict[str, Outline | None]:
        of_state = self._state(operands, options)
        return {
            "states": outline_of(operands[0]),
            "final_state": of_state if options.final else None,
        }

    @staticmethod
    def _state(operands: Arrays, options: Options) -> Outline:
        sequences = packing.sequences_of(operands[-1])
        return state_shape(operands[0].shape, options.dim, sequences), primitives.compute_dtype(
            operands[0]
        )

    def bounds(self, groups: Sequence[Arrays], options: Options) -> tuple[int, int] | None:
        return len(self.roles) - 1, groups[0][0].shape[options.dim]

    def gates(self, operands: Arrays, options: Options) -> tuple[Any, Any]:
        """Gates and tokens of all steps, in the dtype of the computation."""
        reset, compute = operands[self.end + 1], primitives.compute_dtype(operands[0])
        parameters = operands[self.count : self.end]
        of_channels = [p if options.dim == -2 else p[:, None] for p in parameters]
        at = None if reset is None else jnp.expand_dims(reset, -1 if options.dim == -2 else -2)
        inputs = [x.astype(compute) for x in operands[: self.count]]
        gates, tokens = GATES[self.kind.name](at, *inputs, *of_channels)
        return gates if at is None else jnp.where(at, 0, gates), tokens

    def composed(self, operands: Arrays, options: Options) -> list[Any]:
        initial, _, cu_seqlens = operands[self.end :]
        gates, tokens = self.gates(operands, options)
        dim = options.dim % 3
        maps = packing.enter(gates, tokens, initial, cu_seqlens, dim, options.reverse)
        _, states = lax.associative_scan(packing.compose, maps, reverse=options.reverse, axis=dim)
        results = [states.astype(operands[0].dtype)]
        if options.final:
            results.append(packing.last(states, initial, cu_seqlens, dim, options.reverse))
        return results

    def saved(self, operands: Arrays, results: Arrays) -> tuple[Arrays, Arrays]:
        return operands, (results[0], *(None for _ in results[1:]))

    def run(self, platform: str, operands: Arrays, options: Options) -> list[Any] | None:
        if not self._has_kernels(platform, operands, options):
            return None
        initial, _, cu_seqlens = operands[self.end :]
        of_state, outputs = self._state(operands, options), self.outlines(operands, options)
        starts = {"final_state": packing.leaving(initial, *of_state, cu_seqlens)}
        inputs = self._inputs(operands)
        written = self._call(platform, "forward", inputs, outputs, starts, operands, options)
        return in_order(written, outputs)

    def run_adjoint(self, platform: str, of: Pullback, options: Options) -> list[Any] | None:
        operands, wanted = of.operands, of.wanted
        if not self._has_kernels(platform, operands, options):
            return None
        first, states = operands[0], of.results[0]
        of_states, of_final = of.cotangents_like(states)
        of_state = self._state(operands, options)
        inputs = {
            **self._inputs(operands),
            "states": states,
            "states_grad": of_states,
            "final_state_grad": of_final,
        }
        outputs: dict[str, Outline | None] = {
            f"input{n}_grad": outline_of(first) if n in wanted else None for n in range(self.count)
        }
        parameters = [n for n in range(self.count, self.end) if n in wanted]
        if parameters:
            channels = operands[self.count].shape[0]
            outputs["parameters_grad"] = (self.end - self.count, channels), "float32"
        outputs["initial_state_grad"] = of_state if self.end in wanted else None
        starts = {"initial_state_grad": packing.leaving(of_final, *of_state, operands[-1])}
        written = self._call(platform, "backward", inputs, outputs, starts, operands, options)
        if written is None:
            return None
        sums = written.get("parameters_grad")
        if sums is not None and sums.ndim == 3:
            sums = sums.sum(0)
        return [
            written[f"input{n}_grad"]
            if n < self.count
            else written["initial_state_grad"]
            if n == self.end or sums is None
            else sums[n - self.count]
            for n in wanted
        ]

    def _has_kernels(self, platform: str, operands: Arrays, options: Options) -> bool:
        first = operands[0]
        if options.backend not in ("auto", "cuda") or first.size == 0:
            return False
        if platform == "cpu" and self.kind.source not in _in_c():
            return False
        return str(first.dtype) in DTYPES

    def _inputs(self, operands: Arrays) -> dict[str, Any]:
        initial, reset, cu_seqlens = operands[self.end :]
        parameters = operands[self.count : self.end]
        return {
            **{f"input{n}": x for n, x in enumerate(operands[: self.count])},
            "parameters": jnp.stack(parameters) if parameters else None,
            "reset": reset,
            "initial_state": initial,
            "offsets": None if cu_seqlens is None else checks.as_int64(cu_seqlens),
        }

    def call(
        self, platform: str, direction: Direction, operands: Arrays, options: Options
    ) -> calls.KernelCall:
        """What one pass poses to a kernel."""
        first = TensorFacts.dense(*outline_of(operands[0]), platform)
        reset = operands[self.end + 1]
        return calls.make_call(
            direction,
            self.kind,
            [first] * self.count,
            {} if direction == "forward" else {"states": first, "states_grad": first},
            None if reset is None else TensorFacts.dense(*outline_of(reset), platform),
            dense_strides(first.shape),
            packing.sequences_of(operands[-1]),
            options.dim,
            options.reverse,
            addresses=0,
        )

    def _call(
        self,
        platform: str,
        direction: Direction,
        inputs: Any,
        outputs: dict[str, Outline | None],
        starts: Any,
        operands: Arrays,
        options: Options,
    ) -> dict[str, Any] | None:
        problem = self.call(platform, direction, operands, options).problem
        if platform == "cpu":
            function = self._function(problem, inputs, outputs, operands, options)
            return call_on_cpu(function, inputs, outputs, starts)

        def in_parts(scalars: Any) -> dict[str, Outline | None]:
            sums = outputs.get("parameters_grad")
            if sums is None:
                return outputs
            return {**outputs, "parameters_grad": ((scalars["parts"], *sums[0]), sums[1])}

        kernel = Selection(FAMILY, problem, options.backend, options.lowest)
        return call_on_gpu(kernel, inputs, in_parts, starts)

    def _function(
        self,
        problem: GatedScanProblem,
        inputs: Any,
        outputs: Any,
        operands: Arrays,
        options: Options,
    ) -> CpuFunction:
        """The C code's pointers and numbers: strides of batch, channel, and time or sequence of each array."""
        direction = problem.direction
        of_inputs = tuple(f"input{n}" for n in range(MOST_INPUTS))
        strided = {
            "forward": (*of_inputs, "states", "initial_state", "final_state"),
            "backward": (
                *(*of_inputs, "states", "states_grad", *(f"{name}_grad" for name in of_inputs)),
                *("initial_state", "final_state_grad", "initial_state_grad"),
            ),
        }[direction]
        shapes = {name: array.shape for name, array in inputs.items() if array is not None}
        shapes |= {name: outline[0] for name, outline in outputs.items() if outline is not None}
        strides = [step for name in strided for step in _strides(shapes.get(name), options.dim)]
        sums = ("parameters_grad",) if direction == "backward" else ()
        first, reset = operands[0], operands[self.end + 1]
        sizes = calls.ordered(first.shape, options.dim)
        sequences = packing.sequences_of(operands[-1]) or 0
        flags = int(options.reverse) + 2 * int(self.kind.option)
        return CpuFunction(
            f"gated_scan_{direction}",
            (*strided, "parameters", "reset", "offsets", *sums),
            (self.kind.source, str(first.dtype)),
            (*sizes, sequences, 0 if reset is None else reset.shape[1], flags, *strides),
            (),
            Selection(FAMILY, problem, options.backend, options.lowest),
        )


@cache
def _in_c() -> tuple[str, ...]:
    """The kinds that the C code for CPUs computes, by the names of their headers."""
    kinds: Any = _cpu.gated_scan_kinds
    return tuple(kinds())


def _strides(shape: tuple[int, ...] | None, dim: int) -> tuple[int, ...]:
    """Of batch, channel, and time or sequence."""
    if shape is None:
        return 0, 0, 0
    strides = dense_strides(shape)
    return (*strides, 0) if len(strides) == 2 else calls.ordered(strides, dim)


@cache
def operator_of(kind: str) -> GatedScan:
    """The operator of a kind."""
    return GatedScan(KINDS[kind])


@cache
def scan_of(kind: str) -> Callable[[Arrays, Options], list[Any]]:
    """The function of operands and options for a kind."""
    return define(operator_of(kind))
