"""``rnn`` in torch: dispatch, and derivatives in both modes, of any order.

The first reverse-mode derivative is a kernel and a product of matrices. Further ones, forward mode and
``torch.func`` go through plain torch, step by step.
"""

from __future__ import annotations

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
    inputs, recurrent, bias, initial = given
    if inputs.numel() == 0:
        count, (batch, time, _, heads, dim) = len(SIZES[options.function].states), inputs.shape
        if initial is None:
            initial = inputs.new_zeros(count, batch, heads, dim)
        return inputs.new_empty(count, batch, time, heads, dim), initial.clone()
    states, _ = reference.forward(options.function, inputs, recurrent, bias, initial)
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
        options: Options,
        direct: bool,
    ) -> Outputs:
        given = Arguments(inputs, recurrent, bias, initial)
        if direct:
            made = rnn_plans.forward(given, options, True)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                made = Outputs(*_op(*given, *options.flat(), True))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(recurrent, initial, made.states, made.cache)
        ctx.options, ctx.required = options, _required()
        return made

    @staticmethod
    def backward(ctx: Any, states_grad: Any, last_grad: Any, cache_grad: Any) -> Any:
        if states_grad is None and last_grad is None and cache_grad is None:
            return (None,) * 6
        recurrent, initial, states, cache = ctx.saved_tensors
        function = ctx.options.function
        if states_grad is None:
            states_grad = torch.zeros_like(states)
        tensors = recurrent, states, initial, cache, states_grad, last_grad
        if _is_compiling():  # by compiled autograd, which knows of no context variables
            gates_grad, initial_grad = _backward(*tensors, cache_grad, ctx.options)
        else:
            with policy.as_required(ctx.required):
                gates_grad, initial_grad = _backward(*tensors, cache_grad, ctx.options)
        wanted = ctx.needs_input_grad
        inputs_grad, recurrent_grad, bias_grad = reference.parameter_grads(
            function, gates_grad, states, initial, (wanted[1], wanted[2])
        )
        return (
            inputs_grad if wanted[0] else None,
            recurrent_grad,
            bias_grad,
            initial_grad if wanted[3] else None,
            None,
            None,
        )


def _backward(
    recurrent: Tensor,
    states: Tensor,
    initial: Tensor | None,
    cache: Tensor,
    states_grad: Tensor,
    last_grad: Tensor | None,
    cache_grad: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    tensors = recurrent, states, initial, cache, states_grad, last_grad
    if cache_grad is not None and cache_grad.numel() == 0:
        cache_grad = None
    differentiated = torch.is_grad_enabled() and wants_gradient(*tensors)
    if differentiated and options.clips != Clips():
        raise RuntimeError(
            "forward_clipval, gradient_recurrent_clipval and gradient_recurrent_cut change what "
            "gradients are, and those have no derivatives: create_graph does not go with them"
        )
    composed = differentiated or _transforms_active()
    if not _is_compiling():
        composed = composed or has_tangents(*tensors)
    if cache_grad is not None or composed:
        # Under create_graph, in forward mode, and where batches of gradients are mapped over.
        if states.numel() == 0:
            return rnn_plans.backward(*tensors, options)
        kept = rnn_plans.kept(cache, states)
        return reference.backward(
            options.function, recurrent, states, initial, kept, *tensors[4:], options.clips,
            cache_grad,
        )  # fmt: skip
    if not _is_compiling() and unobserved(*tensors):
        return rnn_plans.backward(*tensors, options)
    if not _is_compiling():
        flops.announce()
    gates_grad, initial_grad = _backward_op(*tensors, *options.flat())
    return gates_grad, initial_grad


# --- Registration -----------------------------------------------------------------------------


def _forward(inputs: Tensor, recurrent: Tensor, bias: Tensor, initial: Any, *flat: Any) -> Any:
    given, options = Arguments(inputs, recurrent, bias, initial), Options.of(*flat[:-1])
    return tuple(rnn_plans.forward(given, options, flat[-1]))


def _forward_fake(inputs: Tensor, recurrent: Tensor, bias: Tensor, initial: Any, *flat: Any) -> Any:
    return tuple(rnn_plans.empty_outputs(inputs, Options.of(*flat[:-1]).function, flat[-1]))


def _forward_autograd(
    inputs: Tensor, recurrent: Tensor, bias: Tensor, initial: Any, *flat: Any
) -> Any:
    given = Arguments(inputs, recurrent, bias, initial)
    if _transforms_active() or has_tangents(*given):
        return _forward_composed(*given, *flat)
    if torch.is_grad_enabled() and wants_gradient(*given):
        return tuple(Rnn.apply(*given, Options.of(*flat[:-1]), False))  # type: ignore[no-untyped-call]
    with torch._C._AutoDispatchBelowAutograd():
        return _op(*given, *flat)


def _forward_composed(
    inputs: Tensor, recurrent: Tensor, bias: Tensor, initial: Any, *flat: Any
) -> Any:
    """Under ``torch.func``, or in forward mode. Who differentiates the cache is the first derivative alone."""
    given = Arguments(inputs, recurrent, bias, initial)
    return *_transformed(given, Options.of(*flat[:-1])), inputs.new_empty(0)


def _backward_impl(*args: Any) -> Any:
    recurrent, states, initial, cache, grad, final, *flat = args
    options = Options.of(*flat)
    return tuple(rnn_plans.backward(recurrent, states, initial, cache, grad, final, options))


def _backward_fake(*args: Any) -> Any:
    return tuple(rnn_plans.empty_gradients(args[1], Options.of(*args[6:]).function))


def _backward_autograd(*args: Any) -> Any:
    tensors = args[:6]
    differentiated = torch.is_grad_enabled() and wants_gradient(*tensors)
    if differentiated or _transforms_active() or has_tangents(*tensors):
        return _backward_composed(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return _backward_op(*args)


def _backward_composed(*args: Any) -> Any:
    """In operators that torch differentiates and transforms."""
    recurrent, states, initial, cache, grad, final, *flat = args
    options = Options.of(*flat)
    return _backward(recurrent, states, initial, cache, grad, final, None, options)


_OPTIONS = "str function, str backend, float forward_clip, float recurrent_clip, bool recurrent_cut"
_op = register(
    "rnn(Tensor inputs, Tensor recurrent, Tensor bias, Tensor? initial, "
    f"{_OPTIONS}, bool training) -> (Tensor, Tensor, Tensor)",
    __name__,
    {
        "device": "_forward",
        "Autograd": "_forward_autograd",
        "Meta": "_forward_fake",
        "FuncTorchBatchedDecomposition": "_forward_composed",
    },
)
_backward_op = register(
    "rnn_backward(Tensor recurrent, Tensor states, Tensor? initial, Tensor cache, "
    f"Tensor states_grad, Tensor? final_grad, {_OPTIONS}) -> (Tensor, Tensor)",
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
