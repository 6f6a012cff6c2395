"""How a selective scan runs: by a kernel or in plain torch, forwards and backwards.

A call with shapes, strides and dtypes seen before finds its selection in a plan. Arguments are as ``normalised``
makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scan_registry.dispatch import policy
from scan_registry.dispatch.select import Decision
from scan_registry.kernels import family
from scan_registry.kernels.selective_scan import reference
from scan_registry.kernels.selective_scan.problem import (
    INTERVAL,
    STRIDED,
    Direction,
    Layout,
    SelectiveScanProblem,
)
from scan_registry.ops.launching import Run, plan_cache
from scan_registry.ops.selective_scan_arguments import COMPILED, Arguments, Options
from scan_registry.runtime.loader import prepare, run_reference

FAMILY_NAME = "selective_scan"
Gradients = tuple[Tensor | None, ...]

#: What a call does to its tensors.
Plan = Callable[..., Any]


class Outputs(NamedTuple):
    """What forward makes. ``checkpoints`` are what backward needs beside the inputs; empty where there are none."""

    out: Tensor
    last: Tensor
    checkpoints: Tensor


# --- Problems ---------------------------------------------------------------------------------


def has_kernels(given: Arguments) -> bool:
    """Whether the kernels compute it: of real numbers, with B and C that change with time."""
    return (
        given.u.dtype in COMPILED
        and not given.A.is_complex()
        and given.B.dim() == given.C.dim() == 4
    )


def _in_torch(given: Arguments, options: Options) -> bool:
    return not given.u.is_cuda or options.backend == "reference" or not has_kernels(given)


def with_groups(given: Arguments) -> Arguments:
    """B and C of as many groups, without a copy where one of them has one."""
    groups = max(given.B.shape[1], given.C.shape[1])

    def spread(x: Tensor) -> Tensor:
        if x.shape[1] == 1 and groups > 1:
            return x.expand(-1, groups, -1, -1)
        return x if x.shape[1] == groups else x.repeat_interleave(groups // x.shape[1], 1)

    return given._replace(B=spread(given.B), C=spread(given.C))


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


def _prepared(problem: SelectiveScanProblem, device: torch.device, backend: Any) -> Run | Decision:
    plan = prepare(device.index, family(FAMILY_NAME), problem, backend, policy.lowest())
    return plan.decision if plan.launch is None else plan.run


def _addresses(tensors: Sequence[Tensor | None]) -> int:
    """How far the addresses of all tensors are aligned, as the plans' cache tells calls apart."""
    found = 0
    for tensor in tensors:
        found |= 0 if tensor is None else tensor.data_ptr()
    return found & 15


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def composed(given: Arguments, options: Options) -> tuple[Tensor, Tensor]:
    """The output and the final state, in operators of torch."""
    return reference.forward(
        given.u, given.delta, given.A, given.B, given.C, given.D, given.z, given.delta_bias,
        options.softplus, given.initial_state, given.cu_seqlens,
    )  # fmt: skip


# --- Forward ----------------------------------------------------------------------------------


def checkpoint_shape(given: Arguments) -> tuple[Any, ...]:
    """Of the states that forward leaves for backward."""
    batch, channels, time = given.u.shape
    sequences = 1 if given.cu_seqlens is None else given.cu_seqlens.shape[0] - 1
    return batch, time // INTERVAL + sequences, channels, given.A.shape[1]


def empty_outputs(given: Arguments, options: Options, training: bool) -> Outputs:
    """Room for ``Outputs``."""
    u, A = given.u, given.A
    between = () if given.cu_seqlens is None else (given.cu_seqlens.shape[0] - 1,)
    state = reference.state_dtype(u.dtype, A.dtype)
    kept: tuple[Any, ...] = (0,)
    if (
        training
        and u.device.type == "cuda"
        and options.backend != "reference"
        and has_kernels(given)
    ):
        kept = checkpoint_shape(given)
    return Outputs(
        torch.empty_like(u),
        u.new_empty((u.shape[0], *between, *A.shape), dtype=state),
        u.new_empty(kept, dtype=torch.float32),
    )


