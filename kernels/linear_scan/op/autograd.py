"""The operator in torch: dispatch, and derivatives in both modes, of any order.

The first reverse-mode derivative is a kernel, or two where gates are broadcast. Everything else is
written in differentiable operators, of which the scan is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from scan_registry.base.symbols import same_shape
from scan_registry.dispatch.fit import Tier
from scan_registry.kernels.linear_scan.op import plans
from scan_registry.kernels.linear_scan.op.arguments import Options, normalised
from scan_registry.kernels.linear_scan.op.flops import FORMULAS
from scan_registry.kernels.linear_scan.op.plans import Wanted
from scan_registry.kernels.linear_scan.op.problems import StateLayout
from scan_registry.kernels.linear_scan.reference import compute_dtype
from scan_registry.ops.autograd import Derivatives, Pass, Recorded, Recording, Tensors
from scan_registry.ops.call import (
    fast_path,
    has_tangents,
    wants_gradient,
)
from scan_registry.ops.registration import below_autograd, record

Outputs = tuple[Tensor, Tensor | None]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
#: Gates, states, their gradient, the initial state, the last one's gradient, cu_seqlens.
Differentiated = tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None]


class LinearScan(Recorded):
    """Saves gates, and states if gates want a gradient."""

    @staticmethod
    def jvp(ctx: Any, _: Any, *dots: Any) -> Any:
        gates_dot, tokens_dot, initial_dot, _ = dots
        # torch switches forward mode off here, for the levels around this one too, which are to see
        # what is computed; this level is not.
        with forward_ad._set_fwd_grad_enabled(True):
            gates, states, initial, cu_seqlens = (_primal(saved) for saved in ctx.saved_tensors)
            options, compute = ctx.recording.options, compute_dtype(states.dtype)
            shift = states.new_zeros((), dtype=compute).expand(states.shape)
            if tokens_dot is not None:
                shift = tokens_dot.to(compute)
            if gates_dot is not None:
                shift = shift + gates_dot.to(compute) * before(
                    states.to(compute), initial, cu_seqlens, options
                )
            states_dot, last_dot = scan(gates.to(compute), shift, initial_dot, cu_seqlens, options)
            last_dot = states_dot.new_empty(0) if last_dot is None else last_dot
            return states_dot.to(states.dtype), last_dot


def _alive(tensor: Any) -> Any:
    """The tensor inside a wrapper of a ``torch.func`` transform that has ended: a pullback may be called after its
    transform."""
    return None if tensor is None else torch._C._functorch.unwrap_if_dead(tensor)


def _primal(tensor: Any) -> Any:
    return None if tensor is None else torch._VF._unpack_dual(_alive(tensor), level=0).primal


class _Derivatives(Derivatives):
    """Of gates, tokens, the initial state and ``cu_seqlens``. Saved are gates, states, the initial state and
    ``cu_seqlens``."""

    options, tensors, others, kept, node, rules = Options, 4, 1, 0, LinearScan, "_forward_mapped"

    def forward(self, tensors: Tensors, options: Options, training: bool) -> Tensors:
        gates, tokens, initial_state, cu_seqlens = tensors
        return plans.forward(gates, tokens, initial_state, cu_seqlens, options)

    def empty(self, tensors: Tensors, options: Options, training: bool) -> Tensors:
        last = (
            StateLayout.of(tensors[1], options.dim, tensors[3]).empty() if options.final else None
        )
        return torch.empty_like(tensors[1]), last

    def dispatched(self, options: Options) -> Recording:
        def compute(*tensors: Any) -> Any:
            with below_autograd():
                return self.op(*tensors, *options)

        recording = Recording(self, options, compute)
        recording.dispatched = True
        return recording

    def under_autograd(self, *args: Any) -> Tensors:
        recorded = torch.is_grad_enabled() and wants_gradient(*args[:3])
        if recorded or has_tangents(*args[:3]):
            return record(self.node, (self.dispatched(Options(*args[4:])), None), *args[:4])
        return self._below(args)

    def saved(self, ctx: Any, tensors: Tensors, results: Any) -> Tensors:
        gates, _, initial_state, cu_seqlens = tensors
        states = results[0]
        ctx.shape, ctx.dtype = states.shape, states.dtype
        every = gates, states, initial_state, cu_seqlens
        if ctx.recording.dispatched:
            ctx.save_for_forward(*every)
        return every if ctx.needs_input_grad[1] else (gates, None, None, cu_seqlens)

    def restored(self, saved: Tensors) -> Tensors:
        return tuple(map(_alive, saved))

    def with_zeros(self, ctx: Any, saved: Tensors, grads: Tensors) -> Tensors:
        states_grad, last_grad = grads
        if states_grad is None:
            states_grad = saved[0].new_zeros((), dtype=ctx.dtype).expand(ctx.shape)
        return states_grad, last_grad

    def plan_backward(self, back: Pass) -> Callable[..., Any]:
        gates, states, initial_state, cu_seqlens = back.saved
        tensors = gates, states, initial_state, cu_seqlens, back.grads[0], back.grads[1]
        return plans.plan_backward(*tensors, back.options, back.wanted)

    def backward(self, back: Pass) -> Gradients:
        return plans.backward(*_in_order(back), back.options, back.wanted)

    def empty_gradients(self, back: Pass) -> tuple[Tensor | None, ...]:
        gates, states, _, cu_seqlens = back.saved
        model = back.grads[0] if states is None else states
        grads = (
            gates.new_empty(gates.shape)
            if not same_shape(gates.shape, model.shape)
            else torch.empty_like(model, dtype=gates.dtype),
            torch.empty_like(model),
            StateLayout.of(model, back.options.dim, cu_seqlens).empty(),
        )
        return tuple(grad if want else None for grad, want in zip(grads, back.wanted, strict=True))

    def composed_backward(self, back: Pass) -> Gradients:
        return differentiable_backward(*_in_order(back), back.options, back.wanted)

    def backward_joined(self, back: Pass) -> Tensors:
        dim, reverse, _, backend = back.options
        return *_in_order(back), dim, reverse, backend, [*back.wanted]

    def backward_split(self, args: Sequence[Any]) -> Pass:
        *tensors, dim, reverse, backend, wanted = args
        return _in_pass(tensors, Options(dim, reverse, False, backend), tuple(wanted))


def _in_order(back: Pass) -> Differentiated:
    """The tensors of a backward pass, as functions and the registered operator take them."""
    gates, states, initial_state, cu_seqlens = back.saved
    return gates, states, back.grads[0], initial_state, back.grads[1], cu_seqlens


def _in_pass(tensors: Tensors, options: Options, wanted: Any) -> Pass:
    """The inverse of ``_in_order``."""
    gates, states, states_grad, initial_state, last_grad, cu_seqlens = tensors
    saved = gates, states, initial_state, cu_seqlens
    return Pass(saved, (states_grad, last_grad), options, wanted)


OPERATOR = _Derivatives()


def scan(
    gates: Tensor,
    tokens: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    options: Options,
) -> Outputs:
    """The scan of ``normalised`` arguments, differentiable; None for a final state not asked for."""
    return OPERATOR((gates, tokens, initial_state, cu_seqlens), options)  # type: ignore[no-any-return]


def first_derivative(
    tensors: Differentiated, options: Options, wanted: Wanted, required: Tier | None
) -> Gradients:
    """The gradients that are wanted: see ``Derivatives.first_derivative``."""
    back = _in_pass(tensors, options, wanted)
    return OPERATOR.first_derivative(back, required)  # type: ignore[return-value]


def _plan(recorded: bool, tensors: Tensors, options: Tensors) -> Any:
    """None for a call whose arguments are converted, or whose values are checked in every call."""
    gates, tokens, initial_state, cu_seqlens = tensors
    *taken, how = normalised(gates, tokens, initial_state, cu_seqlens, Options(*options))
    if any(one is not other for one, other in zip(taken, tensors, strict=True)):
        return None
    if cu_seqlens is not None and not plans.on_gpu(tokens):
        return None
    recording = Recording(OPERATOR, how, None, None if how.final else 0)
    record = OPERATOR.record if recorded else None

    def elsewhere(*tensors: Any) -> Any:
        with torch.no_grad():
            states, final_state = OPERATOR.forward(tensors, how, False)
        return (states, final_state) if how.final else states

    launch = plans.plan_launch(tensors, how, elsewhere, record, recording)
    if launch is not None:
        return launch
    with torch.no_grad():
        compute = plans.plan_forward(gates, tokens, initial_state, cu_seqlens, how)
    if record is not None:
        recording.compute = compute
        return partial(record, (recording, None))
    return compute if how.final else lambda *tensors: compute(*tensors)[0]


#: The result of a scan, from gates, tokens, the initial state and ``cu_seqlens``, and ``dim``, ``reverse``, whether the final
#: state is returned, and ``backend``; as the caller gives them. None if the call does not take the fast path.
fast_scan = fast_path(_plan)


# --- Everything else: differentiable operators ------------------------------------------------


def before(
    x: Tensor, boundary: Tensor | None, cu_seqlens: Tensor | None, options: Options
) -> Tensor:
    """The value before each step, in the direction of the scan; ``boundary``, or zero, before the first steps."""
    dim, reverse = options.dim, options.reverse
    count = x.shape[dim]
    if count == 0:
        return x
    if cu_seqlens is None:
        edge = torch.zeros_like(x.narrow(dim, 0, 1))
        if boundary is not None:
            edge = boundary.unsqueeze(dim % x.dim())
        parts = (
            [x.narrow(dim, 1, count - 1), edge] if reverse else [edge, x.narrow(dim, 0, count - 1)]
        )
        return torch.cat(parts, dim)
    number, first = sequences_of_steps(cu_seqlens, count, reverse)
    along = [1] * x.dim()
    along[dim] = count
    edge = torch.zeros_like(x)
    if boundary is not None:
        edge = boundary.index_select(dim, number)
    return torch.where(first.view(along), edge, x.roll(-1 if reverse else 1, dim))


def sequences_of_steps(cu_seqlens: Tensor, time: int, reverse: bool) -> tuple[Tensor, Tensor]:
    """Of each step, the number of its packed sequence, and whether it is the first that is walked there."""
    # Mapped where the bounds are: torch expands what is not, and then warns of its strides.
    times = torch.arange(time, device=cu_seqlens.device) + 0 * cu_seqlens[0]
    number = torch.searchsorted(cu_seqlens, times, right=True) - 1
    number = number.clamp(0, cu_seqlens.shape[0] - 2)
    return number, times + 1 == cu_seqlens[number + 1] if reverse else times == cu_seqlens[number]


def differentiable_backward(
    gates: Tensor,
    states: Tensor | None,
    states_grad: Tensor,
    initial_state: Tensor | None,
    last_grad: Tensor | None,
    cu_seqlens: Tensor | None,
    options: Options,
    wanted: Wanted,
) -> Gradients:
    """The backward pass in differentiable operators: with h[t] the gradient that reaches x[t-1], a
    scan against the forward one over h[t] = conj(gates[t]) * (states_grad[t] + h[t+1])."""
    compute = compute_dtype(states_grad.dtype)
    factor, grad = gates.to(compute).conj().resolve_conj(), states_grad.to(compute)
    against = Options(options.dim, not options.reverse, True, options.backend)
    h, initial_grad = scan(factor, factor * grad, last_grad, cu_seqlens, against)
    adjoint = grad + before(h, last_grad, cu_seqlens, against)
    gates_grad = None
    if wanted[0]:
        assert states is not None
        earlier = before(states.to(compute), initial_state, cu_seqlens, options)
        gates_grad = (adjoint * earlier.conj()).sum_to_size(gates.shape).to(gates.dtype)
    return (
        gates_grad,
        adjoint.to(states_grad.dtype) if wanted[1] else None,
        initial_grad if wanted[2] else None,
    )


# --- The rule of torch.vmap, and registration ------------------------------------------------


def _in_front(count: int, tensor: Any, place: int | None) -> Any:
    """With the mapped dimension in front; ``count`` times the same where the tensor has none."""
    if tensor is None:
        return None
    return tensor.expand(count, *tensor.shape) if place is None else tensor.movedim(place, 0)


def in_front(
    count: int, gates: Tensor, tokens: Tensor, of_gates: int | None, of_tokens: int | None
) -> tuple[Tensor, Tensor]:
    """Gates and tokens with the dimension that ``torch.vmap`` maps over in front; gates still broadcast."""
    rank = tokens.dim() - (of_tokens is not None)
    if of_gates is not None:  # the others broadcast as they are
        gates = gates.movedim(of_gates, 0)
        missing = rank - (gates.dim() - 1)
        gates = gates.reshape(gates.shape[0], *[1] * missing, *gates.shape[1:])
    return gates, _in_front(count, tokens, of_tokens)


def _forward_mapped(info: Any, in_dims: Any, *args: Any) -> Any:
    """The rule of ``torch.vmap``: one scan with a dimension more; if ``cu_seqlens`` is mapped, one of more sequences."""
    gates, tokens, initial, cu_seqlens, *options = args
    of_gates, of_tokens, of_initial, of_bounds, *_ = in_dims
    gates, tokens = in_front(info.batch_size, gates, tokens, of_gates, of_tokens)
    initial = _in_front(info.batch_size, initial, of_initial)
    if of_bounds is not None:
        return _packed_maps(gates, tokens, initial, cu_seqlens.movedim(of_bounds, 0), options)
    states, final_state = OPERATOR.op(gates, tokens, initial, cu_seqlens, *options)
    return (states, final_state), (0, 0 if Options(*options).final else None)


def _packed_maps(gates: Any, tokens: Any, initial: Any, cu_seqlens: Any, options: Any) -> Any:
    """The scans of maps that have bounds of their own, one after the other along time."""
    how, count, time = Options(*options), cu_seqlens.shape[0], tokens.shape[options[0]]

    def packed(x: Tensor) -> Tensor:
        return x.movedim(0, how.dim - 1).flatten(how.dim - 1, how.dim)

    def apart(x: Tensor) -> Tensor:
        along: Tensor = x.unflatten(how.dim, (count, x.shape[how.dim] // count))
        return along.movedim(how.dim - 1, 0)

    starts = torch.arange(count, device=cu_seqlens.device).unsqueeze(1) * time + cu_seqlens[:, :-1]
    every = torch.cat([starts.flatten(), starts.new_full((1,), count * time)])
    gates = gates.expand(count, *tokens.shape[1:])
    initial = None if initial is None else packed(initial)
    states, final_state = OPERATOR.op(packed(gates), packed(tokens), initial, every, *options)
    final_state, place = (apart(final_state), 0) if how.final else (final_state, None)
    return (apart(states), final_state), (0, place)


OPERATOR.register(
    __name__,
    "OPERATOR",
    FORMULAS,
    "linear_scan(Tensor gates, Tensor tokens, Tensor? initial_state, Tensor? cu_seqlens, int dim, "
    "bool reverse, bool final, str backend) -> (Tensor, Tensor)",
    "linear_scan_backward(Tensor gates, Tensor? states, Tensor states_grad, Tensor? initial_state, "
    "Tensor? final_state_grad, Tensor? cu_seqlens, int dim, bool reverse, str backend, "
    "bool[] wanted) -> (Tensor, Tensor, Tensor)",
)
