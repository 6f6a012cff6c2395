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
    make_states_problem,
    parts_of,
    states_inputs,
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


def _in_torch(arguments: Arguments, options: Options) -> bool:
    return not on_gpu(arguments.u) or options.backend == "reference" or not has_kernels(arguments)


def _prepared(problem: SelectiveScanProblem, device: torch.device, backend: Any) -> Run | Decision:
    plan = prepare(device.index, family(FAMILY_NAME), problem, backend, policy.lowest())
    return plan.decision if plan.launch is None else plan.run


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


# --- Forward ----------------------------------------------------------------------------------


def checkpoint_shape(arguments: Arguments) -> tuple[Any, ...]:
    """Of the states that forward leaves for backward."""
    batch, channels, time = arguments.u.shape
    sequences = 1 if arguments.cu_seqlens is None else arguments.cu_seqlens.shape[0] - 1
    return batch, time // INTERVAL + sequences, channels, arguments.A.shape[1]


def state_shape(arguments: Arguments) -> tuple[Any, ...]:
    """Of the states before and after."""
    between = () if arguments.cu_seqlens is None else (arguments.cu_seqlens.shape[0] - 1,)
    return (arguments.u.shape[0], *between, *arguments.A.shape)


def empty_outputs(arguments: Arguments, options: Options, training: bool) -> Outputs:
    """New ``Outputs``, not yet computed. A tensor that stands for one on a GPU, when operators are traced, is on meta here."""
    u, A = arguments.u, arguments.A
    stood_for = getattr(u, "fake_device", None)
    state = reference.state_dtype(u.dtype, A.dtype)
    there = on_gpu(u) if stood_for is None else stood_for.type == "cuda"
    kernels = there and options.backend != "reference" and has_kernels(arguments)
    kept = checkpoint_shape(arguments) if training and kernels else (0,)
    return Outputs(
        torch.empty_like(u),
        u.new_empty(state_shape(arguments), dtype=state),
        u.new_empty(kept, dtype=torch.float32),
    )


def forward(arguments: Arguments, options: Options, training: bool) -> Outputs:
    """``Outputs``; with ``training`` what backward needs, too."""
    return Outputs(*plan_cache.run(make_forward, tuple(arguments), options, training, True))


def make_forward(*args: Any) -> Plan:
    """The plan of ``forward``, from its arguments and whether the final state is asked for. B and C may lack the dimension of
    groups, in shapes and in calls."""
    *tensors, options, training, final = args
    arguments = grouped(Arguments(*tensors))

    def by_reference(arguments: Arguments) -> Outputs:
        outputs = empty_outputs(arguments, options, training)
        out, final_state = composed.forward(arguments, options)
        outputs.out.copy_(out)
        outputs.last.copy_(final_state)
        if outputs.checkpoints.numel():
            outputs.checkpoints.copy_(_kept_by_reference(arguments, options))
        return outputs

    def on_cpu(arguments: Arguments) -> Outputs:
        outputs = selective_scan_cpu.forward(arguments, options)
        return Outputs(*outputs, arguments.u.new_empty((0,), dtype=torch.float32))

    if arguments.u.numel() == 0 or _in_torch(arguments, options):
        plain = on_cpu if selective_scan_cpu.takes(arguments, options) else by_reference
        return lambda *tensors: plain(grouped(Arguments(*tensors)))
    launch = plan_forward(arguments, options, training, final, addresses_of(tensors))
    if isinstance(launch, Decision):
        decision = launch
        return lambda *tensors: run_reference(
            decision, lambda: by_reference(grouped(Arguments(*tensors)))
        )
    run = launch
    if training or not final:
        return lambda *tensors: run(Arguments(*tensors))

    def plan(*tensors: Any) -> Outputs:
        out, final_state, _ = run(Arguments(*tensors))
        return Outputs(out, final_state, out.new_empty(0, dtype=torch.float32))

    return plan


