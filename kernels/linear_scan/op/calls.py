"""The problems that a scan poses to kernels, from facts about its tensors: pure, and alike for every array library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from scan_registry.base.alignment import common_alignment
from scan_registry.base.strides import dense_strides, memory_order
from scan_registry.base.tensor_facts import TensorFacts
from scan_registry.kernels.linear_scan.op.layout import (
    Arrangement,
    KernelCall,
    arrange,
    arrange_with_copies,
)
from scan_registry.kernels.linear_scan.problem import Direction, LinearScanProblem


def strides_of_state(
    shape: Sequence[int], strides: Sequence[int], dim: int, sequences: int | None
) -> tuple[int, ...]:
    """Strides of a state without gaps, for states of that shape and these strides: its dimensions in their order, with ``dim``
    counting sequences (one, where ``sequences`` is None as none are packed)."""
    sizes = [*shape]
    sizes[dim] = 1 if sequences is None else sequences
    return dense_strides(sizes, memory_order(strides))


def make_kernel_call(
    direction: Direction,
    gates: TensorFacts,
    others: Mapping[str, TensorFacts],
    dense: Sequence[int],
    sequences: int | None,
    dim: int,
    reverse: bool,
    has_states: bool = False,
) -> KernelCall:
    """What one scan makes of its inputs, of which the second gives the outputs their layout, of strides ``dense``.
    ``sequences`` are packed along time; None if none are. ``has_states`` says whether there are states before or after the
    scan, or gradients of such."""
    model = next(iter(others.values()))
    dim %= len(model.shape)
    broadcast = gates.expanded(model.shape)
    gates_shape = shape_for_channels(broadcast, model, dim)
    if gates_shape is not None:
        written = TensorFacts.dense(gates_shape, gates.dtype, gates.device)
        broadcast = written.expanded(model.shape)
    inputs = {"gates": broadcast, **others}
    arranged, copied = arrange_with_copies(
        model.shape,
        dim,
        [facts.strides for facts in inputs.values()],
        dense,
        states=[strides_of_state(model.shape, dense, dim, sequences)],
    )
    kept = [facts for facts, copy in zip(inputs.values(), copied, strict=True) if not copy]
    one_gate = arranged.layout == "time_last" and arranged.time > 1 and not arranged.strides[0].time
    if not copied[0] and (one_gate or gates_shape is not None):
        kept = kept[1:]  # new memory, or read by themselves
    problem = _problem(direction, arranged, model, gates.dtype, kept, sequences, reverse)
    if problem.sequences and has_states:
        problem = replace(problem, has_states=True)
    names = tuple(name for name, copy in zip(inputs, copied, strict=True) if copy)
    is_broadcast = tuple(gates.shape) != tuple(model.shape)
    return KernelCall(problem, names, gates_shape=gates_shape, is_broadcast=is_broadcast)


def make_summary_call(
    gates: TensorFacts, tokens: TensorFacts, dense: Sequence[int], dim: int, reverse: bool
) -> KernelCall:
    """The summary of a scan, which reads what the scan does and writes no states."""
    call = make_kernel_call("forward", gates, {"tokens": tokens}, dense, None, dim, reverse)
    of_gates, of_tokens, _, of_state = call.problem.strides
    strides = of_gates, of_tokens, of_state
    return replace(call, problem=replace(call.problem, direction="summary", strides=strides))


def make_reduction_call(
    gates: TensorFacts, states: TensorFacts, sequences: int | None, dim: int, reverse: bool
) -> KernelCall | None:
    """The sum that gives broadcast gates their gradient, from states and a gradient laid out alike;
    None if the dimensions do not fold."""
    dim %= len(states.shape)
    of_gates = TensorFacts.dense(gates.shape, gates.dtype, gates.device).expanded(states.shape)
    of_state = strides_of_state(states.shape, states.strides, dim, sequences)
    arranged = arrange(states.shape, dim, [states.strides] * 2, [of_gates.strides, of_state])
    if arranged is None:
        return None
    arranged = _with_full_tiles(arranged)
    problem = _problem("reduction", arranged, states, gates.dtype, [states], sequences, reverse)
    return KernelCall(problem)


def shape_for_channels(gates: TensorFacts, model: TensorFacts, dim: int) -> tuple[int, ...] | None:
    """The shape in which gates have to be written out before a launch; None if kernels read them where they lie.

    ``gates`` have the shape of ``model``, and strides of 0 where one gate serves many elements. Kernels for contiguous channels
    read a gate for each channel. So gates that are the same for all times and all channels get the size of the channels, and
    keep 1 in every other dimension along which they are the same.
    """
    if model.device == "cpu" or gates.dtype != model.dtype or model.shape[dim] == 1:
        return None
    strides = enumerate(model.strides)
    channels = next((d for d, step in strides if step == 1 and model.shape[d] > 1), dim)
    if channels == dim or gates.strides[dim] or gates.strides[channels]:
        return None
    sizes = enumerate(model.shape)
    return tuple(size if gates.strides[d] or d == channels else 1 for d, size in sizes)


def packed_sequences(sequences: int | None, device: str) -> int:
    """How many sequences a problem has along time; 0 if none are packed. To a GPU a single one, which covers all of time,
    is none: kernels for what is not packed are faster, and states lie alike. The CPU's kernels check its bounds."""
    if sequences is None or (sequences == 1 and device != "cpu"):
        return 0
    return sequences


def _problem(
    direction: Direction,
    arranged: Arrangement,
    states: TensorFacts,
    gates_dtype: str,
    aligned: Sequence[TensorFacts],
    sequences: int | None,
    reverse: bool,
) -> LinearScanProblem:
    return LinearScanProblem(
        direction=direction,
        dtype=states.dtype,
        gates_dtype=gates_dtype,
        alignment=common_alignment(facts.address for facts in aligned),
        sequences=packed_sequences(sequences, states.device),
        reverse=reverse,
        **vars(arranged),
    )


def _with_full_tiles(arranged: Arrangement) -> Arrangement:
    """Of contiguous time, batches and channels are alike but for this: a tile of a reduction has rows of several channels,
    and batches are summed one after the other. So the larger of the two counts as channels."""
    if arranged.layout != "time_last" or arranged.batch <= arranged.channels:
        return arranged
    strides = [replace(own, batch=own.channel, channel=own.batch) for own in arranged.strides]
    batch, channels = arranged.channels, arranged.batch
    return replace(arranged, batch=batch, channels=channels, strides=tuple(strides))
