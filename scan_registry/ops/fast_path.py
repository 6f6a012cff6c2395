"""The fast path: scans of plain tensors, at the least cost.

Most calls take it. C code looks the call's plan up and launches the kernel: see ``csrc/fast_path.h``. After the launch,
autograd is told of the results, if gradients are recorded. All other calls go through ``derivatives.scan``: those whose
arguments are converted first, those with packed sequences on the CPU, and those with which torch's dispatcher would do more
than find the kernels.
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
from scan_registry.ops.problems import StateLayout, as_new, make_kernel_call
from scan_registry.runtime.loader import prepare

#: What torch's own compiler allocates with, past the dispatcher; None if this torch has it no longer.
_empty: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
#: Gates, tokens, the initial state and ``cu_seqlens``.
Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
Result = Tensor | tuple[Tensor, Tensor]
FastPlan = FastLaunch | Callable[..., Result]

_INPUTS = ("gates", "tokens", "initial_state", "offsets")
_PLACES = {name: place for place, name in enumerate(plans.POINTERS["forward"])}


def on_gpu(tensor: Tensor) -> bool:
    """Whether a launch from C can compute with the tensor."""
    return tensor.is_cuda


class FastScan(Function):
    """Tells autograd of results that are computed already."""

    # What torch asks the class for at each call by a new string, and else finds last of all.
    setup_context = staticmethod(Function.setup_context)
    clear_saved_tensors_on_access = boxed_grads_call = False

    @staticmethod
    def forward(
        ctx: Any,
        gates: Tensor,
        tokens: Tensor,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        done: tuple[Result, Any],
    ) -> Result:
        result, ctx.request = done
        states = result[0] if isinstance(result, tuple) else result
        # As ``set_materialize_grads`` and ``save_for_backward`` do, at half the cost.
        ctx.materialize_grads = False
        if ctx.needs_input_grad[0]:
            ctx.to_save = gates, states, initial_state, cu_seqlens
        else:
            ctx.to_save = gates, None, None, cu_seqlens
        ctx.shape, ctx.dtype = states.shape, states.dtype
        return result

    @staticmethod
    def backward(ctx: Any, states_grad: Tensor | None, last_grad: Tensor | None = None) -> Any:
        if states_grad is None and last_grad is None:
            return (None,) * 5
        gates, states, initial_state, cu_seqlens = ctx.saved_tensors
        dim, reverse, _, backend, required = ctx.request
        if states_grad is None:
            states_grad = gates.new_zeros((), dtype=ctx.dtype).expand(ctx.shape)
        options = Options(dim if dim < 0 else dim - len(ctx.shape), reverse, False, backend)
        tensors = gates, states, states_grad, initial_state, last_grad, cu_seqlens
        wanted = ctx.needs_input_grad[:3]
        return *first_derivative(tensors, options, wanted, required), None, None


#: Without the search for transforms, which calls on the fast path are not under.
_recorded: Callable[..., Result] = super(Function, FastScan).apply


def _plan(
    gates: Tensor,
    tokens: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    dim: int,
    reverse: bool,
    final: bool,
    backend: Any,
) -> FastPlan | None:
    """None for a call whose arguments are converted, or whose values are checked in every call."""
    given = gates, tokens, initial_state, cu_seqlens
    *taken, options = normalised(*given, Options(dim, reverse, final, backend))
    if any(one is not other for one, other in zip(taken, given, strict=True)):
        return None
    if cu_seqlens is not None and not on_gpu(tokens):
        return None  # the values of ``cu_seqlens`` are checked in every call

    def general(gates: Tensor, tokens: Tensor, initial_state: Any, cu_seqlens: Any) -> Result:
        with torch.no_grad():
            states, last = plans.forward(gates, tokens, initial_state, cu_seqlens, options)
        return states if last is None else (states, last)

    return _launch(given, options, general) or general


def _launch(
    inputs: Inputs, options: Options, elsewhere: Callable[..., Result]
) -> FastLaunch | None:
    """The call as C makes it by itself; None if Python has to take part."""
    gates, tokens, initial_state, cu_seqlens = inputs
    if _empty is None or not on_gpu(tokens) or options.backend == "reference":
        return None
    how = cu_seqlens, options.dim, options.reverse
    call = make_kernel_call("forward", gates, {"tokens": tokens}, *how)
    layout = StateLayout.of(tokens, options.dim, cu_seqlens)
    if call.copied or not (initial_state is None or layout.holds(initial_state)):
        return None
    if options.final and cu_seqlens is not None:
        return None  # Python first copies initial states, which are the final ones of sequences without steps
    backend: Any = options.backend
    plan = prepare(tokens.device.index, FAMILY, call.problem, backend, policy.lowest(), routed=True)
    if plan.launch is None or plan.decision.route is not None:
        return None  # Python makes the copies of a route
    states = as_new(tokens)
    results = ("states", "final_state") if options.final else ("states",)
    return FastLaunch(
        launch=plan.launch,
        places=tuple([_PLACES[name] for name in (*_INPUTS, *results)]),
        empty=_empty,
        states=(tuple(states.shape), states.stride(), states.dtype),
        workspace=((plan.workspace,), (1,), torch.uint8) if plan.workspace else None,
        refuse=plan.refuse,
        elsewhere=elsewhere,
        last=(layout.shape, layout.strides, layout.dtype) if options.final else None,
    )


#: The result of a scan, from the arguments of ``linear_scan`` as given, without ``reset``. None if the call does not take the
#: fast path, or if the dispatcher would do more than find the kernels: see ``derivatives.unobserved``. The caller checks by
#: itself that nothing profiles, takes forward-mode derivatives or asks for checks on the GPU, as that costs least there.
fast_scan: Callable[[Any, Any, Any, Any, Any, Any, Any, Any], Any] = FastPath(
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
