"""How a selective scan runs: by a kernel or in plain torch, forwards and backwards.

A call with shapes, strides and dtypes seen before finds its selection in a plan. Arguments are as ``normalised``
makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scan_registry.dispatch import policy
from scan_registry.dispatch.select import Decision
from scan_registry.kernels import family
from scan_registry.kernels.selective_scan import reference
from scan_registry.kernels.selective_scan.op import composed
from scan_registry.kernels.selective_scan.op import cpu as selective_scan_cpu
from scan_registry.kernels.selective_scan.op.arguments import Arguments, Options, grouped
from scan_registry.kernels.selective_scan.op.gradients import (
    Address,
    GradientBuffers,
    Gradients,
    finisher,
    shared_shape,
)
from scan_registry.kernels.selective_scan.op.problems import (
    copies_groups,
    has_kernels,
    make_problem,
    parts_of,
    with_groups,
)
from scan_registry.kernels.selective_scan.problem import INTERVAL, SelectiveScanProblem
from scan_registry.ops.launching import Run, addresses_of, allocator, plan_cache
from scan_registry.runtime.loader import prepare, run_reference

FAMILY_NAME = "selective_scan"
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality

#: What a call does to its tensors.
Plan = Callable[..., Any]


class Outputs(NamedTuple):
    """What forward makes. ``checkpoints`` are what backward needs beside the inputs; empty where there are none."""

    out: Tensor
    last: Tensor
    checkpoints: Tensor


class Adjoints(NamedTuple):
    """Of each part of a sequence: ``gradients`` of the state before its first step, if the gradient of the state after its last
    one is zero, (B, parts, D, N); and ``sizes``, the sums of its step sizes, (B, parts, D)."""

    gradients: Tensor
    sizes: Tensor


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
    return Outputs(*plan_cache.run(make_forward, tuple(given), options, training, True))


def make_forward(*args: Any) -> Plan:
    """The plan of ``forward``, from its arguments and whether the final state is asked for. B and C may lack the dimension of
    groups, in shapes and in calls."""
    *tensors, options, training, final = args
    given = grouped(Arguments(*tensors))

    def by_reference(given: Arguments) -> Outputs:
        made = empty_outputs(given, options, training)
        out, last = composed.forward(given, options)
        made.out.copy_(out)
        made.last.copy_(last)
        if made.checkpoints.numel():
            made.checkpoints.copy_(_kept_by_reference(given, options))
        return made

    def on_cpu(given: Arguments) -> Outputs:
        made = selective_scan_cpu.forward(given, options)
        return Outputs(*made, given.u.new_empty((0,), dtype=torch.float32))

    if given.u.numel() == 0 or _in_torch(given, options):
        plain = on_cpu if selective_scan_cpu.takes(given, options) else by_reference
        return lambda *tensors: plain(grouped(Arguments(*tensors)))
    launch = plan_forward(given, options, training, final, addresses_of(tensors))
    if isinstance(launch, Decision):
        decision = launch
        return lambda *tensors: run_reference(
            decision, lambda: by_reference(grouped(Arguments(*tensors)))
        )
    run = launch
    if training or not final:
        return lambda *tensors: run(Arguments(*tensors))

    def plan(*tensors: Any) -> Outputs:
        out, last, _ = run(Arguments(*tensors))
        return Outputs(out, last, out.new_empty(0, dtype=torch.float32))

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
    new_out = allocator(u.device, model.shape, u.dtype, model.stride())
    new_state = allocator(u.device, state_shape(given)) if final else _nothing
    new_checkpoints = allocator(u.device, checkpoint_shape(given)) if training else _nothing

    def plan(given: Arguments) -> tuple[Tensor, Any, Any]:
        out, last, kept = new_out(), new_state(), new_checkpoints()
        launch({**inputs(given), "out": out, "final_state": last, "checkpoints": kept})
        return out, last, kept

    return plan


def _nothing() -> None:
    """What is not there."""


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
            "initial_state": initial, "cu_seqlens": bounds,
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
    adjoints: Adjoints | None = None,
) -> Gradients:
    """The gradients that are wanted, of all arguments but the bounds, each in its own dtype. ``adjoints`` are what
    ``adjoint`` has found for the same arguments, if it was called before."""
    tensors = *given, checkpoints, out_grad, final_grad
    plan = plan_cache.plan(make_backward, tensors, options, wanted)
    gradients: Gradients = plan(*tensors, adjoints=adjoints)
    return gradients


def make_backward(*args: Any) -> Plan:
    """The plan of ``backward``, from its tensors, options and what is wanted; ``adjoints`` are given by name. B and C may lack
    the dimension of groups, in shapes and in calls."""
    *tensors, options, wanted = args
    *every, checkpoints, out_grad, final_grad = tensors
    shapes, addresses = Arguments(*every), addresses_of(tensors)
    given = grouped(shapes)

    def on_cpu(given: Arguments, _: Any, out_grad: Tensor, final_grad: Any) -> Gradients:
        return selective_scan_cpu.backward(given, out_grad, final_grad, options, wanted)

    def by_reference(given: Arguments, _: Any, out_grad: Tensor, final_grad: Any) -> Gradients:
        # Below autograd, where the dispatcher may have come to by now, no derivatives are recorded.
        recorded = torch._C._SetExcludeDispatchKeyGuard(_AUTOGRAD, False)
        with recorded, torch.no_grad():
            return composed.backward(given, options, out_grad, final_grad, wanted)

    def of_groups(function: Callable[..., Gradients], tensors: Sequence[Any]) -> Gradients:
        given = Arguments(*tensors[:-3])
        return in_shapes(given, function(grouped(given), *tensors[-3:]))

    if given.u.numel() == 0 or checkpoints.numel() == 0 or _in_torch(given, options):
        plain = on_cpu if selective_scan_cpu.takes(given, options) else by_reference
        return lambda *tensors, adjoints=None: of_groups(plain, tensors)
    launch = plan_backward(given, out_grad, final_grad, options, wanted, addresses, shapes)
    if isinstance(launch, Decision):
        decision = launch
        return lambda *tensors, adjoints=None: run_reference(
            decision, lambda: of_groups(by_reference, tensors)
        )
    run = launch
    return lambda *tensors, adjoints=None: run(
        Arguments(*tensors[:-3]), *tensors[-3:], adjoints=adjoints
    )


def in_shapes(given: Arguments, gradients: Gradients) -> Gradients:
    """The gradients of ``grouped(given)`` in the shapes of what is given."""
    if given.B.dim() != 3 and given.C.dim() != 3:
        return gradients
    pairs = zip(gradients, given.differentiable, strict=True)
    return tuple(g if g is None or t is None else g.reshape(t.shape) for g, t in pairs)


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
    buffers = GradientBuffers(grouped, problem, shared_shape(given, problem, shapes))
    finish = finisher(given, problem, wanted, shapes, buffers)
    gaps = final_grad is not None and not final_grad.is_contiguous()

    def plan(
        given: Arguments,
        checkpoints: Tensor,
        out_grad: Tensor,
        final_grad: Any,
        adjoints: Any = None,
    ) -> Gradients:
        tensors = inputs(given)
        tensors["out_grad"] = out_grad
        tensors["final_grad"] = final_grad.contiguous() if gaps else final_grad
        tensors["checkpoints"] = checkpoints
        sums = buffers.put(tensors)
        if first is not None and adjoints is None:
            first(tensors)
        elif first is not None:
            tensors["adjoints"], tensors["sizes"] = map(Tensor.contiguous, adjoints)
        launch(tensors)
        return finish(tensors, sums)

    return plan


# --- Adjoints of parts ------------------------------------------------------------------------


def adjoint(given: Arguments, out_grad: Tensor, options: Options) -> Adjoints | None:
    """What the kernel ``adjoint`` finds for each part of a sequence, also for the first; None if no kernel does. Nothing is
    packed."""
    tensors = *given, out_grad
    adjoints: Adjoints | None = plan_cache.run(_make_adjoint, tensors, options)
    return adjoints


def sizes(given: Arguments, options: Options) -> Tensor | None:
    """The sums of the step sizes over time, (B, D), float32: what the kernel ``adjoint`` makes of no states. None if no kernel
    does. Nothing is packed."""
    without_states = given._replace(A=given.A[:, :0], z=None)
    found: Adjoints | None = plan_cache.run(_make_adjoint, (*without_states, None), options)
    return None if found is None else found.sizes.sum(1)


def _make_adjoint(*args: Any) -> Plan:
    *every, out_grad, options = args
    given, addresses = Arguments(*every), addresses_of((*every, out_grad))
    if given.u.numel() == 0 or given.cu_seqlens is not None or _in_torch(given, options):
        return lambda *tensors: None
    device, grouped = given.u.device, with_groups(given)
    others = {"grad": out_grad, "u_grad": torch.empty_like(given.u)}
    parts = parts_of(make_problem("backward", grouped, options, others, addresses), device)
    # The kernel leaves out a sequence's first part. So it is told of one part more, which lies before the tensors begin, and
    # which it does not read.
    batch, channels, time = given.u.shape
    skipped = INTERVAL * -(-time // (INTERVAL * parts))
    grad = {"grad": out_grad}
    problem = make_problem("adjoint", grouped, options, grad, addresses, parts + 1)
    run = _prepared(replace(problem, time=time + skipped), device, options.backend)
    if isinstance(run, Decision):
        return lambda *tensors: None
    launch, inputs = run, inputs_of(given)
    new_adjoints = allocator(device, (batch, parts + 1, channels, given.A.shape[1]))
    new_sizes = allocator(device, (batch, parts + 1, channels))

    def plan(*args: Any) -> Adjoints:
        # Alive until the launch, for the sake of those that are copies.
        tensors: dict[str, Any] = {**inputs(Arguments(*args[:-1])), "out_grad": args[-1]}
        earlier: dict[str, Any] = {
            name: Address(t.data_ptr() - skipped * t.stride(-1) * t.element_size())
            for name in ("delta", "z", "C", "out_grad")
            if (t := tensors[name]) is not None
        }
        found, sizes = new_adjoints(), new_sizes()
        launch({**tensors, **earlier, "adjoints": found, "sizes": sizes})
        return Adjoints(found[:, 1:], sizes[:, 1:])

    return plan


def new_tensors(
    given: Arguments, problem: SelectiveScanProblem, out_grad: Tensor
) -> dict[str, Tensor | None]:
    """What the kernel for a problem gets in a call that trains, by the names of its pointers."""
    grouped = with_groups(given)
    tensors = inputs_of(grouped)(grouped)
    tensors["checkpoints"] = given.u.new_zeros(checkpoint_shape(given), dtype=torch.float32)
    if problem.direction == "forward":
        return {**tensors, "out": torch.empty_like(given.u)}
    buffers = GradientBuffers(grouped, problem, None)
    parts = buffers.views(buffers.put(tensors))
    for part in parts.values():
        part.zero_()
    return {**tensors, **parts, "out_grad": out_grad}
