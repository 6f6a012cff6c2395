"""The kinds of gated scan: how gate and token of h[t] = gate[t] * h[t-1] + token[t] follow from what networks compute.

A kind is one entry of ``KINDS`` and, for the kernels, one header ``kinds/<header>.cuh``. The entry has a function in plain
torch. The header is tested against this function, and the function runs where no kernel does. A kind that has a header
``cpu/kinds/<header>.h``, too, is computed in C on the CPU.

The function gets the inputs and the channel parameters in the kind's order, and ``reset``, which is True where the state starts
anew, or None. All numbers have the dtype that states are computed in, and shapes that broadcast. The function returns gate and
token. At a reset the gate may be anything, since the caller takes 0 for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from scan_registry.base.frozen import dataclass

if TYPE_CHECKING:
    from torch import Tensor

#: The most that the slope of RG-LRU's square root counts in backward passes, as in the published implementations.
MOST_SLOPE = 1000.0
#: The factor c of RG-LRU: De et al., "Griffin" (2024), equation 3.
RG_LRU_SCALE = 8.0


@dataclass(frozen=True)
class Kind:
    """
    inputs      names of the sequences
    gates       inputs and channel parameters -> gate and token; ``reset`` is a keyword
    parameters  names of the channel parameters: one float32 number for each channel, the same at all times
    header      the name of the kernels' header without its ending; the kind's own name if it is empty
    option      the value of ``option`` in the header, which lets two kinds share one
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
    """g(x) = x + 1/2 for x >= 0, else sigmoid(x): Feng et al., "Were RNNs all we needed?" (2024), appendix B."""
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
    """s(f) / (s(f) + s(i)) and s(i) / (s(f) + s(i)) with s the sigmoid. Each is computed as the sigmoid of a difference of
    logarithms, which does not underflow."""
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
    """The square root, with a derivative that is at most ``MOST_SLOPE``, at 0 as well."""
    import torch

    # The slope is 1 / (2 sqrt(x)), which is MOST_SLOPE at `least`. Below, the sum has the value of the root, and the derivative
    # of `line`.
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

    if (
        reset is not None
    ):  # it has no effect at a reset, and its derivative must be 0 there, even if it is NaN
        recurrence_gate = torch.where(reset, 0, recurrence_gate)
    log_gate = -RG_LRU_SCALE * recurrence_gate.sigmoid() * softplus(a_param)
    # 1 - gate², from log(gate) since gate may be near 1. Autograd would take the derivative of expm1 as its result plus 1, which
    # loses the digits of a gate near 0: in the sum, expm1 gives the value alone and exp the derivative.
    square = (2 * log_gate).exp()
    scale = _root(square.detach() - square - torch.expm1(2 * log_gate).detach())
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


#: All kinds by name.
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
