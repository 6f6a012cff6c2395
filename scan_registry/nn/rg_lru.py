"""RG-LRU, with the parameters of transformers' RecurrentGemma."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from scan_registry.kernels.gated_scan.op.kinds import rg_lru
from scan_registry.nn.layer import Device, ScanLayer, advance_gated
from scan_registry.nn.layer_checks import check_divides, check_sizes
from scan_registry.nn.mamba_checks import check_positive

if TYPE_CHECKING:
    from scan_registry.dispatch.select import Backend

#: What google-deepmind/recurrentgemma calls the parameters.
_OTHER_NAMES = {
    "a_param": "recurrent_param",
    "input_gate.w": "input_gate_weight",
    "input_gate.b": "input_gate_bias",
    "a_gate.w": "recurrent_gate_weight",
    "a_gate.b": "recurrent_gate_bias",
}
#: Between which decays begin, at a recurrence gate of 1 and before the power of 8.
_RING = (0.9, 0.999)


class RGLRU(ScanLayer):
    """A real-gated linear recurrent unit: De et al., "Griffin" (2024), as in Google's RecurrentGemma.

    With r and i the sigmoids of block-diagonal maps of x, a = exp(−8 · r · softplus(recurrent_param)) and
    h[t] = a · h[t−1] + √(1 − a²) · i · x. At a reset, h[t] = i · x.

    Parameters are those of transformers' ``RecurrentGemmaRglru``: ``recurrent_param`` (width,), and
    ``input_gate_weight``, ``recurrent_gate_weight`` (heads, width / heads, width / heads) with ``input_gate_bias``,
    ``recurrent_gate_bias`` (heads, width / heads). A state dict of google-deepmind/recurrentgemma's ``RGLRU`` loads,
    too. Both implementations reset the state at position 0: pass ``reset=position_ids == 0``.

    Args:
        width: features of the input, of the output and of a state.
        num_heads: blocks of the gates' matrices.
        w_init_variance_scale: what multiplies the variance with which these matrices begin, 1 / (width / heads).
        batch_first: whether the batch comes before time.
        device: where parameters are.
        dtype: that of parameters.
        backend: that of ``scan_registry.rg_lru``.

    Raises:
        TypeError, ValueError: an argument is not as described.
    """

    operators = ("rg_lru",)

    def __init__(
        self, width: int, num_heads: int, w_init_variance_scale: float = 1.0,
        device: Device = None, dtype: torch.dtype | None = None, *, batch_first: bool = True,
        backend: Backend = "auto",
    ) -> None:  # fmt: skip
        check_sizes(width=width, num_heads=num_heads)
        check_divides("num_heads", num_heads, "width", width)
        check_positive(w_init_variance_scale=w_init_variance_scale)
        super().__init__(batch_first, dtype, backend)
        self.features = self.channels = self.width = width
        self.num_heads = num_heads
        self.w_init_variance_scale = w_init_variance_scale
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        block = width // num_heads
        self.recurrent_param = nn.Parameter(torch.empty(width, **place))
        self.input_gate_weight = nn.Parameter(torch.empty(num_heads, block, block, **place))
        self.input_gate_bias = nn.Parameter(torch.empty(num_heads, block, **place))
        self.recurrent_gate_weight = nn.Parameter(torch.empty(num_heads, block, block, **place))
        self.recurrent_gate_bias = nn.Parameter(torch.empty(num_heads, block, **place))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial values: decays exp(−softplus(recurrent_param)) spread evenly over the area of a ring, from 0.9 to
        0.999; matrices of normal numbers; biases of zero."""
        deviation = math.sqrt(self.w_init_variance_scale * self.num_heads / self.width)
        with torch.no_grad():
            for weight in (self.input_gate_weight, self.recurrent_gate_weight):
                weight.normal_(0.0, deviation)
            self.input_gate_bias.zero_()
            self.recurrent_gate_bias.zero_()
            squares = torch.empty(
                self.width, device=self.recurrent_param.device, dtype=torch.float32
            ).uniform_(*(radius**2 for radius in _RING))
            # softplus(p) is to be -log(decay): its inverse is log(expm1(y)).
            self.recurrent_param.copy_(torch.expm1(-0.5 * squares.log()).log())

    @property
    def matrix(self) -> Tensor:
        return self.input_gate_weight

    def _gates(self, x: Tensor) -> tuple[Tensor, ...]:
        """``x`` and the gates before their sigmoids, as the scan takes them; all of one dtype."""
        blocks = x.reshape(-1, self.num_heads, self.width // self.num_heads).transpose(0, 1)
        gates = []
        for weight, bias in (
            (self.recurrent_gate_weight, self.recurrent_gate_bias),
            (self.input_gate_weight, self.input_gate_bias),
        ):
            mapped = torch.baddbmm(bias.unsqueeze(1), blocks, weight)  # the bias in the same pass
            gates.append(mapped.transpose(0, 1).reshape(x.shape).to(x.dtype))
        return x, *gates

    def _sequence(self, x: Tensor, how: dict[str, Any]) -> Tensor | tuple[Tensor, Tensor]:
        scan: Any = rg_lru
        results: Tensor | tuple[Tensor, Tensor] = scan(*self._gates(x), self.recurrent_param, **how)
        return results

    def _next(self, x: Tensor, state: Tensor | None, reset: Tensor | None) -> tuple[Tensor, Tensor]:
        state = advance_gated("rg_lru", self._gates(x), state, reset, (self.recurrent_param,))
        return state.to(x.dtype), state

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for other, ours in _OTHER_NAMES.items():
            if prefix + other in state_dict:
                state_dict[prefix + ours] = state_dict.pop(prefix + other)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """The sizes, and what else is not the default."""
        parts = [f"{self.width}, num_heads={self.num_heads}"]
        if self.w_init_variance_scale != 1:
            parts.append(f"w_init_variance_scale={self.w_init_variance_scale}")
        return self._extra(*parts)
