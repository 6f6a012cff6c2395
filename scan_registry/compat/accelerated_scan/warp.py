"""Stands in for ``accelerated_scan.warp``, whose kernels are CUDA C++ that it compiles when imported."""

from __future__ import annotations

from torch import Tensor

from scan_registry.compat import pair
from scan_registry.compat.arguments import as_flag


def scan(gates: Tensor, tokens: Tensor) -> Tensor:
    """h[t] = gates[t] * h[t-1] + tokens[t] along the last dimension, from h[-1] = 0.

    Runs the CUDA kernels of this package. As ``accelerated_scan.warp.scan``, except that

    - T is any length, not a power of two from 32 to 65,536, and C is not limited to 65,535;
    - bfloat16 and float16 are right at every length (there: wrong from T = 4096 on) and computed in
      float32, not in themselves; float64 and complex64 work, too;
    - neither tensor has to be contiguous, and they may be on the CPU;
    - second derivatives are right, and nothing is compiled.

    Args:
        gates: (B, C, T).
        tokens: (B, C, T).

    Returns:
        The states, (B, C, T), in the dtype of ``tokens``; complex if the gates are.

    Raises:
        TypeError, ValueError: the arguments are not as described.
        NoKernelError: no such kernel runs on this GPU.
    """
    return scan_forward(gates, tokens)


def scan_forward(gates: Tensor, tokens: Tensor, reverse: bool = False) -> Tensor:
    """``scan``, or with ``reverse`` h[t] = gates[t] * h[t+1] + tokens[t] from h[T] = 0.

    As ``accelerated_scan.warp.scan_forward``, with the differences of ``scan``; and it has derivatives.
    """
    return pair.scan(
        "(B, C, T)", "cuda", reverse=as_flag("reverse", reverse), gates=gates, tokens=tokens
    )
