"""What every module refuses: what is no size, what is no tensor, tensors of another size or on another device, and what is
no ``reset``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scan_registry.ops.checks import refuse_layout


def check_int(name: str, value: Any, others: str = "") -> None:
    """Refuse what is no whole number; ``others`` names what else would be accepted."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} should be of type int{others}, got: {type(value).__name__}")


def check_size(name: str, size: Any, others: str = "") -> None:
    """Refuse what is no whole number above 0, as ``check_int`` does."""
    check_int(name, size, others)
    if size <= 0:
        raise ValueError(f"{name} must be greater than zero, got: {size}")


def expect_tensor(name: str, what: str, value: Any) -> None:
    """Refuse what is no dense tensor for the module's argument ``what``."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: Expected {what} to be a Tensor, got {type(value).__name__}")
    if value.layout != torch.strided or value.is_nested:
        refuse_layout(what, value)


def expect_size(
    name: str, what: str, tensor: Tensor, size: tuple[int, ...], error: type[Exception] = ValueError
) -> None:
    """Refuse another size of the module's argument ``what``."""
    if tuple(tensor.shape) != size:
        raise error(f"{name}: Expected {what} of size {size}, got {tuple(tensor.shape)}")


def expect_device(
    name: str, what: str, tensor: Tensor, x: Tensor, error: type[Exception] = ValueError
) -> None:
    """Refuse another device than the input's."""
    if tensor.device != x.device:
        raise error(
            f"{name}: Expected {what} on the input's device, {x.device}, got {tensor.device}"
        )


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
    expect_tensor(name, "reset", reset)
    if reset.dtype != torch.bool:
        raise dtype_error(f"{name}: Expected reset of dtype torch.bool, got {reset.dtype}")
    expect_size(name, "reset", reset, size, size_error)
    expect_device(name, "reset", reset, x, size_error)
