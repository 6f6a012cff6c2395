"""How an operator's calls are found again: the one call path of all operators.

The first call of a kind is checked and planned. A later call that agrees in all facts about its tensors and options goes to
the plan at once: C code looks the plan up and launches its kernel, or calls its function. See ``csrc/fast_path.h``. Calls
with which torch's dispatcher would do more than find the kernels do not take this path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler
from torch.nn import Parameter

from scan_registry.base.environment import flag
from scan_registry.dispatch import policy
from scan_registry.hardware._launcher import FastLaunch, FastPath
from scan_registry.ops.launching import facts_of, plan_cache
from scan_registry.runtime import call_log

#: A function of whether autograd records the call, the tensors and the options. It returns a function of the tensors or a
#: launch from C; None if the call does not take this path. It raises for arguments that are not accepted.
Planner = Callable[[bool, tuple[Any, ...], tuple[Any, ...]], Callable[..., Any] | FastLaunch | None]
#: The result of a call from its tensors and options; None for a call that does not take this path.
Path = Callable[[tuple[Any, ...], tuple[Any, ...]], Any]

PLAIN_TYPES = (Tensor, Parameter)
_is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor  # under is_grads_batched
dispatch_modes = torch._C._len_torch_dispatch_stack
transforms_active = torch._C._are_functorch_transforms_active
tracing_state = torch._C._get_tracing_state
#: Each returns something true while modes, transforms or the tracer see, or change, what is dispatched.
OBSERVERS = (dispatch_modes, transforms_active, tracing_state)

_exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
_required = policy.required.get
_enabled = torch.is_grad_enabled
#: What torch's own compiler allocates with, past the dispatcher; None if this torch has it no longer.
_empty: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


# --- Whether the dispatcher has to see a call -------------------------------------------------


def unobserved(*tensors: Tensor | None) -> bool:
    """Whether the dispatcher would do no more than find the kernels, which costs more than this.

    Subclasses, lazy negations and conjugations, modes, transforms, tracers, profilers and
    forward-mode derivatives see, or change, only what it dispatches. For tensors on meta it finds what
    computes nothing, where plain torch would read the values of ``cu_seqlens``.
    """
    return are_plain(*tensors) and undisturbed()


def are_plain(*tensors: Tensor | None) -> bool:
    """Whether all have elements at their addresses, which mean what they are."""
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
    return True


def undisturbed() -> bool:
    """Whether no mode, transform, tracer, profiler or forward-mode derivative is on."""
    return (
        not dispatch_modes()
        and not transforms_active()
        and tracing_state() is None
        and not profiler._is_profiler_enabled
        and not forward_mode()
    )


def unwatched() -> bool:
    """Whether neither a profiler nor a forward-mode derivative is on, which a ``Path`` does not ask for."""
    return not profiler._is_profiler_enabled and forward_ad._current_level < 0


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


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether any of the tensors requires a gradient."""
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


# --- Paths ------------------------------------------------------------------------------------


def fast_path(plan: Planner) -> Path:
    """The path of calls that ``plan`` makes plans of. Whether anything watches, as ``unwatched`` says, is left to the caller."""
    planner = _logged(plan)
    if _exchange is None:
        return _PathInPython(planner).run
    return FastPath(
        types=PLAIN_TYPES,
        tensor=torch._C.TensorBase,
        exchange=_exchange,
        observers=OBSERVERS,
        choice=_required,
        plan=planner,
        tracking=_enabled,
    ).run


def casting(
    path: Path, raw: Sequence[Any], taken: Sequence[Any], options: tuple[Any, ...]
) -> Callable[..., Any] | None:
    """The plan of a call that takes ``path`` with some of the ``raw`` tensors in other dtypes, those in ``taken``: it casts them by
    torch's own operator, which autograd records. None if they differ in more than that. The plan leaves integers, whose values
    ``SCAN_REGISTRY_DEBUG`` may want checked, to the checked call then."""
    pairs = [*zip(raw, taken, strict=True)]
    changed = [(one, other) for one, other in pairs if one is not other]
    if any(one.shape != other.shape or one.dtype == other.dtype for one, other in changed):
        return None
    integers = any(not one.is_floating_point() for one, _ in changed)
    dtypes = [None if one is other else other.dtype for one, other in pairs]

    def plan(*tensors: Any) -> Any:
        if integers and flag("SCAN_REGISTRY_DEBUG"):
            return None
        both = zip(tensors, dtypes, strict=True)
        return path(tuple([t if d is None else t.to(d) for t, d in both]), options)

    return plan


def _logged(plan: Planner) -> Planner:
    """The function, which also checks ``SCAN_REGISTRY_REQUIRE``, and writes to the log if that is asked for."""

    def planner(recorded: bool, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
        policy.lowest()  # raises for an unknown level, on the CPU too
        planned = plan(recorded, tensors, options)
        if call_log.ON and planned is not None:
            call_log.tell_plan(plan, tensors, options)
        return planned

    return planner


class _PathInPython:
    """What ``FastPath`` is in C, for versions of torch that have no table of DLPack's."""

    def __init__(self, plan: Planner) -> None:
        self._plan = plan

    def run(self, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
        present = [tensor for tensor in tensors if tensor is not None]
        types = (*map(type, options),)  # an integer may be equal to a bool
        facts = _plain_facts(tensors, present)
        if facts is None or not {*types} <= {bool, int, float, str, type(None)}:
            return None
        recorded = wants_gradient(*present) and _enabled()
        key = self._plan, recorded, _required(), options, types, *facts
        plan = plan_cache.get(key, self)
        if plan is self:
            plan = self._plan(recorded, tensors, options)
            plan_cache.keep(key, plan)
        return None if plan is None else plan(*tensors)


def _plain_facts(tensors: tuple[Any, ...], present: list[Any]) -> list[Any] | None:
    """The facts of tensors that a plan is for, of which ``present`` are not None; None for others."""
    try:
        if not present or not unobserved(*present):
            return None
        if not all(tensor.data_ptr() for tensor in present):
            return None  # it is empty, or stands for zeros or for something else
        facts = facts_of(tensors)
    except (AttributeError, RuntimeError):
        return None  # not tensors, or tensors without memory: the checks name them
    if len({t.device for t in present}) > 1 or any(t.is_complex() for t in present):
        return None
    return facts


def launch_from_c(
    prepared: Any,
    places: Sequence[int],
    results: Sequence[tuple[Any, ...]],
    elsewhere: Callable[..., Any],
    record: Callable[..., Any] | None = None,
    recording: object = None,
) -> FastLaunch | None:
    """The launch of a plan of ``runtime.loader`` as C makes it by itself, from the tensors of a call on a GPU; None if this
    torch lacks what that takes. ``results`` are shapes, strides and dtypes; others are as for ``FastLaunch``."""
    if _exchange is None or _empty is None:
        return None
    return FastLaunch(
        launch=prepared.launch,
        places=tuple(places),
        empty=_empty,
        results=tuple(results),
        workspace=((prepared.workspace,), (1,), torch.uint8) if prepared.workspace else None,
        refuse=prepared.refuse,
        elsewhere=elsewhere,
        record=record,
        recording=recording,
    )
