"""The operator in torch: dispatch, and derivatives in both modes, of any order.

The first reverse-mode derivative is a kernel, or two where gates are broadcast. Everything else is
written in differentiable operators, of which the scan is one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler
from torch.nn import Parameter

from scan_registry.base.symbols import same_shape
from scan_registry.dispatch import policy
from scan_registry.dispatch.fit import Tier
from scan_registry.kernels.linear_scan.reference import compute_dtype
from scan_registry.ops import flops, plans
from scan_registry.ops.arguments import Options
from scan_registry.ops.plans import Wanted
from scan_registry.ops.problems import StateLayout
from scan_registry.ops.registration import below_autograd, record, register

Outputs = tuple[Tensor, Tensor | None]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
#: Gates, states, their gradient, the initial state, the last one's gradient, cu_seqlens.
Differentiated = tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None]

PLAIN_TYPES = (Tensor, Parameter)
_is_compiling = torch.compiler.is_compiling
_is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor  # under is_grads_batched
dispatch_modes = torch._C._len_torch_dispatch_stack
transforms_active = torch._C._are_functorch_transforms_active
tracing_state = torch._C._get_tracing_state
#: Each returns something true while modes, transforms or the tracer see, or change, what is dispatched.
OBSERVERS = (dispatch_modes, transforms_active, tracing_state)
_required = policy.required.get


def unobserved(*tensors: Tensor | None) -> bool:
    """Whether the dispatcher would do no more than find the kernels, which costs more than this.

    Subclasses, lazy negations and conjugations, modes, transforms, tracers, profilers and
    forward-mode derivatives see, or change, only what it dispatches. For tensors on meta it finds what
    computes nothing, where plain torch would read the values of ``cu_seqlens``.
    """
    for tensor in tensors:
        if tensor is not None and (
            type(tensor) not in PLAIN_TYPES
            or tensor.is_meta
            or tensor.is_neg()
            or tensor.is_conj()
            or tensor._is_zerotensor()
            or tensor.is_nested
            or _is_legacy_batched(tensor)
        ):
            return False
    return undisturbed()


def undisturbed() -> bool:
    """Whether no mode, transform, tracer, profiler or forward-mode derivative is on."""
    return (
        not dispatch_modes()
        and not transforms_active()
        and tracing_state() is None
        and not profiler._is_profiler_enabled
        and not forward_mode()
    )


def forward_mode() -> bool:
    """Whether forward-mode derivatives are being taken."""
    return forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()


def has_tangents(*tensors: Tensor | None) -> bool:
    """Whether any of the tensors carries a forward-mode derivative.

    Graphs of torch's compiler enter the forward-mode level in C++, which ``forward_mode`` does not see. ``_unpack_dual`` makes
    an alias. With Python dispatch on, each nested trace would record it, and inductor rejects that.
    """
    if not torch._C._is_fwd_grad_enabled():
        return False
    with torch._C._DisableTorchDispatch():
        return any(
            tensor is not None
            and not _is_legacy_batched(tensor)
            and torch._VF._unpack_dual(tensor, level=0).tangent is not None
            for tensor in tensors
        )


def scan(
    gates: Tensor,
    tokens: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    options: Options,
) -> Outputs:
    """The scan of ``normalised`` arguments, differentiable; None for a final state not asked for."""
    tensors = gates, tokens, initial_state, cu_seqlens
    if not _is_compiling() and unobserved(*tensors):
        if torch.is_grad_enabled() and wants_gradient(*tensors[:3]):
            return LinearScan.apply(*tensors, options, True)  # type: ignore[no-any-return, no-untyped-call]
        return plans.forward(*tensors, options)
    if not _is_compiling():
        flops.announce()
    states, last = _op(*tensors, *options)
    return states, last if options.final else None


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether any of the tensors requires a gradient."""
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


# --- Reverse mode, first order: kernels -------------------------------------------------------


