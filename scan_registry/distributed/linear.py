"""``linear_scan`` of a sequence whose time is cut between the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from scan_registry.dispatch import policy
from scan_registry.dispatch.select import Backend
from scan_registry.distributed import group as groups
from scan_registry.distributed import opening, parts
from scan_registry.distributed.decision import Schedule, choice_of, pieces_of
from scan_registry.distributed.derivatives import differentiable
from scan_registry.distributed.group import Members
from scan_registry.distributed.headers import Terms
from scan_registry.distributed.linear_call import (
    GATES,
    Call,
    check_schedule,
    check_steps,
    prepared,
    restarted,
)
from scan_registry.distributed.local_tensors import check_local
from scan_registry.distributed.opening import Opened
from scan_registry.distributed.run import Run
from scan_registry.distributed.untraced import untraced
from scan_registry.ops.arguments import Options
from scan_registry.ops.derivatives import PLAIN_TYPES
from scan_registry.ops.linear_scan import linear_scan as scan_of_one

if TYPE_CHECKING:
    from scan_registry.distributed.cost import Choice
    from scan_registry.distributed.group import Group

__all__ = ["linear_scan"]

_required = policy.required.get

Outputs = tuple[Tensor, "Tensor | None"]
#: The tensors of a call in their order here.
_TENSORS = ("gates", "tokens", "initial_state", "cu_seqlens", "reset")
#: The most plans that a group keeps.
PLANS = 64


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
    reset: Tensor | None = None,
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
    reset: Tensor | None = None,
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
    reset: Tensor | None = None,
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
    reset: Tensor | None = None,
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
        reset: as for ``scan_registry.linear_scan``, for this rank's steps; a rank without resets may pass None. With several
            ranks the gate is set to zero at such a step, so the state before that step has to be finite.
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
            error. An argument that is wrong on one rank is an error on all ranks. With NCCL, a rank whose arguments are
            as in an earlier call does not wait for the GPU. It raises the error in the first later call or backward pass
            that finds the GPU's comparison finished, and the results of the call itself are not valid. With the schedule
            "pass" such a rank may wait for the failed rank's states until the group's timeout.
        NoKernelError: as for ``scan_registry.linear_scan``.
    """
    options = Options(dim, reverse, return_final_state, backend)
    tensors = gates, tokens, initial_state, cu_seqlens, reset
    return _linear_scan(tensors, group, options, schedule)  # type: ignore[no-any-return]


@untraced
def _linear_scan(tensors: tuple[Any, ...], group: Any, options: Options, schedule: Any) -> Any:
    members = groups.resolve(group)
    check_local(members, "linear_scan", **dict(zip(_TENSORS, tensors, strict=True)))
    gates, tokens, initial_state, cu_seqlens, reset = tensors
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
            reset=reset,
            return_final_state=final,
            backend=backend,
        )
    if reset is not None:
        try:
            gates = restarted(gates, tokens, reset, options)
        except Exception as error:
            opening.agree(members, error, tokens.device if isinstance(tokens, Tensor) else None)
            raise
    given = gates, tokens, initial_state, cu_seqlens, options, schedule
    states, last = scan(members, *given, "linear_scan")
    return states if last is None else (states, last)


# --- Plans ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A call without packed sequences that the ranks have agreed on before. ``wants`` are the gradients that this rank
    wants."""

    run: Run
    wants: int

    def scan(self, gates: Tensor, tokens: Tensor, initial: Tensor | None) -> Outputs:
        wants, opened = self.wants, None
        if not wants and torch.is_grad_enabled():
            # A rank that wants no gradients records a backward pass if another rank wants some, so it reads the headers.
            with torch.no_grad():
                opened = self.run.open(gates, tokens, read=True)
            for numbers in opened.local or ():
                wants |= numbers[1]
        return recorded(self.run, gates, tokens, initial, opened, self.wants, wants)


def _key(
    gates: Tensor, tokens: Tensor, initial: Any, options: Options, schedule: Any, operator: str
) -> Any:
    """All that a plan depends on, as a key; None if the initial state is not a plain tensor."""
    dim, reverse, final, backend = options
    state = None
    if initial is not None:
        if type(initial) not in PLAIN_TYPES:
            return None
        state = initial.shape, initial.dtype, initial.device, initial.requires_grad
    return (
        *(gates.shape, gates.dtype, gates.device, gates.requires_grad),
        *(tokens.shape, tokens.dtype, tokens.device, tokens.requires_grad),
        *(state, dim, type(dim), reverse, type(reverse), final, type(final), backend, schedule),
        *(operator, torch.is_grad_enabled(), _required()),
    )


def _planned(members: Members, key: Any) -> Plan | None:
    """The plan of a call, if the ranks have agreed on such calls and on their schedule."""
    state = members.session
    try:
        plan = state.plans.get(key)
    except TypeError:  # an option without a hash, which is refused later
        return None
    if plan is None or state.agreed.get(plan.run.terms.kind) != plan.run.pieces:
        return None
    return plan  # type: ignore[no-any-return]


# --- Agreement --------------------------------------------------------------------------------


def _agreed(members: Members, call: Call, key: Any) -> tuple[Run, Opened, int]:
    """Agree with the other ranks on the call and its schedule, and with "reduce" exchange the summaries. The result has the
    gradients that any rank wants, as far as this rank knows."""
    state, terms, tokens = members.session, call.terms, call.tokens
    pieces = state.agreed.get(terms.kind)
    unsure = torch.is_grad_enabled() and not call.wants
    local = None
    if pieces is None or call.bounds is not None:
        # The schedule is not known yet, or sequences are packed, and a summary depends on the lengths of all ranks' parts.
        local = opening.agree(members, terms, tokens.device)
        lengths = [numbers[0] for numbers in local]
        check_steps(call.bounds, lengths)
        if pieces is None:
            pieces = _decided(members, call, lengths)
            state.remember(terms.kind, pieces)
    part, bounds = parts.whole(members.position(call.options.reverse), members.size), None
    if call.bounds is not None:
        part = parts.packed(call.bounds, lengths, members.rank, call.options.reverse)
        bounds = torch.tensor(part.bounds, device=tokens.device)
    of_tokens = tuple(tokens.shape), tokens.dtype, tokens.device
    run = Run(
        *(members, terms, call.options, *of_tokens, part, pieces, call.bounds, bounds),
        _required(),
    )
    if key is not None:
        if len(state.plans) >= PLANS:
            state.plans.clear()
        state.plans[key] = Plan(run, call.wants)
    wants = call.wants
    with torch.no_grad():
        if local is None:
            opened = run.open(call.gates, tokens, read=unsure)
        elif pieces:
            opened = Opened(local)
        else:
            # If another collective follows, the headers have to be read first, so that a failed rank is known.
            more = call.options.final and call.bounds is not None
            opened = run.gather(call.gates, tokens, read=more or unsure)
    for numbers in local or opened.local or ():
        wants |= numbers[1]
    return run, opened, wants


def _decided(members: Members, call: Call, lengths: list[int]) -> int:
    """The number of pieces of "pass", or 0 for "reduce". The first rank's choice counts, as machines may differ."""
    mine = pieces_of(choice(members, call, lengths))
    terms = Terms(f"the schedule of {call.terms.operator}", call.terms.common, (mine,))
    return int(opening.agree(members, terms, call.tokens.device)[0][0])


