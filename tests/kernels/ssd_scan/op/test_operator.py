"""``ssd_scan`` as commands know it."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from scan_registry.diagnostics.explanation import explain_for
from scan_registry.dispatch.candidates import System
from scan_registry.hardware.device import Device, described
from scan_registry.kernels.ssd_scan import cases
from scan_registry.kernels.ssd_scan.op import problems
from scan_registry.kernels.ssd_scan.op.arguments import normalised
from scan_registry.kernels.ssd_scan.op.bench import BENCHMARK, ON_CPU, USUAL, Case
from scan_registry.kernels.ssd_scan.op.operator import OPERATOR
from scan_registry.kernels.ssd_scan.problem import SSDScanProblem, float_bits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("setting", cases.SETTINGS, ids=str)
def test_what_runs_on_the_cpu_is_what_kernels_compute(dtype: str, setting: cases.Setting) -> None:
    trial = cases.draw((2, 70, 4, 8, 8), setting, dtype, "cpu")
    for direction in ("forward", "backward"):
        for case in trial.launches(direction):
            OPERATOR.run_on_cpu(case.problem, case.tensors)
            assert case.error() < cases.TOLERANCE[dtype]


def test_a_described_call() -> None:
    options = Namespace(shape="", states=None, groups=4)
    call = OPERATOR.parse("bfloat16", (2, 300, 8, 64), options)
    parts = OPERATOR.describe(*call.args, **call.kwargs)
    assert [*parts] == ["forward", "states", "adjoint", "backward"]
    problem = parts["backward"].problem  # type: ignore[attr-defined]
    assert (problem.batch, problem.time, problem.heads, problem.groups) == (2, 300, 8, 4)
    assert (problem.head_size, problem.state_size, problem.slots) == (64, 128, 300 // 64 + 1)
    assert (problem.softplus, problem.wide_dt, problem.splits) == (True, False, 2)
    assert not any(part.copied for part in parts.values())
    with torch.no_grad():
        tensors = [None if t is None else t.detach() for t in call.args]
        assert [*OPERATOR.describe(*tensors, **call.kwargs)] == ["forward"]
    assert OPERATOR.describe(*(t if t is None or t.dim() == 1 else t[:0] for t in call.args)) == {}


@pytest.mark.parametrize(
    ("gpu", "block", "splits"),
    [
        (described((9, 0), sm_count=132), 128, 16),  # 4 · 132 CTAs, by 33 chunks
        (described((9, 0), sm_count=66), 128, 8),
        (
            described((8, 6), sm_count=84),
            64,
            11,
        ),  # 99 KB of shared memory have no room for 128 states
    ],
    ids=str,
)
def test_a_described_gpu_says_how_the_backward_pass_is_cut(
    gpu: Device, block: int, splits: int
) -> None:
    options = Namespace(shape="", states=None, groups=None)
    call = OPERATOR.parse("bfloat16", (1, 2048, 64, 64), options)
    steps = explain_for(System(gpu), "ssd_scan", *call.args, **call.kwargs).steps
    problem = steps[-1].decision.problem
    assert isinstance(problem, SSDScanProblem)
    assert (problem.direction, problem.block, problem.splits) == ("backward", block, splits)


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        ((2, 3, 4), {}, "batch, time, heads and size of a head, such as 8,2048,80,64"),
        ((2, 3, 4, 5), {"groups": 3}, "--groups is 3; accepted are divisors of 4 heads"),
        ((2, 3, 4, 5), {"states": 0}, "--states is 0"),
    ],
)
def test_calls_that_cannot_be_described(
    shape: tuple[int, ...], options: dict[str, int], words: str
) -> None:
    args = Namespace(**{"shape": "", "states": None, "groups": None, **options})
    with pytest.raises(ValueError, match=words):
        OPERATOR.parse("float32", shape, args)


def test_what_is_copied_before_kernels_read_it() -> None:
    x = torch.randn(2, 70, 4, 16, dtype=torch.float16)
    B = torch.randn(2, 70, 1, 16, dtype=torch.float16)
    strange = torch.randn(2, 70, 2, 24, dtype=torch.float16)[:, :, :1, 1:17]
    dt, A = torch.rand(2, 4, 70).mT, -torch.ones(4)
    nothing = (None,) * 4

    def describe(x: torch.Tensor, B: torch.Tensor, C: torch.Tensor, z: torch.Tensor | None = None) -> dict[str, problems.KernelCall]:  # fmt: skip
        arguments, options = normalised(x, dt, A, B, C, None, z, *nothing, False, (0.1, 1.5), None, False, "auto")  # fmt: skip
        return problems.describe(arguments, options, True)

    calls = describe(x, B, B)
    assert all(call.copied == () for call in calls.values())
    problem = calls["forward"].problem
    dense = (70 * 16, 16, 16)
    assert problem.strides == (70 * 64, 64, 16, 280, 1, 70, *dense, *dense, 0, 0, 0)
    assert (problem.scalars()["dt_low"], problem.scalars()["dt_high"]) == (0x3DCCCCCD, 0x3FC00000)
    calls = describe(x.mT.contiguous().mT, B, strange)
    assert [call.copied for call in calls.values()] == [("x", "C"), ("x",), ("C",), ("x", "C")]
    assert calls["forward"].problem.strides == problem.strides
    calls = describe(x, B, B, x.mT.contiguous().mT)
    assert [call.copied for call in calls.values()] == [("z",), (), (), ()]
    assert calls["forward"].problem.strides[-3:] == problem.strides[:3]


def test_bits_of_limits() -> None:
    infinite = 0x7F800000
    assert [float_bits(x) for x in (0.0, 1.0, float("inf"), 1e300)] == [0, 0x3F800000, infinite, infinite]  # fmt: skip


@pytest.mark.parametrize("text", [*USUAL, *ON_CPU])
def test_cases_print_as_they_are_parsed(text: str) -> None:
    assert str(Case.parse(text)) == text


def test_bytes_and_calls_of_a_case() -> None:
    case = Case.parse("dense:2,70,4,8,16:float32:groups=2")
    steps = 2 * 70
    assert case.traffic("forward") == 4 * steps * (2 * 32 + 2 * 2 * 16 + 4)
    assert case.traffic("backward") == 4 * steps * (3 * 32 + 4 * 2 * 16 + 2 * 4)
    device = torch.device("cpu")
    out = BENCHMARK.call(case, "forward", "auto", device)()
    assert out.shape == (2, 70, 4, 8)
    gradients = BENCHMARK.call(case, "backward", "auto", device)()
    assert [g is not None for g in gradients] == [True] * 6 + [False, True, False]
    with pytest.raises(ValueError, match="expected dense:batch,time,heads,size,states:dtype"):
        BENCHMARK.parse("dense:2,70,4,8:float32")
