"""Stands in for ``mamba_ssm.modules``, of which it has ``mamba_simple``, ``mamba2`` and ``mamba2_simple``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scan_registry.base import lazy

if TYPE_CHECKING:
    from scan_registry.compat.mamba_ssm.modules import mamba2, mamba2_simple, mamba_simple

__all__ = ["mamba2", "mamba2_simple", "mamba_simple"]

__getattr__, __dir__ = lazy.names(globals(), dict.fromkeys(__all__))
