"""Stands in for ``accelerated_scan.complex``, whose kernels are Triton's."""

from __future__ import annotations

from torch import Tensor

from scan_registry.compat.arguments import backend_for, check_pair
from scan_registry.kernels.linear_scan.op.function import linear_scan


def scan(forget: Tensor, inputs: Tensor) -> Tensor:
    """h[t] = forget[t] * h[t-1] + inputs[t] in complex numbers along the last dimension, h[-1] = 0.

    Runs the Triton kernels of this package, which are compiled ahead of time. As
    ``accelerated_scan.complex.scan``, except that

    - neither tensor has to be contiguous, and they may be on the CPU, there as complex128, too;
    - second derivatives are right.

    Args:
        forget: (B, C, T), the gates, complex64.
        inputs: (B, C, T), the tokens, complex64 or real. Real ones have a real gradient.

    Returns:
        The states, (B, C, T), complex whatever the tokens are.

    Raises:
        TypeError: ``forget`` is not complex, or another dtype is not supported.
        ValueError: the arguments are not as described.
        NoKernelError: no Triton kernel runs on this GPU.
    """
    check_pair("(B, C, T)", forget=forget, inputs=inputs)
    if not forget.is_complex():
        raise TypeError(f"forget has dtype {forget.dtype}; it must be a complex tensor")
    # A conjugation that is still to be done would send the call through torch's dispatcher.
    forget, inputs = forget.resolve_conj(), inputs.resolve_conj()
    return linear_scan(forget, inputs, backend=backend_for(inputs, "triton"))