def forward(given: Arguments, options: Options, training: bool) -> Outputs:
    """``Outputs``; with ``training`` what backward needs, too."""
    outputs: Outputs = plan_cache.run(_make_forward, tuple(given), options, training)
    return outputs


def _make_forward(*args: Any) -> Plan:
    *tensors, options, training = args
    plan = _plan_forward(Arguments(*tensors), options, training, _addresses(tensors))
    return lambda *tensors: plan(Arguments(*tensors))


def _plan_forward(given: Arguments, options: Options, training: bool, addresses: int) -> Plan:
    def by_reference(given: Arguments) -> Outputs:
        made = empty_outputs(given, options, training)
        out, last = composed(given, options)
        made.out.copy_(out)
        made.last.copy_(last)
        if made.checkpoints.numel():
            made.checkpoints.copy_(_kept_by_reference(given, options))
        return made

    if given.u.numel() == 0 or _in_torch(given, options):
        return by_reference
    grouped = with_groups(given)
    out = torch.empty_like(given.u)
    problem = make_problem("forward", grouped, options, {"out": out}, addresses)
    found = _prepared(problem, given.u.device, options.backend)
    if isinstance(found, Decision):
        decision = found
        return lambda given: run_reference(decision, lambda: by_reference(given))
    run = found

    def plan(given: Arguments) -> Outputs:
        made = empty_outputs(given, options, training)
        run(
            {
                **_tensors(with_groups(given)),
                "out": made.out,
                "final_state": made.last,
                "checkpoints": made.checkpoints if training else None,
            }
        )
        return made

    return plan


def _tensors(given: Arguments) -> dict[str, Tensor | None]:
    """The kernels' pointers that are arguments."""
    names = ("u", "delta", "B", "C", "z")
    dense = ("A", "D", "delta_bias", "initial_state")
    every = given._asdict()
    return {
        **{name: every[name] for name in names},
        **{name: _dense(every[name]) for name in dense},
        "offsets": given.cu_seqlens,
    }


def _kept_by_reference(given: Arguments, options: Options) -> Tensor:
    return reference.checkpoints(
        given.u, given.delta, given.A, given.B, given.C, given.delta_bias, options.softplus,
        given.initial_state, given.cu_seqlens, INTERVAL,
    )  # fmt: skip


