"""``causal_conv1d`` of sequences whose time is cut between the ranks of a group.

A rank needs the width-1 steps before its part, its halo, which ``halo`` exchanges. The local operator takes the halo as its
initial state. The final state of the whole sequence is its last width-1 steps, which the same exchange brings to all ranks.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from scan_registry.dispatch.select import Backend
from scan_registry.distributed.group import all_reduce, resolve, untraced
from scan_registry.distributed.halo import Exchange, Halo, of_run, with_initial
from scan_registry.distributed.headers import Terms
from scan_registry.distributed.opening import agree, check_local, refusals
from scan_registry.kernels.causal_conv1d.op.arguments import (
    ACCEPTED,
    Arguments,
    Options,
    check_shape,
    check_tensor,
    normalised,
)
from scan_registry.kernels.causal_conv1d.op.autograd import call as convolution_of_one
from scan_registry.kernels.causal_conv1d.op.autograd import convolve
from scan_registry.ops.values import check_bounds

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from scan_registry.distributed.group import Group
    from scan_registry.kernels.causal_conv1d.op.function import CommonOptions

    class DistributedOptions(CommonOptions, total=False):
        """What ``causal_conv1d`` takes by name, beside ``return_final_state`` and ``group``."""

        initial_state: Tensor | None


__all__ = ["causal_conv1d"]

_NAME = "distributed.causal_conv1d"
#: The tensors of a call in their order here.
_TENSORS = ("x", "weight", "bias", "initial_state", "seq_idx", "cu_seqlens")


# fmt: off
@overload
def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *,
    return_final_state: Literal[False] = False,
    group: Group = None, **options: Unpack[DistributedOptions],
) -> Tensor: ...
@overload
def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *,
    return_final_state: Literal[True],
    group: Group = None, **options: Unpack[DistributedOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *,
    return_final_state: bool,
    group: Group = None, **options: Unpack[DistributedOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
# fmt: on


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, group: Group = None,
    initial_state: Tensor | None = None, seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None, return_final_state: bool = False,
    activation: str | None = None, backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """``scan_registry.causal_conv1d`` of a sequence whose time is cut between the ranks of a group.

    Each rank holds a contiguous part of time, in rank order. A part may have any length, including 0. All ranks of the
    group have to make the call, and if one of them runs its backward pass, all have to. Gradients are those of the sum of
    all ranks' losses.

    Args:
        x: (batch, channels, steps), this rank's part; in the dtypes and layouts of ``scan_registry.causal_conv1d``. It requires
            gradients on all ranks or on none.
        weight: (channels, width), of a width from 2 to 8. ``weight`` and ``bias`` are the same on all ranks. A rank's
            gradients of them cover its own steps; the sum over ranks is the gradient of the whole sequence.
        bias: (channels,); None for zeros.
        group: a ProcessGroup, a one-dimensional DeviceMesh, or None for the default group.
        initial_state: (batch, channels, width-1), the inputs before the first step of the whole sequence; with
            ``cu_seqlens`` (sequences, channels, width-1). The same on all ranks. The sum of its gradients over ranks is the
            gradient of the whole sequence.
        seq_idx: (batch, steps), integers in the range of int32, for this rank's steps.
        cu_seqlens: (sequences + 1,), int32 or int64, the bounds of packed sequences along the time of all ranks: 0, …, the
            sum of all ranks' steps. The same on all ranks, and with a batch of 1. Values are checked and compared between
            ranks if the tensor is on the CPU. Values on a GPU are not compared, and are checked only if
            ``SCAN_REGISTRY_DEBUG`` is set.
        return_final_state: return the last width-1 inputs of the whole sequence, or of each packed one, too. All ranks
            get them.
        activation: None, or ``"silu"`` or ``"swish"``, which are the same.
        backend: as in ``scan_registry.causal_conv1d``.

    Returns:
        This rank's part of y, and if asked for the final state. Differentiable in x, weight, bias and initial_state, any
        number of times, in reverse mode.

    Raises:
        TypeError, ValueError: as ``scan_registry.causal_conv1d``, on the rank whose argument it is; ``ValueError`` on
            all ranks if shapes, dtypes or options differ between them.
        RuntimeError: there is no process group, or another rank refused its arguments: see ``scan_registry.distributed``.
        NoKernelError, DriverError: as ``scan_registry.causal_conv1d``.
    """
    y, final_state = call(
        (x, weight, bias, initial_state, seq_idx, cu_seqlens),
        (return_final_state, activation, backend),
        group,
    )
    return y if final_state is None else (y, final_state)


@untraced
def call(
    tensors: tuple[Any, ...], request: tuple[Any, ...], group: Group
) -> tuple[Tensor, Tensor | None]:
    """The output, and the final state if wanted, with the tensors and options as in ``call_sharded``."""
    members = resolve(group)
    check_local(members, "causal_conv1d", **dict(zip(_TENSORS, tensors, strict=True)))
    if members.size == 1:
        return convolution_of_one(tensors, request)
    with refusals(members, tensors[:1]):
        arguments, options = _checked(tensors, request)
        terms = _terms(arguments, options)
    slots = arguments.weight.shape[1] - 1
    ages = torch.arange(slots, 0, -1, device=arguments.x.device)
    of_x = arguments.x.shape[:2], options.final, arguments.x.dtype
    exchange = Exchange(members, terms, slots, *of_x, ages)
    x, halo, final_state = Halo.apply(arguments.x, exchange, arguments.seq_idx)  # type: ignore[no-untyped-call]
    arguments = arguments._replace(x=x)
    if arguments.cu_seqlens is not None:
        return _packed(arguments, options, exchange, halo)
    state = with_initial(exchange, members.rank, halo, arguments.initial_state)
    state = of_run(exchange, members.rank, arguments.seq_idx, state)
    if options.final:
        final_state = with_initial(exchange, members.size, final_state, arguments.initial_state)
        final_state = of_run(exchange, members.size, arguments.seq_idx, final_state)
    arguments = arguments._replace(initial_state=state.contiguous())
    y, _ = convolve(arguments, options._replace(final=False))
    return y, final_state if options.final else None


# --- Arguments --------------------------------------------------------------------------------


def _checked(tensors: tuple[Any, ...], request: tuple[Any, ...]) -> tuple[Arguments, Options]:
    """Checked as for the local operator, except that bounds and the initial state are those of the whole sequence."""
    x, weight, bias, state, seq_idx, cu_seqlens = tensors
    local = None if cu_seqlens is not None else state
    arguments, options = normalised(x, weight, bias, local, seq_idx, None, *request)
    if cu_seqlens is None:
        return arguments, options
    if seq_idx is not None:
        raise ValueError("seq_idx and cu_seqlens are both given; accepted is one of them")
    check_tensor("cu_seqlens", cu_seqlens, (torch.int32, torch.int64), x)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"cu_seqlens has shape {tuple(cu_seqlens.shape)}; it must be (sequences + 1,), with one sequence at least"
        )
    if x.shape[0] != 1:
        raise ValueError(
            f"x has shape {tuple(x.shape)}; with cu_seqlens, it must be (1, channels, steps)"
        )
    if state is not None:
        check_tensor("initial_state", state, ACCEPTED, x)
        shape = cu_seqlens.shape[0] - 1, x.shape[1], weight.shape[1] - 1
        check_shape("initial_state", state, shape, "(sequences, channels, width - 1)")
        state = state.to(x.dtype).contiguous()
    cu_seqlens = cu_seqlens.to(torch.int64).contiguous()
    return arguments._replace(initial_state=state, cu_seqlens=cu_seqlens), options


def _terms(arguments: Arguments, options: Options) -> Terms:
    x, cu_seqlens = arguments.x, arguments.cu_seqlens
    batch, channels, steps = x.shape
    common = (
        ("batch", batch),
        ("channels", channels),
        ("width", arguments.weight.shape[1]),
        ("dtype", str(x.dtype).removeprefix("torch.")),
        ("device", x.device.type),
        ("bias", arguments.bias is not None),
        ("initial_state", arguments.initial_state is not None),
        ("seq_idx", arguments.seq_idx is not None),
        ("cu_seqlens", None if cu_seqlens is None else _digest(cu_seqlens)),
        ("silu", options.silu),
        ("return_final_state", options.final),
        ("gradient of x", torch.is_grad_enabled() and x.requires_grad),
    )
    tail = min(steps, arguments.weight.shape[1] - 1)
    return Terms(_NAME, common, (tail,) if cu_seqlens is None else (tail, steps))


def _digest(cu_seqlens: Tensor) -> str:
    """The number of the bounds, and a digest of their values if these are on the CPU: reading a GPU's would wait."""
    if not cu_seqlens.is_cpu:
        return f"{cu_seqlens.shape[0]}"
    digest = blake2b(repr(cu_seqlens.tolist()).encode(), digest_size=6).hexdigest()
    return f"{cu_seqlens.shape[0]} {digest}"


