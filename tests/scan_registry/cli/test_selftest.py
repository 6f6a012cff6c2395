"""``scan-registry selftest`` on the CPU: which rows it prints, and what it refuses."""

from __future__ import annotations

import re
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import pytest
import torch

from scan_registry.cli import main
from scan_registry.cli import selftest as command
from scan_registry.diagnostics.accuracy import cases_of
from scan_registry.hardware.target import Target
from scan_registry.kernels import families
from scan_registry.kernels.linear_scan.cases import TOLERANCE
from scan_registry.kernels.rnn.cases import TOLERANCE as RNN_TOLERANCE

Capture = pytest.CaptureFixture[str]


@dataclass
class Whole:
    """A self-test of everything: its status, what it printed, and the results behind that."""

    status: int
    printed: str
    results: list[command.Result]
    skipped: dict[str, str]


@pytest.fixture(scope="module")
def whole(pytestconfig: pytest.Config) -> Whole:
    """On problems of all sizes only where all is to be run."""
    results, skipped = list[command.Result](), dict[str, str]()
    original = command._print

    def noted(result: list[command.Result], where: str, left_out: dict[str, str]) -> None:
        results.extend(result)
        skipped.update(left_out)
        original(result, where, left_out)

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        patch.setattr(command, "_print", noted)
        if not pytestconfig.getoption("--thorough"):
            patch.setattr(command, "_MOST_ON_CPU", 8000)
        status = main(["selftest", "--device", "cpu"])
    return Whole(status, printed.getvalue(), results, skipped)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_each_dtype(dtype: str, whole: Whole) -> None:
    """Each passes on the CPU, in every family that has it."""
    assert whole.status == 0
    results = [result for result in whole.results if result.dtype == dtype]
    assert all(result.passed for result in results)
    kernels = [(result.family, result.kernel) for result in results]
    assert len(kernels) == len(set(kernels))
    assert len([1 for family, _ in kernels if family == "linear_scan"]) == 8
    assert all(result.cases > 0 for result in results)
    # A family either runs or is among what was skipped.
    ran = {family for family, _ in kernels}
    assert {result.family for result in whole.results} | {*whole.skipped} >= set(families())
    assert ("rnn" in ran) == (dtype in RNN_TOLERANCE)
    by_torch = {result.family for result in results if result.language == "torch"}
    assert by_torch == ran & {"selective_state_update", "ssd_scan"}
    assert whole.skipped["roofline"] == "no function calls it; its kernels are for GPUs"


@pytest.mark.slow
def test_all_of_it_is_short(whole: Whole) -> None:
    """The 1,556 cases of today take ten seconds of one core."""
    assert sum(result.cases for result in whole.results) < 2_300
    assert re.fullmatch(r"\d+ passed, 0 failed, \d+ skipped", whole.printed.splitlines()[-1])
    assert "skipped: rnn.step_forward, rnn.step_backward: on the CPU no call" in whole.printed


def test_calls_have_all_threads_and_the_reference_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of a reference of small steps wait for one another, on a busy machine for a minute."""
    seen: dict[str, set[int]] = {"drawn": set(), "called": set()}

    class Operator:
        def run_on_cpu(self, problem: object, tensors: object) -> None:
            seen["called"].add(torch.get_num_threads())
            raise RuntimeError("no call is made")

    def drawn(*inputs: Any, **options: Any) -> Any:
        seen["drawn"].add(torch.get_num_threads())
        return draw(*inputs, **options)

    cases = cases_of("linear_scan")
    draw = cases.draw
    monkeypatch.setattr(cases, "draw", drawn)
    monkeypatch.setattr(command, "operators", lambda: {"linear_scan": Operator()})
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(RuntimeError, match="no call is made"):
            [*command._on_cpu(families()["linear_scan"], "float32", {}, lambda text: None)]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == {"drawn": {1}, "called": {3}}


def test_what_it_is_doing_is_told() -> None:
    messages: list[str] = []
    cpu = torch.device("cpu")
    for _ in command.selftest(cpu, "float64", {}, messages.append):
        break
    place = 1 + list(families()).index("linear_scan")
    assert messages[-1] == f"selftest: linear_scan, family {place} of {len(families())}, float64"


def test_it_may_be_of_one_family(capsys: Capture) -> None:
    assert main(["selftest", "--device", "cpu", "--family", "roofline"]) == 1  # nothing runs
    printed = capsys.readouterr().out
    assert "only roofline was asked for" in printed
    assert "roofline: no function calls it" in printed


def test_what_wheels_do_not_hold_is_skipped() -> None:
    family, skipped = families()["gated_scan"], dict[str, str]()
    target = Target.parse("sm_90")
    result = [
        in_wheel.language for in_wheel in command.in_wheels(family, "bfloat16", target, skipped)
    ]
    assert result == ["cuda"] * 4
    assert not skipped
    assert not [*command.in_wheels(family, "float16", target, skipped)]
    assert len(skipped) == len(family.kernels)
    assert [*command.in_wheels(family, "float64", target, skipped)] == []
    assert len(skipped) == len(family.kernels)


def test_an_error_beyond_its_tolerance(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TOLERANCE, "float32", 1e-12)
    monkeypatch.setattr(command, "_MOST_ON_CPU", 8000)
    assert main(["selftest", "--device", "cpu", "--dtype", "float32"]) == 1
    printed = capsys.readouterr().out
    assert "failed" in printed
    assert " failed, " in printed


@pytest.mark.parametrize(
    ("words", "named"),
    [(["--dtype", "int8"], "int8"), (["--device", "tpu"], "tpu"), (["--device", "cuda:99"], "99")],
)
def test_what_it_refuses(words: list[str], named: str, capsys: Capture) -> None:
    assert main(["selftest", *words]) == 2
    printed = capsys.readouterr().err
    assert named in printed
    assert "accepted" in printed


def test_rows_pass_or_say_why_not() -> None:
    row = {"family": "f", "kernel": "k", "language": "cuda", "dtype": "float32", "tier": "exact"}
    whole = {**row, "variants": (), "cases": 1, "error": 1e-7, "tolerance": 1e-6}
    assert command.Result(**whole).passed
    assert not command.Result(**{**whole, "error": 1e-5}).passed
    assert not command.Result(**{**whole, "error": float("nan")}).passed
    assert not command.Result(**{**whole, "error": None, "failure": "no kernel"}).passed


@pytest.mark.parametrize("family", families())
def test_on_a_gpu_a_kernel_gets_only_problems_that_launch_it(family: str) -> None:
    """Every problem that ``selftest`` poses to a kernel on a GPU, in one dtype and the smallest shape, has blocks to launch."""
    cases, group = cases_of(family), families()[family]
    built = {variant.text("dtype") for variant in group.variants()}
    dtype = next(name for name in ("float32", *cases.TOLERANCE) if name in built)
    (trial, *_) = cases.trials(dtype, cases.QUICK[:1], "cpu")
    posed = 0
    for kernel in group.kernels:
        for case in trial.launches(kernel.name):
            for variant in kernel.variants:
                if kernel.rules.accepts(variant, case.problem) is None:
                    assert min(kernel.launch(variant, case.problem, 132).grid) > 0, case.problem
                    posed += 1
    assert posed


@pytest.mark.parametrize("words", [["selftest"], ["bench", "linear_scan"]])
def test_without_torch_one_line_says_so(
    words: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where JAX alone is installed."""
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(words) == 2
    assert re.fullmatch(
        r"scan-registry: error: this command needs torch, .*; `pip install torch`\n",
        capsys.readouterr().err,
    )
