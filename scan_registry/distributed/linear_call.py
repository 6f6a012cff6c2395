"""A rank's arguments of ``linear_scan``: checked, and with the terms that ranks compare."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scan_registry.base.symbols import same_shape
from scan_registry.distributed.decision import SCHEDULES
from scan_registry.distributed.headers import Terms
from scan_registry.kernels.linear_scan.reference import compute_dtype, state_shape
from scan_registry.ops.arguments import Options, check_initial_state, check_tensors, normalised
from scan_registry.ops.gated_scan_arguments import check_reset
from scan_registry.ops.resets import batch_dim, reset_shape

if TYPE_CHECKING:
    from scan_registry.distributed.decision import Schedule

#: Bits of a local number: the rank wants gradients of gates, or of tokens or the initial state.
GATES, REST = 1, 2


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
        return GATES * self.gates.requires_grad + REST * rest


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
    operator: str,
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
    digest, spelled = compared(bounds)
    terms = Terms(operator, common, digest=digest, spelled=spelled)
    call = Call(gates, tokens, initial, bounds, options, schedule, terms)
    local = tokens.shape[options.dim], call.wants
    return replace(call, terms=terms._replace(local=local))


def restarted(gates: Any, tokens: Any, reset: Any, options: Options) -> Tensor:
    """The gates, with zeros at the steps of ``reset``."""
    gates, tokens, _, _, options = normalised(gates, tokens, None, None, options)
    rank, dim = tokens.dim(), options.dim
    check_reset(reset, reset_shape(tokens.shape, dim), tokens.device)
    if rank > 1:
        reset = reset.view(*reset.shape, *(1 for _ in range(rank - 2)))
        reset = reset.movedim((0, 1), (batch_dim(rank, dim), dim))
    found: Tensor = gates.masked_fill(reset, 0)
    return found


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
    wrong = None if bounds[0] == 0 else f"begins with {bounds[0]}"
    for number, (one, following) in enumerate(pairwise(bounds), 1):
        if one > following:
            wrong = f"falls from {one} to {following} at index {number}"
            break
    if wrong:
        raise ValueError(f"cu_seqlens {wrong}; it must rise from 0 to the steps of all ranks")
    return bounds


def check_steps(bounds: tuple[int, ...] | None, lengths: list[int]) -> None:
    """Refuse bounds that do not end at the sum of the ranks' lengths."""
    if bounds is not None and bounds[-1] != sum(lengths):
        raise ValueError(
            f"cu_seqlens ends with {bounds[-1]}; the ranks have {lengths} steps, {sum(lengths)} together"
        )


def compared(bounds: tuple[int, ...] | None) -> tuple[int, str]:
    """The fields ``digest`` and ``spelled`` of the terms of a call with these bounds."""
    if bounds is None:
        return 0, ""
    digest = int.from_bytes(blake2b(repr(bounds).encode(), digest_size=7).digest(), "little")
    if len(bounds) <= 12:
        return digest, f"cu_seqlens {list(bounds)}"
    return (
        digest,
        f"cu_seqlens {list(bounds[:12])} and {len(bounds) - 12} more, hash of all {digest:x}",
    )
