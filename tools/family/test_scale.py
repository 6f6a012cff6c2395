"""The family scale: its reference, its cases, its sources and its function."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from scan_registry import explain
from scan_registry.aot.compile import compile_variant
from scan_registry.hardware.target import Target
from scan_registry.kernels.model import Variant
from scan_registry.kernels.scale import cases, reference
from scan_registry.kernels.scale.op.function import scale
from scan_registry.kernels.scale.spec import FAMILY, ScaleProblem
from scan_registry.runtime import jit

(KERNEL,) = FAMILY.kernels


@pytest.mark.parametrize("size", [*cases.QUICK, *cases.THOROUGH])
def test_blocks_cover_the_tensor_and_none_is_idle(size: int) -> None:
    for variant in KERNEL.variants:
        launch = KERNEL.launch(variant, ScaleProblem("float32", size, 3), 132)
        share = variant.number("threads")
        assert (launch.grid[0] - 1) * share < size <= launch.grid[0] * share


def test_a_case_knows_right_from_wrong() -> None:
    for trial in cases.trials("float32", cases.QUICK, "cpu"):
        case = trial.case("scale", aligned=True)
        assert case.error() == float("inf")  # nothing has been written
        y = case.tensors["y"]
        assert y is not None
        y.copy_(reference.forward(trial.x, 3))
        assert case.error() <= cases.TOLERANCE["float32"]
        y[-1] += 1
        assert case.error() > cases.TOLERANCE["float32"]


@pytest.mark.parametrize("variant", KERNEL.variants, ids=str)
def test_the_kernel_matches_the_reference(
    variant: Variant, cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    """scale.cu, compiled for the CPU: its blocks and threads run in an order that the seed decides."""
    library = cuda_emulator.emulated(KERNEL, variant, tmp_path)
    for seed, trial in enumerate(cases.trials("float32", (*cases.QUICK, 257), "cpu")):
        for case in trial.launches(KERNEL.name):
            library.run(case.problem, case.tensors, seed)
            assert case.error() <= cases.TOLERANCE["float32"], str(trial)


@pytest.mark.skipif(isinstance(jit.toolchains()["cuda"], str), reason="NVRTC is not installed")
@pytest.mark.parametrize("arch", ["sm80", "sm90", "ptx80"])
def test_it_compiles_without_spills(arch: str) -> None:
    for variant in KERNEL.variants:
        binary, _ = compile_variant(variant, Target.parse(arch))
        assert not binary.spill_bytes


def test_the_function_on_the_cpu() -> None:
    x = torch.randn(3, 5)
    torch.testing.assert_close(scale(x, 4), reference.forward(x, 4))
    torch.testing.assert_close(scale(x.mT), reference.forward(x.mT, 2))
    with pytest.raises(TypeError, match="float64"):
        scale(x.double())
    with pytest.raises(TypeError, match="factor"):
        scale(x, 0.5)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="derivative"):
        scale(x.requires_grad_())


@pytest.mark.gpu
def test_the_function_on_a_gpu() -> None:
    x = torch.randn(1000, 3, device="cuda")
    expected = reference.forward(x.double(), 4).float()
    torch.testing.assert_close(scale(x, 4), expected, rtol=cases.TOLERANCE["float32"], atol=0)


def test_explain_knows_it() -> None:
    assert explain(scale, torch.zeros(8)).operator == "scale"
