"""The backward pass of ``linear_scan``, written with differentiable operators, for second derivatives.

Let h[t] be the gradient that reaches the state before step t. h is a scan over the same ranks, in the direction opposite to
the forward scan. The gradient of a step needs h of its neighbour in time, which may be on another rank.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from scan_registry.distributed import group as groups
from scan_registry.distributed import parts
from scan_registry.distributed.group import Members
from scan_registry.distributed.opening import agree
from scan_registry.distributed.reduce import Run, Tensors
from scan_registry.kernels.linear_scan.op.arguments import Options
from scan_registry.kernels.linear_scan.op.autograd import before


def differentiable(
    run: Run,
    saved: tuple[Tensor, Tensor | None, Tensor | None],
    states_grad: Tensor,
    last_grad: Tensor | None,
    wanted: tuple[bool, bool, bool],
    number: int,
) -> Tensors:
    """The wanted gradients of the call with this number. All ranks have to call this, since it contains collectives.
    ``saved`` are the gates, the states and the initial state."""
    gates, states, initial_state = saved
    scan: Any = import_module(".distributed", __package__).linear_scan
    members, (dim, reverse, final, backend) = run.members, run.options
    cu_seqlens = run.cu_seqlens
    time = run.shape[dim]
    mask = sum(int(want) << place for place, want in enumerate(wanted))
    terms = run.backward_terms(True)._replace(local=(time, mask), number=number)
    local: Any = agree(members, terms, gates.device)
    if len({numbers[1] for numbers in local}) > 1:
        raise RuntimeError(
            "derivatives of derivatives need the same tensors to require gradients on every rank; of gates, tokens and the "
            f"initial state, the ranks' are {[_spelled(numbers[1]) for numbers in local]}"
        )
    lengths = [numbers[0] for numbers in local]
    factor, grad = gates.to(run.compute).conj().resolve_conj(), states_grad.to(run.compute)
    behind = None
    if final:
        behind = _apply(AllReduce, run.last_grad(last_grad), members)
    bounds = None if cu_seqlens is None else torch.tensor(cu_seqlens, device=gates.device)
    h, first_h = scan(
        factor,
        factor * grad,
        behind,
        group=members.group,
        dim=dim,
        reverse=not reverse,
        cu_seqlens=bounds,
        return_final_state=True,
        backend=backend,
    )
    adjoint = grad + _before(run, h, behind, not reverse, cu_seqlens, lengths)
    gates_grad = None
    if wanted[0]:
        assert states is not None
        earlier = _before(run, states.to(run.compute), initial_state, reverse, cu_seqlens, lengths)
        gates_grad = (adjoint * earlier.conj()).sum_to_size(gates.shape).to(gates.dtype)
    return (
        gates_grad,
        adjoint.to(states_grad.dtype) if wanted[1] else None,
        run.only(first_h, run.part.begins) if wanted[2] else None,
    )


def _spelled(mask: int) -> str:
    return "".join(letter if mask >> place & 1 else "-" for place, letter in enumerate("gti"))


def _before(
    run: Run,
    x: Tensor,
    boundary: Tensor | None,
    reverse: bool,
    cu_seqlens: tuple[int, ...] | None,
    lengths: list[int],
) -> Tensor:
    """``x`` at the step before each step, in scan order; ``boundary``, or zero, before the first steps of sequences."""
    members, dim = run.members, run.options.dim
    if cu_seqlens is None:
        part = parts.whole(members.position(reverse), members.size)
    else:
        part = parts.packed(cu_seqlens, lengths, members.rank, reverse)
    sources = [_source(lengths, rank, reverse) for rank in range(members.size)]
    x, edge = _apply(Edge, x, members, dim, reverse, sources)
    if part.enters is not None and sources[members.rank] is not None:
        boundary = run.with_sequence(boundary, part.enters, edge)
    return before(x, boundary, run.bounds, Options(dim, reverse))


def _source(lengths: list[int], rank: int, reverse: bool) -> int | None:
    """The rank that holds the step before the first step of ``rank``, in scan order. None if there is no such step."""
    others = range(rank + 1, len(lengths)) if reverse else range(rank - 1, -1, -1)
    return next((other for other in others if lengths[other]), None)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    return function.apply(*args)


class AllReduce(torch.autograd.Function):
    """The sum over ranks (an all-reduce). Its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, members: Members) -> Tensor:
        ctx.members = members
        return groups.all_reduce(members, tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _apply(AllReduce, grad, ctx.members), None


class Edge(torch.autograd.Function):
    """``x`` itself, and the last step of the rank that ``sources`` names for this rank; zero for None.

    ``x`` is an output, so that the backward pass, which is a collective, runs on every rank that uses ``x``.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, members: Members, dim: int, reverse: bool, sources: list[int | None]
    ) -> tuple[Tensor, Tensor]:
        ctx.how = members, dim, reverse, sources
        shape = [*x.shape]
        del shape[dim]
        ctx.shape = x.shape
        edges = groups.all_gather(members, _last(x, dim, reverse).reshape(-1))
        source = sources[members.rank]
        edge = x.new_zeros(shape) if source is None else edges[source].reshape(shape)
        return x.view_as(x), edge

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, edge_grad: Tensor) -> Any:
        members, dim, reverse, sources = ctx.how
        grads = groups.all_gather(members, edge_grad.reshape(-1))
        mine = [rank for rank, source in enumerate(sources) if source == members.rank]
        if mine:
            grad = grad.clone()
            _last(grad, dim, reverse).add_(grads[mine].sum(0).reshape(edge_grad.shape))
        return grad, None, None, None, None


def _last(x: Tensor, dim: int, reverse: bool) -> Tensor:
    """The last step in scan order; zero for a part without steps."""
    if x.shape[dim] == 0:
        return x.sum(dim)
    return x.select(dim, 0 if reverse else x.shape[dim] - 1)
