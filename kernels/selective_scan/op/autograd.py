"""``selective_scan`` in torch: dispatch, and derivatives in both modes, of any order.

The first reverse-mode derivative is a kernel. Further ones, forward mode and ``torch.func`` are composed of
operators that torch differentiates: see ``selective_scan_composed``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from scan_registry.kernels.selective_scan.op import composed, plans
from scan_registry.kernels.selective_scan.op.arguments import (
    Arguments,
    Options,
    as_given,
    grouped,
    normalised,
)
from scan_registry.kernels.selective_scan.op.flops import FORMULAS
from scan_registry.ops.autograd import Derivatives, Gradients, Pass, Recorded, Tensors
from scan_registry.ops.call import casting, fast_path
from scan_registry.ops.strides import lying_as_new

#: u, delta and z, whose gradients have the strides of ``empty_like(u)``; those of others have their last dimension innermost.
_SEQUENCES = (0, 1, 6)
#: C and delta_bias, whose gradients may lie beside those of B and of D.
_SECOND_OF_PAIRS = (4, 7)
_DIFFERENTIABLE = 9


class SelectiveScan(Recorded):
    """Saves the arguments, and checkpoints of the states."""


class _Derivatives(Derivatives):
    """Of ``Arguments``; those of calls on the fast path may lack the dimension of groups. Saved are these and the
    checkpoints."""

    options, tensors, others, trains = Options, 10, 1, True
    node = SelectiveScan

    def forward(self, tensors: Tensors, options: Options, training: bool) -> plans.Outputs:
        return plans.forward(Arguments(*tensors), options, training)

    def empty(self, tensors: Tensors, options: Options, training: bool) -> plans.Outputs:
        return plans.empty_outputs(Arguments(*tensors), options, training)

    def composed(self, tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
        return composed.forward(Arguments(*tensors), options)

    def on_composed(self, *args: Any) -> Tensors:
        tensors, options, _ = self.split(args)
        nothing = tensors[0].new_empty(0, dtype=torch.float32)
        return *self.composed(tensors, options), nothing

    def saved(self, ctx: Any, tensors: Tensors, results: Any) -> Tensors:
        if ctx.recording.results is None:
            ctx.mark_non_differentiable(results[2])
        return *tensors, results[2]

    def asked_for(self, results: Tensors, options: Options) -> Tensors:
        return results[:2]

    def incoming(self, grads: Tensors, options: Options) -> Tensors:
        return (*grads, None)[:2]

    def plan_backward(self, back: Pass) -> Callable[..., Gradients]:
        return plans.make_backward(*back.saved, *back.grads, back.options, back.wanted)

    def backward(self, back: Pass) -> Gradients:
        *tensors, checkpoints = back.saved
        arguments, grads = Arguments(*tensors), (back.grads[0], back.grads[1])
        return plans.backward(arguments, checkpoints, *grads, back.options, back.wanted)

    def empty_gradients(self, back: Pass) -> Gradients:
        sequence, pairs = back.saved[0], zip(back.saved[:_DIFFERENTIABLE], back.wanted, strict=True)
        return tuple(
            None
            if t is None or not want
            else torch.empty_like(sequence)
            if place in _SEQUENCES
            else t.new_empty(t.shape)
            for place, (t, want) in enumerate(pairs)
        )

    def composed_backward(self, back: Pass) -> Gradients:
        arguments, grads = Arguments(*back.saved[:-1]), (back.grads[0], back.grads[1])
        with torch.enable_grad():
            return composed.backward(arguments, back.options, *grads, back.wanted)

    def derivative(self, back: Pass) -> Gradients:
        arguments = Arguments(*back.saved[:-1])
        gradients = super().derivative(back._replace(saved=(*grouped(arguments), back.saved[-1])))
        return plans.in_shapes(arguments, gradients)

    def backward_on_device(self, *args: Any) -> Any:
        back = self.backward_split(args)
        gradients = [*self.backward(back)]
        for place, grad in enumerate(gradients):
            if grad is None:
                continue
            if place in _SECOND_OF_PAIRS:  # outputs of an operator share no memory
                gradients[place] = grad.clone(memory_format=torch.contiguous_format)
            elif place in _SEQUENCES:
                gradients[place] = lying_as_new(back.saved[0], grad)
            else:
                gradients[place] = grad.contiguous()
        return self.together(gradients, back)


OPERATOR = _Derivatives()


def scan(arguments: Arguments, options: Options) -> tuple[Tensor, Tensor]:
    """The output and the final state of ``normalised`` arguments; differentiable."""
    out, final_state, *_ = OPERATOR(arguments, options)
    return out, final_state


def first_derivative(
    arguments: Arguments,
    checkpoints: Tensor,
    out_grad: Tensor,
    last_grad: Tensor | None,
    options: Options,
    wanted: tuple[bool, ...],
) -> Gradients:
    """The gradients that are wanted, differentiable where derivatives are recorded."""
    back = Pass((*arguments, checkpoints), (out_grad, last_grad), options, wanted)
    return OPERATOR.derivative(back)


def _plan(recorded: bool, tensors: Tensors, options: Sequence[Any]) -> Callable[..., Any] | None:
    """None for a call whose arguments are converted but for a cast, or whose values are checked in every call."""
    softplus, final, backend = options
    if type(final) is not bool:
        return None  # it is refused
    arguments = normalised(*Arguments._make(tensors), softplus, backend)
    packed, how = tensors[-1] is not None, Options(softplus, backend)
    if packed and not plans.on_gpu(arguments.u):
        return None
    taken = as_given(tensors, arguments)
    if any(one is not other for one, other in zip(tensors, taken, strict=True)):
        return casting(fast_scan, tensors, taken, tuple(options))
    with torch.no_grad():
        compute = plans.make_forward(*tensors, how, recorded, final)
    which = slice(2) if final else 0
    run: Callable[..., Any] = lambda *tensors: compute(*tensors)[which]  # noqa: E731
    return OPERATOR.fast_run(how, compute, run, 2 if final else 0, recorded, packed)


#: The output of a call, and the final state if it is asked for, from ``Arguments`` as the caller gives them, and
#: ``delta_softplus``, ``return_final_state`` and ``backend``. None if the call does not take the fast path.
fast_scan = fast_path(_plan)

_TENSORS = (
    "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, "
    "Tensor? delta_bias, Tensor? initial_state, Tensor? cu_seqlens"
)
OPERATOR.register(
    __name__,
    "OPERATOR",
    FORMULAS,
    f"selective_scan({_TENSORS}, bool softplus, str backend, bool training) -> (Tensor, Tensor, Tensor)",
    f"selective_scan_backward({_TENSORS}, Tensor checkpoints, Tensor out_grad, Tensor? final_grad, "
    "bool softplus, str backend, bool[] wanted) -> "
    f"({', '.join(['Tensor'] * _DIFFERENTIABLE)})",
)
