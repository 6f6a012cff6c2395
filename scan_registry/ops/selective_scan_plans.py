"""How a selective scan runs: by a kernel or in plain torch, forwards and backwards.

A call with shapes, strides and dtypes seen before finds its selection in a plan. Arguments are as ``normalised``
makes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scan_registry.dispatch import policy
from scan_registry.dispatch.select import Decision
from scan_registry.kernels import family
from scan_registry.kernels.selective_scan import reference
from scan_registry.kernels.selective_scan.problem import INTERVAL, SelectiveScanProblem
from scan_registry.ops import selective_scan_composed as composed
from scan_registry.ops.launching import Run, plan_cache
from scan_registry.ops.selective_scan_arguments import Arguments, Options
from scan_registry.ops.selective_scan_problems import (
    addresses_of,
    has_kernels,
    make_problem,
    parts_of,
    with_groups,
)
from scan_registry.runtime.loader import prepare, run_reference

FAMILY_NAME = "selective_scan"
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
Gradients = tuple[Tensor | None, ...]

#: What a call does to its tensors.
Plan = Callable[..., Any]


class Outputs(NamedTuple):
    """What forward makes. ``checkpoints`` are what backward needs beside the inputs; empty where there are none."""

    out: Tensor
    last: Tensor
    checkpoints: Tensor


def _in_torch(given: Arguments, options: Options) -> bool:
    return not given.u.is_cuda or options.backend == "reference" or not has_kernels(given)


def _prepared(problem: SelectiveScanProblem, device: torch.device, backend: Any) -> Run | Decision:
    plan = prepare(device.index, family(FAMILY_NAME), problem, backend, policy.lowest())
    return plan.decision if plan.launch is None else plan.run


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


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
    plan = _plan_forward(Arguments(*tensors), options, training, addresses_of(tensors))
    return lambda *tensors: plan(Arguments(*tensors))


def _plan_forward(given: Arguments, options: Options, training: bool, addresses: int) -> Plan:
    def by_reference(given: Arguments) -> Outputs:
        made = empty_outputs(given, options, training)
        out, last = composed.forward(given, options)
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
    given, addresses = Arguments(*every), addresses_of(tensors)
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
        # Below autograd, where the dispatcher may have come to by now, no derivatives are recorded.
        recorded = torch._C._SetExcludeDispatchKeyGuard(_AUTOGRAD, False)
        with recorded, torch.no_grad():
            return composed.backward(given, options, out_grad, final_grad, wanted)

    if given.u.numel() == 0 or checkpoints.numel() == 0 or _in_torch(given, options):
        return by_reference
    grouped = with_groups(given)
    others = {"grad": out_grad, "u_grad": torch.empty_like(given.u)}
    whole = make_problem("backward", grouped, options, others, addresses)
    problem = replace(whole, parts=parts_of(whole, given.u.device))
    found = _prepared(problem, given.u.device, options.backend)
    if isinstance(found, Decision):
        decision = found
        return lambda *inputs: run_reference(decision, lambda: by_reference(*inputs))
    run = found
    hand_on: Run | None = None
    if problem.parts > 1:
        others = {"grad": out_grad}
        before = make_problem("adjoint", grouped, options, others, addresses, problem.parts)
        prepared = _prepared(before, given.u.device, options.backend)
        if isinstance(prepared, Decision):
            of_part = prepared
            return lambda *inputs: run_reference(of_part, lambda: by_reference(*inputs))
        hand_on = prepared

    def plan(given: Arguments, checkpoints: Tensor, out_grad: Tensor, final_grad: Any) -> Gradients:
        grouped = with_groups(given)
        tensors = {
            **_tensors(grouped),
            "out_grad": out_grad,
            "final_grad": _dense(final_grad),
            "checkpoints": checkpoints,
            **_results(grouped, problem),
        }
        if hand_on is not None:
            hand_on(tensors)
        run(tensors)
        of_parts = (0, 1, 2)
        made: Any = tensors
        makers: tuple[Callable[[], Tensor | None], ...] = (
            lambda: made["u_grad"],
            lambda: made["delta_grad"],
            lambda: made["A_grad"].sum(of_parts),
            lambda: _of_groups(made["B_grad"].sum(0), given.B),
            lambda: _of_groups(made["C_grad"].sum(0), given.C),
            lambda: made["D_grad"].sum(of_parts),
            lambda: made["z_grad"],
            lambda: made["bias_grad"].sum(of_parts),
            lambda: made["initial_grad"],
        )
        return tuple(
            make() if want and t is not None else None
            for make, want, t in zip(makers, wanted, given.differentiable, strict=True)
        )

    return plan


def _results(given: Arguments, problem: SelectiveScanProblem) -> dict[str, Tensor | None]:
    """Room for all that a backward pass writes, partial sums among it."""

    def new(*shape: int) -> Tensor:
        return given.u.new_empty(shape, dtype=torch.float32)

    of_part = problem.batch, max(1, problem.sequences), problem.parts, problem.channels
    of_projection = problem.ctas_of_group, *given.B.shape
    initial, cut = given.initial_state, problem.parts > 1
    return {
        "u_grad": torch.empty_like(given.u),
        "delta_grad": torch.empty_like(given.u),
        "z_grad": None if given.z is None else torch.empty_like(given.u),
        "A_grad": new(*of_part, problem.states),
        "B_grad": new(*of_projection),
        "C_grad": new(*of_projection),
        "D_grad": None if given.D is None else new(*of_part),
        "bias_grad": None if given.delta_bias is None else new(*of_part),
        "initial_grad": None if initial is None else new(*initial.shape),
        "carries": new(problem.carried) if problem.carried else None,
        "adjoints": new(*of_part, problem.states) if cut else None,
        "sizes": new(*of_part) if cut else None,
    }


def new_tensors(
    given: Arguments, problem: SelectiveScanProblem, out_grad: Tensor
) -> dict[str, Tensor | None]:
    """What the kernel for a problem gets in a call that trains, by the names of its pointers."""
    grouped = with_groups(given)
    kept = given.u.new_zeros(checkpoint_shape(given), dtype=torch.float32)
    tensors = {**_tensors(grouped), "checkpoints": kept}
    if problem.direction == "forward":
        return {**tensors, "out": torch.empty_like(given.u)}
    results = _results(grouped, problem)
    for name in ("adjoints", "sizes"):
        if problem.direction == "backward" and (handed_on := results[name]) is not None:
            handed_on.zero_()
    return {**tensors, "out_grad": out_grad, **results}


def _of_groups(gradient: Tensor, of: Tensor) -> Tensor:
    """Summed over the groups that share what it is the gradient of."""
    if gradient.shape[1] != of.shape[1]:
        gradient = gradient.unflatten(1, (of.shape[1], -1)).sum(2)
    return gradient.to(of.dtype)
