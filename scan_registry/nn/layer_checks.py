"""What the modules on scans refuse, in torch.nn's style: what was expected, and what was given."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scan_registry.kernels.gated_scan.op.arguments import check_parameter
from scan_registry.nn.common_checks import check_size, expect_device, expect_size, expect_tensor
from scan_registry.nn.mamba_checks import DTYPES, check_device, check_dtype, check_dtype_and_backend

if TYPE_CHECKING:
    from scan_registry.nn.layer import ScanLayer

_DTYPES = ", ".join(map(str, DTYPES))


# --- Constructors -----------------------------------------------------------------------------


def check_common(batch_first: Any, dtype: Any, backend: Any) -> None:
    """Refuse what all modules on scans refuse."""
    check_bools(batch_first=batch_first)
    check_dtype_and_backend(dtype, backend)


def check_sizes(**sizes: Any) -> None:
    """Refuse what is no whole number above 0."""
    for name, size in sizes.items():
        check_size(name, size)


def check_bools(**flags: Any) -> None:
    """Refuse what is no bool."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} should be of type bool, got: {value!r}")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Refuse what is none of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} should be {' or '.join(map(repr, choices))}, got: {value!r}")


def check_divides(name: str, parts: int, of: str, size: int) -> None:
    """Refuse parts that do not share a size equally."""
    if size % parts:
        raise ValueError(f"{of} ({size}) must be divisible by {name} ({parts})")


def check_absent(arguments: Mapping[str, tuple[Any, Any]]) -> None:
    """Refuse arguments of public implementations that these modules have only one value of."""
    for name, (value, only) in arguments.items():
        if value != only or isinstance(value, bool) != isinstance(only, bool):
            raise ValueError(
                f"{name} should be {only!r}, got: {value!r}; there is no kernel for it"
            )


# --- Calls ------------------------------------------------------------------------------------


def check_input(module: ScanLayer, x: Any, *, step: bool = False) -> None:
    """Refuse an input that does not go with the module's parameters."""
    name, matrix = type(module).__name__, module.matrix
    expect_tensor(name, "x", x)
    if x.dim() != (2 if step else 3) or x.shape[-1] != module.features:
        leading = "batch" if step else "batch, time" if module.batch_first else "time, batch"
        raise ValueError(
            f"{name}: Expected x of size ({leading}, {module.features}), got {tuple(x.shape)}"
        )
    check_dtype(name, "x", x, matrix)
    if matrix is not None:
        check_device(name, "x", x, matrix)


def check_previous(module: ScanLayer, state: Any, *, packed: bool) -> None:
    """Refuse what is no state with a dimension for time, of one step, or for packed sequences."""
    name, size = (
        type(module).__name__,
        f"(batch, {'sequences' if packed else 1}, {module.channels})",
    )
    expect_tensor(name, "prev_hidden", state)
    if state.dim() != 3 or not (packed or state.shape[1] == 1):
        raise ValueError(f"{name}: Expected prev_hidden of size {size}, got {tuple(state.shape)}")


def check_bound(module: ScanLayer, bound: Tensor, x: Tensor) -> None:
    """Refuse a lower bound of forget gates that does not go with the input of one step, as a call on a sequence does."""
    name, size = type(module).__name__, (module.channels,)
    expect_tensor(name, "lower_bound", bound)
    expect_size(name, "lower_bound", bound, size)
    if bound.dtype not in DTYPES:
        raise TypeError(f"{name}: Expected lower_bound of dtype {_DTYPES}, got {bound.dtype}")
    if bound.dtype == torch.float64 and x.dtype != torch.float64:
        raise TypeError(
            f"{name}: Expected lower_bound of dtype {x.dtype} or narrower, got {bound.dtype}"
        )
    expect_device(name, "lower_bound", bound, x)
    check_parameter("lower_bound", bound)


def check_scale(module: ScanLayer, scale: Any, sizes: Sequence[tuple[int, ...]], x: Tensor) -> None:
    """Refuse what is no real number for all steps, or for those that ``sizes`` are the shapes of."""
    name = type(module).__name__
    if not isinstance(scale, Tensor):
        if not isinstance(scale, numbers.Real) or isinstance(scale, bool):
            raise TypeError(
                f"{name}: Expected step_scale to be a number or a Tensor, got {type(scale).__name__}"
            )
        # NaN is neither; ``math.isfinite`` would break torch.compile's graph.
        if not 0 < float(scale) < math.inf:
            raise ValueError(f"{name}: Expected step_scale to be a number above 0, got {scale!r}")
        return
    expect_tensor(name, "step_scale", scale)
    if scale.is_complex() or scale.dtype == torch.bool:
        raise TypeError(f"{name}: Expected step_scale of real numbers, got {scale.dtype}")
    if scale.dim() and tuple(scale.shape) not in sizes:
        raise ValueError(
            f"{name}: Expected step_scale to be a number or of size {' or '.join(map(str, sizes))}, got "
            f"{tuple(scale.shape)}"
        )
    if scale.dim():
        expect_device(name, "step_scale", scale, x)


def check_state(module: ScanLayer, state: Any, x: Tensor) -> None:
    """Refuse a state of one step that does not go with the input."""
    if state is None:
        return
    name, size = type(module).__name__, (x.shape[0], module.channels)
    expect_tensor(name, "state", state)
    expect_size(name, "state", state, size)
    expect_device(name, "state", state, x)
    if not state.is_floating_point() and not (state.is_complex() and module.is_complex):
        kind = "complex or floating-point" if module.is_complex else "floating-point"
        raise TypeError(f"{name}: Expected a {kind} state, got {state.dtype}")
