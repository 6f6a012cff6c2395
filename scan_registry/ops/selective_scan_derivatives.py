"""``selective_scan`` in torch: dispatch, and derivatives in both modes, of any order.

The first reverse-mode derivative is a kernel. Further ones, forward mode and ``torch.func`` are composed of
operators that torch differentiates: see ``selective_scan_composed``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scan_registry.dispatch import policy
from scan_registry.ops import flops
from scan_registry.ops import selective_scan_composed as composed
from scan_registry.ops import selective_scan_plans as plans
from scan_registry.ops.derivatives import (
    forward_mode,
    has_tangents,
    tracing_state,
    unobserved,
    wants_gradient,
)
from scan_registry.ops.problems import lying_as_new
from scan_registry.ops.registration import register
from scan_registry.ops.selective_scan_arguments import Arguments, Options
from scan_registry.ops.selective_scan_gradients import Gradients
from scan_registry.ops.selective_scan_plans import Outputs

_is_compiling = torch.compiler.is_compiling
_transforms_active = torch._C._are_functorch_transforms_active
_required = policy.required.get
_INPUTS = len(Arguments._fields)
_DIFFERENTIABLE = 9
#: u, delta and z, whose gradients have the strides of ``empty_like(u)``; those of others have their last dimension innermost.
_SEQUENCES = (0, 1, 6)
#: C and delta_bias, whose gradients may lie beside those of B and of D.
_SECOND_OF_PAIRS = (4, 7)


def scan(given: Arguments, options: Options) -> tuple[Tensor, Tensor]:
    """The output and the final state of ``normalised`` arguments; differentiable."""
    if not _is_compiling():
        if _transforms_active() or forward_mode():
            return composed.forward(given, options)
        if unobserved(*given):
            if torch.is_grad_enabled() and wants_gradient(*given.differentiable):
                made = SelectiveScan.apply(*given, options, True)  # type: ignore[no-untyped-call]
            else:
                made = plans.forward(given, options, False)
            return made[0], made[1]
        flops.announce()
    # A trace holds for calls with and without gradients, so nothing in it may depend on which is traced.
    tracing = not _is_compiling() and tracing_state() is not None
    # All tensors are looked at, also bounds, which never require gradients: torch.compile of 2.6 to 2.9 supports neither
    # properties nor slices of named tuples.
    training = not tracing and torch.is_grad_enabled() and wants_gradient(*given)
    out, last, _ = _op(*given, *options, training)
    return out, last


class SelectiveScan(torch.autograd.Function):
    """``direct`` goes round the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Outputs:
        *tensors, options, direct = args
        given = Arguments(*tensors)
        if direct:
            made = plans.forward(given, options, True)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                made = Outputs(*_op(*given, *options, True))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(made.checkpoints)
        ctx.save_for_backward(*given, made.checkpoints)
        ctx.options, ctx.required = options, _required()
        return made

    @staticmethod
    def backward(ctx: Any, out_grad: Any, last_grad: Any, _: Any) -> Any:
        if out_grad is None and last_grad is None:
            return (None,) * (_INPUTS + 2)
        *tensors, checkpoints = ctx.saved_tensors
        given, wanted = Arguments(*tensors), tuple(ctx.needs_input_grad[:_DIFFERENTIABLE])
        if out_grad is None:
            out_grad = torch.zeros_like(given.u)
        if _is_compiling():  # by compiled autograd, which knows of no context variables
            found = first_derivative(given, checkpoints, out_grad, last_grad, ctx.options, wanted)
        else:
            with policy.as_required(ctx.required):
                found = first_derivative(
                    given, checkpoints, out_grad, last_grad, ctx.options, wanted
                )
        return *found, None, None, None


def first_derivative(
    given: Arguments,
    checkpoints: Tensor,
    out_grad: Tensor,
    last_grad: Tensor | None,
    options: Options,
    wanted: tuple[bool, ...],
) -> Gradients:
    """The gradients that are wanted, differentiable where derivatives are recorded."""
    every = *given.differentiable, out_grad, last_grad
    again = (torch.is_grad_enabled() and wants_gradient(*every)) or _transforms_active()
    if again or (not _is_compiling() and has_tangents(*every)):
        with torch.enable_grad():
            return composed.backward(given, options, out_grad, last_grad, wanted)
    if not _is_compiling() and unobserved(*given, out_grad, last_grad):
        return plans.backward(given, checkpoints, out_grad, last_grad, options, wanted)
    if not _is_compiling():
        flops.announce()
    found = _backward_op(*given, checkpoints, out_grad, last_grad, *options, list(wanted))
    return _present(found, given, wanted)


