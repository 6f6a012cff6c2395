"""``rnn`` in torch: dispatch, and derivatives in both modes, of any order.

The first reverse-mode derivative is a kernel and a product of matrices. Further ones, forward mode and
``torch.func`` go through plain torch, step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scan_registry.dispatch import policy
from scan_registry.kernels.rnn import reference
from scan_registry.kernels.rnn.problem import SIZES, Clips
from scan_registry.ops import flops, rnn_plans
from scan_registry.ops.derivatives import (
    forward_mode,
    has_tangents,
    tracing_state,
    unobserved,
    wants_gradient,
)
from scan_registry.ops.registration import register
from scan_registry.ops.rnn_arguments import Arguments, Options
from scan_registry.ops.rnn_plans import Outputs

_is_compiling = torch.compiler.is_compiling
_transforms_active = torch._C._are_functorch_transforms_active
_required = policy.required.get


def rnn(given: Arguments, options: Options) -> tuple[Tensor, Tensor]:
    """States (states, B, T, N, D) and those after the last step (states, B, N, D), of ``normalised``
    arguments; differentiable."""
    if not _is_compiling():
        if _transforms_active() or forward_mode():
            return _transformed(given, options)
        if unobserved(*given):
            if torch.is_grad_enabled() and wants_gradient(*given):
                made = Rnn.apply(*given, options, True)  # type: ignore[no-untyped-call]
            else:
                made = rnn_plans.forward(given, options, False)
            return made[0], made[1]
        flops.announce()
    # A trace holds for calls with and without gradients, so nothing in it may depend on which is traced.
    tracing = not _is_compiling() and tracing_state() is not None
    training = not tracing and torch.is_grad_enabled() and wants_gradient(*given)
    states, last, _ = _op(*given, *options.flat(), training)
    return states, last


def _transformed(given: Arguments, options: Options) -> tuple[Tensor, Tensor]:
    """In operators of torch, which it transforms as it likes."""
    if options.clips != Clips():
        raise ValueError(
            "forward_clipval, gradient_recurrent_clipval and gradient_recurrent_cut change what "
            "gradients are, and do not go with torch.func or forward-mode derivatives"
        )
    inputs, recurrent, bias, initial, reset, reset_states = given
    if inputs.numel() == 0:
        count, (batch, time, _, heads, dim) = len(SIZES[options.function].states), inputs.shape
        if initial is None:
            initial = inputs.new_zeros(count, batch, heads, dim)
        return inputs.new_empty(count, batch, time, heads, dim), initial.clone()
    states, _ = reference.forward(
        options.function, inputs, recurrent, bias, initial, reset=reset, reset_states=reset_states
    )
    return states, states[:, :, -1].clone()


class Rnn(torch.autograd.Function):
    """Returns the cache, too, which second derivatives flow through. ``direct`` goes round the
    dispatcher."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        recurrent: Tensor,
        bias: Tensor,
        initial: Tensor | None,
        reset: Tensor | None,
        reset_states: Tensor | None,
        options: Options,
        direct: bool,
    ) -> Outputs:
        given = Arguments(inputs, recurrent, bias, initial, reset, reset_states)
        if direct:
            made = rnn_plans.forward(given, options, True)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                made = Outputs(*_op(*given, *options.flat(), True))
        ctx.set_materialize_grads(False)
        saved = recurrent, initial, made.states, made.cache, reset, reset_states
        ctx.save_for_backward(*saved)
        ctx.options, ctx.required = options, _required()
        return made

    @staticmethod
    def backward(ctx: Any, states_grad: Any, last_grad: Any, cache_grad: Any) -> Any:
        if states_grad is None and last_grad is None and cache_grad is None:
            return (None,) * 8
        recurrent, initial, states, cache, reset, reset_states = ctx.saved_tensors
        function = ctx.options.function
        if states_grad is None:
            states_grad = torch.zeros_like(states)
        tensors = recurrent, states, initial, reset, reset_states, cache, states_grad, last_grad
        if _is_compiling():  # by compiled autograd, which knows of no context variables
            gates_grad, initial_grad, *more = _backward(*tensors, cache_grad, ctx.options)
        else:
            with policy.as_required(ctx.required):
                gates_grad, initial_grad, *more = _backward(*tensors, cache_grad, ctx.options)
        wanted = ctx.needs_input_grad
        inputs_grad, recurrent_grad, bias_grad = reference.parameter_grads(
            function, gates_grad, states, initial, (wanted[1], wanted[2]), reset, reset_states
        )
        return (
            inputs_grad if wanted[0] else None,
            recurrent_grad,
            bias_grad,
            initial_grad if wanted[3] else None,
            None,
            more[0] if wanted[5] else None,
            None,
            None,
        )


