"""How the fused kernels of recurrent networks are tiled: constraints, and what they say of problems."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from scan_registry.hardware.target import Target
from scan_registry.kernels.model import Kernel, Variant
from scan_registry.kernels.rnn import solve, tilings
from scan_registry.kernels.rnn.constraints import Constraint, Name, first_broken
from scan_registry.kernels.rnn.problem import SIZES, RnnProblem
from scan_registry.kernels.rnn.spec import FAMILY

FUSED = [k for k in FAMILY.kernels if k.name.startswith("sequence") and k.language == "cuda"]
IDS = [kernel.name for kernel in FUSED]


def a_problem(kernel: Kernel, **changes: object) -> RnnProblem:
    """Of LSTM, in bfloat16, with one head of 768 units, as the samples have it but for ``changes``."""
    found = next(
        sample.problem
        for sample in FAMILY.samples
        if isinstance(sample.problem, RnnProblem)
        and (sample.problem.kernel, sample.problem.function) == (kernel.name, "lstm")
        and sample.dtype == "bfloat16"
    )
    return replace(found, **{"heads": 1, "dim": 768, **changes})  # type: ignore[arg-type]


def taken(kernel: Kernel, problem: RnnProblem, sm_count: int) -> list[Variant]:
    """The defaults that can solve a problem."""
    return [
        variant
        for variant in kernel.variants
        if kernel.rules.accepts(variant, problem) is None
        and kernel.rules.exceeds_residency(variant, problem, sm_count) is None
    ]


# --- Constraints ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("relation", "left", "right", "reason"),
    [
        ("<=", 3, 3, None),
        ("<=", 4, 3, "words: 4 > 3"),
        ("==", 3, 3, None),
        ("==", 4, 3, "words: 4 != 3"),
        ("divides", 4, 12, None),
        ("divides", 5, 12, "words: 5 does not divide 12"),
        ("divides", 0, 12, "words: 0 does not divide 12"),
    ],
)
def test_relations(relation: str, left: int, right: int, reason: str | None) -> None:
    constraint = Constraint("words", Name("left"), relation, right)  # type: ignore[arg-type]
    assert constraint.broken({"left": left}) == reason


def test_what_is_not_known_excludes_nothing() -> None:
    constraints = (Constraint("a", Name("a"), "<=", 1), Constraint("b", Name("b"), "<=", 1))
    assert first_broken(constraints, {"a": 1}) is None
    assert first_broken(constraints, {"b": 2}) == "b: 2 > 1"
    assert first_broken(constraints, {"a": 3, "b": 2}) == "a: 3 > 1"


# --- Tilings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", FUSED, ids=IDS)
def test_defaults_meet_the_constraints_of_every_gpu_that_has_their_instructions(
    kernel: Kernel,
) -> None:
    for variant in kernel.variants:
        pins = {k: v for k, v in variant.statics if isinstance(v, int)}
        function = variant.text("function")
        given = {
            "gates": SIZES[function].recurrent,  # type: ignore[index]
            "item": 4 if variant.text("dtype") == "float32" else 2,
            "backward": int(kernel.name.endswith("backward")),
            **tilings.LEAST,
        }
        if not kernel.rules.serves(variant.statics, Target((8, 0))):
            given |= tilings.HOPPER
        elif not kernel.rules.serves(variant.statics, Target((8, 6))):
            given["shared_memory"] = int(Target((8, 0)).shared_memory)
        assert all(value in tilings.DOMAINS[name] for name, value in pins.items())
        assert first_broken((*tilings.TILES, *tilings.RESIDENT), {**given, **pins}) is None, variant


@pytest.mark.parametrize("kernel", FUSED, ids=IDS)
def test_others_than_the_defaults_may_be_tried(kernel: Kernel) -> None:
    """Those that the constraints allow on a GPU that has the most shared memory."""
    head = str(kernel.variants[0]).split(",rows")[0]
    assert kernel.allows(
        Variant.parse(f"{head},rows=2,split=4,batches=1,chunks=2,layers=1,cluster=0")
    )
    assert not kernel.allows(
        Variant.parse(f"{head},rows=2,split=4,batches=1,chunks=16,layers=1,cluster=0")
    )


def test_the_ring_has_the_memory_that_it_takes() -> None:
    assert f"RING = {tilings.RING}," in (FAMILY.folder / "hidden_state_exchange.cuh").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize(("gates", "item", "backward"), [(3, 4, 1)])
def test_a_solver_finds_the_same(gates: int, item: int, backward: int) -> None:
    pytest.importorskip("ortools")
    given = {"gates": gates, "item": item, "backward": backward, **tilings.LEAST}
    for problem in ({}, {"dim": 768, "sm_count": 132}, {"dim": 40}):
        values = {**given, **problem}
        constraints = (*tilings.TILES, *tilings.PROBLEM, *tilings.RESIDENT)
        found = solve.solve(tilings.DOMAINS, constraints, values)
        assert found == list(tilings.enumerate_tilings(values))
        assert bool(found) == (problem != {"dim": 40})


def test_without_a_solver_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python.cp_model", None)
    with pytest.raises(solve.MissingSolverError, match=r"scan-registry\[tune\]"):
        solve.solve(tilings.DOMAINS, tilings.TILES, {})


def test_how_wide_a_head_may_be() -> None:
    kernel = FAMILY.kernel("sequence_forward", "cuda")
    found = {}
    for variant in kernel.variants:
        pins = {k: v for k, v in variant.statics if isinstance(v, int)}
        item = 4 if variant.text("dtype") == "float32" else 2
        kind = variant.text("function"), item
        for sm_count in (108, 132):
            given = {"item": item, "backward": 0, "sm_count": sm_count}
            most = tilings.most_units({**pins, **given})
            problem = a_problem(kernel, dim=most, function=kind[0], dtype=variant.text("dtype"))
            larger = replace(problem, dim=most + 16)
            assert kernel.rules.accepts(variant, problem) is None
            assert kernel.rules.exceeds_residency(variant, problem, sm_count) is None
            assert kernel.rules.accepts(variant, larger) or kernel.rules.exceeds_residency(
                variant, larger, sm_count
            )
            if sm_count == 132:
                found[kind] = max(most, found.get(kind, 0))
    assert found == {
        ("lstm", 2): 1536,
        ("lstm", 4): 768,
        ("gru", 2): 1792,
        ("gru", 4): 896,
        ("elman", 2): 2048,
        ("elman", 4): 2112,
        ("slstm", 2): 1280,
        ("slstm", 4): 640,
    }


def best(kernel: Kernel, problem: RnnProblem) -> Variant:
    """What is taken without tables."""
    return min(taken(kernel, problem, 132), key=lambda v: kernel.cost(v, problem))


@pytest.mark.parametrize("kernel", FUSED, ids=IDS)
def test_a_launch_never_has_more_blocks_than_run_at_once(kernel: Kernel) -> None:
    problem = a_problem(kernel, dim=768, heads=3, batch=65)
    for sm_count in (48, 56, 108, 132, 148):
        for variant in taken(kernel, problem, sm_count):
            (blocks, *_), members = kernel.launch(variant, problem, sm_count).grid, 48
            assert blocks <= sm_count
            assert blocks == sm_count // members * members


@pytest.mark.parametrize("kernel", FUSED, ids=IDS)
def test_what_does_not_fit_says_why(kernel: Kernel) -> None:
    variant = kernel.variants[1]
    assert variant.number("rows") == 1

    def reason(**changes: object) -> str:
        return kernel.rules.accepts(variant, a_problem(kernel, **changes)) or ""

    assert reason() == ""
    most = 1536 if kernel.name.endswith("forward") else 1280
    assert f"{most + 16} > {most}" in reason(dim=most + 16)
    assert "16 does not divide 100" in reason(dim=100)
    assert reason(dtype="float16") == "dtype bfloat16, not float16"
    assert reason(function="gru") == "function lstm, not gru"
    assert "it takes 16" in reason(alignment=8)
    assert kernel.rules.exceeds_residency(variant, a_problem(kernel), 48) is None
    assert "48 > 47" in (kernel.rules.exceeds_residency(variant, a_problem(kernel), 47) or "")


@pytest.mark.parametrize("kernel", FAMILY.kernels, ids=[k.head for k in FAMILY.kernels])
def test_launches_have_the_kernels_scalars(kernel: Kernel) -> None:
    names = {parameter.name for parameter in kernel.parameters if parameter.kind == "i64"}
    problem = a_problem(kernel, dim=64)
    taken_by = [v for v in kernel.variants if kernel.rules.accepts(v, problem) is None]
    assert taken_by
    for variant in taken_by:
        assert kernel.launch(variant, problem, 132).scalars.keys() == names


def test_triton_takes_small_heads_in_whole_words() -> None:
    kernel = FAMILY.kernel("sequence_forward", "triton")
    (variant,) = [
        v for v in kernel.variants if (v.text("dtype"), v.text("function")) == ("bfloat16", "lstm")
    ]
    problem = a_problem(kernel, dim=64, batch=33, heads=3)
    assert kernel.rules.accepts(variant, problem) is None
    assert kernel.launch(variant, problem, 132).grid == (9, 1, 1)
    assert "80 > 64" in (kernel.rules.accepts(variant, replace(problem, dim=80)) or "")
    odd = replace(problem, strides=(*problem.strides[:-1], problem.strides[-1] + 8))
    assert "multiples of 16" in (kernel.rules.accepts(variant, odd) or "")
    assert "multiples of 16" in (kernel.rules.accepts(variant, replace(problem, dim=40)) or "")