def plan_forward(
    arguments: Arguments, options: Options, training: bool, final: bool, addresses: int
) -> Callable[[Arguments], tuple[Tensor, Any, Any]] | Decision:
    """How a kernel makes the output, the final state if it is ``final`` that is asked for, and in ``training`` the
    checkpoints; or the decision that none does."""
    u = arguments.u
    model = torch.empty_like(u)
    whole = make_problem("forward", with_groups(arguments), options, {"out": model}, addresses)
    problem = replace(whole, parts=parts_of(whole, u.device))
    run = _prepared(problem, u.device, options.backend)
    if isinstance(run, Decision):
        return run
    first: Run | None = None
    if problem.parts > 1:
        before = make_states_problem(with_groups(arguments), options, addresses, problem.parts)
        prepared = _prepared(before, u.device, options.backend)
        if isinstance(prepared, Decision):
            return prepared
        first = prepared
    launch, inputs = run, inputs_of(arguments)
    rows = problem.batch * max(1, problem.sequences) * problem.parts
    channels, states = arguments.A.shape
    new_part_states = allocator(u.device, (rows, channels, states))
    new_part_sizes = allocator(u.device, (rows, channels))
    new_out = allocator(u.device, model.shape, u.dtype, model.stride())
    new_state = allocator(u.device, state_shape(arguments)) if final else _nothing
    new_checkpoints = allocator(u.device, checkpoint_shape(arguments)) if training else _nothing

    def plan(arguments: Arguments) -> tuple[Tensor, Any, Any]:
        out, last, kept = new_out(), new_state(), new_checkpoints()
        tensors = {**inputs(arguments), "out": out, "final_state": last, "checkpoints": kept}
        if first is not None:
            part_states, part_sizes = new_part_states(), new_part_sizes()
            first({**states_inputs(tensors), "adjoints": part_states, "sizes": part_sizes})
            tensors |= {"part_states": part_states, "part_sizes": part_sizes}
        launch(tensors)
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

    def pointers(arguments: Arguments) -> dict[str, Tensor | None]:
        if spread:
            arguments = with_groups(arguments)
        u, delta, A, B, C, D, z, bias, initial, cu_seqlens = arguments
        tensors = {
            "u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "z": z, "delta_bias": bias,
            "initial_state": initial, "cu_seqlens": cu_seqlens,
        }  # fmt: skip
        for name in gaps:
            tensors[name] = _dense(tensors[name])
        return tensors

    return pointers


def _kept_by_reference(arguments: Arguments, options: Options) -> Tensor:
    return reference.checkpoints(
        arguments.u, arguments.delta, arguments.A, arguments.B, arguments.C, arguments.delta_bias, options.softplus,
        arguments.initial_state, arguments.cu_seqlens, INTERVAL,
    )  # fmt: skip


# --- Backward ---------------------------------------------------------------------------------


def backward(
    arguments: Arguments,
    checkpoints: Tensor,
    out_grad: Tensor,
    final_grad: Tensor | None,
    options: Options,
    wanted: tuple[bool, ...],
    adjoints: Adjoints | None = None,
) -> Gradients:
    """The gradients that are wanted, of all arguments but the bounds, each in its own dtype. ``adjoints`` are what
    ``adjoint`` has found for the same arguments, if it was called before."""
    tensors = *arguments, checkpoints, out_grad, final_grad
    plan = plan_cache.plan(make_backward, tensors, options, wanted)
    gradients: Gradients = plan(*tensors, adjoints=adjoints)
    return gradients


def make_backward(*args: Any) -> Plan:
    """The plan of ``backward``, from its tensors, options and what is wanted; ``adjoints`` are given by name. B and C may lack
    the dimension of groups, in shapes and in calls."""
    *tensors, options, wanted = args
    *every, checkpoints, out_grad, final_grad = tensors
    shapes, addresses = Arguments(*every), addresses_of(tensors)
    arguments = grouped(shapes)

    def on_cpu(arguments: Arguments, _: Any, out_grad: Tensor, final_grad: Any) -> Gradients:
        return selective_scan_cpu.backward(arguments, out_grad, final_grad, options, wanted)

    def by_reference(arguments: Arguments, _: Any, out_grad: Tensor, final_grad: Any) -> Gradients:
        # Below autograd, where the dispatcher may have come to by now, no derivatives are recorded.
        recorded = torch._C._SetExcludeDispatchKeyGuard(_AUTOGRAD, False)
        with recorded, torch.no_grad():
            return composed.backward(arguments, options, out_grad, final_grad, wanted)

    def of_groups(function: Callable[..., Gradients], tensors: Sequence[Any]) -> Gradients:
        arguments = Arguments(*tensors[:-3])
        return in_shapes(arguments, function(grouped(arguments), *tensors[-3:]))

    if arguments.u.numel() == 0 or checkpoints.numel() == 0 or _in_torch(arguments, options):
        plain = on_cpu if selective_scan_cpu.takes(arguments, options) else by_reference
        return lambda *tensors, adjoints=None: of_groups(plain, tensors)
    launch = plan_backward(arguments, out_grad, final_grad, options, wanted, addresses, shapes)
    if isinstance(launch, Decision):
        decision = launch
        return lambda *tensors, adjoints=None: run_reference(
            decision, lambda: of_groups(by_reference, tensors)
        )
    run = launch
    return lambda *tensors, adjoints=None: run(
        Arguments(*tensors[:-3]), *tensors[-3:], adjoints=adjoints
    )


def in_shapes(arguments: Arguments, gradients: Gradients) -> Gradients:
    """The gradients of ``grouped(given)`` in the shapes of what is given."""
    if arguments.B.dim() != 3 and arguments.C.dim() != 3:
        return gradients
    pairs = zip(gradients, arguments.differentiable, strict=True)
    return tuple(g if g is None or t is None else g.reshape(t.shape) for g, t in pairs)


