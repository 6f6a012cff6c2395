"""Stands in for ``mamba_ssm.ops.triton.layernorm_gated``: norms of groups of features, with a gate on either side of them.

What the functions do differently from those that they replace: tensors of any strides and any number of dimensions; groups
of any size; CPU tensors; float64 in float64; derivatives of any order.
"""

from __future__ import annotations

from torch import Tensor

from scan_registry.nn.gated_norm import GroupNorm, gated_norm
from scan_registry.nn.gated_norm import RMSNormGated as RMSNorm
from scan_registry.ops.checks import check_dense

__all__ = ["LayerNorm", "RMSNorm", "layernorm_fn", "rmsnorm_fn"]


def layernorm_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor | None = None, eps: float = 1e-6,
    group_size: int | None = None, norm_before_gate: bool = True, is_rms_norm: bool = False,
) -> Tensor:  # fmt: skip
    """norm(x), times ``weight``, plus ``bias``; with z norm(x)·silu(z), or norm(x·silu(z)) if not ``norm_before_gate``.

    Args:
        x: (…, features).
        weight: (features,).
        bias: (features,); None for zeros.
        z: like x; None for no gate.
        eps: what is added to the variance, or to the mean square.
        group_size: features of a group, each of which is normalised by itself; None for one group.
        norm_before_gate: whether the gate multiplies the norm, not its input.
        is_rms_norm: divide by the root of the mean square, and subtract no mean.

    Returns:
        A tensor of the shape and the dtype of x, computed in float32, in float64 for float64.

    Raises:
        TypeError, ValueError: the arguments are not as described.
    """
    for name, value in {"x": x, "weight": weight, "bias": bias, "z": z}.items():
        if value is not None or name in ("x", "weight"):
            check_dense(name, value)
    return gated_norm(
        *(x, weight, bias, z),
        eps=eps,
        group_size=group_size,
        norm_before_gate=norm_before_gate,
        centered=not is_rms_norm,
    )


def rmsnorm_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor | None = None, eps: float = 1e-6,
    group_size: int | None = None, norm_before_gate: bool = True,
) -> Tensor:  # fmt: skip
    """``layernorm_fn`` with ``is_rms_norm``."""
    return layernorm_fn(x, weight, bias, z, eps, group_size, norm_before_gate, True)


class LayerNorm(GroupNorm):
    """A layer norm of groups of features with a gate, which has a weight and a bias.

    Args:
        hidden_size: features.
        eps: what is added to the variance.
        group_size: features of a group, each of which is normalised by itself; None for one group.
        norm_before_gate: whether the gate multiplies the norm, not its input.
        device: where the parameters are.
        dtype: that of the parameters.

    Raises:
        TypeError, ValueError: an argument is not as described.
    """

    _centered = True
