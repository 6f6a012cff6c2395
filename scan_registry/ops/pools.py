"""States in rows of a pool: what a scan starts from, what it leaves, and checkpoints on the way.

Servers keep the states of all sequences in one tensor, and pass numbers of its rows. Here rows are gathered before a scan,
and scattered after it, by a kernel or by torch's operators of fixed shapes: a CUDA graph records them, and reads the numbers anew
when it is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scan_registry.ops import row_copies
from scan_registry.ops.call import has_tangents
from scan_registry.ops.checks import (
    as_index,
    check_cu_seqlens,
    refuse_inference,
    refuse_layout,
    refuse_mapped,
    refuse_shared_elements,
)
from scan_registry.ops.values import are_checked, check_bounds, check_rows

__all__ = ["StateRows", "refuse_checkpoints", "scan_rows", "stand_in", "step_rows", "timed"]

#: A scan of tensors by name, of the states before, and of bounds of packed sequences: its output and the states after.
Scan = Callable[[Mapping[str, Any], Tensor, Tensor | None], tuple[Tensor, Tensor]]


class StateRows(NamedTuple):
    """Rows of a pool of states, for ``initial_state``: a scan starts from them, and leaves its final states in them.

    For inference: there are no derivatives. The scan returns what it returns for a tensor. A row has the shape of one
    sequence's state, without batch and sequences. A pool narrower than the states is rounded to the nearest. On a GPU one launch
    before the scan copies the rows, and one after it copies the final states; under ``torch.compile``, and where the rows of
    the pool do not consist of runs at one distance, torch's operators do, in about fifteen launches.

    Args:
        pool: (slots, …), changed in place, of any strides.
        state_batch_indices: (sequences,), int32 or int64, for each batch or each packed sequence the row that it starts from. An
            index below zero, or ``pad_slot_id``, stands for no row: the sequence starts from zeros, and unless it has a
            destination, its final state is dropped.
        dst_state_batch_indices: (sequences,): the rows that final states are written to, or below zero for none; by default
            those of ``state_batch_indices``, which may repeat only beside destinations. All rows are read before any is
            written.
        pad_slot_id: an index that stands for no row, as negative ones do.
        checkpoint_interval: k, to keep states for later prompts that begin alike: those after k, 2·k, … steps of each sequence.
        checkpoint_batch_indices: (sequences, checkpoints), with ``checkpoint_interval``: the row for the state after
            (j + 1)·k steps, or below zero for none. States after more steps than a sequence has are not written.

    With checkpoints, the scan runs in parts, one call for each checkpoint, and one for the rest. Slices of batches are not copied. Packed sequences are
    gathered for each part, which copies all inputs and outputs once; and the bounds are read on the CPU, for which it waits, so
    that no CUDA graph can record the call. A sequence that starts from a checkpoint gives the outputs of the one that
    wrote it up to rounding.

    Row numbers that are out of range, or that would be written twice, by final states, checkpoints or one of each, are errors on
    the CPU, and under ``SCAN_REGISTRY_DEBUG=1`` on a GPU. Otherwise on a GPU, a number that is too large stands for no row, and a row that is
    written twice holds parts of both states.
    """

    pool: Tensor
    state_batch_indices: Tensor
    dst_state_batch_indices: Tensor | None = None
    pad_slot_id: int = -1
    checkpoint_interval: int | None = None
    checkpoint_batch_indices: Tensor | None = None

    def read(self) -> Tensor:
        """The states of the sequences, a copy."""
        indices = self.state_batch_indices
        copied = row_copies.gather(self.pool, indices, self.pad_slot_id)
        if copied is not None:
            return copied
        rows, absent = self._rows(indices)
        states = self.pool.index_select(0, rows)
        return states.masked_fill_(absent.view(-1, *(1,) * (states.dim() - 1)), 0)

    def write(self, states: Tensor, indices: Tensor) -> None:
        """Put states into rows. Shapes do not depend on how many sequences have a row: one without writes what the first one
        with a row writes, too; and if none has, the row that is written gets back what it held."""
        if not states.shape[0]:
            return
        states = states.to(self.pool.dtype)
        if row_copies.scatter(self.pool, states, indices, self.pad_slot_id):
            return
        rows, absent = self._rows(indices)
        first = absent.to(torch.uint8).argmin(0, keepdim=True)
        source = torch.where(absent, first, torch.arange(rows.shape[0], device=rows.device))
        rows = rows.index_select(0, source)
        before = self.pool.index_select(0, rows[:1])
        self.pool.index_copy_(0, rows, states.index_select(0, source))
        after = self.pool.index_select(0, rows[:1])
        none = absent.all().view((1,) * states.dim())
        self.pool.index_copy_(0, rows[:1], torch.where(none, before, after))

    def destinations(self) -> Tensor:
        """The numbers of the rows that final states are written to."""
        written = self.dst_state_batch_indices
        return self.state_batch_indices if written is None else written

    def _rows(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers of rows that there are, and where an index stands for none."""
        indices = indices.long()
        rows = indices.clamp(0, self.pool.shape[0] - 1)
        absent = rows != indices
        if self.pad_slot_id >= 0:
            absent = absent | (indices == self.pad_slot_id)
        return rows, absent


