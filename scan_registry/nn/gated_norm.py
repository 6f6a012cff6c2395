"""Norms of groups of features with a gate, as Mamba-2 has them between its scan and its last projection."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from scan_registry.nn.common_checks import check_size
from scan_registry.nn.exports import Exports
from scan_registry.ops.checks import as_bool

Device = torch.device | str | int | None


def gated_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    z: Tensor | None = None,
    *,
    eps: float,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    centered: bool = False,
) -> Tensor:
    """x over the root of its mean square in each group of the last dimension, times ``weight``, plus ``bias``.

    Computed in float32, in float64 for float64, and returned in the dtype of x. ``centered`` subtracts each group's mean
    first, as a layer norm does. With z the result is norm(x)·silu(z), or norm(x·silu(z)) if not ``norm_before_gate``.

    Args:
        x: (…, features).
        weight: (features,).
        bias: (features,); None for zeros.
        z: like x; None for no gate.
        eps: what is added to the mean square.
        group_size: features of a group; None for one group.
        norm_before_gate: whether the gate multiplies the norm, not its input.
        centered: whether the mean is subtracted.

    Raises:
        TypeError: an argument is of the wrong type, or a tensor is not of a floating-point dtype.
        ValueError: a shape or a device does not fit, ``eps`` is negative or not finite, or ``group_size`` does not divide the
            features.
    """
    _check_tensors(x, weight, bias, z)
    _check_options(eps, group_size, norm_before_gate)
    size = _size_of_groups(x, group_size)
    if z is bias is None and size == x.shape[-1] and not centered and weight.dtype == x.dtype:
        return rms_norm(x, (size,), weight, eps)  # which computes in float32, too
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    gate = None if z is None else silu(z.to(dtype))
    # A product with the gate is in its dtype.
    y = x * gate if gate is not None and not norm_before_gate else x.to(dtype)
    y = _norm_of_groups(y, weight.to(dtype), size, eps, centered)
    if bias is not None:
        y = y + bias.to(dtype)
    if gate is not None and norm_before_gate:
        y = y * gate
    return y.to(x.dtype)


def _size_of_groups(x: Tensor, group_size: int | None) -> int:
    features = x.shape[-1] if x.dim() else 0
    size = features if group_size is None else group_size
    if size < 1 or features % size:
        raise ValueError(f"group_size is {size}; it must divide the {features} features of x")
    return size


def _norm_of_groups(y: Tensor, weight: Tensor, size: int, eps: float, centered: bool) -> Tensor:
    """Groups of the last dimension over the roots of their mean squares, times ``weight``."""
    features = y.shape[-1]
    if size == features and not centered:  # torch's norm multiplies by the weight, too
        return rms_norm(y, (size,), weight, eps)
    groups = y.unflatten(-1, (features // size, size))
    if centered:
        groups = groups - groups.mean(-1, keepdim=True)
    return rms_norm(groups, (size,), None, eps).flatten(-2) * weight


def _check_tensors(x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor | None) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a {type(x).__name__}; accepted is a tensor")
    features = tuple(x.shape[-1:])
    expected = {
        "x": (x, tuple(x.shape)),
        "weight": (weight, features),
        "bias": (bias, features),
        "z": (z, tuple(x.shape)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is None and name in ("bias", "z"):
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; accepted is a tensor")
        if not tensor.is_floating_point():
            raise TypeError(f"{name} has dtype {tensor.dtype}; accepted are floating-point dtypes")
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; for x of shape {tuple(x.shape)} it must be {shape}"
            )
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, and x on {x.device}")


def _check_options(eps: float, group_size: int | None, norm_before_gate: bool) -> None:
    if not isinstance(eps, (int, float)) or isinstance(eps, bool):
        raise TypeError(f"eps is a {type(eps).__name__}; accepted is a number")
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps is {eps}; accepted are finite numbers from 0 on")
    if group_size is not None and (not isinstance(group_size, int) or isinstance(group_size, bool)):
        raise TypeError(
            f"group_size is a {type(group_size).__name__}; accepted are an int and None"
        )
    as_bool("norm_before_gate", norm_before_gate)


class GroupNorm(Exports):
    """What ``RMSNormGated`` and mamba_ssm's ``LayerNorm`` share."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    _centered = False

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_size("hidden_size", hidden_size)
        if group_size is not None:
            check_size("group_size", group_size)
        if group_size is not None and hidden_size % group_size:
            raise ValueError(
                f"group_size should divide hidden_size, got: {group_size} and {hidden_size}"
            )
        _check_options(eps, group_size, norm_before_gate)
        super().__init__()
        self.hidden_size = hidden_size
        self.eps = eps
        self.group_size = group_size
        self.norm_before_gate = norm_before_gate
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        bias = torch.zeros(hidden_size, device=device, dtype=dtype) if self._centered else None
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias))

    def reset_parameters(self) -> None:
        """Ones as the weight, zeros as the bias."""
        with torch.no_grad():
            self.weight.fill_(1)
            if self.bias is not None:
                self.bias.zero_()

    def extra_repr(self) -> str:
        """The sizes, and what else is not the default."""
        parts = [f"{self.hidden_size}, eps={self.eps}"]
        if self.group_size is not None:
            parts.append(f"group_size={self.group_size}")
        if not self.norm_before_gate:
            parts.append("norm_before_gate=False")
        return ", ".join(parts)

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, z: Tensor | None = None) -> Tensor: ...

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """norm(x); with z norm(x)·silu(z), or norm(x·silu(z)) if not ``norm_before_gate``.

        Args:
            x: (…, hidden_size).
            z: like x; None for no gate.

        Returns:
            A tensor of the shape and the dtype of x, computed in float32, in float64 for float64.

        Raises:
            ValueError: a shape is not as described.
        """
        if isinstance(x, Tensor) and x.shape[-1:] != (self.hidden_size,):
            raise ValueError(
                f"{type(self).__name__}: Expected x of size (..., {self.hidden_size}), got {tuple(x.shape)}"
            )
        return gated_norm(
            *(x, self.weight, self.bias, z),
            eps=self.eps,
            group_size=self.group_size,
            norm_before_gate=self.norm_before_gate,
            centered=self._centered,
        )


class RMSNormGated(GroupNorm):
    """mamba_ssm's ``RMSNorm`` with a gate: x over the root of its mean square, times a weight.

    The parameter has mamba_ssm's name, shape and initial value, and the name that transformers' gated norms have.

    Args:
        hidden_size: features.
        eps: what is added to the mean square.
        group_size: features of a group, each of which is normalised by itself; None for one group.
        norm_before_gate: whether the gate multiplies the norm, not its input.
        device: where the weight is.
        dtype: that of the weight.

    Raises:
        TypeError, ValueError: an argument is not as described.
    """
