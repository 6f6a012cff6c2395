"""The matrix that state spaces begin with."""

from __future__ import annotations

import torch
from torch import Tensor


def normal_hippo(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The eigenvalues (N,) and eigenvectors (N, N) of HiPPO-N, in complex128.

    HiPPO-LegS has A[n, k] = -sqrt((2n + 1)(2k + 1)) below the diagonal and -(n + 1) on it. With p[n] = sqrt(n + 1/2),
    A + p pᵀ is -1/2 on the diagonal and skew-symmetric beside it: a normal matrix, whose eigenvalues have a real part of
    -1/2 and whose eigenvectors are unitary. Smith et al. (2023), section 4.3.
    """
    if device.type == "meta":
        empty = torch.empty(size, size, dtype=torch.complex128, device=device)
        return empty[0], empty
    odd = (2 * torch.arange(size, dtype=torch.float64, device="cpu") + 1).sqrt()
    halves = 0.5 * torch.outer(odd, odd)
    skew = halves.triu(1) - halves.tril(-1)
    # -i times a skew-symmetric matrix is Hermitian.
    imaginary, vectors = torch.linalg.eigh(torch.complex(torch.zeros_like(skew), -skew))
    eigenvalues = torch.complex(torch.full_like(imaginary, -0.5), imaginary)
    return eigenvalues.to(device), vectors.to(device)
