"""``gated_scan`` and its kinds for JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import lax

from scan_registry.base.strides import dense_strides
from scan_registry.base.tensor_facts import TensorFacts
from scan_registry.dispatch import policy
from scan_registry.dispatch.fit import Tier
from scan_registry.dispatch.select import Backend
from scan_registry.jax import checks, packing
from scan_registry.jax.ffi import (
    CpuFunction,
    Outline,
    Selection,
    call_on_cpu,
    call_on_gpu,
    in_order,
    outline_of,
)
from scan_registry.jax.primitives import FOLD, SHARED, Arrays, Operator, define
from scan_registry.kernels.gated_scan.jax_gates import GATES, compose
from scan_registry.kernels.gated_scan.kinds import KINDS, Kind
from scan_registry.kernels.gated_scan.op import calls
from scan_registry.kernels.gated_scan.problem import (
    DTYPES,
    MOST_INPUTS,
    Direction,
    GatedScanProblem,
)
from scan_registry.kernels.gated_scan.spec import FAMILY
from scan_registry.kernels.linear_scan.jax import linear_scan, state_shape
from scan_registry.ops import _cpu

ACCEPTED = (*DTYPES, "float64")
Activation = Literal["positive", "identity"]


class Options(NamedTuple):
    """The arguments that are no arrays. ``dim`` is -1 or -2; ``lowest`` is the lowest tier that was allowed."""

    dim: int
    reverse: bool
    final: bool
    backend: Backend
    lowest: Tier


# --- Public functions -------------------------------------------------------------------------


def gated_scan(
    kind: str,
    *inputs: Any,
    initial_state: Any = None,
    reset: Any = None,
    dim: int = -1,
    reverse: bool = False,
    cu_seqlens: Any = None,
    return_final_state: bool = False,
    backend: Backend = "auto",
) -> Any:
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
        cu_seqlens, return_final_state, backend: as for ``linear_scan``.

    Raises:
        TypeError, ValueError: an argument is not accepted; the message says what is.
        NoKernelError: what ``backend`` or ``require`` allows has no kernel for this GPU; raised by what compiles the program.
    """
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; accepted are {', '.join(KINDS)}")
    of = KINDS[kind]
    names = (*of.inputs, *of.parameters)
    if len(inputs) != len(names):
        raise TypeError(
            f"{kind} takes {len(names)} arrays, {', '.join(names)}; {len(inputs)} were given"
        )
    arrays = dict(zip(names, inputs, strict=True))
    others = {"initial_state": initial_state, "reset": reset, "cu_seqlens": cu_seqlens}
    accepted = {**dict.fromkeys(names, ACCEPTED), "reset": ("bool",)}
    checks.check_arrays(arrays | others, accepted)
    checks.check_backend(backend)
    first = jnp.asarray(inputs[0])
    if first.ndim != 3:
        raise ValueError(
            f"{names[0]} has shape {first.shape}; it must be (batch, channels, time), or with dim=1 (batch, time, channels)"
        )
    if (dim := checks.check_dim(dim, 3)) == -3:
        raise ValueError("dim is 0; accepted are -1 or 2, and 1 or -2")
    options = Options(
        dim,
        checks.check_bool("reverse", reverse),
        checks.check_bool("return_final_state", return_final_state),
        backend,
        policy.lowest(),
    )
    channels = first.shape[-1 if dim == -2 else -2]
    operands = _operands(of, arrays, first, channels)
    sequences = None
    if cu_seqlens is not None:
        cu_seqlens = jnp.asarray(cu_seqlens)
        checks.check_cu_seqlens(cu_seqlens)
        sequences = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        of_state = state_shape(first.shape, dim, sequences)
        checks.check_shape("initial_state", initial_state, of_state)
        computed = jnp.asarray(initial_state).astype(_compute(first))
        initial_state = jnp.broadcast_to(computed, of_state)
    if reset is not None:
        reset, of_reset = jnp.asarray(reset), (first.shape[0], first.shape[dim])
        if reset.shape != of_reset:
            raise ValueError(f"reset has shape {reset.shape}; it must be {of_reset}")
    if kind == "linear" and reset is None:
        return linear_scan(
            *(operands[0], operands[1], initial_state),
            dim=dim,
            reverse=reverse,
            cu_seqlens=cu_seqlens,
            return_final_state=return_final_state,
            backend=backend,
        )
    results = scan_of(kind)((*operands, initial_state, reset, cu_seqlens), options)
    return tuple(results) if return_final_state else results[0]


