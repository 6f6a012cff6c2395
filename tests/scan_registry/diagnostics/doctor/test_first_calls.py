"""What doctor says of first calls: only what was measured, and where."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest
from diagnosing import Capture, Provide, document, text

from scan_registry.diagnostics.first_calls import DATE, MEASURED, MEASURED_ON, first_calls
from scan_registry.dispatch.fit import Tier

RECORD = Path(__file__).parents[4] / "tools" / "results" / "h200-tiers.json"
LANGUAGES = {"exact": "cuda", "ptx": "cuda", "jit, NVRTC": "cuda", "jit, Triton": "triton"}


def test_the_numbers_are_those_of_the_record() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert record["gpu"] == MEASURED_ON
    assert record["date"].startswith(DATE)
    tiers = {str(tier): tier for tier in Tier}
    results = {
        (tiers[result["tier"]], LANGUAGES.get(result["name"], "torch")): tuple(
            float(f"{median(run['forward_ms'] for run in result[key]):.3g}")
            for key in ("cold", "warm")
        )
        for result in record["results"]
    }
    assert results == MEASURED


def test_what_was_not_measured_has_no_number() -> None:
    (call,) = first_calls([{"auto": Tier.SAME_MAJOR, "cuda": Tier.SAME_MAJOR, "triton": None}])
    assert (call.tier, call.language) == (Tier.SAME_MAJOR, "cuda")
    assert (call.first_ms, call.later_ms) == (None, None)


@pytest.mark.parametrize(
    ("gpu", "tier", "number"),
    [
        ("H200", "exact", "3.8 ms"),
        ("GB10", "ptx", "62 ms"),
        ("Thor", "ptx", "62 ms"),
        ("T4", "reference", "54 ms"),
    ],
)
def test_doctor_prints_them(
    provide: Provide, capsys: Capture, gpu: str, tier: str, number: str
) -> None:
    provide(archs=["sm90", "ptx80"])
    status = 1 if gpu == "T4" else 0
    said = text(capsys, "--for", gpu, status=status)
    rows = [line.split() for line in said.partition("First calls")[2].splitlines()]
    assert any(row[:1] == [tier] and " ".join(row[2:4]) == number for row in rows), said
    assert ("not measured on this GPU" in said) == (gpu != "H200")
    (result,) = document(capsys, "--for", gpu, status=status)["gpus"]
    assert result["first_calls_on"] == MEASURED_ON
    assert tier in {first_call["tier"] for first_call in result["first_calls"]}
