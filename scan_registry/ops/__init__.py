"""The public operators, one module each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scan_registry.base import lazy

if TYPE_CHECKING:
    from scan_registry.ops import causal_conv1d, linear_scan, rnn

__all__ = ["causal_conv1d", "linear_scan", "rnn"]

__getattr__, __dir__ = lazy.names(globals(), dict.fromkeys(__all__))
