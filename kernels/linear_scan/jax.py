"""``linear_scan`` for JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from scan_registry.base.strides import dense_strides
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
    in_order,
    outline_of,
)
from scan_registry.jax.primitives import BROADCAST, FULL, SHARED, Arrays, Operator, Pullback, define
from scan_registry.kernels.linear_scan.op import calls
from scan_registry.kernels.linear_scan.op.layout import KernelCall
from scan_registry.kernels.linear_scan.problem import LinearScanProblem, state_dtype
from scan_registry.kernels.linear_scan.spec import FAMILY, parameters

ACCEPTED = ("float32", "bfloat16", "float16", "float64", "complex64", "complex128")


class Options(NamedTuple):
    """The arguments of a scan that are no arrays. ``dim`` is negative; ``lowest`` is the lowest tier that was allowed."""

    dim: int
    reverse: bool
    final: bool
    backend: Backend
    lowest: Tier


def linear_scan(
    gates: Any,
    tokens: Any,
    initial_state: Any = None,
    *,
    dim: int = -1,
    reverse: bool = False,
    cu_seqlens: Any = None,
    return_final_state: bool = False,
    backend: Backend = "auto",
    axis_name: str | None = None,
) -> Any:
    """States of the linear recurrence x[t] = gates[t] * x[t-1] + tokens[t] along ``dim``.

    A state has the shape of the states without ``dim``; with ``cu_seqlens``, that shape with ``dim`` counting sequences.
    Differentiable in every mode and of any order, under ``jit``, ``vmap`` and ``shard_map``.

    Args:
        gates: broadcasts with ``tokens`` to one shape. A gate that is broadcast is read where it lies.
        tokens: float32, bfloat16, float16, float64 or complex64, on the CPU complex128 too. Gates may be float32 where tokens are
            narrower; other mixes are converted first, without loss. float64 goes with float64 only.
        initial_state: x[-1], or with ``reverse`` x[T]: broadcasts to the state's shape; zero if None.
        dim: the time dimension. Nothing is copied for it: kernels read time that is contiguous, and channels that are.
        reverse: compute x[t] = gates[t] * x[t+1] + tokens[t] instead.
        cu_seqlens: (sequences + 1,), int32 or int64: where sequences that are packed along ``dim`` begin, and where the last one
            ends: 0, …, T. Each starts from its own initial state. Empty ones are allowed. A compiled program cannot check values on
            a GPU: a bound counts as the greatest of 0 and those before it, up to T, and the last one as T.
        return_final_state: return ``(states, final_state)``; the final state is in float32 for narrower tokens.
        axis_name: in ``shard_map``, the axis of the mesh between whose devices time is cut, in their order; not with ``cu_seqlens``.
            ``initial_state`` is the state before the first part, and the final state the one after the last part, alike on all
            devices.
        backend: ``auto``; ``cuda`` or ``triton`` for kernels in that language alone; ``reference`` for operators of JAX.

    Raises:
        TypeError, ValueError: an argument is not accepted; the message says what is.
        NoKernelError: what ``backend`` or ``require`` allows has no kernel for this GPU; raised by what compiles the program.
    """
    array = checks.Parameter(ACCEPTED)
    arrays = checks.as_arrays(
        {
            "gates": gates,
            "tokens": tokens,
            "initial_state": initial_state,
            "cu_seqlens": cu_seqlens,
        },
        {
            "gates": replace(array, optional=False),
            "tokens": replace(array, optional=False),
            "initial_state": array,
            "cu_seqlens": checks.CU_SEQLENS,
        },
    )
    gates, tokens, initial_state, cu_seqlens = arrays.values()
    try:
        shape = jnp.broadcast_shapes(gates.shape, tokens.shape)
    except ValueError as error:
        raise ValueError(
            f"gates have shape {gates.shape}, tokens {tokens.shape}; they must broadcast to one shape"
        ) from error
    if not shape:
        raise ValueError("gates and tokens are scalars; they need a time dimension")
    options = Options(
        checks.check_dim(dim, len(shape)),
        checks.check_bool("reverse", reverse),
        *checks.check_common(return_final_state, backend),
    )
    of_gates, of_tokens = _kernel_dtypes(str(gates.dtype), str(tokens.dtype))
    gates = gates.reshape((*(1,) * (len(shape) - gates.ndim), *gates.shape)).astype(of_gates)
    tokens = jnp.broadcast_to(tokens.astype(of_tokens), shape)
    sequences = checks.check_cu_seqlens(cu_seqlens, shape[options.dim])
    if initial_state is not None:
        of_state = state_shape(shape, options.dim, sequences)
        checks.check_shape("initial_state", initial_state, of_state)
        checks.check_precision({"tokens": tokens, "initial_state": initial_state}, "tokens")
        if jnp.iscomplexobj(initial_state) and not jnp.iscomplexobj(tokens):
            raise TypeError(f"initial_state is complex, the states are {of_tokens}")
        initial_state = jnp.broadcast_to(initial_state.astype(state_dtype_of(of_tokens)), of_state)
    if axis_name is not None:
        checks.check_axis(axis_name, cu_seqlens, shape[options.dim])
        from scan_registry.kernels.linear_scan.jax_sharded import scan_over

        results = scan_over(gates, tokens, initial_state, axis_name, options)
    else:
        results = scan((gates, tokens, initial_state, cu_seqlens), options)
    return tuple(results) if return_final_state else results[0]


def _kernel_dtypes(gates: str, tokens: str) -> tuple[str, str]:
    """What gates and tokens have to be converted to, without loss, for a kernel to take them."""
    if (gates in checks.WIDE) != (tokens in checks.WIDE):
        raise TypeError(
            f"gates have dtype {gates}, tokens {tokens}; float64 does not mix with narrower dtypes"
        )
    states = gates if gates.startswith("complex") and not tokens.startswith("complex") else tokens
    if gates == states or (states in checks.NARROW and gates == "float32"):
        return gates, states
    return ("float32" if states in checks.NARROW else states), states


def state_dtype_of(dtype: str) -> str:
    """The dtype that states are computed in, and of a final state."""
    return dtype if dtype == "complex128" else state_dtype(dtype)


def state_shape(shape: Sequence[int], dim: int, sequences: int | None) -> tuple[int, ...]:
    """Shape of the states before and after the scan."""
    dim %= len(shape)
    between = () if sequences is None else (sequences,)
    return (*shape[:dim], *between, *shape[dim + 1 :])


def facts_of(array: Any, platform: str) -> TensorFacts:
    """What is known of an array on a platform, where it lies without gaps."""
    return TensorFacts.dense(*outline_of(array), platform)


def kernel_call(
    direction: Any,
    gates: Outline,
    states: Outline,
    sequences: int | None,
    options: Options,
    platform: str,
    has_states: bool,
) -> KernelCall:
    """What the forward or the backward pass poses to a kernel."""
    names = ("tokens",) if direction == "forward" else ("states", "states_grad")
    of_states = TensorFacts.dense(*states, platform)
    return calls.make_kernel_call(
        direction,
        TensorFacts.dense(*gates, platform),
        dict.fromkeys(names, of_states),
        dense_strides(of_states.shape),
        sequences,
        options.dim,
        options.reverse,
        has_states,
    )


class _LinearScan(Operator):
    """Operands: gates, tokens, initial state, cu_seqlens. Results: states, and maybe the final state."""

    name = "linear_scan"
    roles = (BROADCAST, FULL, FULL, SHARED)
    result_roles = (FULL, FULL)

    def outlines(self, operands: Arrays, options: Options) -> dict[str, Outline | None]:
        tokens = outline_of(operands[1])
        of_state = self._state(tokens, operands[3], options)
        return {"states": tokens, "final_state": of_state if options.final else None}

    def bounds(self, groups: Sequence[Arrays], options: Options) -> tuple[int, int] | None:
        # Derivatives have no tokens, but states, or their cotangents.
        like_states = (groups[0][1], *(group[0] for group in groups[1:]))
        return 3, next(a for a in like_states if a is not None).shape[options.dim]

    @staticmethod
    def _state(tokens: Outline, cu_seqlens: Any, options: Options) -> Outline:
        shape, dtype = tokens
        sequences = packing.sequences_of(cu_seqlens)
        return state_shape(shape, options.dim, sequences), state_dtype_of(dtype)

    def run(self, platform: str, operands: Arrays, options: Options) -> list[Any] | None:
        gates, tokens, initial, cu_seqlens = operands
        of_state = self._state(outline_of(tokens), cu_seqlens, options)
        if tokens.size == 0:
            final = jnp.zeros(*of_state) if initial is None else initial
            return [jnp.zeros_like(tokens), *([final] if options.final else [])]
        if options.backend == "reference":
            return None
        sequences = packing.sequences_of(cu_seqlens)
        how = sequences, options, platform, initial is not None or options.final
        call = kernel_call("forward", outline_of(gates), outline_of(tokens), *how)
        inputs = {
            "gates": written_gates(gates, tokens, call),
            "tokens": tokens,
            "initial_state": initial,
            "offsets": None if cu_seqlens is None else checks.as_int64(cu_seqlens),
        }
        outputs = self.outlines(operands, options)
        starts = {"final_state": packing.leaving(initial, *of_state, cu_seqlens)}
        written = _call(platform, call.problem, inputs, outputs, starts, options)
        return in_order(written, outputs)

    def composed(self, operands: Arrays, options: Options) -> list[Any]:
        gates, tokens, initial, cu_seqlens = operands
        compute = state_dtype_of(str(tokens.dtype))
        dim = options.dim % tokens.ndim
        wide = jnp.broadcast_to(gates.astype(compute), tokens.shape)
        wide, added = packing.enter(
            wide, tokens.astype(compute), initial, cu_seqlens, dim, options.reverse
        )
        # A sequence begins with a gate of 0, which has to stop what is infinite in the one before it.
        compose = _compose if cu_seqlens is None else packing.compose
        _, states = lax.associative_scan(compose, (wide, added), reverse=options.reverse, axis=dim)
        results = [states.astype(tokens.dtype)]
        if options.final:
            results.append(packing.last(states, initial, cu_seqlens, dim, options.reverse))
        return results

    def saved(self, operands: Arrays, results: Arrays) -> tuple[Arrays, Arrays]:
        gates, _, initial, cu_seqlens = operands
        return (gates, None, initial, cu_seqlens), (results[0], *(None for _ in results[1:]))

    def tangent(
        self, operands: Arrays, results: Arrays, tangents: Arrays, options: Options
    ) -> list[Any]:
        gates, _, initial, cu_seqlens = operands
        of_gates, of_tokens, of_initial, _ = tangents
        states = results[0]
        added = jnp.zeros_like(states) if of_tokens is None else of_tokens
        if of_gates is not None:
            before = preceding(states, initial, cu_seqlens, options)
            added = (added + of_gates * before).astype(states.dtype)
        return scan((gates, added, of_initial, cu_seqlens), options)

    def adjoint(self, of: Pullback, options: Options) -> list[Any]:
        gates, _, initial, cu_seqlens = of.operands
        states, of_states, of_final = self._states(of)
        dim = options.dim % states.ndim
        compute = state_dtype_of(str(states.dtype))
        broadcast = jnp.broadcast_to(gates.astype(compute), states.shape)
        first = (broadcast, cu_seqlens, dim, options.reverse)
        # The adjoint is a scan the other way: each step takes the gate of the step after it in the scan's order.
        later = packing.following(*first)
        back = options._replace(reverse=not options.reverse, final=False)
        (adjoint,) = scan((later, of_states.astype(compute), of_final, cu_seqlens), back)

        def of_gates() -> Any:
            before = preceding(states, initial, cu_seqlens, options)
            return _sum_to(adjoint * before, gates.shape).astype(gates.dtype)

        gradients: dict[int, Callable[[], Any]] = {
            0: of_gates,
            1: lambda: adjoint.astype(states.dtype),
            2: lambda: packing.first_products(
                broadcast, adjoint, of_final, cu_seqlens, dim, options.reverse
            ),
        }
        return [gradients[i]() for i in of.wanted]

    @staticmethod
    def _states(of: Pullback) -> tuple[Any, Any, Any]:
        """The states, or what has their shape, and the cotangents of the states and of the final state."""
        of_states, of_final = of.cotangents_like(of.results[0])
        return of_states if of.results[0] is None else of.results[0], of_states, of_final

    def run_adjoint(self, platform: str, of: Pullback, options: Options) -> list[Any] | None:
        gates, _, initial, cu_seqlens = of.operands
        states, of_states, of_final = self._states(of)
        if states.size == 0 or options.backend == "reference":
            return None
        if jnp.iscomplexobj(states):  # kernels conjugate factors, and JAX does not
            of_states, of_final = _conjugate(of_states), _conjugate(of_final)
        sequences = packing.sequences_of(cu_seqlens)
        names = ("gates_grad", "tokens_grad", "initial_state_grad")
        outputs_of = {names[i] for i in of.wanted}
        has_states = names[2] in outputs_of or initial is not None or of_final is not None
        how = sequences, options, platform, has_states
        call = kernel_call("backward", outline_of(gates), outline_of(states), *how)
        reduction = None
        if "gates_grad" in outputs_of and gates.shape != states.shape:
            facts = [facts_of(array, platform) for array in (gates, states)]
            reduction = calls.make_reduction_call(
                facts[0], facts[1], sequences, options.dim, options.reverse
            )
        if reduction is not None:  # reads the tokens' gradient
            outputs_of = outputs_of - {"gates_grad"} | {"tokens_grad"}
        inputs = {
            "gates": written_gates(gates, states, call),
            "states": states if "gates_grad" in outputs_of else None,
            "states_grad": of_states,
            "initial_state": initial,
            "final_state_grad": of_final,
            "offsets": None if cu_seqlens is None else checks.as_int64(cu_seqlens),
        }
        of_state = self._state(outline_of(states), cu_seqlens, options)
        outlines = (states.shape, str(gates.dtype)), outline_of(states), of_state
        pairs = zip(names, outlines, strict=True)
        outputs = {name: outline if name in outputs_of else None for name, outline in pairs}
        starts = {"initial_state_grad": packing.leaving(of_final, *of_state, cu_seqlens)}
        written = _call(platform, call.problem, inputs, outputs, starts, options)
        if written is None:
            return None
        if reduction is not None:
            inputs |= {"states": states, "tokens_grad": written["tokens_grad"]}
            sums = _reduce(platform, reduction.problem, gates, inputs, options)
            if sums is None:
                return None
            written["gates_grad"] = sums
        elif "gates_grad" in outputs_of:
            written["gates_grad"] = _sum_to(written["gates_grad"], gates.shape)
        gradients = [written[names[i]] for i in of.wanted]
        return [*map(_conjugate, gradients)] if jnp.iscomplexobj(states) else gradients


def _reduce(
    platform: str, problem: LinearScanProblem, gates: Any, inputs: Any, options: Options
) -> Any | None:
    """The gradient of gates that steps or channels share; None if no kernel runs on this GPU."""
    shape = problem.reduction().pieces, *gates.shape
    outputs = {"gates_grad": (shape, state_dtype_of(str(inputs["states"].dtype)))}
    sums = _call(platform, problem, inputs, outputs, {}, options)
    return None if sums is None else sums["gates_grad"].sum(0).astype(gates.dtype)


def _call(
    platform: str,
    problem: LinearScanProblem,
    inputs: Any,
    outputs: Any,
    starts: Any,
    options: Options,
) -> dict[str, Any] | None:
    """What the kernel of a problem writes; None if none runs on this GPU."""
    if platform != "cpu":
        kernel = Selection(FAMILY, problem, options.backend, options.lowest)
        return call_on_gpu(kernel, inputs, lambda scalars: outputs, starts)
    scalars, of = problem.scalars(), parameters(problem.direction)
    function = CpuFunction(
        problem.direction,
        tuple(p.name for p in of if p.kind == "pointer"),
        (problem.dtype, problem.gates_dtype),
        tuple(scalars[p.name] for p in of if p.kind == "i64"),
        (problem.layout,) if problem.direction == "reduction" else (),
        Selection(FAMILY, problem, options.backend, options.lowest),
    )
    return call_on_cpu(function, inputs, outputs, starts)


def _compose(first: Any, second: Any) -> Any:
    """Of two affine maps, the first of which is applied first."""
    return first[0] * second[0], second[0] * first[1] + second[1]


def written_gates(gates: Any, states: Any, call: KernelCall) -> Any:
    """Gates in the shape in which the kernel reads them."""
    if call.gates_shape is not None:
        gates = jnp.broadcast_to(gates, call.gates_shape)
    return jnp.broadcast_to(gates, states.shape) if "gates" in call.copied else gates


def preceding(states: Any, initial: Any, cu_seqlens: Any, options: Options) -> Any:
    """The state before each step, in the dtype of the computation."""
    wide = states.astype(state_dtype_of(str(states.dtype)))
    return packing.preceding(wide, initial, cu_seqlens, options.dim % states.ndim, options.reverse)


def _sum_to(array: Any, shape: tuple[int, ...]) -> Any:
    """The array summed over the dimensions along which ``shape`` has size 1."""
    pairs = enumerate(zip(array.shape, shape, strict=True))
    summed = tuple(d for d, (size, wanted) in pairs if wanted == 1 and size != 1)
    wide = array.sum(summed, keepdims=True, dtype=state_dtype_of(str(array.dtype)))
    return wide.astype(array.dtype)


def _conjugate(array: Any) -> Any:
    return None if array is None else jnp.conj(array)


scan = define(_LinearScan())
