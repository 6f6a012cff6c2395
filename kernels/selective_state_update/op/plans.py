"""How one step of a selective scan runs: by a kernel or in plain torch.

A call of shapes, strides and dtypes seen before finds its checks and its selection in a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from scan_registry.base.frozen import dataclass
from scan_registry.dispatch import policy
from scan_registry.dispatch.select import Backend
from scan_registry.hardware._launcher import FastLaunch
from scan_registry.kernels.model import Problem
from scan_registry.kernels.selective_state_update import reference
from scan_registry.kernels.selective_state_update.op.arguments import (
    COMPILED,
    Arguments,
    check,
    dtype_name,
)
from scan_registry.kernels.selective_state_update.problem import DIMENSIONS, FORMATTED, StepProblem
from scan_registry.kernels.selective_state_update.spec import FAMILY
from scan_registry.ops.call import fast_path, launch_from_c
from scan_registry.ops.launching import addresses_of, plan_cache
from scan_registry.runtime.loader import Plan as Prepared
from scan_registry.runtime.loader import prepare, run_reference

Plan = Callable[..., Tensor]

#: Tensors that are read in chunks by the aligned kernel.
_CHUNKED = ("state", "A", "B", "C")


@dataclass(frozen=True)
class KernelCall:
    """The kernel's part in a call: its problem. It copies nothing."""

    problem: StepProblem
    copied: tuple[str, ...] = ()

    def alternatives(self, backend: Backend) -> tuple[tuple[Problem, Backend], ...]:
        """The problem alone."""
        return ((self.problem, backend),)

    def fused(self) -> None:
        """No kernel of this family does what another one does, too."""


def _strides(name: str, tensor: Tensor | None, state: Tensor) -> Sequence[int]:
    """By the kernel's dimensions."""
    dimensions = DIMENSIONS[name]
    if tensor is None:
        return (0,) * len(dimensions)
    if name == "indices":
        return tensor.stride()
    strides = list(tensor.stride())
    if name in "BC":
        if tensor.dim() == 2:
            strides.insert(1, 0)
    elif state.dim() == 3:
        strides.insert(dimensions.index("head"), 0)
    return strides


def _in_chunks(tensor: Tensor, count: int) -> bool:
    """Whether the numbers of ``count`` states can be read from it at once, wherever a chunk of them starts."""
    *others, along = tensor.stride()
    size = tensor.element_size()
    least = min(16, count * size)
    sizes = zip(others, tensor.shape[:-1], strict=True)
    return along == 1 and all(n == 1 or stride * size % least == 0 for stride, n in sizes)


def make_kernel_call(arguments: Arguments, softplus: bool, addresses: int = 0) -> KernelCall:
    """What a step poses; ``addresses`` say how far all tensors are aligned, up to 16 bytes."""
    state, x = arguments.state, arguments.x
    named: dict[str, Any] = {
        **arguments._asdict(),
        "bias": arguments.dt_bias,
        "out": torch.empty_like(x, device="meta"),
    }
    heads = state.shape[1] if state.dim() == 4 else 1
    unit = 16 // state.element_size()
    formatted = (named[name] for name in FORMATTED)
    problem = StepProblem(
        dtype=dtype_name(state.dtype),
        batch=x.shape[0],
        heads=heads,
        channels=state.shape[-2],
        states=state.shape[-1],
        groups=arguments.B.shape[1] if arguments.B.dim() == 3 else 1,
        slots=state.shape[0],
        dtypes=tuple("float32" if t is None else dtype_name(t.dtype) for t in formatted),
        strides=tuple(
            stride for name in DIMENSIONS for stride in _strides(name, named[name], state)
        ),
        softplus=bool(softplus),
        aligned=addresses % 16 == 0
        and state.shape[-1] % unit == 0
        and all(
            _in_chunks(named[name], unit)
            for name in _CHUNKED
            if name != "A" or arguments.A.stride(-1) != 0
        ),
        wide_indices=arguments.indices is not None and arguments.indices.dtype == torch.int64,
    )
    return KernelCall(problem)


# --- Running ----------------------------------------------------------------------------------


def step(tensors: tuple[Tensor | None, ...], softplus: bool, backend: str) -> Tensor:
    """The output; the state is changed in place. Arguments are checked by the first call of their kind."""
    out: Tensor = plan_cache.run(_plan, tensors, softplus, backend)
    return out


def _plan(*arguments: Any) -> Plan:
    *tensors, softplus, backend = arguments
    return _make_plan(check(tuple(tensors), softplus, backend), softplus, backend)[0]


def _plan_fast(
    recorded: bool, tensors: tuple[Any, ...], options: tuple[Any, ...]
) -> FastLaunch | Plan | None:
    softplus, backend = options
    if recorded or type(softplus) is not bool:
        return None  # it is refused
    arguments = check(tensors, softplus, backend)
    plan, ready = _make_plan(arguments, softplus, backend)
    if ready is None or ready.launch is None:
        return plan
    out = torch.empty_like(arguments.x)
    results = [(tuple(out.shape), out.stride(), out.dtype)]
    return launch_from_c(ready, range(len(arguments) + 1), results, plan) or plan


def _make_plan(arguments: Arguments, softplus: bool, backend: Any) -> tuple[Plan, Prepared | None]:
    """The plan of a call, and what it launches, if it does."""

    def by_reference(*tensors: Any) -> Tensor:
        args = Arguments(*tensors)
        out = torch.empty_like(args.x)
        return out.copy_(reference.step(*args[:-1], dt_softplus=softplus, indices=args.indices))

    state = arguments.state
    in_torch = backend == "reference" or state.dtype not in COMPILED or arguments.x.numel() == 0
    if in_torch or not state.is_cuda:
        return by_reference, None
    ordinal = state.device.index
    addresses = addresses_of([getattr(arguments, name) for name in _CHUNKED])
    call = make_kernel_call(arguments, softplus, addresses)
    ready = prepare(ordinal, FAMILY, call.problem, backend, policy.lowest())
    if ready.launch is None:
        decision = ready.decision
        return lambda *tensors: run_reference(decision, lambda: by_reference(*tensors)), None
    start, stream, refuse = ready.launch.run, torch._C._cuda_getCurrentRawStream, ready.refuse
    empty_like = torch.empty_like

    def launch(*tensors: Any) -> Tensor:
        # In the order of the kernel's pointers, the output last.
        out = empty_like(tensors[1])
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        if status := start(stream(ordinal), *pointers, out.data_ptr()):
            refuse(status)
        return out

    return launch, ready


#: The output of a call, from all tensors, and ``dt_softplus`` and ``backend``. None if a tensor records derivatives, or if
#: the dispatcher would do more than find the kernels.
fast_step = fast_path(_plan_fast)
