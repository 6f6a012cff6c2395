"""Stands in for ``mamba_ssm.modules.mamba_simple``, of which it has ``Mamba``."""

from __future__ import annotations

from scan_registry.nn.mamba import Mamba

__all__ = ["Mamba"]