class LinearScan(torch.autograd.Function):
    """Saves gates, and states if gates want a gradient. ``direct`` goes round the dispatcher."""

    @staticmethod
    def forward(
        ctx: Any,
        gates: Tensor,
        tokens: Tensor,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        options: Options,
        direct: bool,
    ) -> Outputs:
        tensors = gates, tokens, initial_state, cu_seqlens
        if direct:
            states, last = plans.forward(*tensors, options)
        else:
            with below_autograd():
                states, last = _op(*tensors, *options)
        ctx.set_materialize_grads(False)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(gates, states, initial_state, cu_seqlens)
        else:
            ctx.save_for_backward(gates, None, None, cu_seqlens)
        ctx.save_for_forward(gates, states, initial_state, cu_seqlens)
        ctx.of_states = states.shape, states.dtype
        ctx.options, ctx.required = options, _required()
        return states, last

    @staticmethod
    def backward(ctx: Any, states_grad: Tensor | None, last_grad: Tensor | None) -> Any:
        options, needs = ctx.options, ctx.needs_input_grad
        if not options.final:
            last_grad = None
        if states_grad is None and last_grad is None:
            return (None,) * 6
        gates, states, initial_state, cu_seqlens = map(_alive, ctx.saved_tensors)
        if states_grad is None:
            shape, dtype = ctx.of_states
            states_grad = gates.new_zeros((), dtype=dtype).expand(shape)
        tensors = gates, states, states_grad, initial_state, last_grad, cu_seqlens
        wanted = needs[0], needs[1], needs[2]
        return *first_derivative(tensors, options, wanted, ctx.required), None, None, None

    @staticmethod
    def jvp(ctx: Any, gates_dot: Any, tokens_dot: Any, initial_dot: Any, *_: None) -> Any:
        # torch switches forward mode off here, for the levels around this one too, which are to see
        # what is computed; this level is not.
        with forward_ad._set_fwd_grad_enabled(True):
            gates, states, initial, bounds = (_primal(saved) for saved in ctx.saved_tensors)
            options, compute = ctx.options, compute_dtype(states.dtype)
            shift = states.new_zeros((), dtype=compute).expand(states.shape)
            if tokens_dot is not None:
                shift = tokens_dot.to(compute)
            if gates_dot is not None:
                shift = shift + gates_dot.to(compute) * before(
                    states.to(compute), initial, bounds, options
                )
            states_dot, last_dot = scan(gates.to(compute), shift, initial_dot, bounds, options)
            return states_dot.to(states.dtype), _or_empty(last_dot, states_dot)


def _alive(tensor: Any) -> Any:
    """The tensor inside a wrapper of a ``torch.func`` transform that has ended: a pullback may be called after its
    transform."""
    return None if tensor is None else torch._C._functorch.unwrap_if_dead(tensor)


def _primal(tensor: Any) -> Any:
    return None if tensor is None else torch._VF._unpack_dual(_alive(tensor), level=0).primal


def _or_empty(tensor: Tensor | None, like: Tensor) -> Tensor:
    """Operators return tensors; this one stands for none."""
    return like.new_empty(0) if tensor is None else tensor


def first_derivative(
    tensors: Differentiated, options: Options, wanted: Wanted, required: Tier | None
) -> Gradients:
    """The gradients that are wanted, under what ``required`` was in the forward pass; in what compiled
    autograd traces, under what it is when the graph runs."""
    if _is_compiling():
        return _first_derivative(tensors, options, wanted)
    with policy.as_required(required):
        return _first_derivative(tensors, options, wanted)


def _first_derivative(tensors: Differentiated, options: Options, wanted: Wanted) -> Gradients:
    # Under create_graph, and where batches of gradients are mapped over.
    if torch.is_grad_enabled() or transforms_active():
        return differentiable_backward(*tensors, options, wanted)
    if not _is_compiling() and unobserved(*tensors):
        return plans.backward(*tensors, options, wanted)
    if not _is_compiling():
        flops.announce()
    return _dispatched_backward(*tensors, options, wanted)


def _dispatched_backward(*args: Any) -> Gradients:
    *tensors, options, wanted = args
    found = _backward_op(*tensors, options.dim, options.reverse, options.backend, list(wanted))
    gates_grad, tokens_grad, initial_grad = (
        each if want else None for each, want in zip(found, wanted, strict=True)
    )
    return gates_grad, tokens_grad, initial_grad


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


# --- Registration -----------------------------------------------------------------------------


def _forward(gates: Tensor, tokens: Tensor, initial: Any, bounds: Any, *options: Any) -> Any:
    states, last = plans.forward(gates, tokens, initial, bounds, Options(*options))
    return states, _or_empty(last, states)


def _forward_fake(gates: Tensor, tokens: Tensor, initial: Any, bounds: Any, *options: Any) -> Any:
    how, states = Options(*options), torch.empty_like(tokens)
    last = StateLayout.of(tokens, how.dim, bounds).empty() if how.final else None
    return states, _or_empty(last, states)