def _parts(problem: SelectiveScanProblem, device: torch.device) -> int:
    """Parts to cut sequences into for the backward pass: so many that its CTAs fill the GPU evenly, though to cut costs
    a fifth more."""
    ctas = problem.ctas_of_group * problem.groups * problem.batch * max(1, problem.sequences)
    resident = problem.ctas_of_sm * torch.cuda.get_device_properties(device).multi_processor_count
    most = max(1, min(8, problem.time // (4 * INTERVAL)))

    def duration(parts: int) -> float:
        waves = -(-ctas * parts // resident)
        return waves / parts * (1.2 if parts > 1 else 1.0)

    return min(range(1, most + 1), key=duration)


# --- Backward ---------------------------------------------------------------------------------


def backward(
    given: Arguments,
    checkpoints: Tensor,
    out_grad: Tensor,
    final_grad: Tensor | None,
    options: Options,
    wanted: tuple[bool, ...],
) -> Gradients:
    """The gradients that are wanted, of all arguments but the bounds, each in its own dtype."""
    tensors = *given, checkpoints, out_grad, final_grad
    gradients: Gradients = plan_cache.run(_make_backward, tensors, options, wanted)
    return gradients


def _make_backward(*args: Any) -> Plan:
    *tensors, options, wanted = args
    *every, checkpoints, out_grad, _ = tensors
    given, addresses = Arguments(*every), _addresses(tensors)
    plan = _plan_backward(given, checkpoints, out_grad, options, wanted, addresses)
    return lambda *tensors: plan(Arguments(*tensors[:-3]), *tensors[-3:])


def _plan_backward(
    given: Arguments,
    checkpoints: Tensor,
    out_grad: Tensor,
    options: Options,
    wanted: tuple[bool, ...],
    addresses: int,
) -> Plan:
    def by_reference(
        given: Arguments, checkpoints: Any, out_grad: Tensor, final_grad: Any
    ) -> Gradients:
        with torch.no_grad():
            return reference.backward(
                given.differentiable,
                options.softplus,
                given.cu_seqlens,
                out_grad,
                final_grad,
                wanted,
            )

    if given.u.numel() == 0 or checkpoints.numel() == 0 or _in_torch(given, options):
        return by_reference
    grouped = with_groups(given)
    others = {"grad": out_grad, "u_grad": torch.empty_like(given.u)}
    parts = _parts(make_problem("backward", grouped, options, others, addresses), given.u.device)
    problem = make_problem("backward", grouped, options, others, addresses, parts)
    found = _prepared(problem, given.u.device, options.backend)
    if isinstance(found, Decision):
        decision = found
        return lambda *inputs: run_reference(decision, lambda: by_reference(*inputs))
    run = found
    hand_on: Run | None = None
    if parts > 1:
        before = make_problem("adjoint", grouped, options, {"grad": out_grad}, addresses, parts)
        prepared = _prepared(before, given.u.device, options.backend)
        if isinstance(prepared, Decision):
            of_part = prepared
            return lambda *inputs: run_reference(of_part, lambda: by_reference(*inputs))
        hand_on = prepared
    of_state = problem.batch, max(1, problem.sequences), problem.parts, problem.channels
    of_projection = problem.ctas_of_group, *grouped.B.shape

    def plan(given: Arguments, checkpoints: Tensor, out_grad: Tensor, final_grad: Any) -> Gradients:
        def new(*shape: int) -> Tensor:
            return out_grad.new_empty(shape, dtype=torch.float32)

        u_grad, delta_grad = torch.empty_like(given.u), torch.empty_like(given.u)
        z_grad = None if given.z is None else torch.empty_like(given.u)
        A_grad, B_grad, C_grad = (
            new(*of_state, problem.states),
            new(*of_projection),
            new(*of_projection),
        )
        D_grad, bias_grad = new(*of_state), new(*of_state)
        initial = given.initial_state
        initial_grad = None if initial is None else new(*initial.shape)
        tensors = {**_tensors(with_groups(given)), "out_grad": out_grad}
        if hand_on is not None:
            tensors |= {"adjoints": new(*of_state, problem.states), "sizes": new(*of_state)}
            hand_on(tensors)
        run(
            {
                **tensors,
                "final_grad": _dense(final_grad),
                "checkpoints": checkpoints,
                "u_grad": u_grad,
                "delta_grad": delta_grad,
                "z_grad": z_grad,
                "A_grad": A_grad,
                "B_grad": B_grad,
                "C_grad": C_grad,
                "D_grad": D_grad,
                "bias_grad": bias_grad,
                "initial_grad": initial_grad,
                "carries": new(problem.carried) if problem.carried else None,
            }
        )
        of_parts = (0, 1, 2)
        makers: tuple[Callable[[], Tensor | None], ...] = (
            lambda: u_grad,
            lambda: delta_grad,
            lambda: A_grad.sum(of_parts),
            lambda: _of_groups(B_grad.sum(0), given.B),
            lambda: _of_groups(C_grad.sum(0), given.C),
            lambda: D_grad.sum(of_parts),
            lambda: z_grad,
            lambda: bias_grad.sum(of_parts),
            lambda: initial_grad,
        )
        return tuple(
            make() if want and t is not None else None
            for make, want, t in zip(makers, wanted, given.differentiable, strict=True)
        )

    return plan


def _of_groups(gradient: Tensor, of: Tensor) -> Tensor:
    """Summed over the groups that share what it is the gradient of."""
    if gradient.shape[1] != of.shape[1]:
        gradient = gradient.unflatten(1, (of.shape[1], -1)).sum(2)
    return gradient.to(of.dtype)
