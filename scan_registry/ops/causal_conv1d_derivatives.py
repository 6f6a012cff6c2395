"""``causal_conv1d`` in torch: dispatch, and derivatives in both modes, of any order.

The first reverse-mode derivative is two kernels, the second of which adds up partial sums. Further derivatives,
forward mode and ``torch.func`` are computed in plain torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from scan_registry.dispatch import policy
from scan_registry.kernels.causal_conv1d import reference
from scan_registry.ops import causal_conv1d_plans as plans
from scan_registry.ops import flops
from scan_registry.ops.arguments import refuse_mapped
from scan_registry.ops.causal_conv1d_arguments import (
    Arguments,
    Options,
    UpdateArguments,
    normalised,
    update_arguments,
)
from scan_registry.ops.causal_conv1d_calls import key_of, taken_as_they_are
from scan_registry.ops.causal_conv1d_plans import Gradients, Wanted
from scan_registry.ops.derivatives import forward_mode, has_tangents, unobserved, wants_gradient
from scan_registry.ops.registration import register
from scan_registry.ops.sharded import call_sharded
from scan_registry.ops.values import are_checked

Outputs = tuple[Tensor, Tensor | None]

_is_compiling = torch.compiler.is_compiling
_transforms_active = torch._C._are_functorch_transforms_active
_required = policy.required.get


def call(tensors: tuple[Any, ...], request: tuple[Any, ...]) -> Outputs:
    """y, and the final state if it is asked for, of the public function's arguments as they are given; differentiable."""
    key = key_of("causal_conv1d", tensors, request)
    # A cached plan replaces checks of shapes and dtypes, not of values.
    of_plan = None if key and tensors[5] is not None and are_checked(tensors[5]) else key
    known = None if of_plan is None else plans.seen().get(of_plan)
    if known is not None:
        options, plan = known
        if torch.is_grad_enabled() and wants_gradient(*tensors[:4]):
            return _record(*tensors, options, plan)  # type: ignore[no-any-return]
        return plan(*tensors)  # type: ignore[no-any-return]
    if key is None and (sharded := call_sharded("causal_conv1d", tensors, request)) is not None:
        return sharded  # type: ignore[no-any-return]
    given, options = normalised(*tensors, *request)
    if of_plan is not None and taken_as_they_are(given, tensors):
        plans.seen().keep(of_plan, (options, plans.forward_plan(given, options)))
    return convolve(given, options)


def convolve(given: Arguments, options: Options) -> Outputs:
    """Likewise, of ``normalised`` arguments."""
    if not _is_compiling():
        if _transforms_active() or forward_mode():
            return _transformed(given, options)
        if unobserved(*given):
            if torch.is_grad_enabled() and wants_gradient(*given[:4]):
                return _record(*given, options, plans.forward_plan(given, options))  # type: ignore[no-any-return]
            return plans.forward(given, options)
        flops.announce()
    y, last = _op(*given, *options)
    return y, last if options.final else None


def call_update(tensors: tuple[Any, ...], request: tuple[Any, ...]) -> Tensor:
    """y of the public function's arguments as they are given; the state is changed in place."""
    x, *others = tensors
    key = key_of("causal_conv1d_update", tensors, request)
    known = None if key is None else plans.seen().get(key)
    if known is not None:
        one_step, plan = known
        y: Tensor = plan(x.unsqueeze(-1), *others).squeeze(-1) if one_step else plan(*tensors)
        increment_version(tensors[1])
        return y
    given, options = update_arguments(*tensors, *request)
    one_step = x.dim() == 2
    if key is not None and taken_as_they_are(given[1:], others):
        plans.seen().keep(key, (one_step, plans.update_plan(given, options)))
    y = update(given, options)
    return y.squeeze(-1) if one_step else y


def update(given: UpdateArguments, options: Options) -> Tensor:
    """Likewise, of ``update_arguments``."""
    if not _is_compiling() and unobserved(*given):
        y = plans.update(given, options)
        increment_version(given.state)
        return y
    if not _is_compiling():
        flops.announce()
        refuse_mapped("causal_conv1d_update", "conv_state", *given)
    found: Tensor = _update_op(*given, options.silu, options.backend)
    return found


