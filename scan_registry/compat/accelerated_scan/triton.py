"""Stands in for ``accelerated_scan.triton`` of 0.2.0, which has been ``accelerated_scan.scalar`` since."""

from __future__ import annotations

from torch import Tensor

from scan_registry.compat import pair


def scan(gates: Tensor, tokens: Tensor) -> Tensor:
    """h[t] = gates[t] * h[t-1] + tokens[t] along the last dimension, from h[-1] = 0.

    Runs the Triton kernels of this package, which are compiled ahead of time. As
    ``accelerated_scan.triton.scan`` of 0.2.0, except that

    - T is any length, not a power of two, and no kernel is compiled for each;
    - neither tensor has to be contiguous, and they may be on the CPU;
    - the recurrence is computed in float32 or better, and second derivatives are right.

    Args:
        gates, tokens: as for ``accelerated_scan.warp.scan``, as are results and errors.
    """
    return pair.scan("(B, C, T)", "triton", gates=gates, tokens=tokens)
