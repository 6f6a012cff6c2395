"""What ranks do in tests of gated and selective scans: each takes its part, and compares with one process over the whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from distributed_cases import check_outputs, compare_parts, raised, reading_waits
from torch import Tensor

from scan_registry import distributed, gated_scan, selective_scan
from scan_registry.distributed.group import resolve
from scan_registry.kernels.gated_scan.kinds import KINDS
from scan_registry.kernels.selective_scan.op import distributed_chunks as selective_chunks
from scan_registry.kernels.selective_scan.op.distributed import Run


def gated(rank: int, ranks: int, group: Any, kind: str, dim: int, packed: bool) -> None:
    """``gated_scan`` with resets, initial and final states, against one process."""
    torch.manual_seed(5)
    lengths = [(3, 0, 4)[number % 3] for number in range(ranks)]
    time, begin = sum(lengths), sum(lengths[:rank])
    shape = (2, 3, time) if dim == -1 else (2, time, 3)
    names = [*KINDS[kind].inputs, *KINDS[kind].parameters]
    tensors = {name: torch.randn(shape, dtype=torch.float64) for name in KINDS[kind].inputs}
    timed = dict.fromkeys(tensors, dim)
    tensors |= {name: torch.rand(3, dtype=torch.float64) for name in KINDS[kind].parameters}
    reset = torch.rand(2, time) < 0.2
    bounds = torch.tensor([0, time // 3, time // 3, time]) if packed else None
    tensors["state"] = torch.randn((2, 3, 3) if packed else (2, 3), dtype=torch.float64)
    how: Any = {"dim": dim, "cu_seqlens": bounds, "return_final_state": True}

    def call(function: Any, reset: Tensor, **more: Any) -> Any:
        return lambda state, **of: function(
            kind, *(of[name] for name in names), initial_state=state, reset=reset, **how, **more
        )

    mine = reset.narrow(1, begin, lengths[rank])
    calls = call(gated_scan, reset), call(distributed.gated_scan, mine, group=group)
    contexts = [*map(reading_waits, (False, True))]
    compare_parts(rank, ranks, group, lengths, calls, tensors, timed, dim, contexts)


@dataclass(frozen=True)
class Selective:
    """A ``selective_scan`` of all ranks' steps, with all that it takes or the least.

    groups    of B and of C; 0 for one that does not change with time
    chunks    the most chunks of a rank's part, once for each
    sequences that are packed, if any are: 3 or 1
    """

    groups: tuple[int, int]
    packed: bool = False
    every: bool = True
    chunks: tuple[int, ...] = (1, 4)
    softplus: bool = True
    complex_numbers: bool = False
    sequences: int = 3

    @property
    def timed(self) -> tuple[int, ...]:
        """The arguments that are cut along time."""
        return (0, 1, *(3 + n for n, count in enumerate(self.groups) if count), 6)

    def arguments(self, batch: int, channels: int, states: int, time: int) -> list[Any]:
        """u, delta, A, B, C, D, z, delta_bias, initial_state."""
        numbers = 1 + self.complex_numbers  # of a B or C at a step

        def draw(*size: int) -> Tensor:
            return torch.randn(size, dtype=torch.float64)

        def draw_state(*size: int) -> Tensor:
            return torch.complex(draw(*size), draw(*size)) if self.complex_numbers else draw(*size)

        def projection(count: int) -> Tensor:
            if count == 0:
                return draw_state(channels, states)
            return draw(batch, count, states, numbers * time)

        given: list[Any] = [draw(batch, channels, time), draw(batch, channels, time)]
        rates: Any = -torch.rand(channels, states, dtype=torch.float64)
        given.append(rates + 1j * draw(channels, states) if self.complex_numbers else rates)
        given += map(projection, self.groups)
        if not self.every:
            return [*given, None, None, None, None]
        between = (self.sequences,) if self.packed else ()
        initial = draw_state(batch, *between, channels, states)
        return [*given, draw(channels), draw(batch, channels, time), draw(channels), initial]


def _chunk_count(most: int, arguments: Any) -> int:
    """At most so many chunks, of a few steps each."""
    time = arguments.u.shape[-1]
    return most if time and time % most == 0 else 1


@contextmanager
def _by(chunks: int, known: bool, group: Any) -> Iterator[None]:
    """Calls of at most so many chunks. ``known``: by the plan of the call before, as over NCCL."""
    with (
        reading_waits(known),
        patch.object(selective_chunks, "chunk_count", partial(_chunk_count, chunks)),
    ):
        if not known:
            resolve(group).session.plans.clear()
            resolve(group).session.agreed.clear()
        yield


#: The order of ``selective_scan``'s tensors.
NAMES = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state")


def selective(rank: int, ranks: int, group: Any, case: Selective) -> None:
    """A case against one process."""
    torch.manual_seed(7)
    lengths = [(3, 0, 4)[number % 3] for number in range(ranks)]
    time = sum(lengths)
    arguments = zip(NAMES, case.arguments(2, 24, 3, time), strict=True)
    tensors = {name: x for name, x in arguments if x is not None}
    timed = {name: -1 for n, name in enumerate(NAMES) if n in case.timed}
    borders = [time // 3] * (case.sequences - 1)
    bounds = torch.tensor([0, *borders, time]) if case.packed else None
    how: Any = {"delta_softplus": case.softplus, "cu_seqlens": bounds, "return_final_state": True}
    calls = (
        partial(selective_scan, **how),
        partial(distributed.selective_scan, group=group, **how),
    )
    contexts = (_by(*each, group) for each in product(case.chunks, (False, True)))
    compare_parts(rank, ranks, group, lengths, calls, tensors, timed, -1, contexts)


def selective_outputs(rank: int, ranks: int, group: Any, chunks: int) -> None:
    """What is returned can be changed in place, and what is kept for the backward pass keeps no more memory than it has."""
    u = torch.randn(1, 8, 4, dtype=torch.float64, requires_grad=True)
    rates, B = -torch.rand(8, 3, dtype=torch.float64), torch.randn(1, 3, 4, dtype=torch.float64)
    how: Any = {"group": group, "return_final_state": True}
    with _by(chunks, False, group):
        out, last = distributed.selective_scan(u, u, rates, B, B, **how)
    check_outputs(out, last, u)


def selective_failure(rank: int, ranks: int, group: Any, backward: bool, known: bool) -> list[str]:
    """The last rank can make no summary: the error there, and what the next call raises."""
    u = torch.rand(1, 4, 5, requires_grad=True)
    given = (u, u, -torch.rand(4, 2), *torch.rand(2, 1, 2, 5))

    def call() -> None:
        distributed.selective_scan(*given, group=group).sum().backward()

    def fails(*_: Any) -> None:
        raise MemoryError("no room")

    resolve(group).session.plans.clear()
    resolve(group).session.agreed.clear()
    if known:
        call()
    summary = "backward_summary" if backward else "summary"
    with ExitStack() as stack:
        if rank == ranks - 1:
            stack.enter_context(patch.object(Run, summary, fails))
        first = raised(call)
    return [first, raised(call)]
