"""Operations of causal convolutions, as ``scan_registry.ops.flops`` counts them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from scan_registry.ops.flops import Formula


def _forward(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    """A product and a sum for each tap of each step, as of torch's own convolutions."""
    return 2 * x.numel() * weight.shape[1]


def _backward(x: Tensor, weight: Tensor, *rest: Any, **_: Any) -> int:
    """As many for the gradient of x, and as many for that of the filters."""
    of_x, of_weight, *_others = rest[-1]
    return (bool(of_x) + bool(of_weight)) * _forward(x, weight)


def _update(x: Tensor, state: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    return _forward(x, weight)


FORMULAS: Mapping[str, Formula] = {
    "causal_conv1d": _forward,
    "causal_conv1d_backward": _backward,
    "causal_conv1d_update": _update,
}
