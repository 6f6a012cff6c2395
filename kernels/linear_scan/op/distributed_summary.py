"""The affine map of a part of a linear scan: for users, who may write their own scan over ranks, and as a row to exchange.

A row holds the map of a range of steps: the products of the gates, then the last states of a scan that starts from zero. In the
backward pass it is the map from the gradient behind the steps to the gradient before them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from scan_registry.dispatch.select import Backend
from scan_registry.distributed.opening import refused
from scan_registry.distributed.parts import Steps
from scan_registry.kernels.linear_scan.op import plans
from scan_registry.kernels.linear_scan.op.arguments import Options
from scan_registry.kernels.linear_scan.op.problems import StateLayout, make_summary_call
from scan_registry.kernels.linear_scan.op.summary import linear_scan_summary
from scan_registry.ops.call import PLAIN_TYPES, unobserved
from scan_registry.ops.launching import plan_cache
from scan_registry.ops.sharded import is_dtensor

__all__ = ["backward_row", "forward_row", "scan_summary", "summary_into"]


def scan_summary(
    gates: Tensor,
    tokens: Tensor,
    *,
    dim: int = -1,
    reverse: bool = False,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """The affine map of this rank's part of a sequence, from the state before the part to the state after it.

    The function does not communicate. The state after the part is ``product * state_before + state_from_zero``. A part without
    steps has the map 1 and 0. The maps of two parts in a row, ``(p1, s1)`` and then ``(p2, s2)``, compose to
    ``(p2 * p1, p2 * s1 + s2)``. ``scan_registry.linear_scan`` computes the same recurrence: if ``products`` and ``states`` are
    the gathered maps of all ranks, stacked in scan order, the states after each part are
    ``linear_scan(products, states, initial_state, dim=0)``.

    Args:
        gates: this rank's part, as for ``scan_registry.linear_scan``.
        tokens: this rank's part, as for ``scan_registry.linear_scan``.
        dim: the time dimension.
        reverse: the map of x[t] = gates[t] * x[t+1] + tokens[t] instead.
        backend: as for ``scan_registry.linear_scan_summary``.

    Returns:
        The product of the gates, and the last state of a scan that starts from zero. Both have the shape of ``tokens`` without
        ``dim``. Both are float32, or of the dtype of ``tokens`` if that is float64 or complex. Differentiable any number of times.

    Raises:
        TypeError: an argument is not a tensor, or a DTensor, or a dtype is not supported or does not mix.
        ValueError: shapes do not broadcast, devices differ, or ``dim`` or ``backend`` is out of range.
        NoKernelError: as for ``scan_registry.linear_scan_summary``.
    """
    for name, tensor in (("gates", gates), ("tokens", tokens)):
        if type(tensor) not in PLAIN_TYPES and is_dtensor(tensor):
            raise refused("scan_summary", name, tensor)
    return linear_scan_summary(gates, tokens, dim=dim, reverse=reverse, backend=backend)


# --- Rows -------------------------------------------------------------------------------------


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


def summary_into(row: Tensor, gates: Tensor, tokens: Tensor, options: Options) -> None:
    """Write the summary into a vector: the products of gates, then the last states from zero, in the order of a state."""
    if unobserved(gates, tokens):
        plan_cache.run(_plan_summary, (gates, tokens, row), options)
        return
    dim, reverse, _, backend = options
    values = linear_scan_summary(gates, tokens, dim=dim, reverse=reverse, backend=backend)  # type: ignore[arg-type]
    for place, value in zip(row.chunk(2), values, strict=True):
        place.view(value.shape).copy_(value)


def _plan_summary(
    gates: Tensor, tokens: Tensor, row: Tensor, options: Options
) -> Callable[..., None]:
    layout, count = StateLayout.of(tokens, options.dim, None), row.numel() // 2

    def copied(gates: Tensor, tokens: Tensor, row: Tensor) -> None:
        values = plans.summary(gates, tokens, options)
        for place, value in zip(row.view(2, *layout.shape), values, strict=True):
            place.copy_(value)

    in_order = layout.strides == torch.empty(layout.shape, device="meta").stride()
    # Each half is a tensor of its own to a kernel, and starts where new tensors start.
    aligned = row.data_ptr() % 16 == 0 and count * row.element_size() % 16 == 0
    if tokens.numel() == 0 or tokens.is_cpu or options.backend == "reference":
        return copied
    call = make_summary_call(gates, tokens, options.dim, options.reverse)
    run = plans.runner(call.problem, tokens.device, options.backend)
    if not callable(run) or call.copied or call.gates_shape or not in_order or not aligned:
        return copied
    launch = run

    def plan(gates: Tensor, tokens: Tensor, row: Tensor) -> None:
        halves = {"final_gate": row[:count], "final_state": row[count:]}
        launch({"gates": gates, "tokens": tokens, **halves})

    return plan
