"""How a gated scan runs, forward and backward: by a kernel, by compiled code for the CPU, or composed of torch's operators.
Arguments are as ``normalised`` makes them.

Autograd records nothing here: ``gated_scan_derivatives`` calls both passes with derivatives switched off. The kernel for calls
that agree in shapes, strides and dtypes is selected once, and kept in a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scan_registry.dispatch import policy
from scan_registry.dispatch.select import Decision
from scan_registry.kernels import family
from scan_registry.kernels.gated_scan.op import composed, cpu
from scan_registry.kernels.gated_scan.op.arguments import Arguments, Options, check_operator
from scan_registry.kernels.gated_scan.op.calls import KernelCall
from scan_registry.kernels.gated_scan.op.problems import (
    aligned_reset,
    has_kernels,
    is_linear,
    make_call,
    reset_is_dense,
)
from scan_registry.kernels.gated_scan.problem import GatedScanProblem
from scan_registry.kernels.linear_scan.op import plans as linear_plans
from scan_registry.kernels.linear_scan.op.arguments import Options as LinearOptions
from scan_registry.kernels.linear_scan.op.problems import StateLayout
from scan_registry.ops.launching import Run, addresses_of, allocator, plan_cache
from scan_registry.runtime.loader import prepare, run_reference

FAMILY_NAME = "gated_scan"
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality

Outputs = tuple[Tensor, Tensor | None]
Gradients = tuple[Tensor | None, ...]
#: A function of ``Arguments.flat``; in backward passes also of the states, their gradient and the final state's gradient.
Plan = Callable[..., Any]


def on_gpu(tensor: Tensor) -> bool:
    """Whether the tensor is where kernels run."""
    return bool(tensor.is_cuda)


def _in_torch(arguments: Arguments, options: Options) -> bool:
    """Whether torch's operators compute it, by the backend, the device or the dtype."""
    return (
        not on_gpu(arguments.inputs[0])
        or options.backend == "reference"
        or not has_kernels(arguments, options)
    )


def _prepared(
    problem: GatedScanProblem, device: torch.device, backend: Any
) -> tuple[Run, int] | Decision:
    """How to run the best kernel, and how many partial sums of channel parameters' gradients it writes. Or the decision, if no
    kernel fits."""
    plan = prepare(device.index, family(FAMILY_NAME), problem, backend, policy.lowest())
    launch = plan.decision.launch()
    if plan.launch is None or launch is None:
        return plan.decision
    return plan.run, launch.scalars.get("parts", 0)


# --- What both passes share -------------------------------------------------------------------


def _copies(call: KernelCall) -> Callable[[dict[str, Any]], None] | None:
    """A function that replaces tensors by copies with the strides that the kernel needs; None if none has to be copied. It
    changes a dictionary from the names of the kernels' pointers to tensors."""
    if not call.copied:
        return None
    strides = {n: call.inputs if n.startswith("input") else call.dense for n in call.copied}

    def copy(tensors: dict[str, Any]) -> None:
        for name, like in strides.items():
            old = tensors[name]
            new = torch.empty_strided(old.shape, like, dtype=old.dtype, device=old.device)
            tensors[name] = new.copy_(old)

    return copy


def _named(
    model: Arguments, call: KernelCall
) -> Callable[[Sequence[Any], StateLayout], dict[str, Any]]:
    """A function from ``Arguments.flat`` of calls like ``model`` to a dictionary from the names of the kernels' pointers to
    tensors."""
    count, end = len(model.inputs), len(model.inputs) + len(model.parameters)
    names = [f"input{n}" for n in range(count)]
    several, dense_reset = end - count > 1, reset_is_dense(model.reset)

    def named(flat: Sequence[Any], layout: StateLayout) -> dict[str, Any]:
        tensors = dict(zip(names, flat, strict=False))
        initial, reset, cu_seqlens = flat[end:]
        if several:
            tensors["parameters"] = torch.stack(flat[count:end])  # type: ignore[arg-type]
        elif count < end:
            tensors["parameters"] = flat[count].contiguous()
        tensors["reset"] = reset if dense_reset else reset.contiguous()
        tensors["initial_state"] = layout.entering(initial)
        tensors["offsets"] = cu_seqlens
        return tensors

    return named


# --- Forward ----------------------------------------------------------------------------------