def _operands(kind: Kind, arrays: Any, first: Any, channels: int) -> list[Any]:
    """The checked inputs, and the parameters in the dtype of the computation."""
    operands = []
    for name in kind.inputs:
        array = jnp.asarray(arrays[name])
        if array.shape != first.shape or array.dtype != first.dtype:
            raise ValueError(
                f"{name} is {array.dtype} of shape {array.shape}, {kind.inputs[0]} {first.dtype} of shape {first.shape}; "
                "all sequences must have one shape and dtype"
            )
        operands.append(array)
    for name in kind.parameters:
        array = jnp.asarray(arrays[name])
        if array.dtype == "float64" and first.dtype != "float64":
            raise TypeError(
                f"{name} has dtype float64, {kind.inputs[0]} {first.dtype}; they do not mix"
            )
        if array.shape != (channels,):
            raise ValueError(f"{name} has shape {array.shape}; it must be ({channels},)")
        operands.append(array.astype(_compute(first)))
    return operands


def min_gru(gate: Any, hidden: Any, *, activation: Activation = "positive", **options: Any) -> Any:
    """States of minGRU: with z = σ(gate), h[t] = (1 − z)·h[t-1] + z·g(hidden). ``activation`` is ``positive`` or ``identity``, as
    for ``scan_registry.min_gru``; ``options`` are those of ``gated_scan``."""
    return gated_scan(_with_activation("min_gru", activation), gate, hidden, **options)


def min_lstm(
    forget: Any, input: Any, hidden: Any, *, activation: Activation = "positive", **options: Any
) -> Any:
    """States of minLSTM: with f = σ(forget) / (σ(forget) + σ(input)), h[t] = f·h[t-1] + (1 − f)·g(hidden). As ``min_gru``."""
    return gated_scan(_with_activation("min_lstm", activation), forget, input, hidden, **options)


def rg_lru(
    x: Any, recurrence_gate: Any, input_gate: Any, a_param: Any, reset: Any = None, **options: Any
) -> Any:
    """States of RG-LRU, the recurrence of Griffin and RecurrentGemma: with a = exp(−8·σ(recurrence_gate)·softplus(a_param)),
    h[t] = a·h[t-1] + √(1 − a²)·σ(input_gate)·x; where ``reset`` is true, h[t] = σ(input_gate)·x. ``options`` are those of
    ``gated_scan``. The first step of a sequence is no reset unless ``reset`` says so. In the published models it is one."""
    return gated_scan("rg_lru", x, recurrence_gate, input_gate, a_param, reset=reset, **options)


def hgrn(x: Any, forget: Any, lower_bound: Any = None, **options: Any) -> Any:
    """States of HGRN: with f = γ + (1 − γ)·σ(forget), h[t] = f·h[t-1] + (1 − f)·silu(x). γ is ``lower_bound``: an array
    (channels,) of values from 0 to 1, which are not checked, or a number, or None for 0. ``options`` are those of ``gated_scan``."""
    if lower_bound is None or isinstance(lower_bound, (int, float)):
        number = 0.0 if lower_bound is None else float(lower_bound)
        if not 0 <= number <= 1:
            raise ValueError(f"lower_bound is {lower_bound}; accepted are numbers from 0 to 1")
        shape = jnp.shape(x)
        channels = shape[-1 if options.get("dim", -1) in (1, -2) else -2] if len(shape) == 3 else 0
        lower_bound = jnp.full(channels, number, dtype=_compute(jnp.asarray(x)))
    return gated_scan("hgrn", x, forget, lower_bound, **options)


