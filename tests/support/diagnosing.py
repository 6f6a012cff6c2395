"""Imaginary systems and installations for ``doctor``, and what it says of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.resources import files
from typing import Any

import pytest
from imaginary import FAMILY
from jsonschema import Draft202012Validator

from scan_registry.artifact.archive import Archive, Binary
from scan_registry.catalog.providers import Provider
from scan_registry.cli import main
from scan_registry.diagnostics.doctor import coverage, lacks
from scan_registry.diagnostics.doctor_report import Finding
from scan_registry.dispatch.fit import Tier
from scan_registry.dispatch.select import System
from scan_registry.hardware.device import Device
from scan_registry.hardware.target import Target
from scan_registry.kernels import families

Factory = Callable[..., Archive]
Make = Callable[..., tuple[Binary, bytes]]
Describe = Callable[..., Device]
Capture = pytest.CaptureFixture[str]
Provide = Callable[..., Provider]
SCHEMA = json.loads(
    files("scan_registry").joinpath("schemas", "doctor.json").read_text(encoding="utf-8")
)
FAMILIES = {FAMILY.name: FAMILY}
KERNELS = {kernel.name for kernel in FAMILY.kernels}
#: What there is machine code of.
EVERY = tuple(
    variant
    for kernel in FAMILY.kernels
    for variant in kernel.variants
    if kernel.rules.serves(variant.statics, Target((9, 0)))
)
#: The families of imaginary installations: one with many kinds of samples, of which two dtypes are enough, and one with
#: few. What doctor does is the same for each sample of each family, and takes as much longer as there are more.
FEW = {
    FAMILY.name: replace(
        families()[FAMILY.name],
        samples=tuple(s for s in FAMILY.samples if s.dtype in ("float32", "bfloat16")),
    ),
    "selective_state_update": families()["selective_state_update"],
}
#: What a wheel holds of them, or would without tables.
HELD = (
    *(v for v in EVERY if v.text("dtype") in ("float32", "bfloat16")),
    *families()["selective_state_update"].variants(),
)
CUDA = [variant for variant in EVERY if variant.language == "cuda"]
#: Those that solve one of the problems that are asked about.
SOLVING = [
    variant
    for variant in EVERY
    if any(
        sample.problem.kernel == variant.kernel
        and not FAMILY.kernel(variant.kernel, variant.language).rules.accepts(
            variant, sample.problem
        )
        for sample in FAMILY.samples
    )
]
SOLVING_CUDA = [variant for variant in SOLVING if variant.language == "cuda"]


def findings(there: System, lowest: Tier = Tier.REFERENCE) -> list[Finding]:
    return list(lacks(coverage(there, FAMILIES, lowest), there, FAMILIES, lowest))


def only(there: System, lowest: Tier = Tier.REFERENCE, severity: str | None = None) -> Finding:
    """The one finding, of a severity if that is given."""
    (found,) = [f for f in findings(there, lowest) if severity in (None, f.severity)]
    return found


def tiers(there: System, backend: str, lowest: Tier = Tier.REFERENCE) -> set[str]:
    return {str(a.tiers.get(backend)) for a in coverage(there, FAMILIES, lowest).answers}


def document(capsys: Capture, *words: str, status: int = 0) -> dict[str, Any]:
    """What the command prints as JSON, which its schema describes."""
    assert main(["doctor", *words, "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    Draft202012Validator(SCHEMA).validate(found)
    assert found["passed"] == (status == 0)
    return found


def text(capsys: Capture, *words: str, status: int = 0) -> str:
    assert main(["doctor", *words]) == status
    return capsys.readouterr().out


def errors(found: Mapping[str, Any]) -> list[str]:
    return [f["text"] for f in found["findings"] if f["severity"] == "error"]
