"""``ssd_scan`` in torch: dispatch, and derivatives in both modes, of any order.

The first reverse-mode derivative is kernels. Further ones, forward mode and ``torch.func`` are composed of torch's matrix
products: see ``composed``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from scan_registry.kernels.ssd_scan.op import composed, plans
from scan_registry.kernels.ssd_scan.op.arguments import (
    DIFFERENTIABLE,
    Arguments,
    Options,
    normalised,
)
from scan_registry.kernels.ssd_scan.op.flops import FORMULAS
from scan_registry.ops.autograd import Derivatives, Gradients, Pass, Recorded, Tensors
from scan_registry.ops.call import casting, fast_path


class SSDScan(Recorded):
    """Saves the arguments, and what ``z`` gates."""


class _Derivatives(Derivatives):
    """Of ``Arguments``, which are saved, and with them what ``z`` gates."""

    options, tensors, others, trains, node = Options, 11, 2, True, SSDScan

    def forward(self, tensors: Tensors, options: Options, training: bool) -> plans.Outputs:
        return plans.forward(Arguments(*tensors), options, training)

    def empty(self, tensors: Tensors, options: Options, training: bool) -> plans.Outputs:
        return plans.empty_outputs(Arguments(*tensors), options, training)

    def composed(self, tensors: Tensors, options: Options) -> tuple[Tensor, Tensor | None]:
        return composed.forward(Arguments(*tensors), options)

    def saved(self, ctx: Any, tensors: Tensors, results: Any) -> Tensors:
        ungated = results[2]
        if ungated is not None and ctx.recording.results is None:
            ctx.mark_non_differentiable(ungated)
        return *tensors, ungated

    def plan_backward(self, back: Pass) -> Callable[..., Gradients]:
        return plans.make_backward(*back.saved, *back.grads, back.options, back.wanted)

    def backward(self, back: Pass) -> Gradients:
        *tensors, ungated = back.saved
        grads = back.grads[0], back.grads[1]
        return plans.backward(Arguments(*tensors), ungated, *grads, back.options, back.wanted)

    def empty_gradients(self, back: Pass) -> Gradients:
        pairs = zip(back.saved[:DIFFERENTIABLE], back.wanted, strict=True)
        return tuple(t.new_empty(t.shape) if want and t is not None else None for t, want in pairs)

    def composed_backward(self, back: Pass) -> Gradients:
        grads = back.grads[0], back.grads[1]
        with torch.enable_grad():
            return composed.backward(Arguments(*back.saved[:-1]), back.options, *grads, back.wanted)


OPERATOR = _Derivatives()


def scan(arguments: Arguments, options: Options) -> tuple[Tensor, Tensor | None]:
    """The output, and the final state if it is asked for, of ``normalised`` arguments; differentiable."""
    out, final_state, *_ = OPERATOR(arguments, options)
    return out, final_state


def _plan(recorded: bool, tensors: Tensors, options: Sequence[Any]) -> Callable[..., Any] | None:
    """None for a call whose arguments are converted but for a cast, or whose values are checked in every call."""
    softplus, low, high, chunk_size, final, backend = options
    every = Arguments._make(tensors)
    arguments, how = normalised(*every, softplus, (low, high), chunk_size, final, backend)
    x, packed = arguments.x, arguments.cu_seqlens is not None
    if packed and not plans.on_gpu(x):
        return None
    if any(one is not other for one, other in zip(arguments, tensors, strict=True)):
        return casting(fast_scan, tensors, arguments, tuple(options))
    with torch.no_grad():
        compute = plans.make_forward(*tensors, how, recorded)
    return OPERATOR.fast_run(how, compute, compute, 2, recorded, packed)


#: The output, and the final state or None, of a call: from ``Arguments`` as the caller passes them, and ``dt_softplus``, both
#: limits, ``chunk_size``, ``return_final_state`` and ``backend``. None if the call does not take the fast path.
fast_scan = fast_path(_plan)

_TENSORS = (
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, "
    "Tensor? initial_state, Tensor? seq_idx, Tensor? cu_seqlens"
)
_OPTIONS = "bool softplus, float low, float high, int chunk_size, bool final, str backend"
OPERATOR.register(
    __name__,
    "OPERATOR",
    FORMULAS,
    f"ssd_scan({_TENSORS}, {_OPTIONS}, bool training) -> (Tensor, Tensor, Tensor)",
    f"ssd_scan_backward({_TENSORS}, Tensor? ungated, Tensor out_grad, Tensor? final_grad, {_OPTIONS}, bool[{DIFFERENTIABLE}] wanted) -> "
    f"({', '.join(['Tensor'] * DIFFERENTIABLE)})",
)
