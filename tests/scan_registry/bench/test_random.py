"""``bench --random``: what is drawn, what it comes to, and what ends it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest
import torch
from benching import CPU, SMALL, Capture, document, refusal, schema

from scan_registry.bench import measure
from scan_registry.bench.measure import QUICK, Bench
from scan_registry.bench.shares import NAMED, shares
from scan_registry.cli import bench_random, main
from scan_registry.kernels.linear_scan.op import random_cases as linear_scan_random
from scan_registry.kernels.linear_scan.op.bench import BENCHMARK, LAYOUTS, Case, ScanBenchmark
from scan_registry.ops.benchmark import Timing
from scan_registry.ops.operator import PASSES

MANY = linear_scan_random.draw(2000, 1)


# --- What is drawn ----------------------------------------------------------------------------


def part(cases: Sequence[bool]) -> float:
    return sum(cases) / len(cases)


def test_a_seed_gives_the_same_cases() -> None:
    assert linear_scan_random.draw(40, 7) == linear_scan_random.draw(50, 7)[:40]
    assert not {*linear_scan_random.draw(40, 7)} & {*linear_scan_random.draw(40, 8)}
    assert len({*MANY}) == len(MANY)
    # Written down, so that a change of what seeds mean is one on purpose.
    assert [str(case) for case in linear_scan_random.draw(3, 1)] == [
        "channel_last:63,8,451067:float16",
        "time_last:201,3,7362:bfloat16",
        "time_last:55,304,1101:bfloat16",
    ]


def test_sizes_are_in_their_ranges() -> None:
    for case in MANY:
        assert 1 <= case.batch * case.channels <= 100_000
        assert 1 <= case.time <= 1 << 20
        assert 10**6 <= case.traffic("forward") <= 4 * 10**9
        assert Case.parse(str(case)) == case
        if case.sequences:
            assert case.batch == 1
            assert case.sequences <= max(1, case.time // 16)


def test_every_order_of_magnitude_is_drawn() -> None:
    traffic = [math.log10(case.traffic("forward")) for case in MANY]
    for low in (6.0, 7.0, 8.0):
        assert 0.15 < part([low <= each < low + 1 for each in traffic]) < 0.5
    assert part([case.time > 1 << 15 for case in MANY]) > 0.1
    assert part([case.time < 1 << 8 for case in MANY]) > 0.1
    assert part([case.batch * case.channels < 100 for case in MANY]) > 0.1
    assert part([case.batch * case.channels > 10_000 for case in MANY]) > 0.1


def test_half_of_the_lengths_are_odd_and_options_are_as_frequent_as_said() -> None:
    assert 0.47 < part([case.time % 2 == 1 for case in MANY]) < 0.53
    for layout in LAYOUTS:
        assert 0.4 < part([case.layout == layout for case in MANY]) < 0.6
    for dtype, chance in linear_scan_random.DTYPES.items():
        assert abs(part([case.dtype == dtype for case in MANY]) - chance) < 0.08
    assert 0.05 < part([case.sequences > 0 for case in MANY]) < 0.15
    assert 0.05 < part([case.gates == "channel" for case in MANY]) < 0.15
    assert 0.05 < part([case.reverse for case in MANY]) < 0.15
    assert 0.1 < part([case.state for case in MANY]) < 0.2
    assert part([not case.options for case in MANY]) > 0.5
    wide = [case for case in MANY if case.channels >= 8]
    assert 0.5 < part([case.channels % 8 == 0 for case in wide]) < 0.66


def test_cases_are_kernels_to_choose_from() -> None:
    assert BENCHMARK.draws
    assert BENCHMARK.draw(3, 1) == linear_scan_random.draw(3, 1)


# --- What it comes to -------------------------------------------------------------------------


def timing(ratio: float, number: int, who: str = "scan-registry auto", way: str = "forward") -> Any:
    return Timing(Case("time_last", 1, 1, number + 1, "float32"), way, who, 1 / ratio, 0.0, 1.0)


def test_means_and_percentiles() -> None:
    timings = [timing(0.1 * (n + 1), n) for n in range(11)]
    (found,) = shares(timings)
    assert found.direction == "forward"
    assert found.geometric_mean == pytest.approx(0.1 * math.factorial(11) ** (1 / 11))
    assert found.tenth_percentile == pytest.approx(0.2)
    assert [each.timing.case.time for each in found.worst] == [*range(1, NAMED + 1)]
    (found,) = shares([timing(0.5, 0), timing(1.0, 1)])
    assert found.tenth_percentile == pytest.approx(0.55)
    (found,) = shares([timing(0.5, 0)])
    assert found.tenth_percentile == found.geometric_mean == pytest.approx(0.5)
    assert shares([]) == []


def test_the_fastest_of_this_package_counts_in_each_pass() -> None:
    timings = [
        timing(0.5, 0, "scan-registry triton"),
        timing(0.7, 0, "scan-registry cuda"),
        timing(0.9, 0, "another"),
        timing(0.6, 0, way="backward"),
    ]
    assert [(each.direction, each.worst[0].ratio) for each in shares(timings)] == [
        ("forward", pytest.approx(0.7)),
        ("backward", pytest.approx(0.6)),
    ]


# --- The command ------------------------------------------------------------------------------


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """Random cases that a CPU has soon run."""
    cases = [Case("time_last", 2, 3, 5 + n, "float32", reverse=n == 2) for n in range(3)]
    monkeypatch.setattr(ScanBenchmark, "draw", lambda self, number, seed: cases[:number])
    return cases


def test_the_document(few: list[Case], capsys: Capture) -> None:
    found = document(capsys, "--random", "3", "--seed", "5")
    assert (found["random"]["number"], found["random"]["seed"]) == (3, 5)
    assert [each["direction"] for each in found["random"]["passes"]] == [*PASSES]
    for each in found["random"]["passes"]:
        assert each["cases"] == 3
        assert {one["case"] for one in each["worst"]} == {*map(str, few)}
        ratios = [one["ratio"] for one in each["worst"]]
        assert ratios == sorted(ratios)
        assert each["geometric_mean"] == pytest.approx(math.prod(ratios) ** (1 / 3))
        for one in each["worst"]:
            assert one["ratio"] == pytest.approx(one["roofline_ms"] / one["ms"])
    assert found["timings"][-1]["case"]["reverse"] is True


def test_the_worst_are_named_as_case_takes_them(few: list[Case], capsys: Capture) -> None:
    assert main(["bench", "--device", "cpu", "--random", "3", "--seed", "5"]) == 0
    out = capsys.readouterr().out
    for way in PASSES:
        assert f"{way}: the worst of 3 cases" in out
        assert f"{way}, of the roofline: geometric mean " in out
    assert "--random 3 --seed 5" in out
    named = [line.split()[-1] for line in out.splitlines() if line.startswith("  ")]
    assert {*named} >= {*map(str, few)}
    assert len(document(capsys, "--case", str(few[2]), "--no-baselines")["timings"]) == 3


def test_another_seed_each_time(few: list[Case], capsys: Capture) -> None:
    seeds = {document(capsys, "--random", "1", "--fwd_only")["random"]["seed"] for _ in range(3)}
    assert len(seeds) > 1


def test_what_ends_it_leaves_what_was_timed(
    few: list[Case], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = document(capsys, "--random", "3", "--seed", "1", "--budget", "-1")
    assert found["random"]["passes"] == []
    assert found["skipped"] == {str(case): "not begun in time" for case in few}
    run = Bench.run

    def ended(error: BaseException) -> Any:
        def until(self: Bench, case: Case) -> None:
            if case == few[1]:
                raise error
            run(self, case)

        return until

    words = ["bench", "--device", "cpu", "--random", "3", "--seed", "1", "--json"]
    for error, status, timed, word in (
        (KeyboardInterrupt(), 130, 1, "interrupted: what was timed is kept"),
        (RuntimeError("an illegal access"), 0, 1, "the device failed; what was timed is kept"),
        (torch.OutOfMemoryError("too large"), 0, 2, ""),
    ):
        monkeypatch.setattr(Bench, "run", ended(error))
        assert main(words) == status
        captured = capsys.readouterr()
        assert word in captured.err
        document_ = json.loads(captured.out)
        jsonschema.Draft202012Validator(schema()).validate(document_)
        assert {each["cases"] for each in document_["random"]["passes"]} == {timed}
        left = "not begun in time" if status else str(error)
        assert document_["skipped"][str(few[1])] == left


def test_what_there_was_no_time_for_takes_a_line(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, lines in ((10, 10), (11, 1)):
        cases = [Case("time_last", 1, 1, 1 + n, "float32") for n in range(number)]
        monkeypatch.setattr(ScanBenchmark, "draw", lambda self, n, seed, cases=cases: cases)
        assert main(["bench", "--device", "cpu", "--random", str(number), "--budget", "-1"]) == 0
        out = capsys.readouterr().out
        assert out.count("not everywhere timed: ") == lines
        assert out.count(f"{cases[0]} and 10 others: not begun in time") == (lines == 1)


def test_a_case_that_there_is_no_room_for_is_left_out(
    few: list[Case], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, checked = Bench.check_room, []

    def full(self: Bench, case: Case) -> None:
        checked.append(case)
        if case == few[0]:
            raise ValueError("takes about 9 GB")
        check(self, case)

    monkeypatch.setattr(Bench, "check_room", full)
    found = document(capsys, "--random", "3", "--seed", "1", "--fwd_only")
    assert found["skipped"] == {str(few[0]): "takes about 9 GB"}
    assert checked == [few[0], *few]  # again when torch's cache has been emptied


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--random", "0"], "--random is 0; accepted are numbers from 1 to "),
        (["--random", "1000000"], "--random is 1000000; accepted are numbers from 1 to 100000"),
        (["--random", "2", "--seed", "-1"], "--seed is -1; accepted are whole numbers from 0 on"),
        (["--seed", "1"], "--seed is for random cases; accepted with --random N"),
        (["--random", "2", "--case", "time_last:1,1,1:fp32"], "accepted without --case"),
    ],
)
def test_arguments_that_cannot_be_meant(words: list[str], message: str, capsys: Capture) -> None:
    assert message in refusal(capsys, "--device", "cpu", *words)


def test_random_cases_are_not_the_targets(capsys: Capture) -> None:
    class Arguments:
        random, seed, targets, case = 3, None, True, ()

    given: Any = Arguments()
    with pytest.raises(bench_random.UsageError, match="accepted without --targets"):
        bench_random.draw(BENCHMARK, given)


# --- How it measures --------------------------------------------------------------------------


def test_few_rounds_of_short_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    competed: list[tuple[Any, int, int]] = []
    recorded: list[tuple[float | None, int]] = []

    class Quick:
        def ms(self) -> float:
            return 2.0

    def record(calls: Any, device: Any, captured: bool, enough: Any, launches: int) -> Any:
        recorded.append((enough, launches))
        return Quick()

    def compete(recordings: Any, warm_up: int, rounds: int) -> Any:
        competed.append((recorded[-1], warm_up, rounds))
        return [(each.ms(), 0.0) for each in recordings]

    monkeypatch.setattr(measure, "record", record)
    monkeypatch.setattr(measure, "compete", compete)
    monkeypatch.setattr(measure, "streaming_bandwidth", lambda device: 1e6)
    for effort, expected in ((None, ((None, 4), 4, 11)), (QUICK, ((1.0, 1), 1, 5))):
        bench = Bench.on(BENCHMARK, CPU, passes=("forward",), effort=effort)
        bench.run(SMALL)
        assert competed.pop() == expected


@pytest.mark.parametrize(
    ("effort", "reserved", "emptied"), [(None, 1, 1), (QUICK, 39, 0), (QUICK, 41, 1)]
)
def test_a_part_of_the_memory_may_stay_cached(
    effort: measure.Effort | None, reserved: int, emptied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []

    class Properties:
        total_memory = 100

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(None))
    place = torch.device("cuda", 0)
    bench = Bench(BENCHMARK, place, (), (), PASSES, effort or measure.Effort())
    bench._tidy()
    assert len(calls) == emptied
    bench._tidy(fully=True)
    assert len(calls) == emptied + 1


# --- On a GPU ---------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_a_gpu(capsys: Capture) -> None:
    assert main(["bench", "--random", "3", "--seed", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(schema()).validate(found)
    assert [each["cases"] for each in found["random"]["passes"]] == [3, 3]
    assert {entry["who"] for entry in found["timings"]} == {"scan-registry auto"}
