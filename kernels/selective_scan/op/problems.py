"""What a selective scan poses to the kernels: problems, made of tensors.

Arguments are as ``normalised`` makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from scan_registry.base.frozen import dataclass
from scan_registry.dispatch.select import Backend
from scan_registry.kernels.model import Problem
from scan_registry.kernels.selective_scan.op.arguments import COMPILED, Arguments, Options
from scan_registry.kernels.selective_scan.problem import (
    INTERVAL,
    STRIDED,
    Direction,
    Layout,
    SelectiveScanProblem,
    stride_names,
)
from scan_registry.ops.launching import addresses_of

#: Of a GPU that is not there: as many as an H100 has.
_USUAL_SMS = 132


@dataclass(frozen=True)
class KernelCall:
    """One kernel's part in an operator's call: its problem. Nothing is copied first."""

    problem: SelectiveScanProblem
    copied: tuple[str, ...] = ()

    def alternatives(self, backend: Backend) -> tuple[tuple[Problem, Backend], ...]:
        """The problem alone."""
        return ((self.problem, backend),)

    def fused(self) -> None:
        """No kernel of this family does what another one does, too."""


def has_kernels(given: Arguments) -> bool:
    """Whether the kernels compute it: of real numbers, with B and C that change with time."""
    return (
        given.u.dtype in COMPILED
        and not given.A.is_complex()
        and given.B.dim() == given.C.dim() == 4
    )


def with_groups(given: Arguments) -> Arguments:
    """B and C of as many groups, without a copy where one of them has one."""
    groups = max(given.B.shape[1], given.C.shape[1])

    def spread(x: Tensor) -> Tensor:
        if x.shape[1] == 1 and groups > 1:
            return x.expand(-1, groups, -1, -1)
        return x if x.shape[1] == groups else x.repeat_interleave(groups // x.shape[1], 1)

    return given._replace(B=spread(given.B), C=spread(given.C))


def copies_groups(given: Arguments) -> bool:
    """Whether ``with_groups`` copies."""
    of_B, of_C = given.B.shape[1], given.C.shape[1]
    return of_B != of_C and 1 not in (of_B, of_C)


def _on_16_bytes(tensor: Tensor, along: int, addresses: int) -> bool:
    """Whether its rows along a dimension lie without gaps and start on 16 bytes."""
    size = tensor.element_size()
    others = [
        stride * size
        for dim, stride in enumerate(tensor.stride())
        if dim != along and tensor.shape[dim] > 1
    ]
    return tensor.stride(along) == 1 and not any(each % 16 for each in (addresses, *others))


def make_problem(
    direction: Direction,
    given: Arguments,
    options: Options,
    others: Mapping[str, Tensor],
    addresses: int,
    parts: int = 1,
) -> SelectiveScanProblem:
    """What the arguments pose; ``others`` are the tensors that have strides and are no arguments.
    ``addresses`` say how far all are aligned, up to 16 bytes."""
    u, bounds = given.u, given.cu_seqlens
    batch, channels, time = u.shape
    groups = given.B.shape[1]
    layout: Layout = "channel_last" if u.stride(1) == 1 and u.stride(2) != 1 else "time_last"
    along, length = (2, time) if layout == "time_last" else (1, channels // groups)
    named: dict[str, Any] = {**given._asdict(), **others}
    sequences = [t for n, t in named.items() if n in ("u", "delta", "z", *others) and t is not None]
    strides: list[int] = []
    for name, dimensions in STRIDED[direction].items():
        tensor = named.get(name)
        strides += [0] * len(dimensions) if tensor is None else tensor.stride()
    unit = 16 // u.element_size()
    return SelectiveScanProblem(
        direction=direction,
        dtype=str(u.dtype).removeprefix("torch."),
        layout=layout,
        batch=batch,
        channels=channels,
        time=time,
        states=given.A.shape[1],
        groups=groups,
        strides=tuple(strides),
        softplus=options.softplus,
        parts=parts,
        sequences=0 if bounds is None else bounds.shape[0] - 1,
        aligned=bounds is None
        and length % unit == 0
        and all(_on_16_bytes(each, along, addresses) for each in sequences),
        whole=(
            bounds is None and _on_16_bytes(given.B, 3, addresses),
            bounds is None and _on_16_bytes(given.C, 3, addresses),
        ),
    )


def describe(given: Arguments, options: Options, differentiated: bool) -> dict[str, KernelCall]:
    """The problems of a call by direction; those of derivatives only if it is ``differentiated``."""
    model = torch.empty_like(given.u, device="meta")
    addresses = addresses_of(given)
    if not has_kernels(given):
        made = _without_kernels(given)
        directions: tuple[Direction, ...] = ("forward", "backward")
        return {each: KernelCall(made(each)) for each in directions[: 1 + differentiated]}
    given = with_groups(given)
    forward = make_problem("forward", given, options, {"out": model}, addresses)
    calls = {"forward": KernelCall(forward)}
    if differentiated:
        others = {"grad": model, "u_grad": model}
        whole = make_problem("backward", given, options, others, addresses)
        parts = parts_of(whole, given.u.device)
        if parts > 1:
            grad = {"grad": model}
            problem = make_problem("adjoint", given, options, grad, addresses, parts)
            calls["adjoint"] = KernelCall(problem)
        calls["backward"] = KernelCall(replace(whole, parts=parts))
    return calls


def _without_kernels(given: Arguments) -> Callable[[Direction], SelectiveScanProblem]:
    """The problem of complex numbers, of float64, or of B or C that do not change with time: no kernel accepts it."""
    dtype = str(given.A.dtype if given.A.is_complex() else given.u.dtype)

    def made(direction: Direction) -> SelectiveScanProblem:
        return SelectiveScanProblem(
            direction=direction,
            dtype=dtype.removeprefix("torch."),
            layout="time_last",
            batch=given.u.shape[0],
            channels=given.u.shape[1],
            time=given.u.shape[2],
            states=given.A.shape[1],
            groups=1,
            strides=(0,) * len(stride_names(direction)),
            constant=2 in (given.B.dim(), given.C.dim()),
        )

    return made


def parts_of(problem: SelectiveScanProblem, device: torch.device) -> int:
    """Parts to cut sequences into for the backward pass: so many that its CTAs fill the GPU evenly, though to cut costs
    a fifth more."""
    ctas = problem.ctas_of_group * problem.groups * problem.batch * max(1, problem.sequences)
    sms = _USUAL_SMS
    if device.type == "cuda":
        sms = torch.cuda.get_device_properties(device).multi_processor_count
    resident = problem.ctas_of_sm * sms
    most = max(1, min(8, problem.time // (4 * INTERVAL)))

    def duration(parts: int) -> float:
        waves = -(-ctas * parts // resident)
        return waves / parts * (1.2 if parts > 1 else 1.0)

    return min(range(1, most + 1), key=duration)
