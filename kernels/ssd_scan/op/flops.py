"""Operations of state space dual scans, as ``scan_registry.ops.flops`` counts them: those of the matrix products, in chunks as
the kernels cut them, of which half of what is masked is not needed and is counted all the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from scan_registry.kernels.ssd_scan.problem import CHUNK
from scan_registry.ops.flops import Formula


def _products(x: Tensor, B: Tensor, of_groups: int, of_chunks: int, of_states: int) -> int:
    """Two operations for each step and chunk's step and state of a group; chunk's step and number of a head; and number and
    state of a head; so many times each."""
    steps = x.shape[0] * x.shape[1]
    (heads, size), (groups, states) = x.shape[2:], B.shape[2:]
    in_chunks = of_groups * groups * CHUNK * states + of_chunks * heads * CHUNK * size
    count: int = 2 * steps * (in_chunks + of_states * heads * size * states)
    return count


def _forward(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, *rest: Any, **_: Any) -> int:
    """C·Bᵀ; that times x; the states' additions, and C times the states."""
    return _products(x, B, 1, 1, 2)


def _backward(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, *rest: Any, **_: Any) -> int:
    """C·Bᵀ once more, and the gradients of B and C through it; its gradient, and that of x through it; the states once more,
    and of states and of their gradients, their additions and what x, B and C have of them."""
    return _products(x, B, 3, 2, 5)


FORMULAS: Mapping[str, Formula] = {"ssd_scan": _forward, "ssd_scan_backward": _backward}
