"""How a scan runs: the forward pass, and the backward pass with the sum over broadcast gates.

A call with shapes, strides and dtypes seen before costs one dictionary look-up before the launch: the
selection and the integer parameters are in the plan that it finds. Arguments are as ``normalised``
makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scan_registry.dispatch import policy
from scan_registry.dispatch.fit import Tier
from scan_registry.dispatch.select import Decision, NoKernelError
from scan_registry.hardware._launcher import FastLaunch
from scan_registry.kernels.linear_scan import reference
from scan_registry.kernels.linear_scan.gates_sum import GatesSumProblem
from scan_registry.kernels.linear_scan.op.arguments import Options
from scan_registry.kernels.linear_scan.op.layout import KernelCall
from scan_registry.kernels.linear_scan.op.problems import (
    StateLayout,
    for_channels,
    make_kernel_call,
    make_reduction_call,
    make_summary_call,
)
from scan_registry.kernels.linear_scan.op.totals import plan_total
from scan_registry.kernels.linear_scan.problem import LinearScanProblem
from scan_registry.kernels.linear_scan.spec import FAMILY, parameters
from scan_registry.ops import _cpu
from scan_registry.ops.call import launch_from_c
from scan_registry.ops.checks import common_shape
from scan_registry.ops.launching import Run, plan_cache
from scan_registry.ops.strides import as_new
from scan_registry.runtime.loader import prepare, run_reference

Wanted = tuple[bool, bool, bool]  # the gradients of gates, tokens and initial_state

POINTERS = {
    direction: [p.name for p in parameters(direction) if p.kind == "pointer"]
    for direction in ("forward", "backward", "reduction", "summary")
}


def on_gpu(tensor: Tensor) -> bool:
    """Whether a launch from C can compute with the tensor."""
    return tensor.is_cuda


# --- Running one kernel -----------------------------------------------------------------------


def runner(
    problem: LinearScanProblem,
    device: torch.device,
    backend: Any,
) -> Run | Decision:
    """A function that runs the best kernel for the problem; where only the reference solves it, the decision that says so."""
    names = POINTERS[problem.direction]
    if device.type == "cpu":
        kernel, scalars = getattr(_cpu, problem.direction), problem.scalars()
        numbers = tuple(scalars[p.name] for p in parameters(problem.direction) if p.kind == "i64")
        layout = (problem.layout,) if problem.direction == "reduction" else ()

        def run_here(tensors: Mapping[str, Tensor | None]) -> None:
            pointed = [tensors.get(name) for name in names]
            pointers = tuple([None if tensor is None else tensor.data_ptr() for tensor in pointed])
            threads = torch.get_num_threads()
            kernel(problem.dtype, problem.gates_dtype, pointers, numbers, threads, *layout)

        return run_here

    plan = prepare(device.index, FAMILY, problem, backend, policy.lowest())
    return plan.decision if plan.launch is None else plan.run


def _copied(tensors: dict[str, Tensor], names: Sequence[str], model: Tensor) -> dict[str, Tensor]:
    """The tensors, those named copied into the memory layout of ``model`` without its gaps."""
    copies = {
        name: torch.empty_like(model, dtype=tensors[name].dtype).copy_(tensors[name])
        for name in names
    }
    return tensors | copies


def _check(gates: Tensor, alike: Sequence[Tensor], cu_seqlens: Tensor | None) -> None:
    """The operator itself may be called with anything, and kernels read what they are given. ``alike``
    are to be of one shape, to which the gates broadcast, and one dtype."""
    first, *others = alike
    for other in others:
        if other.shape != first.shape or other.dtype != first.dtype:
            raise ValueError(
                f"the operator's tensors have shapes {tuple(first.shape)} and {tuple(other.shape)} "
                f"and dtypes {first.dtype} and {other.dtype}; both must be equal"
            )
    if common_shape(gates.shape, first.shape) != tuple(first.shape):
        raise ValueError(
            f"gates of shape {tuple(gates.shape)} do not broadcast to {tuple(first.shape)}"
        )
    for tensor in (gates, *others, *(() if cu_seqlens is None else (cu_seqlens,))):
        if tensor.device != first.device:
            raise ValueError(
                f"the operator's tensors are on {first.device} and {tensor.device}; they must be on "
                "one device"
            )
    if cu_seqlens is not None and (
        cu_seqlens.dtype != torch.int64 or cu_seqlens.dim() != 1 or not cu_seqlens.is_contiguous()
    ):
        raise TypeError(
            f"cu_seqlens has dtype {cu_seqlens.dtype} and shape {tuple(cu_seqlens.shape)}; the "
            "operator takes int64 of one dimension, without gaps"
        )


# --- Forward ----------------------------------------------------------------------------------


def forward(
    gates: Tensor,
    tokens: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor | None]:
    """States, and the final state if ``options`` asks for it."""
    tensors = gates, tokens, initial_state, cu_seqlens
    outputs: tuple[Tensor, Tensor | None] = plan_cache.run(plan_forward, tensors, options)
    return outputs


def plan_forward(
    gates: Tensor, tokens: Tensor, initial: Any, cu_seqlens: Tensor | None, options: Options
) -> Callable[..., Any]:
    """The plan of ``forward``: a function of its tensors."""
    dim, reverse, final = options.dim, options.reverse, options.final
    _check(gates, [tokens], cu_seqlens)
    device = tokens.device
    layout = StateLayout.of(tokens, dim, cu_seqlens)

    def by_reference(gates: Tensor, tokens: Tensor, initial: Any, cu_seqlens: Any) -> Any:
        states, final_state = reference.forward(
            gates, tokens, initial, dim=dim, reverse=reverse, cu_seqlens=cu_seqlens
        )
        return states, layout.entering(final_state) if final else None

    if tokens.numel() == 0:

        def nothing(gates: Tensor, tokens: Tensor, initial: Any, cu_seqlens: Any) -> Any:
            return torch.empty_like(tokens), layout.unchanged(initial) if final else None

        return nothing
    if options.backend == "reference":
        return by_reference
    how = cu_seqlens, dim, reverse, initial is not None or final
    call = make_kernel_call("forward", gates, {"tokens": tokens}, *how)
    run = runner(call.problem, device, options.backend)
    if not callable(run):
        decision = run
        return lambda *inputs: run_reference(decision, lambda: by_reference(*inputs))

    def plan(gates: Tensor, tokens: Tensor, initial: Any, cu_seqlens: Any) -> Any:
        states = torch.empty_like(tokens)
        entering = layout.entering(initial)
        final_state = layout.leaving(entering) if final else None
        gates = for_channels(gates, tokens, call.gates_shape)
        inputs = {"gates": gates, "tokens": tokens}
        if call.copied:
            inputs = _copied({**inputs, "gates": gates.expand(tokens.shape)}, call.copied, tokens)
        others = {"initial_state": entering, "final_state": final_state, "offsets": cu_seqlens}
        run({**inputs, **others, "states": states})
        return states, final_state

    return plan


def plan_launch(
    tensors: Sequence[Any],
    options: Options,
    elsewhere: Callable[..., Any],
    record: Callable[..., Any] | None = None,
    recording: object = None,
) -> FastLaunch | None:
    """The forward pass as C makes it by itself; None if Python has to take part. The last arguments are those of
    ``FastLaunch``."""
    gates, tokens, initial_state, cu_seqlens = tensors
    if not on_gpu(tokens) or options.backend == "reference" or tokens.numel() == 0:
        return None
    how = cu_seqlens, options.dim, options.reverse, initial_state is not None or options.final
    call = make_kernel_call("forward", gates, {"tokens": tokens}, *how)
    layout = StateLayout.of(tokens, options.dim, cu_seqlens)
    if (
        call.copied
        or call.gates_shape
        or not (initial_state is None or layout.holds(initial_state))
    ):
        return None
    if options.final and cu_seqlens is not None:
        return None  # Python first copies initial states, which are the final ones of sequences without steps
    backend: Any = options.backend
    plan = prepare(tokens.device.index, FAMILY, call.problem, backend, policy.lowest())
    if plan.launch is None:
        return None
    names, states = ["gates", "tokens", "initial_state", "offsets", "states"], as_new(tokens)
    results = [(tuple(states.shape), states.stride(), states.dtype)]
    if options.final:
        names.append("final_state")
        results.append((layout.shape, layout.strides, layout.dtype))
    places = [POINTERS["forward"].index(name) for name in names]
    return launch_from_c(plan, places, results, elsewhere, record, recording)


# --- Summary ----------------------------------------------------------------------------------


def summary(gates: Tensor, tokens: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """The product of the gates, and the final state from a state of zero."""
    outputs: tuple[Tensor, Tensor] = plan_cache.run(_plan_summary, (gates, tokens), options)
    return outputs


def summary_on_cpu(gates: Tensor, tokens: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """By the compiled scan, whose states are dropped."""
    _, final_state = forward(gates, tokens, None, None, options._replace(final=True))
    assert final_state is not None
    return reference.product(gates, tokens, options.dim), final_state


def _plan_summary(gates: Tensor, tokens: Tensor, options: Options) -> Callable[..., Any]:
    dim, reverse = options.dim, options.reverse
    _check(gates, [tokens], None)
    layout = StateLayout.of(tokens, dim, None)

    def by_reference(gates: Tensor, tokens: Tensor) -> Any:
        summary = reference.summary(gates, tokens, dim=dim, reverse=reverse)
        return tuple(layout.entering(part) for part in summary)

    def on_cpu(gates: Tensor, tokens: Tensor) -> Any:
        return tuple(layout.entering(part) for part in summary_on_cpu(gates, tokens, options))

    if tokens.numel() == 0:
        return lambda *_: (layout.empty().fill_(1), layout.empty().zero_())
    if options.backend == "reference":
        return by_reference
    if tokens.device.type == "cpu":
        return on_cpu
    call = make_summary_call(gates, tokens, dim, reverse)
    run = runner(call.problem, tokens.device, options.backend)
    if not callable(run):
        decision = run
        return lambda *inputs: run_reference(decision, lambda: by_reference(*inputs))

    def plan(gates: Tensor, tokens: Tensor) -> Any:
        final_gate, final_state = layout.empty(), layout.empty()
        gates = for_channels(gates, tokens, call.gates_shape)
        inputs = {"gates": gates, "tokens": tokens}
        if call.copied:
            inputs = _copied({**inputs, "gates": gates.expand(tokens.shape)}, call.copied, tokens)
        run({**inputs, "final_gate": final_gate, "final_state": final_state})
        return final_gate, final_state

    return plan


# --- Backward ---------------------------------------------------------------------------------


def backward(
    gates: Tensor,
    states: Tensor | None,
    states_grad: Tensor,
    initial_state: Tensor | None,
    final_state_grad: Tensor | None,
    cu_seqlens: Tensor | None,
    options: Options,
    wanted: Wanted,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients that are wanted, of gates (in their own shape), tokens and the initial state.
    ``states`` are needed only for that of gates."""
    tensors = gates, states, initial_state, cu_seqlens, states_grad, final_state_grad
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None]
    gradients = plan_cache.run(plan_backward, tensors, options, wanted)
    return gradients


