"""From the tensors of a gated scan to the problem that a kernel solves, and which tensors have to be copied first.

A kernel needs one dimension of stride 1, either time or channels, which must be the same in all sequences. All inputs must have
the same strides. The states get the strides of a new tensor like the first input, which decides the dimension. Arguments are
as ``normalised`` makes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from scan_registry.base.frozen import dataclass
from scan_registry.dispatch.select import Backend
from scan_registry.kernels.gated_scan.kinds import KINDS
from scan_registry.kernels.gated_scan.op.arguments import COMPILED, Arguments, Options
from scan_registry.kernels.gated_scan.problem import (
    STRIDED,
    Direction,
    GatedScanProblem,
    Layout,
    Strides,
)
from scan_registry.kernels.gated_scan.reference import compute_dtype
from scan_registry.kernels.linear_scan.op import stretches as resets
from scan_registry.kernels.linear_scan.op.arguments import Options as LinearOptions
from scan_registry.kernels.linear_scan.op.layout import KernelCall as LinearKernelCall
from scan_registry.kernels.linear_scan.op.problems import StateLayout, make_kernel_call
from scan_registry.ops.launching import addresses_of
from scan_registry.ops.strides import as_new

#: An input is copied to the strides of the others only if that takes at most so many times the tensor's own size.
_MOST_ROOM = 2

Sizes = tuple[int, int, int]


@dataclass(frozen=True)
class KernelCall:
    """One kernel's part in an operator's call: its problem, and the names of the tensors that are copied first. Strides are in
    the order of the tensors' dimensions.

    inputs  strides of copies of inputs
    dense   strides of what the kernel writes, and of copies of the states and of their gradient
    direct  whether ``dense`` are the strides of a new tensor like the first input
    stand_in  the family and the call that scan gates and tokens where torch's operators compute these
    """

    problem: GatedScanProblem
    copied: tuple[str, ...] = ()
    inputs: Sizes = (0, 0, 0)
    dense: Sizes = (0, 0, 0)
    direct: bool = True
    stand_in: tuple[str, LinearKernelCall] | None = None

    def alternatives(self, backend: Backend) -> tuple[tuple[GatedScanProblem, Backend], ...]:
        """The problem alone."""
        return ((self.problem, backend),)

    def fused(self) -> None:
        """None: no kernel of this family also does the work of another."""


def has_kernels(arguments: Arguments, options: Options) -> bool:
    """Whether this family has kernels for it. ``linear_scan`` has those for kind ``linear`` without resets. None is in
    Triton."""
    first = arguments.inputs[0]
    if options.backend == "triton" or is_linear(arguments, options):
        return False
    return first.dtype in COMPILED and first.numel() > 0


def is_linear(arguments: Arguments, options: Options) -> bool:
    """Whether ``linear_scan`` computes it: kind ``linear`` without resets."""
    return options.kind == "linear" and arguments.reset is None


def ordered(values: Sequence[int], dim: int) -> Sizes:
    """Values for (batch, channels, time), from values in the order of the tensors' dimensions. Its own inverse."""
    batch, one, other = values
    return (batch, one, other) if dim == -1 else (batch, other, one)


def make_call(
    direction: Direction,
    arguments: Arguments,
    options: Options,
    addresses: int,
    others: Mapping[str, Tensor] | None = None,
) -> KernelCall:
    """The kernel call for one pass. ``others`` are the other tensors of a backward pass: ``states`` and ``states_grad``.
    ``addresses`` is ``addresses_of`` all tensors."""
    first, dim = arguments.inputs[0], options.dim
    sizes = ordered(first.shape, dim)
    promised = ordered(as_new(first).stride(), dim)
    layout = _layout(sizes, promised)
    whole = promised
    if layout is None:  # batches are innermost
        layout, whole = "time_last", (sizes[1] * sizes[2], sizes[2], 1)
    dense = _plain(whole, sizes, layout)
    inputs = {f"input{n}": _own(x, dim, layout) for n, x in enumerate(arguments.inputs)}
    shared = _shared([*inputs.values()], dense, sizes, layout)
    copied = [name for name, own in inputs.items() if own != shared]
    strides = {"inputs": shared, "states": dense, "states_grad": dense, "grads": dense}
    for name, tensor in (others or {}).items():
        own = _own(tensor, dim, layout)
        if _has_unit(own, sizes, layout):
            strides[name] = own
        else:
            copied.append(name)
    kind, cu_seqlens, reset = KINDS[options.kind], arguments.cu_seqlens, arguments.reset
    named = {name: Strides(0, *own) for name, own in strides.items()}
    named["state"] = _state_strides(StateLayout.of(first, dim, cu_seqlens), dim)
    problem = GatedScanProblem(
        direction=direction,
        layout=layout,
        dtype=(dtype := str(first.dtype).removeprefix("torch.")),
        gates_dtype=dtype,
        outer=1,
        batch=sizes[0],
        channels=sizes[1],
        time=sizes[2],
        strides=tuple(named[name] for name in STRIDED[direction]),
        alignment=16 if addresses == 0 else addresses & -addresses,
        sequences=0 if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        reverse=options.reverse,
        kind=kind.source,
        option=kind.option,
        resets=reset is not None,
        reset_batch=_reset_batch(reset),
    )
    return KernelCall(
        problem, tuple(copied), ordered(shared, dim), ordered(whole, dim), whole == promised
    )


