"""Summaries of a range of steps: the affine map from the state before the steps to the state after them.

A summary is two values for each channel; a *row* is a rank's summary as one vector. Forward, the state after the steps is
``product * state_before + state_from_zero``. Backward, let h[t] be the gradient that reaches the state before step t. Then
h[t] = conj(gates[t]) * (grad[t] + h[t+1]) is a linear recurrence in the opposite direction, and the gradient that reaches the
state before the steps is ``product * gradient_behind + gradient_from_zero``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scan_registry.distributed.parts import Steps
from scan_registry.kernels.linear_scan.reference import compute_dtype
from scan_registry.ops.linear_scan import linear_scan
from scan_registry.ops.linear_scan_summary import linear_scan_summary


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
    gates: Tensor, tokens: Tensor, dim: int, reverse: bool, backend: Any, steps: Steps | None
) -> Tensor:
    """The summary of ``steps`` (all steps if None) as one vector: the products of gates, then the last states from zero."""
    gates, tokens = _stretch(gates, tokens, dim, steps)
    summary = linear_scan_summary(gates, tokens, dim=dim, reverse=reverse, backend=backend)
    return torch.cat([each.reshape(-1) for each in summary])


def backward_row(
    gates: Tensor, grad: Tensor, dim: int, reverse: bool, backend: Any, steps: Steps | None
) -> Tensor:
    """The backward summary of ``steps`` (all steps if None) as one vector. ``grad`` is the gradient of the states.

    The vector holds the products of gates, then the gradients before the steps if the gradient behind them is zero. They are
    computed from the recurrence λ[t] = grad[t] + conj(gates[t+1]) * λ[t+1]. It needs no product of gates and gradients in
    advance: its kernel reads both tensors in place, with gates shifted by one step.
    """
    gates, grad = _stretch(gates, grad, dim, steps)
    compute, count = compute_dtype(grad.dtype), grad.shape[dim]
    if gates.is_complex():
        gates = gates.conj().resolve_conj()
    if count == 0:
        row = grad.sum(dim, dtype=compute).reshape(-1)
        return torch.cat([torch.ones_like(row), row])
    # In the order of the forward scan.
    first, last, later, sooner = (count - 1, 0, 0, 1) if reverse else (0, count - 1, 1, 0)
    product, total = linear_scan_summary(
        cut(gates, dim, later, count - 1) if count > 1 else gates,
        grad.narrow(dim, sooner, count - 1),
        dim=dim,
        reverse=not reverse,
        backend=backend,
    )
    total = torch.addcmul(total, product, grad.select(dim, last).to(compute))
    gate = _step(gates, dim, first).to(compute)
    return torch.cat([(gate * product).reshape(-1), (gate * total).reshape(-1)])


def _step(gates: Tensor, dim: int, step: int) -> Tensor:
    """The gates of one step, which broadcast to a state."""
    if gates.dim() < -dim:
        return gates
    return gates.select(dim, 0 if gates.shape[dim] == 1 else step)


def fold(
    rows: Tensor, ranks: range, before: Tensor | None, shape: tuple[int, ...]
) -> Tensor | None:
    """The state after the steps of ``ranks``, in this order, from their summaries. Its shape is ``shape``.

    ``rows`` are all ranks' summaries, (ranks, 2 · elements). ``before`` is the state before the steps. None is a state of zero,
    as an argument and as a result.
    """
    if not ranks:
        return before
    count = rows.shape[1] // 2
    low, high = min(ranks), max(ranks)
    products, totals = rows[low : high + 1, :count], rows[low : high + 1, count:]
    start = None if before is None else before.reshape(-1)
    if len(ranks) == 1:
        (product,), (total,) = products, totals
        last = total if start is None else torch.addcmul(total, product, start)
    else:
        wide = (
            rows.dtype == torch.complex128 and rows.is_cuda
        )  # which linear_scan has no kernel for
        _, last = linear_scan(
            products,
            totals,
            start,
            dim=0,
            reverse=ranks.step < 0,
            return_final_state=True,
            backend="reference" if wide else "auto",
        )
    return last.reshape(shape)
