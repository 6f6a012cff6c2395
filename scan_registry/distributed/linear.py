"""``linear_scan`` of a sequence whose time is cut between the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from scan_registry.base.symbols import same_shape
from scan_registry.dispatch import policy
from scan_registry.dispatch.select import Backend
from scan_registry.distributed import group as groups
from scan_registry.distributed import parts
from scan_registry.distributed.decision import SCHEDULES, Schedule, choice_of, pieces_of
from scan_registry.distributed.derivatives import differentiable
from scan_registry.distributed.group import Members, Terms
from scan_registry.distributed.run import Run
from scan_registry.kernels.linear_scan.reference import compute_dtype, state_shape
from scan_registry.ops.arguments import (
    Options,
    check_initial_state,
    check_tensors,
    normalised,
)
from scan_registry.ops.linear_scan import linear_scan as scan_of_one

if TYPE_CHECKING:
    from scan_registry.distributed.cost import Choice
    from scan_registry.distributed.group import Group

__all__ = ["linear_scan"]

_is_compiling = torch.compiler.is_dynamo_compiling

#: Bits of a local number: the rank wants gradients of gates, or of tokens or the initial state.
_GATES, _REST = 1, 2


@overload
def linear_scan(
    gates: Tensor,
    tokens: Tensor,
    initial_state: Tensor | None = None,
    *,
    group: Group = None,
    dim: int = -1,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    return_final_state: Literal[False] = False,
    schedule: Schedule = "auto",
    backend: Backend = "auto",
) -> Tensor: ...


@overload
def linear_scan(
    gates: Tensor,
    tokens: Tensor,
    initial_state: Tensor | None = None,
    *,
    group: Group = None,
    dim: int = -1,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    return_final_state: Literal[True],
    schedule: Schedule = "auto",
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]: ...


@overload
def linear_scan(
    gates: Tensor,
    tokens: Tensor,
    initial_state: Tensor | None = None,
    *,
    group: Group = None,
    dim: int = -1,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    return_final_state: bool,
    schedule: Schedule = "auto",
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...


def linear_scan(
    gates: Tensor,
    tokens: Tensor,
    initial_state: Tensor | None = None,
    *,
    group: Group = None,
    dim: int = -1,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    return_final_state: bool = False,
    schedule: Schedule = "auto",
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """States of x[t] = gates[t] * x[t-1] + tokens[t] along a time dimension that is cut between the ranks of a group.

    Each rank holds a contiguous part of time, in rank order. A part may have any length, including 0. Every rank of the
    group has to make the call. If any rank's tensors require gradients, every rank has to run a backward pass through its
    own results; a rank without a loss of its own runs ``(states.sum() * 0).backward()``. States and gradients are those of
    ``scan_registry.linear_scan`` over the whole sequence, up to rounding, for the sum of all ranks' losses.

    Args:
        gates: this rank's part, as for ``scan_registry.linear_scan``.
        tokens: this rank's part, as for ``scan_registry.linear_scan``. All dimensions but ``dim`` have the same size on
            every rank. Dtypes and the kind of device are the same, too.
        initial_state: the state before the whole sequence (after it, with ``reverse``), or before each packed sequence.
            Every rank passes the same values, or every rank None; the values are not compared. The gradient is nonzero
            only on the rank at which a sequence's scan starts. The sum over ranks is the gradient, as of any replicated
            parameter.
        group: a ProcessGroup, a one-dimensional DeviceMesh, or None for the default group.
        dim: the time dimension.
        reverse: compute x[t] = gates[t] * x[t+1] + tokens[t] instead, from the last rank to the first.
        cu_seqlens: bounds of sequences that are packed along the time of all ranks: 0, …, the sum of the ranks' lengths.
            The same values on every rank. The CPU reads the values, and waits for the GPU if they are there.
        return_final_state: also return the state after the last step, or that of each packed sequence.
        schedule: ``"reduce"`` reads the inputs twice and exchanges summaries in one all-gather. ``"pass"`` reads the inputs
            once, some channels at a time, and sends states from rank to rank. ``"auto"`` takes the schedule that a cost
            model predicts to be faster, which ``scan_registry.distributed.explain`` shows.
        backend: as for ``scan_registry.linear_scan``.

    Returns:
        This rank's states, and if asked for the final state, which is the same on every rank. Every rank may use the final
        state in its loss: the ranks' gradients of it are summed. Differentiable in gates, tokens and initial_state, twice.
        For second derivatives, the same tensors have to require gradients on every rank.

    Raises:
        TypeError: a tensor or the group is not of a type or dtype that is accepted.
        ValueError: shapes or options are not accepted, or differ between ranks; the message has those of each rank.
        RuntimeError: there is no process group, or another rank refused its arguments; the message names the rank and its
            error. An argument that is wrong on one rank is an error on all ranks. With NCCL, ranks whose arguments are as
            in an earlier call may raise it only in the next call or in the backward pass, and the results of the call
            itself are then not valid. With the schedule "pass" such a rank may wait until the group's timeout.
        NoKernelError: as for ``scan_registry.linear_scan``.
    """
    options = Options(dim, reverse, return_final_state, backend)
    run = _untraced if _is_compiling() else _linear_scan
    return run(gates, tokens, initial_state, group, cu_seqlens, options, schedule)  # type: ignore[no-any-return]


def _linear_scan(
    gates: Any,
    tokens: Any,
    initial_state: Any,
    group: Any,
    cu_seqlens: Any,
    options: Options,
    schedule: Any,
) -> Any:
    members = groups.resolve(group)
    if members.size == 1:
        check_schedule(schedule)
        dim, reverse, final, backend = options
        one: Any = scan_of_one
        return one(
            gates,
            tokens,
            initial_state,
            dim=dim,
            reverse=reverse,
            cu_seqlens=cu_seqlens,
            return_final_state=final,
            backend=backend,
        )
    try:
        call = prepared(gates, tokens, initial_state, cu_seqlens, options, schedule)
    except Exception as error:
        device = tokens.device if isinstance(tokens, Tensor) else None
        groups.agree(members, error, device)
        raise
    states, last = scan(members, call)
    return states if last is None else (states, last)


# torch.compile breaks the graph at this call.
_untraced = _disable_dynamo(_linear_scan)


# --- Arguments --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A rank's checked arguments. ``bounds`` are the values of ``cu_seqlens``, along the time of all ranks."""

    gates: Tensor
    tokens: Tensor
    initial: Tensor | None
    bounds: tuple[int, ...] | None
    options: Options
    schedule: Schedule
    terms: Terms

    @property
    def wants(self) -> int:
        if not torch.is_grad_enabled():
            return 0
        rest = self.tokens.requires_grad or (
            self.initial is not None and self.initial.requires_grad
        )
        return _GATES * self.gates.requires_grad + _REST * rest