def _layout(sizes: Sizes, strides: Sizes) -> Layout | None:
    """The layout by the dimension of stride 1; None if neither time nor channels has it. If both have stride 1, one of them
    has a single element, and the other decides."""
    (_, channels, time), (_, of_channel, of_time) = sizes, strides
    if of_time == 1 and (time > 1 or channels == 1):
        return "time_last"
    return "channel_last" if of_channel == 1 or channels == 1 else None


def _own(tensor: Tensor, dim: int, layout: Layout) -> Sizes:
    return _plain(ordered(tensor.stride(), dim), ordered(tensor.shape, dim), layout)


def _plain(strides: Sizes, sizes: Sizes, layout: Layout) -> Sizes:
    """The strides, with fixed values for dimensions of one element, whose strides do not matter."""
    unit = 2 if layout == "time_last" else 1
    batch, channel, time = (
        stride if size > 1 else int(place == unit)
        for place, (stride, size) in enumerate(zip(strides, sizes, strict=True))
    )
    return batch, channel, time


def _has_unit(strides: Sizes, sizes: Sizes, layout: Layout) -> bool:
    unit = 2 if layout == "time_last" else 1
    return sizes[unit] == 1 or strides[unit] == 1


def _shared(own: Sequence[Sizes], dense: Sizes, sizes: Sizes, layout: Layout) -> Sizes:
    """The strides that all inputs are to have: those of one of the inputs, or dense ones, so that the fewest are copied."""

    def copies(strides: Sizes) -> int:
        return sum(of_input != strides for of_input in own)

    fitting = [
        strides
        for strides in dict.fromkeys((dense, *own))
        if _has_unit(strides, sizes, layout)
        and (copies(strides) == 0 or strides == dense or _has_room(strides, sizes))
    ]
    return min(fitting, key=copies)


def _has_room(strides: Sizes, sizes: Sizes) -> bool:
    """Whether a tensor with such strides has no overlapping elements, and few gaps."""
    end = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1:
            if stride < end:
                return False
            end = (size - 1) * stride + end
    return end <= _MOST_ROOM * sizes[0] * sizes[1] * sizes[2]


def _state_strides(layout: StateLayout, dim: int) -> Strides:
    if layout.packed:
        batch, channel, sequence = ordered(layout.strides, dim)
        return Strides(0, batch, channel, sequence)
    batch, channel = layout.strides
    return Strides(0, batch, channel, 0)


def reset_is_dense(reset: Tensor | None) -> bool:
    """Whether successive time steps are successive bytes."""
    return reset is None or reset.shape[1] == 1 or reset.stride(1) == 1


def _reset_batch(reset: Tensor | None) -> int:
    """The stride between batches of ``reset``, or of its dense copy if it is copied."""
    if reset is None or reset.shape[0] == 1:
        return 0
    return reset.stride(0) if reset_is_dense(reset) else reset.shape[1]


def describe(arguments: Arguments, options: Options, differentiated: bool) -> dict[str, KernelCall]:
    """The kernel calls by direction; ``backward`` only if ``differentiated``. Nothing is computed."""
    first, cu_seqlens = arguments.inputs[0], arguments.cu_seqlens
    if first.numel() == 0:
        return {}
    addresses = addresses_of(aligned_reset(arguments).flat)
    model = torch.empty_like(first, device="meta")
    calls: dict[Direction, KernelCall] = {
        "forward": make_call("forward", arguments, options, addresses)
    }
    if differentiated:
        others = {"states": model, "states_grad": model}
        calls["backward"] = make_call("backward", arguments, options, addresses, others)
    gates, how = model.to(compute_dtype(first.dtype)), LinearOptions(*options[1:])
    if arguments.reset is not None:
        gates, _, cu_seqlens, how = resets.stretches(gates, how)
    return {
        direction: replace(call, stand_in=("linear_scan", _scan(direction, gates, cu_seqlens, how)))
        for direction, call in calls.items()
    }


def _scan(
    direction: Direction, gates: Tensor, cu_seqlens: Tensor | None, options: LinearOptions
) -> LinearKernelCall:
    """The call of ``linear_scan`` for gates, and tokens and states like them."""
    names = ("tokens",) if direction == "forward" else ("states", "states_grad")
    others = dict.fromkeys(names, gates)
    return make_kernel_call(direction, gates, others, cu_seqlens, options.dim, options.reverse)


def aligned_reset(arguments: Arguments) -> Arguments:
    """The arguments with a ``reset`` that starts on 16 bytes. ``reset`` is small, so it is copied rather than let its address
    rule out aligned access to all tensors."""
    reset = arguments.reset
    if reset is None or reset.data_ptr() & 15 == 0:
        return arguments
    return arguments._replace(reset=reset.clone())
