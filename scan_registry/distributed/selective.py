"""``selective_scan`` of a sequence whose time is cut between the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from scan_registry.dispatch import policy
from scan_registry.dispatch.select import Backend
from scan_registry.distributed import group as groups
from scan_registry.distributed import opening, parts
from scan_registry.distributed.calibration import machine_of
from scan_registry.distributed.decision import Schedule
from scan_registry.distributed.headers import Terms
from scan_registry.distributed.linear import PLANS
from scan_registry.distributed.linear_call import check_schedule, check_steps, compared, host_bounds
from scan_registry.distributed.local_tensors import check_local
from scan_registry.distributed.opening import Opened
from scan_registry.distributed.selective_chunks import chunk_count
from scan_registry.distributed.selective_cost import SelectiveChoice, SelectiveWork, choose
from scan_registry.distributed.selective_reduce import Gathered
from scan_registry.distributed.selective_run import (
    MIXED,
    REDUCE,
    Run,
    SelectiveScan,
    most_pieces,
    pieces_of,
)
from scan_registry.distributed.untraced import untraced
from scan_registry.kernels.selective_scan import reference
from scan_registry.ops.arguments import as_bool
from scan_registry.ops.derivatives import PLAIN_TYPES
from scan_registry.ops.selective_scan import selective_scan as scan_of_one
from scan_registry.ops.selective_scan_arguments import Arguments, Options, normalised
from scan_registry.ops.selective_scan_problems import has_kernels

if TYPE_CHECKING:
    from scan_registry.distributed.group import Group, Members

__all__ = ["selective_scan"]

_required = policy.required.get
#: The tensors of a call in their order here.
NAMES = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state")


@overload
def selective_scan(
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
    cu_seqlens: Tensor | None = None,
    return_final_state: Literal[False] = False,
    schedule: Schedule = "auto",
    backend: Backend = "auto",
) -> Tensor: ...


@overload
def selective_scan(
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
    cu_seqlens: Tensor | None = None,
    return_final_state: Literal[True],
    schedule: Schedule = "auto",
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]: ...


@overload
def selective_scan(
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
    cu_seqlens: Tensor | None = None,
    return_final_state: bool,
    schedule: Schedule = "auto",
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...


def selective_scan(
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
    cu_seqlens: Tensor | None = None,
    return_final_state: bool = False,
    schedule: Schedule = "auto",
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The output of a selective scan along a time dimension that is cut between the ranks of a group.

    The formula is that of ``scan_registry.selective_scan``. Each rank holds a contiguous part of time, in rank order. A part
    may have any length, including 0. The rules for ranks, gradients and errors are those of
    ``scan_registry.distributed.linear_scan``.

    Args:
        u: this rank's part, as for ``scan_registry.selective_scan``.
        delta: this rank's part, like ``u``.
        A: the same on every rank, as are ``D``, ``delta_bias``, and ``B`` and ``C`` if they do not change with time. The sum
            of the ranks' gradients is the gradient of such a tensor.
        B: this rank's part, as for ``scan_registry.selective_scan``.
        C: this rank's part, as for ``scan_registry.selective_scan``.
        D: as for ``scan_registry.selective_scan``.
        z: this rank's part, like ``u``, or None for no gate.
        delta_bias: as for ``scan_registry.selective_scan``.
        delta_softplus: as for ``scan_registry.selective_scan``.
        initial_state: the state before the whole sequence, (batch, Dm, N), or before each packed one, (batch, sequences, Dm,
            N). Every rank passes the same values, or every rank None; the values are not compared. The gradient is nonzero
            only on the rank at which a sequence's scan starts.
        group: a ProcessGroup, a one-dimensional DeviceMesh, or None for the default group.
        cu_seqlens: bounds along the time of all ranks, as for ``scan_registry.distributed.linear_scan``.
        return_final_state: also return the state after the last step, or that of each packed sequence.
        schedule: ``"reduce"`` scans each part twice forward, the first time for a summary, and exchanges summaries in one
            all-gather; all ranks work at the same time. Backward a summary costs little on a GPU, and as much as the pass itself
            elsewhere. ``"pass"`` passes states on from rank to rank. On GPUs the channels are then cut into pieces only if each
            piece has rows (batch · channels) enough to fill a GPU. With fewer rows the ranks work one after another. ``"auto"``
            takes the schedule that a cost model predicts to be the fastest, which
            ``scan_registry.distributed.explain_selective_scan`` shows. Packed sequences are always passed on.
        backend: as for ``scan_registry.selective_scan``.

    Returns:
        This rank's output, in the dtype of ``u``, and if asked for the final state, which is the same on every rank.
        Differentiable once, in all floating-point and complex tensors.

    Raises:
        TypeError: as for ``scan_registry.selective_scan``, or the group is of another type.
        ValueError: as for ``scan_registry.selective_scan``, or what has to be the same differs between ranks.
        RuntimeError: there is no process group, another rank refused its arguments, or a second derivative is asked for.
        NoKernelError: as for ``scan_registry.selective_scan``.
    """
    tensors = u, delta, A, B, C, D, z, delta_bias, initial_state
    how = delta_softplus, return_final_state, schedule, backend
    return _selective_scan(tensors, group, cu_seqlens, *how)  # type: ignore[no-any-return]


