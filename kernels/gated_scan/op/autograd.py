"""``gated_scan`` in torch: dispatch, and derivatives in both modes, of any order.

``gated_scan_plans`` computes the first reverse-mode derivative, from inputs and states alone. ``gated_scan_composed`` computes
higher derivatives, forward mode and ``torch.func``, with operators that torch differentiates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from scan_registry.kernels.gated_scan.kinds import KINDS
from scan_registry.kernels.gated_scan.op import composed, plans
from scan_registry.kernels.gated_scan.op.arguments import RANGES, Arguments, Options, normalised
from scan_registry.kernels.gated_scan.op.flops import FORMULAS
from scan_registry.ops.autograd import Derivatives, Gradients, Pass, Recorded, Tensors
from scan_registry.ops.call import fast_path
from scan_registry.ops.strides import lying_as_new

Outputs = tuple[Tensor, Tensor | None]

_is_compiling = torch.compiler.is_compiling
_is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor


class GatedScan(Recorded):
    """Saves inputs and states for the backward pass."""


class _Derivatives(Derivatives):
    """Of ``Arguments.flat``. Saved are these and the states."""

    options, others, node, shaped = Options, 2, GatedScan, None

    def forward(self, tensors: Tensors, options: Options, training: bool) -> Outputs:
        return plans.forward(Arguments.of(options.kind, tensors), options)

    def empty(self, tensors: Tensors, options: Options, training: bool) -> Outputs:
        return composed.empty(tensors[0], tensors[-1], options)

    def composed(self, tensors: Tensors, options: Options) -> Outputs:
        return composed.forward(Arguments.of(options.kind, tensors), options)

    def saved(self, ctx: Any, tensors: Tensors, results: Any) -> Tensors:
        return *tensors, results[0]

    def plan_backward(self, back: Pass) -> Callable[..., Gradients] | None:
        if _is_misaligned(back.saved[-3]):
            return None
        return plans.make_backward(*back.saved, *back.grads, back.options, back.wanted)

    def backward(self, back: Pass) -> Gradients:
        arguments = Arguments.of(back.options.kind, back.saved[:-1])
        grads = back.grads[0], back.grads[1]
        return plans.backward(arguments, back.saved[-1], *grads, back.options, back.wanted)

    def empty_gradients(self, back: Pass) -> Gradients:
        pairs = zip(self.inputs(back.saved[:-1]), back.wanted, strict=True)
        return tuple(torch.empty_like(t) if t is not None and want else None for t, want in pairs)

    def composed_backward(self, back: Pass) -> Gradients:
        with torch.enable_grad():
            return _composed(back)

    def derivative(self, back: Pass) -> Gradients:
        if not _is_compiling() and any(g is not None and _is_legacy_batched(g) for g in back.grads):
            # ``is_grads_batched`` cannot map over operators that return a list.
            return _composed(back)
        return super().derivative(back)

    def joined(self, tensors: Tensors, options: Options, training: bool) -> Tensors:
        kind, *others = options
        arguments = Arguments.of(kind, tensors)
        apart = arguments.reset, arguments.initial_state, arguments.cu_seqlens
        return kind, [*arguments.inputs], [*arguments.parameters], *apart, *others

    def split(self, args: Sequence[Any]) -> tuple[Tensors, Options, bool]:
        kind, inputs, parameters, reset, initial_state, cu_seqlens, *others = args
        flat = *inputs, *parameters, initial_state, reset, cu_seqlens
        return flat, Options(kind, *others), False

    def backward_joined(self, back: Pass) -> Tensors:
        *tensors, dim, reverse, _, backend = self.joined(back.saved[:-1], back.options, True)
        return *tensors, back.saved[-1], *back.grads, dim, reverse, backend, [*back.wanted]

    def backward_split(self, args: Sequence[Any]) -> Pass:
        states, states_grad, last_grad, dim, reverse, backend, wanted = args[6:]
        final = last_grad is not None
        flat, options, _ = self.split((*args[:6], dim, reverse, final, backend))
        return Pass((*flat, states), (states_grad, last_grad), options, tuple(wanted))

    def backward_on_device(self, *args: Any) -> Any:
        back = self.backward_split(args)
        pairs = zip(self.inputs(back.saved[:-1]), self.backward(back), strict=True)
        return self.together([None if g is None else lying_as_new(t, g) for t, g in pairs], back)

    def together(self, gradients: Sequence[Tensor | None], back: Pass) -> Any:
        return [*super().together(gradients, back)]


def _composed(back: Pass) -> Gradients:
    arguments = Arguments.of(back.options.kind, back.saved[:-1])
    return composed.backward(arguments, back.options, back.grads[0], back.grads[1], back.wanted)


OPERATOR = _Derivatives()


def scan(arguments: Arguments, options: Options) -> Outputs:
    """The states of ``normalised`` arguments, and the final state if it is asked for; differentiable."""
    return OPERATOR(arguments.flat, options)  # type: ignore[no-any-return]


def _is_misaligned(reset: Tensor | None) -> bool:
    """Whether kernels read a copy of it."""
    return reset is not None and reset.data_ptr() & 15 != 0


def _plan(recorded: bool, tensors: Tensors, options: Tensors) -> Callable[..., Any] | None:
    """None for a call whose arguments are converted, or whose values are checked in every call."""
    *inputs, initial_state, reset, cu_seqlens = tensors
    kind, *_ = options
    arguments, how = normalised(kind, inputs, reset, initial_state, cu_seqlens, Options(*options))
    if any(one is not other for one, other in zip(arguments.flat, tensors, strict=True)):
        return None
    checked = cu_seqlens is not None or not RANGES.keys().isdisjoint(KINDS[kind].parameters)
    if _is_misaligned(reset) or (checked and not plans.on_gpu(tensors[0])):
        return None
    with torch.no_grad():
        compute = plans.make_forward(*tensors, how)
    run: Callable[..., Any] = compute if how.final else lambda *tensors: compute(*tensors)[0]
    return OPERATOR.fast_run(how, compute, run, None if how.final else 0, recorded, checked)


#: The result of ``gated_scan``, from ``Arguments.flat`` and ``Options`` as the caller gives them. None if the fast path does
#: not take the call.
fast_scan = fast_path(_plan)

_TENSORS = (
    "str kind, Tensor[] inputs, Tensor[] parameters, Tensor? reset, Tensor? initial_state, "
    "Tensor? cu_seqlens"
)
OPERATOR.register(
    __name__,
    "OPERATOR",
    FORMULAS,
    f"gated_scan({_TENSORS}, int dim, bool reverse, bool final, str backend) -> (Tensor, Tensor)",
    f"gated_scan_backward({_TENSORS}, Tensor states, Tensor? states_grad, Tensor? final_grad, int dim, "
    "bool reverse, str backend, bool[] wanted) -> Tensor[]",
)
