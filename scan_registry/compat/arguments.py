"""What the stand-ins check, in the names of their arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scan_registry.dispatch.select import Backend
from scan_registry.ops.checks import as_bool, refuse_layout

_WIDE = (torch.float64, torch.complex128)


def as_flag(name: str, value: Any) -> bool:
    """A bool. 0 and 1 are taken for one, as the replaced functions take them; else ``TypeError``."""
    return bool(value) if type(value) is int and value in (0, 1) else as_bool(name, value)


def check_dense(name: str, value: Any) -> None:
    """Refuse what is no dense tensor; ``TypeError`` names the argument."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(value).__name__}")
    if value.layout != torch.strided or value.is_nested:
        refuse_layout(name, value)


def check_pair(layout: str, **tensors: Any) -> None:
    """Refuse anything but two tensors of numbers with fractions, of one shape of three dimensions,
    on one device; ``TypeError`` or ``ValueError`` names the argument. ``layout`` names the dimensions.
    """
    for name, value in tensors.items():
        check_dense(name, value)
        if not (value.is_floating_point() or value.is_complex()):
            raise TypeError(
                f"{name} has dtype {value.dtype}; accepted are floating-point and complex numbers"
            )
        if value.dim() != 3:
            raise ValueError(f"{name} has shape {tuple(value.shape)}; it must be {layout}")
    (one, first), (other, second) = tensors.items()
    if first.shape != second.shape:
        raise ValueError(
            f"{one} has shape {tuple(first.shape)}, {other} {tuple(second.shape)}; "
            f"both must be {layout} of the same sizes"
        )
    if (first.dtype in _WIDE) != (second.dtype in _WIDE):
        raise TypeError(
            f"{one} has dtype {first.dtype}, {other} {second.dtype}; float64 does not mix with narrower "
            "dtypes"
        )
    if first.device != second.device:
        raise ValueError(
            f"{one} is on {first.device}, {other} on {second.device}; they must be on one device"
        )


def backend_for(tensor: Tensor, pinned: Backend) -> Backend:
    """The language that the replaced function is written in; on the CPU, whatever there is."""
    return pinned if tensor.is_cuda else "auto"
