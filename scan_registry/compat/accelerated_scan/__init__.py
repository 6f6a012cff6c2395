"""Stands in for ``accelerated-scan`` 0.3.1: ``warp``, ``scalar``, ``complex`` and ``ref``, each with its
``scan``; and ``triton``, as ``scalar`` was called up to 0.2.0.

All compute h[t] = gates[t] * h[t-1] + tokens[t] along the last dimension of (B, C, T) tensors, from
h[-1] = 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scan_registry.base import lazy

if TYPE_CHECKING:
    from scan_registry.compat.accelerated_scan import complex, ref, scalar, triton, warp

__all__ = ["complex", "ref", "scalar", "triton", "warp"]

__getattr__, __dir__ = lazy.names(globals(), dict.fromkeys(__all__))
