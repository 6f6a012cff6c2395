"""How a selective scan runs: by a kernel or in plain torch, forwards and backwards.

A call with shapes, strides and dtypes seen before finds its selection in a plan. Arguments are as ``normalised``
makes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
    copies_groups,
    has_kernels,
    make_problem,
    parts_of,
    with_groups,
)
from scan_registry.runtime.loader import prepare, run_reference

FAMILY_NAME = "selective_scan"
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
Gradients = tuple[Tensor | None, ...]

#: What torch's own compiler allocates with, past the dispatcher, on the current device; where this torch has it.
_EMPTY: dict[str, Any] = {
    kind: found
    for kind in ("cpu", "cuda")
    if (found := getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}", None)) is not None
}

#: What a call does to its tensors.
Plan = Callable[..., Any]


class Outputs(NamedTuple):
    """What forward makes. ``checkpoints`` are what backward needs beside the inputs; empty where there are none."""

    out: Tensor
    last: Tensor
    checkpoints: Tensor


def on_gpu(tensor: Tensor) -> bool:
    """Where kernels run."""
    return bool(tensor.is_cuda)


def _in_torch(given: Arguments, options: Options) -> bool:
    return not on_gpu(given.u) or options.backend == "reference" or not has_kernels(given)


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


def state_shape(given: Arguments) -> tuple[Any, ...]:
    """Of the states before and after."""
    between = () if given.cu_seqlens is None else (given.cu_seqlens.shape[0] - 1,)
    return (given.u.shape[0], *between, *given.A.shape)


def empty_outputs(given: Arguments, options: Options, training: bool) -> Outputs:
    """New ``Outputs``, not yet computed. A tensor that stands for one on a GPU, when operators are traced, is on meta here."""
    u, A = given.u, given.A
    stood_for = getattr(u, "fake_device", None)
    state = reference.state_dtype(u.dtype, A.dtype)
    there = on_gpu(u) if stood_for is None else stood_for.type == "cuda"
    kernels = there and options.backend != "reference" and has_kernels(given)
    kept = checkpoint_shape(given) if training and kernels else (0,)
    return Outputs(
        torch.empty_like(u),
        u.new_empty(state_shape(given), dtype=state),
        u.new_empty(kept, dtype=torch.float32),
    )


def forward(given: Arguments, options: Options, training: bool) -> Outputs:
    """``Outputs``; with ``training`` what backward needs, too."""
    outputs: Outputs = plan_cache.run(_make_forward, tuple(given), options, training)
    return outputs


def _make_forward(*args: Any) -> Plan:
    *tensors, options, training = args
    given = Arguments(*tensors)

    def by_reference(given: Arguments) -> Outputs:
        made = empty_outputs(given, options, training)
        out, last = composed.forward(given, options)
        made.out.copy_(out)
        made.last.copy_(last)
        if made.checkpoints.numel():
            made.checkpoints.copy_(_kept_by_reference(given, options))
        return made

    if given.u.numel() == 0 or _in_torch(given, options):
        return lambda *tensors: by_reference(Arguments(*tensors))
    launch = plan_forward(given, options, training, True, addresses_of(tensors))
    if isinstance(launch, Decision):
        decision = launch
        return lambda *tensors: run_reference(decision, lambda: by_reference(Arguments(*tensors)))
    run = launch

    def plan(*tensors: Any) -> Outputs:
        out, last, kept = run(Arguments(*tensors))
        return Outputs(out, last, out.new_empty(0, dtype=torch.float32) if kept is None else kept)

    return plan


def plan_forward(
    given: Arguments, options: Options, training: bool, final: bool, addresses: int
) -> Callable[[Arguments], tuple[Tensor, Any, Any]] | Decision:
    """How a kernel makes the output, the final state if it is ``final`` that is asked for, and in ``training`` the
    checkpoints; or the decision that none does."""
    u = given.u
    model = torch.empty_like(u)
    problem = make_problem("forward", with_groups(given), options, {"out": model}, addresses)
    run = _prepared(problem, u.device, options.backend)
    if isinstance(run, Decision):
        return run
    launch, inputs = run, inputs_of(given)
    new_out = maker(u.device, model.shape, u.dtype, model.stride())
    new_state = maker(u.device, state_shape(given)) if final else _nothing
    new_checkpoints = maker(u.device, checkpoint_shape(given)) if training else _nothing

    def plan(given: Arguments) -> tuple[Tensor, Any, Any]:
        out, last, kept = new_out(), new_state(), new_checkpoints()
        launch({**inputs(given), "out": out, "final_state": last, "checkpoints": kept})
        return out, last, kept

    return plan


def _nothing() -> None:
    """What is not there."""


def maker(
    device: torch.device,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    strides: Any = None,
) -> Callable[[], Any]:
    """Makes new tensors of one kind, without gaps unless strides are given, at the least cost."""
    sizes = tuple(shape)
    steps = torch.empty(sizes, device="meta").stride() if strides is None else tuple(strides)
    quickly = _EMPTY.get(device.type)

    def carefully() -> Tensor:
        return torch.empty_strided(sizes, steps, dtype=dtype, device=device)

    if quickly is None:
        return carefully
    if device.type != "cuda":
        return lambda: quickly(sizes, steps, dtype)
    current, here = torch._C._cuda_getDevice, device.index
    return lambda: quickly(sizes, steps, dtype) if current() == here else carefully()


def inputs_of(model: Arguments) -> Callable[[Arguments], dict[str, Tensor | None]]:
    """The kernels' pointers that are arguments, of all arguments like ``model``."""
    spread = copies_groups(model)
    gaps = [
        name
        for name in ("A", "D", "delta_bias", "initial_state")
        if (t := getattr(model, name)) is not None and not t.is_contiguous()
    ]

    def found(given: Arguments) -> dict[str, Tensor | None]:
        if spread:
            given = with_groups(given)
        u, delta, A, B, C, D, z, bias, initial, bounds = given
        tensors = {
            "u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "z": z, "delta_bias": bias,
            "initial_state": initial, "offsets": bounds,
        }  # fmt: skip
        for name in gaps:
            tensors[name] = _dense(tensors[name])
        return tensors

    return found


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
    *every, checkpoints, out_grad, final_grad = tensors
    given, addresses = Arguments(*every), addresses_of(tensors)

    def by_reference(*tensors: Any) -> Gradients:
        given, (_, out_grad, final_grad) = Arguments(*tensors[:-3]), tensors[-3:]
        # Below autograd, where the dispatcher may have come to by now, no derivatives are recorded.
        recorded = torch._C._SetExcludeDispatchKeyGuard(_AUTOGRAD, False)
        with recorded, torch.no_grad():
            return composed.backward(given, options, out_grad, final_grad, wanted)

    if given.u.numel() == 0 or checkpoints.numel() == 0 or _in_torch(given, options):
        return by_reference
    launch = plan_backward(given, out_grad, final_grad, options, wanted, addresses, given)
    if isinstance(launch, Decision):
        decision = launch
        return lambda *tensors: run_reference(decision, lambda: by_reference(*tensors))
    run = launch
    return lambda *tensors: run(Arguments(*tensors[:-3]), *tensors[-3:])


