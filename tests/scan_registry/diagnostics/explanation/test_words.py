"""``explain`` in words, of problems and of calls."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from explaining import (
    Capture,
    Describe,
    Factory,
    Make,
    a_row,
    document,
    explained,
    facts,
    meta,
    valid,
)
from imaginary import NVRTC

import scan_registry
from scan_registry.artifact import archive
from scan_registry.artifact.archive import Archive
from scan_registry.catalog.inventory import Attestation
from scan_registry.cli import main
from scan_registry.diagnostics import explanation
from scan_registry.diagnostics.explanation import Explanation, explain_for
from scan_registry.diagnostics.explanation_words import called, grouped
from scan_registry.dispatch import policy
from scan_registry.dispatch.select import Rejected, System
from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.tuning import Row, Tuning


@pytest.mark.parametrize(("error", "words"), [(1e-3, "yes; "), (1e-1, "no, it failed; ")])
def test_what_a_gpu_has_measured(
    hopper: System, monkeypatch: pytest.MonkeyPatch, error: float, words: str
) -> None:
    winner = explained(hopper).steps[0].decision.taken()
    assert winner.binary is not None
    binary = winner.binary
    measured = Attestation(
        binary.sha256, str(binary.variant), "sm_90", error, 8e-3, 38, "Imaginary H", "2026-01-31"
    )
    monkeypatch.setattr(explanation, "_attestations", lambda: {binary.sha256: measured})
    result = explained(hopper)
    assert facts(str(result), "forward")["GPU-tested"] == (
        f"{words}error {error:.1e}, tolerance 8.0e-03, on Imaginary H, 2026-01-31"
    )
    forward, backward = result.to_json()["steps"]
    assert forward["gpu_tested"] is (error < 8e-3)
    assert forward["attestation"]["gpu"] == "Imaginary H"
    assert (backward["gpu_tested"], backward["attestation"]) == (False, None)


@pytest.mark.parametrize(("arch", "local"), [("sm_90", True), ("sm_100", False)])
def test_the_row_is_named(
    hopper: System, tmp_path: Path, a_binary: Make, arch: str, local: bool, capsys: Capture
) -> None:
    start = document(capsys, "--arch", "sm_75")
    for named in (True, False):
        tuning = a_row(replace(hopper, tuned=None), arch, named)
        path = tmp_path / "more" / "sm90.scanreg"
        binaries = [a_binary(v) for v in FAMILY.kernel("time_last_forward", "cuda").variants]
        tunings = {binaries[0][0].variant.head: [tuning]}
        archive.write(path, Target.parse("sm90"), binaries, {}, tunings)
        more = Archive(path)
        there = replace(hopper, tuned=more) if local else replace(hopper, archives=(more,))
        result = explained(there)
        said = facts(str(result), "forward")["tuning"]
        source = "tuned here" if local else "the shipped table"
        assert f"the row of lines 16, time 16384 ({source}, {arch}, Imaginary T, 2026-02-01" in said
        other = "another architecture's, as there is none for sm_90"
        assert (other in said) == (arch != "sm_90")
        assert ("0.25 ms there" if named else "which names nothing that runs here") in said
        record = result.to_json()["steps"][0]["tuning"]
        assert record["ms"] == (0.25 if named else None)
        assert (record["source"] == "local") == local
        assert (record["own_arch"], record["distance"]) == (arch == "sm_90", 2.0)
        valid({**start, **result.to_json()})


def test_what_a_time_counts_as_is_said(hopper: System, tmp_path: Path, a_binary: Make) -> None:
    """Of a variant that cuts scans into segments of 4096 steps."""
    kernel = FAMILY.kernel("time_last_forward", "cuda")
    (cut,) = (
        variant
        for variant in kernel.variants
        if "dtype=bfloat16,gates=bfloat16,access=aligned,warps=1,rows=8" in str(variant)
        and "pieces=2,stages=3,prefix_lead=2" in str(variant)
        and "reverse" not in dict(variant.statics)
    )
    assert kernel.tunable.shape is not None
    shape = kernel.tunable.shape(explained(hopper).steps[0].decision.problem)
    tuning = Tuning.of(
        "sm_90", "T", "2026-02-01", {shape.kind: [Row(shape.sizes, {kernel.label(cut): 0.25})]}
    )
    path = tmp_path / "sm90.scanreg"
    archive.write(path, Target.parse("sm90"), [a_binary(cut)], {}, {kernel.head: [tuning]})
    there = replace(hopper, archives=(Archive(path),))
    for time, counted in ((4096, 0.25), (8192, 0.25), (5120, 0.4)):
        result = explained(there, 2, 8, time)
        said = facts(str(result), "forward")["tuning"]
        assert "), 0.25 ms there" in said
        assert ("counted as 0.4 " in said) == (counted == 0.4)
        record = result.to_json()["steps"][0]["tuning"]
        assert (record["ms"], record["counted"]) == (0.25, counted)


def test_groups() -> None:
    first, second = FAMILY.variants()[:2]
    subjects = (f"{first} for sm_90", f"{second} for sm_90", f"{first} for compute_80")
    assert called(subjects) == "2 variants for sm_90, compute_80"
    assert called(subjects[:1]) == subjects[0]
    assert called((subjects[0], subjects[2])) == f"{first} for sm_90, compute_80"
    assert called((*subjects, "the reference")) == (
        "2 variants for sm_90, compute_80, the reference"
    )
    assert called(("cuda compiled here", "a thing for sm_90")) == (
        "cuda compiled here, a thing for sm_90"
    )
    losers = [Rejected("a", "x"), Rejected("b", "y"), Rejected("c", "x")]
    assert list(grouped(losers).items()) == [("x", ("a", "c")), ("y", ("b",))]


def test_copies_are_named(hopper: System) -> None:
    gates, tokens = meta(2, 4096, 8).transpose(1, 2), meta(2, 8, 4096)
    result = explain_for(hopper, "linear_scan", gates, tokens)
    assert facts(str(result), "forward")["copies"] == "gates first"
    assert result.to_json()["steps"][0]["copied"] == ["gates"]


def test_the_reference_copies_nothing(a_device: Describe) -> None:
    gates, tokens = meta(2, 4096, 8).transpose(1, 2), meta(2, 8, 4096)
    result = explain_for(System(a_device()), "linear_scan", gates, tokens)
    said = facts(str(result), "forward")
    assert said["runs"].startswith("plain torch")
    assert "scan-registry doctor" in said["help"]
    assert [step["copied"] for step in result.to_json()["steps"]] == [[], []]
    requested = explain_for(System(a_device()), "linear_scan", gates, tokens, backend="reference")
    assert "help" not in facts(str(requested), "forward")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_computes_on_the_cpu(dtype: torch.dtype) -> None:
    """Plain torch computes float64 where the compiled code does not."""

    def runs(operator: Any, *tensors: Any, **options: Any) -> set[str]:
        actual = scan_registry.explain(operator, *tensors, **options)
        said = str(actual)
        return {facts(said, step.name)["runs"] for step in actual.steps}

    x, compiled = torch.zeros(2, 8, 16, dtype=dtype), {"this package's compiled code for the CPU"}
    plain = {"plain torch, step by step along time"}
    assert runs(scan_registry.linear_scan, x, x) == compiled
    expected = plain if dtype == torch.float64 else compiled
    wx, r = torch.zeros(2, 8, 4, 1, 16, dtype=dtype), torch.zeros(4, 1, 16, 16, dtype=dtype)
    assert runs(scan_registry.rnn, wx, r, None) == expected
    assert runs(scan_registry.rnn, wx, r, None, backend="reference") == plain
    assert runs(scan_registry.causal_conv1d, x, torch.zeros(8, 4, dtype=dtype)) == expected
    rates = torch.zeros(8, 4, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    states = torch.zeros(2, 4, 16, dtype=dtype)
    assert runs(scan_registry.selective_scan, x, x, rates, states, states) == expected
    heads, dt, projection = (
        torch.zeros(size, dtype=dtype) for size in ((2, 8, 3, 4), (2, 8, 3), (2, 8, 1, 5))
    )
    rate = torch.zeros(3, dtype=rates.dtype)
    dual = runs(scan_registry.ssd_scan, heads, dt, rate, projection, projection)
    assert dual == {"torch's matrix products, chunk by chunk"}


def test_what_is_compiled_here(a_device: Describe) -> None:
    result = explained(System(a_device(), (), {"cuda": NVRTC, "triton": "Triton is missing"}))
    said = facts(str(result), "forward")
    assert said["target"] == "sm_90, compiled here, at its first use or taken from the cache"
    assert "known once it is compiled" in said["launch"]
    assert "sha256" not in said
    assert "    triton compiled here: Triton is missing\n" in str(result)
    step = result.to_json()["steps"][0]
    assert (step["tier"], step["gpu_tested"], step["archive"]) == ("jit", None, None)
    assert step["launch"]["block"] is None


def test_where_nothing_runs(archive_factory: Factory, a_device: Describe) -> None:
    there = System(a_device((8, 7)), (archive_factory("ptx80"),))
    with policy.require("aot"):
        result = explained(there)
    assert not result.runs
    said = facts(str(result), "backward")
    assert said["outcome"] == "the call raises NoKernelError"
    assert "5 variants for compute_80: tier ptx; the policy allows none below same-major" in str(
        result
    )
    step = result.to_json()["steps"][1]
    assert (step["tier"], step["launch"], step["lowest_tier"]) == (None, None, "same-major")


def test_empty_tensors(hopper: System) -> None:
    result = explained(hopper, 2, 0, 8)
    assert result.steps == ()
    assert result.runs
    assert str(result).endswith("\n\nnothing runs: the tensors are empty")


def test_what_only_the_reference_takes(hopper: System) -> None:
    """float64, on the CPU and where the reference is asked for."""
    tensor = torch.rand(2, 8, dtype=torch.float64, requires_grad=True)
    result = scan_registry.explain(scan_registry.linear_scan, tensor, tensor)
    assert [str(step.decision.taken().tier) for step in result.steps] == ["reference"] * 2
    for step in ("forward", "backward"):
        assert "dtype float64" in facts(str(result), step)["problem"]
    assert "float64" in json.dumps(result.to_json())
    assert explain_for(hopper, "linear_scan", tensor, tensor, backend="reference").runs


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_language_may_be_asked_for_whatever_the_tensors_are_on(
    hopper: System, backend: str
) -> None:
    result = explained(hopper, backend=backend)
    assert result.runs == (backend == "cuda")
    assert f"backend='{backend}' was asked for" in str(result)


def test_what_cannot_be_explained(hopper: System) -> None:
    tensor = torch.rand(2, 8)
    with pytest.raises(TypeError, match="cannot be explained; accepted are linear_scan"):
        scan_registry.explain(torch.cumsum, tensor, 0)
    with pytest.raises(ValueError, match="on meta; accepted are the CPU and CUDA devices"):
        scan_registry.explain(scan_registry.linear_scan, meta(2, 8), meta(2, 8))
    with pytest.raises(TypeError, match=r"tokens must be a torch\.Tensor, not list"):
        scan_registry.explain(scan_registry.linear_scan, tensor, [1.0])
    with pytest.raises(TypeError, match="missing a required argument: 'tokens'"):
        scan_registry.explain(scan_registry.linear_scan, tensor)
    with pytest.raises(TypeError, match="'axis'"):
        scan_registry.explain(scan_registry.linear_scan, tensor, tensor, axis=0)
    with pytest.raises(ValueError, match="they must broadcast to one shape"):
        scan_registry.explain(scan_registry.linear_scan, tensor, torch.rand(2, 9))
    with pytest.raises(ValueError, match="'scan'; accepted are linear_scan"):
        explain_for(hopper, "scan", tensor, tensor)
    with pytest.raises(ValueError, match="'hip'; accepted are auto, cuda, triton, reference"):
        explained(hopper, backend="hip")
    with pytest.raises(ValueError, match="needs a CUDA device"):
        explained(System(None), backend="cuda")


def heading(capsys: Capture, *words: str) -> list[str]:
    """The command's first three lines."""
    assert main(["explain", *words]) in (0, 1)
    return capsys.readouterr().out.splitlines()[:3]


