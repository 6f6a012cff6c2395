"""The problems that a scan poses to kernels: how its tensors lie, and how its states do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from scan_registry.base.alignment import common_alignment
from scan_registry.base.frozen import dataclass
from scan_registry.kernels.linear_scan.op.layout import (
    Arrangement,
    KernelCall,
    arrange,
    arrange_with_copies,
)
from scan_registry.kernels.linear_scan.problem import (
    Direction,
    LinearScanProblem,
)
from scan_registry.kernels.linear_scan.reference import compute_dtype, state_shape
from scan_registry.ops.strides import as_new, dense_strides, memory_order


def state_strides(states: Tensor, dim: int, cu_seqlens: Tensor | None) -> tuple[int, ...]:
    """Strides of a state without gaps, its dimensions in the order of the states' own, with ``dim``
    counting sequences (one, where none are packed)."""
    shape = [*states.shape]
    shape[dim] = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return dense_strides(shape, memory_order(states.stride()))


@dataclass(frozen=True)
class StateLayout:
    """How the states before and after a scan lie: without gaps, in the order of its states' own."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    packed: bool

    @classmethod
    def of(cls, model: Tensor, dim: int, cu_seqlens: Tensor | None) -> StateLayout:
        """The room for a state of a scan whose states have the shape, dtype and device of ``model``, and
        lie as an output that is like it does."""
        states = as_new(model)
        dim %= states.dim()
        strides = [*state_strides(states, dim, cu_seqlens)]
        if cu_seqlens is None:
            sequences = None
            del strides[dim]
        else:
            sequences = cu_seqlens.shape[0] - 1
        shape = state_shape(states.shape, dim, sequences)
        dtype = compute_dtype(states.dtype)
        return cls(shape, tuple(strides), dtype, model.device, sequences is not None)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)

    def sums(self, pieces: int) -> Tensor:
        """Room for so many sums for each state, one after those of all states."""
        return torch.empty((pieces, math.prod(self.shape)), dtype=self.dtype, device=self.device)

    def total(self, sums: Tensor) -> Tensor:
        """The sum of what ``sums`` made room for, as a state lies."""
        total = sums.sum(0) if sums.shape[0] > 1 else sums[0]
        return total.as_strided(self.shape, self.strides)

    def entering(self, state: Tensor | None) -> Tensor | None:
        """A state that lies so: itself where it does."""
        return state if state is None or self.holds(state) else self.empty().copy_(state)

    def holds(self, state: Tensor) -> bool:
        """Whether a state has this layout in memory."""
        return (
            state.stride() == self.strides
            and state.shape == self.shape
            and state.dtype == self.dtype
        )

    def leaving(self, entering: Tensor | None) -> Tensor:
        """Room for the state that a walk leaves. Kernels write none for sequences without steps,
        which leave what enters them."""
        if not self.packed:
            return self.empty()
        return self.unchanged(entering)

    def unchanged(self, entering: Tensor | None) -> Tensor:
        """What a walk without steps leaves, in memory of its own."""
        return self.empty().zero_() if entering is None else self.empty().copy_(entering)


def packed_sequences(cu_seqlens: Tensor | None) -> int:
    """How many sequences a problem has along time; 0 if none are packed. To a GPU a single one, which covers all of time,
    is none: kernels for what is not packed are faster, and states lie alike. The CPU's kernels check its bounds."""
    if cu_seqlens is None:
        return 0
    sequences = cu_seqlens.shape[0] - 1
    return 0 if sequences == 1 and not cu_seqlens.is_cpu else sequences


def _problem(
    direction: Direction,
    arranged: Arrangement,
    states: Tensor,
    gates: Tensor,
    aligned: Sequence[Tensor],
    cu_seqlens: Tensor | None,
    reverse: bool,
) -> LinearScanProblem:
    return LinearScanProblem(
        direction=direction,
        dtype=str(states.dtype).removeprefix("torch."),
        gates_dtype=str(gates.dtype).removeprefix("torch."),
        alignment=common_alignment(tensor.data_ptr() for tensor in aligned),
        sequences=packed_sequences(cu_seqlens),
        reverse=reverse,
        **vars(arranged),
    )


