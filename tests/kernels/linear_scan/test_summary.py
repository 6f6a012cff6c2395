"""The kernels that summarize scans, on the CPU, in an emulator of the GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch

from scan_registry.kernels.linear_scan import cases
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.model import Kernel, Variant

KERNELS = tuple(k for k in FAMILY.kernels if k.name.endswith("summary"))
BOTH = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
LASTING = cases.Setting(lasting=True)


def variant_of(kernel: Kernel, dtype: str, access: str) -> Variant:
    return next(
        variant
        for variant in kernel.variants
        if (variant.text("dtype"), variant.text("access")) == (dtype, access)
    )


@BOTH
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_line_is_cut_into_segments(
    kernel: Kernel, dtype: str, reverse: bool, cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    """Few lines are; their results do not depend on the order in which CTAs finish."""
    torch.manual_seed(0)
    variant = variant_of(kernel, dtype, "aligned")
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    trial = cases.draw((1, 16, 16384), replace(LASTING, reverse=reverse), dtype, "cpu")
    found = []
    for seed in range(3):
        case = trial.case(kernel.name, aligned=True)
        launch = kernel.launch(variant, case.problem, cuda_emulator.SM_COUNT)
        assert launch.scalars["segments"] > 1
        assert launch.workspace > 0
        library.run(case.problem, case.tensors, seed)
        assert case.error() <= cases.TOLERANCE["float32"]
        found.append([case.tensors[name] for name in cases.OUTPUTS["summary"]])
    for one, other in pairwise(found):
        assert all(map(torch.equal, one, other))


@BOTH
@pytest.mark.parametrize("access", ["aligned", "generic"])
def test_gates_of_zero_and_below(
    kernel: Kernel, access: str, cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    variant = variant_of(kernel, "float32", access)
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    trial = cases.draw((2, 16, 140), cases.Setting(), "float32", "cpu")
    case = trial.case(kernel.name, aligned=True)
    gates, tokens = case.tensors["gates"], case.tensors["tokens"]
    assert gates is not None
    assert tokens is not None
    gates.mul_(torch.randn_like(gates).sign())
    gates[..., 0, 70] = 0
    gates[..., 1, 139] = 0
    library.run(case.problem, case.tensors, 0)
    state, product = torch.zeros(2, 16).double(), torch.ones(2, 16).double()
    for gate, token in zip(
        gates[0].double().unbind(-1), tokens[0].double().unbind(-1), strict=True
    ):
        state, product = gate * state + token, gate * product
    found = [case.tensors[name] for name in cases.OUTPUTS["summary"]]
    for out, expected in zip(found, (product, state), strict=True):
        assert out is not None
        torch.testing.assert_close(out[0].double(), expected, rtol=1e-5, atol=1e-6)
        assert (out[0, :, 0] == 0).all() == (out is found[0])


@BOTH
def test_a_gate_of_zero_does_not_hide_an_infinite_state(
    kernel: Kernel, cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    """As in the recurrence: 0 · ∞ is no number."""
    variant = variant_of(kernel, "float32", "generic")
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    case = cases.draw((1, 2, 9), cases.Setting(), "float32", "cpu").case(kernel.name, aligned=True)
    gates, tokens = case.tensors["gates"], case.tensors["tokens"]
    assert gates is not None
    assert tokens is not None
    tokens[..., 0, 3], gates[..., 0, 4] = torch.inf, 0
    library.run(case.problem, case.tensors, 0)
    state = case.tensors["final_state"]
    assert state is not None
    assert state[0, 0].isnan().tolist() == [True, False]


def test_rows_that_start_anywhere_are_read_in_chunks(
    cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    kernel = FAMILY.kernel("time_last_summary", "cuda")
    variant = variant_of(kernel, "bfloat16", "aligned")
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    for seed, time in enumerate((1, 7, 8, 9, 263, 1031, 4099)):
        trial = cases.draw((1, 5, time), LASTING, "bfloat16", "cpu")
        case = trial.case(kernel.name, aligned=True)
        assert kernel.rules.accepts(variant, case.problem) is None
        library.run(case.problem, case.tensors, seed)
        assert case.error() <= 1e-5, time
        shifted = trial.case(
            kernel.name, aligned=False
        )  # off the 16-byte grid from the first row on
        assert kernel.rules.accepts(variant, shifted.problem)


@BOTH
def test_a_launch_covers_every_step_once(kernel: Kernel) -> None:
    for variant in kernel.variants:
        for shape in ((1, 1, 1), (1, 3, 100_003), (300, 70, 5), (8, 2560, 4096), (2, 16, 1 << 20)):
            batch, channels, time = shape
            problem = replace(
                next(s.problem for s in FAMILY.samples if s.problem.kernel == kernel.name),
                batch=batch,
                channels=channels,
                time=time,
            )
            scalars = kernel.launch(variant, problem, 132).scalars
            segment = scalars["share"] * scalars["shares"]
            assert segment * scalars["segments"] >= time > segment * (scalars["segments"] - 1)
