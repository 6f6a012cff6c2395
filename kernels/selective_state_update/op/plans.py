"""How one step of a selective scan runs: by a kernel or in plain torch.

A call of shapes, strides and dtypes seen before finds its checks and its selection in a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scan_registry.dispatch import policy
from scan_registry.hardware._launcher import FastLaunch
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
from scan_registry.ops.operator import SingleCall
from scan_registry.runtime.loader import Plan as Prepared
from scan_registry.runtime.loader import prepare, run_reference

Plan = Callable[..., Tensor]

#: The first of the tensors that servers add.
_SERVED = Arguments._fields.index("dst_state")
#: Tensors that are read in chunks by the aligned kernel, and those that the dense kernel copies in pieces, too.
_CHUNKED, _PIECES = ("state", "A", "B", "C"), ("x", "dt", "z")
#: Tensors with a dimension of heads, where it is in the state, and which one.
_OF_HEADS = {
    **dict.fromkeys(("state", "dst_state", "x", "dt", "z"), 1),
    **dict.fromkeys(("A", "D", "dt_bias"), 0),
}


class KernelCall(SingleCall[StepProblem]):
    """The kernel's part in a call: its problem. It copies nothing."""


def _strides(name: str, tensor: Tensor | None, state: Tensor) -> Sequence[int]:
    """By the kernel's dimensions."""
    dimensions = DIMENSIONS[name]
    if name == "dst_state":
        return (state if tensor is None else tensor).stride()[:1]
    if tensor is None:
        return (0,) * len(dimensions)
    if name in ("indices", "dst_indices"):
        return (*tensor.stride(), 0)[:2]
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


def _without_heads(arguments: Arguments) -> Arguments:
    """Rows of several heads as channels of none, if strides allow it for all tensors."""
    if arguments.state.dim() == 3:
        return arguments
    views: dict[str, Tensor] = {}
    for name, at in _OF_HEADS.items():
        tensor = getattr(arguments, name)
        if tensor is not None:
            heads, channels = tensor.shape[at : at + 2]
            try:
                views[name] = tensor.view(
                    *tensor.shape[:at], heads * channels, *tensor.shape[at + 2 :]
                )
            except RuntimeError:
                return arguments
    return arguments._replace(**views)


def make_kernel_call(
    arguments: Arguments,
    softplus: bool,
    pad_slot: int,
    addresses: int = 0,
    addresses_of_pieces: int = 0,
) -> KernelCall:
    """What a step poses; ``addresses`` say how far tensors that kernels read in chunks, and in pieces, are aligned, up to 16 bytes."""
    arguments = _without_heads(arguments)
    state, x = arguments.state, arguments.x
    named: dict[str, Any] = {
        **arguments._asdict(),
        "bias": arguments.dt_bias,
        "out": torch.empty_like(x, device="meta"),
    }
    heads = state.shape[1] if state.dim() == 4 else 1
    formatted = (named[name] for name in FORMATTED)
    columns = max(map(_columns, (arguments.indices, arguments.dst_indices)))
    problem = StepProblem(
        dtype=dtype_name(state.dtype),
        batch=_batch(arguments),
        heads=heads,
        channels=state.shape[-2],
        states=state.shape[-1],
        groups=arguments.B.shape[1] if arguments.B.dim() == 3 else 1,
        slots=state.shape[0],
        dtypes=tuple(dtype_name((x if t is None else t).dtype) for t in formatted),
        strides=tuple(
            stride for name in DIMENSIONS for stride in _strides(name, named[name], state)
        ),
        softplus=bool(softplus),
        aligned=addresses % 16 == 0 and _is_aligned(arguments),
        in_pieces=addresses_of_pieces % 16 == 0
        and all(_in_chunks(named[name], 8) for name in _PIECES if named[name] is not None),
        wide_indices=_is_wide(arguments.indices),
        dst_slots=None if arguments.dst_state is None else arguments.dst_state.shape[0],
        pad_slot=pad_slot,
        served=pad_slot >= 0 or columns > 0 or _is_served(arguments),
        tokens=None if arguments.cu_seqlens is None else x.shape[0],
        columns=max(1, columns),
        every_token=_is_every_token(arguments),
        wide_others=(
            _is_wide(arguments.dst_indices),
            _is_wide(arguments.cu_seqlens),
            _is_wide(arguments.num_accepted),
        ),
    )
    return KernelCall(problem)


