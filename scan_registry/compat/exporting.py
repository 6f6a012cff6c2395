"""Lets ``torch.compile`` see the stand-ins in transformers' models.

In each call of a kernel, transformers asks ``torch.compiler.is_exporting``, and takes its own code in its place where that is
true. In torch before 2.13, Dynamo takes it to be true in all that it traces. What is asked instead is the flag behind it, which
Dynamo reads as it is.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

__all__ = ["is_exporting", "replace"]

MODULE = "transformers.integrations.hub_kernels"
NAME = "is_torchdynamo_exporting"


def is_exporting() -> bool:
    """Whether ``torch.export`` is running."""
    return torch.compiler._is_exporting_flag


def replace() -> None:
    """Put ``is_exporting`` into transformers, if it is imported and asks. It is right with any kernels, so ``uninstall`` leaves it
    there."""
    module: Any = sys.modules.get(MODULE)
    if hasattr(module, NAME) and hasattr(torch.compiler, "_is_exporting_flag"):
        setattr(module, NAME, is_exporting)
