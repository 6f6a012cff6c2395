"""``ssd_scan`` in torch: dispatch, and derivatives in both modes, of any order.

The first reverse-mode derivative is kernels. Further ones, forward mode and ``torch.func`` are composed of torch's matrix
products: see ``composed``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scan_registry.base.environment import flag
from scan_registry.kernels.ssd_scan import reference
from scan_registry.kernels.ssd_scan.op import composed, plans
from scan_registry.kernels.ssd_scan.op.arguments import (
    DIFFERENTIABLE,
    Arguments,
    Options,
    Outer,
    normalised,
)
from scan_registry.kernels.ssd_scan.op.flops import FORMULAS
from scan_registry.ops.autograd import Derivatives, Gradients, Pass, Recorded, Recording, Tensors
from scan_registry.ops.call import fast_path


class SSDScan(Recorded):
    """Saves the arguments."""


class _Derivatives(Derivatives):
    """Of ``Arguments``, which are saved."""

    options, tensors, others, kept, node = Options, 10, 2, 0, SSDScan

    def forward(self, tensors: Tensors, options: Options, training: bool) -> plans.Outputs:
        return plans.forward(Arguments(*tensors), options)

    def empty(self, tensors: Tensors, options: Options, training: bool) -> plans.Outputs:
        return plans.empty_outputs(Arguments(*tensors), options)

    def composed(self, tensors: Tensors, options: Options) -> plans.Outputs:
        out, final_state = composed.forward(Arguments(*tensors), options)
        return out, final_state if options.final else None

    def saved(self, ctx: Any, tensors: Tensors, results: Any) -> Tensors:
        return tensors

    def with_zeros(self, ctx: Any, saved: Tensors, grads: Tensors) -> Tensors:
        out_grad, final_grad = grads
        return torch.zeros_like(saved[0]) if out_grad is None else out_grad, final_grad

    def plan_backward(self, back: Pass) -> Callable[..., Gradients]:
        return plans.make_backward(*back.saved, *back.grads, back.options, back.wanted)

    def backward(self, back: Pass) -> Gradients:
        grads = back.grads[0], back.grads[1]
        return plans.backward(Arguments(*back.saved), *grads, back.options, back.wanted)

    def empty_gradients(self, back: Pass) -> Gradients:
        pairs = zip(back.saved[:DIFFERENTIABLE], back.wanted, strict=True)
        return tuple(t.new_empty(t.shape) if want and t is not None else None for t, want in pairs)

    def composed_backward(self, back: Pass) -> Gradients:
        grads = back.grads[0], back.grads[1]
        with torch.enable_grad():
            return composed.backward(Arguments(*back.saved), back.options, *grads, back.wanted)


OPERATOR = _Derivatives()


def scan(arguments: Arguments, options: Options, outer: Outer) -> plans.Outputs:
    """The output, and the final state if it is asked for, of ``normalised`` arguments; differentiable."""
    out, final_state = OPERATOR(arguments, options)
    return with_outer(out, arguments.x, outer), final_state


def with_outer(out: Tensor, x: Tensor, outer: Outer) -> Tensor:
    """The operator's output with what torch's own operators compute of it."""
    if outer.D is None and outer.z is None:
        return out
    wide = out.to(reference.compute_dtype(out.dtype))
    skipped = wide if outer.D is None else wide + outer.D * x
    return reference.finished(skipped, x, None, outer.z)


def _plan(recorded: bool, tensors: Tensors, options: Sequence[Any]) -> Callable[..., Any] | None:
    """None for a call whose arguments are converted, or whose values are checked in every call."""
    softplus, low, high, chunk_size, final, backend = options
    every = Arguments._make(tensors)
    arguments, how, outer = normalised(
        every.x, every.dt, every.A, every.B, every.C, every.D, None, every.dt_bias, every.initial_state, every.seq_idx,
        every.cu_seqlens, softplus, (low, high), chunk_size, final, backend,
    )  # fmt: skip
    x, packed = arguments.x, arguments.cu_seqlens is not None
    alike = all(one is other for one, other in zip(arguments, tensors, strict=True))
    if not alike or outer.D is not None or (packed and not plans.on_gpu(x)):
        return None
    with torch.no_grad():
        compute = plans.make_forward(*tensors, how)
    run: Callable[..., Any] = compute
    if recorded:
        run = partial(OPERATOR.record, (Recording(OPERATOR, how, compute), None))
    if packed:
        return lambda *tensors: None if flag("SCAN_REGISTRY_DEBUG") else run(*tensors)
    return run


#: The output, and the final state or None, of a call: from ``Arguments`` as the caller passes them, and ``dt_softplus``, both
#: limits, ``chunk_size``, ``return_final_state`` and ``backend``. None if the call does not take the fast path.
fast_scan = fast_path(_plan)

_TENSORS = (
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? dt_bias, Tensor? initial_state, "
    "Tensor? seq_idx, Tensor? cu_seqlens"
)
_OPTIONS = "bool softplus, float low, float high, int chunk_size, bool final, str backend"
OPERATOR.register(
    __name__,
    "OPERATOR",
    FORMULAS,
    f"ssd_scan({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor)",
    f"ssd_scan_backward({_TENSORS}, Tensor out_grad, Tensor? final_grad, {_OPTIONS}, bool[{DIFFERENTIABLE}] wanted) -> "
    f"({', '.join(['Tensor'] * DIFFERENTIABLE)})",
)
