"""The fast path: scans of two plain tensors, without options, at the least cost.

Most calls are such. One goes from the tensors to the launch in C, where its plan is looked up: see
``csrc/fast_path.h``. Only then is autograd told, if it is to be. All other calls go through ``derivatives.scan``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from scan_registry.dispatch import policy
from scan_registry.dispatch.select import BACKENDS
from scan_registry.hardware._launcher import FastLaunch, FastPath
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.ops import plans
from scan_registry.ops.arguments import Options, normalised
from scan_registry.ops.derivatives import OBSERVERS, PLAIN_TYPES, first_derivative
from scan_registry.ops.problems import as_new, make_kernel_call
from scan_registry.runtime.loader import prepare

FastPlan = FastLaunch | Callable[[Tensor, Tensor], Tensor]

_POINTERS = plans.POINTERS["forward"]
_PLACES = _POINTERS.index("gates"), _POINTERS.index("tokens"), _POINTERS.index("states")
#: What torch's own compiler allocates with, past the dispatcher; None if this torch has it no longer.
_empty: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


class FastScan(Function):
    """Tells autograd of states that are computed already."""

    # What torch asks the class for at each call by a new string, and else finds last of all.
    setup_context = staticmethod(Function.setup_context)
    clear_saved_tensors_on_access = boxed_grads_call = False

    @staticmethod
    def forward(ctx: Any, gates: Tensor, tokens: Tensor, done: tuple[Tensor, Any]) -> Tensor:
        states, ctx.request = done
        # As ``set_materialize_grads`` and ``save_for_backward`` do, at half the cost.
        ctx.materialize_grads = False
        ctx.to_save = gates, states if ctx.needs_input_grad[0] else None
        return states

    @staticmethod
    def backward(ctx: Any, states_grad: Tensor | None) -> Any:
        if states_grad is None:
            return None, None, None
        (gates, states), (dim, backend, required) = ctx.saved_tensors, ctx.request
        options = Options(dim if dim < 0 else dim - states_grad.dim(), backend=backend)
        tensors = gates, states, states_grad, None, None, None
        wanted = *ctx.needs_input_grad[:2], False
        return *first_derivative(tensors, options, wanted, required)[:2], None


#: Without the search for transforms, which calls on the fast path are not under.
_recorded: Callable[..., Tensor] = super(Function, FastScan).apply


def _plan(gates: Tensor, tokens: Tensor, dim: int, backend: Any) -> FastPlan:
    *_, options = normalised(gates, tokens, None, None, Options(dim, backend=backend))

    def general(gates: Tensor, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            return plans.forward(gates, tokens, None, None, options)[0]

    return _launch(gates, tokens, options, general) or general


def _launch(
    gates: Tensor, tokens: Tensor, options: Options, elsewhere: Callable[[Tensor, Tensor], Tensor]
) -> FastLaunch | None:
    """What C does by itself; None where it cannot."""
    if _empty is None or not tokens.is_cuda or options.backend == "reference":
        return None
    call = make_kernel_call("forward", gates, {"tokens": tokens}, None, options.dim, False)
    if call.copied:
        return None
    backend: Any = options.backend
    plan = prepare(tokens.device.index, FAMILY, call.problem, backend, policy.lowest())
    if plan.launch is None:
        return None
    states = as_new(tokens)
    return FastLaunch(
        launch=plan.launch,
        places=_PLACES,
        empty=_empty,
        states=(tuple(states.shape), states.stride(), states.dtype),
        workspace=((plan.workspace,), (1,), torch.uint8) if plan.workspace else None,
        refuse=plan.refuse,
        elsewhere=elsewhere,
    )


#: States of such a scan, from gates, tokens, ``dim`` and ``backend`` as given. None if it is no such scan, or
#: if the dispatcher would do more than find the kernels: see ``derivatives.unobserved``. Whether anything
#: profiles, or takes forward-mode derivatives, is left to the caller, whom it costs least to ask.
fast_scan: Callable[[Any, Any, int, Any], Tensor | None] = FastPath(
    types=PLAIN_TYPES,
    tensor=torch._C.TensorBase,
    exchange=getattr(Tensor, "__dlpack_c_exchange_api__", None),
    observers=OBSERVERS,
    backends=BACKENDS,
    choice=policy.required.get,
    plan=_plan,
    tracking=torch.is_grad_enabled,
    record=_recorded,
).run
