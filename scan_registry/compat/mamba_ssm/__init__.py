"""Stands in for ``mamba_ssm`` 2.3: the selective scan of Mamba, its fused block, its step for generation, and the module.

Models of the second and third generation (``Mamba2``, ``Mamba3``) and whole language models are not among it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scan_registry.base import lazy

if TYPE_CHECKING:
    from scan_registry.compat.mamba_ssm import modules, ops
    from scan_registry.compat.mamba_ssm.modules.mamba_simple import Mamba
    from scan_registry.compat.mamba_ssm.ops.selective_scan_interface import (
        mamba_inner_fn,
        selective_scan_fn,
    )

__all__ = ["Mamba", "mamba_inner_fn", "modules", "ops", "selective_scan_fn"]

__getattr__, __dir__ = lazy.names(
    globals(),
    {
        "Mamba": "scan_registry.compat.mamba_ssm.modules.mamba_simple",
        "mamba_inner_fn": "scan_registry.compat.mamba_ssm.ops.selective_scan_interface",
        "modules": None,
        "ops": None,
        "selective_scan_fn": "scan_registry.compat.mamba_ssm.ops.selective_scan_interface",
    },
)