def check_schedule(schedule: Any) -> None:
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}; accepted are {', '.join(SCHEDULES)}")


def prepared(
    gates: Any,
    tokens: Any,
    initial: Any,
    cu_seqlens: Any,
    options: Options,
    schedule: Any,
    operator: str = "linear_scan",
) -> Call:
    """The checked arguments, with the terms that ranks compare. ``operator`` names the function that the user calls."""
    check_schedule(schedule)
    check_tensors(gates, tokens, initial, cu_seqlens)
    gates, tokens, _, _, options = normalised(gates, tokens, None, None, options)
    bounds = None if cu_seqlens is None else host_bounds(cu_seqlens)
    place = options.dim % tokens.dim()
    if initial is not None:
        shape = state_shape(tokens.shape, place, None if bounds is None else len(bounds) - 1)
        check_initial_state(initial, shape, tokens.dtype)
        initial = initial.to(compute_dtype(tokens.dtype))
        if not same_shape(initial.shape, shape):
            initial = initial.expand(shape)
    sizes: list[Any] = [*tokens.shape]
    sizes[place] = "T"
    common = (
        ("shape", f"({', '.join(map(str, sizes))})"),
        ("tokens", _name(tokens.dtype)),
        ("gates", _name(gates.dtype)),
        ("on", tokens.device.type),
        ("reverse", options.reverse),
        ("initial_state", "given" if initial is not None else None),
        ("cu_seqlens", None if bounds is None else "given"),
        ("return_final_state", options.final),
        ("schedule", schedule),
        ("gradients", "recorded" if torch.is_grad_enabled() else "not recorded"),
    )
    terms = Terms(operator, common, *compared(bounds))
    call = Call(gates, tokens, initial, bounds, options, schedule, terms)
    local = tokens.shape[options.dim], call.wants
    return replace(call, terms=terms._replace(local=local))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def host_bounds(cu_seqlens: Tensor) -> tuple[int, ...]:
    """The values of ``cu_seqlens``. They are checked, except that the last one is the number of steps of all ranks."""
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens has dtype {cu_seqlens.dtype}; accepted are int32 and int64")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"cu_seqlens has shape {tuple(cu_seqlens.shape)}; it must be (sequences + 1,), with one sequence at least"
        )
    bounds = tuple(cu_seqlens.tolist())
    if bounds[0] != 0 or any(a > b for a, b in pairwise(bounds)):
        raise ValueError(
            f"cu_seqlens begins with {bounds[0]} and ends with {bounds[-1]}; it must rise from 0 to the steps of all ranks"
        )
    return bounds


