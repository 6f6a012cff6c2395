"""What the stand-ins check, in the names of their arguments."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from scan_registry.dispatch.select import Backend
from scan_registry.ops.checks import as_bool, check_dense, is_autocast, shapes_agree

_REAL = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_REAL_NAMES = ", ".join(str(dtype).removeprefix("torch.") for dtype in _REAL)
_WIDE = (torch.float64, torch.complex128)


def as_flag(name: str, value: Any) -> bool:
    """A bool. 0 and 1 are taken for one, as the replaced functions take them; else ``TypeError``."""
    if value is True or value is False:
        return value
    return bool(value) if type(value) is int and value in (0, 1) else as_bool(name, value)


def check_initial_states(states: Any, x: Any, shape: Sequence[int] | None, meaning: str) -> None:
    """Refuse initial states that are no dense tensor of real numbers, are on another device than ``x`` or of another shape.
    ``shape`` is None where other arguments are wrong, and ``meaning`` says in words what it is."""
    check_dense("initial_states", states)
    if states.dtype not in _REAL:
        raise TypeError(f"initial_states has dtype {states.dtype}; accepted are {_REAL_NAMES}")
    if isinstance(x, Tensor) and states.device != x.device:
        raise ValueError(
            f"initial_states is on {states.device}, x on {x.device}; they must be on one device"
        )
    if shape is not None and not shapes_agree(states.shape, shape):
        raise ValueError(
            f"initial_states has shape {tuple(states.shape)}; it must be {meaning}, here {tuple(shape)}"
        )


def check_dtypes(x: str, tensors: Mapping[str, Any], matrices: Collection[str]) -> None:
    """Refuse tensors that are not real, are float64 beside a narrower ``tensors[x]``, or are ``matrices`` that torch would
    not multiply with its dtype, which autocast may change."""
    own = tensors[x].dtype
    cast = is_autocast(tensors[x])
    for name, value in tensors.items():
        dtype = value.dtype
        if dtype not in _REAL:
            raise TypeError(f"{name} has dtype {dtype}; accepted are {_REAL_NAMES}")
        wide = torch.float64 in (dtype, own)
        mixes = cast and not wide if name in matrices else dtype != torch.float64
        if dtype != own and not mixes:
            rule = "float64 does not mix with narrower dtypes"
            if not wide:
                rule = "they must be of one dtype, unless autocast is enabled"
            raise TypeError(f"{name} has dtype {dtype}, {x} {own}; {rule}")


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
