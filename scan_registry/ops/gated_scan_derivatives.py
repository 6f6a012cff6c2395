"""``gated_scan`` in torch: dispatch, and derivatives in both modes, of any order.

``gated_scan_plans`` computes the first reverse-mode derivative, from inputs and states alone. ``gated_scan_composed`` computes
higher derivatives, forward mode and ``torch.func``, with operators that torch differentiates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scan_registry.dispatch import policy
from scan_registry.ops import flops
from scan_registry.ops import gated_scan_composed as composed
from scan_registry.ops import gated_scan_plans as plans
from scan_registry.ops.derivatives import forward_mode, has_tangents, unobserved, wants_gradient
from scan_registry.ops.gated_scan_arguments import Arguments, Options
from scan_registry.ops.problems import StateLayout, lying_as_new
from scan_registry.ops.registration import register

Outputs = tuple[Tensor, Tensor | None]
Gradients = tuple[Tensor | None, ...]

_is_compiling = torch.compiler.is_compiling
_transforms_active = torch._C._are_functorch_transforms_active
_is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor
_required = policy.required.get


def scan(given: Arguments, options: Options) -> Outputs:
    """The states of ``normalised`` arguments, and the final state if it is asked for; differentiable."""
    if not _is_compiling():
        if _transforms_active() or forward_mode():
            return composed.forward(given, options)
        if unobserved(*given.flat):
            if torch.is_grad_enabled() and wants_gradient(*given.differentiable):
                made: Outputs = GatedScan.apply(options, True, *given.flat)  # type: ignore[no-untyped-call]
                return made
            return plans.forward(given, options)
        flops.announce()
    states, last = _call(given, options)
    return states, last if options.final else None


class GatedScan(torch.autograd.Function):
    """Saves inputs and states for the backward pass. If ``direct``, the forward pass bypasses the dispatcher."""

    @staticmethod
    def forward(ctx: Any, options: Options, direct: bool, *flat: Any) -> Outputs:
        given = Arguments.of(options.kind, flat)
        if direct:
            states, last = plans.forward(given, options)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                states, last = _call(given, options)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*flat, states)
        ctx.options, ctx.required = options, _required()
        return states, last

    @staticmethod
    def backward(ctx: Any, states_grad: Tensor | None, last_grad: Tensor | None) -> Any:
        options, needs = ctx.options, ctx.needs_input_grad[2:]
        if not options.final:
            last_grad = None
        if states_grad is None and last_grad is None:
            return (None,) * (len(needs) + 2)
        *flat, states = ctx.saved_tensors
        given, wanted = Arguments.of(options.kind, flat), tuple(needs[:-2])
        gradients = states_grad, last_grad
        if _is_compiling():  # by compiled autograd, which knows of no context variables
            found = first_derivative(given, states, *gradients, options, wanted)
        else:
            with policy.as_required(ctx.required):
                found = first_derivative(given, states, *gradients, options, wanted)
        return None, None, *found, None, None


def first_derivative(
    given: Arguments,
    states: Tensor,
    states_grad: Tensor | None,
    last_grad: Tensor | None,
    options: Options,
    wanted: tuple[bool, ...],
) -> Gradients:
    """The gradients that are wanted, differentiable where derivatives are recorded."""
    every = *given.differentiable, states_grad, last_grad
    again = (torch.is_grad_enabled() and wants_gradient(*every)) or _transforms_active()
    if again or (not _is_compiling() and has_tangents(*every)):
        with torch.enable_grad():
            return composed.backward(given, options, states_grad, last_grad, wanted)
    if not _is_compiling() and any(g is not None and _is_legacy_batched(g) for g in every[-2:]):
        # ``is_grads_batched`` cannot map over operators that return a list.
        return composed.backward(given, options, states_grad, last_grad, wanted)
    if not _is_compiling() and unobserved(*given.flat, states_grad, last_grad):
        return plans.backward(given, states, states_grad, last_grad, options, wanted)
    if not _is_compiling():
        flops.announce()
    found = _backward_op(
        *(options.kind, [*given.inputs], [*given.parameters], given.reset, given.initial_state),
        *(given.cu_seqlens, states, states_grad, last_grad),
        *(options.dim, options.reverse, options.backend, [*wanted]),
    )
    pairs = zip(found, given.differentiable, wanted, strict=True)
    return tuple(each if want and t is not None else None for each, t, want in pairs)


# --- Registration -----------------------------------------------------------------------------


def _call(given: Arguments, options: Options) -> tuple[Tensor, Tensor]:
    """Call the registered operator."""
    kind, *others = options
    tensors = given.reset, given.initial_state, given.cu_seqlens
    made: tuple[Tensor, Tensor] = _op(kind, [*given.inputs], [*given.parameters], *tensors, *others)
    return made


def _unpacked(args: Sequence[Any]) -> tuple[Arguments, Options]:
    kind, inputs, parameters, reset, initial_state, cu_seqlens, *others = args
    tensors = reset, initial_state, cu_seqlens
    return Arguments(tuple(inputs), tuple(parameters), *tensors), Options(kind, *others)


def _both(outputs: Outputs) -> tuple[Tensor, Tensor]:
    """Operators return tensors; an empty one stands for none."""
    states, last = outputs
    return states, states.new_empty(0) if last is None else last


def _forward(*args: Any) -> Any:
    return _both(plans.forward(*_unpacked(args)))


def _forward_fake(*args: Any) -> Any:
    given, options = _unpacked(args)
    model, last = given.inputs[0], None
    if options.final:
        last = StateLayout.of(model, options.dim, given.cu_seqlens).empty()
    return _both((torch.empty_like(model), last))


def _forward_autograd(*args: Any) -> Any:
    given, options = _unpacked(args)
    if _transforms_active() or has_tangents(*given.differentiable):
        return _forward_composed(*args)
    if torch.is_grad_enabled() and wants_gradient(*given.differentiable):
        return GatedScan.apply(options, False, *given.flat)  # type: ignore[no-untyped-call]
    with torch._C._AutoDispatchBelowAutograd():
        return _op(*args)


def _forward_composed(*args: Any) -> Any:
    return _both(composed.forward(*_unpacked(args)))


def _unpacked_backward(args: Sequence[Any]) -> Any:
    tensors, (states, states_grad, last_grad), others = args[:6], args[6:9], args[9:]
    dim, reverse, backend, wanted = others
    given, options = _unpacked((*tensors, dim, reverse, last_grad is not None, backend))
    return given, states, states_grad, last_grad, options, tuple(wanted)


def _filled(found: Sequence[Tensor | None], given: Arguments) -> list[Tensor]:
    return [given.inputs[0].new_empty(0) if each is None else each for each in found]


def _backward_impl(*args: Any) -> Any:
    given, *others = _unpacked_backward(args)
    found = plans.backward(given, *others)
    pairs = zip(given.differentiable, found, strict=True)
    return _filled([None if g is None else lying_as_new(t, g) for t, g in pairs], given)


def _backward_fake(*args: Any) -> Any:
    given, *_, wanted = _unpacked_backward(args)
    pairs = zip(given.differentiable, wanted, strict=True)
    return _filled(
        [torch.empty_like(t) if t is not None and want else None for t, want in pairs], given
    )


def _backward_autograd(*args: Any) -> Any:
    given, _, states_grad, last_grad, *_ = _unpacked_backward(args)
    every = *given.differentiable, states_grad, last_grad
    again = torch.is_grad_enabled() and wants_gradient(*every)
    if again or _transforms_active() or has_tangents(*every):
        return _backward_composed(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return _backward_op(*args)


def _backward_composed(*args: Any) -> Any:
    """The backward pass in operators that torch differentiates and transforms."""
    given, _, states_grad, last_grad, options, wanted = _unpacked_backward(args)
    with torch.enable_grad():
        found = composed.backward(given, options, states_grad, last_grad, wanted)
    return _filled(found, given)


_TENSORS = (
    "str kind, Tensor[] inputs, Tensor[] parameters, Tensor? reset, Tensor? initial_state, "
    "Tensor? cu_seqlens"
)
_op = register(
    f"gated_scan({_TENSORS}, int dim, bool reverse, bool final, str backend) -> (Tensor, Tensor)",
    __name__,
    {
        "device": "_forward",
        "Autograd": "_forward_autograd",
        "Meta": "_forward_fake",
        "FuncTorchBatchedDecomposition": "_forward_composed",
    },
)
_backward_op = register(
    f"gated_scan_backward({_TENSORS}, Tensor states, Tensor? states_grad, Tensor? final_grad, int dim, "
    "bool reverse, str backend, bool[] wanted) -> Tensor[]",
    __name__,
    {
        "device": "_backward_impl",
        "Autograd": "_backward_autograd",
        "Meta": "_backward_fake",
        "FuncTorchBatchedDecomposition": "_backward_composed",
    },
)
# For graphs of torch.compile, which call the operators by themselves.
flops.announce()
