"""Operations of gated scans, as ``scan_registry.ops.flops`` counts them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scan_registry.ops.flops import Formula, costs


def _forward(kind: str, inputs: Any, *_: Any, **__: Any) -> int:
    """As many as the scan. The operations that compute its gates and tokens are not counted, as torch counts no
    activation."""
    product, total = costs(inputs[0])
    return (product + total) * int(inputs[0].numel())


def _backward(kind: str, inputs: Any, *_: Any, **__: Any) -> int:
    """The scan's, with the gradient of gates; likewise."""
    return 3 * int(inputs[0].numel())


FORMULAS: Mapping[str, Formula] = {
    "gated_scan": _forward,
    "gated_scan_backward": _backward,
}
