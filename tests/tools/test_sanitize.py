"""``tools/sanitize.py``: its few problems reach every kernel of a wheel."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType

import pytest
from planned import jobs_of

from scan_registry.diagnostics.accuracy import cases_of
from scan_registry.hardware.target import Target
from scan_registry.kernels import families
from scan_registry.kernels.model import Variant

SM_COUNT = 132
#: Kernels are of one source in both dtypes of 16 bits, and in both that are wide.
DTYPES = [
    pytest.param(
        name, dtype, marks=[pytest.mark.thorough] if dtype in ("float16", "complex64") else []
    )
    for name in families()
    for dtype in cases_of(name).TOLERANCE
]


@cache
def planned() -> tuple[Variant, ...]:
    """Of the archive for an H200, installed or not: nothing that is planned for it is optional."""
    arch = Target.parse("sm90")
    jobs = jobs_of(arch)
    assert not any(job.optional for job in jobs)
    return tuple(job.variant for job in jobs)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), DTYPES)
def test_every_binary_runs(load_tool: Callable[[str], ModuleType], name: str, dtype: str) -> None:
    """Those of an H200; what problems a binary takes does not depend on where their tensors are."""
    attest, family, cases = load_tool("attest"), families()[name], cases_of(name)
    variants = {v for v in planned() if (v.family, v.text("dtype")) == (name, dtype)}
    if not variants:
        pytest.skip("no archive for sm_90 has such kernels")
    idle = {str(variant): variant for variant in variants}
    kernels = dict.fromkeys(variant.kernel for variant in variants)
    for trial in cases.trials(dtype, cases.SMALL, "cpu"):
        posed = {kernel: [case.problem for case in trial.launches(kernel)] for kernel in kernels}
        for text, variant in [*idle.items()]:
            kernel = family.kernel(variant.kernel, variant.language)
            if any(attest.takes(kernel, variant, p, SM_COUNT) for p in posed[variant.kernel]):
                del idle[text]
        if not idle:  # and no other trial need be solved
            return
    pytest.fail(f"no problem reaches {', '.join(idle)}")


def test_without_a_gpu_it_says_so(
    load_tool: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["sanitize", "rnn"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert load_tool("sanitize").main() == 2
    assert "finds no GPU" in capsys.readouterr().err
