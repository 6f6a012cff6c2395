"""Stands in for ``mamba_ssm.ops``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scan_registry.base import lazy

if TYPE_CHECKING:
    from scan_registry.compat.mamba_ssm.ops import selective_scan_interface, triton

__all__ = ["selective_scan_interface", "triton"]

__getattr__, __dir__ = lazy.names(globals(), dict.fromkeys(__all__))