def plan_backward(
    gates: Tensor,
    states: Tensor | None,
    initial_state: Any,
    cu_seqlens: Tensor | None,
    states_grad: Tensor,
    final_state_grad: Any,
    options: Options,
    wanted: Wanted,
) -> Callable[..., Any]:
    """The plan of the backward pass: a function of these tensors."""
    dim, reverse = options.dim, options.reverse
    _check(gates, [states_grad] if states is None else [states, states_grad], cu_seqlens)
    device = gates.device
    for_gates, for_tokens, for_initial = wanted
    model = states_grad if states is None else states
    layout = StateLayout.of(model, dim, cu_seqlens)

    def by_reference(
        gates: Tensor, states: Any, initial: Any, cu_seqlens: Any, grad: Tensor, last_grad: Any
    ) -> Any:
        known = torch.zeros_like(grad) if states is None else states
        of_gates, of_tokens, leaving = reference.backward(
            gates, known, grad, initial, last_grad, dim=dim, reverse=reverse, cu_seqlens=cu_seqlens
        )
        grads = of_gates, of_tokens, layout.entering(leaving)
        return tuple(grad if want else None for grad, want in zip(grads, wanted, strict=True))

    if model.numel() == 0:

        def nothing(gates: Any, states: Any, initial: Any, _: Any, grad: Any, last: Any) -> Any:
            return (
                gates.new_zeros(gates.shape) if for_gates else None,
                torch.empty_like(grad) if for_tokens else None,
                layout.unchanged(last) if for_initial else None,
            )

        return nothing
    if options.backend == "reference":
        return by_reference
    others = {"states": model, "states_grad": states_grad}
    has_states = for_initial or initial_state is not None or final_state_grad is not None
    call = make_kernel_call("backward", gates, others, cu_seqlens, dim, reverse, has_states)
    # Whether or not the gates' gradient is wanted, so that the others are the same to the bit.
    broadcast = gates.shape != model.shape
    summing, pieces = _plan_sums(call, device, options.backend)
    run = summing or runner(call.problem, device, options.backend)
    if not callable(run):
        decision = run
        return lambda *inputs: run_reference(decision, lambda: by_reference(*inputs))
    reduced = for_gates and broadcast and summing is None
    reduce = _plan_reduction(gates, model, cu_seqlens, options) if reduced else None
    kernels = None if device.type == "cpu" else partial(_total_runner, device, options.backend)
    total = plan_total(gates, layout, pieces, dim, kernels) if for_gates and summing else None

    def plan(
        gates: Tensor, states: Any, initial: Any, cu_seqlens: Any, grad: Tensor, last_grad: Any
    ) -> Any:
        model = grad if states is None else states
        initial, entering = layout.entering(initial), layout.entering(last_grad)
        leaving = layout.leaving(entering) if for_initial else None
        gates_grad = tokens_grad = None
        if for_gates and summing is not None:
            gates_grad = layout.sums(pieces)
        elif for_gates and reduce is None:
            gates_grad = torch.empty_like(model, dtype=gates.dtype)
        if for_tokens or reduce is not None:
            tokens_grad = torch.empty_like(model)
        read = for_channels(gates, model, call.gates_shape)
        inputs = {"gates": read, "states": model, "states_grad": grad}
        if call.copied:
            inputs = _copied({**inputs, "gates": read.expand(model.shape)}, call.copied, model)
        run(
            {
                **inputs,
                "states": None if gates_grad is None else inputs["states"],
                "initial_state": initial,
                "final_state_grad": entering,
                "gates_grad": gates_grad,
                "tokens_grad": tokens_grad,
                "initial_state_grad": leaving,
                "offsets": cu_seqlens,
            }
        )
        if total is not None and gates_grad is not None:
            gates_grad = total(gates_grad)
        elif reduce is not None:
            gates_grad = reduce(gates, model, tokens_grad, initial, cu_seqlens)
        elif gates_grad is not None and broadcast:
            gates_grad = gates_grad.sum_to_size(gates.shape).contiguous()
        return gates_grad, tokens_grad if for_tokens else None, leaving

    return plan


