"""The fast path: gated scans of plain tensors on a GPU, which are checked and planned once for all calls alike.

A call costs a look-up of what its tensors are, the allocation of its results and the launch. The plan of its backward
pass is kept beside it. All other calls go through ``gated_scan_derivatives.scan``.
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
from scan_registry.ops import gated_scan_plans as plans
from scan_registry.ops.derivatives import PLAIN_TYPES, undisturbed, unobserved
from scan_registry.ops.gated_scan_arguments import Arguments, Options, normalised
from scan_registry.ops.gated_scan_derivatives import first_derivative
from scan_registry.ops.gated_scan_plans import Gradients
from scan_registry.ops.gated_scan_problems import addresses_of, has_kernels
from scan_registry.ops.launching import MOST_PLANS

Result = Tensor | tuple[Tensor, Tensor]

_required = policy.required.get
_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling
#: Of ``Options``; an integer that is equal to a bool is none.
_TYPES = [str, int, bool, bool, str]
#: After what is differentiable come ``reset`` and ``cu_seqlens``.
_OTHERS = 2


class Kind:
    """What is planned for calls alike.

    options  as ``normalised`` makes them
    strides  of the tensors, in the order of ``Arguments.flat``
    """

    def __init__(self, options: Options, forward: Callable[..., Any], strides: list[Any]) -> None:
        self.options, self.forward, self.strides = options, forward, strides
        self.required: Tier | None = _required()
        self._backwards: dict[tuple[Any, ...], Callable[..., Gradients] | None] = {}

    def backward(
        self, tensors: tuple[Any, ...], wanted: tuple[bool, ...]
    ) -> Callable[..., Gradients] | None:
        """How a kernel makes the gradients that are wanted, of ``Arguments.flat``, states, their gradient and the final
        state's; None if none does, or if a hook of saved tensors has laid them otherwise."""
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
    """Runs a plan, and keeps the one of the backward pass."""

    # What torch asks the class for at each call by a new string, and else finds last of all.
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
        # The others were plain in the forward pass.
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


#: Without the search for transforms, which calls on the fast path are not under.
_recorded: Callable[..., Any] = super(Function, FastScan).apply

_kinds: dict[tuple[Any, ...], Kind | None] = {}


def _facts(flat: tuple[Any, ...]) -> list[Any] | None:
    """What a plan depends on, after whether derivatives are recorded; None if these are no plain tensors on a GPU."""
    addresses, recording = 0, False
    facts: list[Any] = [False, 0]
    try:
        if not plans.on_gpu(flat[0]) or not undisturbed():
            return None
        for tensor in flat:
            if tensor is None:
                facts.append(None)
                continue
            if type(tensor) not in PLAIN_TYPES or tensor.is_neg():
                return None
            # Without an address a tensor is empty, or stands for zeros or for something else.
            address = tensor.data_ptr()
            if not address:
                return None
            addresses |= address
            recording = recording or tensor.requires_grad
            facts.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.device))
        reset = flat[-_OTHERS]
        if reset is not None and reset.data_ptr() & 15:
            return None  # it is copied first
    except (
        AttributeError,
        IndexError,
        RuntimeError,
    ):  # no tensors, or of no memory: the checks name them
        return None
    facts[0], facts[1] = recording and _enabled(), addresses & 15
    return facts


def fast_scan(
    inputs: tuple[Any, ...], initial_state: Any, reset: Any, cu_seqlens: Any, options: Options
) -> Result | None:
    """The states of a call of ``gated_scan`` with arguments as given, and if asked for the final state. None if it is no
    such call: if anything is to be converted, no kernel takes it, or the dispatcher would do more than find
    the kernels."""
    flat = *inputs, initial_state, reset, cu_seqlens
    facts = _facts(flat)
    if facts is None or [*map(type, options)] != _TYPES:
        return None
    recording = facts[0]
    key = options, _required(), *facts
    try:
        kind = _kinds[key]
    except KeyError:
        kind = _plan(flat, inputs, options)
        if len(_kinds) >= MOST_PLANS:
            _kinds.clear()
        _kinds[key] = kind
    if kind is None or (cu_seqlens is not None and flag("SCAN_REGISTRY_DEBUG")):
        return None
    if recording:
        made: Result = _recorded(kind, *flat)
        return made
    states, last = kind.forward(*flat)
    return states if last is None else (states, last)


def _plan(flat: tuple[Any, ...], inputs: tuple[Any, ...], options: Options) -> Kind | None:
    """None for calls that are made otherwise. What is not accepted raises."""
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
