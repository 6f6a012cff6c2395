"""A recurrent layer's weights of torch.nn as the kernels take them. Nothing of them is kept from one call to the next."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scan_registry.kernels.rnn.op.layer_composed import Cell
from scan_registry.kernels.rnn.problem import SIZES
from scan_registry.ops.constants import zeros

_split = torch.split_with_sizes


def kernel_weights(cell: Cell, r: Tensor, c: Any) -> tuple[Tensor, Tensor]:
    """R and the bias, in float32, from ``weight_hh`` (gates · H, D) and ``bias_hh`` or None. The inputs' bias is in the inputs
    already. What follows R in its memory the kernel does not read."""
    if cell.function == "gru":
        return _of_gru(cell.heads, r, c)
    if c is None:
        return r, zeros(
            r.device, torch.float32, SIZES[cell.function].bias * cell.heads * r.shape[1]
        )
    return r, c if c.dtype == torch.float32 else c.float()


def _of_gru(heads: int, r: Tensor, c: Any) -> tuple[Tensor, Tensor]:
    """The gates of torch.nn are r, z, n. The kernel takes n's part first, and a bias of n's inputs last. One operator puts all
    in order: each starts a kernel, which takes longer than the views do."""
    dim = r.shape[1]
    width = heads * dim
    first, last = _split(r, (2 * width, width))
    if c is None:
        return torch.cat((last, first)), zeros(r.device, torch.float32, 4 * width)
    of_first, of_last = _split(c.view(3 * heads, dim), (2 * heads, heads))
    none = zeros(r.device, r.dtype, heads, dim)
    both = torch.cat((last, first, of_last, of_first, none))
    bias = _split(both, (3 * width, 4 * heads))[1]
    return both, bias if bias.dtype == torch.float32 else bias.float()
