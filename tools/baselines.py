"""The baselines that the benchmarks compare this project with; ``scan-registry bench`` times them, too."""

from __future__ import annotations

from scan_registry.ops.linear_scan_baselines import BASELINES, OURS, Baseline, installed

__all__ = ["BASELINES", "OURS", "Baseline", "installed"]