def compared(bounds: tuple[int, ...] | None) -> tuple[tuple[int, ...], int, str]:
    """The fields ``local``, ``number`` and ``spelled`` of the terms of a call with these bounds: no local numbers, a digest of
    the bounds, and the bounds in words."""
    if bounds is None:
        return (), 0, ""
    number = int.from_bytes(blake2b(repr(bounds).encode(), digest_size=7).digest(), "little")
    words = str(list(bounds)) if len(bounds) <= 12 else f"{bounds[:12]}…, of {len(bounds)}"
    return (), number, f"cu_seqlens {words}"


# --- Agreement --------------------------------------------------------------------------------


class _Agreed(NamedTuple):
    run: Run
    rows: Tensor | None
    wants: int  # gradients that any rank wants, as far as this rank knows


def _agreed(members: Members, call: Call) -> _Agreed:
    """Agree with the other ranks on the call and its schedule. With "reduce", also exchange the summaries."""
    memory, device = groups.session(members).agreed, call.tokens.device
    pieces, local, terms = memory.get(call.terms.kind), None, call.terms
    # A rank that wants no gradients has to record a backward pass if another rank wants some, so it reads the headers.
    unsure = torch.is_grad_enabled() and not call.wants
    if pieces is None or pieces or call.bounds is not None:
        # A summary needs all ranks' lengths (packed), or the schedule is not known yet, or it is "pass", without summaries.
        read = pieces is None or call.bounds is not None or unsure
        local = groups.open_call(members, terms, device, read=read).local
        lengths = [numbers[0] for numbers in local or ()]
        if call.bounds is not None and call.bounds[-1] != sum(lengths):
            raise ValueError(
                f"cu_seqlens ends with {call.bounds[-1]}; the ranks have {lengths} steps, {sum(lengths)} together"
            )
        if pieces is None:
            pieces = _decided(members, call, lengths)
            groups.session(members).remember(terms.kind, pieces)
        terms = terms._replace(operator=f"{terms.operator}'s exchange")
    number = groups.session(members).calls
    part = parts.whole(members.position(call.options.reverse), members.size)
    bounds = None
    if call.bounds is not None:
        assert local is not None
        lengths = [numbers[0] for numbers in local]
        part = parts.packed(call.bounds, lengths, members.rank, call.options.reverse)
        bounds = torch.tensor(part.bounds, device=device)
    shape, dtype = tuple(call.tokens.shape), call.tokens.dtype
    run = Run(
        *(members, call.terms, call.options, shape, dtype, part, pieces, number, bounds),
        policy.required.get(),
    )
    gathered = None
    if not pieces:
        said: Terms | Exception = terms
        row = None
        try:
            with torch.no_grad():
                row = run.forward_row(call.gates.detach(), call.tokens.detach())
        except Exception as error:
            said = error
        # A collective after this one needs headers that were read.
        more = call.options.final and call.bounds is not None
        opened = groups.open_call(members, said, device, row, read=more or unsure)
        gathered, local = opened.rows, opened.local or local
    wants = call.wants
    for numbers in local or ():
        wants |= numbers[1]
    return _Agreed(run, gathered, wants)


