"""The fast path: selective scans of plain tensors on a GPU, which are checked and planned once for all calls alike.

A call costs a look-up of what its tensors are, the allocation of its results and the launch. The plan of its backward
pass is kept beside it. All other calls go through ``selective_scan_derivatives.scan``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from scan_registry.base.environment import flag
from scan_registry.dispatch import policy
from scan_registry.dispatch.fit import Tier
from scan_registry.dispatch.select import Decision
from scan_registry.ops import selective_scan_plans as plans
from scan_registry.ops.derivatives import unobserved
from scan_registry.ops.fast_calls import call_facts
from scan_registry.ops.launching import MOST_PLANS, addresses_of
from scan_registry.ops.selective_scan_arguments import (
    Arguments,
    Options,
    given_as_taken,
    normalised,
)
from scan_registry.ops.selective_scan_derivatives import first_derivative
from scan_registry.ops.selective_scan_gradients import Gradients
from scan_registry.ops.selective_scan_problems import copies_groups, has_kernels

Result = Tensor | tuple[Tensor, Tensor]

_required = policy.required.get
_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling
_COUNT = len(Arguments._fields)


class Kind:
    """What is planned for calls alike."""

    def __init__(
        self,
        options: Options,
        final: bool,
        forward: Callable[..., Any],
        required: Tier | None,
        strides: list[Any],
    ) -> None:
        self.options, self.final, self.forward, self.required = options, final, forward, required
        #: Of the tensors, in the order of the arguments.
        self.strides = strides
        self._backwards: dict[tuple[Any, ...], Callable[..., Gradients] | None] = {}

    def backward(
        self,
        given: Arguments,
        kept: Tensor,
        out_grad: Tensor,
        last_grad: Tensor | None,
        wanted: tuple[bool, ...],
    ) -> Callable[..., Gradients] | None:
        """How kernels make the gradients that are wanted; None if none does, or if a hook of saved tensors has laid them
        otherwise."""
        addresses = out_grad.data_ptr() | kept.data_ptr()
        for tensor, strides in zip(given, self.strides, strict=True):
            if tensor is not None:
                if tensor.stride() != strides:
                    return None
                addresses |= tensor.data_ptr()
        strides = None
        if last_grad is not None:
            addresses |= last_grad.data_ptr()
            strides = last_grad.stride()
        key = wanted, out_grad.stride(), addresses & 15, strides
        if key not in self._backwards:
            with policy.as_required(self.required):
                plan = _plan_backward(given, kept, out_grad, last_grad, self.options, wanted)
            self._backwards[key] = plan
        return self._backwards[key]


class FastScan(Function):
    """Runs a plan, and keeps the one of the backward pass."""

    # What torch asks the class for at each call by a new string, and else finds last of all.
    setup_context = staticmethod(Function.setup_context)
    clear_saved_tensors_on_access = boxed_grads_call = False

    @staticmethod
    def forward(ctx: Any, kind: Kind, *tensors: Any) -> Any:
        out, last, kept = kind.forward(Arguments._make(tensors))
        # As ``set_materialize_grads`` and ``save_for_backward`` do, at half the cost.
        ctx.materialize_grads = False
        ctx.to_save = *tensors, kept
        ctx.kind = kind
        return (out, last) if kind.final else out

    @staticmethod
    def backward(ctx: Any, out_grad: Tensor | None, last_grad: Tensor | None = None) -> Any:
        if out_grad is None and last_grad is None:
            return (None,) * (_COUNT + 1)
        *tensors, kept = ctx.saved_tensors
        kind, needs = ctx.kind, ctx.needs_input_grad
        wanted = needs[1:_COUNT]
        if out_grad is None:
            out_grad = torch.zeros_like(tensors[0])
        given = Arguments._make(tensors)
        if _is_compiling():  # by compiled autograd, which knows of no context variables
            return None, *_general(given, kept, out_grad, last_grad, kind.options, wanted), None
        # The others were plain in the forward pass.
        if not _enabled() and unobserved(out_grad, last_grad):
            plan = kind.backward(given, kept, out_grad, last_grad, wanted)
            if plan is not None:
                return None, *plan(given, kept, out_grad, last_grad), None
        with policy.as_required(kind.required):
            found = _general(given, kept, out_grad, last_grad, kind.options, wanted)
        return None, *found, None


#: Without the search for transforms, which calls on the fast path are not under.
_recorded: Callable[..., Any] = super(Function, FastScan).apply

_kinds: dict[tuple[Any, ...], Kind | None] = {}


def fast_scan(tensors: tuple[Any, ...], softplus: Any, final: Any, backend: Any) -> Result | None:
    """The output of a call, and with ``final`` the final state. None if it is no such call: if anything is to be
    converted, no kernel takes it, or the dispatcher would do more than find the kernels."""
    found = call_facts(tensors, plans.on_gpu)
    if found is None or type(softplus) is not bool or type(final) is not bool:
        return None
    if type(backend) is not str:
        return None
    recording, facts = found
    key = softplus, final, backend, _required(), recording, *facts
    try:
        kind = _kinds[key]
    except KeyError:
        kind = _plan(tensors, Options(softplus, backend), final, recording)
        if len(_kinds) >= MOST_PLANS:
            _kinds.clear()
        _kinds[key] = kind
    if kind is None or (tensors[-1] is not None and flag("SCAN_REGISTRY_DEBUG")):
        return None
    if recording:
        made: Result = _recorded(kind, *tensors)
        return made
    out, last, _ = kind.forward(Arguments._make(tensors))
    return (out, last) if final else out


def _plan(tensors: tuple[Any, ...], options: Options, final: bool, recording: bool) -> Kind | None:
    """None for calls that are made otherwise. What is not accepted raises."""
    given = normalised(*Arguments._make(tensors), *options)
    if not given_as_taken(tensors, given) or options.backend == "reference":
        return None
    if given.u.numel() == 0 or not has_kernels(given) or copies_groups(given):
        return None
    with torch.no_grad():
        plan = plans.plan_forward(given, options, recording, final, addresses_of(tensors))
    if isinstance(plan, Decision):
        return None
    strides = [None if t is None else t.stride() for t in tensors]
    return Kind(options, final, plan, _required(), strides)


def _general(
    given: Arguments,
    kept: Tensor,
    out_grad: Tensor,
    last_grad: Tensor | None,
    options: Options,
    wanted: tuple[bool, ...],
) -> Gradients:
    """The gradients as all other calls get them, in the shapes that were given."""
    taken = normalised(*given, *options)
    found = first_derivative(taken, kept, out_grad, last_grad, options, wanted)
    pairs = zip(found, given.differentiable, strict=True)
    return tuple(g if g is None or t is None else g.reshape(t.shape) for g, t in pairs)


def _plan_backward(
    given: Arguments,
    kept: Tensor,
    out_grad: Tensor,
    last_grad: Tensor | None,
    options: Options,
    wanted: tuple[bool, ...],
) -> Callable[..., Gradients] | None:
    taken = normalised(*given, *options)
    addresses = addresses_of((*given, kept, out_grad, last_grad))
    plan = plans.plan_backward(taken, out_grad, last_grad, options, wanted, addresses, given)
    return None if isinstance(plan, Decision) else plan
