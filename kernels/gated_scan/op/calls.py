"""From facts about the tensors of a gated scan to the problem that a kernel solves, and which tensors have to be copied first.
Pure, and alike for every array library.

A kernel needs one dimension of stride 1, either time or channels, which must be the same in all sequences. All inputs must have
the same strides. The states get the strides of a new tensor like the first input, which decides the dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scan_registry.base.frozen import dataclass
from scan_registry.base.tensor_facts import TensorFacts
from scan_registry.kernels.gated_scan.kinds import Kind
from scan_registry.kernels.gated_scan.problem import (
    STRIDED,
    Direction,
    GatedScanProblem,
    Layout,
    Strides,
)
from scan_registry.kernels.linear_scan.op.calls import strides_of_state
from scan_registry.kernels.linear_scan.op.layout import KernelCall as LinearKernelCall
from scan_registry.ops.operator import SingleCall

#: An input is copied to the strides of the others only if that takes at most so many times the tensor's own size.
_MOST_ROOM = 2

Sizes = tuple[int, int, int]


@dataclass(frozen=True)
class KernelCall(SingleCall[GatedScanProblem]):
    """One kernel's part in an operator's call: its problem, and the names of the tensors that are copied first. Strides are in
    the order of the tensors' dimensions.

    inputs  strides of copies of inputs
    dense   strides of what the kernel writes, and of copies of the states and of their gradient
    direct  whether ``dense`` are the strides of a new tensor like the first input
    stand_in  the family and the call that scan gates and tokens where torch's operators compute these
    """

    inputs: Sizes = (0, 0, 0)
    dense: Sizes = (0, 0, 0)
    direct: bool = True
    stand_in: tuple[str, LinearKernelCall] | None = None


def ordered(values: Sequence[int], dim: int) -> Sizes:
    """Values for (batch, channels, time), from values in the order of the tensors' dimensions. Its own inverse."""
    batch, one, other = values
    return (batch, one, other) if dim == -1 else (batch, other, one)


def make_call(
    direction: Direction,
    kind: Kind,
    inputs: Sequence[TensorFacts],
    others: Mapping[str, TensorFacts],
    reset: TensorFacts | None,
    promised_strides: Sequence[int],
    sequences: int | None,
    dim: int,
    reverse: bool,
    addresses: int,
) -> KernelCall:
    """The kernel call for one pass.

    others            the other tensors of a backward pass: ``states`` and ``states_grad``
    promised_strides  those of the states
    sequences         how many are packed along time; None if none are
    addresses         of all tensors, combined by "or"
    """
    first = inputs[0]
    sizes = ordered(first.shape, dim)
    promised = ordered(promised_strides, dim)
    layout = _layout(sizes, promised)
    whole = promised
    if layout is None:  # batches are innermost
        layout, whole = "time_last", (sizes[1] * sizes[2], sizes[2], 1)
    dense = _plain(whole, sizes, layout)
    of_inputs = {f"input{n}": _own(x, dim, layout) for n, x in enumerate(inputs)}
    shared = _shared([*of_inputs.values()], dense, sizes, layout)
    copied = [name for name, own in of_inputs.items() if own != shared]
    strides = {"inputs": shared, "states": dense, "states_grad": dense, "grads": dense}
    for name, tensor in others.items():
        own = _own(tensor, dim, layout)
        if _has_unit(own, sizes, layout):
            strides[name] = own
        else:
            copied.append(name)
    named = {name: Strides(0, *own) for name, own in strides.items()}
    named["state"] = _state_strides(first.shape, promised_strides, sequences, dim)
    problem = GatedScanProblem(
        direction=direction,
        layout=layout,
        dtype=first.dtype,
        gates_dtype=first.dtype,
        outer=1,
        batch=sizes[0],
        channels=sizes[1],
        time=sizes[2],
        strides=tuple(named[name] for name in STRIDED[direction]),
        alignment=16 if addresses == 0 else addresses & -addresses,
        sequences=sequences or 0,
        reverse=reverse,
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


def _own(tensor: TensorFacts, dim: int, layout: Layout) -> Sizes:
    return _plain(ordered(tensor.strides, dim), ordered(tensor.shape, dim), layout)


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


def _state_strides(
    shape: Sequence[int], strides: Sequence[int], sequences: int | None, dim: int
) -> Strides:
    """Of a state without gaps, for states of that shape and these strides."""
    own = ordered(strides_of_state(shape, strides, dim % 3, sequences), dim)
    return Strides(0, *own[:2], own[2] if sequences is not None else 0)


def reset_is_dense(reset: TensorFacts | None) -> bool:
    """Whether successive time steps are successive bytes."""
    return reset is None or reset.shape[1] == 1 or reset.strides[1] == 1


def _reset_batch(reset: TensorFacts | None) -> int:
    """The stride between batches of ``reset``, or of its dense copy if it is copied."""
    if reset is None or reset.shape[0] == 1:
        return 0
    return reset.strides[0] if reset_is_dense(reset) else reset.shape[1]