@pytest.mark.parametrize(
    ("words", "call"),
    [
        (
            ["linear_scan", "--shape", "8,64,4096"],
            "bfloat16, batch · channels 512, time 4096; time is contiguous",
        ),
        (
            ["linear_scan", "--shape", "2,3,4096,64", "--dim", "2", "--gates-dtype", "fp32"],
            "bfloat16, gates float32, batch 6, channels 64, time 4096; channels are contiguous",
        ),
        (
            ["linear_scan", "--shape", "1,4096,64", "--dim", "1", "--sequences", "3"],
            "bfloat16, batch 1, channels 64, time 4096, packed sequences 3; channels are contiguous",
        ),
        (
            ["min_gru", "--shape", "8,64,4096", "--channel-last"],
            "min_gru, bfloat16, batch 8, channels 64, time 4096; channels are contiguous",
        ),
        (
            ["ssd_scan", "--shape", "8,2048,80,64"],
            "bfloat16, batch 8, heads 80, size of a head 64, time 2048",
        ),
    ],
)
def test_the_first_lines_say_what_was_understood(
    capsys: Capture, words: list[str], call: str
) -> None:
    title, understood, first = heading(capsys, *words, "--dtype", "bf16", "--device", "cpu")
    assert title.endswith(" on the CPU")
    assert understood == f"  call       {call}"
    assert first == "  first call Nothing compiles: the call is on the CPU"