class Timed(NamedTuple):
    """A tensor that goes along with time, and its time dimension."""

    tensor: Tensor
    dim: int


def timed(**tensors: tuple[Any, int]) -> dict[str, Timed]:
    """Those that are not None."""
    return {name: Timed(*own) for name, own in tensors.items() if own[0] is not None}


def refuse_checkpoints(rows: StateRows, **options: object) -> None:
    """Refuse checkpoints beside options with which a scan is not that of its parts."""
    for name, value in options.items():
        if value and rows.checkpoint_interval is not None:
            raise ValueError(f"checkpoint_interval does not go with {name}")


def stand_in(initial_state: Any, packed: bool, dim: int | None = 1) -> Any:
    """The initial state with which an operator poses the same problem, of no particular values. States of ``packed``
    sequences lie along ``dim``."""
    if not isinstance(initial_state, StateRows):
        return initial_state
    pool, indices = initial_state.pool, initial_state.state_batch_indices
    states = pool.new_empty((indices.shape[0], *pool.shape[1:]))
    return _packed(states, dim) if packed else states


def _packed(states: Tensor, dim: int | None) -> Tensor:
    """States of packed sequences as a family takes them: along ``dim`` of one batch, or without a batch."""
    return states if dim is None else states.unsqueeze(0).movedim(1, dim)


def _unpacked(states: Tensor, dim: int | None) -> Tensor:
    return states if dim is None else states.movedim(dim, 1).squeeze(0)


# --- Scans ------------------------------------------------------------------------------------


def _sequences(named: Mapping[str, Any], dim: int, cu_seqlens: Any) -> int:
    """How many sequences there are; the first of the tensors has the batches, and time along ``dim``."""
    passed = dict(named) if cu_seqlens is None else {**named, "cu_seqlens": cu_seqlens}
    for name, tensor in passed.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
    name, first = next(iter(named.items()))
    if first.dim() < 2:
        raise ValueError(f"{name} has shape {tuple(first.shape)}; it needs batch and time")
    if cu_seqlens is None:
        return int(first.shape[0])
    check_cu_seqlens(cu_seqlens, first.shape[dim])
    return int(cu_seqlens.shape[0]) - 1


def scan_rows(
    operator: str,
    rows: StateRows,
    scan: Scan,
    timed: Mapping[str, Timed],
    out_dim: int,
    cu_seqlens: Any = None,
    *,
    sequences_dim: int | None = 1,
    others: tuple[Any, ...] = (),
) -> tuple[Tensor, Tensor]:
    """The output of ``scan`` and the final states, which are in the pool then.

    The first of the ``timed`` tensors has the batches. Final states of packed sequences lie along ``sequences_dim`` of one
    batch; None for no batch. ``others`` are the operator's tensors that do not change with time.
    """
    if not timed:
        passed = ", ".join(map(_in_words, others)) or "nothing"
        raise TypeError(f"{operator} takes tensors with a time dimension; passed is {passed}")
    first, dim = next(iter(timed.values()))
    named = {_public(name): tensor for name, (tensor, _) in timed.items()}
    _check(operator, rows, _sequences(named, dim, cu_seqlens), named, others)
    packed = cu_seqlens is not None
    states = rows.read()
    states = _packed(states, sequences_dim) if packed else states
    columns = rows.checkpoint_batch_indices
    if columns is None or not columns.shape[1] or not first.shape[dim]:
        out, states = scan({name: own.tensor for name, own in timed.items()}, states, cu_seqlens)
    elif packed:
        parts = _Rounds(rows, scan, timed, out_dim, sequences_dim)
        out, states = parts.run(states, cu_seqlens, columns)
    else:
        out, states = _by_slices(rows, scan, timed, out_dim, states, columns)
    rows.write(_unpacked(states, sequences_dim) if packed else states, rows.destinations())
    return out, states