def _backward(
    recurrent: Tensor,
    states: Tensor,
    initial: Tensor | None,
    reset: Tensor | None,
    reset_states: Tensor | None,
    cache: Tensor,
    states_grad: Tensor,
    last_grad: Tensor | None,
    cache_grad: Tensor | None,
    options: Options,
) -> tuple[Tensor, ...]:
    tensors = recurrent, states, initial, cache, states_grad, last_grad
    resets = reset, reset_states
    if cache_grad is not None and cache_grad.numel() == 0:
        cache_grad = None
    differentiated = torch.is_grad_enabled() and wants_gradient(*tensors, *resets)
    if differentiated and options.clips != Clips():
        raise RuntimeError(
            "forward_clipval, gradient_recurrent_clipval and gradient_recurrent_cut change what "
            "gradients are, and those have no derivatives: create_graph does not go with them"
        )
    composed = differentiated or _transforms_active()
    if not _is_compiling():
        composed = composed or has_tangents(*tensors, *resets)
    if cache_grad is not None or composed:
        # Under create_graph, in forward mode, and where batches of gradients are mapped over.
        if states.numel() == 0:
            return rnn_plans.backward(*tensors, options, *resets)
        kept = rnn_plans.kept(cache, states)
        return reference.backward(
            options.function, recurrent, states, initial, kept, *tensors[4:], options.clips,
            cache_grad, *resets,
        )  # fmt: skip
    if not _is_compiling() and unobserved(*tensors, *resets):
        return rnn_plans.backward(*tensors, options, *resets)
    if not _is_compiling():
        flops.announce()
    recurrent, states, initial, *others = tensors
    found = _backward_op(recurrent, states, initial, *resets, *others, *options.flat())
    return tuple(found if reset_states is not None else found[:2])


# --- Registration -----------------------------------------------------------------------------


def _forward(*args: Any) -> Any:
    given, options = _split(args)
    return tuple(rnn_plans.forward(given, options, args[-1]))


def _forward_fake(*args: Any) -> Any:
    given, options = _split(args)
    return tuple(rnn_plans.empty_outputs(given.inputs, options.function, args[-1]))


def _forward_autograd(*args: Any) -> Any:
    given, options = _split(args)
    if _transforms_active() or has_tangents(*given):
        return _forward_composed(*args)
    if torch.is_grad_enabled() and wants_gradient(*given):
        return tuple(Rnn.apply(*given, options, False))  # type: ignore[no-untyped-call]
    with torch._C._AutoDispatchBelowAutograd():
        return _op(*args)


def _forward_composed(*args: Any) -> Any:
    """Under ``torch.func``, or in forward mode. Who differentiates the cache is the first derivative alone."""
    given, options = _split(args)
    return *_transformed(given, options), given.inputs.new_empty(0)


def _split(args: Sequence[Any]) -> tuple[Arguments, Options]:
    """Tensors and options, as the operator takes them."""
    count = len(Arguments._fields)
    return Arguments(*args[:count]), Options.of(*args[count:-1])


def _backward_impl(*args: Any) -> Any:
    recurrent, states, initial, reset, anew, cache, grad, final, *flat = args
    tensors = recurrent, states, initial, cache, grad, final
    return _three(states, rnn_plans.backward(*tensors, Options.of(*flat), reset, anew))


def _backward_fake(*args: Any) -> Any:
    function = Options.of(*args[8:]).function
    return _three(args[1], rnn_plans.empty_gradients(args[1], function, args[4] is not None))


def _three(states: Tensor, gradients: Sequence[Tensor]) -> Any:
    """The three results of the operator; an empty tensor stands for the gradient of ``reset_states`` if there
    are none."""
    return *gradients, *(states.new_empty(0) for _ in range(3 - len(gradients)))


def _backward_autograd(*args: Any) -> Any:
    tensors = args[:8]
    differentiated = torch.is_grad_enabled() and wants_gradient(*tensors)
    if differentiated or _transforms_active() or has_tangents(*tensors):
        return _backward_composed(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return _backward_op(*args)


def _backward_composed(*args: Any) -> Any:
    """In operators that torch differentiates and transforms."""
    recurrent, states, initial, reset, anew, cache, grad, final, *flat = args
    tensors = recurrent, states, initial, reset, anew, cache, grad, final
    return _three(states, _backward(*tensors, None, Options.of(*flat)))


_OPTIONS = "str function, str backend, float forward_clip, float recurrent_clip, bool recurrent_cut"
_op = register(
    "rnn(Tensor inputs, Tensor recurrent, Tensor bias, Tensor? initial, Tensor? reset, "
    f"Tensor? reset_states, {_OPTIONS}, bool training) -> (Tensor, Tensor, Tensor)",
    __name__,
    {
        "device": "_forward",
        "Autograd": "_forward_autograd",
        "Meta": "_forward_fake",
        "FuncTorchBatchedDecomposition": "_forward_composed",
    },
)
_backward_op = register(
    "rnn_backward(Tensor recurrent, Tensor states, Tensor? initial, Tensor? reset, Tensor? reset_states, "
    f"Tensor cache, Tensor states_grad, Tensor? final_grad, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
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