def _decided(members: Members, call: Call, lengths: list[int]) -> int:
    """The number of pieces of "pass", or 0 for "reduce". The first rank's choice counts, as machines may differ."""
    mine = pieces_of(choice(members, call, lengths))
    terms = Terms(f"the schedule of {call.terms.operator}", call.terms.common, (mine,))
    return int(groups.agree(members, terms, call.tokens.device)[0][0])


def choice(members: Members, call: Call, lengths: Sequence[int]) -> Choice:
    """This rank's choice of the schedule, with its reasons."""
    tokens, dim = call.tokens, call.options.dim
    given = call.schedule, members, lengths, tokens.shape, dim, tokens.dtype, tokens.device
    return choice_of(*given, recorded=torch.is_grad_enabled())


# --- Derivatives ------------------------------------------------------------------------------


def scan(members: Members, call: Call) -> tuple[Tensor, Tensor | None]:
    """The states, and if wanted the final state. Every rank has to call this."""
    run, gathered, wants = _agreed(members, call)
    if not wants or not torch.is_grad_enabled():
        with torch.no_grad():
            return run.forward(call.gates, call.tokens, call.initial, gathered)[:2]
    # If no tensor of this rank requires a gradient, this makes autograd run the rank's backward pass all the same.
    anchor = None if call.wants else torch.zeros((), requires_grad=True)
    keep = bool(wants & _GATES)
    inputs = call.gates, call.tokens, call.initial, anchor
    return _LinearScan.apply(*inputs, run, call, gathered, keep)  # type: ignore[no-any-return, no-untyped-call]


class _LinearScan(torch.autograd.Function):
    """Saves gates. If any rank wants the gradient of gates, also saves states and the states that the part started from."""

    @staticmethod
    def forward(
        ctx: Any,
        gates: Tensor,
        tokens: Tensor,
        initial: Tensor | None,
        anchor: Tensor | None,
        run: Run,
        call: Call,
        gathered: Tensor | None,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None]:
        states, last, entered = run.forward(gates, tokens, initial, gathered)
        ctx.set_materialize_grads(False)
        kept = (states, initial, entered) if keep else (None, None, None)
        ctx.save_for_backward(gates, *kept)
        ctx.run, ctx.cu_seqlens = run, call.bounds
        return states, last

    @staticmethod
    def backward(ctx: Any, states_grad: Tensor | None, last_grad: Tensor | None) -> Any:
        gates, states, initial, entered = ctx.saved_tensors
        run, wanted = ctx.run, tuple(ctx.needs_input_grad[:3])
        if states_grad is None:
            states_grad = gates.new_zeros((), dtype=run.dtype).expand(run.shape)
        if torch.is_grad_enabled():
            found = differentiable(
                run, gates, states, initial, states_grad, last_grad, ctx.cu_seqlens, wanted
            )
        else:
            found = run.backward(gates, states, entered, states_grad, last_grad, wanted)
        return (*found, *[None] * 5)
