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


def has_kernels(arguments: Arguments) -> bool:
    """Whether the kernels compute it: of real numbers, with B and C that change with time."""
    return (
        arguments.u.dtype in COMPILED
        and not arguments.A.is_complex()
        and arguments.B.dim() == arguments.C.dim() == 4
    )


def with_groups(arguments: Arguments) -> Arguments:
    """B and C of as many groups, without a copy where one of them has one."""
    groups = max(arguments.B.shape[1], arguments.C.shape[1])

    def spread(x: Tensor) -> Tensor:
        if x.shape[1] == 1 and groups > 1:
            return x.expand(-1, groups, -1, -1)
        return x if x.shape[1] == groups else x.repeat_interleave(groups // x.shape[1], 1)

    return arguments._replace(B=spread(arguments.B), C=spread(arguments.C))


def copies_groups(arguments: Arguments) -> bool:
    """Whether ``with_groups`` copies."""
    of_B, of_C = arguments.B.shape[1], arguments.C.shape[1]
    return of_B != of_C and 1 not in (of_B, of_C)


def _on_16_bytes(tensor: Tensor, along: int, addresses: int) -> bool:
    """Whether its rows along a dimension lie without gaps and start on 16 bytes."""
    size = tensor.element_size()
    others = [
        stride * size
        for dim, stride in enumerate(tensor.stride())
        if dim != along and tensor.shape[dim] > 1
    ]
    return tensor.stride(along) == 1 and not any(distance % 16 for distance in (addresses, *others))


def make_problem(
    direction: Direction,
    arguments: Arguments,
    options: Options,
    others: Mapping[str, Tensor],
    addresses: int,
    parts: int = 1,
) -> SelectiveScanProblem:
    """What the arguments pose; ``others`` are the tensors that have strides and are no arguments.
    ``addresses`` say how far all are aligned, up to 16 bytes."""
    u, cu_seqlens = arguments.u, arguments.cu_seqlens
    batch, channels, time = u.shape
    groups = arguments.B.shape[1]
    layout: Layout = "channel_last" if u.stride(1) == 1 and u.stride(2) != 1 else "time_last"
    along, length = (2, time) if layout == "time_last" else (1, channels // groups)
    named: dict[str, Any] = {**arguments._asdict(), **others}
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
        states=arguments.A.shape[1],
        groups=groups,
        strides=tuple(strides),
        softplus=options.softplus,
        parts=parts,
        sequences=0 if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        aligned=cu_seqlens is None
        and length % unit == 0
        and all(_on_16_bytes(tensor, along, addresses) for tensor in sequences),
        whole=(
            cu_seqlens is None and _on_16_bytes(arguments.B, 3, addresses),
            cu_seqlens is None and _on_16_bytes(arguments.C, 3, addresses),
        ),
    )


def describe(arguments: Arguments, options: Options, differentiated: bool) -> dict[str, KernelCall]:
    """The problems of a call by direction; those of derivatives only if it is ``differentiated``."""
    model = torch.empty_like(arguments.u, device="meta")
    addresses = addresses_of(arguments)
    if not has_kernels(arguments):
        problem_of = _without_kernels(arguments)
        directions: tuple[Direction, ...] = ("forward", "backward")
        return {name: KernelCall(problem_of(name)) for name in directions[: 1 + differentiated]}
    arguments = with_groups(arguments)
    forward = make_problem("forward", arguments, options, {"out": model}, addresses)
    calls = {"forward": KernelCall(forward)}
    if differentiated:
        others = {"grad": model, "u_grad": model}
        whole = make_problem("backward", arguments, options, others, addresses)
        parts = parts_of(whole, arguments.u.device)
        if parts > 1:
            grad = {"grad": model}
            problem = make_problem("adjoint", arguments, options, grad, addresses, parts)
            calls["adjoint"] = KernelCall(problem)
        calls["backward"] = KernelCall(replace(whole, parts=parts))
    return calls


def _without_kernels(arguments: Arguments) -> Callable[[Direction], SelectiveScanProblem]:
    """The problem of complex numbers, of float64, or of B or C that do not change with time: no kernel accepts it."""
    dtype = str(arguments.A.dtype if arguments.A.is_complex() else arguments.u.dtype)

    def problem_of(direction: Direction) -> SelectiveScanProblem:
        return SelectiveScanProblem(
            direction=direction,
            dtype=dtype.removeprefix("torch."),
            layout="time_last",
            batch=arguments.u.shape[0],
            channels=arguments.u.shape[1],
            time=arguments.u.shape[2],
            states=arguments.A.shape[1],
            groups=1,
            strides=(0,) * len(stride_names(direction)),
            constant=2 in (arguments.B.dim(), arguments.C.dim()),
        )

    return problem_of


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
