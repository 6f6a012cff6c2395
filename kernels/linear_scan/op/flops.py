"""Operations of linear scans, as ``scan_registry.ops.flops`` counts them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from scan_registry.ops.flops import Formula, costs


def _forward(gates: Tensor, tokens: Tensor, *_: Any, **__: Any) -> int:
    """A product and a sum for each element."""
    product, total = costs(tokens)
    return (product + total) * tokens.numel()


def _backward(
    gates: Tensor, states: Tensor | None, states_grad: Tensor, *rest: Any, **_: Any
) -> int:
    """A product and a sum for each element of the gradient that runs against the scan; a product more for the
    gates' own, and sums where gates are broadcast."""
    product, total = costs(states_grad)
    count = states_grad.numel()
    operations = (product + total) * count
    if rest[-1][0]:
        operations += product * count + total * (count - gates.numel())
    return operations


def _summary(gates: Tensor, tokens: Tensor, *_: Any, **__: Any) -> int:
    """Beside the scan, the product of the gates."""
    product, total = costs(tokens)
    return (2 * product + total) * tokens.numel()


FORMULAS: Mapping[str, Formula] = {
    "linear_scan": _forward,
    "linear_scan_backward": _backward,
    "linear_scan_summary": _summary,
}
