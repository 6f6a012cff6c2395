"""Attestations for tests, as ``tools/attest.py`` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scan_registry.artifact.binary import Binary


def write_attestations(
    root: Path, name: str, *binaries: Binary, gpu: str = "Imaginary H", **changes: Any
) -> Path:
    """One file, under ``root``/linear_scan/attestations."""
    records = [
        {
            "sha256": binary.sha256,
            "variant": str(binary.variant),
            "target": str(binary.target),
            "error": 1e-7,
            "tolerance": 1e-6,
            "cases": 38,
            **changes,
        }
        for binary in binaries
    ]
    path = root / "linear_scan" / "attestations" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"gpu": gpu, "date": "2026-01-31", "driver": "13.0", "binaries": records}),
        encoding="utf-8",
    )
    return path
