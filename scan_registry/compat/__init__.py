"""Other packages' functions, with their signatures and results, on this package's kernels.

``accelerated_scan``, ``sequential_scan``, ``flashrnn``, ``mamba_ssm`` and ``causal_conv1d`` stand in for the packages of
these names: where a program says ``from accelerated_scan.warp import scan``, put ``scan_registry.compat.`` before it. What
each function does differently from the one that it replaces is in its docstring; all of them also
take CPU tensors, sequences of any length and of any strides, and have derivatives of any order.

``install`` makes ``mamba_ssm`` and ``causal_conv1d`` importable under their own names, for libraries that look for them.
It also puts transformers' RecurrentGemma on this package's scan, with ``install("recurrent_gemma")``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scan_registry.base import lazy

if TYPE_CHECKING:
    from scan_registry.compat import (
        accelerated_scan,
        causal_conv1d,
        flashrnn,
        mamba_ssm,
        sequential_scan,
    )
    from scan_registry.compat.installation import install, uninstall

__all__ = [
    "accelerated_scan",
    "causal_conv1d",
    "flashrnn",
    "install",
    "mamba_ssm",
    "sequential_scan",
    "uninstall",
]

__getattr__, __dir__ = lazy.names(
    globals(),
    dict.fromkeys(__all__) | dict.fromkeys(("install", "uninstall"), ".installation"),
)
