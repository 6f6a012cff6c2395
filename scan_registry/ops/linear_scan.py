"""``linear_scan``: x[t] = gates[t] * x[t-1] + tokens[t], differentiable, on any device.

A call with shapes, strides and dtypes seen before costs one dictionary look-up before the launch:
the checks, the selection and the integer parameters are all in the plan that it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler
from torch.nn import Parameter

from scan_registry import policy
from scan_registry.kernels.linear_scan import reference
from scan_registry.kernels.linear_scan.problem import Direction, LinearScanProblem, common_alignment
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.loader import Prepared, prepare, run_reference
from scan_registry.ops.layout import Share, arrange_with_copies
from scan_registry.select import BACKENDS, Backend

_DTYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
_MOST_PLANS = 4096  # of each direction; past that the oldest half goes

_PLAIN_TYPES = (Tensor, Parameter)
_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms_active = torch._C._are_functorch_transforms_active
_tracing_state = torch._C._get_tracing_state
_required = policy.required.get

Plan = Callable[..., Any]
_forward_plans: dict[tuple[Any, ...], Plan] = {}
_backward_plans: dict[tuple[Any, ...], Plan] = {}


def linear_scan(
    gates: Tensor, tokens: Tensor, *, dim: int = -1, backend: Backend = "auto"
) -> Tensor:
    """States of the linear recurrence x[t] = gates[t] * x[t-1] + tokens[t] along ``dim``, x[-1] = 0.

    Args:
        gates: any shape; float32, bfloat16 or float16 (on the CPU float64 too).
        tokens: same shape, dtype and device as ``gates``.
        dim: the time dimension. It decides which kernel runs only through its stride: where it is
            1, or where another dimension's is (as for a (B, T, D) tensor with ``dim=1``), nothing
            is copied.
        backend: ``"auto"`` takes the best binary installed for this GPU; ``"cuda"`` and
            ``"triton"`` pin a language; ``"reference"`` is plain torch on any device.

    Returns:
        The states: shape, dtype and device of ``tokens``. The recurrence is computed in float32
        (float64 for float64) whatever the dtype. Differentiable in both inputs, any number of times;
        the first derivative is one kernel. As in every parallel scan, products of neighbouring gates
        are formed: where one exceeds float32's 3.4e38, states after it may be infinite or NaN even
        if the recurrence is not. Gates within [-1, 1] are always safe.

    Raises:
        TypeError: an argument is not a tensor, or its dtype is not supported.
        ValueError: shapes, dtypes or devices differ, or ``dim`` or ``backend`` is out of range.
        NoKernelError: ``require``, ``SCAN_REGISTRY_REQUIRE`` or ``backend`` allows nothing that runs
            on this GPU; the message lists what there is.
        ProviderError: an installed package of archives does not go with this version.
        DriverError: the driver failed; the message names the kernel, its variant and the launch.

    Warns:
        FallbackWarning: once per kernel, where it is compiled here or plain torch stands in for it.
    """
    if not _is_compiling() and _unobserved(gates, tokens):
        if (gates.requires_grad or tokens.requires_grad) and torch.is_grad_enabled():
            return LinearScan.apply(gates, tokens, dim, backend, True)  # type: ignore[no-any-return, no-untyped-call]
        return _forward(gates, tokens, dim, backend)
    for name, value in (("gates", gates), ("tokens", tokens)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(value).__name__}")
    if not (isinstance(dim, (int, torch.SymInt)) and isinstance(backend, str)):
        _check({"gates": gates, "tokens": tokens}, dim, backend)
    return _op(gates, tokens, dim, backend)  # type: ignore[no-any-return]


def _unobserved(gates: Tensor, tokens: Tensor) -> bool:
    """Whether the dispatcher would do no more than find the kernels, which costs more than this.

    Subclasses, lazy negations, modes, transforms, tracers, profilers and forward-mode derivatives
    see, or change, only what it dispatches.
    """
    return (
        type(gates) in _PLAIN_TYPES
        and type(tokens) in _PLAIN_TYPES
        and not gates.is_neg()
        and not tokens.is_neg()
        and not _dispatch_modes()
        and not _transforms_active()
        and _tracing_state() is None
        and not profiler._is_profiler_enabled
        and forward_ad._current_level < 0
    )


class LinearScan(torch.autograd.Function):
    """Saves gates and states. The backward pass is one kernel, or, where it has to be differentiated
    in turn, a scan and a product that are. ``direct`` goes round the dispatcher."""

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, tokens: Tensor, dim: int, backend: Backend, direct: bool
    ) -> Tensor:
        if direct:
            states = _forward(gates, tokens, dim, backend)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                states = _op(gates, tokens, dim, backend)
        ctx.save_for_backward(gates, states)
        ctx.how = dim, backend
        ctx.required = _required()
        return states

    @staticmethod
    def backward(ctx: Any, states_grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        gates, states = ctx.saved_tensors
        # Grad mode is on here only under create_graph.
        step = _differentiable_backward if torch.is_grad_enabled() else _backward_op
        if ctx.required is _required():
            gates_grad, tokens_grad = step(gates, states, states_grad, *ctx.how)
        else:
            with policy.as_required(ctx.required):
                gates_grad, tokens_grad = step(gates, states, states_grad, *ctx.how)
        return gates_grad, tokens_grad, None, None, None


def _differentiable_backward(
    gates: Tensor, states: Tensor, states_grad: Tensor, dim: int, backend: Backend
) -> tuple[Tensor, Tensor]:
    """The backward pass written in differentiable operators: a scan against time, and a product."""
    count = gates.shape[dim]
    edge = torch.zeros_like(gates.narrow(dim, 0, min(1, count)))
    following = torch.cat([gates.narrow(dim, min(1, count), max(0, count - 1)), edge], dim)
    preceding = torch.cat([edge, states.narrow(dim, 0, max(0, count - 1))], dim)
    reversed_grad = linear_scan(
        following.flip(dim), states_grad.flip(dim), dim=dim, backend=backend
    )
    tokens_grad = reversed_grad.flip(dim)
    return tokens_grad * preceding, tokens_grad


# --- Checks -----------------------------------------------------------------------------------


def _check(tensors: dict[str, Tensor], dim: int, backend: str) -> int:
    """Refuse what no kernel accepts, naming it; return ``dim`` as a non-negative number."""
    (first_name, first), *others = tensors.items()
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; accepted are {', '.join(BACKENDS)}")
    compiled = first.is_cuda and backend != "reference"
    accepted = [*_DTYPES] if compiled else [*_DTYPES, torch.float64]
    if first.dtype not in accepted:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in accepted)
        raise TypeError(f"{first_name} has dtype {first.dtype}; accepted are {names}")
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_nested:
            raise TypeError(f"{name} is sparse or nested; accepted are dense tensors")
    for name, tensor in others:
        if tensor.dtype != first.dtype:
            raise TypeError(
                f"{name} has dtype {tensor.dtype}, {first_name} {first.dtype}; they must be equal"
            )
        if tensor.shape != first.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, {first_name} {tuple(first.shape)}; "
                "they must be equal"
            )
        if tensor.device != first.device:
            raise ValueError(
                f"{name} is on {tensor.device}, {first_name} on {first.device}; "
                "they must be on one device"
            )
    if not first.is_cuda and backend in ("cuda", "triton"):
        raise ValueError(
            f"backend is {backend!r}, which needs a CUDA device; {first_name} is on {first.device}"
        )
    if not isinstance(dim, int):
        raise TypeError(f"dim is {dim!r}; it must be an int")
    if first.dim() == 0:
        raise ValueError(f"{first_name} is a scalar; it needs a time dimension")
    if not -first.dim() <= dim < first.dim():
        raise ValueError(
            f"dim is {dim}; a tensor of {first.dim()} dimensions accepts "
            f"{-first.dim()} to {first.dim() - 1}"
        )
    return dim % first.dim()


# --- Plans ------------------------------------------------------------------------------------


def _remember(plans: dict[tuple[Any, ...], Plan], key: tuple[Any, ...], plan: Plan) -> Plan:
    if len(plans) >= _MOST_PLANS:
        for old in list(plans)[: _MOST_PLANS // 2]:
            plans.pop(old, None)
    plans[key] = plan
    return plan


def _share(direction: Direction, inputs: dict[str, Tensor], dim: int) -> Share:
    """What one direction makes of its inputs, of which the second gives the outputs their layout."""
    tensors = list(inputs.values())
    dense = torch.empty_like(tensors[1], device="meta").stride()
    arranged, copied = arrange_with_copies(
        tensors[1].shape, dim, [tensor.stride() for tensor in tensors], dense
    )
    kept = [tensor for tensor, copy in zip(tensors, copied, strict=True) if not copy]
    problem = LinearScanProblem(
        direction=direction,
        dtype=str(tensors[0].dtype).removeprefix("torch."),
        alignment=common_alignment(tensor.data_ptr() for tensor in kept),
        **vars(arranged),
    )
    return Share(problem, tuple(name for name, copy in zip(inputs, copied, strict=True) if copy))


def describe(
    gates: Tensor, tokens: Tensor, *, dim: int = -1, backend: Backend = "auto"
) -> dict[str, Share]:
    """The problems that a call of ``linear_scan`` with these arguments poses, by direction; the
    backward one only if a derivative is asked for. Nothing is computed."""
    dim = _check({"gates": gates, "tokens": tokens}, dim, backend)
    if tokens.numel() == 0:
        return {}
    shares = {"forward": _share("forward", {"gates": gates, "tokens": tokens}, dim)}
    if gates.requires_grad or tokens.requires_grad:
        states = torch.empty_like(tokens, device="meta")
        inputs = {"gates": gates, "states": states, "states_grad": states}
        shares["backward"] = _share("backward", inputs, dim)
    return shares


def _prepared(
    direction: Direction, inputs: dict[str, Tensor], dim: int, backend: Backend
) -> tuple[Prepared, list[str]]:
    """The best kernel for one direction, and the names of the inputs to copy before it."""
    share = _share(direction, inputs, dim)
    ordinal = next(iter(inputs.values())).device.index
    return prepare(ordinal, FAMILY, share.problem, backend, policy.lowest()), list(share.copied)


def _plan_forward(gates: Tensor, tokens: Tensor, dim: int, backend: Backend) -> Plan:
    inputs = {"gates": gates, "tokens": tokens}
    dim = _check(inputs, dim, backend)
    if tokens.numel() == 0:
        return lambda gates, tokens, *_: torch.empty_like(tokens)
    if not (tokens.is_cuda or tokens.is_cpu):  # meta, or what has no kernel here
        return lambda gates, tokens, *_: _op(gates, tokens, dim, backend)
    if backend == "reference" or tokens.is_cpu:
        return lambda gates, tokens, *_: reference.forward(gates, tokens, dim=dim)
    ready, copied = _prepared("forward", inputs, dim, backend)
    if ready.launch is None:
        return lambda gates, tokens, *_: run_reference(
            ready.decision, lambda: reference.forward(gates, tokens, dim=dim)
        )
    run, workspace, ordinal = ready.launch.run, ready.workspace, tokens.device.index
    stream = torch._C._cuda_getCurrentRawStream

    def plan(gates: Tensor, tokens: Tensor, gates_address: int, tokens_address: int) -> Tensor:
        states = torch.empty_like(tokens)
        scratch = tokens.new_empty(workspace, dtype=torch.uint8) if workspace else None
        status = run(
            stream(ordinal),
            gates_address,
            tokens_address,
            None,
            states.data_ptr(),
            None,
            None,
            scratch.data_ptr() if scratch is not None else None,
        )
        if status:
            ready.refuse(status)
        return states

    def plan_with_copies(gates: Tensor, tokens: Tensor, *_: int) -> Tensor:
        gates, tokens = _copied({"gates": gates, "tokens": tokens}, copied, tokens)
        return plan(gates, tokens, gates.data_ptr(), tokens.data_ptr())

    return plan_with_copies if copied else plan


def _plan_backward(
    gates: Tensor, states: Tensor, states_grad: Tensor, dim: int, backend: Backend
) -> Plan:
    inputs = {"gates": gates, "states": states, "states_grad": states_grad}
    dim = _check(inputs, dim, backend)
    if states.numel() == 0:
        return lambda gates, states, states_grad: (
            torch.empty_like(states),
            torch.empty_like(states),
        )
    if backend == "reference" or not states.is_cuda:
        return lambda *inputs: reference.backward(*inputs, dim=dim)[:2]
    ready, copied = _prepared("backward", inputs, dim, backend)
    if ready.launch is None:
        return lambda *inputs: run_reference(
            ready.decision, lambda: reference.backward(*inputs, dim=dim)[:2]
        )
    run, workspace, ordinal = ready.launch.run, ready.workspace, states.device.index
    stream = torch._C._cuda_getCurrentRawStream

    def plan(gates: Tensor, states: Tensor, states_grad: Tensor) -> tuple[Tensor, Tensor]:
        if copied:
            named = {"gates": gates, "states": states, "states_grad": states_grad}
            gates, states, states_grad = _copied(named, copied, states)
        gates_grad, tokens_grad = torch.empty_like(states), torch.empty_like(states)
        scratch = states.new_empty(workspace, dtype=torch.uint8) if workspace else None
        status = run(
            stream(ordinal),
            gates.data_ptr(),
            states.data_ptr(),
            states_grad.data_ptr(),
            None,
            None,
            gates_grad.data_ptr(),
            tokens_grad.data_ptr(),
            None,
            None,
            scratch.data_ptr() if scratch is not None else None,
        )
        if status:
            ready.refuse(status)
        return gates_grad, tokens_grad

    return plan


def _copied(inputs: dict[str, Tensor], names: Sequence[str], model: Tensor) -> list[Tensor]:
    """The inputs, those that are named copied into the memory layout of ``model`` without its gaps."""
    return [
        torch.empty_like(model).copy_(tensor) if name in names else tensor
        for name, tensor in inputs.items()
    ]


# --- Registration -----------------------------------------------------------------------------


def _forward(gates: Tensor, tokens: Tensor, dim: int = -1, backend: Backend = "auto") -> Tensor:
    try:
        addresses = gates.data_ptr(), tokens.data_ptr()
    except RuntimeError:  # sparse or nested; the checks say so
        _check({"gates": gates, "tokens": tokens}, dim, backend)
        raise
    # Everything that a plan depends on, spelled out because this is what a call costs.
    key = (
        gates.shape,
        tokens.shape,
        gates.stride(),
        tokens.stride(),
        gates.dtype,
        tokens.dtype,
        gates.device,
        tokens.device,
        dim,
        backend,
        (addresses[0] | addresses[1]) & 15,
        _required(),
    )
    try:
        plan = _forward_plans.get(key)
    except TypeError:  # an option that cannot be a key; the checks have better words for it
        _check({"gates": gates, "tokens": tokens}, dim, backend)
        raise
    if plan is None:
        plan = _remember(_forward_plans, key, _plan_forward(gates, tokens, dim, backend))
    states: Tensor = plan(gates, tokens, *addresses)
    return states


def _backward(
    gates: Tensor, states: Tensor, states_grad: Tensor, dim: int, backend: Backend
) -> tuple[Tensor, Tensor]:
    facts = tuple((t.shape, t.stride(), t.dtype, t.device) for t in (gates, states, states_grad))
    addresses = gates.data_ptr() | states.data_ptr() | states_grad.data_ptr()
    key = (facts, dim, backend, addresses & 15, _required())
    plan = _backward_plans.get(key)
    if plan is None:
        plan = _plan_backward(gates, states, states_grad, dim, backend)
        _remember(_backward_plans, key, plan)
    gradients: tuple[Tensor, Tensor] = plan(gates, states, states_grad)
    return gradients


def _forward_fake(
    gates: Tensor, tokens: Tensor, dim: int = -1, backend: Backend = "auto"
) -> Tensor:
    _check({"gates": gates, "tokens": tokens}, dim, backend)
    return torch.empty_like(tokens)


def _backward_fake(
    gates: Tensor, states: Tensor, states_grad: Tensor, dim: int, backend: Backend
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(states), torch.empty_like(states)


def _forward_autograd(
    gates: Tensor, tokens: Tensor, dim: int = -1, backend: Backend = "auto"
) -> Tensor:
    # Forward-mode derivatives go the same way, to be refused there rather than lost here.
    wanted = torch.is_grad_enabled() and (gates.requires_grad or tokens.requires_grad)
    if wanted or forward_ad._current_level >= 0:
        return LinearScan.apply(gates, tokens, dim, backend, False)  # type: ignore[no-any-return, no-untyped-call]
    with torch._C._AutoDispatchBelowAutograd():
        return _op(gates, tokens, dim, backend)  # type: ignore[no-any-return]


def _backward_autograd(
    gates: Tensor, states: Tensor, states_grad: Tensor, dim: int, backend: Backend
) -> tuple[Tensor, Tensor]:
    inputs = gates, states, states_grad
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        return _differentiable_backward(*inputs, dim, backend)
    with torch._C._AutoDispatchBelowAutograd():
        return _backward_op(*inputs, dim, backend)  # type: ignore[no-any-return]


_LIBRARY = torch.library.Library("scan_registry", "DEF")
_LIBRARY.define(
    'linear_scan(Tensor gates, Tensor tokens, int dim=-1, str backend="auto") -> Tensor',
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.define(
    "linear_scan_backward(Tensor gates, Tensor states, Tensor states_grad, int dim, str backend)"
    " -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
for _dispatch_key in ("CPU", "CUDA"):
    _LIBRARY.impl("linear_scan", _forward, _dispatch_key)
    _LIBRARY.impl("linear_scan_backward", _backward, _dispatch_key)
_LIBRARY.impl("linear_scan", _forward_autograd, "Autograd")
_LIBRARY.impl("linear_scan_backward", _backward_autograd, "Autograd")
torch.library.register_fake("scan_registry::linear_scan", _forward_fake, lib=_LIBRARY)
torch.library.register_fake("scan_registry::linear_scan_backward", _backward_fake, lib=_LIBRARY)

_op = torch.ops.scan_registry.linear_scan.default
_backward_op = torch.ops.scan_registry.linear_scan_backward.default
