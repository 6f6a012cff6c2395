"""Stands in for ``mamba_ssm.modules.mamba2``, of which it has ``Mamba2``."""

from __future__ import annotations

from scan_registry.nn.mamba2 import Mamba2

__all__ = ["Mamba2"]
