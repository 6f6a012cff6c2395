"""``scan_summary``: the affine map of a part of a sequence, for users who write their own scan over ranks."""

from __future__ import annotations

from torch import Tensor

from scan_registry.dispatch.select import Backend
from scan_registry.distributed.local_tensors import refused
from scan_registry.ops.derivatives import PLAIN_TYPES
from scan_registry.ops.linear_scan_summary import linear_scan_summary
from scan_registry.ops.sharded import is_dtensor

__all__ = ["scan_summary"]


def scan_summary(
    gates: Tensor,
    tokens: Tensor,
    *,
    dim: int = -1,
    reverse: bool = False,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """The affine map of this rank's part of a sequence, from the state before the part to the state after it.

    The function does not communicate. The state after the part is ``product * state_before + state_from_zero``. A part without
    steps has the map 1 and 0. The maps of two parts in a row, ``(p1, s1)`` and then ``(p2, s2)``, compose to
    ``(p2 * p1, p2 * s1 + s2)``. ``scan_registry.linear_scan`` computes the same recurrence: if ``products`` and ``states`` are
    the gathered maps of all ranks, stacked in scan order, the states after each part are
    ``linear_scan(products, states, initial_state, dim=0)``.

    Args:
        gates: this rank's part, as for ``scan_registry.linear_scan``.
        tokens: this rank's part, as for ``scan_registry.linear_scan``.
        dim: the time dimension.
        reverse: the map of x[t] = gates[t] * x[t+1] + tokens[t] instead.
        backend: as for ``scan_registry.linear_scan_summary``.

    Returns:
        The product of the gates, and the last state of a scan that starts from zero. Both have the shape of ``tokens`` without
        ``dim``. Both are float32, or of the dtype of ``tokens`` if that is float64 or complex. Differentiable any number of times.

    Raises:
        TypeError: an argument is not a tensor, or a DTensor, or a dtype is not supported or does not mix.
        ValueError: shapes do not broadcast, devices differ, or ``dim`` or ``backend`` is out of range.
        NoKernelError: as for ``scan_registry.linear_scan_summary``.
    """
    for name, tensor in (("gates", gates), ("tokens", tokens)):
        if type(tensor) not in PLAIN_TYPES and is_dtensor(tensor):
            raise refused("scan_summary", name, tensor)
    return linear_scan_summary(gates, tokens, dim=dim, reverse=reverse, backend=backend)
