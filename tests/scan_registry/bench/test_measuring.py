"""How ``bench`` measures."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from benching import CPU, SMALL

from scan_registry.bench import timing
from scan_registry.bench.measure import Bench
from scan_registry.dispatch.select import NoKernelError
from scan_registry.kernels.linear_scan.op.bench import BENCHMARK, Case, ScanBenchmark
from scan_registry.kernels.linear_scan.op.function import linear_scan


def test_recordings_take_turns() -> None:
    """The warm-up does not count; of the rest the median and the spread do."""
    order: list[str] = []

    class Scripted:
        def __init__(self, name: str, scale: float) -> None:
            self.name, self.times = (
                name,
                iter([1e9] * timing.WARM_UP + [scale * n for n in range(11)]),
            )

        def ms(self) -> float:
            order.append(self.name)
            return next(self.times)

    assert timing.ROUNDS == 11
    result = timing.compete([Scripted("a", 1.0), Scripted("b", 2.0)])
    assert result == [(5.0, 10.0), (10.0, 20.0)]
    assert order == ["a", "b"] * (timing.WARM_UP + timing.ROUNDS)


class Stream:
    """What torch.cuda's graphs and events do, in order; every call takes a millisecond, unless it is told otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.capturing = 0.0, None
        #: What torch keeps of a capture: whether its generator is in one, and the pools that its allocator fills.
        self.generating, self.pools, self.released = True, set[tuple[int, int]](), []
        self.invalid = False  # whether CUDA refuses what is captured
        self.launched_ms = self.replayed_ms = 1.0

        stream = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = stream.now

            def synchronize(self) -> None:
                assert self.at == stream.now

            def elapsed_time(self, end: Event) -> float:
                return end.at - self.at

        class Graph:
            captured = 0

            def capture_begin(self, pool: tuple[int, int] | None = None) -> None:
                self.pool = pool or (len(stream.pools) + 1, 0)
                stream.capturing, stream.generating = self, False
                stream.pools.add(self.pool)

            def capture_end(self) -> None:
                stream.capturing = None
                if stream.invalid:  # before torch does the rest
                    stream.invalid = False
                    raise RuntimeError("operation failed due to a previous error during capture")
                end_pool(0, self.pool)
                stream.generating = True

            def replay(self) -> None:
                stream.now += self.captured * stream.replayed_ms

        def end_pool(device: int, pool: tuple[int, int]) -> None:
            if pool not in stream.pools:
                raise RuntimeError("not currently recording to mempool_id")
            stream.pools.remove(pool)

        handles = count(1)
        for name, value in {
            "Event": Event, "CUDAGraph": Graph, "Stream": lambda: None, "stream": nullcontext,
            "synchronize": lambda: None, "current_device": lambda: 0,
            "graph_pool_handle": lambda: (0, next(handles)),
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end_pool, raising=False)
        monkeypatch.setattr(
            *(torch._C, "_cuda_releasePool", lambda device, pool: stream.released.append(pool)),
            raising=False,
        )

    def call(self) -> None:
        if self.capturing is not None:
            self.capturing.captured += 1
        else:
            self.now += self.launched_ms


