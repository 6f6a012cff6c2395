"""Stands in for ``sequential_scan``: h[t] = alpha[t] * h[t-1] + beta[t] along the middle dimension of
(B, T, D) tensors, from h[0] = beta[0].

``alpha[:, 0]`` multiplies the zero before the first step, so its values do not matter as long as they
are finite, and its gradient is zero. The package that this replaces never reads them. Here an infinity
or a NaN among them makes every state of its channel NaN: to leave it out takes a copy of ``alpha``,
which is up to the caller where such values can be (``alpha = alpha.clone(); alpha[:, 0] = 0``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from scan_registry.compat import pair
from scan_registry.dispatch.select import Backend
from scan_registry.ops.checks import is_autocast


def scan_cu(alpha: Tensor, beta: Tensor) -> Tensor:
    """h[t] = alpha[t] * h[t-1] + beta[t] along dimension 1, from h[0] = beta[0].

    Runs the CUDA kernels of this package. As ``sequential_scan.scan_cu``, except that

    - D is any width, not one of 512, 768, 1024, 1536 and 2048, and T any length, not 3 or more;
    - any dtype that the scans of this package accept, not bfloat16 only. Under ``torch.autocast`` both convert
      to bfloat16 first;
    - the backward pass leaves the states as they are, can run twice, and has a right derivative;
    - any strides, the current CUDA stream, and CPU tensors, too;
    - ``alpha[:, 0]`` has to be finite: see the module.

    Args:
        alpha: (B, T, D), the gates.
        beta: (B, T, D), the tokens.

    Returns:
        The states, (B, T, D), in the dtype of ``beta``; complex if ``alpha`` is.

    Raises:
        TypeError, ValueError: the arguments are not as described.
        NoKernelError: no CUDA kernel runs on this GPU.
    """
    return _scan(*_autocast(alpha, beta), "cuda")


def scan_cu_single(alpha: Tensor, beta: Tensor) -> Tensor:
    """``scan_cu`` for float32: the same, except that ``torch.autocast`` does not change it.

    As ``sequential_scan.scan_cu_single``, with the differences of ``scan_cu``.
    """
    return _scan(alpha, beta, "cuda")


def scan_tr(alpha: Tensor, beta: Tensor) -> Tensor:
    """``scan_cu`` with the Triton kernels of this package, which are compiled ahead of time.

    As ``sequential_scan.scan_tr``, with the differences of ``scan_cu``; and no kernel is compiled for
    each T. float32 is not rounded to bfloat16 on the way.
    """
    return _scan(*_autocast(alpha, beta), "triton")


def _scan(alpha: Tensor, beta: Tensor, language: Backend) -> Tensor:
    return pair.scan("(B, T, D)", language, dim=1, alpha=alpha, beta=beta)


def _autocast(alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Both in bfloat16 where autocast is on for their device; float64 stays, as in torch's own."""
    return _narrowed(alpha), _narrowed(beta)


def _narrowed(tensor: Tensor) -> Tensor:
    if (
        isinstance(tensor, Tensor)
        and tensor.is_floating_point()
        and tensor.dtype is not torch.float64
        and is_autocast(tensor)
    ):
        return tensor.to(torch.bfloat16)
    return tensor
