"""``gated_scan`` as commands know it: what a call poses, and what runs on the CPU."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from typing import Any

import posing
import pytest
import torch
from selecting import Describe

import scan_registry
from scan_registry.cli import main
from scan_registry.diagnostics.explanation import explain_for
from scan_registry.dispatch import policy
from scan_registry.dispatch.fit import Tier, Toolchain
from scan_registry.dispatch.select import System
from scan_registry.kernels.gated_scan import cases
from scan_registry.kernels.gated_scan.kinds import KINDS
from scan_registry.kernels.gated_scan.op.bench import (
    BASELINES,
    BENCHMARK,
    EAGER,
    SIZES,
    TIMED,
    Case,
    composed,
)
from scan_registry.kernels.gated_scan.spec import FAMILY
from scan_registry.kernels.linear_scan.problem import LinearScanProblem
from scan_registry.ops.benchmark import Timing
from scan_registry.ops.operator import operators

OPERATOR = operators()["gated_scan"]
CPU = torch.device("cpu")


def described(dtype: str = "bfloat16", shape: tuple[int, ...] = (2, 64, 96), **given: Any) -> Any:
    usual = {"kind": None, "channel_last": False, "reset": False, "reverse": False}
    args, kwargs, record = OPERATOR.parse(dtype, shape, Namespace(shape="?", **{**usual, **given}))
    return OPERATOR.describe(*args, **kwargs), record


def taken(call: Any) -> list[str]:
    """Kernels that accept the problem of a call."""
    return [*map(str, posing.taken(FAMILY.kernel(call.problem.kernel, "cuda"), call.problem))]


@pytest.mark.parametrize("kind", [*KINDS])
def test_a_call_poses_what_kernels_solve(kind: str) -> None:
    for turned in (False, True):
        calls, record = described(kind=kind, channel_last=turned, reset=True, reverse=True)
        assert record == {"kind": kind, "channel_last": turned, "reset": True, "reverse": True}
        assert [*calls] == ["forward", "backward"]
        for call in calls.values():
            assert call.problem.layout == ("channel_last" if turned else "time_last")
            assert (call.problem.resets, call.problem.reverse) == (True, True)
            assert call.copied == ()
            assert any("access=aligned" in each for each in taken(call))


def test_inputs_that_lie_otherwise_are_copied() -> None:
    gate = torch.empty(2, 64, 96, device="meta")
    hidden = torch.empty(2, 96, 64, device="meta").transpose(1, 2)
    calls = OPERATOR.describe("min_gru", gate, hidden)
    assert calls["forward"].copied == ("input1",)
    assert calls["forward"].alternatives("auto")[0][1] == "auto"


def test_what_no_kernel_solves() -> None:
    calls, _ = described("float64")
    assert calls["backward"].problem.dtype == "float64"
    assert not any(map(taken, calls.values()))


def test_a_linear_scan_without_resets_is_another_operators() -> None:
    calls, _ = described(kind="linear")
    assert [*calls] == ["forward", "backward"]
    for call in calls.values():
        assert OPERATOR.family_of(call) == "linear_scan"
        assert type(call.problem) is LinearScanProblem
    x = torch.rand(1, 4, 6)
    found = scan_registry.explain(scan_registry.gated_scan, "linear", x, x)
    assert found.steps[0].decision.family.name == "linear_scan"
    again = scan_registry.explain(
        scan_registry.gated_scan, "linear", x, x, reset=torch.ones(1, 6) > 0
    )
    assert again.steps[0].decision.family.name == "gated_scan"


@pytest.mark.parametrize(
    ("kind", "reset"), [("min_gru", False), ("min_gru", True), ("linear", True)]
)
def test_where_linear_scan_stands_in(a_device: Describe, kind: str, reset: bool) -> None:
    """With Triton alone on a GPU that no archive is for, and if Triton is asked for."""
    triton = System(a_device(), (), {"triton": Toolchain("triton 3.6.0", (12, 9))})
    x = torch.empty(2, 64, 96, dtype=torch.bfloat16, device="meta", requires_grad=True)
    marks = torch.empty(2, 96, dtype=torch.bool, device="meta") if reset else None
    scans = ["forward, linear_scan", "backward, linear_scan"]
    found = explain_for(triton, "gated_scan", kind, x, x, reset=marks)
    own = [step for step in found.steps if step.name not in scans]
    assert [step.name for step in found.steps] == ["forward", scans[0], "backward", scans[1]]
    for step in own:
        assert step.decision.winner is not None
        assert step.decision.winner.tier is Tier.REFERENCE
        assert "gates and tokens by torch's operators, then linear_scan" in step.text()
    for there in (triton, replace(triton, toolchains=None)):
        found = explain_for(there, "gated_scan", kind, x, x, reset=marks, backend="triton")
        assert [step.name for step in found.steps] == scans
        assert found.runs == (there is triton)
        for step in found.steps:
            assert step.decision.family.name == "linear_scan"
            assert step.decision.problem.dtype == "float32"
    with policy.require("jit"):
        found = explain_for(triton, "gated_scan", kind, x, x, reset=marks)
    assert [step.name for step in found.steps] == ["forward", "backward"]
    assert not found.runs


def test_nothing_is_posed_of_nothing() -> None:
    assert described(shape=(2, 64, 0))[0] == {}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shape": (2, 3)}, "takes batch, channels and time"),
        ({"kind": "gru"}, "--kind is 'gru'; accepted are linear, min_gru"),
    ],
)
def test_options_that_cannot_be_meant(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        described(**changes)


def test_explain_takes_the_function() -> None:
    x, forget = (torch.randn(1, 4, 6, requires_grad=True) for _ in range(2))
    found = scan_registry.explain(
        scan_registry.gated_scan, "hgrn", x, forget, torch.rand(4), reset=torch.ones(1, 6) > 0
    )
    assert found.runs
    assert "kind='hgrn'" in json.dumps(found.to_json())
    with pytest.raises(ValueError, match="kind is 'gru'"):
        scan_registry.explain(scan_registry.gated_scan, "gru", x, forget)


def test_explain_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "explain",
        "gated_scan",
        "--dtype",
        "bf16",
        "--shape",
        "8,2560,4096",
        "--kind",
        "rg_lru",
    ]
    assert main([*words, "--channel-last", "--reset", "--arch", "sm_90", "--json"]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert found["call"]["kind"] == "rg_lru"
    assert [step["kernel"] for step in found["steps"]] == [
        "channel_last_forward",
        "channel_last_backward",
    ]


@pytest.mark.parametrize("kind", [*KINDS])
@pytest.mark.parametrize("setting", cases.SETTINGS, ids=str)
def test_what_runs_on_the_cpu_is_what_kernels_compute(kind: str, setting: cases.Setting) -> None:
    torch.manual_seed(0)
    trial = cases.draw((2, 6, 50), kind, setting, "float32", "cpu")
    for kernel in dict.fromkeys(each.name for each in FAMILY.kernels):
        for case in trial.launches(kernel):
            OPERATOR.run_on_cpu(case.problem, case.tensors)
            assert case.error() <= cases.TOLERANCE["float32"]


def test_every_sample_is_solved_by_a_kernel() -> None:
    """By one of its access, and of its kind alone."""
    for sample in FAMILY.samples:
        kernel = FAMILY.kernel(sample.problem.kernel, "cuda")
        assert posing.best(kernel, sample.problem).text("access") == sample.access
        fitting = posing.taken(kernel, sample.problem)
        assert {v.text("kind") for v in fitting} == {sample.problem.kind}
    assert {sample.problem.kind for sample in FAMILY.samples} == {k.source for k in KINDS.values()}


@pytest.mark.parametrize(
    "text", ["rg_lru:time_last:1,40,512:float32", "hgrn:channel_last:2,8,33:fp16"]
)
def test_tensors_to_time_kernels_on(text: str) -> None:
    posed = posing.check_tensors_to_time(OPERATOR, BENCHMARK, FAMILY, text)
    assert [direction for direction, *_ in posed] == [*BENCHMARK.passes]
    for direction, problem, tensors in posed:
        assert problem.direction == direction
        assert {*tensors} <= {*FAMILY.kernel(problem.kernel, "cuda").pointers}
        assert tensors["input0"].shape == (problem.batch, problem.channels, problem.time)


def test_cases() -> None:
    usual = BENCHMARK.cases(Namespace(case=[], kind=[]), "cuda")
    assert len(usual) == len(TIMED) * 2 * len(SIZES) * 2
    for case in usual:
        assert BENCHMARK.parse(str(case)) == case
    some = BENCHMARK.cases(Namespace(case=[], kind=["rg_lru"]), "cuda")
    assert {case.kind for case in some} == {"rg_lru"}
    with pytest.raises(ValueError, match="--kind is 'linear'"):
        BENCHMARK.cases(Namespace(case=[], kind=["linear"]), "cuda")
    (option,) = BENCHMARK.options
    assert all(kind in option.settings["help"] for kind in KINDS if kind != "linear")
    for text in ("linear:time_last:1,8,5:float32", "hgrn:rows:1,8,5:float32", "hgrn:1,8,5:float32"):
        with pytest.raises(ValueError, match="expected kind:layout:batch,channels,time:dtype"):
            Case.parse(text)


@pytest.mark.parametrize("layout", ["time_last", "channel_last"])
@pytest.mark.parametrize("kind", TIMED)
def test_baselines_compute_the_same(kind: str, layout: str) -> None:
    case = Case.parse(f"{kind}:{layout}:2,6,20:float32")
    tensors = [case.contiguous("cpu") for _ in KINDS[kind].inputs] + case.parameters("cpu")
    expected = scan_registry.gated_scan(kind, *tensors, dim=case.dim)
    torch.testing.assert_close(composed(case)(*tensors), expected)
    for direction in BENCHMARK.passes:
        make = EAGER.kernel_call(case, direction, CPU)
        assert make is not None
        call = make()
        for _ in range(2):  # again and again
            made = call()
        assert len(made) == (2 if direction == "forward" else len(tensors))
    for baseline in BASELINES:
        refused = (kind, layout) != ("hgrn", "channel_last")
        assert (baseline.refusal(case) is not None) == refused


def test_targets() -> None:
    case = Case.parse(f"min_gru:channel_last:{SIZES[0]}:bf16")
    for direction, least in zip(BENCHMARK.passes, (0.80, 0.75), strict=True):
        ours = Timing(case, direction, "scan-registry cuda", 1.0, 0.1, 0.8)
        assert BENCHMARK.target_ms(ours, "cuda") == pytest.approx(0.8 / least)
        theirs = Timing(case, direction, EAGER.name, 1.0, 0.1, 0.8)
        assert BENCHMARK.target_ms(theirs, "cuda") is None
        assert BENCHMARK.target_ms(ours, "cpu") is None
