"""The baselines that the benchmarks compare this project with; ``scan-registry bench`` times them, too.

``ASSOCIATIVE`` is timed by ``tools/bench.py --associative`` alone: torch is always there, and compiling it for each
length takes longer than all else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

from scan_registry.ops.linear_scan_baselines import BASELINES, OURS, Baseline, installed

__all__ = ["ASSOCIATIVE", "BASELINES", "OURS", "Baseline", "installed"]


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
    import torch

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