def step_rows(
    operator: str, rows: StateRows, step: Callable[[Tensor], Tensor], *tensors: Any
) -> Tensor:
    """The states that ``step`` makes of those of the sequences, which are in the pool then."""
    refuse_checkpoints(rows, **{"single steps": True})
    indices = rows.state_batch_indices
    _check(operator, rows, indices.shape[0] if isinstance(indices, Tensor) else 0, {}, tensors)
    states = step(rows.read())
    rows.write(states, rows.destinations())
    return states


def _by_slices(
    rows: StateRows,
    scan: Scan,
    timed: Mapping[str, Timed],
    out_dim: int,
    states: Tensor,
    columns: Tensor,
) -> tuple[Tensor, Tensor]:
    """Of batches: slices of time, one after the other."""
    first, dim = next(iter(timed.values()))
    assert rows.checkpoint_interval is not None
    time, step = first.shape[dim], rows.checkpoint_interval
    cuts = [step * (number + 1) for number in range(columns.shape[1])]
    cuts = [cut for cut in cuts if cut <= time]
    outs = []
    for number, (start, end) in enumerate(pairwise([0, *cuts, time])):
        if start == end:
            break
        parts = {
            name: tensor.narrow(dim, start, end - start) for name, (tensor, dim) in timed.items()
        }
        out, states = scan(parts, states, None)
        outs.append(out)
        if number < len(cuts):
            rows.write(states, columns[:, number])
    return torch.cat(outs, out_dim), states


