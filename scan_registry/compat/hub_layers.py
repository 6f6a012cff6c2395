"""Layers for ``kernels.kernelize``: what replaces functions and modules of transformers' models that ask Hugging Face's Hub for
kernels. ``kernels`` looks for them in a copy of this package that it has loaded (ci/hub.py), as ``layers``.

Each class has the name under which transformers asks, and its ``forward`` takes what transformers' own function takes. Options
that this package's function does not know are ignored, as transformers does with mamba_ssm's and causal_conv1d's functions.
``kernels`` demands classes without a constructor and without members of their own, except for ``can_torch_compile`` and
``has_backward``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from scan_registry.compat import causal_conv1d as conv
from scan_registry.compat.mamba_ssm.ops import selective_scan_interface as scan
from scan_registry.compat.mamba_ssm.ops.triton import selective_state_update as update
from scan_registry.compat.mamba_ssm.ops.triton import ssd_combined as ssd
from scan_registry.nn.gated_norm import gated_norm

__all__ = [
    "RMSNormGated",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "mamba_chunk_scan_combined",
    "selective_scan_fn",
    "selective_state_update",
]

_NO_LIMIT = (0.0, float("inf"))


def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


_CONV = _parameters(conv.causal_conv1d_fn)
_SCAN = _parameters(scan.selective_scan_fn)
_SSD = _parameters(ssd.mamba_chunk_scan_combined)
_UPDATE = _parameters(update.selective_state_update)


def _known(options: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in names}


class causal_conv1d_fn(nn.Module):
    """``scan_registry.compat.causal_conv1d.causal_conv1d_fn``."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Any:
        return conv.causal_conv1d_fn(
            hidden_states, weight, bias, activation=activation, **_known(kwargs, _CONV)
        )


class causal_conv1d_update(nn.Module):
    """``scan_registry.compat.causal_conv1d.causal_conv1d_update``, which changes ``conv_state`` and records no derivative."""

    can_torch_compile = True
    has_backward = False

    def forward(
        self,
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        return conv.causal_conv1d_update(hidden_states, conv_state, weight, bias, activation)


class selective_scan_fn(nn.Module):
    """The scan of Mamba, ``scan_registry.compat.mamba_ssm.ops.selective_scan_interface.selective_scan_fn``."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
        D: Tensor | None = None, z: Tensor | None = None, delta_bias: Tensor | None = None,
        delta_softplus: bool = False, return_last_state: bool = False, use_mambapy: bool = False,
        use_associative_scan: bool = False, **kwargs: Any,
    ) -> Any:  # fmt: skip
        return scan.selective_scan_fn(
            *(hidden_states, dt, A, B, C, D, z, delta_bias, delta_softplus, return_last_state),
            **_known(kwargs, _SCAN),
        )


class selective_state_update(nn.Module):
    """One step of Mamba's or Mamba-2's scan, which changes ``state`` and records no derivative."""

    can_torch_compile = True
    has_backward = False

    def forward(
        self, state: Tensor, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
        D: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
        z: Tensor | None = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        return update.selective_state_update(
            *(state, hidden_states, dt, A, B, C, D, z, dt_bias, dt_softplus),
            **_known(kwargs, _UPDATE),
        )


class mamba_chunk_scan_combined(nn.Module):
    """The scan of Mamba-2, ``scan_registry.compat.mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined``."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int,
        D: Tensor | None = None, dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None, dt_softplus: bool = False,
        dt_limit: tuple[float, float] = _NO_LIMIT, return_final_states: bool = False,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        return ssd.mamba_chunk_scan_combined(
            *(hidden_states, dt, A, B, C, chunk_size, D),
            dt_bias=dt_bias,
            initial_states=initial_states,
            dt_softplus=dt_softplus,
            dt_limit=dt_limit,
            return_final_states=return_final_states,
            **_known(kwargs, _SSD),
        )


class RMSNormGated(nn.Module):
    """norm(x)·act(gate) for a module with ``weight``, ``variance_epsilon`` and ``activation``, which is "silu" or "sigmoid".

    It is computed in float32 by operators of torch, and therefore not faster than the module's own ``forward``.
    """

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        module: Any = self
        weight, eps, activation = module.weight, module.variance_epsilon, module.activation
        if activation in ("silu", "swish"):
            return gated_norm(hidden_states, weight, None, gate, eps=eps)
        if activation != "sigmoid":
            raise ValueError(f"activation is {activation!r}; accepted are 'silu' and 'sigmoid'")
        y = gated_norm(hidden_states.float(), weight, eps=eps)
        return (y * torch.sigmoid(gate.float())).to(hidden_states.dtype)