@untraced
def _selective_scan(
    tensors: tuple[Any, ...],
    group: Any,
    cu_seqlens: Any,
    softplus: Any,
    final: Any,
    schedule: Any,
    backend: Any,
) -> Any:
    members = groups.resolve(group)
    named = dict(zip(NAMES, tensors, strict=True))
    check_local(members, "selective_scan", **named, cu_seqlens=cu_seqlens)
    if members.size == 1:
        _check_schedule(schedule, cu_seqlens)
        one: Any = scan_of_one
        named = {"cu_seqlens": cu_seqlens, "return_final_state": final, "backend": backend}
        return one(*tensors[:8], softplus, tensors[8], **named)
    key = plan = None
    if cu_seqlens is None and all(t is None or type(t) in PLAIN_TYPES for t in tensors):
        key = _key(tensors, softplus, final, schedule, backend)
        plan = _planned(members, key)
    if plan is not None:
        run, mine = plan
        given = _converted(tensors)
        with torch.no_grad():
            gathered = run.open(given, read=torch.is_grad_enabled() and not mine)
    else:
        how = softplus, final, schedule, backend
        try:
            given, bounds, terms = prepared(tensors, cu_seqlens, *how, "selective_scan")
        except Exception as error:
            device = tensors[0].device if isinstance(tensors[0], Tensor) else None
            opening.agree(members, error, device)
            raise
        mine = terms.local[1]
        given, run, gathered = _agreed(members, given, bounds, terms, Options(softplus, backend))
        if key is not None and _is_converted(tensors, given):
            plans = members.session.plans
            if len(plans) >= PLANS:
                plans.clear()
            plans[key] = run, mine
    if mine or any(numbers[1] for numbers in gathered.opened.local or ()):
        anchor = None if mine else torch.zeros((), device="cpu", requires_grad=True)
        out, last = SelectiveScan.apply(*given, anchor, run, gathered)  # type: ignore[no-untyped-call]
    else:
        with torch.no_grad():
            out, last, _ = run.forward(given, False, gathered)
    return (out, last) if run.final else out


# --- Agreement --------------------------------------------------------------------------------


def _agreed(
    members: Members, given: Arguments, bounds: Any, terms: Terms, options: Options
) -> tuple[Arguments, Run, Gathered]:
    """Agree with the other ranks on the call and its schedule, and with "reduce" exchange the summaries."""
    state, common = members.session, dict(terms.common)
    mode = state.agreed.get(terms.kind)
    unsure = torch.is_grad_enabled() and not terms.local[1]
    local, part = None, parts.whole(members.rank, members.size)
    if mode is None or bounds is not None:
        local = opening.agree(members, terms, given.u.device)
        lengths = [numbers[0] for numbers in local]
        if mode is None:
            mode = most_pieces(given, members.size)
            if bounds is None:
                mode = _decided(members, given, terms, lengths, options)
            state.remember(terms.kind, mode)
        if bounds is not None:
            check_steps(bounds, lengths)
            part = parts.packed(bounds, lengths, members.rank, False)
            given = given._replace(cu_seqlens=torch.tensor(part.bounds, device=given.u.device))
    pieces = pieces_of(given, max(1, mode))
    shape = given.u.shape[0], *given.A.shape
    dtype = reference.state_dtype(given.u.dtype, given.A.dtype)
    run = Run(
        *(members, terms, options, part, common["return_final_state"], shape, dtype),
        *(given.u.device, mode, pieces, _required()),
    )
    with torch.no_grad():
        if local is None:
            return given, run, run.open(given, read=unsure)
        if mode == REDUCE:
            opened, summary = run.gather(given, read=unsure)
            return given, run, Gathered(opened._replace(local=local), summary)
    return given, run, Gathered(Opened(local))


def _decided(
    members: Members, given: Arguments, terms: Terms, lengths: list[int], options: Options
) -> int:
    """The mode of the run. The first rank's choice counts, as machines may differ."""
    mine = mode_of(selective_choice(members, given, lengths, dict(terms.common), options))
    said = Terms("the schedule of selective_scan", terms.common, (mine,))
    return int(opening.agree(members, said, given.u.device)[0][0])


def selective_choice(
    members: Members,
    given: Arguments,
    lengths: Sequence[int],
    common: dict[str, Any],
    options: Options,
) -> SelectiveChoice:
    """This rank's choice of the schedule, with its reasons."""
    pieces = len(pieces_of(given, most_pieces(given, members.size)))
    work = SelectiveWork(
        steps=tuple(lengths),
        rows=given.u.shape[0] * given.u.shape[1],
        states=given.A.shape[1],
        itemsize=given.u.element_size(),
        softplus=options.softplus,
        kernels=given.u.is_cuda and options.backend != "reference" and has_kernels(given),
        recorded=torch.is_grad_enabled(),
        pieces=pieces,
        chunks=chunk_count(given),
    )
    return choose(work, machine_of(members.group, given.u.device), common["schedule"])


