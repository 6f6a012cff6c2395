"""The model of the two schedules: beside a simulation, at its best number of pieces, and what it chooses."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from typing import Literal

import pytest

from scan_registry.distributed.cost import (
    MOST_PIECES,
    Choice,
    Work,
    best_pieces,
    choose,
    even,
    linear_scan_work,
    one_rank_seconds,
    pass_seconds,
    piece_width,
    reduce_seconds,
)
from scan_registry.distributed.machines import MACHINES, Machine, default

#: Round numbers: a byte of memory takes 1 s, of a near link 2 s, of a far one 4 s.
SLOW = Machine(
    name="slow", memory=1, call=100, send=90, piece=10, launch=1, hop=7, link=0.5, far_hop=13, far_link=0.25,
    ranks_per_node=2, source="made up",
)  # fmt: skip


def works(count: int, seed: int) -> list[Work]:
    draw = random.Random(seed)
    return [
        Work(
            steps=tuple(draw.choice([0, 1, 5, 50, 3000]) for _ in range(draw.randint(1, 9))),
            summary=draw.choice([2, 64]),
            scan=draw.choice([3, 96]),
            state=draw.choice([4, 4096]),
            lines=draw.choice([1, 2, 7, 24, 40, 100]),
            chain=draw.choice([0, 0, 3, 40]),
        )
        for _ in range(count)
    ]


def simulated(work: Work, machine: Machine, pieces: int) -> float:
    """When the last rank is done, from when each rank begins and ends each piece."""
    arrived = [machine.all_gather(work.ranks, 4096)] * pieces
    ended = 0.0
    for rank, steps in enumerate(work.steps):
        free, sent = 0.0, []
        for ready in arrived:
            step = max(work.scan / machine.memory / pieces, work.chain)
            free = max(free, ready) + steps * step + machine.piece
            sent.append(free)
        far = (rank + 1) % machine.ranks_per_node == 0
        hop, link = (machine.far_hop, machine.far_link) if far else (machine.hop, machine.link)
        arrived = [end + machine.send + hop + work.state / pieces / link for end in sent]
        ended = max(ended, free)
    return ended


# --- Times ------------------------------------------------------------------------------------


def test_an_all_gather_is_a_ring() -> None:
    assert SLOW.all_gather(1, 3) == 0
    assert SLOW.all_gather(2, 3) == 100 + 7 + 3 * 2
    # 5 ranks on 3 nodes: 4 steps, of which 2 cross nodes; every step is as slow as the slowest link
    assert SLOW.all_gather(5, 3) == 100 + 2 * 7 + 2 * 13 + 4 * 3 * 4


def test_reduce_reads_twice() -> None:
    work = Work(steps=(10, 20), summary=2, scan=3, state=8)
    assert one_rank_seconds(work, SLOW) == 1 + 30 * 3
    gather, read = SLOW.all_gather(2, 16), 2 * 16
    assert reduce_seconds(work, SLOW) == 3 + 20 * (2 + 3) + read + gather


def test_pass_loses_a_piece_for_each_rank_before() -> None:
    free = replace(SLOW, call=0, send=0, piece=0, hop=0, far_hop=0, link=1e9, far_link=1e9)
    work = Work(steps=(60, 60, 60), summary=2, scan=1, state=0)
    assert pass_seconds(work, free, 1) == pytest.approx(3 * 60, abs=1e-4)
    assert pass_seconds(work, free, 6) == pytest.approx(60 + 2 * 10, abs=1e-4)


def test_pieces_of_few_channels_are_no_shorter() -> None:
    free = replace(SLOW, call=0, send=0, piece=0, hop=0, far_hop=0, link=1e9, far_link=1e9)
    work = Work(steps=(60, 60), summary=2, scan=1, state=0, chain=0.25)
    assert pass_seconds(work, free, 2) == pytest.approx(60 + 30, abs=1e-4)
    assert pass_seconds(work, free, 8) == pytest.approx(9 * 60 * 0.25, abs=1e-4)
    assert best_pieces(work, free) == 4


def test_a_long_sequence_of_few_channels_is_reduced() -> None:
    """As measured on two H200s (tools/results/h200x2-distributed.json): reduce took 1.28 ms forward and 1.90 ms backward, pass
    1.44 ms in 3 pieces and 2.58 ms in 2."""
    found = replace(MACHINES["nvlink"], memory=4.28e12, piece=67e-6)
    for direction, pieces, seconds in (("forward", 3, 1.44e-3), ("backward", 2, 2.58e-3)):
        work = linear_scan_work(
            steps=even(1 << 20, 2),
            rows=1024,
            itemsize=2,
            direction=direction,  # type: ignore[arg-type]
            chained=True,
        )
        assert choose(work, found).schedule == "reduce"
        assert pass_seconds(work, found, pieces) == pytest.approx(seconds, rel=0.2)


@pytest.mark.parametrize("pieces", [1, 2, 5, 64])
def test_pass_is_what_a_simulation_takes(pieces: int) -> None:
    """Where only a part of the ranks is empty or long, too."""
    for work in works(60, seed=pieces):
        if work.ranks > 1:
            expected = simulated(work, SLOW, pieces)
            assert pass_seconds(work, SLOW, pieces) == pytest.approx(expected, rel=1e-12)


def test_no_other_number_of_pieces_is_better() -> None:
    machines = [SLOW, replace(SLOW, piece=0.01), replace(SLOW, piece=0), *MACHINES.values()]
    for work in works(200, seed=1):
        for machine in machines:
            best = best_pieces(work, machine)
            possible = {work.pieces(each) for each in range(1, work.most + 1)}
            assert best in possible
            least = min(pass_seconds(work, machine, each) for each in possible)
            assert pass_seconds(work, machine, best) == pytest.approx(least, rel=1e-12)


@pytest.mark.parametrize(("direction", "scan"), [("forward", 3 * 6 * 2), ("backward", 5 * 6 * 2)])
def test_traffic_of_a_linear_scan(direction: Literal["forward", "backward"], scan: int) -> None:
    work = linear_scan_work((4, 3), 6, 2, direction=direction)
    assert (work.steps, work.scan, work.summary) == ((4, 3), scan, 2 * 6 * 2)
    assert work.state == 6 * 4  # float32, of bfloat16 too
    assert linear_scan_work((4,), 6, 8).state == 6 * 8


def test_pieces_have_whole_lines_of_memory() -> None:
    work = linear_scan_work((4, 4), 4 * 1024, 2, channels=1024)
    assert (work.lines, work.most) == (16, 16)
    assert linear_scan_work((4, 4), 1 << 16, 2).most == MOST_PIECES
    assert linear_scan_work((4, 4), 20, 4).lines == 1
    assert linear_scan_work((4, 4), 0, 4).lines == 1
    assert [work.pieces(wanted) for wanted in (1, 2, 5, 7, 9, 16)] == [1, 2, 4, 6, 8, 16]
    for channels, itemsize in ((1024, 2), (1000, 4), (7, 8), (1, 2)):
        lines = linear_scan_work((4, 4), channels, itemsize)
        for wanted in range(1, lines.most + 1):
            width = piece_width(channels, wanted, itemsize)
            assert width * itemsize % 128 == 0
            assert -(-channels // width) == lines.pieces(wanted)


def test_both_passes_take_as_long_as_one_after_the_other() -> None:
    for machine in (SLOW, *MACHINES.values()):
        forward, backward, both = (
            linear_scan_work((500, 900, 0, 40), 512, 2, direction=direction)
            for direction in ("forward", "backward", "both")
        )
        for seconds in (
            one_rank_seconds,
            reduce_seconds,
            lambda work, machine: pass_seconds(work, machine, 3),
        ):
            together = seconds(forward, machine) + seconds(backward, machine)
            assert seconds(both, machine) == pytest.approx(together)


def test_even_parts() -> None:
    assert even(10, 4) == (3, 3, 2, 2)
    assert even(2, 3) == (1, 1, 0)


# --- The choice -------------------------------------------------------------------------------


def chosen(total: int, ranks: int, machine: Machine = MACHINES["nvlink"]) -> Choice:
    return choose(linear_scan_work(even(total, ranks), 1024, 2), machine)


def test_one_rank_exchanges_nothing() -> None:
    choice = chosen(1 << 20, 1)
    assert (choice.schedule, choice.pieces) == ("local", 1)
    assert choice.seconds == choice.alone_seconds


def test_few_ranks_with_long_parts_pass_and_many_with_short_ones_reduce() -> None:
    assert chosen(1 << 22, 2).schedule == "pass"
    assert chosen(1 << 22, 2).pieces > 1
    assert chosen(1 << 22, 256).schedule == "reduce"
    assert chosen(1 << 10, 8).schedule == "reduce"
    assert chosen(1 << 10, 8).pieces == 1


@pytest.mark.parametrize(
    ("time", "rows", "channels"),
    [(1 << 20, 1024, 1024), (65_536, 4 * 2560, 2560), (1 << 18, 2048, 2048)],
)
@pytest.mark.parametrize("direction", ["forward", "both"])
def test_two_gpus_reduce(
    time: int, rows: int, channels: int, direction: Literal["forward", "both"]
) -> None:
    """The CPU's time for the pieces of "pass" makes it the slower schedule on two GPUs."""
    work = linear_scan_work(even(time, 2), rows, 2, direction=direction, channels=channels)
    assert choose(work, MACHINES["nvlink"]).schedule == "reduce"