# --- Packed sequences -------------------------------------------------------------------------


class _Part(NamedTuple):
    """Where this rank's steps lie in the whole sequence."""

    first: int
    steps: int


def _packed(
    arguments: Arguments, options: Options, exchange: Exchange, halo: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The output of this rank's part of packed sequences, and their final states if wanted."""
    cu_seqlens, members = arguments.cu_seqlens, exchange.members
    assert cu_seqlens is not None
    check_bounds(cu_seqlens, sum(exchange.lengths))
    part = _Part(sum(exchange.lengths[: members.rank]), exchange.lengths[members.rank])
    state = _packed_states(cu_seqlens, part, exchange, halo, arguments.initial_state)
    bounds_here = (cu_seqlens - part.first).clamp(0, part.steps)
    local = arguments._replace(initial_state=state.contiguous(), cu_seqlens=bounds_here)
    y, final_state = convolve(local, options)
    if final_state is None:
        return y, None
    # Only the rank with a sequence's last step has its right final state. That of an empty sequence is its initial state,
    # which the first rank contributes.
    ends = cu_seqlens[1:] - 1
    mine = (ends >= part.first) & (ends < part.first + part.steps)
    empty = cu_seqlens[1:] == cu_seqlens[:-1]
    mine = torch.where(empty, torch.full_like(mine, members.rank == 0), mine)
    final_state = torch.where(mine.view(-1, 1, 1), final_state, torch.zeros_like(final_state))
    return y, _Sum.apply(final_state, exchange)  # type: ignore[no-untyped-call]


def _packed_states(
    cu_seqlens: Tensor, part: _Part, exchange: Exchange, halo: Tensor, initial_state: Tensor | None
) -> Tensor:
    """Initial states of this part, (sequences, channels, slots). At most one sequence continues from an earlier part."""
    slots, count = exchange.slots, cu_seqlens.shape[0] - 1
    base = halo.new_zeros(count, *halo.shape[1:]) if initial_state is None else initial_state
    if not part.steps:
        # The halo needs a gradient on every rank, or this rank would miss the collective of the backward pass.
        return base + 0 * halo
    begin = torch.full_like(cu_seqlens[:1], part.first)
    number = torch.searchsorted(cu_seqlens, begin, right=True) - 1
    number = number.clamp(0, count - 1)
    there = part.first - cu_seqlens[number]
    ages = exchange.ages
    place = (slots - ages + there).clamp(max=slots - 1)
    before = base.index_select(0, number).index_select(-1, place)
    going_on = torch.where(ages <= there, halo, before)
    chosen = (torch.arange(count, device=cu_seqlens.device) == number) & (there > 0)
    return torch.where(chosen.view(-1, 1, 1), going_on, base)


class _Sum(torch.autograd.Function):
    """The sum over ranks, on every rank (an all-reduce)."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return all_reduce(exchange.members, tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        exchange = ctx.exchange
        terms = Terms(f"{_NAME}, final states", exchange.terms.common, (), exchange.number)
        agree(exchange.members, terms, grad.device)
        return _Sum.apply(grad, exchange), None  # type: ignore[no-untyped-call]
