"""Tuning on the CPU, with times that are made up: what is measured, what is refused, when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan.op.bench import Case
from scan_registry.kernels.model import Variant
from scan_registry.kernels.tables import Table
from scan_registry.tuner import engine
from scan_registry.tuner.engine import COARSE, FAR, FINE, LAUNCH_MS, NEAR
from scan_registry.tuner.problems import Posed, posed

SM90 = Target((9, 0))
SMALL = Case.parse("time_last:2,8,512:float32")


def problems(*cases: str, languages: tuple[str, ...] = ("cuda",), forward: bool = True) -> Any:
    passes = ("forward",) if forward else ("forward", "backward")
    return list(posed(map(Case.parse, cases or [str(SMALL)]), languages, passes))


def numbered(posed: Posed, start: float = 1.0, step: float = 0.05) -> Callable[[Variant], float]:
    """Every variant is a step slower than the one before it; the first one is the fastest."""
    order = {variant: start + step * n for n, variant in enumerate(posed.variants(SM90))}
    return lambda variant: order.get(variant, 99.0)


def test_everything_is_timed_and_the_closest_again(workshop: Any) -> None:
    (problem,) = problems()
    variants = problem.variants(SM90)
    workshop.ms = numbered(problem)
    tuner = workshop.tuner()
    tuner.tune([problem])
    (actual,) = tuner.tuned
    timings = actual.measured.timings
    assert set(timings) == {problem.kernel.label(v) for v in variants}
    assert actual.best == problem.kernel.label(variants[0])
    chosen = engine.untuned(0, problem)
    assert chosen is not None
    near = {v for n, v in enumerate(variants) if 1.0 + 0.05 * n <= NEAR} | {chosen}
    assert len(near) < len(variants)
    far = {v for n, v in enumerate(variants) if 1.0 + 0.05 * n > FAR + LAUNCH_MS} - {chosen}
    assert far
    taken = len(variants) - len(far)
    assert workshop.rounds == [(taken, COARSE["rounds"]), (len(near), FINE["rounds"])]
    for variant in variants:
        expected = FINE if variant in near else {"rounds": 1} if variant in far else COARSE
        assert timings[problem.kernel.label(variant)].rounds == expected["rounds"]
    assert actual.shipped == problem.kernel.label(chosen)
    assert actual.regret == pytest.approx(workshop.ms(chosen))
    assert (tuner.left_out, tuner.refused) == ([], {})
    assert actual.measured.shape == problem.shape
    assert actual.measured.run == tuner.run


def test_a_part_of_the_variants_is_timed_beside_what_would_run(workshop: Any) -> None:
    (problem,) = problems()
    chosen = engine.untuned(0, problem)
    assert chosen is not None
    other, *_ = (variant for variant in problem.variants(SM90) if variant != chosen)
    tuner = workshop.tuner(only=lambda variant: variant == other)
    tuner.tune([problem])
    (result,) = tuner.tuned
    assert set(result.measured.timings) == {*map(problem.kernel.label, (chosen, other))}
    assert {*workshop.started} == {chosen, other}


@pytest.mark.parametrize(
    "case",
    [
        "time_last:2,8,512:float32",
        "channel_last:1,32,200:float32:sequences=5",
        "channel_last:2,32,96:float16:gates=channel:reverse=1:state=1",
        "time_last:2,3,101:complex64",
    ],
)
def test_every_pass_of_every_language(workshop: Any, case: str) -> None:
    requested = problems(case, languages=("cuda", "triton"), forward=False)
    tuner = workshop.tuner()
    tuner.tune(requested)
    assert [item.posed for item in tuner.tuned] == sorted(
        requested, key=lambda item: [p.place for p in requested].index(item.place)
    )
    assert tuner.refused == {}
    assert {item.posed.kernel.language for item in tuner.tuned} == {"cuda", "triton"}
    table = Table("linear_scan", "sm_90").with_newer(item.measured for item in tuner.tuned)
    assert Table.from_json(table.to_json()) == table


def test_what_gives_other_results_is_refused(workshop: Any) -> None:
    (problem,) = problems()
    chosen = engine.untuned(0, problem)
    wrong = next(v for v in problem.variants(SM90) if v != chosen)
    workshop.wrong = {wrong}
    workshop.ms = lambda variant: 0.1 if variant == wrong else 1.0
    tuner = workshop.tuner()
    tuner.tune([problem])
    assert "states differ from the shipped variant's by" in tuner.refused[wrong]
    assert problem.kernel.label(wrong) not in tuner.tuned[0].measured.timings


def test_what_is_wrong_once_is_taken_nowhere(workshop: Any) -> None:
    requested = problems("time_last:2,8,512:float32", "time_last:2,8,1024:float32")
    chosen = {engine.untuned(0, item) for item in requested}
    turning = next(v for v in requested[0].variants(SM90) if v not in chosen)
    workshop.ms = lambda variant: 0.1 if variant == turning else 1.0
    tuner = workshop.tuner()
    tuner.done = lambda: workshop.wrong.add(turning)
    tuner.tune(requested)
    assert turning in tuner.refused
    for item in tuner.tuned:
        assert requested[0].kernel.label(turning) not in item.measured.timings
        assert item.best_ms == 1.0
    assert len(tuner.tuned) == 2


def test_what_writes_nothing_is_refused(workshop: Any) -> None:
    (problem,) = problems()
    chosen = engine.untuned(0, problem)
    idle = next(v for v in problem.variants(SM90) if v != chosen)
    start = workshop.start

    def starting(ordinal: int, launch: Any, *others: Any) -> None:
        if launch[0] == idle:
            workshop.started.append(idle)
        else:
            start(ordinal, launch, *others)

    engine.accuracy.start = starting  # type: ignore[assignment]  # the fixture restores it
    tuner = workshop.tuner()
    tuner.tune([problem])
    assert list(tuner.refused) == [idle]


def test_what_does_not_compile_or_load_is_left_out_with_its_reason(workshop: Any) -> None:
    (problem,) = problems()
    chosen = engine.untuned(0, problem)
    missing, unfit = [v for v in problem.variants(SM90) if v != chosen][:2]
    workshop.missing, workshop.unfit = {missing}, {unfit}
    tuner = workshop.tuner()
    tuner.tune([problem])
    assert tuner.refused[missing] == "no such luck"
    assert "the driver has no use for it" in tuner.refused[unfit]
    assert len(tuner.tuned[0].measured.timings) == len(problem.variants(SM90)) - 2
    count = len(problem.variants(SM90))
    assert f"{count - 1} of {count} variants ready" in workshop.messages[0]


def test_the_budget_ends_it_between_problems(workshop: Any) -> None:
    requested = problems("time_last:2,8,512:float32", "time_last:2,8,64:float32", forward=False)
    assert len(requested) == 4
    times: Iterator[float] = iter([0.0, 1.0, 1.0, 1.0, 1.0, 7.0, 11.0, 12.0])
    tuner = workshop.tuner(budget=10.0, clock=lambda: next(times))
    kept: list[int] = []
    tuner.keep = lambda: kept.append(len(tuner.tuned))
    tuner.tune(requested)
    # Both lengths forward, which is one kind of one kernel; backward is not begun.
    assert [item.posed.direction for item in tuner.tuned] == ["forward", "forward"]
    assert [item.direction for item in tuner.left_out] == ["backward", "backward"]
    assert kept == [2]


def test_an_interruption_keeps_what_was_measured(workshop: Any) -> None:
    requested = problems("time_last:2,8,512:float32", "time_last:2,8,64:float32")
    tuner = workshop.tuner()
    count = iter(range(9))

    def done() -> None:
        if next(count) == 0:
            raise KeyboardInterrupt

    tuner.done = done
    tuner.tune(requested)
    assert [item.posed for item in tuner.tuned] == requested[:1]
    assert tuner.left_out == requested[1:]
    assert "interrupted" in workshop.messages[-1]


def test_a_gpu_that_fails_ends_it(workshop: Any) -> None:
    requested = problems("time_last:2,8,512:float32", "time_last:2,8,64:float32")
    tuner = workshop.tuner()

    def failing(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access\nand more")

    tuner.done = lambda: setattr(engine.accuracy, "start", failing)  # the fixture restores it
    tuner.tune(requested)
    assert [item.posed for item in tuner.tuned] == requested[:1]
    assert tuner.left_out == requested[1:]
    assert (
        "the GPU failed; what was measured is kept: CUDA error: an illegal" in workshop.messages[-1]
    )


def test_a_problem_too_large_for_the_memory_is_left_out(
    workshop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = problems("time_last:2,8,512:float32", "time_last:2,8,64:float32")
    tensors = Posed.tensors

    def full(self: Posed, device: Any) -> Any:
        if self == requested[0]:
            raise torch.OutOfMemoryError("out of memory")
        return tensors(self, device)

    monkeypatch.setattr(Posed, "tensors", full)
    tuner = workshop.tuner()
    tuner.tune(requested)
    assert tuner.left_out == requested[:1]
    assert [item.posed for item in tuner.tuned] == requested[1:]


def test_binaries_of_a_label_are_all_that_it_stands_for(workshop: Any) -> None:
    (problem,) = problems(languages=("triton",))
    tuner = workshop.tuner()
    tuner.tune([problem])
    label = tuner.tuned[0].best
    binaries = tuner.binaries({problem.kernel.head: [label]})
    assert [dict(binary.variant.statics)["reverse"] for binary, _ in binaries] == [0, 1]
    assert {problem.kernel.label(binary.variant) for binary, _ in binaries} == {label}
    assert tuner.binaries({}) == []


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 8e-3), ("float32", 1e-6)])
def test_a_sum_without_some_of_its_terms_differs(dtype: str, tolerance: float) -> None:
    """However many terms there are: partial sums are float32 for every dtype, and another order of the terms is no difference."""
    torch.manual_seed(0)
    terms = torch.randn(1 << 16, 8)
    exact = {"gates_grad": terms.double().sum(0).float()}
    count = {"gates_grad": len(terms)}

    def is_refused(sums: torch.Tensor) -> bool:
        return engine._difference({"gates_grad": sums}, exact, tolerance, count) is not None

    assert not is_refused(terms.cumsum(0)[-1])
    assert not is_refused(terms.flip(0).cumsum(0)[-1])
    total = exact["gates_grad"]
    for wrong in (total - terms[-1024:].sum(0), total + terms[:1024].sum(0), 0 * total, -total):
        assert is_refused(wrong), dtype
