"""What a selective scan poses to the kernels: problems, made of tensors.

Arguments are as ``normalised`` makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from scan_registry.base.strides import stride_names
from scan_registry.kernels.selective_scan.op import calls
from scan_registry.kernels.selective_scan.op.arguments import COMPILED, Arguments, Options
from scan_registry.kernels.selective_scan.problem import (
    STRIDED,
    Direction,
    SelectiveScanProblem,
)
from scan_registry.ops.facts import facts_of
from scan_registry.ops.launching import addresses_of
from scan_registry.ops.operator import SingleCall

#: Of a GPU that is not there: as many as an H100 has.
_USUAL_SMS = 132


class KernelCall(SingleCall[SelectiveScanProblem]):
    """One kernel's part in an operator's call: its problem. Nothing is copied first."""


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
    named: dict[str, Any] = {**arguments._asdict(), **others}
    strided = ("u", "delta", "z", *others, "B", "C")
    return calls.make_problem(
        direction,
        {name: facts_of(named[name]) for name in strided if named[name] is not None},
        states=arguments.A.shape[1],
        layout="channel_last" if u.stride(1) == 1 and u.stride(2) != 1 else "time_last",
        softplus=options.softplus,
        sequences=None if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        addresses=addresses,
        parts=parts,
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
    forward = replace(forward, parts=parts_of(forward, arguments.u.device))
    described = {"forward": KernelCall(forward)}
    if forward.parts > 1:
        states = make_states_problem(arguments, options, addresses, forward.parts)
        described["states"] = KernelCall(states)
    if differentiated:
        others = {"grad": model, "u_grad": model}
        whole = make_problem("backward", arguments, options, others, addresses)
        parts = parts_of(whole, arguments.u.device)
        if parts > 1:
            grad = {"grad": model}
            problem = make_problem("adjoint", arguments, options, grad, addresses, parts)
            described["adjoint"] = KernelCall(problem)
        described["backward"] = KernelCall(replace(whole, parts=parts))
    return described


def _without_kernels(arguments: Arguments) -> Callable[[Direction], SelectiveScanProblem]:
    """The problem of complex numbers, of float64, or of B or C that do not change with time: no kernel accepts it."""
    dtype = str(arguments.A.dtype if arguments.A.is_complex() else arguments.u.dtype)
    batch, channels, time = arguments.u.shape

    def problem_of(direction: Direction) -> SelectiveScanProblem:
        return SelectiveScanProblem(
            *(direction, dtype.removeprefix("torch."), "time_last"),
            *(batch, channels, time, arguments.A.shape[1], 1),
            strides=(0,) * len(stride_names(STRIDED[direction])),
            constant=2 in (arguments.B.dim(), arguments.C.dim()),
        )

    return problem_of


def parts_of(problem: SelectiveScanProblem, device: torch.device) -> int:
    """Parts to cut sequences into, forwards or backwards."""
    sms, of_sm90 = _USUAL_SMS, False
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        sms = properties.multi_processor_count
        of_sm90 = (properties.major, properties.minor) == (9, 0)
    if problem.direction == "forward":
        return 1 if of_sm90 and problem.takes_turns else problem.forward_parts_for(sms)
    return problem.parts_for(sms)


def make_states_problem(
    arguments: Arguments, options: Options, addresses: int, parts: int
) -> SelectiveScanProblem:
    """What parts of a sequence hand to later parts, in the forward pass: ``states_inputs`` of the kernel ``adjoint``."""
    inputs = arguments._replace(C=arguments.B, z=None)
    problem = make_problem("adjoint", inputs, options, {"grad": arguments.u}, addresses, parts)
    return replace(problem, forwards=True)


def states_inputs(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The pointers of ``make_states_problem``, from those of the forward pass."""
    return {**tensors, "out_grad": tensors["u"], "C": tensors["B"], "z": None}
