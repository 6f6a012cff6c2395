"""A selective scan over ranks on its CUDA kernels, emulated on the CPU: ranks one after another."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from emulated_selective_scan import Play, player
from selective_gradients import of_reference
from torch import Tensor

from scan_registry.distributed import parts as parts_of_time
from scan_registry.distributed.headers import Terms
from scan_registry.distributed.opening import Opened
from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.selective_scan import reference
from scan_registry.kernels.selective_scan.op import distributed_chunks as selective_chunks
from scan_registry.kernels.selective_scan.op.arguments import Options
from scan_registry.kernels.selective_scan.op.distributed import Run

OPTIONS = Options(True)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, cuda_emulator: ModuleType, tmp_path: Path) -> Play:
    return player(monkeypatch, cuda_emulator, tmp_path)


class StopHereError(Exception):
    """Where a rank would wait for the others."""


class StubOpening:
    """Keeps what a rank sends, and gives it what all ranks have sent if they have."""

    def __init__(self, elements: int) -> None:
        self.row, self.rows = torch.full((elements,), torch.nan), None

    def exchange(self, make: Any, number: int = 0, *, read: bool) -> Opened:
        make(self.row)
        if self.rows is None:
            raise StopHereError
        return Opened(None, self.rows)


class Rank:
    """One rank's part, and its run."""

    def __init__(
        self, number: int, lengths: tuple[int, ...], tensors: list[Any], bounds: Any
    ) -> None:
        self.tensors, u, A, cut = tuple(tensors), tensors[0], tensors[2], None
        members: Any = SimpleNamespace(rank=number, size=len(lengths))
        part = parts_of_time.whole(number, len(lengths))
        if bounds is not None:
            part = parts_of_time.packed(bounds, lengths, number, False)
            cut = torch.tensor(part.bounds)
        state = u.shape[0], *A.shape
        # With packed sequences, final states need an exchange of their own.
        self.run = Run(
            *(members, Terms("", ()), OPTIONS, tuple(u.shape), u.dtype, u.device, state, -3),
            *(torch.float32, bounds is None, False, bounds, part, cut, None),
        )
        count = self.run.count
        self.opening, self.backward_opening = (
            StubOpening(n * count) for n in (2, 3 - (bounds is not None))
        )
        vars(self.run).update(_opening=self.opening, backward_opening=self.backward_opening)


def at_once(stubs: list[StubOpening], call: Any) -> list[Any]:
    """Of a call with one exchange, what it makes on each rank."""
    for number in range(len(stubs)):
        with pytest.raises(StopHereError):
            call(number)
    gathered = torch.stack([each.row for each in stubs])
    for each in stubs:
        each.rows = gathered
    return [call(number) for number in range(len(stubs))]


def drawn(
    layout: str, dtype: torch.dtype, time: int, sequences: int
) -> tuple[list[Any], Tensor, Tensor]:
    """The arguments, and the gradients of the output and of the final state."""
    torch.manual_seed(6)
    batch, channels, states = (2 if layout == "channel_last" else 1), 16, 5
    between = (sequences,) if sequences else ()
    sequences = [torch.randn(batch, channels, time).to(dtype) for _ in range(4)]
    if layout == "channel_last":
        sequences = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in sequences]
    u, delta, z, out_grad = sequences
    B, C = (torch.randn(batch, 2, states, time).to(dtype) for _ in range(2))
    rates, start = -torch.rand(channels, states), torch.randn(batch, *between, channels, states)
    given = [u, delta, rates, B, C, torch.randn(channels), z, torch.rand(channels) - 2, start]
    return given, out_grad, torch.randn(batch, channels, states)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "parts"), [(1, 1), (1, 2), (2, 3), (2, 1)])
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("time_last", torch.float32), ("time_last", torch.bfloat16), ("channel_last", torch.float32)],
    ids=str,
)
def test_ranks_give_what_one_gives(
    play: Play,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    dtype: torch.dtype,
    count: int,
    parts: int,
) -> None:
    def chunk_count(arguments: Any) -> int:
        return count if arguments.u.shape[-1] % 64 == 0 else 1  # a part of 70 steps is one chunk

    monkeypatch.setattr(selective_chunks, "chunk_count", chunk_count)
    used = play(parts)
    _compare(layout, dtype, None)
    # Each rank makes its summaries twice, as its first call is stopped.
    of_chunk = [
        *["adjoint"][: parts - 1],
        "forward",
    ]  # what its parts hand on, if there are several
    forward = [*of_chunk, "adjoint"] * 2 * 3 + of_chunk * 3
    assert used == forward + ["adjoint"] * 3 + ["adjoint", "backward"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("layout", ["time_last", "channel_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_sequences_cross_ranks(
    play: Play, layout: str, dtype: torch.dtype, parts: int
) -> None:
    """One lies in three parts, one begins in the midst of a part, and one is empty."""
    play(parts)
    _compare(layout, dtype, (0, 75, 75, 290, 326))


def _compare(layout: str, dtype: torch.dtype, bounds: Any) -> None:
    lengths = (192, 64, 70)
    sequences = 0 if bounds is None else len(bounds) - 1
    whole, out_grad, last_grad = drawn(layout, dtype, sum(lengths), sequences)
    timed, ranks, begin = (0, 1, 3, 4, 6), [], 0
    grads = out_grad.split(lengths, -1)
    for number, length in enumerate(lengths):
        cut = [x.narrow(-1, begin, length) if n in timed else x for n, x in enumerate(whole)]
        ranks.append(Rank(number, lengths, cut, bounds))
        begin += length

    def opened(number: int) -> Any:
        return ranks[number].run.open(ranks[number].tensors, False)

    gathered = at_once([rank.opening for rank in ranks], opened)
    made = [
        rank.run.forward(rank.tensors, each, 1) for rank, each in zip(ranks, gathered, strict=True)
    ]

    def backward(number: int) -> Any:
        own = last_grad if number == 1 and bounds is None else None
        return ranks[number].run.backward(made[number][2], grads[number], own, (True,) * 9, 1)

    found = at_once([rank.backward_opening for rank in ranks], backward)
    packed = None if bounds is None else torch.tensor(bounds)
    _check(whole, timed, (out_grad, None if packed is not None else last_grad), packed, made, found)


def _check(
    whole: list[Tensor], timed: tuple[int, ...], ends: Any, packed: Any, results: Any, grads: Any
) -> None:
    """Results and gradients of all ranks are those of the reference in float64."""
    wide, dtype = [x.double() for x in whole], whole[0].dtype
    with torch.no_grad():
        out, last = reference.forward(*wide[:8], True, wide[8], packed)
        ends = [x if x is None else x.double() for x in ends]
        wanted = of_reference(wide, True, packed, *ends)
    assert relative_error(torch.cat([each[0] for each in results], -1), out) <= TOLERANCE[dtype]
    if packed is None:
        for _, final, _ in results:
            # In 16 bits, of gates by the GPU's approximation of 2^x.
            assert relative_error(final, last) <= (4e-6 if dtype == torch.float32 else 1e-4)
    for place, expected in enumerate(wanted):
        each_rank = [grads_of[place] for grads_of in grads]
        mine = torch.cat(each_rank, -1) if place in timed else sum(x.double() for x in each_rank)
        assert mine.dtype == (whole[place].dtype if place in timed else torch.float64)
        assert expected is not None
        assert relative_error(mine, expected) <= TOLERANCE[dtype], place