def _is_aligned(arguments: Arguments) -> bool:
    """Whether all that kernels read in chunks can be read so, if its addresses allow it."""
    state, A = arguments.state, arguments.A
    unit = 16 // state.element_size()
    chunked = [name for name in _CHUNKED if name != "A" or A.stride(-1) != 0]
    whole = state.shape[-1] % unit == 0
    return whole and all(_in_chunks(getattr(arguments, name), unit) for name in chunked)


def _is_served(arguments: Arguments) -> bool:
    """Whether there is what servers add."""
    return any(tensor is not None for tensor in arguments[_SERVED:])


def _columns(indices: Tensor | None) -> int:
    """Of indices of two dimensions; 0 where they have none."""
    return indices.shape[1] if indices is not None and indices.dim() == 2 else 0


def _is_wide(integers: Tensor | None) -> bool:
    return integers is not None and integers.dtype == torch.int64


def _batch(arguments: Arguments) -> int:
    """How many sequences there are."""
    if arguments.cu_seqlens is not None:
        return arguments.cu_seqlens.shape[0] - 1
    return arguments.x.shape[0]


def _is_every_token(arguments: Arguments) -> bool:
    """Whether the states after each token are written, to slots of their own."""
    slots = arguments.indices if arguments.dst_indices is None else arguments.dst_indices
    return slots is not None and slots.dim() == 2


# --- Running ----------------------------------------------------------------------------------


def step(tensors: tuple[Tensor | None, ...], softplus: bool, pad_slot: int, backend: str) -> Tensor:
    """The output; the state is changed in place. Arguments are checked by the first call of their kind."""
    out: Tensor = plan_cache.run(_plan, tensors, softplus, pad_slot, backend)
    return out


def _plan(*arguments: Any) -> Plan:
    *tensors, softplus, pad_slot, backend = arguments
    checked = check(tuple(tensors), softplus, pad_slot, backend)
    return _make_plan(checked, softplus, pad_slot, backend)[0]


def _plan_fast(
    recorded: bool, tensors: tuple[Any, ...], options: tuple[Any, ...]
) -> FastLaunch | Plan | None:
    softplus, pad_slot, backend = options
    if recorded or type(softplus) is not bool or type(pad_slot) is not int:
        return None  # it is refused
    arguments = check(tensors, softplus, pad_slot, backend)
    plan, ready = _make_plan(arguments, softplus, pad_slot, backend)
    if ready is None or ready.launch is None:
        return plan
    out = torch.empty_like(arguments.x)
    results = [(tuple(out.shape), out.stride(), out.dtype)]
    return launch_from_c(ready, range(len(arguments) + 1), results, plan) or plan


def _make_plan(
    arguments: Arguments, softplus: bool, pad_slot: int, backend: Any
) -> tuple[Plan, Prepared | None]:
    """The plan of a call, and what it launches, if it does."""

    def by_reference(*tensors: Any) -> Tensor:
        args = Arguments(*tensors)
        out = torch.empty_like(args.x)
        others = args._asdict()
        others["dt_softplus"], others["pad_slot"] = softplus, pad_slot
        return out.copy_(reference.step(**others))

    state = arguments.state
    in_torch = backend == "reference" or state.dtype not in COMPILED or arguments.x.numel() == 0
    if in_torch or not state.is_cuda:
        return by_reference, None
    ordinal = state.device.index
    chunked, pieces = (
        addresses_of([getattr(arguments, name) for name in names]) for names in (_CHUNKED, _PIECES)
    )
    call = make_kernel_call(arguments, softplus, pad_slot, chunked, pieces)
    ready = prepare(ordinal, FAMILY, call.problem, backend, policy.lowest())
    if ready.launch is None:
        return partial(run_reference, ready.decision, by_reference), None
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
