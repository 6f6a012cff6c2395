"""Summaries of a range of steps: the affine map from the state before the steps to the state after them.

A summary is two values for each channel; a *row* is a rank's summary as one vector. Forward, the state after the steps is
``product * state_before + state_from_zero``. Backward, let h[t] be the gradient that reaches the state before step t. Then
h[t] = conj(gates[t]) * (grad[t] + h[t+1]) is a linear recurrence in the opposite direction, and the gradient that reaches the
state before the steps is ``product * gradient_behind + gradient_from_zero``.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from scan_registry.distributed.into import summary_into
from scan_registry.distributed.parts import Steps
from scan_registry.ops import plans
from scan_registry.ops.arguments import Options

#: Up to so many summaries are composed one by one; more are composed by a scan over ranks.
_FEW = 3


def cut(x: Tensor, dim: int, begin: int, count: int) -> Tensor:
    """``count`` elements of ``x`` along ``dim``, from ``begin`` on. ``x`` itself if it broadcasts along ``dim``, which is
    negative."""
    if x.dim() < -dim or x.shape[dim] == 1 or (begin == 0 and x.shape[dim] == count):
        return x
    return x.narrow(dim, begin, count)


def _stretch(gates: Tensor, tokens: Tensor, dim: int, steps: Steps | None) -> tuple[Tensor, Tensor]:
    """The gates and tokens of a range of steps. Gates that broadcast along time are not cut."""
    time = tokens.shape[dim]
    begin, end = (0, time) if steps is None else steps
    inputs = tokens if end - begin == time else tokens.narrow(dim, begin, end - begin)
    return cut(gates, dim, begin, end - begin) if time > 1 else gates, inputs


def forward_row(
    row: Tensor, gates: Tensor, tokens: Tensor, options: Options, steps: Steps | None
) -> None:
    """Write the summary of ``steps`` (all steps if None) into ``row``: the products of gates, then the last states from
    zero."""
    summary_into(row, *_stretch(gates, tokens, options.dim, steps), options)


def backward_row(
    row: Tensor, gates: Tensor, grad: Tensor, options: Options, steps: Steps | None
) -> None:
    """Write the backward summary of ``steps`` (all steps if None) into ``row``. ``grad`` is the gradient of the states.

    The vector holds the products of gates, then the gradients before the steps if the gradient behind them is zero. They are
    computed from the recurrence λ[t] = grad[t] + conj(gates[t+1]) * λ[t+1]. It needs no product of gates and gradients in
    advance: its kernel reads both tensors in place, with gates shifted by one step.
    """
    dim, reverse = options.dim, options.reverse
    gates, grad = _stretch(gates, grad, dim, steps)
    count = grad.shape[dim]
    if gates.is_complex():
        gates = gates.conj().resolve_conj()
    half = row.numel() // 2
    if count == 0:
        row[:half].fill_(1)
        row[half:].zero_()
        return
    # In the order of the forward scan.
    first, last, later, sooner = (count - 1, 0, 0, 1) if reverse else (0, count - 1, 1, 0)
    summary_into(
        row,
        cut(gates, dim, later, count - 1) if count > 1 else gates,
        grad.narrow(dim, sooner, count - 1),
        options._replace(reverse=not reverse),
    )
    behind = grad.select(dim, last)
    both = row.view(2, *behind.shape)
    products, totals = both.unbind()
    totals.addcmul_(products, behind.to(row.dtype))
    both.mul_(_step(gates, dim, first))


def _step(gates: Tensor, dim: int, step: int) -> Tensor:
    """The gates of one step, which broadcast to a state."""
    if gates.dim() < -dim:
        return gates
    return gates.select(dim, 0 if gates.shape[dim] == 1 else step)


def fold(
    rows: Tensor, ranks: range, before: Tensor | None, shape: tuple[int, ...]
) -> Tensor | None:
    """The state after the steps of ``ranks``, in this order, from their summaries. Its shape is ``shape``.

    ``rows`` are all ranks' summaries, (ranks, 2 · elements) or more. ``before`` is the state before the steps. None is a state
    of zero, as an argument and as a result. The result may be a part of ``rows``.
    """
    if not ranks:
        return before
    count = prod(shape)
    start = None if before is None else before.reshape(-1)
    if len(ranks) <= _FEW:
        for rank in ranks:
            row = rows[rank]
            total = row[count : 2 * count]
            start = total if start is None else torch.addcmul(total, row[:count], start)
        assert start is not None
        return start.view(shape)
    low, high = min(ranks), max(ranks)
    products, totals = rows[low : high + 1, :count], rows[low : high + 1, count : 2 * count]
    # There is no kernel of complex128.
    wide = rows.dtype == torch.complex128 and rows.is_cuda
    options = Options(-2, ranks.step < 0, True, "reference" if wide else "auto")
    _, last = plans.forward(products, totals, start, None, options)
    assert last is not None
    return last.view(shape)
