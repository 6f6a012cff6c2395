"""How the fused kernels of recurrent networks are tiled, and what a tiling is for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scan_registry.hardware.target import Target
from scan_registry.kernels.model import Kernel, Variant
from scan_registry.kernels.rnn import tilings
from scan_registry.kernels.rnn.problem import SIZES, RnnProblem
from scan_registry.kernels.rnn.spec import FAMILY
from scan_registry.kernels.rnn.tilings import Tiling

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


# --- Tilings ----------------------------------------------------------------------------------


def tiling_of(variant: Variant) -> Tiling:
    """Of a variant of a fused kernel."""
    pins = [value for _, value in variant.statics if isinstance(value, int)]
    gates = SIZES[variant.text("function")].recurrent  # type: ignore[index]
    item = 4 if variant.text("dtype") == "float32" else 2
    return Tiling(gates, item, variant.kernel.endswith("backward"), *pins)


@pytest.mark.parametrize("kernel", FUSED, ids=IDS)
def test_defaults_fit_every_gpu_that_has_their_instructions(kernel: Kernel) -> None:
    for variant in kernel.variants:
        gpu = tilings.LEAST
        if not kernel.rules.serves(variant.statics, Target((8, 0))):
            gpu = tilings.HOPPER
        elif not kernel.rules.serves(variant.statics, Target((8, 6))):
            gpu = tilings.Limits(shared_memory=int(Target((8, 0)).shared_memory))
        tiling = tiling_of(variant)
        assert all(getattr(tiling, name) in values for name, values in tilings.DOMAINS.items())
        assert tiling.fits(gpu), variant


@pytest.mark.parametrize("kernel", FUSED, ids=IDS)
def test_others_than_the_defaults_may_be_tried(kernel: Kernel) -> None:
    """Those that fit a GPU that has the most shared memory."""
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


def test_how_wide_a_head_may_be() -> None:
    kernel = FAMILY.kernel("sequence_forward", "cuda")
    found = {}
    for variant in kernel.variants:
        tiling = tiling_of(variant)
        kind = variant.text("function"), tiling.item
        for sm_count in (108, 132):
            most = min(tiling.row_units, tiling.units * (tiling.cluster or sm_count)) // 16 * 16
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
