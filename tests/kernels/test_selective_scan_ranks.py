"""A selective scan over ranks with the schedule "reduce", on its CUDA kernels, emulated on the CPU: ranks one after another."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from emulated_selective_scan import Play, player
from torch import Tensor

from scan_registry.distributed import selective_chunks, selective_reduce
from scan_registry.distributed.opening import Opened
from scan_registry.distributed.selective_reduce import Gathered
from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.selective_scan import reference
from scan_registry.ops.selective_scan_arguments import Arguments, Options

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

    def exchange_made(self, make: Any, number: int = 0, *, read: bool) -> tuple[Opened, Any]:
        made = make(self.row)
        if self.rows is None:
            raise StopHereError
        return Opened(None, self.rows), made


class Rank:
    """One rank's part, and what it has in common with a ``Run``."""

    def __init__(self, number: int, ranks: int, given: Arguments) -> None:
        self.members = SimpleNamespace(rank=number, size=ranks)
        self.given, self.options, self.final, self.required = given, OPTIONS, True, None
        self.state = given.u.shape[0], *given.A.shape
        self.count = given.u.shape[0] * given.A.numel()
        self.opening = StubOpening(2 * self.count)
        self.backward_opening = StubOpening(3 * self.count)


def at_once(stubs: list[StubOpening], call: Any) -> list[Any]:
    """Of a call with one exchange, what it makes on each rank."""
    for number in range(len(stubs)):
        with pytest.raises(StopHereError):
            call(number)
    gathered = torch.stack([each.row for each in stubs])
    for each in stubs:
        each.rows = gathered
    return [call(number) for number in range(len(stubs))]


def drawn(layout: str, dtype: torch.dtype, time: int) -> tuple[list[Any], Tensor, Tensor]:
    """The arguments, and the gradients of the output and of the final state."""
    torch.manual_seed(6)
    batch, channels, states = (2 if layout == "channel_last" else 1), 16, 5
    sequences = [torch.randn(batch, channels, time).to(dtype) for _ in range(4)]
    if layout == "channel_last":
        sequences = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in sequences]
    u, delta, z, out_grad = sequences
    B, C = (torch.randn(batch, 2, states, time).to(dtype) for _ in range(2))
    rates, start = -torch.rand(channels, states), torch.randn(batch, channels, states)
    given = [u, delta, rates, B, C, torch.randn(channels), z, torch.rand(channels) - 2, start]
    return given, out_grad, torch.randn(batch, channels, states)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "dtype", "count", "parts"),
    [
        (layout, (torch.float32, torch.bfloat16)[(n + turn) % 2], count, parts)
        for n, layout in enumerate(("time_last", "channel_last"))
        for turn, (count, parts) in enumerate([(1, 1), (1, 2), (2, 3), (2, 1)])
    ],
    ids=str,
)
def test_ranks_give_what_one_gives(
    play: Play,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    layout: str,
    count: int,
    parts: int,
) -> None:
    lengths = (192, 64, 70)
    # A part of 70 steps is one chunk.
    monkeypatch.setattr(
        selective_chunks,
        "chunk_count",
        lambda given: count if given.u.shape[-1] % 64 == 0 else 1,
    )
    whole, out_grad, last_grad = drawn(layout, dtype, sum(lengths))
    used = play(parts)
    timed, ranks, begin = (0, 1, 3, 4, 6), [], 0
    grads = out_grad.split(lengths, -1)
    for number, length in enumerate(lengths):
        cut = [x.narrow(-1, begin, length) if n in timed else x for n, x in enumerate(whole)]
        ranks.append(Rank(number, len(lengths), Arguments(*cut, None)))
        begin += length

    def opened(number: int) -> Gathered:
        rank: Any = ranks[number]
        return selective_reduce.exchange(rank, rank.opening, rank.given, False)

    gathered = at_once([rank.opening for rank in ranks], opened)
    # Twice, because each rank's first call was stopped.
    assert used == ["forward", "adjoint"] * 2 * len(ranks)
    made = [
        selective_reduce.forward(rank, rank.given, True, each)  # type: ignore[arg-type]
        for rank, each in zip(ranks, gathered, strict=True)
    ]
    del used[:]

    def backward(number: int) -> Any:
        rank: Any = ranks[number]
        own = last_grad if number == 1 else None
        tensors = rank.given, made[number][2], grads[number], own
        return selective_reduce.backward(rank, *tensors, (True,) * 9, 1)

    found = at_once([rank.backward_opening for rank in ranks], backward)
    assert used == ["adjoint"] * len(ranks) + ["adjoint", "backward"] * len(ranks)

    wide = [x.double() for x in whole]
    with torch.no_grad():
        out, last = reference.forward(*wide[:8], True, wide[8])
        ends = out_grad.double(), last_grad.double()
        wanted = reference.backward(tuple(wide), True, None, *ends, (True,) * 9)
    assert relative_error(torch.cat([each[0] for each in made], -1), out) <= TOLERANCE[dtype]
    for each in made:
        # In 16 bits, of gates by the GPU's approximation of 2^x.
        assert relative_error(each[1], last) <= (4e-6 if dtype == torch.float32 else 1e-4)
    for place, expected in enumerate(wanted):
        each_rank = [grads_of[place] for grads_of in found]
        mine = torch.cat(each_rank, -1) if place in timed else sum(x.double() for x in each_rank)
        assert mine.dtype == (whole[place].dtype if place in timed else torch.float64)
        assert expected is not None
        assert relative_error(mine, expected) <= TOLERANCE[dtype], place
