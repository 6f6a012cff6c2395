"""How the tensors of ``rnn`` lie in memory, and how they come to lie as the kernels take them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from scan_registry.base.strides import dense_strides
from scan_registry.base.symbols import perhaps, time_before_batch

#: Kernels take heads of a multiple of as many units; others are padded with units that stay zero.
UNITS = 16


def padded(dim: int) -> int:
    """The number of units that kernels take a head of ``dim`` for."""
    return dim + -dim % UNITS


def empty_like_inputs(
    inputs: Tensor,
    lead: tuple[int, ...],
    block: tuple[int, ...],
    dtype: torch.dtype | None = None,
) -> Tensor:
    """An empty tensor (*lead, B, T, *block), with time before batch in memory if ``inputs``, (B, T, …),
    have it; in the inputs' dtype, or in ``dtype``."""
    batch, time = inputs.shape[:2]
    if not (time_before_batch(inputs) and perhaps(batch > 1) and perhaps(time > 1)):
        return inputs.new_empty((*lead, batch, time, *block), dtype=dtype)
    # No view, as that of a transpose would be: autograd refuses to change views that a Function returns.
    shape, rank = (*lead, batch, time, *block), len(lead)
    order = [*range(rank), rank + 1, rank, *range(rank + 2, len(shape))]
    return inputs.new_empty_strided(shape, dense_strides(shape, order), dtype=dtype)


def blocked(tensor: Tensor, block: int) -> Tensor:
    """The tensor, copied unless its last ``block`` dimensions are without gaps, and what is before them
    lies at multiples of 16 bytes, which kernels move at a time."""
    dimensions = [*zip(tensor.shape, tensor.stride(), strict=True)]
    step, offsets = 1, 0 if tensor.is_meta else tensor.data_ptr()
    dense = True
    for extent, stride in reversed(dimensions[len(dimensions) - block :]):
        dense &= extent == 1 or stride == step
        step *= extent
    for extent, stride in dimensions[: len(dimensions) - block]:
        offsets |= stride * tensor.element_size() if extent != 1 else 0
    # Where units are padded, all is copied in any case.
    if dense and (offsets % 16 == 0 or tensor.shape[-1] % UNITS):
        return tensor
    lead = tensor.dim() - block - 2
    if lead < 0:
        return tensor.clone(memory_format=torch.contiguous_format)
    model = tensor[(0,) * lead]
    return empty_like_inputs(model, tensor.shape[:lead], tensor.shape[lead + 2 :]).copy_(tensor)


def dense(tensor: Tensor) -> Tensor:
    """The tensor without gaps, at a multiple of 16 bytes."""
    return blocked(tensor, tensor.dim())


def widened(tensor: Tensor, count: int = 1, value: float = 0.0) -> Tensor:
    """The tensor, with its last ``count`` dimensions padded to a multiple of ``UNITS``."""
    missing = -tensor.shape[-1] % UNITS
    return pad(tensor, (0, missing) * count, value=value) if missing else tensor


def known_states(states: Tensor) -> Tensor:
    """States as a backward kernel takes them. Their gradients are zero in units that are padded, and
    stay so whatever the states are, as long as none that is divided by is zero."""
    return widened(blocked(states, 2), value=1.0)


def states_before(h: Tensor, start: Tensor | None, reset: Tensor) -> Tensor:
    """h before each step, in rows: zeros where there is a reset. Without initial states, the first step's rows are left
    out if there is another step."""
    marks = reset.t().unsqueeze(2)
    if start is not None:
        states = torch.cat((start.view(-1, *h.shape[1:])[:1], h[:-1])).masked_fill_(marks, 0)
    elif len(h) > 1:
        states = h[:-1].masked_fill(marks[1:], 0)
    else:
        states = torch.zeros_like(h)
    return states.view(-1, h.shape[2])


def turned(x: Tensor) -> bool:
    """Whether x (T, B, I) has its first two dimensions the other way round in memory."""
    return not x.is_contiguous() and x.dim() == 3 and x.transpose(0, 1).is_contiguous()


def all_dense(*tensors: Tensor | None) -> bool:
    """Whether all tensors, leaving out None, have no gaps and start at multiples of 16 bytes."""
    return all(t is None or (t.is_contiguous() and not t.data_ptr() & 15) for t in tensors)