def test_the_choice_is_the_shorter_of_the_two() -> None:
    seen = set()
    for work in works(200, seed=2):
        for machine in (SLOW, *MACHINES.values()):
            choice = choose(work, machine)
            if work.ranks > 1:
                assert choice.seconds == min(choice.reduce_seconds, choice.pass_seconds)
                assert (
                    choice.seconds
                    == {
                        "reduce": choice.reduce_seconds,
                        "pass": choice.pass_seconds,
                    }[choice.schedule]
                )
            seen.add(choice.schedule)
    assert seen == {"local", "reduce", "pass"}


def test_a_schedule_that_is_given_is_taken() -> None:
    work = linear_scan_work(even(1 << 22, 2), 1024, 2)
    machine = MACHINES["nvlink"]
    auto = choose(work, machine)
    assert auto.schedule == "pass"
    reduce = choose(work, machine, "reduce")
    assert (reduce.schedule, reduce.pieces) == ("reduce", 1)
    assert reduce.seconds == auto.reduce_seconds > auto.seconds
    assert "auto would take pass" in reduce.reasons[0]
    given = choose(work, machine, "pass", 3)
    assert (given.pieces, given.seconds) == (3, pass_seconds(work, machine, 3))
    assert "is what auto would take" in given.reasons[0]
    # One rank has nothing to choose, but what was given is still looked at.
    assert choose(linear_scan_work((5,), 8, 2), machine, "pass").schedule == "local"


