"""Stands in for ``mamba_ssm.ops.triton``, of which it has ``selective_state_update``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scan_registry.base import lazy

if TYPE_CHECKING:
    from scan_registry.compat.mamba_ssm.ops.triton import selective_state_update

__all__ = ["selective_state_update"]

__getattr__, __dir__ = lazy.names(globals(), dict.fromkeys(__all__))