def mode_of(choice: SelectiveChoice) -> int:
    """What a run is told of a choice."""
    return {"reduce": REDUCE, "mixed": MIXED}.get(choice.schedule, choice.pieces)


def _key(tensors: tuple[Any, ...], *options: Any) -> Any:
    """All that ``prepared`` depends on, where nothing is packed."""
    facts = [None if t is None else (t.shape, t.dtype, t.device, t.requires_grad) for t in tensors]
    kinds = [type(option) for option in options]
    return ("selective_scan", *options, *kinds, *facts, torch.is_grad_enabled(), _required())


def _planned(members: Members, key: Any) -> Any:
    """The run of calls that the ranks have agreed on before, and whether this rank wants gradients."""
    state = members.session
    try:
        plan = state.plans.get(key)
    except TypeError:  # an option without a hash, which is refused later
        return None
    if plan is None or state.agreed.get(plan[0].terms.kind) != plan[0].mode:
        return None
    return plan


def _converted(tensors: tuple[Any, ...]) -> Arguments:
    """The arguments as ``normalised`` converts them, if no dtype changes."""
    u, delta, A, B, C, *others, initial = tensors
    projections = [t.unsqueeze(1) if t.dim() == 3 else t for t in (B, C)]
    return Arguments._make((u, delta, A, *projections, *others, initial, None))


def _is_converted(tensors: tuple[Any, ...], given: Arguments) -> bool:
    """Whether ``_converted`` converts these arguments."""
    pairs = zip(tensors, given.differentiable, strict=True)
    return all(other is None or one.dtype == other.dtype for one, other in pairs)


def prepared(
    tensors: tuple[Any, ...],
    cu_seqlens: Any,
    softplus: Any,
    final: Any,
    schedule: Any,
    backend: Any,
    operator: str,
) -> tuple[Arguments, tuple[int, ...] | None, Terms]:
    """The checked arguments, the bounds along the time of all ranks, and the terms that ranks compare."""
    as_bool("return_final_state", final)
    _check_schedule(schedule, cu_seqlens)
    u, delta, A, B, C, D, z, delta_bias, initial = tensors
    given = normalised(u, delta, A, B, C, D, z, delta_bias, None, None, softplus, backend)
    bounds = None
    if cu_seqlens is not None:
        if not isinstance(cu_seqlens, Tensor):
            raise TypeError(f"cu_seqlens must be a torch.Tensor, not {type(cu_seqlens).__name__}")
        bounds = host_bounds(cu_seqlens)
    if initial is not None:
        given = given._replace(initial_state=_initial(initial, given, bounds))
    batch, channels, time = given.u.shape
    shapes = {"u": (batch, channels, "T"), "A": tuple(given.A.shape)}
    for name in "BC":
        projection = getattr(given, name)
        # Without time, which is the last of four dimensions.
        shapes[name] = tuple(projection.shape)[: projection.dim() // 4 * 3 or 2]
    names = [name for name in ("D", "z", "delta_bias") if getattr(given, name) is not None]
    common = (
        *((name, f"({', '.join(map(str, shape))})") for name, shape in shapes.items()),
        ("dtype", str(given.u.dtype).removeprefix("torch.")),
        ("of A", str(given.A.dtype).removeprefix("torch.")),
        ("on", given.u.device.type),
        ("with", " ".join(names) or None),
        ("delta_softplus", bool(softplus)),
        ("initial_state", None if initial is None else "given"),
        ("cu_seqlens", None if bounds is None else "given"),
        ("return_final_state", bool(final)),
        ("schedule", schedule),
        ("gradients", "recorded" if torch.is_grad_enabled() else "not recorded"),
    )
    wants = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in given.differentiable
    )
    digest, spelled = compared(bounds)
    local = time, int(wants)
    return given, bounds, Terms(operator, common, local, 0, digest, spelled)


def _check_schedule(schedule: Any, cu_seqlens: Any) -> None:
    check_schedule(schedule)
    if schedule == "reduce" and cu_seqlens is not None:
        raise ValueError(
            "schedule is 'reduce', and cu_seqlens is given; packed sequences take 'pass' or 'auto'"
        )


def _initial(initial: Any, given: Arguments, bounds: tuple[int, ...] | None) -> Tensor:
    state = reference.state_dtype(given.u.dtype, given.A.dtype)
    if not isinstance(initial, Tensor):
        raise TypeError(f"initial_state must be a torch.Tensor, not {type(initial).__name__}")
    between = () if bounds is None else (len(bounds) - 1,)
    shape = (given.u.shape[0], *between, *given.A.shape)
    if tuple(initial.shape) != shape:
        raise ValueError(
            f"initial_state has shape {tuple(initial.shape)}; for u of shape {tuple(given.u.shape)} and "
            f"{given.A.shape[1]} states it must be {shape}"
        )
    if initial.device != given.u.device:
        raise ValueError(
            f"initial_state is on {initial.device}, u on {given.u.device}; they must be on one device"
        )
    if initial.is_complex() and not state.is_complex:
        raise TypeError(
            f"initial_state has dtype {initial.dtype}, which does not go with states of {state}"
        )
    return initial.to(state)
