"""``causal_conv1d`` in torch: dispatch, and derivatives in both modes, of any order.

The first reverse-mode derivative is two kernels, the second of which adds up partial sums. Further derivatives,
forward mode and ``torch.func`` are computed in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from scan_registry.kernels.causal_conv1d import reference
from scan_registry.kernels.causal_conv1d.op import plans
from scan_registry.kernels.causal_conv1d.op.arguments import (
    Arguments,
    Options,
    UpdateArguments,
    UpdateOptions,
    normalised,
    update_arguments,
)
from scan_registry.kernels.causal_conv1d.op.flops import FORMULAS
from scan_registry.ops import flops
from scan_registry.ops.autograd import Derivatives, Gradients, Pass, Recorded, Tensors
from scan_registry.ops.call import fast_path, has_tangents, unobserved, unwatched
from scan_registry.ops.checks import refuse_mapped
from scan_registry.ops.registration import register
from scan_registry.ops.sharded import call_sharded

Outputs = tuple[Tensor, Tensor | None]

_is_compiling = torch.compiler.is_compiling
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling


# --- The convolution --------------------------------------------------------------------------


class CausalConv1d(Recorded):
    """Saves the arguments."""


class _Derivatives(Derivatives):
    """Of ``Arguments``, which are saved."""

    options, tensors, others, kept, node = Options, 6, 2, 0, CausalConv1d

    def forward(self, tensors: Tensors, options: Options, training: bool) -> Outputs:
        return plans.forward(Arguments(*tensors), options)

    def empty(self, tensors: Tensors, options: Options, training: bool) -> Outputs:
        arguments = Arguments(*tensors)
        final_state = arguments.x.new_empty(arguments.state_shape) if options.final else None
        return torch.empty_like(arguments.x), final_state

    def composed(self, tensors: Tensors, options: Options) -> Outputs:
        x, weight, bias, state, seq_idx, cu_seqlens = tensors
        runs = reference.Runs(seq_idx, cu_seqlens)
        return reference.forward(x, weight, bias, state, runs, options.silu, options.final)

    def saved(self, ctx: Any, tensors: Tensors, results: Any) -> Tensors:
        return tensors

    def plan_backward(self, back: Pass) -> Callable[..., Any]:
        return plans.plan_backward(*back.saved, *back.grads, back.options, back.wanted)

    def backward(self, back: Pass) -> Gradients:
        grads = back.grads[0], back.grads[1]
        return plans.backward(Arguments(*back.saved), *grads, back.options, back.wanted)

    def empty_gradients(self, back: Pass) -> Gradients:
        x, weight, *_ = back.saved
        grads = (
            torch.empty_like(x),
            weight.new_empty(weight.shape),
            weight.new_empty(weight.shape[0]),
            x.new_empty(Arguments(*back.saved).state_shape),
        )
        return tuple(grad if want else None for grad, want in zip(grads, back.wanted, strict=True))

    def composed_backward(self, back: Pass) -> Gradients:
        x, weight, bias, state, seq_idx, cu_seqlens = back.saved
        runs, grads = reference.Runs(seq_idx, cu_seqlens), (back.grads[0], back.grads[1])
        gradients = reference.backward(x, weight, bias, state, *grads, runs, back.options.silu)
        return plans.narrowed(Arguments(*back.saved), gradients, back.wanted)

    def backward_joined(self, back: Pass) -> Tensors:
        silu, _, backend = back.options
        return *back.saved, *back.grads, silu, backend, [*back.wanted]

    def backward_split(self, args: Sequence[Any]) -> Pass:
        *tensors, silu, backend, wanted = args
        options = Options(silu, False, backend)
        return Pass(tuple(tensors[:6]), tuple(tensors[6:]), options, tuple(wanted))


OPERATOR = _Derivatives()


def call(tensors: tuple[Any, ...], request: tuple[Any, ...]) -> Outputs:
    """y, and the final state if it is asked for, of the public function's arguments as they are given; differentiable."""
    if not _is_dynamo_compiling() and unwatched():
        outputs = _fast_call(tensors, request)
        if outputs is not None:
            return outputs  # type: ignore[no-any-return]
    if (sharded := call_sharded("causal_conv1d", tensors, request)) is not None:
        return sharded  # type: ignore[no-any-return]
    return convolve(*normalised(*tensors, *request))


def convolve(arguments: Arguments, options: Options) -> Outputs:
    """Likewise, of ``normalised`` arguments."""
    return OPERATOR(arguments, options)  # type: ignore[no-any-return]


