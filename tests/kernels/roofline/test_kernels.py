"""The roofline family: what it moves, how it is cut, and that its sources compile."""

from __future__ import annotations

import re

import pytest
import torch

from scan_registry.aot.compile import compile_variant
from scan_registry.hardware.target import Target
from scan_registry.kernels import operators
from scan_registry.kernels.roofline import cases, reference
from scan_registry.kernels.roofline.spec import FAMILY, PATTERNS, RooflineProblem
from scan_registry.runtime import jit

(KERNEL,) = FAMILY.kernels


def test_it_is_behind_no_operator() -> None:
    assert FAMILY.name not in operators()
    assert FAMILY.samples == ()


@pytest.mark.parametrize(("reads", "writes"), PATTERNS)
def test_a_pattern_has_variants_of_its_own(reads: int, writes: int) -> None:
    problem = RooflineProblem(reads, writes, 4096)
    taken = [v for v in KERNEL.variants if KERNEL.rules.accepts(v, problem) is None]
    assert len(taken) == len(KERNEL.variants) // len(PATTERNS) > 1
    for variant in taken:
        assert (variant.number("reads"), variant.number("writes")) == (reads, writes)
    other = next(v for v in KERNEL.variants if v not in taken)
    assert "it reads" in (KERNEL.rules.accepts(other, problem) or "")


@pytest.mark.parametrize("count", [*cases.QUICK, *cases.THOROUGH])
def test_blocks_cover_the_tensors_and_none_is_idle(count: int) -> None:
    for variant in KERNEL.variants:
        launch = KERNEL.launch(variant, RooflineProblem(1, 1, count), 132)
        share = 4 * 32 * KERNEL.code.warps(variant) * variant.number("unroll")
        (blocks, *others), scalars = launch.grid, launch.scalars
        assert others == [1, 1]
        assert scalars == {"count": count}
        assert (blocks - 1) * share < count <= blocks * share


def test_a_case_knows_right_from_wrong() -> None:
    for trial in cases.trials("float32", cases.QUICK, "cpu"):
        case = trial.case("stream", aligned=True)
        assert case.error() == float("inf")  # nothing has been written
        found = reference.forward(trial.inputs)
        for name, out in zip(case.problem.outputs, found, strict=False):
            tensor = case.tensors[name]
            assert tensor is not None
            tensor.copy_(out)
        assert case.error() <= cases.TOLERANCE["float32"]
        last = case.tensors[case.problem.outputs[-1]]
        assert last is not None
        last[-1] += 100
        assert case.error() > cases.TOLERANCE["float32"]
        assert set(case.tensors) <= set(KERNEL.pointers)


def test_the_reference() -> None:
    a, b, c = (torch.tensor([float(n), 2.0]) for n in range(3))
    total, copy = reference.forward([a, b, c])
    assert total.tolist() == [3.0, 6.0]
    assert copy.tolist() == a.tolist()
    assert copy.data_ptr() != a.data_ptr()


@pytest.mark.skipif(isinstance(jit.toolchains()["cuda"], str), reason="NVRTC is not installed")
@pytest.mark.parametrize("arch", ["sm80", "sm90", "ptx80"])
def test_it_compiles_and_keeps_its_loads_in_registers(arch: str) -> None:
    for variant in KERNEL.variants:
        binary, content = compile_variant(variant, Target.parse(arch))
        assert not binary.spill_bytes
        if arch == "ptx80":
            vectors = re.findall(rb"ld\.global\.L2::cache_hint\.v4", content)
            assert len(vectors) == variant.number("reads") * variant.number("unroll")
