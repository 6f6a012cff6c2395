"""Stands in for ``mamba_ssm.modules.mamba2_simple``, of which it has ``Mamba2Simple``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from scan_registry.nn.mamba2 import Mamba2
from scan_registry.nn.mamba2_checks import packed_sequences
from scan_registry.nn.mamba2_inner import convolve_and_scan
from scan_registry.nn.mamba_checks import check_hidden, check_options
from scan_registry.nn.mamba_states import Device

if TYPE_CHECKING:
    from scan_registry.dispatch.select import Backend

__all__ = ["Mamba2Simple"]

_ACTIVATIONS = ("silu", "swish")


class Mamba2Simple(Mamba2):
    """``mamba_ssm.modules.mamba2_simple.Mamba2Simple``: ``Mamba2`` on whole sequences, whose initial states may be learned.

    Parameters have mamba_ssm's names, shapes, order and initial values. The norm is one in each group, as in mamba_ssm's
    memory-efficient path, whatever ``use_mem_eff_path`` is. A call takes no states. mamba_ssm's module has no ``step``; this one
    has that of ``Mamba2``, from the states of ``allocate_inference_cache``.

    Args:
        learnable_init_states: whether the state before the first step is a parameter, ``init_states``; else it is zero.
        activation: behind the convolution: ``"silu"`` or ``"swish"``.

    The others are those of ``scan_registry.nn.Mamba2``.

    Raises:
        TypeError, ValueError: an argument is not as described.
    """

    def __init__(
        self, d_model: int, d_state: int = 64, d_conv: int = 4, conv_init: float | None = None,
        expand: float = 2, headdim: int = 128, ngroups: int = 1,
        A_init_range: tuple[float, float] = (1, 16), dt_min: float = 0.001, dt_max: float = 0.1,
        dt_init_floor: float = 1e-4, dt_limit: tuple[float, float] = (0.0, float("inf")),
        learnable_init_states: bool = False, activation: str = "swish", bias: bool = False,
        conv_bias: bool = True, chunk_size: int = 256, use_mem_eff_path: bool = True,
        layer_idx: int | None = None, device: Device = None, dtype: torch.dtype | None = None, *,
        backend: Backend = "auto",
    ) -> None:  # fmt: skip
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation should be silu or swish, got: {activation!r}")
        check_options(dt_min, dt_max, learnable_init_states=learnable_init_states)
        super().__init__(
            d_model, d_state, d_conv, conv_init, expand, headdim, None, ngroups, A_init_range, dt_min=dt_min, dt_max=dt_max,
            dt_init_floor=dt_init_floor, dt_limit=dt_limit, bias=bias, conv_bias=conv_bias, chunk_size=chunk_size,
            use_mem_eff_path=use_mem_eff_path, layer_idx=layer_idx, device=device, dtype=dtype, backend=backend,
        )  # fmt: skip
        self.activation = activation
        self.learnable_init_states = learnable_init_states
        if learnable_init_states:
            size = self.nheads, self.headdim, self.d_state
            self.init_states = nn.Parameter(torch.zeros(size, device=device, dtype=dtype))
            self.init_states._no_weight_decay = True  # type: ignore[attr-defined]
            # Behind it, in mamba_ssm's order, by which optimizers number parameters in their state dicts.
            for name in ("dt_bias", "A_log", "D"):
                self._parameters[name] = self._parameters.pop(name)

    def allocate_inference_cache(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As that of ``Mamba2``, but that the scan begins with ``init_states``."""
        conv_state, ssm_state = super().allocate_inference_cache(*args, **kwargs)
        if self.learnable_init_states:
            ssm_state.copy_(self.init_states.detach().expand_as(ssm_state))
        return conv_state, ssm_state

    def forward(self, u: Tensor, seq_idx: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """The output of whole sequences.

        Args:
            u: (batch, L, d_model).
            seq_idx: (batch, L) integers: a sequence ends, for the convolution and for the scan, where the number changes.
                The initial states are before the first one.

        Returns:
            A tensor of the shape of ``u``, in its dtype, or in autocast's.

        Raises:
            TypeError, ValueError: an argument is not as described.
        """
        check_hidden(self, u, "u")
        rows = packed_sequences(self, u, seq_idx, None)
        initial = self.init_states.expand(rows, -1, -1, -1) if self.learnable_init_states else None
        y, _ = convolve_and_scan(
            *(self.in_proj(u), self._weights(), self._sizes, self.norm),
            initial_state=initial,
            seq_idx=seq_idx,
            backend=self.backend,
        )
        return self.out_proj(y)  # type: ignore[no-any-return]
