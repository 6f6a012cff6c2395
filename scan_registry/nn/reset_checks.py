"""What every module refuses as ``reset``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scan_registry.ops.checks import refuse_layout


def check_reset(
    module: torch.nn.Module,
    reset: Any,
    x: Tensor,
    *,
    dtype_error: type[Exception] = TypeError,
    size_error: type[Exception] = ValueError,
) -> None:
    """Refuse what is no boolean for each step of each sequence of ``x``. ``size_error`` is for wrong devices, too."""
    if reset is None:
        return
    name, size = type(module).__name__, tuple(x.shape[:-1])
    if not isinstance(reset, Tensor):
        raise TypeError(f"{name}: Expected reset to be a Tensor, got {type(reset).__name__}")
    if reset.layout != torch.strided or reset.is_nested:
        refuse_layout("reset", reset)
    if reset.dtype != torch.bool:
        raise dtype_error(f"{name}: Expected reset of dtype torch.bool, got {reset.dtype}")
    if tuple(reset.shape) != size:
        raise size_error(f"{name}: Expected reset of size {size}, got {tuple(reset.shape)}")
    if reset.device != x.device:
        raise size_error(
            f"{name}: Expected reset on the input's device, {x.device}, got {reset.device}"
        )