def plan_backward(
    given: Arguments,
    out_grad: Tensor,
    final_grad: Tensor | None,
    options: Options,
    wanted: tuple[bool, ...],
    addresses: int,
    shapes: Arguments,
) -> Callable[..., Gradients] | Decision:
    """How kernels make the gradients that are wanted, of arguments, checkpoints, the output's gradient and the final
    state's; or the decision that none does. Those of B and C are to be of the shape that they have in ``shapes``."""
    device, grouped, backend = given.u.device, with_groups(given), options.backend
    others = {"grad": out_grad, "u_grad": torch.empty_like(given.u)}
    whole = make_problem("backward", grouped, options, others, addresses)
    problem = replace(whole, parts=parts_of(whole, device))
    run = _prepared(problem, device, backend)
    first: Run | None = None
    if isinstance(run, Decision):
        return run
    if problem.parts > 1:
        grad = {"grad": out_grad}
        before = make_problem("adjoint", grouped, options, grad, addresses, problem.parts)
        prepared = _prepared(before, device, backend)
        if isinstance(prepared, Decision):
            return prepared
        first = prepared
    launch, inputs = run, inputs_of(given)
    buffers = GradientBuffers(grouped, problem)
    finish = _finisher(given, problem, wanted, shapes, buffers)
    gaps = final_grad is not None and not final_grad.is_contiguous()

    def plan(given: Arguments, checkpoints: Tensor, out_grad: Tensor, final_grad: Any) -> Gradients:
        tensors = inputs(given)
        tensors["out_grad"] = out_grad
        tensors["final_grad"] = final_grad.contiguous() if gaps else final_grad
        tensors["checkpoints"] = checkpoints
        sums = buffers.put(tensors)
        if first is not None:
            first(tensors)
        launch(tensors)
        return finish(tensors, sums)

    return plan


