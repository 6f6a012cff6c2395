"""What the stream kernels compute, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def forward(inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of one to three tensors of one shape, and a copy of the first."""
    return torch.stack([*inputs]).sum(0), inputs[0].clone()