def _transformed(given: Arguments, options: Options) -> Outputs:
    """In operators of torch, which ``torch.func`` can transform."""
    x, weight, bias, state, seq_idx, bounds = given
    runs = reference.Runs(seq_idx, bounds)
    return reference.forward(x, weight, bias, state, runs, options.silu, options.final)


class CausalConv1d(torch.autograd.Function):
    """If ``plan`` is given, it runs and bypasses the dispatcher; otherwise the operator runs."""

    # What torch asks the class for at each call by a new string, and else finds last of all.
    setup_context = staticmethod(torch.autograd.Function.setup_context)
    clear_saved_tensors_on_access = boxed_grads_call = False

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Outputs:
        *tensors, options, plan = args
        if plan is not None:
            y, last = plan(*tensors)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                y, last = _op(*tensors, *options)
        # As ``set_materialize_grads`` and ``save_for_backward`` do, at half the cost.
        ctx.materialize_grads = False
        ctx.to_save = tuple(tensors)
        ctx.options, ctx.required = options, _required()
        return y, last

    @staticmethod
    def backward(ctx: Any, y_grad: Tensor | None, last_grad: Tensor | None) -> Any:
        options, needs = ctx.options, ctx.needs_input_grad
        if not options.final:
            last_grad = None
        if y_grad is None and last_grad is None:
            return (None,) * 8
        given = Arguments(*ctx.saved_tensors)
        if y_grad is None:
            y_grad = torch.zeros_like(given.x)
        wanted = needs[0], needs[1], needs[2], needs[3]
        if _is_compiling():  # by compiled autograd, which knows of no context variables
            grads = _backward(given, y_grad, last_grad, options, wanted)
        else:
            with policy.as_required(ctx.required):
                grads = _backward(given, y_grad, last_grad, options, wanted)
        return *grads, None, None, None, None


#: Without the search for transforms, which unobserved calls are not under.
_record: Any = super(torch.autograd.Function, CausalConv1d).apply


def _backward(
    given: Arguments, y_grad: Tensor, last_grad: Tensor | None, options: Options, wanted: Wanted
) -> Gradients:
    tensors = *given[:4], y_grad, last_grad
    # Under create_graph, in forward mode, and where batches of gradients are mapped over.
    composed = (torch.is_grad_enabled() and wants_gradient(*tensors)) or _transforms_active()
    if not composed and not _is_compiling() and unobserved(*given, y_grad, last_grad):
        return plans.backward(given, y_grad, last_grad, options, wanted)
    if composed or (not _is_compiling() and has_tangents(*tensors)):
        return _composed_backward(given, y_grad, last_grad, options, wanted)
    if not _is_compiling():
        flops.announce()
    flat = options.silu, options.backend, list(wanted)
    found = _backward_op(*given, y_grad, last_grad, *flat)
    of_x, of_weight, of_bias, of_state = (
        each if want else None for each, want in zip(found, wanted, strict=True)
    )
    return of_x, of_weight, of_bias, of_state


def _composed_backward(
    given: Arguments, y_grad: Tensor, last_grad: Tensor | None, options: Options, wanted: Wanted
) -> Gradients:
    """In operators that torch differentiates and transforms."""
    x, weight, bias, state, seq_idx, bounds = given
    runs = reference.Runs(seq_idx, bounds)
    found = reference.backward(x, weight, bias, state, y_grad, last_grad, runs, options.silu)
    return plans.narrowed(given, found, wanted)


# --- Registration -----------------------------------------------------------------------------


def _or_empty(tensor: Tensor | None, like: Tensor) -> Tensor:
    """Operators return tensors; this one stands for none."""
    return like.new_empty(0) if tensor is None else tensor


def _forward(*args: Any) -> Any:
    given, options = Arguments(*args[:6]), Options(*args[6:])
    y, last = plans.forward(given, options)
    return y, _or_empty(last, y)


