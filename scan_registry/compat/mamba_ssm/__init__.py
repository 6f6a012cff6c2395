"""Stands in for ``mamba_ssm`` 2.2: the scans of Mamba and Mamba-2, the blocks around them, their step for generation, the
gated norms, and both modules.

Models of the third generation (``Mamba3``) and whole language models are not among it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scan_registry.base import lazy

if TYPE_CHECKING:
    from scan_registry.compat.mamba_ssm import modules, ops
    from scan_registry.compat.mamba_ssm.modules.mamba2 import Mamba2
    from scan_registry.compat.mamba_ssm.modules.mamba_simple import Mamba
    from scan_registry.compat.mamba_ssm.ops.selective_scan_interface import (
        mamba_inner_fn,
        selective_scan_fn,
    )

__all__ = ["Mamba", "Mamba2", "mamba_inner_fn", "modules", "ops", "selective_scan_fn"]

__getattr__, __dir__ = lazy.names(
    globals(),
    {
        "Mamba": ".modules.mamba_simple",
        "Mamba2": ".modules.mamba2",
        "mamba_inner_fn": ".ops.selective_scan_interface",
        "modules": None,
        "ops": None,
        "selective_scan_fn": ".ops.selective_scan_interface",
    },
)
