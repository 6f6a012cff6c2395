"""``rnn`` in torch: dispatch, and derivatives in both modes, of any order.

The first reverse-mode derivative is a kernel and a product of matrices. Further ones, forward mode and
``torch.func`` go through plain torch, step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from scan_registry.kernels.rnn import reference
from scan_registry.kernels.rnn.op import plans as rnn_plans
from scan_registry.kernels.rnn.op.arguments import Arguments, Options
from scan_registry.kernels.rnn.op.flops import FORMULAS
from scan_registry.kernels.rnn.op.plans import Outputs
from scan_registry.kernels.rnn.problem import SIZES, Clips
from scan_registry.ops.autograd import Derivatives, Gradients, Pass, Recorded, Tensors
from scan_registry.ops.call import wants_gradient

_OPTIONS = "str function, str backend, float forward_clip, float recurrent_clip, bool recurrent_cut"


class Rnn(Recorded):
    """Returns the cache, too, which second derivatives flow through."""


class _Derivatives(Derivatives):
    """Of ``Arguments``. Saved are R, the initial states, all states, the cache, and the resets. The registered backward pass,
    and methods that say what it does, compute gradients of the gates, of the initial states and of ``reset_states``."""

    options, tensors, others, grads, trains, node = Options, 6, 0, 3, True, Rnn
    shaped = 2

    def flat(self, options: Options) -> tuple[Any, ...]:
        return options.flat()

    def unflat(self, values: Sequence[Any]) -> Options:
        return Options.of(*values)

    def forward(self, tensors: Tensors, options: Options, training: bool) -> Outputs:
        return rnn_plans.forward(Arguments(*tensors), options, training)

    def empty(self, tensors: Tensors, options: Options, training: bool) -> Outputs:
        return rnn_plans.empty_outputs(tensors[0], options.function, training)

    def composed(self, tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
        if options.clips != Clips():
            raise ValueError(
                "forward_clipval, gradient_recurrent_clipval and gradient_recurrent_cut change what "
                "gradients are, and do not go with torch.func or forward-mode derivatives"
            )
        inputs, recurrent, bias, initial, reset, reset_states = tensors
        if inputs.numel() == 0:
            count, (batch, time, _, heads, dim) = len(SIZES[options.function].states), inputs.shape
            if initial is None:
                initial = inputs.new_zeros(count, batch, heads, dim)
            return inputs.new_empty(count, batch, time, heads, dim), initial.clone()
        resets: dict[str, Any] = {"reset": reset, "reset_states": reset_states}
        states, _ = reference.forward(options.function, inputs, recurrent, bias, initial, **resets)
        return states, states[:, :, -1].clone()

    def asked_for(self, results: Tensors, options: Options) -> Tensors:
        return results[:2]

    def saved(self, ctx: Any, tensors: Tensors, results: Any) -> Tensors:
        _, recurrent, _, initial, *resets = tensors
        return recurrent, initial, results[0], results[2], *resets

    def incoming(self, grads: Tensors, options: Options) -> Tensors:
        return grads

    def plan_backward(self, back: Pass) -> Callable[..., Gradients] | None:
        if back.grads[2] is not None:
            return None
        options, wanted = back.options, back.wanted  # the plan outlives the tensors of this pass
        run = rnn_plans.plan_backward(*(*_in_order(back), options))

        def plan(*tensors: Any) -> Gradients:
            here = Pass(tensors[:6], tensors[6:], options, wanted)
            return _of_arguments(rnn_plans.within_memory(run, *_in_order(here)), here)

        return plan

    def backward(self, back: Pass) -> Gradients:
        *tensors, reset, reset_states = _in_order(back)
        return _three(rnn_plans.backward(*(*tensors, back.options, reset, reset_states)))

    def empty_gradients(self, back: Pass) -> Gradients:
        states, with_reset_states = back.saved[2], back.saved[5] is not None
        return _three(rnn_plans.empty_gradients(states, back.options.function, with_reset_states))

    def composed_backward(self, back: Pass) -> Gradients:
        differentiated = torch.is_grad_enabled() and wants_gradient(*self.differentiated(back))
        if differentiated and back.options.clips != Clips():
            raise RuntimeError(
                "forward_clipval, gradient_recurrent_clipval and gradient_recurrent_cut change what "
                "gradients are, and those have no derivatives: create_graph does not go with them"
            )
        recurrent, initial, states, cache, *resets = back.saved
        if states.numel() == 0:
            return self.backward(back)
        states_grad, last_grad, cache_grad = back.grads
        kept = rnn_plans.kept(cache, states)
        return _three(reference.backward(
            back.options.function, recurrent, states, initial, kept, states_grad, last_grad, back.options.clips,
            cache_grad, *resets,
        ))  # fmt: skip

    def differentiated(self, back: Pass) -> Tensors:
        return *back.saved, *back.grads[:2]

    def derivative(self, back: Pass) -> Gradients:
        states_grad, last_grad, cache_grad = back.grads
        if cache_grad is not None and cache_grad.numel():
            return _of_arguments(self.composed_backward(back), back)
        wanted = True, True, back.saved[5] is not None
        grads = states_grad, last_grad, None
        return _of_arguments(super().derivative(back._replace(grads=grads, wanted=wanted)), back)

    def backward_joined(self, back: Pass) -> Tensors:
        recurrent, initial, states, cache, *resets = back.saved
        of_results = back.grads[:2]
        return recurrent, states, initial, *resets, cache, *of_results, *back.options.flat()

    def backward_split(self, args: Sequence[Any]) -> Pass:
        recurrent, states, initial, reset, reset_states, cache, grad, final, *flat = args
        saved = recurrent, initial, states, cache, reset, reset_states
        return Pass(saved, (grad, final, None), Options.of(*flat), None)


def _in_order(back: Pass) -> tuple[Any, ...]:
    """The tensors of ``rnn_plans.backward``."""
    recurrent, initial, states, cache, *resets = back.saved
    return recurrent, states, initial, cache, *back.grads[:2], *resets


def _three(gradients: Sequence[Tensor]) -> Gradients:
    """None for the gradient of ``reset_states`` if there are none."""
    return *gradients, *[None] * (3 - len(gradients))


def _of_arguments(computed: Sequence[Any], back: Pass) -> Gradients:
    """The gradients of ``Arguments``, from those that the registered backward pass computes."""
    (_, initial, states, _, reset, reset_states), wanted = back.saved, back.wanted
    gates_grad, initial_grad, *more = computed
    of_inputs, of_recurrent, of_bias = reference.parameter_grads(
        back.options.function, gates_grad, states, initial, wanted[1:3], reset, reset_states
    )
    return (
        of_inputs if wanted[0] else None,
        of_recurrent,
        of_bias,
        initial_grad if wanted[3] else None,
        None,
        more[0] if wanted[5] else None,
    )


OPERATOR = _Derivatives()


def rnn(arguments: Arguments, options: Options) -> tuple[Tensor, Tensor]:
    """States (states, B, T, N, D) and those after the last step (states, B, N, D), of ``normalised``
    arguments; differentiable."""
    states, last, *_ = OPERATOR(arguments, options)
    return states, last


OPERATOR.register(
    __name__,
    "OPERATOR",
    FORMULAS,
    "rnn(Tensor inputs, Tensor recurrent, Tensor bias, Tensor? initial, Tensor? reset, "
    f"Tensor? reset_states, {_OPTIONS}, bool training) -> (Tensor, Tensor, Tensor)",
    "rnn_backward(Tensor recurrent, Tensor states, Tensor? initial, Tensor? reset, Tensor? reset_states, "
    f"Tensor cache, Tensor states_grad, Tensor? final_grad, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
