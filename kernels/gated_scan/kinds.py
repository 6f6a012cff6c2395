"""The kinds of gated scan: how gate and token of h[t] = gate[t] * h[t-1] + token[t] follow from what networks compute.

A kind is one line of ``KINDS`` and, for the kernels, one header ``kinds/<header>.cuh``. The function of its line,
in plain torch, is what the header is tested against, and what runs where no kernel does. It gets the inputs and the
channel parameters in the kind's order, all in the dtype that states are computed in and of shapes that broadcast, and
``reset``: True where the state starts anew, or None. It returns gate and token. The gate where a state starts anew does
not matter: what calls the function takes 0 for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from scan_registry.base.frozen import dataclass

if TYPE_CHECKING:
    from torch import Tensor

#: How steep a square root counts at most in backward passes, as in the implementations that people train with.
MOST_SLOPE = 1000.0
#: The factor c of RG-LRU: De et al., "Griffin" (2024), equation 3.
RG_LRU_SCALE = 8.0


@dataclass(frozen=True)
class Kind:
    """
    inputs      names of the sequences
    gates       inputs and channel parameters -> gate and token; ``reset`` is a keyword
    parameters  names of what each channel has one float32 number of, for all times
    header      of the kernels, without its ending; the kind's own name if it is empty
    option      what the header's ``option`` is
    """

    name: str
    inputs: tuple[str, ...]
    gates: Callable[..., tuple[Tensor, Tensor]]
    parameters: tuple[str, ...] = ()
    header: str = ""
    option: bool = False

    @property
    def source(self) -> str:
        """The header's name without its ending."""
        return self.header or self.name


def positive(x: Tensor) -> Tensor:
    """g(x) = x + 1/2 from 0 on, and sigmoid(x) below: Feng et al., "Were RNNs all we needed?" (2024), appendix B."""
    import torch

    return torch.where(x >= 0, x + 0.5, x.sigmoid())


def _linear(gates: Tensor, tokens: Tensor, reset: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return gates, tokens


def _min_gru(gate: Tensor, hidden: Tensor, reset: Tensor | None = None) -> tuple[Tensor, Tensor]:
    from scan_registry.kernels.gated_scan.functions import sigmoids

    taken, kept = sigmoids(gate)
    return kept, taken * positive(hidden)


def _min_gru_identity(
    gate: Tensor, hidden: Tensor, reset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    from scan_registry.kernels.gated_scan.functions import sigmoids

    taken, kept = sigmoids(gate)
    return kept, taken * hidden


def _min_lstm_gates(forget: Tensor, input: Tensor) -> tuple[Tensor, Tensor]:
    """s(f) / (s(f) + s(i)) and s(i) / (s(f) + s(i)), s the sigmoid; each is the sigmoid of a difference of logarithms."""
    from torch.nn.functional import logsigmoid

    from scan_registry.kernels.gated_scan.functions import sigmoids

    return sigmoids(logsigmoid(forget) - logsigmoid(input))


def _min_lstm(
    forget: Tensor, input: Tensor, hidden: Tensor, reset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    kept, taken = _min_lstm_gates(forget, input)
    return kept, taken * positive(hidden)


def _min_lstm_identity(
    forget: Tensor, input: Tensor, hidden: Tensor, reset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    kept, taken = _min_lstm_gates(forget, input)
    return kept, taken * hidden


def _root(x: Tensor) -> Tensor:
    """The square root, whose slope counts as ``MOST_SLOPE`` where it is steeper, at 0 as well."""
    import torch

    # The slope is 1 / (2 sqrt(x)). Below `least` the root is a constant plus a line of that slope, which has its value.
    least = 0.25 / MOST_SLOPE**2
    steep = x < least
    value = torch.where(steep, least, x).sqrt()
    line = MOST_SLOPE * x
    return torch.where(steep, line + (x.detach().clamp_min(0).sqrt() - line.detach()), value)


def _rg_lru(
    x: Tensor,
    recurrence_gate: Tensor,
    input_gate: Tensor,
    a_param: Tensor,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    import torch
    from torch.nn.functional import softplus

    if reset is not None:  # of no account there, so not to have a derivative of NaN either
        recurrence_gate = torch.where(reset, 0, recurrence_gate)
    log_gate = -RG_LRU_SCALE * recurrence_gate.sigmoid() * softplus(a_param)
    scale = _root(-torch.expm1(2 * log_gate))
    if reset is not None:
        scale = torch.where(reset, 1.0, scale)
    return log_gate.exp(), scale * (input_gate.sigmoid() * x)


def _hgrn(
    x: Tensor, forget: Tensor, lower_bound: Tensor, reset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    from torch.nn.functional import silu

    from scan_registry.kernels.gated_scan.functions import sigmoids

    # gate = b + (1 - b) s(f), so 1 - gate = (1 - b) s(-f): no difference of numbers close to 1.
    opened, closed = sigmoids(forget)
    above = 1 - lower_bound
    return lower_bound + above * opened, above * closed * silu(x)


#: By name.
KINDS = {
    kind.name: kind
    for kind in (
        Kind("linear", ("gates", "tokens"), _linear),
        Kind("min_gru", ("gate", "hidden"), _min_gru),
        Kind("min_gru_identity", ("gate", "hidden"), _min_gru_identity, (), "min_gru", True),
        Kind("min_lstm", ("forget", "input", "hidden"), _min_lstm),
        Kind(
            "min_lstm_identity",
            ("forget", "input", "hidden"),
            _min_lstm_identity,
            (),
            "min_lstm",
            True,
        ),
        Kind("rg_lru", ("x", "recurrence_gate", "input_gate"), _rg_lru, ("a_param",)),
        Kind("hgrn", ("x", "forget"), _hgrn, ("lower_bound",)),
    )
}