def _present(found: Any, given: Arguments, wanted: tuple[bool, ...]) -> Gradients:
    pairs = zip(found, given.differentiable, wanted, strict=True)
    return tuple(each if want and t is not None else None for each, t, want in pairs)


# --- Registration -----------------------------------------------------------------------------


def _forward(*args: Any) -> Any:
    *tensors, softplus, backend, training = args
    return tuple(plans.forward(Arguments(*tensors), Options(softplus, backend), training))


def _forward_fake(*args: Any) -> Any:
    *tensors, softplus, backend, training = args
    return tuple(plans.empty_outputs(Arguments(*tensors), Options(softplus, backend), training))


def _forward_autograd(*args: Any) -> Any:
    *tensors, softplus, backend, _ = args
    given = Arguments(*tensors)
    if _transforms_active() or has_tangents(*given.differentiable):
        return _forward_composed(*args)
    if torch.is_grad_enabled() and wants_gradient(*given.differentiable):
        return tuple(SelectiveScan.apply(*given, Options(softplus, backend), False))  # type: ignore[no-untyped-call]
    with torch._C._AutoDispatchBelowAutograd():
        return _op(*args)


def _forward_composed(*args: Any) -> Any:
    *tensors, softplus, backend, _ = args
    given = Arguments(*tensors)
    made = composed.forward(given, Options(softplus, backend))
    return *made, given.u.new_empty(0, dtype=torch.float32)


def _backward_impl(*args: Any) -> Any:
    given, checkpoints, out_grad, last_grad, options, wanted = _unpacked(args)
    found = [*plans.backward(given, checkpoints, out_grad, last_grad, options, wanted)]
    for place, grad in enumerate(found):
        if grad is None:
            continue
        if place in _SECOND_OF_PAIRS:  # outputs of an operator share no memory
            found[place] = grad.clone(memory_format=torch.contiguous_format)
        elif place in _SEQUENCES:
            found[place] = lying_as_new(given.u, grad)
        else:
            found[place] = grad.contiguous()
    return _filled(found, given)


def _unpacked(args: Any) -> Any:
    given, (checkpoints, out_grad, last_grad) = (
        Arguments(*args[:_INPUTS]),
        args[_INPUTS : _INPUTS + 3],
    )
    softplus, backend, wanted = args[_INPUTS + 3 :]
    return given, checkpoints, out_grad, last_grad, Options(softplus, backend), tuple(wanted)


def _filled(found: Sequence[Tensor | None], given: Arguments) -> tuple[Tensor, ...]:
    """Operators return tensors; an empty one stands for none."""
    return tuple(given.u.new_empty(0) if each is None else each for each in found)


def _backward_fake(*args: Any) -> Any:
    given, *_, wanted = _unpacked(args)
    made = [
        None
        if t is None or not want
        else torch.empty_like(given.u)
        if place in _SEQUENCES
        else t.new_empty(t.shape)
        for place, (t, want) in enumerate(zip(given.differentiable, wanted, strict=True))
    ]
    return _filled(made, given)


def _backward_autograd(*args: Any) -> Any:
    given, _, out_grad, last_grad, *_ = _unpacked(args)
    every = *given.differentiable, out_grad, last_grad
    again = torch.is_grad_enabled() and wants_gradient(*every)
    if again or _transforms_active() or has_tangents(*every):
        return _backward_composed(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return _backward_op(*args)


def _backward_composed(*args: Any) -> Any:
    """In operators that torch differentiates and transforms."""
    given, _, out_grad, last_grad, options, wanted = _unpacked(args)
    with torch.enable_grad():
        found = composed.backward(given, options, out_grad, last_grad, wanted)
    return _filled(found, given)


_TENSORS = (
    "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, "
    "Tensor? delta_bias, Tensor? initial_state, Tensor? cu_seqlens"
)
_op = register(
    f"selective_scan({_TENSORS}, bool softplus, str backend, bool training) -> (Tensor, Tensor, Tensor)",
    __name__,
    {
        "device": "_forward",
        "Autograd": "_forward_autograd",
        "Meta": "_forward_fake",
        "FuncTorchBatchedDecomposition": "_forward_composed",
    },
)
_backward_op = register(
    f"selective_scan_backward({_TENSORS}, Tensor checkpoints, Tensor out_grad, Tensor? final_grad, "
    "bool softplus, str backend, bool[] wanted) -> "
    f"({', '.join(['Tensor'] * _DIFFERENTIABLE)})",
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
