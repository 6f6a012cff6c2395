"""The fast path of gated scan, for plain tensors on a GPU. Calls that agree in shapes, strides, dtypes and options are checked
and planned once.

A later call takes one look-up by the facts about its tensors, the allocation of its results and the launch. The plan of the
backward pass is kept with the plan of the forward pass. All other calls go through ``gated_scan_derivatives.scan``.
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
from scan_registry.kernels.gated_scan.kinds import KINDS
from scan_registry.ops import gated_scan_plans as plans
from scan_registry.ops.derivatives import unobserved
from scan_registry.ops.fast_calls import call_facts
from scan_registry.ops.gated_scan_arguments import RANGES, Arguments, Options, normalised
from scan_registry.ops.gated_scan_derivatives import first_derivative
from scan_registry.ops.gated_scan_plans import Gradients
from scan_registry.ops.gated_scan_problems import has_kernels
from scan_registry.ops.launching import MOST_PLANS, addresses_of

Result = Tensor | tuple[Tensor, Tensor]

_required = policy.required.get
_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling
#: The types of ``Options``. They are compared exactly, since an integer may be equal to a bool.
_TYPES = [str, int, bool, bool, str]
#: How many tensors of ``Arguments.flat`` are not differentiable: ``reset`` and ``cu_seqlens``, the last two.
_OTHERS = 2


class Kind:
    """The plans of calls that agree in all facts.

    options     as ``normalised`` makes them
    strides     the strides of the tensors, in the order of ``Arguments.flat``
    has_ranges  whether values of tensors are checked in every call, if they are checked at all
    """

    def __init__(self, options: Options, forward: Callable[..., Any], strides: list[Any]) -> None:
        self.options, self.forward, self.strides = options, forward, strides
        packed = strides[-1] is not None
        self.has_ranges = packed or not RANGES.keys().isdisjoint(KINDS[options.kind].parameters)
        self.required: Tier | None = _required()
        self._backwards: dict[tuple[Any, ...], Callable[..., Gradients] | None] = {}

    def backward(
        self, tensors: tuple[Any, ...], wanted: tuple[bool, ...]
    ) -> Callable[..., Gradients] | None:
        """The plan of a backward pass that computes the gradients that are wanted. It takes ``Arguments.flat``, the states, their
        gradient and the final state's gradient. None if no kernel computes them, or if a hook of saved tensors has changed
        strides."""
        *flat, states, states_grad, last_grad = tensors
        addresses = states.data_ptr()
        for tensor, strides in zip(flat, self.strides, strict=True):
            if tensor is not None:
                if tensor.stride() != strides:
                    return None
                addresses |= tensor.data_ptr()
        of_grads: list[Any] = [states.stride()]
        for grad in (states_grad, last_grad):
            of_grads.append(None if grad is None else grad.stride())
            addresses |= 0 if grad is None else grad.data_ptr()
        key = wanted, addresses & 15, *of_grads
        if key not in self._backwards:
            given = Arguments.of(self.options.kind, flat)
            how = self.options, wanted, addresses & 15
            with policy.as_required(self.required):
                plan = plans.plan_backward(given, states, states_grad, last_grad, *how)
            self._backwards[key] = None if isinstance(plan, Decision) else plan
        return self._backwards[key]


class FastScan(Function):
    """Runs a plan under autograd."""

    # torch looks these attributes up at each call, and finds them faster here than in its base classes.
    setup_context = staticmethod(Function.setup_context)
    clear_saved_tensors_on_access = boxed_grads_call = False

    @staticmethod
    def forward(ctx: Any, kind: Kind, *flat: Any) -> Any:
        states, last = kind.forward(*flat)
        # As ``set_materialize_grads`` and ``save_for_backward`` do, at half the cost.
        ctx.materialize_grads = False
        ctx.to_save = *flat, states
        ctx.kind = kind
        return states if last is None else (states, last)

    @staticmethod
    def backward(ctx: Any, states_grad: Tensor | None, last_grad: Tensor | None = None) -> Any:
        needs = ctx.needs_input_grad
        if states_grad is None and last_grad is None:
            return (None,) * len(needs)
        *flat, states = ctx.saved_tensors
        kind, wanted = ctx.kind, needs[1:-_OTHERS]
        gradients = states_grad, last_grad
        # The saved tensors were checked in the forward pass.
        if not _is_compiling() and not _enabled() and unobserved(*gradients):
            tensors = *flat, states, *gradients
            plan = kind.backward(tensors, wanted)
            if plan is not None:
                return None, *plan(*tensors), None, None
        given = Arguments.of(kind.options.kind, flat)
        if _is_compiling():  # by compiled autograd, which knows of no context variables
            found = first_derivative(given, states, *gradients, kind.options, wanted)
        else:
            with policy.as_required(kind.required):
                found = first_derivative(given, states, *gradients, kind.options, wanted)
        return None, *found, None, None


#: ``FastScan.apply`` without torch's search for transforms: calls on the fast path are under none.
_recorded: Callable[..., Any] = super(Function, FastScan).apply

_kinds: dict[tuple[Any, ...], Kind | None] = {}


def fast_scan(
    inputs: tuple[Any, ...], initial_state: Any, reset: Any, cu_seqlens: Any, options: Options
) -> Result | None:
    """The result of ``gated_scan``, or None if the fast path does not take the call: if an argument has to be converted, no
    kernel fits, or the dispatcher would do more than find the kernels. The arguments are those of the caller, not checked."""
    flat = *inputs, initial_state, reset, cu_seqlens
    found = call_facts(flat, plans.on_gpu)
    if found is None or [*map(type, options)] != _TYPES:
        return None
    if reset is not None and reset.data_ptr() & 15:
        return None  # it is copied first
    recording, facts = found
    key = options, _required(), recording, *facts
    try:
        kind = _kinds[key]
    except KeyError:
        kind = _plan(flat, inputs, options)
        if len(_kinds) >= MOST_PLANS:
            _kinds.clear()
        _kinds[key] = kind
    if kind is None or (kind.has_ranges and flag("SCAN_REGISTRY_DEBUG")):
        return None
    if recording:
        made: Result = _recorded(kind, *flat)
        return made
    states, last = kind.forward(*flat)
    return states if last is None else (states, last)


def _plan(flat: tuple[Any, ...], inputs: tuple[Any, ...], options: Options) -> Kind | None:
    """The plan of a call, or None if the fast path does not take it. Arguments that are not accepted raise."""
    initial_state, reset, cu_seqlens = flat[len(inputs) :]
    given, options = normalised(options.kind, inputs, reset, initial_state, cu_seqlens, options)
    taken = given.flat
    if any(one is not other for one, other in zip(flat, taken, strict=True)):
        return None
    if options.backend == "reference" or not has_kernels(given, options):
        return None
    with torch.no_grad():
        plan = plans.plan_forward(given, options, addresses_of(taken))
    if isinstance(plan, Decision):
        return None
    return Kind(options, plan, [None if t is None else t.stride() for t in taken])