def _with_activation(kind: str, activation: Any) -> str:
    endings = {"positive": "", "identity": "_identity"}
    if activation not in endings:
        raise ValueError(f"activation is {activation!r}; accepted are {', '.join(endings)}")
    return kind + endings[activation]


def _compute(array: Any) -> str:
    """What states are computed in."""
    return "float64" if array.dtype == "float64" else "float32"


# --- The operator -----------------------------------------------------------------------------


class _GatedScan(Operator):
    """Operands: inputs, channel parameters, initial state, reset, cu_seqlens. Results: states, and maybe the final state."""

    result_roles = (FOLD, FOLD)

    def __init__(self, kind: Kind) -> None:
        self.kind, self.count = kind, len(kind.inputs)
        self.end = self.count + len(kind.parameters)
        self.name = f"gated_scan_{kind.name}"
        parameters = (SHARED,) * len(kind.parameters)
        self.roles = (*(FOLD,) * self.count, *parameters, FOLD, FOLD, SHARED)

    def shapes(self, operands: Arrays, options: Options) -> list[Outline]:
        states = outline_of(operands[0])
        return [states, *([self._state(operands, options)] if options.final else [])]

    @staticmethod
    def _state(operands: Arrays, options: Options) -> Outline:
        sequences = packing.sequences_of(operands[-1])
        return state_shape(operands[0].shape, options.dim, sequences), _compute(operands[0])

    def composed(self, operands: Arrays, options: Options) -> list[Any]:
        initial, reset, cu_seqlens = operands[self.end :]
        compute, dim = _compute(operands[0]), options.dim % 3
        of_channels = [p if dim == 1 else p[:, None] for p in operands[self.count : self.end]]
        at = None if reset is None else jnp.expand_dims(reset, 3 - dim)
        inputs = [x.astype(compute) for x in operands[: self.count]]
        gates, tokens = GATES[self.kind.name](at, *inputs, *of_channels)
        if at is not None:
            gates = jnp.where(at, 0, gates)
        gates, tokens = packing.enter(gates, tokens, initial, cu_seqlens, dim, options.reverse)
        maps = gates, tokens
        _, states = lax.associative_scan(compose, maps, reverse=options.reverse, axis=dim)
        results = [states.astype(operands[0].dtype)]
        if options.final:
            results.append(packing.last(states, initial, cu_seqlens, dim, options.reverse))
        return results

    def saved(self, operands: Arrays, results: Arrays) -> tuple[Arrays, Arrays]:
        return operands, (results[0], *(None for _ in results[1:]))

    def run(self, platform: str, operands: Arrays, options: Options) -> list[Any] | None:
        if not self._has_kernels(platform, operands, options):
            return None
        first, (initial, _, cu_seqlens) = operands[0], operands[self.end :]
        of_state = self._state(operands, options)
        outputs = {
            "states": outline_of(first),
            "final_state": of_state if options.final else None,
        }
        starts = {"final_state": packing.leaving(initial, *of_state, cu_seqlens)}
        inputs = self._inputs(operands)
        written = self._call(platform, "forward", inputs, outputs, starts, operands, options)
        return in_order(written, outputs)

    def run_adjoint(
        self,
        platform: str,
        operands: Arrays,
        results: Arrays,
        cotangents: Arrays,
        wanted: Sequence[int],
        options: Options,
    ) -> list[Any] | None:
        if not self._has_kernels(platform, operands, options):
            return None
        first, states = operands[0], results[0]
        of_states, of_final = (*cotangents, None)[:2]
        of_state = self._state(operands, options)
        inputs = {
            **self._inputs(operands),
            "states": states,
            "states_grad": jnp.zeros_like(states) if of_states is None else of_states,
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
def scan_of(kind: str) -> Callable[[Arrays, Options], list[Any]]:
    """The function of operands and options for a kind."""
    return define(_GatedScan(KINDS[kind]))
