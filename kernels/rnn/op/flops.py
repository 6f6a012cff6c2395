"""Operations of recurrent networks, as ``scan_registry.ops.flops`` counts them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from scan_registry.ops.flops import Formula


def _forward(inputs: Tensor, recurrent: Tensor, *_: Any, **__: Any) -> int:
    """The recurrent matrices with h, at every step."""
    return 2 * inputs.shape[0] * inputs.shape[1] * recurrent.numel()


def _backward(recurrent: Tensor, states: Tensor, initial: Tensor | None, *_: Any, **__: Any) -> int:
    """Their transposes with the gates' gradients, at every step that has one before it. The gradients of
    parameters are torch's products, which it counts itself."""
    batch, time = states.shape[1], states.shape[2]
    steps = time if initial is not None else max(time - 1, 0)
    return 2 * batch * steps * recurrent.numel()


FORMULAS: Mapping[str, Formula] = {
    "rnn": _forward,
    "rnn_backward": _backward,
}