def make_kernel_call(
    direction: Direction,
    gates: Tensor,
    others: dict[str, Tensor],
    cu_seqlens: Tensor | None,
    dim: int,
    reverse: bool,
) -> KernelCall:
    """What one scan makes of its inputs, of which the second gives the outputs their layout."""
    model = next(iter(others.values()))
    dim %= model.dim()
    broadcast = gates if gates.shape == model.shape else gates.expand(model.shape)
    gates_shape = shape_for_channels(broadcast, model, dim)
    if gates_shape is not None:
        broadcast = torch.empty(gates_shape, device="meta").expand(model.shape)
    inputs = {"gates": broadcast, **others}
    dense = as_new(model)
    arranged, copied = arrange_with_copies(
        model.shape,
        dim,
        [tensor.stride() for tensor in inputs.values()],
        dense.stride(),
        states=[state_strides(dense, dim, cu_seqlens)],
    )
    kept = [tensor for tensor, copy in zip(inputs.values(), copied, strict=True) if not copy]
    one_gate = arranged.layout == "time_last" and arranged.time > 1 and not arranged.strides[0].time
    if not copied[0] and (one_gate or gates_shape is not None):
        kept = kept[1:]  # new memory, or read by themselves
    problem = _problem(direction, arranged, model, gates, kept, cu_seqlens, reverse)
    names = tuple(name for name, copy in zip(inputs, copied, strict=True) if copy)
    return KernelCall(problem, names, gates_shape)


def shape_for_channels(gates: Tensor, model: Tensor, dim: int) -> tuple[int, ...] | None:
    """The shape in which gates have to be written out before a launch; None if kernels read them where they lie.

    ``gates`` have the shape of ``model``, and strides of 0 where one gate serves many elements. Kernels for contiguous channels
    read a gate for each channel. So gates that are the same for all times and all channels get the size of the channels, and
    keep 1 in every other dimension along which they are the same.
    """
    if model.is_cpu or gates.dtype != model.dtype or model.shape[dim] == 1:
        return None
    strides = enumerate(model.stride())
    channels = next((d for d, step in strides if step == 1 and model.shape[d] > 1), dim)
    if channels == dim or gates.stride(dim) or gates.stride(channels):
        return None
    sizes = enumerate(model.shape)
    return tuple(size if gates.stride(d) or d == channels else 1 for d, size in sizes)


def for_channels(gates: Tensor, model: Tensor, shape: tuple[int, ...] | None) -> Tensor:
    """Gates written out in the shape that ``shape_for_channels`` returned for them; themselves if that is None."""
    if shape is None:
        return gates
    return gates.expand(model.shape)[tuple(map(slice, shape))].contiguous()


def make_summary_call(gates: Tensor, tokens: Tensor, dim: int, reverse: bool) -> KernelCall:
    """The summary of a scan, which reads what the scan does and writes no states."""
    call = make_kernel_call("forward", gates, {"tokens": tokens}, None, dim, reverse)
    of_gates, of_tokens, _, of_state = call.problem.strides
    strides = of_gates, of_tokens, of_state
    return replace(call, problem=replace(call.problem, direction="summary", strides=strides))


def make_reduction_call(
    gates: Tensor, states: Tensor, cu_seqlens: Tensor | None, dim: int, reverse: bool
) -> KernelCall | None:
    """The sum that gives broadcast gates their gradient, from states and a gradient laid out alike;
    None if the dimensions do not fold."""
    dim %= states.dim()
    of_gates = torch.empty(gates.shape, device="meta").expand(states.shape).stride()
    arranged = arrange(
        states.shape,
        dim,
        [states.stride()] * 2,
        [of_gates, state_strides(states, dim, cu_seqlens)],
    )
    if arranged is None:
        return None
    arranged = _with_full_tiles(arranged)
    problem = _problem("reduction", arranged, states, gates, [states], cu_seqlens, reverse)
    return KernelCall(problem, ())


def _with_full_tiles(arranged: Arrangement) -> Arrangement:
    """Of contiguous time, batches and channels are alike but for this: a tile of a reduction has rows of several channels,
    and batches are summed one after the other. So the larger of the two counts as channels."""
    if arranged.layout != "time_last" or arranged.batch <= arranged.channels:
        return arranged
    strides = [replace(own, batch=own.channel, channel=own.batch) for own in arranged.strides]
    batch, channels = arranged.channels, arranged.batch
    return replace(arranged, batch=batch, channels=channels, strides=tuple(strides))