class Address(int):
    """Where something is within a tensor, for those who ask for no more."""

    def data_ptr(self) -> int:
        return self


class GradientBuffers:
    """What a backward pass writes: gradients, and in one tensor all partial sums, those of B beside those of C, and those
    of D beside the bias', so that each pair is summed up at once."""

    def __init__(self, given: Arguments, problem: SelectiveScanProblem) -> None:
        u, device = given.u, given.u.device
        model = torch.empty_like(u, device="meta")
        sequence, initial = maker(device, u.shape, u.dtype, model.stride()), given.initial_state
        self._new = {
            "u_grad": sequence,
            "delta_grad": sequence,
            **({} if given.z is None else {"z_grad": sequence}),
            **({} if initial is None else {"initial_grad": maker(device, initial.shape)}),
        }
        of_part = problem.batch, max(1, problem.sequences), problem.parts, problem.channels
        of_projection = problem.ctas_of_group, *given.B.shape
        groups: list[dict[str, tuple[int, ...]]] = [
            {"A_grad": (*of_part, problem.states)},
            {"B_grad": of_projection, "C_grad": of_projection},
            {"D_grad": of_part} if given.D is not None else {},
            {"carries": (problem.carried,)} if problem.carried else {},
        ]
        if given.delta_bias is not None:
            groups[2]["bias_grad"] = of_part
        if problem.parts > 1:
            groups += [{"adjoints": (*of_part, problem.states)}, {"sizes": of_part}]
        #: Of each part of the tensor of partial sums, the first number and the shape.
        self.places: dict[str, tuple[int, tuple[int, ...]]] = {}
        end = 0
        for group in groups:
            end = -(-end // 64) * 64  # a kernel stores several numbers at once
            for name, shape in group.items():
                self.places[name] = end, shape
                end += math.prod(shape)
        self._sums = maker(device, (end,))
        self._starts = [(name, 4 * start) for name, (start, _) in self.places.items()]

    def put(self, tensors: dict[str, Any]) -> Tensor:
        """Add new tensors by the names of the kernels' pointers. Returns the one of partial sums."""
        for name, new in self._new.items():
            tensors[name] = new()
        sums: Tensor = self._sums()
        first = sums.data_ptr()
        for name, start in self._starts:
            tensors[name] = Address(first + start)
        return sums

    def views(self, sums: Tensor) -> dict[str, Tensor]:
        """Its parts, as tensors."""
        return {
            name: sums[start : start + math.prod(shape)].view(shape)
            for name, (start, shape) in self.places.items()
        }


def _finisher(
    given: Arguments,
    problem: SelectiveScanProblem,
    wanted: tuple[bool, ...],
    shapes: Arguments,
    buffers: GradientBuffers,
) -> Callable[[dict[str, Any], Tensor], Gradients]:
    """Makes the gradients that are wanted of what the kernels wrote. Those that are sums get memory of their own, even of
    one term, as what they are summed up of is much larger together."""
    needed = tuple(w and t is not None for w, t in zip(wanted, given.differentiable, strict=True))
    for_A, for_B, for_C, for_D, for_bias = (needed[i] for i in (2, 3, 4, 5, 7))
    channels, states = given.A.shape
    rows = problem.batch * max(1, problem.sequences) * problem.parts
    vectors = (given.D is not None) + (given.delta_bias is not None)
    groups = given.B.shape[1], given.C.shape[1]
    of_B, of_C = shapes.B.shape, shapes.C.shape
    alike = of_B == of_C and groups == (problem.groups, problem.groups)
    dtype, narrow = given.u.dtype, given.u.dtype != torch.float32
    # The shape, strides and beginning of each sum's terms.
    ctas, size = problem.ctas_of_group, rows * channels
    whole = of_B if alike else (problem.batch, problem.groups, states, problem.time)
    each = math.prod(whole)
    inner = torch.empty(whole, device="meta").stride()
    of_A = (rows, channels, states), (channels * states, states, 1), buffers.places["A_grad"][0]
    of_both = (2, ctas, *whole), (ctas * each, each, *inner), buffers.places["B_grad"][0]
    new_both = maker(given.u.device, (2, *whole), dtype)
    first = "D_grad" if given.D is not None else "bias_grad"
    of_vectors = (vectors, rows, channels), (size, channels, 1), buffers.places.get(first, (0,))[0]

    def finish(tensors: dict[str, Any], sums: Tensor) -> Gradients:
        A_grad = B_grad = C_grad = D_grad = bias_grad = None
        if for_A:
            A_grad = sums.as_strided(*of_A).sum(0)
        if for_B or for_C:
            both = sums.as_strided(*of_both)
            both = both[:, 0] if ctas == 1 and narrow else both.sum(1)
            if alike:
                B_grad, C_grad = (new_both().copy_(both) if narrow else both).unbind()
            else:
                B_grad = _of_groups(both[0], groups[0]).to(dtype).view(of_B)
                C_grad = _of_groups(both[1], groups[1]).to(dtype).view(of_C)
        if for_D or for_bias:
            found = sums.as_strided(*of_vectors).sum(1).unbind()
            D_grad, bias_grad = found[0] if for_D else None, found[-1]
        return (
            tensors["u_grad"] if needed[0] else None,
            tensors["delta_grad"] if needed[1] else None,
            A_grad,
            B_grad if for_B else None,
            C_grad if for_C else None,
            D_grad,
            tensors["z_grad"] if needed[6] else None,
            bias_grad if for_bias else None,
            tensors["initial_grad"] if needed[8] else None,
        )

    return finish


def new_tensors(
    given: Arguments, problem: SelectiveScanProblem, out_grad: Tensor
) -> dict[str, Tensor | None]:
    """What the kernel for a problem gets in a call that trains, by the names of its pointers."""
    grouped = with_groups(given)
    tensors = inputs_of(grouped)(grouped)
    tensors["checkpoints"] = given.u.new_zeros(checkpoint_shape(given), dtype=torch.float32)
    if problem.direction == "forward":
        return {**tensors, "out": torch.empty_like(given.u)}
    buffers = GradientBuffers(grouped, problem)
    parts = buffers.views(buffers.put(tensors).zero_())
    return {**tensors, **parts, "out_grad": out_grad}


def _of_groups(gradient: Tensor, groups: int) -> Tensor:
    """Summed over those that share one of fewer groups."""
    if gradient.shape[1] == groups:
        return gradient
    total: Tensor = gradient.unflatten(1, (groups, -1)).sum(2)
    return total
