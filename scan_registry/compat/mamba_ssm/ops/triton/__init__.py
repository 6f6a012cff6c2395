"""Stands in for ``mamba_ssm.ops.triton``, of which it has ``ssd_combined``, ``layernorm_gated`` and
``selective_state_update``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scan_registry.base import lazy

if TYPE_CHECKING:
    from scan_registry.compat.mamba_ssm.ops.triton import (
        layernorm_gated,
        selective_state_update,
        ssd_combined,
    )

__all__ = ["layernorm_gated", "selective_state_update", "ssd_combined"]

__getattr__, __dir__ = lazy.names(globals(), dict.fromkeys(__all__))
