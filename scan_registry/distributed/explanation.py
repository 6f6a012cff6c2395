"""``explain`` and ``explain_selective_scan``: the schedule that a call would take, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from scan_registry.dispatch.select import Backend
from scan_registry.distributed import group as groups
from scan_registry.distributed import linear, linear_call, opening, selective
from scan_registry.distributed.cost import Choice
from scan_registry.distributed.decision import Schedule, pieces_of
from scan_registry.distributed.headers import Terms
from scan_registry.distributed.local_tensors import check_local
from scan_registry.distributed.selective_cost import SelectiveChoice
from scan_registry.distributed.selective_run import MIXED
from scan_registry.distributed.untraced import untraced
from scan_registry.ops import selective_scan_arguments
from scan_registry.ops.arguments import Options

if TYPE_CHECKING:
    from scan_registry.distributed.group import Group

__all__ = ["explain", "explain_selective_scan"]


def explain(
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
) -> Choice:
    """The schedule that ``scan_registry.distributed.linear_scan`` would take for this call, and why. Nothing is scanned.

    Every rank of the group has to call ``explain``, as the choice depends on the lengths of all parts. Print the result to
    read the reasons.

    Args:
        gates, tokens, initial_state, group, dim, reverse, cu_seqlens, return_final_state, schedule, backend: as for
            ``scan_registry.distributed.linear_scan``. With gradients disabled it is the choice of a forward pass alone.

    Returns:
        A ``Choice``: the schedule, the number of pieces, predicted seconds of both schedules and of one rank with the
            whole sequence, and reasons in words. Where ranks run on different machines, all take the first rank's
            schedule, and the reasons say so; the predicted seconds are then those of each rank's own machine.

    Raises:
        TypeError, ValueError, RuntimeError: as for ``scan_registry.distributed.linear_scan``.
    """
    options = Options(dim, reverse, return_final_state, backend)
    return _explain(gates, tokens, initial_state, group, cu_seqlens, options, schedule)  # type: ignore[no-any-return]


@untraced
def _explain(
    gates: Any,
    tokens: Any,
    initial: Any,
    group: Any,
    cu_seqlens: Any,
    options: Options,
    schedule: Any,
) -> Choice:
    members = groups.resolve(group)
    tensors = {"gates": gates, "tokens": tokens, "initial_state": initial}
    check_local(members, "explain", **tensors, cu_seqlens=cu_seqlens)
    try:
        call = linear_call.prepared(
            gates, tokens, initial, cu_seqlens, options, schedule, "explain"
        )
    except Exception as error:
        opening.agree(members, error, tokens.device if isinstance(tokens, Tensor) else None)
        raise
    local = opening.agree(members, call.terms, call.tokens.device)
    lengths = [numbers[0] for numbers in local]
    linear_call.check_steps(call.bounds, lengths)
    mine = linear.choice(members, call, lengths)
    said = Terms("explain's schedule", call.terms.common, (pieces_of(mine),))
    first = opening.agree(members, said, call.tokens.device)[0][0]
    if first == pieces_of(mine):
        return mine
    return mine.as_given(first)


# --- selective_scan ---------------------------------------------------------------------------


def explain_selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    *,
    group: Group = None,
    return_final_state: bool = False,
    schedule: Schedule = "auto",
    backend: Backend = "auto",
) -> SelectiveChoice:
    """The schedule that ``scan_registry.distributed.selective_scan`` would take for this call, and why. Nothing is scanned.

    Every rank of the group has to call this, as the choice depends on the lengths of all parts. Print the result to read the
    reasons. Packed sequences have no choice: they are passed on.

    Args:
        u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state, group, return_final_state, schedule, backend: as for
            ``scan_registry.distributed.selective_scan``. With gradients disabled it is the choice of a forward pass alone.

    Returns:
        A ``SelectiveChoice``: the schedule, the number of pieces, predicted seconds of all schedules that are possible and of
            one rank with the whole sequence, and reasons in words. "mixed" passes states on forward, and reduces backward. The
            first rank's choice counts, as for ``explain``.

    Raises:
        TypeError, ValueError, RuntimeError: as for ``scan_registry.distributed.selective_scan``.
    """
    tensors = u, delta, A, B, C, D, z, delta_bias, initial_state
    how = delta_softplus, return_final_state, schedule, backend
    return _explain_selective_scan(tensors, group, *how)  # type: ignore[no-any-return]


@untraced
def _explain_selective_scan(
    tensors: tuple[Any, ...], group: Any, softplus: Any, final: Any, schedule: Any, backend: Any
) -> SelectiveChoice:
    members = groups.resolve(group)
    name = "explain_selective_scan"
    check_local(members, name, **dict(zip(selective.NAMES, tensors, strict=True)))
    device = tensors[0].device if isinstance(tensors[0], Tensor) else None
    try:
        how = softplus, final, schedule, backend
        given, _, terms = selective.prepared(tensors, None, *how, name)
    except Exception as error:
        opening.agree(members, error, device)
        raise
    local = opening.agree(members, terms, device)
    lengths = [numbers[0] for numbers in local]
    options = selective_scan_arguments.Options(softplus, backend)
    common = dict(terms.common)
    mine = selective.selective_choice(members, given, lengths, common, options)
    said = Terms(f"{name}'s schedule", terms.common, (selective.mode_of(mine),))
    first = opening.agree(members, said, device)[0][0]
    if first == selective.mode_of(mine):
        return mine
    if first > 0:
        return mine.as_given("pass", first)
    return mine.as_given("mixed" if first == MIXED else "reduce", 1)