def _plan(recorded: bool, tensors: Tensors, options: Tensors) -> Callable[..., Any] | None:
    """None for a call whose arguments are converted, or whose values are checked in every call."""
    arguments, how = normalised(*tensors, *options)
    packed = arguments.cu_seqlens is not None
    if any(one is not other for one, other in zip(arguments, tensors, strict=True)):
        return None
    if packed and not arguments.x.is_cuda:
        return None
    with torch.no_grad():
        run = plans.plan_forward(*tensors, how)
    return OPERATOR.fast_run(how, run, run, None, recorded, packed)


_fast_call = fast_path(_plan)

_TENSORS = "Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? seq_idx, Tensor? cu_seqlens"
OPERATOR.register(
    __name__,
    "OPERATOR",
    FORMULAS,
    f"causal_conv1d({_TENSORS}, bool silu, bool final, str backend) -> (Tensor, Tensor)",
    f"causal_conv1d_backward({_TENSORS}, Tensor y_grad, Tensor? final_grad, bool silu, str backend, "
    "bool[4] wanted) -> (Tensor, Tensor, Tensor, Tensor)",
)


# --- Step by step -----------------------------------------------------------------------------


def call_update(tensors: tuple[Any, ...], request: tuple[Any, ...]) -> Tensor:
    """y of the public function's arguments as they are given; the state is changed in place."""
    if not _is_dynamo_compiling() and unwatched():
        y: Tensor | None = _fast_update(tensors, request)
        if y is not None:
            increment_version(tensors[1])
            return y
    y = update(*update_arguments(*tensors, *request))
    return _in_shape_of_x(y, tensors[0].dim() == 2, packed=tensors[7] is not None)


def _in_shape_of_x(y: Tensor, flat: bool, packed: bool) -> Tensor:
    """In the shape of the x that the public function took."""
    if packed:
        return y.squeeze(0).t()
    return y.squeeze(-1) if flat else y


def update(arguments: UpdateArguments, options: UpdateOptions) -> Tensor:
    """Likewise, of ``update_arguments``."""
    if not _is_compiling() and unobserved(*arguments):
        y = plans.update(arguments, options)
        increment_version(arguments.state)
        return y
    if not _is_compiling():
        flops.announce()
        refuse_mapped("causal_conv1d_update", "conv_state", *arguments)
    rows = arguments[6:]
    return _update_op(  # type: ignore[no-any-return]
        *arguments[:6], options.silu, options.backend, *rows, options.pad_slot_id
    )


def _plan_update(recorded: bool, tensors: Tensors, options: Tensors) -> Callable[..., Any] | None:
    arguments, how = update_arguments(*tensors, *options)
    if recorded or any(one is not two for one, two in zip(arguments[1:], tensors[1:], strict=True)):
        return None
    run = plans.plan_update(*arguments, how)
    if arguments.cu_seqlens is not None:
        return lambda x, *others: run(x.t().unsqueeze(0), *others).squeeze(0).t()
    if tensors[0].dim() == 2:
        return lambda x, *others: run(x.unsqueeze(-1), *others).squeeze(-1)
    return run


_fast_update = fast_path(_plan_update)


def _update(*args: Any) -> Tensor:
    # Arguments at their defaults do not come.
    rest = args[8:] + (None, None, None, -1)[len(args) - 8 :]
    tensors, (silu, backend), (*rows, pad_slot_id) = args[:6], args[6:8], rest
    arguments = UpdateArguments._make([*tensors, *rows])
    return plans.update(arguments, UpdateOptions(silu, backend, pad_slot_id))


def _update_fake(*args: Any) -> Tensor:
    return torch.empty_like(args[0])


def _update_autograd(*args: Any) -> Any:
    """It has no derivative: y is a constant, as the state is."""
    if has_tangents(*args[:4]):
        raise RuntimeError("causal_conv1d_update has no derivative, and a tensor has a tangent")
    with torch._C._AutoDispatchBelowAutograd():
        y = _update_op(*args)
    increment_version(args[1])
    return y


_update_op = register(
    "causal_conv1d_update(Tensor x, Tensor(a!) state, Tensor weight, Tensor? bias, Tensor? positions, "
    "Tensor? indices, bool silu, str backend, Tensor? destinations=None, Tensor? cu_seqlens=None, "
    "Tensor? accepted=None, int pad_slot_id=-1) -> Tensor",
    __name__,
    {"device": "_update", "Autograd": "_update_autograd", "Meta": "_update_fake"},
)