def _forward_fake(*args: Any) -> Any:
    given, options = Arguments(*args[:6]), Options(*args[6:])
    last = given.x.new_empty(plans.state_shape(given) if options.final else 0)
    return torch.empty_like(given.x), last


def _forward_autograd(*args: Any) -> Any:
    given, options = Arguments(*args[:6]), Options(*args[6:])
    if _transforms_active() or has_tangents(*given[:4]):
        return _forward_composed(*args)
    if torch.is_grad_enabled() and wants_gradient(*given[:4]):
        return CausalConv1d.apply(*given, options, None)  # type: ignore[no-untyped-call]
    with torch._C._AutoDispatchBelowAutograd():
        return _op(*args)


def _forward_composed(*args: Any) -> Any:
    y, last = _transformed(Arguments(*args[:6]), Options(*args[6:]))
    return y, _or_empty(last, y)


def _backward_impl(*args: Any) -> Any:
    given, (y_grad, last_grad, silu, backend, wanted) = Arguments(*args[:6]), args[6:]
    options = Options(silu, False, backend)
    found = plans.backward(given, y_grad, last_grad, options, tuple(wanted))
    return tuple(_or_empty(each, y_grad) for each in found)


def _backward_fake(*args: Any) -> Any:
    given, wanted = Arguments(*args[:6]), args[-1]
    x, weight = given.x, given.weight
    made = (
        torch.empty_like(x),
        weight.new_empty(weight.shape),
        weight.new_empty(weight.shape[0]),
        x.new_empty(plans.state_shape(given)),
    )
    return tuple(each if want else x.new_empty(0) for each, want in zip(made, wanted, strict=True))


def _backward_autograd(*args: Any) -> Any:
    tensors = *args[:4], *args[6:8]
    differentiated = torch.is_grad_enabled() and wants_gradient(*tensors)
    if differentiated or _transforms_active() or has_tangents(*tensors):
        return _backward_composed(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return _backward_op(*args)


def _backward_composed(*args: Any) -> Any:
    given, (y_grad, last_grad, silu, backend, wanted) = Arguments(*args[:6]), args[6:]
    options = Options(silu, False, backend)
    found = _composed_backward(given, y_grad, last_grad, options, tuple(wanted))
    return tuple(_or_empty(each, y_grad) for each in found)


def _update(*args: Any) -> Tensor:
    return plans.update(UpdateArguments(*args[:6]), Options(args[6], False, args[7]))


def _update_fake(*args: Any) -> Tensor:
    return torch.empty_like(args[0])


def _update_autograd(*args: Any) -> Any:
    """It has no derivative: y is a constant, as the state is."""
    with torch._C._AutoDispatchBelowAutograd():
        y = _update_op(*args)
    increment_version(args[1])
    return y


_TENSORS = "Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? seq_idx, Tensor? cu_seqlens"
_op = register(
    f"causal_conv1d({_TENSORS}, bool silu, bool final, str backend) -> (Tensor, Tensor)",
    __name__,
    {
        "device": "_forward",
        "Autograd": "_forward_autograd",
        "Meta": "_forward_fake",
        "FuncTorchBatchedDecomposition": "_forward_composed",
    },
)
_backward_op = register(
    f"causal_conv1d_backward({_TENSORS}, Tensor y_grad, Tensor? final_grad, bool silu, str backend, "
    "bool[4] wanted) -> (Tensor, Tensor, Tensor, Tensor)",
    __name__,
    {
        "device": "_backward_impl",
        "Autograd": "_backward_autograd",
        "Meta": "_backward_fake",
        "FuncTorchBatchedDecomposition": "_backward_composed",
    },
)
_update_op = register(
    "causal_conv1d_update(Tensor x, Tensor(a!) state, Tensor weight, Tensor? bias, Tensor? positions, "
    "Tensor? indices, bool silu, str backend) -> Tensor",
    __name__,
    {"device": "_update", "Autograd": "_update_autograd", "Meta": "_update_fake"},
)
flops.announce()
