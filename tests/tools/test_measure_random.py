"""``tools/measure_random.py`` on the CPU: everything is real but the launches and the times."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from by_path import load_tool

from scan_registry.bench import timing
from scan_registry.dispatch.candidates import System
from scan_registry.dispatch.select import select
from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.model import Variant
from scan_registry.ops import plans
from scan_registry.ops.linear_scan_bench import Case

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
SMALL = Case.parse("time_last:2,8,512:float32")
SHARED = Case.parse("channel_last:2,32,96:float16:gates=channel:reverse=1:state=1")
LONGER = replace(SMALL, time=1024)


@pytest.fixture(scope="module")
def tool() -> types.ModuleType:
    return load_tool("measure_random")


@dataclass
class Gpu:
    """Plays one. ``ms`` gives a variant's time; what is in ``unfit`` does not load."""

    ms: Callable[[Variant], float] = lambda variant: 1.0
    unfit: set[Variant] = field(default_factory=set)
    started: list[Variant] = field(default_factory=list)
    rounds: list[tuple[int, int]] = field(default_factory=list)

    def start(self, ordinal: int, launch: Any, kernel: Any, case: Any, workspace: int) -> None:
        variant, problem = launch
        assert kernel is FAMILY.kernel(variant.kernel, variant.language)
        self.started.append(variant)
        run = plans.runner(replace(problem, sums=False), CPU, "auto")
        assert callable(run)
        tensors = case.tensors
        if problem.sums:  # which no kernel of the CPU does
            tensors = {**tensors, "gates_grad": torch.empty_like(tensors["tokens_grad"])}
        run(tensors)

    def once(self, call: Any, place: Any) -> float:
        call()
        return self.ms(self.started[-1])

    def turn(self, calls: Sequence[Any], place: Any) -> Any:
        for call in calls:
            call()
        variant = self.started[-1]
        return types.SimpleNamespace(ms=lambda: self.ms(variant))

    def compete(self, recordings: Sequence[Any], warm_up: int, rounds: int) -> Any:
        self.rounds.append((len(recordings), rounds))
        return timing.compete(recordings, warm_up, rounds)


