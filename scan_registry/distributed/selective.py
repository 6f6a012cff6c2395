"""``selective_scan`` of a sequence whose time is cut between the ranks of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from scan_registry.dispatch import policy
from scan_registry.dispatch.select import Backend
from scan_registry.distributed import group as groups
from scan_registry.distributed import opening, parts
from scan_registry.distributed.headers import Terms
from scan_registry.distributed.linear import PLANS
from scan_registry.distributed.linear_call import compared, host_bounds
from scan_registry.distributed.local_tensors import check_local
from scan_registry.distributed.selective_run import Run, SelectiveScan, pieces_of
from scan_registry.distributed.untraced import untraced
from scan_registry.kernels.selective_scan import reference
from scan_registry.ops.arguments import as_bool
from scan_registry.ops.derivatives import PLAIN_TYPES
from scan_registry.ops.selective_scan import selective_scan as scan_of_one
from scan_registry.ops.selective_scan_arguments import Arguments, Options, normalised

if TYPE_CHECKING:
    from scan_registry.distributed.group import Group, Members

__all__ = ["selective_scan"]

_required = policy.required.get
#: The tensors of a call in their order here.
_NAMES = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state")


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
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The output of a selective scan along a time dimension that is cut between the ranks of a group.

    The formula is that of ``scan_registry.selective_scan``. Each rank holds a contiguous part of time, in rank order. A part
    may have any length, including 0. Every call passes states on from rank to rank, as the schedule "pass" of
    ``scan_registry.distributed.linear_scan`` does. The rules for ranks, gradients and errors are those of that function. On GPUs
    the channels are cut into pieces only if each piece has rows (batch · channels) enough to fill a GPU. With fewer rows the
    ranks work one after another: the cut then saves memory, and no time.

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
    return _selective_scan(tensors, group, cu_seqlens, delta_softplus, return_final_state, backend)  # type: ignore[no-any-return]


@untraced
def _selective_scan(
    tensors: tuple[Any, ...], group: Any, cu_seqlens: Any, softplus: Any, final: Any, backend: Any
) -> Any:
    members = groups.resolve(group)
    named = dict(zip(_NAMES, tensors, strict=True))
    check_local(members, "selective_scan", **named, cu_seqlens=cu_seqlens)
    if members.size == 1:
        one: Any = scan_of_one
        how = {"cu_seqlens": cu_seqlens, "return_final_state": final, "backend": backend}
        return one(*tensors[:8], softplus, tensors[8], **how)
    key = plan = None
    if cu_seqlens is None and all(t is None or type(t) in PLAIN_TYPES for t in tensors):
        key = _key(tensors, softplus, final, backend)
        plan = _planned(members, key)
    if plan is not None:
        run, wants = plan
        given, mine = _converted(tensors), wants
        unsure = torch.is_grad_enabled() and not wants
        local = run.opening.exchange(run.opening.message(), read=unsure).local
    else:
        try:
            given, bounds, terms = _prepared(tensors, cu_seqlens, softplus, final, backend)
        except Exception as error:
            device = tensors[0].device if isinstance(tensors[0], Tensor) else None
            opening.agree(members, error, device)
            raise
        local = opening.agree(members, terms, given.u.device)
        lengths, mine = [numbers[0] for numbers in local], terms.local[1]
        if bounds is None:
            part = parts.whole(members.rank, members.size)
        elif bounds[-1] != sum(lengths):
            raise ValueError(
                f"cu_seqlens ends with {bounds[-1]}; the ranks have {lengths} steps, {sum(lengths)} together"
            )
        else:
            part = parts.packed(bounds, lengths, members.rank, False)
            given = given._replace(cu_seqlens=torch.tensor(part.bounds, device=given.u.device))
        options = Options(bool(softplus), backend)
        of_u = given.u.shape[1], given.u.device
        pieces = pieces_of(given, members.size)
        run = Run(members, terms, options, part, bool(final), *of_u, pieces, _required())
        if key is not None and _is_converted(tensors, given):
            plans = members.session.plans
            if len(plans) >= PLANS:
                plans.clear()
            plans[key] = run, mine
    if mine or any(numbers[1] for numbers in local or ()):
        anchor = None if mine else torch.zeros((), requires_grad=True)
        out, last = SelectiveScan.apply(*given, anchor, run)  # type: ignore[no-untyped-call]
    else:
        with torch.no_grad():
            out, last, _ = run.forward(given, False)
    return (out, last) if final else out


def _key(tensors: tuple[Any, ...], *options: Any) -> Any:
    """All that ``_prepared`` depends on, where nothing is packed."""
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
    return plan if plan is not None and plan[0].terms.kind in state.agreed else None


def _converted(tensors: tuple[Any, ...]) -> Arguments:
    """The arguments as ``normalised`` converts them, if no dtype changes."""
    u, delta, A, B, C, *others, initial = tensors
    projections = [t.unsqueeze(1) if t.dim() == 3 else t for t in (B, C)]
    return Arguments._make((u, delta, A, *projections, *others, initial, None))


def _is_converted(tensors: tuple[Any, ...], given: Arguments) -> bool:
    """Whether ``_converted`` converts these arguments."""
    pairs = zip(tensors, given.differentiable, strict=True)
    return all(other is None or one.dtype == other.dtype for one, other in pairs)


def _prepared(
    tensors: tuple[Any, ...], cu_seqlens: Any, softplus: Any, final: Any, backend: Any
) -> tuple[Arguments, tuple[int, ...] | None, Terms]:
    """The checked arguments, the bounds along the time of all ranks, and the terms that ranks compare."""
    as_bool("return_final_state", final)
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
        ("gradients", "recorded" if torch.is_grad_enabled() else "not recorded"),
    )
    wants = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in given.differentiable
    )
    digest, spelled = compared(bounds)
    local = time, int(wants)
    return given, bounds, Terms("selective_scan", common, local, 0, digest, spelled)


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
