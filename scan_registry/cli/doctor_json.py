"""The JSON document of ``scan-registry doctor``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from scan_registry.diagnostics.doctor_report import Answer, Finding, ProviderState, Report
from scan_registry.diagnostics.explanation import device_record
from scan_registry.diagnostics.first_calls import MEASURED_ON
from scan_registry.dispatch.fit import dotted


def document(report: Report) -> dict[str, Any]:
    """The stable form, as ``schemas/doctor.json`` describes it: keys are only ever added."""
    here, first = report.installation, report.first
    return {
        "version": here.version,
        "passed": report.passed,
        "strict": report.strict,
        "cpu": {"works": here.cpu is None, "missing": here.cpu},
        "python": here.python,
        "torch": here.torch,
        "jax": here.jax,
        "driver": dotted(here.driver) if here.driver else None,
        "compilers": {
            language: {"identity": None, "cuda": None, "missing": toolchain}
            if isinstance(toolchain, str)
            else {"identity": toolchain.identity, "cuda": dotted(toolchain.cuda), "missing": None}
            for language, toolchain in here.toolchains.items()
        },
        "lowest_tier": str(here.lowest),
        "cache": asdict(here.cache),
        "providers": [_provider_record(provider) for provider in here.providers],
        "gpus": [
            {
                "ordinal": gpu.ordinal,
                "device": device_record(gpu.device),
                "assumed": list(gpu.assumed),
                "answers": [_answer_record(answer) for answer in gpu.answers],
                "tuned": [asdict(local) for local in gpu.tuned],
                "first_calls": [
                    {**asdict(call), "tier": str(call.tier)} for call in gpu.first_calls
                ],
                "first_calls_on": MEASURED_ON,
            }
            for gpu in report.gpus
        ],
        "findings": [_finding_record(finding) for finding in report.findings],
        "first": first and {"about": first.about, "remedy": first.remedies[0]},
    }


def _provider_record(provider: ProviderState) -> dict[str, Any]:
    denied = [{"subject": s, "reason": reason} for s, reason in provider.denied.items()]
    archives = [asdict(archive) for archive in provider.archives]
    return {**asdict(provider), "denied": denied, "archives": archives}


def _answer_record(answer: Answer) -> dict[str, Any]:
    tiers = {b: None if tier is None else str(tier) for b, tier in answer.tiers.items()}
    return {**asdict(answer), "tiers": tiers}


def _finding_record(finding: Finding) -> dict[str, Any]:
    listed = {"remedies": list(finding.remedies), "reasons": list(finding.reasons)}
    return {**asdict(finding), **listed}
