"""``selective_scan`` as commands know it: what a call poses, and what runs on the CPU."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import posing
import pytest
import torch

import scan_registry
from scan_registry.kernels.selective_scan import cases
from scan_registry.kernels.selective_scan.op.bench import BENCHMARK, MAMBA_SSM, Case
from scan_registry.kernels.selective_scan.spec import FAMILY
from scan_registry.ops.operator import operators

OPERATOR = operators()["selective_scan"]


def described(dtype: str = "bfloat16", shape: tuple[int, ...] = (2, 64, 96), **given: Any) -> Any:
    options = {"shape": "?", "states": None, "groups": None, "channel_last": False, **given}
    args, kwargs, record = OPERATOR.parse(dtype, shape, Namespace(**options))
    return OPERATOR.describe(*args, **kwargs), record


def taken(call: Any) -> list[str]:
    """Kernels that accept the problem of a call."""
    return [*map(str, posing.taken(FAMILY.kernel(call.problem.kernel, "cuda"), call.problem))]


def test_a_call_poses_what_kernels_solve() -> None:
    calls, record = described(states=7, groups=2, channel_last=True)
    assert record == {"states": 7, "groups": 2, "channel_last": True}
    assert {"forward", "backward"} <= set(calls)
    for call in calls.values():
        assert (call.problem.layout, call.problem.states, call.problem.groups) == (
            "channel_last",
            7,
            2,
        )
        assert taken(call)
    (whole,) = described(shape=(1, 32, 16384))[0]["backward"].alternatives("auto")
    assert whole[0].parts > 1
    assert {"states", "adjoint"} <= set(described(shape=(1, 32, 16384))[0])


@pytest.mark.parametrize("dtype", ["complex64", "float64"])
def test_what_no_kernel_solves(dtype: str) -> None:
    calls, _ = described(dtype)
    assert calls["backward"].problem.dtype == dtype
    assert not any(map(taken, calls.values()))


def test_projections_that_do_not_change_with_time() -> None:
    u = torch.randn(1, 4, 6)
    call = u, u, -torch.rand(4, 3), torch.randn(4, 3), torch.randn(1, 3, 6)
    calls = OPERATOR.describe(*call)
    assert not taken(calls["forward"])
    assert scan_registry.explain(scan_registry.selective_scan, *call).runs


def test_nothing_is_posed_of_nothing() -> None:
    assert described(shape=(2, 64, 0))[0] == {}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shape": (2, 3)}, "takes batch, channels and time"),
        ({"states": 257}, "--states is 257; accepted are 1 to 256"),
        ({"groups": 3}, "--groups is 3; accepted are divisors of 64 channels"),
    ],
)
def test_options_that_cannot_be_meant(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        described(**changes)


@pytest.mark.parametrize("setting", cases.SETTINGS, ids=str)
def test_what_runs_on_the_cpu_is_what_kernels_compute(setting: cases.Setting) -> None:
    torch.manual_seed(0)
    trial = cases.draw((2, 6, 50, 3), setting, "float32", "cpu")
    for kernel in ("forward", "backward"):
        case = trial.case(kernel, aligned=False)
        OPERATOR.run_on_cpu(case.problem, case.tensors)
        assert case.error() <= cases.TOLERANCE["float32"]


@pytest.mark.parametrize(
    "text", ["time_last:1,40,4096,5:float32", "channel_last:2,8,33,16:float16:gate=none:groups=2"]
)
def test_tensors_to_time_kernels_on(text: str) -> None:
    for _, problem, tensors in posing.check_tensors_to_time(OPERATOR, BENCHMARK, FAMILY, text):
        assert tensors["u"].shape == (problem.batch, problem.channels, problem.time)


def test_cases() -> None:
    for text in MAMBA_SSM:
        assert str(BENCHMARK.parse(text)) == text
    assert Case.parse("channel_last:1,8,5,3:bf16:groups=2").groups == 2
    for text in (
        "time_last:1,8,5:float32",
        "time_last:1,8,5,3:float32:groups=3",
        "time_last:1,1,1,257:float32",
    ):
        with pytest.raises(ValueError, match=r"expected layout:batch,channels,time,states:dtype"):
            Case.parse(text)
    forward, backward = map(Case.parse("time_last:2,8,5,3:bf16").traffic, BENCHMARK.passes)
    assert (forward, backward) == (2 * (4 * 80 + 2 * 30), 2 * (7 * 80 + 4 * 30))