def test_all_go_by_the_first_rank() -> None:
    choice = chosen(1 << 22, 2)
    assert choice.schedule == "pass"
    other = choice.as_given(0)
    assert (other.schedule, other.pieces, other.seconds) == ("reduce", 1, choice.reduce_seconds)
    assert "the first rank takes reduce" in other.reasons[0]
    assert other.reasons[1:] == choice.reasons[1:]
    assert other.as_given(5).pieces == 5


def test_reasons_have_the_numbers() -> None:
    machine = MACHINES["nvlink"]
    text = str(chosen(1 << 20, 8))
    assert "1,048,576 steps" in text
    assert "131,072 steps" in text
    assert "8 × 8,192 bytes" in text
    assert machine.source in text
    assert text.splitlines()[0].endswith("predicted")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda work: choose(work, SLOW, "ring"), "schedule is 'ring'; accepted are auto, reduce, pass"),
        (lambda work: choose(work, SLOW, pieces=9), "pieces are 9; .* 1 to 1"),
        (lambda work: choose(work, SLOW, pieces=0), "pieces are 0"),
        (lambda work: pass_seconds(work, SLOW, 0), "pieces are 0"),
        (lambda work: replace(work, steps=(3, -1)), r"steps are \(3, -1\)"),
        (lambda work: replace(work, steps=()), r"steps are \(\)"),
        (lambda work: replace(work, lines=0), "lines are 0"),
        (lambda _: replace(SLOW, memory=0), "memory is 0"),
        (lambda _: replace(SLOW, call=float("nan")), "call is nan"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(call: object, said: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=said):
        call(linear_scan_work((3, 4), 8, 4))


# --- Machines ---------------------------------------------------------------------------------


def test_defaults_go_by_the_device() -> None:
    assert default("cpu") is MACHINES["cpu"]
    assert default("cuda", "NVIDIA H100 80GB HBM3") is MACHINES["nvlink"]
    assert default("cuda", "NVIDIA H100 PCIe") is MACHINES["pcie"]
    assert default("cuda", "NVIDIA H100 PCIe", ranks_per_node=1) is MACHINES["nodes"]
    four = default("cuda", "NVIDIA A100-SXM4-80GB", ranks_per_node=4)
    assert replace(four, ranks_per_node=8) == MACHINES["nvlink"]
    assert (four.nodes(4), four.nodes(5)) == (1, 2)


def test_every_machine_says_where_its_numbers_are_from() -> None:
    for machine in MACHINES.values():
        assert "assumed" in machine.source or "measured" in machine.source


def test_neither_torch_nor_a_group_is_needed() -> None:
    script = "import sys, scan_registry.distributed.cost; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd="/", check=False, timeout=60)
    assert done.returncode == 0