def test_a_driver_is_assumed_where_none_is_named(capsys: Capture) -> None:
    words = ["linear_scan", "--dtype", "bf16", "--shape", "8,64", "--for", "H100"]
    assert heading(capsys, *words)[0].endswith("(sm_90), assuming a driver for CUDA 13.1")
    named = heading(capsys, *words, "--driver", "575")[0]
    assert named.endswith("(sm_90), driver for CUDA 12.9")


def test_the_first_lines_say_what_compiles(
    hopper: System, a_device: Describe, archive_factory: Factory
) -> None:
    def first_call(result: Explanation) -> str:
        return str(result).splitlines()[2].removeprefix("  first call ")

    ptx = System(a_device((8, 7)), (archive_factory("ptx80"),))
    here = System(a_device(), (), {"cuda": NVRTC, "triton": "Triton is missing"})
    nothing = System(a_device())
    exact, compiled, plain, by_driver = map(explained, (hopper, here, nothing, ptx))
    machine_code = "Nothing compiles: machine code for sm_90 is installed"
    assert first_call(exact) == machine_code
    assert first_call(compiled).startswith("Compiled on your machine at the first call")
    assert first_call(plain) == "Nothing compiles: no kernel is used"
    assert first_call(by_driver).startswith("The driver compiles PTX at the first call")
    both = replace(exact, steps=(exact.steps[0], by_driver.steps[1]))
    assert first_call(both).startswith(f"forward: {machine_code}; backward: The driver compiles")
    with policy.require("aot"):
        assert first_call(explained(ptx)) == "Nothing compiles: nothing runs"
