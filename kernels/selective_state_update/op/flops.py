"""Operations of steps of selective scans, as ``scan_registry.ops.flops`` counts them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from scan_registry.ops.flops import Formula


def _forward(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *rest: Any, **_: Any
) -> int:
    """As many as a selective scan of one step."""
    D, z = rest[:2]
    of_element: int = 1 + (0 if D is None else 2) + (0 if z is None else 1)
    return x.numel() * (A.shape[-1] * 6 + of_element)


FORMULAS: Mapping[str, Formula] = {
    "selective_state_update": _forward,
}