@pytest.fixture
def gpu(
    tool: Any,
    monkeypatch: pytest.MonkeyPatch,
    a_device: Callable[..., Any],
    a_binary: Callable[..., Any],
    archive_factory: Callable[..., Any],
) -> Gpu:
    playing, device = Gpu(), a_device()
    names = "time_last_forward", "time_last_backward", "channel_last_forward"
    made = []
    for kernel in FAMILY.kernels:
        if kernel.name in (*names, "channel_last_backward"):
            served = (v for v in kernel.every if kernel.rules.serves(v.statics, Target((9, 0))))
            held = [v for v in served if v.text("dtype") in ("float32", "float16")]
            made += [a_binary(variant, "sm90") for variant in held[:: len(held) // 30 or 1]]
    archive = archive_factory("sm90", made)

    def decide(ordinal: int, family: Any, problem: Any, backend: Any, lowest: Any) -> Any:
        return select(System(device, (archive,)), family, problem, backend, lowest)

    def load(ordinal: int, binary: Any, read: Any, subject: object) -> Variant:
        assert read() == a_binary(binary.variant, "sm90")[1]
        if binary.variant in playing.unfit:
            raise tool.loader.UnfitError("the driver has no use for it")
        found: Variant = binary.variant
        return found

    def bind(ordinal: int, family: Any, problem: Any, binary: Any, function: Any) -> Any:
        return function, problem

    monkeypatch.setattr(timing, "cache_bytes", lambda device: 1 << 10)
    monkeypatch.setattr(tool.Measuring, "place", CPU)
    for name, value in {"decide": decide, "load": load, "bind": bind}.items():
        monkeypatch.setattr(tool.loader, name, value)
    monkeypatch.setattr(tool.accuracy, "start", playing.start)
    for name in ("once", "turn", "compete"):
        monkeypatch.setattr(tool, name, getattr(playing, name))
    return playing


def texts(tool: Any, case: Case, direction: str) -> list[str]:
    return [each.text for each in tool.installed(tool.decide(0, case, direction))]


@pytest.mark.parametrize("case", [SMALL, SHARED], ids=str)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_variant_that_can_run_is_timed(
    tool: Any, gpu: Gpu, case: Case, direction: str
) -> None:
    decision = tool.decide(0, case, direction)
    held = {str(binary.variant) for binary in decision.system.archives[0].binaries}
    expected = {
        str(variant)
        for language in ("cuda", "triton")
        for kernel in [FAMILY.kernel(decision.problem.kernel, language)]
        for variant in kernel.every
        if str(variant) in held
        and kernel.mistakes(variant, decision.problem) is None
        and kernel.rules.accepts(variant, decision.problem) is None
        and kernel.rules.exceeds_residency(variant, decision.problem, 132) is None
    }
    assert len(expected) > 2
    found = tool.Measuring(0).measure(case, direction)
    assert {*found.points} == expected == {*texts(tool, case, direction)}
    assert {*map(str, gpu.started)} == expected
    assert found.chosen == str(decision.winner.variant)
    assert (found.regret, found.refused) == (1.0, {})
    assert found.kind.startswith(f"dtype={case.dtype}")
    languages = {Variant.parse(text).language for text in expected}
    # No Triton kernel sums up the gradient of broadcast gates.
    assert languages == ({"cuda"} if decision.problem.sums else {"cuda", "triton"})
    alone = tool.Measuring(0, ["cuda"]).measure(case, direction)
    assert {Variant.parse(text).language for text in alone.points} == {"cuda"}


def test_the_slow_leave_and_the_near_are_timed_again(tool: Any, gpu: Gpu) -> None:
    chosen, *others = texts(tool, SMALL, "forward")
    far, middle, near, best = others[:4]
    times = {chosen: 30.0, far: 25.0, middle: 15.0, near: 11.0, best: 10.0}
    gpu.ms = lambda variant: times.get(str(variant), 40.0)
    found = tool.Measuring(0).measure(SMALL, "forward")
    assert (found.chosen, found.best, found.regret) == (chosen, best, 3.0)
    assert gpu.rounds == [(4, 1), (4, 3), (3, 7)]
    rounds = {text: found.points[text].rounds for text in times}
    assert rounds == {chosen: 7, far: 1, middle: 3, near: 7, best: 7}
    assert {each.rounds for text, each in found.points.items() if text not in times} == {1}


def test_what_does_not_load_is_no_candidate(tool: Any, gpu: Gpu) -> None:
    chosen, other, *_ = texts(tool, SMALL, "forward")
    gpu.unfit = {Variant.parse(other)}
    found = tool.Measuring(0).measure(SMALL, "forward")
    assert found.refused == {other: "the driver has no use for it"}
    assert other not in found.points
    gpu.unfit = {Variant.parse(chosen)}
    assert "the chosen variant does not load" in tool.Measuring(0).measure(SMALL, "forward")


def run(tool: Any, monkeypatch: pytest.MonkeyPatch, path: Path, *words: str) -> int:
    there = types.SimpleNamespace(name="Imaginary", arch="sm_90", sm_count=132)
    monkeypatch.setattr(tool, "device", lambda ordinal: there)
    monkeypatch.setattr(tool, "streaming_bandwidth", lambda place: 1e9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["measure_random", "--out", str(path), *words])
    status: int = tool.main()
    return status


def test_all_times_are_written_and_the_worst_named(
    tool: Any,
    gpu: Gpu,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chosen, best = texts(tool, SMALL, "forward")[:2]
    gpu.ms = lambda variant: {chosen: 1.5, best: 1.0}.get(str(variant), 2.0)
    path = tmp_path / "out.json"
    words = ("--case", str(SMALL), "--case", str(LONGER))
    assert run(tool, monkeypatch, path, *words) == 0
    out = capsys.readouterr().out
    assert "forward: regret of the choice on 2 cases: geometric mean 1." in out
    assert f"1.500  1.5000 ms, best 1.0000, of {len(texts(tool, SMALL, 'forward'))}  {SMALL}" in out
    assert f"chosen {chosen}" in out
    assert f"best   {best}" in out
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [(each["case"], each["direction"]) for each in found["passes"]] == [
        (str(case), direction) for case in (SMALL, LONGER) for direction in ("forward", "backward")
    ]
    first = found["passes"][0]
    assert (first["chosen"], first["best"], first["regret"]) == (chosen, best, 1.5)
    assert [each["variant"] for each in first["points"] if each["chosen"]] == [chosen]
    assert (found["gpu"], found["sms"], found["seed"]) == ("Imaginary", 132, None)
    assert not [*tmp_path.glob("*.part")]


def test_what_ends_it_leaves_what_was_timed(
    tool: Any,
    gpu: Gpu,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "out.json"
    monkeypatch.setattr(tool, "draw", lambda number, seed: [SMALL, SHARED, LONGER][:number])
    assert run(tool, monkeypatch, path, "--random", "3", "--budget", "-1") == 2
    assert "not timed: 6 passes" not in capsys.readouterr().out
    measure = tool.Measuring.measure

    def ended(error: BaseException) -> Any:
        begun: list[None] = []

        def until(self: Any, case: Case, direction: str) -> Any:
            begun.append(None)
            if len(begun) == 2:
                raise error
            return measure(self, case, direction)

        return until

    for error, passes, reason in (
        (KeyboardInterrupt(), 1, "not begun in time"),
        (RuntimeError("an illegal access"), 1, "the GPU failed: an illegal access"),
        (torch.OutOfMemoryError("too large"), 3, "too large"),
    ):
        monkeypatch.setattr(tool.Measuring, "measure", ended(error))
        assert run(tool, monkeypatch, path, "--random", "2") == 0
        found = json.loads(path.read_text(encoding="utf-8"))
        assert len(found["passes"]) == passes
        assert found["skipped"][f"{SMALL} backward"] == reason


def test_it_needs_a_gpu(
    tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["measure_random"])
    assert tool.main() == 2
    assert "it needs a GPU" in capsys.readouterr().err
