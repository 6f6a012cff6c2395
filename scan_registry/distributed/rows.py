"""What parts of a sequence tell each other: two rows a channel, the affine map of a stretch of steps.

Forward, the state after a stretch is ``product * state_before + state_from_zero``. Backward, with h[t] the gradient that
reaches the state before step t, h[t] = conj(gates[t]) * (grad[t] + h[t+1]) is a recurrence of the same kind against the forward
one, and the gradient that reaches the state before a stretch is ``product * gradient_behind + gradient_from_zero``.
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
    """Some steps; all of what does not change with time. ``dim`` is negative."""
    if x.dim() < -dim or x.shape[dim] == 1 or (begin == 0 and x.shape[dim] == count):
        return x
    return x.narrow(dim, begin, count)


def _stretch(gates: Tensor, tokens: Tensor, dim: int, steps: Steps | None) -> tuple[Tensor, Tensor]:
    """The gates and tokens of a stretch. Gates of one step for all of them stay so."""
    time = tokens.shape[dim]
    begin, end = (0, time) if steps is None else steps
    inputs = tokens if end - begin == time else tokens.narrow(dim, begin, end - begin)
    return cut(gates, dim, begin, end - begin) if time > 1 else gates, inputs


def forward_row(
    gates: Tensor, tokens: Tensor, dim: int, reverse: bool, backend: Any, steps: Steps | None
) -> Tensor:
    """Of ``steps``, all unless given: the product and the last state from zero, one after the other."""
    gates, tokens = _stretch(gates, tokens, dim, steps)
    summary = linear_scan_summary(gates, tokens, dim=dim, reverse=reverse, backend=backend)
    return torch.cat([each.reshape(-1) for each in summary])


def backward_row(
    gates: Tensor, grad: Tensor, dim: int, reverse: bool, backend: Any, steps: Steps | None
) -> Tensor:
    """Of ``steps``: the product and the gradient before them from zero behind, with ``grad`` that of states.

    The sums λ[t] = grad[t] + conj(gates[t+1]) * λ[t+1] are a recurrence whose gates lie a step further, so that nothing has
    to be multiplied first: the summary reads gates and gradients where they lie.
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
    """The state of ``shape`` after the stretches of ``ranks``, in this order; ``before``, or zero if None, is the one before.

    ``rows`` are all ranks', (ranks, 2 · elements). None is zero.
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
