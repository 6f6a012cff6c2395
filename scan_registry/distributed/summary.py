"""What a part of a sequence does to the state before it, for those who build a scan over ranks of their own."""

from __future__ import annotations

from torch import Tensor

from scan_registry.dispatch.select import Backend
from scan_registry.ops.linear_scan_summary import linear_scan_summary

__all__ = ["scan_summary"]


def scan_summary(
    gates: Tensor,
    tokens: Tensor,
    *,
    dim: int = -1,
    reverse: bool = False,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """The affine map of this rank's part of a sequence, without any exchange.

    The state after the part is ``product * state_before + state_from_zero``. A part of no steps has the map 1 and 0. Maps of
    parts that follow one another compose: the second after the first is ``(p2 * p1, p2 * s1 + s2)``, which is itself the
    recurrence that ``scan_registry.linear_scan`` computes. So of the gathered maps of all ranks, in the order of the scan, the
    state after each part is ``linear_scan(products, states, initial_state, dim=0)``.

    Args:
        gates: this rank's, as for ``scan_registry.linear_scan``.
        tokens: this rank's, as for ``scan_registry.linear_scan``.
        dim: the time dimension.
        reverse: of x[t] = gates[t] * x[t+1] + tokens[t].
        backend: as for ``scan_registry.linear_scan_summary``.

    Returns:
        The product of the gates, and the last state from a state of zero: both in the shape of a state, that of ``tokens``
        without ``dim``, and in float32, or float64 or complex64 for such tokens. Differentiable, any number of times.

    Raises:
        TypeError: an argument is not a tensor, or a dtype is not supported or does not mix.
        ValueError: shapes do not broadcast, devices differ, or ``dim`` or ``backend`` is out of range.
        NoKernelError: as for ``scan_registry.linear_scan_summary``.
    """
    return linear_scan_summary(gates, tokens, dim=dim, reverse=reverse, backend=backend)
