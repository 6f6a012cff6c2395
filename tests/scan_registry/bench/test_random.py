"""``bench --random``: what is drawn, what it comes to, and what ends it."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import jsonschema
import pytest
import torch
from benching import Capture, document, refusal, schema

from scan_registry.bench import measure
from scan_registry.bench.measure import QUICK, Bench
from scan_registry.bench.shares import NAMED, KindShares, by_kind, shares
from scan_registry.cli import main
from scan_registry.kernels.linear_scan.op import random_cases as linear_scan_random
from scan_registry.kernels.linear_scan.op.bench import BENCHMARK, Case, ScanBenchmark
from scan_registry.ops.benchmark import Timing
from scan_registry.ops.operator import PASSES

MANY = linear_scan_random.draw(2000, 1)


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


def timing(ratio: float, number: int, who: str = "scan-registry auto", way: str = "forward") -> Any:
    return Timing(Case("time_last", 1, 1, number + 1, "float32"), way, who, 1 / ratio, 0.0, 1.0)


def test_means_and_percentiles() -> None:
    timings = [timing(0.1 * (n + 1), n) for n in range(11)]
    (result,) = shares(timings)
    assert result.direction == "forward"
    assert result.geometric_mean == pytest.approx(0.1 * math.factorial(11) ** (1 / 11))
    assert result.tenth_percentile == pytest.approx(0.2)
    assert [item.timing.case.time for item in result.worst] == [*range(1, NAMED + 1)]
    (result,) = shares([timing(0.5, 0), timing(1.0, 1)])
    assert result.tenth_percentile == pytest.approx(0.55)
    (result,) = shares([timing(0.5, 0)])
    assert result.tenth_percentile == result.geometric_mean == pytest.approx(0.5)
    assert shares([]) == []


def test_the_fastest_of_this_package_counts_in_each_pass() -> None:
    timings = [
        timing(0.5, 0, "scan-registry triton"),
        timing(0.7, 0, "scan-registry cuda"),
        timing(0.9, 0, "another"),
        timing(0.6, 0, way="backward"),
    ]
    assert [(share.direction, share.worst[0].ratio) for share in shares(timings)] == [
        ("forward", pytest.approx(0.7)),
        ("backward", pytest.approx(0.6)),
    ]


def test_means_by_kind() -> None:
    timings = [
        timing(0.5, 0),
        timing(0.1, 0, "another"),
        timing(0.25, 0, way="backward"),
        timing(0.125, 3),
        timing(0.5, 11),
    ]
    odd, even = "contiguous time, fewer scans, misaligned", "contiguous time, fewer scans, aligned"
    assert by_kind(timings, linear_scan_random.kind) == [
        KindShares(even, 2, {"forward": pytest.approx(0.25)}),
        KindShares(odd, 1, {"forward": pytest.approx(0.5), "backward": pytest.approx(0.25)}),
        KindShares(
            "all", 3, {"forward": pytest.approx(0.5 ** (5 / 3)), "backward": pytest.approx(0.25)}
        ),
    ]
    assert by_kind([], linear_scan_random.kind) == []


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("time_last:3,100,8:float16", "contiguous time, 300 scans or more, aligned"),
        ("time_last:1,299,7:float16", "contiguous time, fewer scans, misaligned"),
        ("channel_last:1,12,7:float32", "contiguous channels, fewer scans, aligned"),
        ("channel_last:60,5,8:float32", "contiguous channels, 300 scans or more, misaligned"),
        ("channel_last:1,12,7:float32:gates=channel", "one gate per channel"),
        ("time_last:1,12,7:float32:sequences=2:gates=channel", "packed sequences"),
    ],
)
def test_kinds(case: str, kind: str) -> None:
    assert BENCHMARK.kind(Case.parse(case)) == kind


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """Random cases that a CPU has soon run."""
    cases = [Case("time_last", 2, 3, 5 + n, "float32", reverse=n == 2) for n in range(3)]
    monkeypatch.setattr(ScanBenchmark, "draw", lambda self, number, seed: cases[:number])
    return cases


def test_the_document(few: list[Case], capsys: Capture) -> None:
    report = document(capsys, "--random", "3", "--seed", "5")
    assert (report["random"]["number"], report["random"]["seed"]) == (3, 5)
    assert [item["direction"] for item in report["random"]["passes"]] == [*PASSES]
    for item in report["random"]["passes"]:
        assert item["cases"] == 3
        assert {one["case"] for one in item["worst"]} == {*map(str, few)}
        ratios = [one["ratio"] for one in item["worst"]]
        assert ratios == sorted(ratios)
        assert item["geometric_mean"] == pytest.approx(math.prod(ratios) ** (1 / 3))
        for one in item["worst"]:
            assert one["ratio"] == pytest.approx(one["roofline_ms"] / one["ms"])
    assert report["timings"][-1]["case"]["reverse"] is True


def test_it_prints_means_by_kind(few: list[Case], capsys: Capture) -> None:
    assert main(["bench", "--device", "cpu", "--random", "3", "--seed", "5"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    rows = lines[lines.index("kind cases forward backward") :]
    for kind in ("contiguous time, fewer scans, misaligned", "all"):
        assert any(re.fullmatch(rf"{kind} 3 \d+\.\d\d \d+\.\d\d", row) for row in rows)


def test_what_ends_it_leaves_what_was_timed(
    few: list[Case], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = document(capsys, "--random", "3", "--seed", "1", "--budget", "1e-9")
    assert report["random"]["passes"] == []
    assert report["skipped"] == {str(case): "not begun in time" for case in few}
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
        assert {item["cases"] for item in document_["random"]["passes"]} == {timed}
        left = "not begun in time" if status else str(error)
        assert document_["skipped"][str(few[1])] == left


def test_what_there_was_no_time_for_takes_a_line(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, lines in ((10, 10), (11, 1)):
        cases = [Case("time_last", 1, 1, 1 + n, "float32") for n in range(number)]
        monkeypatch.setattr(ScanBenchmark, "draw", lambda self, n, seed, cases=cases: cases)
        assert main(["bench", "--device", "cpu", "--random", str(number), "--budget", "1e-9"]) == 0
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
    report = document(capsys, "--random", "3", "--seed", "1", "--fwd_only")
    assert report["skipped"] == {str(few[0]): "takes about 9 GB"}
    assert checked == [few[0], *few]  # again when torch's cache has been emptied


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--random", "1000000"], "--random is 1000000; accepted are numbers from 1 to 100000"),
        (["--random", "2", "--seed", "-1"], "--seed is -1; accepted are whole numbers from 0 on"),
        (["--seed", "1"], "--seed is for random cases; accepted with --random N"),
        (["--random", "2", "--case", "time_last:1,1,1:fp32"], "accepted without --case"),
    ],
)
def test_arguments_that_cannot_be_meant(words: list[str], message: str, capsys: Capture) -> None:
    assert message in refusal(capsys, "--device", "cpu", *words)


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


@pytest.mark.gpu
def test_on_a_gpu(capsys: Capture) -> None:
    assert main(["bench", "--random", "3", "--seed", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(schema()).validate(report)
    assert [item["cases"] for item in report["random"]["passes"]] == [3, 3]
    assert {entry["who"] for entry in report["timings"]} == {"scan-registry auto"}