def _total_runner(device: torch.device, backend: Any, problem: GatesSumProblem) -> Any:
    lowest = min(Tier.PTX, policy.lowest())
    return prepare(device.index, FAMILY, problem, backend, lowest).run


def _plan_sums(call: KernelCall, device: torch.device, backend: Any) -> tuple[Run | None, int]:
    """How the backward kernel itself sums up the gradient of gates that do not change with time, and how many sums it
    leaves for each state; None and 0 if no kernel that is there already does."""
    problem = call.fused()
    if problem is None or device.type == "cpu":
        return None, 0
    lowest = min(Tier.PTX, policy.lowest())
    try:
        plan = prepare(device.index, FAMILY, problem, backend, lowest)
    except NoKernelError:
        return None, 0
    shape = plan.decision.launch()
    if plan.launch is None or shape is None:
        return None, 0
    return plan.run, shape.pieces or problem.sum_pieces()


def _plan_reduction(
    gates: Tensor, states: Tensor, cu_seqlens: Tensor | None, options: Options
) -> Callable[..., Any] | None:
    """How broadcast gates get their gradient without one for every element; None if they cannot."""
    dense = as_new(states).stride() == states.stride()
    call = make_reduction_call(gates, states, cu_seqlens, options.dim, options.reverse)
    if call is None or not dense:
        return None
    problem = call.problem
    run = runner(problem, states.device, options.backend)
    if not callable(run):
        return None
    dtype, pieces = reference.compute_dtype(states.dtype), problem.reduction().pieces

    def plan(gates: Tensor, states: Tensor, tokens_grad: Any, initial: Any, cu_seqlens: Any) -> Any:
        partial = torch.empty((pieces, *gates.shape), dtype=dtype, device=states.device)
        inputs = {"tokens_grad": tokens_grad, "states": states, "initial_state": initial}
        run({**inputs, "gates_grad": partial, "offsets": cu_seqlens})
        return (partial.sum(0) if pieces > 1 else partial[0]).to(gates.dtype)

    return plan
