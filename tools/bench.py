"""``scan-registry bench`` on the cases of the documentation's table, beside torch's associative_scan if asked for.

    python tools/bench.py [--json]             the table's cases
    python tools/bench.py --case time_last:8,1536,4096:bfloat16
    python tools/bench.py --associative        torch's associative_scan, too, compiled; forward only

All other arguments are those of ``scan-registry bench``. torch's associative_scan is no baseline of that command, as compiling it
for each length takes longer than all else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch

from scan_registry import cli
from scan_registry.kernels.linear_scan.op import bench as linear_scan_bench
from scan_registry.kernels.linear_scan.op.baselines import Baseline
from scan_registry.kernels.linear_scan.op.bench import ScanBenchmark


class ForwardOnly(Baseline):
    """One whose backward pass has no kernel to time."""

    def kernel_call(
        self, case: Any, direction: str, device: Any
    ) -> Callable[[], Callable[[], Any]] | None:
        return super().kernel_call(case, direction, device) if direction == "forward" else None


def _combine(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    """The affine map of two steps."""
    return one[0] * other[0], other[0] * one[1] + other[1]


@cache
def _compiled(scan: Callable[..., Any], mode: str, shape: tuple[int, ...], dtype: Any) -> Any:
    """A function of gates and tokens of one shape; another shape would count against torch's limit."""
    torch.compiler.reset()
    return torch.compile(
        lambda gates, tokens: scan(_combine, (gates, tokens), dim=-1, combine_mode=mode)[1],
        dynamic=False,
    )


def _associative_kernel(
    module: ModuleType, direction: str, gates: Any, tokens: Any, grad: Any
) -> Callable[[], Any]:
    mode = "pointwise" if gates.is_cuda else "generic"  # the first one is Triton's scan
    scan = _compiled(module.associative_scan, mode, tuple(gates.shape), gates.dtype)
    scan(gates, tokens)  # compiles, which no CUDA graph may record
    return lambda: scan(gates, tokens)


ASSOCIATIVE = ForwardOnly(
    name="torch associative_scan",
    distribution="torch",
    module="torch._higher_order_ops.associative_scan",
    function="associative_scan",
    kernel=_associative_kernel,
    refuses=lambda case: (
        None if case.layout == "time_last" else f"layout is {case.layout}; it is timed on time_last"
    ),
)


#: Those of the table in the documentation.
SHAPES = (
    *(f"time_last:8,1536,{time}" for time in (128, 512, 2048, 8192, 32768)),
    *(f"channel_last:8,1024,{time}" for time in (1024, 8192, 32768)),
)
CASES = tuple(f"{shape}:{dtype}" for shape in SHAPES for dtype in ("float32", "bfloat16"))


class Benchmark(ScanBenchmark):
    """With one more baseline."""

    def baselines(self, device: torch.device) -> Sequence[Baseline]:
        return (*super().baselines(device), ASSOCIATIVE)


def main() -> int:
    words = sys.argv[1:]
    if "--associative" in words:
        words.remove("--associative")
        linear_scan_bench.BENCHMARK = Benchmark()
    chosen = () if "--case" in words else [word for case in CASES for word in ("--case", case)]
    return cli.main(["bench", *words, *chosen])


if __name__ == "__main__":
    sys.exit(main())