def choice(members: Members, call: Call, lengths: Sequence[int]) -> Choice:
    """This rank's choice of the schedule, with its reasons."""
    tokens, dim = call.tokens, call.options.dim
    given = call.schedule, members, lengths, tokens.shape, dim, tokens.dtype, tokens.device
    return choice_of(*given, recorded=torch.is_grad_enabled())


# --- Derivatives ------------------------------------------------------------------------------


def scan(
    members: Members,
    gates: Any,
    tokens: Any,
    initial: Any,
    cu_seqlens: Any,
    options: Options,
    schedule: Any,
    operator: str,
) -> Outputs:
    """The states, and if wanted the final state. Every rank has to call this. ``operator`` names the function that the user
    calls."""
    key = None
    if cu_seqlens is None and type(gates) in PLAIN_TYPES and type(tokens) in PLAIN_TYPES:
        key = _key(gates, tokens, initial, options, schedule, operator)
        plan = _planned(members, key)
        if plan is not None:
            return plan.scan(gates, tokens, initial)
    try:
        call = prepared(gates, tokens, initial, cu_seqlens, options, schedule, operator)
    except Exception as error:
        device = tokens.device if isinstance(tokens, Tensor) else None
        opening.agree(members, error, device)
        raise
    if call.gates is not gates or call.tokens is not tokens or call.initial is not initial:
        key = None
    run, opened, wants = _agreed(members, call, key)
    return recorded(run, call.gates, call.tokens, call.initial, opened, call.wants, wants)


def recorded(
    run: Run,
    gates: Tensor,
    tokens: Tensor,
    initial: Tensor | None,
    opened: Opened | None,
    mine: int,
    wants: int,
) -> Outputs:
    """Run a call, and record it if any rank wants gradients. ``mine`` are the gradients that this rank wants, and ``wants``
    those that any rank wants."""
    if not wants or not torch.is_grad_enabled():
        with torch.no_grad():
            if opened is None:
                opened = run.open(gates, tokens, read=False)
            return run.forward(gates, tokens, initial, opened, False)[:2]
    # If no tensor of this rank requires a gradient, this makes autograd run the rank's backward pass all the same.
    anchor = None if mine else torch.zeros((), device="cpu", requires_grad=True)
    keep = bool(wants & GATES)
    return _LinearScan.apply(gates, tokens, initial, anchor, run, opened, keep)  # type: ignore[no-any-return, no-untyped-call]


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
        opened: Opened | None,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None]:
        if opened is None:
            opened = run.open(gates, tokens, read=False)
        ctx.run, ctx.number = run, run.members.session.calls
        states, last, entered = run.forward(gates, tokens, initial, opened, keep)
        ctx.set_materialize_grads(False)
        kept = (states, initial, entered) if keep else (None, None, None)
        ctx.save_for_backward(gates, *kept)
        return states, last

    @staticmethod
    def backward(ctx: Any, states_grad: Tensor | None, last_grad: Tensor | None) -> Any:
        gates, states, initial, entered = ctx.saved_tensors
        run, number, wanted = ctx.run, ctx.number, tuple(ctx.needs_input_grad[:3])
        if states_grad is None:
            states_grad = gates.new_zeros((), dtype=run.dtype).expand(run.shape)
        if torch.is_grad_enabled():
            tensors = gates, states, initial, states_grad, last_grad
            found = differentiable(run, *tensors, wanted, number)
        else:
            found = run.backward(gates, states, entered, states_grad, last_grad, wanted, number)
        return (*found, *[None] * 4)
