"""The public operators, one module each, and beside it what commands know of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scan_registry.base import lazy

if TYPE_CHECKING:
    from scan_registry.ops import (
        causal_conv1d,
        gated_scan,
        linear_scan,
        rnn,
        selective_scan,
        selective_state_update,
    )

__all__ = [
    "causal_conv1d",
    "gated_scan",
    "linear_scan",
    "rnn",
    "selective_scan",
    "selective_state_update",
]

#: Families of kernels that have an operator, in the order in which commands list them; ``bench`` alone times the first.
OPERATORS = (
    "linear_scan",
    "rnn",
    "causal_conv1d",
    "selective_scan",
    "selective_state_update",
    "gated_scan",
)

__getattr__, __dir__ = lazy.names(globals(), dict.fromkeys(__all__))