def forward(arguments: Arguments, options: Options) -> Outputs:
    """The states, with the strides of a new tensor like the first input; and if asked for the final state, with the strides
    of ``StateLayout``."""
    if arguments.reset is not None:
        arguments = aligned_reset(arguments)
    outputs: Outputs = plan_cache.run(make_forward, arguments.flat, options)
    return outputs


def make_forward(*args: Any) -> Plan:
    """The plan of ``forward``, from ``Arguments.flat`` and options."""
    *flat, options = args
    arguments = Arguments.of(options.kind, flat)
    check_operator(arguments, options.dim, {}, None)

    def in_torch(*flat: Any) -> Outputs:
        arguments = Arguments.of(options.kind, flat)
        with torch.no_grad():
            states, final_state = composed.forward(arguments, options)
        return as_allotted(arguments, options, states, final_state)

    if is_linear(arguments, options):
        return _forward_of_linear(arguments, options)
    if not on_gpu(arguments.inputs[0]) and cpu.takes(arguments, options):
        return cpu.plan_forward(arguments, options)
    if _in_torch(arguments, options):
        return in_torch
    plan = plan_forward(arguments, options, addresses_of(flat))
    if isinstance(plan, Decision):
        return partial(run_reference, plan, in_torch)
    return plan


def plan_forward(arguments: Arguments, options: Options, addresses: int) -> Plan | Decision:
    """The plan by which a kernel computes the states, and if asked for the final state. Or the decision, if no kernel fits."""
    first, device = arguments.inputs[0], arguments.inputs[0].device
    call = make_call("forward", arguments, options, addresses)
    prepared = _prepared(call.problem, device, options.backend)
    if isinstance(prepared, Decision):
        return prepared
    run, final, direct = prepared[0], options.final, call.direct
    named, copy = _named(arguments, call), _copies(call)
    layout = StateLayout.of(first, options.dim, arguments.cu_seqlens)
    new_states = allocator(device, first.shape, first.dtype, call.dense)

    def plan(*flat: Any) -> Outputs:
        tensors = named(flat, layout)
        if copy is not None:
            copy(tensors)
        states = tensors["states"] = new_states()
        final_state = layout.leaving(tensors["initial_state"]) if final else None
        tensors["final_state"] = final_state
        run(tensors)
        return states if direct else torch.empty_like(flat[0]).copy_(states), final_state

    return plan


def _forward_of_linear(arguments: Arguments, options: Options) -> Plan:
    """``linear_scan`` gives states the strides of the tokens. ``gated_scan`` promises those of its first input, the gates."""
    how, layout = (
        _linear_options(options),
        StateLayout.of(arguments.inputs[0], options.dim, arguments.cu_seqlens),
    )

    def plan(gates: Tensor, tokens: Tensor, initial: Any, _: Any, cu_seqlens: Any) -> Outputs:
        states, final_state = linear_plans.forward(gates, tokens, initial, cu_seqlens, how)
        promised = torch.empty_like(gates, device="meta").stride()
        if states.stride() != promised:
            states = torch.empty_like(gates).copy_(states)
        return states, layout.entering(final_state)

    return plan


def _linear_options(options: Options) -> LinearOptions:
    return LinearOptions(options.dim, options.reverse, options.final, options.backend)