def _forward_autograd(
    gates: Tensor, tokens: Tensor, initial: Any, bounds: Any, *options: Any
) -> Any:
    tensors = gates, tokens, initial, bounds
    recorded = torch.is_grad_enabled() and wants_gradient(*tensors[:3])
    if recorded or has_tangents(*tensors[:3]):
        return record(LinearScan, *tensors, Options(*options), False)
    with torch._C._AutoDispatchBelowAutograd():
        return _op(*tensors, *options)


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
    gates, tokens, initial, bounds, *options = args
    of_gates, of_tokens, of_initial, of_bounds, *_ = in_dims
    gates, tokens = in_front(info.batch_size, gates, tokens, of_gates, of_tokens)
    initial = _in_front(info.batch_size, initial, of_initial)
    if of_bounds is not None:
        return _packed_maps(gates, tokens, initial, bounds.movedim(of_bounds, 0), options)
    states, last = _op(gates, tokens, initial, bounds, *options)
    return (states, last), (0, 0 if Options(*options).final else None)


def _packed_maps(gates: Tensor, tokens: Tensor, initial: Any, bounds: Tensor, options: Any) -> Any:
    """The scans of maps that have bounds of their own, one after the other along time."""
    how, count, time = Options(*options), bounds.shape[0], tokens.shape[options[0]]

    def packed(x: Tensor) -> Tensor:
        return x.movedim(0, how.dim - 1).flatten(how.dim - 1, how.dim)

    def apart(x: Tensor) -> Tensor:
        along: Tensor = x.unflatten(how.dim, (count, x.shape[how.dim] // count))
        return along.movedim(how.dim - 1, 0)

    starts = torch.arange(count, device=bounds.device).unsqueeze(1) * time + bounds[:, :-1]
    every = torch.cat([starts.flatten(), starts.new_full((1,), count * time)])
    gates = gates.expand(count, *tokens.shape[1:])
    initial = None if initial is None else packed(initial)
    states, last = _op(packed(gates), packed(tokens), initial, every, *options)
    return (apart(states), apart(last) if how.final else last), (0, 0 if how.final else None)


def _backward_impl(*args: Any) -> Any:
    gates, states, states_grad, initial, last_grad, bounds, dim, reverse, backend, wanted = args
    options, wanted = Options(dim, reverse, False, backend), tuple(wanted)
    found = plans.backward(gates, states, states_grad, initial, last_grad, bounds, options, wanted)
    return tuple(_or_empty(each, states_grad) for each in found)


def _backward_fake(*args: Any) -> Any:
    gates, states, states_grad, _, _, bounds, dim, _, _, wanted = args
    model = states_grad if states is None else states
    made = (
        gates.new_empty(gates.shape)
        if not same_shape(gates.shape, model.shape)
        else torch.empty_like(model, dtype=gates.dtype),
        torch.empty_like(model),
        StateLayout.of(model, dim, bounds).empty(),
    )
    return tuple(
        each if want else model.new_empty(0) for each, want in zip(made, wanted, strict=True)
    )


def _backward_autograd(*args: Any) -> Any:
    differentiated = torch.is_grad_enabled() and wants_gradient(*args[:5])
    if differentiated or has_tangents(*args[:5]):
        return _backward_composed(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return _backward_op(*args)


def _backward_composed(*args: Any) -> Any:
    """In operators that torch differentiates and transforms."""
    gates, states, states_grad, initial, last_grad, bounds, dim, reverse, backend, wanted = args
    options = Options(dim, reverse, False, backend)
    found = differentiable_backward(
        gates, states, states_grad, initial, last_grad, bounds, options, tuple(wanted)
    )
    return tuple(_or_empty(each, states_grad) for each in found)


_op = register(
    "linear_scan(Tensor gates, Tensor tokens, Tensor? initial_state, Tensor? cu_seqlens, int dim, "
    "bool reverse, bool final, str backend) -> (Tensor, Tensor)",
    __name__,
    {
        "device": "_forward",
        "Autograd": "_forward_autograd",
        "Meta": "_forward_fake",
        "FuncTorchBatched": "_forward_mapped",
    },
)
_backward_op = register(
    "linear_scan_backward(Tensor gates, Tensor? states, Tensor states_grad, Tensor? initial_state, "
    "Tensor? final_state_grad, Tensor? cu_seqlens, int dim, bool reverse, str backend, "
    "bool[] wanted) -> (Tensor, Tensor, Tensor)",
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
