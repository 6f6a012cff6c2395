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
from distributed_cases import close, summed
from torch import Tensor

from scan_registry import distributed, gated_scan, selective_scan
from scan_registry.distributed import opening
from scan_registry.distributed.group import resolve
from scan_registry.kernels.gated_scan.kinds import KINDS
from scan_registry.kernels.selective_scan.op import distributed_chunks as selective_chunks
from scan_registry.kernels.selective_scan.op.distributed import Run


def gated(rank: int, ranks: int, group: Any, kind: str, dim: int, packed: bool) -> None:
    """``gated_scan`` with resets, initial and final states, against one process."""
    torch.manual_seed(5)
    lengths = [(3, 0, 4)[each % 3] for each in range(ranks)]
    time, begin = sum(lengths), sum(lengths[:rank])
    shape = (2, 3, time) if dim == -1 else (2, time, 3)
    inputs = [torch.randn(shape, dtype=torch.float64) for _ in KINDS[kind].inputs]
    values = [torch.rand(3, dtype=torch.float64) for _ in KINDS[kind].parameters]
    reset = torch.rand(2, time) < 0.2
    bounds = torch.tensor([0, time // 3, time // 3, time]) if packed else None
    initial = torch.randn((2, 3) if not packed else (2, 3, 3), dtype=torch.float64)
    weights = torch.randn(shape, dtype=torch.float64)
    how: Any = {"dim": dim, "cu_seqlens": bounds, "return_final_state": True}

    def cut(x: Tensor, along: int = dim) -> Tensor:
        return x.narrow(along, begin, lengths[rank]).clone()

    leaves = [x.clone().requires_grad_() for x in (*inputs, *values, initial)]
    states, last = gated_scan(kind, *leaves[:-1], initial_state=leaves[-1], reset=reset, **how)
    wanted = torch.autograd.grad((states * weights).sum() + last.square().sum(), leaves)
    for known in (False, True):  # the second call goes by the plan of the first, as over NCCL
        with patch.object(opening, "_reading_waits", lambda place, known=known: known):
            mine = [cut(x).requires_grad_() for x in inputs]
            mine += [x.clone().requires_grad_() for x in (*values, initial)]
            here, end = distributed.gated_scan(
                kind, *mine[:-1], initial_state=mine[-1], reset=cut(reset, 1), group=group, **how
            )
            close(here, cut(states))
            close(end, last)
            loss = (here * cut(weights)).sum() + (end.square().sum() if rank == 0 else 0)
            for place, (grad, of_whole) in enumerate(
                zip(torch.autograd.grad(loss, mine), wanted, strict=True)
            ):
                if place < len(inputs):
                    close(grad, cut(of_whole))
                else:
                    close(summed(grad, group), of_whole)


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


def _with_gradient(x: Any) -> Any:
    return None if x is None else x.clone().requires_grad_()


def _chunk_count(most: int, arguments: Any) -> int:
    """At most so many chunks, of a few steps each."""
    time = arguments.u.shape[-1]
    return most if time and time % most == 0 else 1


@contextmanager
def _by(chunks: int, known: bool, group: Any) -> Iterator[None]:
    """Calls of at most so many chunks. ``known``: by the plan of the call before, as over NCCL."""
    with (
        patch.object(opening, "_reading_waits", lambda place: known),
        patch.object(selective_chunks, "chunk_count", partial(_chunk_count, chunks)),
    ):
        if not known:
            resolve(group).session.plans.clear()
            resolve(group).session.agreed.clear()
        yield


def selective(rank: int, ranks: int, group: Any, case: Selective) -> None:
    """A case against one process."""
    torch.manual_seed(7)
    lengths = [(3, 0, 4)[each % 3] for each in range(ranks)]
    time, begin = sum(lengths), sum(lengths[:rank])
    given, softplus = case.arguments(2, 24, 3, time), case.softplus
    borders = [time // 3] * (case.sequences - 1)
    bounds = torch.tensor([0, *borders, time]) if case.packed else None
    weights = torch.randn(2, 24, time, dtype=torch.float64)
    how: Any = {"cu_seqlens": bounds, "return_final_state": True}

    def cut(x: Tensor) -> Tensor:
        each = x.shape[-1] // time
        return x.narrow(-1, each * begin, each * lengths[rank]).clone()

    def losses(out: Tensor, last: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        real = last.real - 2 * last.imag if last.is_complex() else last
        return (out * weight).sum(), (real.sin() + real).sum()

    leaves = [_with_gradient(x) for x in given]
    out, last = selective_scan(*leaves[:8], softplus, leaves[8], **how)
    used = [x for x in leaves if x is not None]
    wanted = torch.autograd.grad(sum(losses(out, last, weights)), used)
    for chunks, known in product(case.chunks, (False, True)):
        mine = [
            _with_gradient(cut(x) if n in case.timed and x is not None else x)
            for n, x in enumerate(given)
        ]
        used = [x for x in mine if x is not None]
        with _by(chunks, known, group):
            here, end = distributed.selective_scan(*mine[:8], softplus, mine[8], group=group, **how)
            close(here, cut(out))
            close(end, last)
            of_here, of_end = losses(here, end, cut(weights))
            found = iter(torch.autograd.grad(of_here + of_end / ranks, used))
        of_whole = iter(wanted)
        for number, x in enumerate(mine):
            if x is not None and number in case.timed:
                close(next(found), cut(next(of_whole)))
            elif x is not None:
                close(summed(next(found), group), next(of_whole))


def selective_outputs(rank: int, ranks: int, group: Any, chunks: int) -> None:
    """What is returned can be changed in place, and what is kept for the backward pass keeps no more memory than it has."""
    u = torch.randn(1, 8, 4, dtype=torch.float64, requires_grad=True)
    rates, B = -torch.rand(8, 3, dtype=torch.float64), torch.randn(1, 3, 4, dtype=torch.float64)
    how: Any = {"group": group, "return_final_state": True}
    with _by(chunks, False, group):
        out, last = distributed.selective_scan(u, u, rates, B, B, **how)
    node: Any = out.grad_fn
    for kept in node.saved_tensors:
        assert kept is None or kept.untyped_storage().nbytes() == kept.nbytes
    (wanted,) = torch.autograd.grad(out.sum() + last.sum(), u, retain_graph=True)
    out += 1
    last *= 1
    (found,) = torch.autograd.grad(out.sum() + last.sum(), u)
    assert torch.equal(found, wanted)


def selective_beginnings(
    rank: int, ranks: int, group: Any, chunks: int, lengths: list[int]
) -> None:
    """Ranks with the first steps, or all, have none: the gradients of the initial state and of the final one's."""
    torch.manual_seed(9)
    time, begin = sum(lengths), sum(lengths[:rank])
    given = Selective((1, 1)).arguments(2, 4, 3, time)
    leaves = [x.requires_grad_() for x in given]
    mine = [
        _with_gradient(x.narrow(-1, begin, lengths[rank]) if n in (0, 1, 3, 4, 6) else x)
        for n, x in enumerate(leaves)
    ]
    weights = torch.randn(2, 4, 3, dtype=torch.float64)
    _, last = selective_scan(*leaves[:8], True, leaves[8], return_final_state=True)
    wanted = torch.autograd.grad((last * weights).sum(), leaves, materialize_grads=True)
    with _by(chunks, False, group):
        how: Any = {"return_final_state": True, "group": group}
        _, end = distributed.selective_scan(*mine[:8], True, mine[8], **how)
        close(end, last)
        # No rank but the last has a gradient of the final state.
        loss = (end * weights).sum() * (rank == ranks - 1)
        found = torch.autograd.grad(loss, mine)
    for n in (2, 5, 7, 8):
        close(summed(found[n], group), wanted[n])


def selective_failure(rank: int, ranks: int, group: Any, backward: bool, known: bool) -> list[str]:
    """The last rank can make no summary: the error there, and what the next call raises."""
    u = torch.rand(1, 4, 5, requires_grad=True)
    given = (u, u, -torch.rand(4, 2), *torch.rand(2, 1, 2, 5))

    def call() -> None:
        distributed.selective_scan(*given, group=group).sum().backward()

    def fails(*_: Any) -> None:
        raise MemoryError("no room")

    def said() -> str:
        try:
            call()
        except (MemoryError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    resolve(group).session.plans.clear()
    resolve(group).session.agreed.clear()
    if known:
        call()
    summary = "backward_summary" if backward else "summary"
    with ExitStack() as stack:
        if rank == ranks - 1:
            stack.enter_context(patch.object(Run, summary, fails))
        first = said()
    return [first, said()]
