"""The model of a selective scan's schedules: what it chooses, and why."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_pool import RankPool

from scan_registry import distributed
from scan_registry.distributed.calibration import _measured
from scan_registry.distributed.group import resolve
from scan_registry.distributed.machines import MACHINES, Machine
from scan_registry.distributed.selective_cost import SelectiveWork, choose, seconds
from scan_registry.ops.selective_scan_arguments import Arguments, Options

#: The module: the package has a function of this name.
selective = import_module("scan_registry.distributed.selective")
NVLINK = MACHINES["nvlink"]
#: (1, 5120, 131072) on two ranks.
LONG = SelectiveWork((65_536, 65_536), 5120, 16, 2, recorded=True, chunks=4)
#: Of rows enough for four pieces.
WIDE = replace(LONG, steps=(8192, 8192), rows=40_960, pieces=4, chunks=1)


def test_few_rows_work_at_once_and_many_pass() -> None:
    assert choose(LONG, NVLINK).schedule == "reduce"
    assert choose(replace(LONG, recorded=False), NVLINK).schedule == "reduce"
    # Without chunks the two scans forward take as long as both ranks one after the other.
    assert choose(replace(LONG, chunks=1), NVLINK).schedule == "mixed"
    assert choose(replace(LONG, chunks=1, recorded=False), NVLINK).schedule == "pass"
    assert choose(replace(WIDE, recorded=False), NVLINK).schedule == "pass"
    # Backward a summary costs less than the start of a pipeline.
    assert choose(WIDE, NVLINK).schedule == "reduce"
    assert choose(replace(WIDE, kernels=False), MACHINES["cpu"]).schedule == "pass"
    # A pipeline of many ranks is never full.
    assert choose(replace(LONG, steps=(65_536,) * 8, chunks=1), NVLINK).schedule == "reduce"


@pytest.mark.parametrize(
    ("rows", "nanoseconds"), [(4000, 46), (5120, 72), (8192, 72), (10_240, 98), (16_384, 124.5), (40_960, 311)]
)  # fmt: skip
def test_a_step_takes_longer_with_more_on_an_sm(rows: int, nanoseconds: float) -> None:
    """Those of 5,120, 8,192 and 16,384 rows were measured."""
    assert LONG.forward(rows) == pytest.approx(nanoseconds * 1e-9, rel=0.01)
    assert replace(LONG, states=64).forward(rows) == pytest.approx(4 * LONG.forward(rows))


def test_one_rank_exchanges_nothing() -> None:
    alone = choose(replace(LONG, steps=(131_072,)), NVLINK)
    assert (alone.schedule, alone.pieces) == ("local", 1)


def test_one_piece_runs_one_rank_after_the_other() -> None:
    free = replace(NVLINK, call=0, send=0, piece=0, launch=0, hop=0, link=1e18)
    times = seconds(LONG, free)
    assert times["pass"] == pytest.approx(times["local"])
    # Backward all ranks work at once, and nothing twice.
    backward = times["reduce"] - seconds(replace(LONG, recorded=False), free)["reduce"]
    alone = times["local"] - seconds(replace(LONG, recorded=False), free)["local"]
    assert backward == pytest.approx(alone / 2)


def test_a_schedule_that_is_given_is_taken() -> None:
    auto, given = choose(LONG, NVLINK), choose(LONG, NVLINK, "pass")
    assert given.seconds == auto.times["pass"] > auto.seconds
    assert "auto would take reduce" in given.reasons[0]
    assert "is what auto would take" in choose(LONG, NVLINK, "reduce").reasons[0]


def test_reasons_have_the_numbers() -> None:
    text = str(choose(LONG, NVLINK))
    assert text.startswith("reduce: ")
    for part in ("4 chunks", "65,536 steps", "1 pieces of 5,120 rows", "131,072", NVLINK.source):
        assert part in text
    assert "4 pieces of 10,240 rows" in str(choose(WIDE, NVLINK))


class OnGpu(torch.Tensor):
    """Stands for a tensor on a GPU, of which nothing is asked but its shape, strides and dtype."""

    is_cuda = True


def on_gpu(batch: int, channels: int, time: int) -> Arguments:
    u = torch.empty(batch, channels, time, device="meta").as_subclass(OnGpu)
    A, B = torch.empty(channels, 16), torch.empty(batch, 1, 16, time, device="meta")
    return Arguments(u, u, A, B, B, None, None, None, None, None)


@pytest.mark.parametrize(("backend", "by_kernels"), [("auto", True), ("reference", False)])
def test_the_backend_counts(
    monkeypatch: pytest.MonkeyPatch, backend: str, by_kernels: bool
) -> None:
    """Only kernels make a summary backward at little cost, for which "mixed" is there."""
    monkeypatch.setattr(selective, "machine_of", lambda *_: NVLINK)
    given, members = on_gpu(1, 5120, 65_536), SimpleNamespace(size=2, group=None)
    arguments: Any = members, given, [65_536] * 2, {"schedule": "auto"}, Options(True, backend)
    found = selective.selective_choice(*arguments)
    assert ("mixed" in found.times) == by_kernels


# --- explain_selective_scan -------------------------------------------------------------------


def explained(rank: int, ranks: int, group: Any, machines: list[Machine], schedule: str) -> Any:
    """The choice, and the mode of the call itself."""
    u = torch.rand(1, 8, 10 + rank, requires_grad=True)
    B = torch.rand(1, 2, 10 + rank)
    given = u, u, -torch.rand(8, 2), B, B
    how: Any = {"group": group, "schedule": schedule}
    state = resolve(group).session
    _measured[resolve(group).group] = machines[rank % len(machines)]
    try:
        state.agreed.clear()
        state.plans.clear()
        choice = distributed.explain_selective_scan(*given, **how)
        distributed.selective_scan(*given, **how)
        (mode,) = [run.mode for run, _ in state.plans.values()]
    finally:
        del _measured[resolve(group).group]
    return choice, mode


#: A piece takes a second, so that states are not passed on; and the other way round.
REDUCING = replace(MACHINES["cpu"], name="reducing", piece=1.0)
PASSING = replace(MACHINES["cpu"], name="passing", piece=0.0, send=0.0, launch=1.0)


@pytest.mark.parametrize("schedule", ["auto", "reduce", "pass"])
@pytest.mark.parametrize("machine", [PASSING, REDUCING], ids=lambda machine: machine.name)
def test_it_is_what_the_call_does(ranks: RankPool, machine: Machine, schedule: str) -> None:
    expected = schedule if schedule != "auto" else "reduce" if machine is REDUCING else "pass"
    for choice, mode in ranks.run(3, explained, [machine], schedule):
        assert choice.schedule == expected
        assert mode == (8 if expected == "pass" else 0)
        assert choice.pieces == max(1, mode)


def test_where_machines_differ_the_first_rank_decides(ranks: RankPool) -> None:
    machines = [REDUCING, PASSING]
    (first, taken), (second, also) = ranks.run(2, explained, machines, "auto")
    assert first.schedule == second.schedule == "reduce"
    assert taken == also == 0
    assert "the first rank takes reduce" in second.reasons[0]
    assert "it would be pass" in second.reasons[0]


def refused(rank: int, ranks: int, group: Any) -> list[str]:
    u, A, B = torch.rand(1, 4, 5), -torch.rand(4, 2), torch.rand(1, 2, 5)
    bounds, said = torch.tensor([0, 5 * ranks]), []
    for how in ({"schedule": "ring"}, {"schedule": "reduce", "cu_seqlens": bounds}):
        try:
            distributed.selective_scan(u, u, A, B, B, group=group, **how)  # type: ignore[call-overload]
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("size", [1, 2])
def test_schedules_that_there_are_not(ranks: RankPool, size: int) -> None:
    """In a group of one rank, too, where a program may be written."""
    for unknown, packed in ranks.run(size, refused):
        assert "schedule is 'ring'" in unknown
        assert "packed sequences take 'pass' or 'auto'" in packed
