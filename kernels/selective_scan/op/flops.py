"""Operations of selective scans, as ``scan_registry.ops.flops`` counts them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from scan_registry.ops.flops import Formula, costs


def _forward(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, *rest: Any, **_: Any
) -> int:
    """For each state the products delta·A, gate·h, delta·u·B and C·h and two sums; for each element delta·u, D·u with
    its sum, and the gate's product. Exponentials and softplus are not counted."""
    product, total = costs(A)
    D, z = rest[:2]
    of_element: int = 1 + (0 if D is None else 2) + (0 if z is None else 1)
    return u.numel() * (A.shape[1] * (4 * product + 2 * total) + of_element)


def _backward(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, *rest: Any, **_: Any
) -> int:
    """For each state its recomputation, three products and a sum; the gradient that runs against the scan, two and a
    sum; that of the exponent, two products; those of delta·u and of delta, each a product and a sum; and such a pair
    for each of A, B and C that wants a gradient."""
    product, total = costs(A)
    wanted = rest[-1]
    pairs: int = 2 + sum(wanted[2:5])
    return u.numel() * A.shape[1] * (7 * product + 2 * total + pairs * (product + total))


FORMULAS: Mapping[str, Formula] = {
    "selective_scan": _forward,
    "selective_scan_backward": _backward,
}
