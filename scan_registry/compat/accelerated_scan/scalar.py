"""Stands in for ``accelerated_scan.scalar``, whose kernels are Triton's."""

from __future__ import annotations

from torch import Tensor

from scan_registry.compat import pair


def scan(forget: Tensor, inputs: Tensor) -> Tensor:
    """h[t] = forget[t] * h[t-1] + inputs[t] along the last dimension, from h[-1] = 0.

    Runs the Triton kernels of this package, which are compiled ahead of time. As
    ``accelerated_scan.scalar.scan``, except that

    - neither tensor has to be contiguous, and they may be on the CPU;
    - float64 is computed in float64, not in float32, and complex64 works, too;
    - second derivatives are right, and the backward pass reads nothing past the end of a tensor.

    Args:
        forget: (B, C, T), the gates.
        inputs: (B, C, T), the tokens.

    Returns:
        The states, (B, C, T), in the dtype of ``inputs``; complex if the gates are.

    Raises:
        TypeError, ValueError: the arguments are not as described.
        NoKernelError: no Triton kernel runs on this GPU.
    """
    return pair.scan("(B, C, T)", "triton", forget=forget, inputs=inputs)