class _Rounds(NamedTuple):
    """A scan of packed sequences in rounds: one for each checkpoint, of the next ``checkpoint_interval`` steps of every sequence,
    and one for the rest."""

    rows: StateRows
    scan: Scan
    timed: Mapping[str, Timed]
    out_dim: int
    sequences_dim: int | None

    def run(self, states: Tensor, cu_seqlens: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """The output and the final states."""
        if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "with checkpoints, bounds of packed sequences are read on the CPU, which a CUDA graph cannot record; "
                "scan batches, or leave the call out of the graph"
            )
        on_cpu, step = cu_seqlens.cpu(), self.rows.checkpoint_interval
        first, dim = next(iter(self.timed.values()))
        check_bounds(on_cpu, first.shape[dim])
        bounds = on_cpu.tolist()
        assert step is not None
        result: Tensor | None = None
        for number in range(columns.shape[1] + 1):
            last = number == columns.shape[1]
            starts = [min(s + number * step, e) for s, e in pairwise(bounds)]
            ends = [
                e if last else min(s + step, e) for s, e in zip(starts, bounds[1:], strict=True)
            ]
            lengths = [e - s for s, e in zip(starts, ends, strict=True)]
            if not any(lengths):
                break
            out, states, steps = self._round(states, starts, ends, lengths)
            if result is None:
                size = [*out.shape]
                size[self.out_dim] = bounds[-1]
                result = out.new_empty(size)
            result.index_copy_(self.out_dim, steps, out)
            if not last:
                whole = torch.tensor([n == step for n in lengths]).to(columns.device)
                kept = columns[:, number].masked_fill(~whole, -1)
                self.rows.write(_unpacked(states, self.sequences_dim), kept)
        assert result is not None
        return result, states

    def _round(
        self, states: Tensor, starts: list[int], ends: list[int], lengths: list[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The output, the states after, and the numbers of the steps."""
        device = states.device
        ranges = [torch.arange(s, e) for s, e in zip(starts, ends, strict=True)]
        steps = torch.cat(ranges).to(device)
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(device)
        parts = {
            name: tensor.index_select(dim, steps) for name, (tensor, dim) in self.timed.items()
        }
        out, states = self.scan(parts, states, bounds)
        return out, states, steps


# --- Checks -----------------------------------------------------------------------------------


def _check(
    operator: str,
    rows: StateRows,
    sequences: int,
    named: Mapping[str, Any],
    others: tuple[Any, ...],
) -> None:
    """Refuse what is no pool, or no numbers of its rows, and calls that need derivatives of the pool, of ``named`` tensors or of
    ``others``."""
    pool = rows.pool
    if not isinstance(pool, Tensor):
        raise TypeError(f"pool must be a torch.Tensor, not {type(pool).__name__}")
    if pool.layout != torch.strided or pool.is_nested:
        refuse_layout("pool", pool)
    if pool.dim() < 2 or not pool.shape[0]:
        raise ValueError(f"pool has shape {tuple(pool.shape)}; it must be (slots, …)")
    as_index("pad_slot_id", rows.pad_slot_id)
    _check_indices("state_batch_indices", rows.state_batch_indices, pool, (sequences,))
    written = rows.dst_state_batch_indices
    if written is not None:
        _check_indices("dst_state_batch_indices", written, pool, (sequences,))
    _check_checkpoints(rows, sequences)
    if not torch.compiler.is_compiling():
        refuse_shared_elements("pool", pool)
        refuse_inference("pool", pool)
        every = (*named.values(), *others)
        refuse_mapped(operator, "pool", pool, *(t for t in every if isinstance(t, Tensor)))
    _check_rows_written(rows)
    _refuse_derivatives(operator, {"pool": pool, **named}, others)


def _public(name: str) -> str:
    """What an error calls a tensor; those of operators that take any number of inputs go by their places."""
    return f"input {name}" if name.isdecimal() else name


def _in_words(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return type(value).__name__


def _refuse_derivatives(operator: str, named: Mapping[str, Any], others: tuple[Any, ...]) -> None:
    tensors = [
        *named.items(),
        *((_in_words(tensor), tensor) for tensor in others if isinstance(tensor, Tensor)),
    ]
    for name, tensor in tensors:
        wanted = torch.is_grad_enabled() and tensor.requires_grad
        if wanted or (not torch.compiler.is_compiling() and has_tangents(tensor)):
            raise RuntimeError(
                f"{operator} has no derivative with rows of a pool, and {name} requires one; call it under torch.no_grad() "
                "or torch.inference_mode(), or pass a tensor as initial_state"
            )


def _check_rows_written(rows: StateRows) -> None:
    """Refuse row numbers that are out of range, and rows to which two states would be written."""
    pool, pad = rows.pool, rows.pad_slot_id
    read, written = rows.state_batch_indices, rows.dst_state_batch_indices
    columns = rows.checkpoint_batch_indices
    check_rows("state_batch_indices", read, pool, pad, unique=written is None, pool="the pool")
    check_rows("dst_state_batch_indices", written, pool, pad, pool="the pool")
    if columns is None:
        return
    check_rows("checkpoint_batch_indices", columns.flatten(), pool, pad, pool="the pool")
    final = rows.destinations()
    if not are_checked(final) or not are_checked(columns):
        return
    finals = {*final.tolist()}
    for row in columns.flatten().tolist():
        if row >= 0 and row != pad and row in finals:
            name = "state_batch_indices" if written is None else "dst_state_batch_indices"
            raise ValueError(
                f"checkpoint_batch_indices has the number {row}, and {name}, too; a final state would replace the checkpoint"
            )


def _check_checkpoints(rows: StateRows, sequences: int) -> None:
    step, columns = rows.checkpoint_interval, rows.checkpoint_batch_indices
    if step is None and columns is None:
        return
    if step is None or columns is None:
        there, lacking = "checkpoint_interval", "checkpoint_batch_indices"
        if step is None:
            there, lacking = lacking, there
        raise ValueError(f"{lacking} is None; it goes with {there}")
    if as_index("checkpoint_interval", step) < 1:
        raise ValueError(f"checkpoint_interval is {step}; it must be 1 at least")
    _check_indices("checkpoint_batch_indices", columns, rows.pool, (sequences, None))


def _check_indices(name: str, indices: Any, pool: Tensor, shape: tuple[Any, ...]) -> None:
    if not isinstance(indices, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(indices).__name__}")
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} has dtype {indices.dtype}; accepted are int32 and int64")
    if indices.device != pool.device:
        raise ValueError(
            f"{name} is on {indices.device}, the pool on {pool.device}; they must be on one device"
        )
    if indices.dim() != len(shape) or indices.shape[0] != shape[0]:
        expected = f"({shape[0]},)" if len(shape) == 1 else f"({shape[0]}, checkpoints)"
        raise ValueError(
            f"{name} has shape {tuple(indices.shape)}; it must be {expected} for {shape[0]} sequences"
        )
