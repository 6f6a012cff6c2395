"""LRU, with the parameters of minimal-LRU."""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from scan_registry.kernels.linear_scan.op.function import linear_scan
from scan_registry.nn.complex_maps import from_complex, into_complex, weight_from, weight_into
from scan_registry.nn.layer import Device, ScanLayer, advance, map_states, wide
from scan_registry.nn.layer_checks import check_sizes
from scan_registry.nn.mamba_checks import check_positive

if TYPE_CHECKING:
    from scan_registry.dispatch.select import Backend


class LRU(ScanLayer):
    """A linear recurrent unit: Orvieto et al., "Resurrecting recurrent neural networks for long sequences" (2023).

    h[t] = λ · h[t−1] + γ · (B x[t]) and y[t] = Re(C h[t]) + D · x[t], with complex λ = exp(−exp(nu_log) + i · exp(theta_log))
    and γ = exp(gamma_log). States are complex64, or complex128 for float64, which a GPU has no kernel for.

    Parameters are those of minimal-LRU, and as they are real, flax's arrays load as they are: ``theta_log``, ``nu_log``,
    ``gamma_log`` (d_hidden,), ``B_re``, ``B_im`` (d_hidden, d_model), ``C_re``, ``C_im`` (d_model, d_hidden) and ``D``
    (d_model,).

    Args:
        d_hidden: complex numbers of a state.
        d_model: features of the input and of the output.
        r_min: decays begin with absolute values between it and ``r_max``, spread evenly over the area of that ring.
        r_max: see ``r_min``.
        max_phase: they begin with phases from 0 to it.
        batch_first, device: as for ``RGLRU``.
        dtype: that of parameters, but for ``theta_log``, ``nu_log`` and ``gamma_log``, which are float32 or float64.
        backend: that of ``scan_registry.linear_scan``.

    Raises:
        TypeError, ValueError: an argument is not as described.
    """

    is_complex, operators = True, ("linear_scan",)

    def __init__(
        self, d_hidden: int, d_model: int, r_min: float = 0.0, r_max: float = 1.0,
        max_phase: float = 6.28, *, batch_first: bool = True, device: Device = None,
        dtype: torch.dtype | None = None, backend: Backend = "auto",
    ) -> None:  # fmt: skip
        check_sizes(d_hidden=d_hidden, d_model=d_model)
        check_positive(max_phase=max_phase)
        radii = r_min, r_max
        if not all(isinstance(r, numbers.Real) for r in radii) or not 0 <= r_min < r_max <= 1:
            raise ValueError(
                f"r_min and r_max should be 0 <= r_min < r_max <= 1, got: {r_min!r} and {r_max!r}"
            )
        super().__init__(batch_first, dtype, backend)
        self.channels = self.d_hidden = d_hidden
        self.features = self.d_model = d_model
        self.r_min, self.r_max, self.max_phase = r_min, r_max, max_phase
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        decays: dict[str, Any] = {"device": device, "dtype": torch.float32}
        if (torch.get_default_dtype() if dtype is None else dtype) == torch.float64:
            decays["dtype"] = torch.float64
        self.theta_log = nn.Parameter(torch.empty(d_hidden, **decays))
        self.nu_log = nn.Parameter(torch.empty(d_hidden, **decays))
        self.gamma_log = nn.Parameter(torch.empty(d_hidden, **decays))
        self.B_re = nn.Parameter(torch.empty(d_hidden, d_model, **place))
        self.B_im = nn.Parameter(torch.empty(d_hidden, d_model, **place))
        self.C_re = nn.Parameter(torch.empty(d_model, d_hidden, **place))
        self.C_im = nn.Parameter(torch.empty(d_model, d_hidden, **place))
        self.D = nn.Parameter(torch.empty(d_model, **place))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial values: decays on a ring, inputs scaled so that states have the inputs' variance, Glorot's matrices."""
        with torch.no_grad():
            # Of float32, 1 - uniform is never 0, so no decay is 0, which has no logarithm.
            uniform = 1 - torch.rand_like(self.nu_log)
            squares = uniform * (self.r_max**2 - self.r_min**2) + self.r_min**2
            # Nor is one 1, which never decays.
            squares.clamp_(max=1 - torch.finfo(squares.dtype).eps)
            self.nu_log.copy_((-0.5 * squares.log()).log())
            self.theta_log.copy_((self.max_phase * (1 - torch.rand_like(uniform))).log())
            self.gamma_log.copy_(0.5 * torch.log1p(-squares))
            for matrix in (self.B_re, self.B_im):
                matrix.normal_(0.0, 1 / math.sqrt(2 * self.d_model))
            for matrix in (self.C_re, self.C_im):
                matrix.normal_(0.0, 1 / math.sqrt(self.d_hidden))
            self.D.normal_()

    @property
    def matrix(self) -> Tensor:
        return self.B_re

    def _decays(self) -> Tensor:
        """(d_hidden,), complex."""
        return torch.polar((-wide(self.nu_log).exp()).exp(), wide(self.theta_log).exp())

    def _tokens(self, x: Tensor) -> Tensor:
        """γ · (B x), (..., d_hidden), complex."""
        scale = wide(self.gamma_log).exp().unsqueeze(-1)
        return into_complex(x, weight_into(self.B_re * scale, self.B_im * scale))

    def _output(self, states: Tensor, x: Tensor) -> Tensor:
        y = from_complex(states, weight_from(self.C_re, self.C_im), x)
        return y + (self.D * x).to(y.dtype)

    def _sequence(self, x: Tensor, how: dict[str, Any]) -> Tensor | tuple[Tensor, Tensor]:
        tokens = self._tokens(x)
        results: Any = linear_scan(self._decays().to(tokens.dtype), tokens, **how)
        return map_states(results, lambda states: self._output(states, x))

    def _next(self, x: Tensor, state: Tensor | None, reset: Tensor | None) -> tuple[Tensor, Tensor]:
        tokens = self._tokens(x)
        state = advance(self._decays().to(tokens.dtype), tokens, state, reset)
        return self._output(state, x), state

    def extra_repr(self) -> str:
        """The sizes, and what else is not the default."""
        parts = [f"{self.d_hidden}, {self.d_model}"]
        for name, usual in (("r_min", 0.0), ("r_max", 1.0), ("max_phase", 6.28)):
            if getattr(self, name) != usual:
                parts.append(f"{name}={getattr(self, name)}")
        return self._extra(*parts)
