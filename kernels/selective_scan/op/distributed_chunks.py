"""Chunks: a rank's part of a selective scan, cut along time so that a kernel works on all chunks at once.

A kernel works on the steps of a row (a channel of a batch's sequence) one after another, so few rows leave a GPU idle. If the
state before each chunk is known, chunks are rows like any other. ``chunked`` lays them along the batch, as views.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor, addcmul, stack, zeros_like

from scan_registry.kernels.selective_scan.op.arguments import Arguments
from scan_registry.kernels.selective_scan.problem import INTERVAL

#: With so many rows an H100's time for an element is the shortest.
FULL = 16_384
#: The most chunks, and the fewest steps of one.
MOST, SHORTEST = 8, 8 * INTERVAL


class Summary(NamedTuple):
    """What chunks make of the states before them: ``products · state + totals``, both (batch, count, channels, states).

    backward  whether a pass starts with the last chunk, as one over gradients does
    """

    products: Tensor
    totals: Tensor
    backward: bool = False

    def after(self, before: Tensor | None) -> list[Tensor]:
        """The states after the chunks, in the order of the pass, from ``before`` the first; None is a state of zero."""
        order, states = range(self.totals.shape[1]), []
        for chunk in reversed(order) if self.backward else order:
            total, product = self.totals[:, chunk], self.products[:, chunk]
            before = total if before is None else addcmul(total, product, before)
            states.append(before)
        return states

    def before(self, first: Tensor | None) -> Tensor:
        """The states before the chunks, (batch · count, channels, states), from ``first`` before the first of the pass."""
        states = [zeros_like(self.totals[:, 0]) if first is None else first]
        states += self.after(first)[:-1]
        return stack(states[::-1] if self.backward else states, 1).flatten(0, 1)

    def write(self, row: Tensor) -> None:
        """Write the summary of all chunks together into a vector."""
        half = row.numel() // 2
        row[:half].copy_(self.products.prod(1).reshape(-1))
        row[half:].copy_(self.after(None)[-1].reshape(-1))


def chunk_count(arguments: Arguments) -> int:
    """How many chunks there are: a power of two, so that chunks are views and have whole tiles."""
    batch, channels, time = arguments.u.shape
    rows, count = batch * channels, 1
    sequences = [t for t in (arguments.u, arguments.delta, arguments.z) if t is not None]
    # Chunks are views if those of all batches lie at equal distances.
    views = all(batch == 1 or x.stride(0) == time * x.stride(-1) for x in sequences)
    if not arguments.u.is_cuda or not rows or not views:
        return 1
    while (
        2 * count <= MOST
        and rows * count < FULL
        and time % (2 * count * INTERVAL) == 0
        and time // (2 * count) >= SHORTEST
    ):
        count *= 2
    return count


def chunked(x: Tensor, count: int) -> Tensor:
    """(batch, …, time) as (batch · count, …, time / count)."""
    return x if count == 1 else x.unflatten(-1, (count, -1)).movedim(-2, 1).flatten(0, 1)


def joined(x: Tensor, count: int) -> Tensor:
    """The opposite of ``chunked``."""
    return x if count == 1 else x.unflatten(0, (-1, count)).movedim(1, -2).flatten(-2)


def _along_time(
    function: Callable[[Tensor, int], Tensor], tensors: Iterable[Tensor | None], count: int
) -> list[Tensor | None]:
    """``function`` of the tensors that change with time. Others have one or two dimensions."""
    return [x if x is None or x.dim() < 3 else function(x, count) for x in tensors]


def chunks_of(arguments: Arguments, count: int) -> Arguments:
    """The arguments of all chunks, whose initial states are as they were."""
    return Arguments._make((*_along_time(chunked, arguments[:8], count), *arguments[8:]))


def whole_gradients(gradients: tuple[Tensor | None, ...], count: int) -> tuple[Tensor | None, ...]:
    """The gradients of a part from those of all its chunks. The gradient of the state before the part is the first chunk's."""
    *others, initial = gradients
    if count > 1 and initial is not None:
        initial = initial.unflatten(0, (-1, count))[:, 0]
    return *_along_time(joined, others, count), initial
