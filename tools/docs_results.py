"""What tools/results holds, as the pictures and tables of the documentation need it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"

#: How the narrow tables call dtypes.
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@cache
def document(name: str) -> dict[str, Any]:
    """The results of one run, such as ``h200-targets``."""
    loaded: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return loaded


def of_run(name: str) -> str:
    """When and where it was measured: ``2026-11-26, NVIDIA H200, torch 2.11.0+cu130``."""
    record = document(name)
    gpu = record.get("gpu", record.get("device"))
    return f"{str(record['date'])[:10]}, {gpu}, torch {record['torch']}"


# --- Scans ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Cases that are alike: ``matches`` tells which ones, from a case's record."""

    name: str
    layout: str
    shapes: tuple[tuple[int, int], ...]
    lengths: tuple[int, int] = (0, 1 << 40)
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    options: bool = False

    def matches(self, case: dict[str, Any]) -> bool:
        return (
            case["layout"] == self.layout
            and (case["batch"], case["channels"]) in self.shapes
            and self.lengths[0] <= case["time"] <= self.lengths[1]
            and case["dtype"] in self.dtypes
            and bool(case.get("sequences") or case.get("gates")) is self.options
        )


#: The cases of ``scan-registry bench --targets``, in the order of the tables.
GROUPS = (
    Group("time-last (8, 1536, T), T ≥ 1024", "time_last", ((8, 1536),), (1024, 1 << 40)),
    Group("time-last (8, 1536, T), T ≤ 512", "time_last", ((8, 1536),), (0, 512)),
    Group(
        "channel-last, 8192 channels in all, T ≥ 1024",
        "channel_last",
        ((8, 1024), (4, 2048), (16, 512)),
        (1024, 1 << 40),
        ("float32", "bfloat16", "float16"),
    ),
    Group("channel-last (8, T, 1536)", "channel_last", ((8, 1536),)),
    Group(
        "channel-last (1, 8192, 2048), (2, 4096, 1024)", "channel_last", ((1, 2048), (2, 1024))
    ),
    Group("one long sequence, time-last", "time_last", ((1, 1),)),
    Group("16 long sequences, time-last", "time_last", ((1, 16),)),
    Group("64 long sequences, time-last", "time_last", ((1, 64),)),
    Group("16 and 64 long sequences, channel-last", "channel_last", ((1, 16), (1, 64))),
    Group("many short sequences", "time_last", ((4096, 512), (65536, 64))),
    Group("misaligned rows, time-last (3, 1537, 4099)", "time_last", ((3, 1537),)),
    Group("misaligned rows, channel-last (8, 4099, 1001)", "channel_last", ((8, 1001),)),
    Group(
        "complex64 and float64 (8, 512, 8192)",
        "time_last",
        ((8, 512),),
        dtypes=("complex64", "float64"),
    ),
    Group("64 packed sequences, 2²⁰ steps, 1024 channels", "channel_last", ((1, 1024),), options=True),
    Group("one gate per channel, (8, 8192, 1024)", "channel_last", ((8, 1024),), options=True),
)  # fmt: skip


def shares(group: Group, gpu: str, direction: str | None = None) -> list[float]:
    """The roofline's time over the kernel's, for each case of a group."""
    return [
        timing["roofline_ms"] / timing["ms"]
        for timing in document(f"{gpu}-targets")["timings"]
        if group.matches(timing["case"]) and direction in (None, timing["direction"])
    ]


def every_share(runs: Iterable[str], direction: str) -> list[float]:
    """The roofline's time over the kernel's, for each case of some runs that has a roofline."""
    return [
        timing["roofline_ms"] / timing["ms"]
        for name in runs
        for timing in document(name)["timings"]
        if timing["direction"] == direction
        and timing["who"].startswith("scan-registry")
        and timing.get("roofline_ms")
    ]


def timings(name: str, **case: Any) -> list[dict[str, Any]]:
    """The timings of a run whose cases have these values, and no options that are not named."""
    return [
        timing
        for timing in document(name)["timings"]
        if all(timing["case"].get(key) == value for key, value in case.items())
        and not ({"sequences", "gates"} & timing["case"].keys() - case.keys())
    ]


def quickest(candidates: Iterable[dict[str, Any]], who: str) -> dict[str, Any] | None:
    """Of the timings of those whose names begin with ``who``, the shortest."""
    own = [timing for timing in candidates if timing["who"].startswith(who)]
    return min(own, key=lambda timing: timing["ms"], default=None)


# --- Networks ---------------------------------------------------------------------------------


def network(who: str, run: str = "h100-bench-rnn", **wanted: Any) -> dict[str, float]:
    """Milliseconds by pass, of one network by one implementation; empty if it was not measured."""
    return {
        timing["direction"]: timing["ms"]
        for timing in document(run)["timings"]
        if timing["who"] == who and all(timing["network"][key] == v for key, v in wanted.items())
    }


# --- Models of transformers -------------------------------------------------------------------

#: The runs of ``examples/transformers_models.py mamba2`` and ``nemotron_h``.
MAMBA2, NEMOTRON_H = "h200-transformers-mamba2", "h200-transformers-nemotron-h"
#: How pictures call its paths.
PATHS = {
    "its own": "transformers' own",
    "mamba_ssm": "mamba_ssm's kernels",
    "scan_registry": "scan-registry",
}


def of_model(what: str, run: str = MAMBA2) -> dict[str, float]:
    """Milliseconds by path."""
    runs = document(run)["runs"]
    times = {run["path"]: run["ms"] for run in runs if run["what"] == what}
    return {path: times[path] for path in PATHS}


def convolution_is_ours(run: str = MAMBA2) -> bool:
    """Whether mamba_ssm's kernels ran beside this package's convolution."""
    return "scan.registry" in document(run)["causal_conv1d"]


def milliseconds(value: float) -> str:
    """With three digits."""
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}"