def plan_backward(
    arguments: Arguments,
    out_grad: Tensor,
    final_grad: Tensor | None,
    options: Options,
    wanted: tuple[bool, ...],
    addresses: int,
    shapes: Arguments,
) -> Callable[..., Gradients] | Decision:
    """How kernels make the gradients that are wanted, of arguments, checkpoints, the output's gradient and the final
    state's; or the decision that none does. Those of B and C are to be of the shape that they have in ``shapes``."""
    device, grouped, backend = arguments.u.device, with_groups(arguments), options.backend
    others = {"grad": out_grad, "u_grad": torch.empty_like(arguments.u)}
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
    launch, inputs = run, inputs_of(arguments)
    buffers = GradientBuffers(grouped, problem, shared_shape(arguments, problem, shapes))
    finish = finisher(arguments, problem, wanted, shapes, buffers)
    gaps = final_grad is not None and not final_grad.is_contiguous()

    def plan(
        arguments: Arguments,
        checkpoints: Tensor,
        out_grad: Tensor,
        final_grad: Any,
        adjoints: Any = None,
    ) -> Gradients:
        tensors = inputs(arguments)
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


def adjoint(arguments: Arguments, out_grad: Tensor, options: Options) -> Adjoints | None:
    """What the kernel ``adjoint`` finds for each part of a sequence, also for the first; None if no kernel does. Nothing is
    packed."""
    tensors = *arguments, out_grad
    adjoints: Adjoints | None = plan_cache.run(_make_adjoint, tensors, options)
    return adjoints


def sizes(arguments: Arguments, options: Options) -> Tensor | None:
    """The sums of the step sizes over time, (B, D), float32: what the kernel ``adjoint`` makes of no states. None if no kernel
    does. Nothing is packed."""
    without_states = arguments._replace(A=arguments.A[:, :0], z=None)
    adjoints: Adjoints | None = plan_cache.run(_make_adjoint, (*without_states, None), options)
    return None if adjoints is None else adjoints.sizes.sum(1)


def _make_adjoint(*args: Any) -> Plan:
    *every, out_grad, options = args
    arguments, addresses = Arguments(*every), addresses_of((*every, out_grad))
    u, packed = arguments.u, arguments.cu_seqlens is not None
    if u.numel() == 0 or packed or _in_torch(arguments, options):
        return lambda *tensors: None
    device, grouped = arguments.u.device, with_groups(arguments)
    others = {"grad": out_grad, "u_grad": torch.empty_like(arguments.u)}
    parts = parts_of(make_problem("backward", grouped, options, others, addresses), device)
    # The kernel leaves out a sequence's first part. So it is told of one part more, which lies before the tensors begin, and
    # which it does not read.
    batch, channels, time = arguments.u.shape
    skipped = INTERVAL * -(-time // (INTERVAL * parts))
    grad = {"grad": out_grad}
    problem = make_problem("adjoint", grouped, options, grad, addresses, parts + 1)
    run = _prepared(replace(problem, time=time + skipped), device, options.backend)
    if isinstance(run, Decision):
        return lambda *tensors: None
    launch, inputs = run, inputs_of(arguments)
    new_adjoints = allocator(device, (batch, parts + 1, channels, arguments.A.shape[1]))
    new_sizes = allocator(device, (batch, parts + 1, channels))

    def plan(*args: Any) -> Adjoints:
        # Alive until the launch, for the sake of those that are copies.
        tensors: dict[str, Any] = {**inputs(Arguments(*args[:-1])), "out_grad": args[-1]}
        earlier: dict[str, Any] = {
            name: Address(t.data_ptr() - skipped * t.stride(-1) * t.element_size())
            for name in ("delta", "z", "C", "out_grad")
            if (t := tensors[name]) is not None
        }
        adjoints, sizes = new_adjoints(), new_sizes()
        launch({**tensors, **earlier, "adjoints": adjoints, "sizes": sizes})
        return Adjoints(adjoints[:, 1:], sizes[:, 1:])

    return plan


def new_tensors(
    arguments: Arguments, problem: SelectiveScanProblem, out_grad: Tensor
) -> dict[str, Tensor | None]:
    """What the kernel for a problem gets in a call that trains, by the names of its pointers."""
    grouped = with_groups(arguments)
    tensors = inputs_of(grouped)(grouped)
    tensors["checkpoints"] = arguments.u.new_zeros(checkpoint_shape(arguments), dtype=torch.float32)
    if problem.direction == "forward":
        rows = problem.batch * problem.parts
        part_states = arguments.u.new_zeros((rows, *arguments.A.shape), dtype=torch.float32)
        handed_on = {"part_states": part_states, "part_sizes": part_states[..., 0].contiguous()}
        return {**tensors, "out": torch.empty_like(arguments.u), **handed_on}
    buffers = GradientBuffers(grouped, problem, None)
    parts = buffers.views(buffers.put(tensors))
    for part in parts.values():
        part.zero_()
    written: dict[str, Tensor | None] = {**tensors, **parts, "out_grad": out_grad}
    return states_inputs(written) if problem.forwards else written