def as_allotted(
    arguments: Arguments, options: Options, states: Tensor, last: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The results, copied where they do not have the strides that the operator promises."""
    model = arguments.inputs[0]
    new = torch.empty_like(model)
    if states.stride() != new.stride():
        states = new.copy_(states)
    if last is not None:
        of_state = StateLayout.of(model, options.dim, arguments.cu_seqlens)
        # A view of the states would keep all of them, and outputs of an operator share no memory.
        last = of_state.empty().copy_(last)
    return states, last


# --- Backward ---------------------------------------------------------------------------------


def backward(
    arguments: Arguments, states: Tensor, states_grad: Tensor | None, last_grad: Tensor | None,
    options: Options, wanted: tuple[bool, ...],
) -> Gradients:  # fmt: skip
    """The gradients that are wanted, of ``arguments.differentiable``. ``states`` are those that ``forward`` returned. At least one
    of ``states_grad`` and ``last_grad`` is not None."""
    if arguments.reset is not None:
        arguments = aligned_reset(arguments)
    tensors = *arguments.flat, states, states_grad, last_grad
    gradients: Gradients = plan_cache.run(make_backward, tensors, options, wanted)
    return gradients


def make_backward(*args: Any) -> Plan:
    """The plan of ``backward``, from its tensors, options and what is wanted."""
    *tensors, options, wanted = args
    *flat, states, states_grad, last_grad = tensors
    arguments = Arguments.of(options.kind, flat)
    others = {"states": states, "states' gradient": states_grad}
    check_operator(arguments, options.dim, others, last_grad)

    def in_torch(*tensors: Any) -> Gradients:
        *flat, _, states_grad, last_grad = tensors
        # ``composed.backward`` calls autograd. The dispatcher may have excluded autograd's keys by now.
        recorded = torch._C._SetExcludeDispatchKeyGuard(_AUTOGRAD, False)
        with recorded, torch.no_grad():
            arguments = Arguments.of(options.kind, flat)
            return composed.backward(arguments, options, states_grad, last_grad, wanted)

    if is_linear(arguments, options):
        return _backward_of_linear(options, wanted)
    if not on_gpu(arguments.inputs[0]) and cpu.takes(arguments, options):
        return cpu.plan_backward(arguments, options, wanted)
    if _in_torch(arguments, options):
        return in_torch
    plan = plan_backward(
        arguments, states, states_grad, last_grad, options, wanted, addresses_of(tensors)
    )
    if isinstance(plan, Decision):
        return partial(run_reference, plan, in_torch)
    return plan


def _backward_of_linear(options: Options, wanted: tuple[bool, ...]) -> Plan:
    how, (for_gates, for_tokens, for_initial) = _linear_options(options), wanted

    def plan(
        gates: Tensor, tokens: Any, initial: Any, _: Any, cu_seqlens: Any,
        states: Tensor, states_grad: Any, last_grad: Any,
    ) -> Gradients:  # fmt: skip
        if states_grad is None:
            states_grad = states.new_zeros(()).expand(states.shape)
        wanted = for_gates, for_tokens, for_initial and initial is not None
        return linear_plans.backward(
            gates, states, states_grad, initial, last_grad, cu_seqlens, how, wanted
        )

    return plan


def plan_backward(
    arguments: Arguments, states: Tensor, states_grad: Tensor | None, last_grad: Tensor | None,
    options: Options, wanted: tuple[bool, ...], addresses: int,
) -> Plan | Decision:  # fmt: skip
    """The plan by which a kernel computes the gradients that are wanted. Or the decision, if no kernel fits."""
    first, device = arguments.inputs[0], arguments.inputs[0].device
    others = {"states": states}
    if states_grad is not None:
        others["states_grad"] = states_grad
    call = make_call("backward", arguments, options, addresses, others)
    prepared = _prepared(call.problem, device, options.backend)
    if isinstance(prepared, Decision):
        return prepared
    run, parts = prepared
    named, copy = _named(arguments, call), _copies(call)
    layout = StateLayout.of(first, options.dim, arguments.cu_seqlens)
    inputs, count = len(arguments.inputs), len(arguments.parameters)
    of_inputs = [n for n in range(inputs) if wanted[n]]
    of_parameters = wanted[inputs:-1]
    for_initial = wanted[-1] and arguments.initial_state is not None
    new_grad = allocator(device, first.shape, first.dtype, call.dense)
    new_sums = allocator(device, (parts, count, call.problem.channels))
    blank: list[Tensor | None] = [None] * len(wanted)

    def plan(*args: Any) -> Gradients:
        *flat, states, states_grad, last_grad = args
        tensors = named(flat, layout)
        tensors["states"] = states
        tensors["states_grad"] = new_grad().zero_() if states_grad is None else states_grad
        if copy is not None:
            copy(tensors)
        entering = tensors["final_state_grad"] = layout.entering(last_grad)
        gradients = [*blank]
        for n in of_inputs:
            tensors[f"input{n}_grad"] = gradients[n] = new_grad()
        if any(of_parameters):
            tensors["parameters_grad"] = new_sums()
        if for_initial:
            tensors["initial_state_grad"] = gradients[-1] = layout.leaving(entering)
        run(tensors)
        if any(of_parameters):
            sums = tensors["parameters_grad"].sum(0)
            for n, want in enumerate(of_parameters):
                if want:
                    gradients[inputs + n] = sums[n]
        return tuple(gradients)

    return plan
