"""Time linear_scan on this GPU, beside installed baselines and the time it takes to move the bytes.

    python tools/bench.py                     the table of the documentation
    python tools/bench.py --json FILE         the same, with every number
    python tools/bench.py --case time_last:8,1536,4096:bfloat16
    python tools/bench.py --associative       beside torch's associative_scan, too, compiled; forward only

The measuring is that of ``scan-registry bench``, in ``scan_registry/bench``: each timing is a CUDA
graph of launches over several sets of inputs, more of them than the L2 cache holds. All graphs of a
case are replayed interleaved, and the median replay counts. Baselines are timed at their kernels, without
their wrappers' checks and zero fills. The roofline is the time of the fastest stream kernel, which reads
and writes as many tensors of the same size, in the same rounds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from records import write_records
from rich.console import Console
from rich.progress import track

from scan_registry.bench.measure import Bench
from scan_registry.cli.bench import show_table
from scan_registry.ops.linear_scan_baselines import Baseline
from scan_registry.ops.linear_scan_bench import BENCHMARK, Case


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


def default_cases() -> list[Case]:
    """Those of the table in the documentation."""
    shapes = [("time_last", 8, 1536, t) for t in (128, 512, 2048, 8192, 32768)]
    shapes += [("channel_last", 8, 1024, t) for t in (1024, 8192, 32768)]
    return [Case(*shape, dtype) for shape in shapes for dtype in ("float32", "bfloat16")]


def one_case(text: str) -> Case:
    """The case that ``--case`` names."""
    try:
        return Case.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", action="append", type=one_case, help="layout:B,C,T:dtype")
    parser.add_argument("--json", type=Path, help="write every number to this file")
    parser.add_argument(
        "--associative", action="store_true", help="time torch's associative_scan, too; it compiles"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("tools/bench.py needs an NVIDIA GPU, and torch sees none", file=sys.stderr)
        return 2
    bench = Bench.on(BENCHMARK, torch.device("cuda:0"))
    if args.associative:
        bench.baselines = (*bench.baselines, ASSOCIATIVE)
    for case in track(args.case or default_cases(), "timing", console=Console(stderr=True)):
        bench.run(case)
    show_table(bench)
    if args.json:
        write_records(args.json, bench.document())
    return 0


if __name__ == "__main__":
    sys.exit(main())
