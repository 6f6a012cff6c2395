"""The forward pass whose warps take turns over time: in an emulator of the GPU, and for which problems it is chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from posing import best

from scan_registry.hardware.target import Target
from scan_registry.kernels.cases import relative_error, there
from scan_registry.kernels.model import Variant
from scan_registry.kernels.selective_scan import cases
from scan_registry.kernels.selective_scan.op.bench import FURTHER, MAMBA_SSM, Case
from scan_registry.kernels.selective_scan.op.operator import OPERATOR
from scan_registry.kernels.selective_scan.op.problems import parts_of
from scan_registry.kernels.selective_scan.problem import INTERVAL, SelectiveScanProblem
from scan_registry.kernels.selective_scan.spec import FAMILY

KERNEL = FAMILY.kernel("forward", "cuda")


def takes_turns(variant: Variant) -> bool:
    return "turns" in dict(variant.statics)


VARIANTS = [variant for variant in KERNEL.variants if takes_turns(variant)]


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("states", [16, 11])
def test_turns_hand_states_on_over_tiles_and_parts(
    variant: Variant, states: int, cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    """In whatever order threads run, and with a last tile of which not every warp has a turn."""
    dtype = variant.text("dtype")
    time = 2 * variant.number("times") + 40
    library = cuda_emulator.emulated(KERNEL, variant, tmp_path)
    torch.manual_seed(0)
    for setting in (cases.Setting(starts=True), cases.Setting(gated=False, softplus=False)):
        trial = cases.draw((2, 12, time, states), setting, dtype, "cpu")
        kept = there(trial.inputs["checkpoints"])
        for parts in (1, cases.PARTS):
            case = trial.case("forward", aligned=True, parts=parts)
            assert KERNEL.rules.accepts(variant, case.problem) is None
            for seed in range(2):
                library.run(case.problem, case.tensors, seed=seed)
                assert case.error() <= cases.TOLERANCE[dtype]
                written = there(case.tensors["checkpoints"])[:, : -(-time // INTERVAL)]
                error = relative_error(written, kept[:, : written.shape[1]].double())
                assert error <= cases.TOLERANCE["float32" if dtype == "float32" else "float16"]


def posed(text: str) -> SelectiveScanProblem:
    problem: Any = OPERATOR.posed(Case.parse(text), "forward")[0]
    assert isinstance(problem, SelectiveScanProblem)
    return problem


FEW_ROWS = (
    "time_last:2,1536,2048,16:bfloat16",
    "time_last:1,5120,32768,16:bfloat16",
    "time_last:16,384,3136,16:float16",
    "time_last:4,1536,1000,16:float32",
)


@pytest.mark.parametrize("text", [*MAMBA_SSM, *FURTHER])
def test_warps_take_turns_where_rows_are_few(text: str) -> None:
    assert takes_turns(best(KERNEL, posed(text))) == (text in FEW_ROWS)


@pytest.mark.parametrize(
    "change",
    [
        {"layout": "channel_last"},
        {"aligned": False},
        {"whole": (True, False)},
        {"states": 17},
        {"sequences": 2},
        {"time": 512},
        {"batch": 1},
    ],
    ids=str,
)
def test_warps_take_no_turns_where_they_cannot_or_would_be_slower(change: dict[str, Any]) -> None:
    problem = posed(FEW_ROWS[0])
    assert problem.takes_turns
    changed = replace(problem, **change)
    assert not changed.takes_turns
    assert not takes_turns(best(KERNEL, changed))


@pytest.mark.parametrize(
    ("arch", "served"), [("sm_90", True), ("compute_80", False), ("sm_100", False)]
)
def test_only_sm90_has_kernels_whose_warps_take_turns(arch: str, served: bool) -> None:
    for variant in VARIANTS:
        assert KERNEL.rules.serves(variant.statics, Target.parse(arch)) == served


@pytest.mark.parametrize(("capability", "cut"), [((9, 0), False), ((8, 0), True)])
def test_sequences_are_not_cut_where_warps_take_turns(
    capability: tuple[int, int], cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    major, minor = capability
    properties = SimpleNamespace(multi_processor_count=132, major=major, minor=minor)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    parts = parts_of(posed(FEW_ROWS[0]), torch.device("cuda"))
    assert (parts > 1) == cut
