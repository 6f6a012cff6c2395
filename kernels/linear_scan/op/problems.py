"""The problems that a scan poses to kernels: how its tensors lie, and how its states do."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from scan_registry.base.frozen import dataclass
from scan_registry.kernels.linear_scan.op import calls
from scan_registry.kernels.linear_scan.op.layout import KernelCall
from scan_registry.kernels.linear_scan.problem import Direction
from scan_registry.kernels.linear_scan.reference import compute_dtype, state_shape
from scan_registry.ops.facts import facts_of
from scan_registry.ops.strides import as_new


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
        sequences = sequences_of(cu_seqlens)
        strides = [*calls.strides_of_state(states.shape, states.stride(), dim, sequences)]
        if sequences is None:
            del strides[dim]
        shape = state_shape(states.shape, dim, sequences)
        dtype = compute_dtype(states.dtype)
        return cls(shape, tuple(strides), dtype, model.device, sequences is not None)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)

    def sums(self, pieces: int) -> Tensor:
        """Room for so many sums for each state, one after those of all states."""
        return torch.empty((pieces, math.prod(self.shape)), dtype=self.dtype, device=self.device)

    def each_sum(self, sums: Tensor) -> Tensor:
        """What ``sums`` made room for, each as a state lies."""
        pieces, states = sums.shape
        return sums.as_strided((pieces, *self.shape), (states, *self.strides))

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


def sequences_of(cu_seqlens: Tensor | None) -> int | None:
    """How many sequences are packed along time; None if none are."""
    return None if cu_seqlens is None else cu_seqlens.shape[0] - 1


def make_kernel_call(
    direction: Direction,
    gates: Tensor,
    others: dict[str, Tensor],
    cu_seqlens: Tensor | None,
    dim: int,
    reverse: bool,
    has_states: bool = False,
) -> KernelCall:
    """What one scan makes of its inputs, of which the second gives the outputs their layout; and whether it has states
    before or after it."""
    facts = {name: facts_of(tensor) for name, tensor in others.items()}
    dense = as_new(next(iter(others.values()))).stride()
    sequences = sequences_of(cu_seqlens)
    return calls.make_kernel_call(
        direction, facts_of(gates), facts, dense, sequences, dim, reverse, has_states
    )


def for_channels(gates: Tensor, model: Tensor, shape: tuple[int, ...] | None) -> Tensor:
    """Gates written out in the shape that ``calls.shape_for_channels`` returned for them; themselves if that is None."""
    if shape is None:
        return gates
    return gates.expand(model.shape)[tuple(map(slice, shape))].contiguous()


def make_summary_call(gates: Tensor, tokens: Tensor, dim: int, reverse: bool) -> KernelCall:
    """The summary of a scan, which reads what the scan does and writes no states."""
    dense = as_new(tokens).stride()
    return calls.make_summary_call(facts_of(gates), facts_of(tokens), dense, dim, reverse)


def make_reduction_call(
    gates: Tensor, states: Tensor, cu_seqlens: Tensor | None, dim: int, reverse: bool
) -> KernelCall | None:
    """The sum that gives broadcast gates their gradient, from states and a gradient laid out alike;
    None if the dimensions do not fold."""
    sequences = sequences_of(cu_seqlens)
    return calls.make_reduction_call(facts_of(gates), facts_of(states), sequences, dim, reverse)