@pytest.mark.parametrize("python", [True, False], ids=["in Python", "in CUDA"])
def test_a_capture_that_fails_leaves_nothing_behind(
    python: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else torch would draw no random numbers after it, and give no memory back."""
    stream = Stream(monkeypatch)

    def broken() -> None:
        if stream.capturing is not None and python:
            raise ValueError("no such kernel")
        stream.invalid = stream.capturing is not None
        stream.call()

    with pytest.raises(ValueError if python else RuntimeError, match=r"no such|previous error"):
        timing.record([broken], torch.device("cuda:0"))
    assert stream.generating
    assert not stream.pools
    assert stream.released == ([] if python else [(0, 1)])  # which a graph that was captured does
    assert timing.record([stream.call], torch.device("cuda:0")).ms() == 1.0


@pytest.mark.parametrize(
    ("sets", "enough", "launched", "captured"),
    [(1, 5.0, 5, 5), (3, 50.0, 51, 51), (1, 0, 1, 4), (3, 0, 3, 6), (20, 3.0, 20, 20)],
)
def test_a_recording_has_whole_turns_that_take_long_enough(
    sets: int, enough: float, launched: int, captured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream(monkeypatch)
    calls, place = [stream.call] * sets, torch.device("cuda:0")
    for recorded, number in ((True, captured), (False, launched)):
        recording = timing.record(calls, place, recorded, enough)
        assert isinstance(recording, timing.Graph if recorded else timing.Launches)
        before = stream.now
        assert recording.ms() == 1.0
        assert stream.now - before == number
        assert timing.compete([recording], warm_up=1, rounds=2) == [(1.0, 0.0)]
    (alone, *_), brief = calls, min(enough, 1.0)
    short = timing.record([alone], place, True, brief, launches=1)
    assert isinstance(short, timing.Graph)
    assert short.launches == 1


def test_what_takes_longer_to_launch_than_to_run_is_recorded_as_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Stream(monkeypatch)
    stream.launched_ms, stream.replayed_ms = 1 / 64, 1 / 256
    recording = timing.record([stream.call] * 4, torch.device("cuda:0"), enough=2.0)
    assert isinstance(recording, timing.Graph)
    assert recording.launches == 512


@pytest.mark.parametrize("layout", ["time_last", "channel_last"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_a_case_moves_what_its_tensors_hold(layout: str, dtype: str) -> None:
    case = Case.parse(f"{layout}:2,3,5:{dtype}")
    tensors = case.random_gates(CPU), case.sequence(CPU), case.sequence(CPU)
    assert {t.shape for t in tensors} == {torch.Size(case.shape)}
    assert case.shape[case.dim] == 5
    assert case.traffic("forward") == sum(t.numel() * t.element_size() for t in tensors)
    assert 3 * case.traffic("backward") == 5 * case.traffic("forward")
    shared = replace(case, gates="channel")
    assert shared.random_gates(CPU).numel() == 3
    assert shared.moves("forward") == (1, 1)
    assert shared.moves("backward") == (2, 1)
    assert Case.parse(str(shared)) == shared
    assert Case(**shared.to_json()) == shared
    assert Case(**case.to_json()) == case
    assert bool((tensors[0].abs() <= 1).all())


@pytest.mark.parametrize(
    "text", ["", "time_last:1,2:float32", "rows:1,2,3:float32", "time_last:1,2,3:int8",
             "time_last:1,0,3:float32", "time_last:1,x,3:float32", "time_last:1,2,3:float32:packed",
     "time_last:1,2,3:float32:sequences=-1", "time_last:1,2,3:float32:gates=none",
     "time_last:1,2,3:float32:sequences=x", "time_last:1,2,3:float32:reverse=2", "time_last:1,2,3:float32:more=1"]
)  # fmt: skip
def test_cases_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="the case is "):
        Case.parse(text)


def test_packed_sequences_fill_the_time_and_are_the_same_each_time() -> None:
    case = Case("channel_last", 1, 8, 1000, "bfloat16", sequences=64)
    bounds = case.bounds(CPU)
    assert bounds is not None
    assert (bounds[0], bounds[-1], len(bounds)) == (0, 1000, 65)
    assert bool((bounds.diff() >= 0).all())
    again = case.bounds(CPU)
    assert again is not None
    assert bounds.equal(again)
    assert SMALL.bounds(CPU) is None
    assert Case.parse(str(case)) == case
    assert case.options == "64 packed sequences"


@pytest.mark.parametrize("layout", ["time_last", "channel_last"])
@pytest.mark.parametrize("options", [{}, {"gates": "channel"}, {"sequences": 3}])
@pytest.mark.parametrize("both_ways", [{}, {"reverse": True, "state": True}], ids=str)
def test_what_is_timed_is_the_scan(
    layout: str, options: dict[str, Any], both_ways: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both calls compute what the operator and autograd do."""
    case = Case(layout, 2, 3, 20, "float64", **options, **both_ways)
    assert Case.parse(str(case)) == Case(**case.to_json()) == case
    gates, tokens = case.random_gates(CPU).requires_grad_(), case.sequence(CPU).requires_grad_()
    initial = case.entering(CPU)
    assert (initial is not None) == case.state
    leaves = [gates, tokens] if initial is None else [gates, tokens, initial.requires_grad_()]
    monkeypatch.setattr(Case, "random_gates", lambda self, device: gates.detach())
    monkeypatch.setattr(Case, "sequence", lambda self, device: tokens.detach())
    if initial is not None:
        monkeypatch.setattr(Case, "entering", lambda self, device: initial.detach())
    how: dict[str, Any] = {"dim": case.dim, "reverse": case.reverse}
    how["cu_seqlens"] = case.bounds(CPU)
    out = linear_scan(gates, tokens, initial, return_final_state=case.state, **how)
    outs = out if case.state else (out,)
    forward = BENCHMARK.call(case, "forward", "auto", CPU)()
    torch.testing.assert_close(forward if case.state else (forward,), outs)
    expected = torch.autograd.grad(outs, leaves, [t.detach() for t in leaves[1:]])
    backward = BENCHMARK.call(case, "backward", "auto", CPU)()
    torch.testing.assert_close([t for t in backward if t is not None], [*expected])


def test_no_kernel_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> Any:
        raise NoKernelError("nothing fits")

    monkeypatch.setattr(ScanBenchmark, "call", none)
    with pytest.raises(NoKernelError, match="nothing fits"):
        Bench.on(BENCHMARK, CPU).run(SMALL)


def test_one_language_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def some(_: Any, case: Case, direction: str, backend: str, device: Any) -> Any:
        if backend == "auto":
            raise NoKernelError("nothing fits")
        return lambda: None

    monkeypatch.setattr(ScanBenchmark, "call", some)
    here = Bench.on(BENCHMARK, CPU, ("auto", "reference"))
    here.run(SMALL)
    assert {t.who for t in here.timings} == {"scan-registry reference", "torch.mul"}
    assert here.skipped == {f"scan-registry cpu, {SMALL}": "nothing fits"}
