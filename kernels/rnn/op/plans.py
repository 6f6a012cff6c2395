"""How a recurrent network runs: in one launch, step by step, or in plain torch; forwards and backwards.

A call with shapes, strides and dtypes seen before finds its selection in a plan. Arguments are as
``normalised`` makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scan_registry.dispatch import policy
from scan_registry.dispatch.select import Backend, Decision
from scan_registry.kernels import family
from scan_registry.kernels.model import Problem
from scan_registry.kernels.rnn import reference
from scan_registry.kernels.rnn.op import cpu as rnn_cpu
from scan_registry.kernels.rnn.op import steps as rnn_steps
from scan_registry.kernels.rnn.op.arguments import (
    COMPILED,
    Arguments,
    Options,
    check_operator,
)
from scan_registry.kernels.rnn.op.buffers import Key, StepBuffers, rnn_buffers
from scan_registry.kernels.rnn.op.layout import (
    blocked,
    dense,
    empty_like_inputs,
    known_states,
    widened,
)
from scan_registry.kernels.rnn.op.problems import alternatives
from scan_registry.kernels.rnn.op.resets import check_reset, without_kernels
from scan_registry.kernels.rnn.problem import SIZES, Direction, Function, RnnProblem
from scan_registry.ops.launching import Run, plan_cache
from scan_registry.ops.recording import is_capturing
from scan_registry.runtime.loader import prepare_first, run_reference

FAMILY_NAME = "rnn"


class Outputs(NamedTuple):
    """What forward makes: states (states, B, T, N, D), those after the last step (states, B, N, D), and
    what backward needs beside them, (B, T, cache, N, D); that is empty where it was not asked for."""

    states: Tensor
    last: Tensor
    cache: Tensor


# --- Launches ---------------------------------------------------------------------------------


def _prepared(
    posed: Sequence[tuple[Problem, Backend]], device: torch.device
) -> tuple[RnnProblem, Run] | Decision:
    """The problem that a kernel solves, and its launch; else the decision for plain torch."""
    plan = prepare_first(device.index, family(FAMILY_NAME), posed, policy.lowest())
    problem = plan.decision.problem
    assert isinstance(problem, RnnProblem)
    return plan.decision if plan.launch is None else (problem, plan.run)


def prepare_sequence(
    direction: Direction,
    options: Options,
    tensors: Mapping[str, Tensor],
    device: torch.device,
    training: bool,
    graded: int,
    resets: bool = False,
) -> Run | None:
    """The launch of all steps at once, for tensors laid out as a kernel takes them. None if no kernel takes all steps.
    ``graded``: how many states have a gradient at every step. ``resets``: whether states start anew at some steps."""
    posed = alternatives(direction, options, tensors, training, resets)
    if direction == "backward":
        posed = tuple((replace(problem, graded=graded), backend) for problem, backend in posed)  # type: ignore[type-var]
    prepared = _prepared(posed, device)
    if isinstance(prepared, Decision) or prepared[0].scope != "sequence":
        return None
    return prepared[1]


def prepare_layer(
    direction: Direction,
    options: Options,
    size: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
    resets: bool,
    *,
    graded: int = 0,
    training: bool = True,
    turned: bool = False,
) -> Run | None:
    """The launch of all steps, time being outermost in memory, and batches if ``turned`` in that of the inputs; None if no
    kernel takes them all."""
    time, batch, *unit = size
    of = SIZES[options.function]

    def shaped(lead: int | None, count: int | None) -> Tensor:
        first = () if lead is None else (lead,)
        block = () if count is None else (count,)
        shape = (*first, time, batch, *block, *unit)
        return torch.empty(shape, dtype=dtype, device="meta").transpose(len(first), len(first) + 1)

    states = shaped(len(of.states), None)
    cache = shaped(None, len(of.cache)) if training and of.cache else states[0].unsqueeze(2)
    tensors = {"states": states, "cache": cache}
    if direction == "forward":
        lying = shaped(None, of.inputs)
        tensors["inputs"] = (
            torch.empty_like(lying, memory_format=torch.contiguous_format) if turned else lying
        )
    else:
        tensors |= {"states_grad": shaped(1, None), "gates_grad": shaped(None, of.bias)}
    return prepare_sequence(direction, options, tensors, device, training, graded, resets)


@contextmanager
def _step_buffers(problem: RnnProblem, like: Tensor, resets: bool) -> Iterator[StepBuffers]:
    """Buffers for a call that poses a step's problem, on the current stream. For a graph that somebody
    records they are new, and the graph's alone."""
    direction, training = problem.direction, problem.training
    size = problem.batch, problem.heads, problem.dim
    width, itemsize = problem.heads * problem.dim, like.element_size()
    steps = rnn_steps.chunk_steps(
        direction, problem.function, problem.batch, width, itemsize, training
    )
    shapes = rnn_steps.buffer_shapes(direction, problem.function, size, steps, training)

    def make() -> StepBuffers:
        return rnn_steps.make_buffers(shapes, steps, like, problem.function, resets)

    if is_capturing(like):
        yield make()
        return
    stream = torch.cuda.current_stream(like.device).cuda_stream if like.is_cuda else 0
    options = direction, problem.batch, problem.dtype, training, problem.clips, resets
    key = Key(like.device, stream, problem.function, *size[1:], (*options, policy.required.get()))
    with rnn_buffers.lent(key, make) as buffers:
        yield buffers


def _in_torch(inputs: Tensor, backend: str) -> bool:
    """Whether plain torch runs, and no GPU kernel is looked for."""
    return not inputs.is_cuda or backend == "reference" or inputs.dtype not in COMPILED


# --- Forward ----------------------------------------------------------------------------------


def forward(arguments: Arguments, options: Options, training: bool) -> Outputs:
    """``Outputs``; with ``training`` the cache, too."""
    outputs: Outputs = _run(_plan_forward, arguments, options, training)
    return outputs


def empty_outputs(inputs: Tensor, function: Function, training: bool) -> Outputs:
    """Room for ``Outputs``."""
    sizes, unit = SIZES[function], tuple(inputs.shape[3:])
    count, kept = len(sizes.states), len(sizes.cache) if training else 0
    return Outputs(
        empty_like_inputs(inputs, (count,), unit),
        inputs.new_empty(count, inputs.shape[0], *unit),
        empty_like_inputs(inputs, (), (kept, *unit)) if kept else inputs.new_empty(0),
    )


def _plan_forward(
    inputs: Tensor,
    recurrent: Tensor,
    bias: Tensor,
    initial: Tensor | None,
    reset: Tensor | None,
    reset_states: Tensor | None,
    options: Options,
    training: bool,
) -> Callable[..., Any]:
    function = options.function
    check_operator(inputs, recurrent, bias, function)
    check_reset(reset, inputs.shape[:2])

    def nothing(
        inputs: Tensor, recurrent: Tensor, bias: Tensor, initial: Any, reset: Any, anew: Any
    ) -> Outputs:
        outputs = empty_outputs(inputs, function, training)
        return outputs._replace(last=_first(initial, outputs.last))

    def by_reference(
        inputs: Tensor, recurrent: Tensor, bias: Tensor, initial: Any, reset: Any, anew: Any
    ) -> Outputs:
        states, cache = reference.forward(
            function, inputs, recurrent, bias, initial, options.clips, reset, anew
        )
        outputs = empty_outputs(inputs, function, training)
        if outputs.cache.numel():
            outputs.cache.copy_(cache)
        outputs.states.copy_(states)
        outputs.last.copy_(states[:, :, -1])
        return outputs

    if inputs.numel() == 0:
        return nothing
    if _in_torch(inputs, options.backend):
        if not rnn_cpu.takes(inputs, options.backend):
            return by_reference
        return lambda *tensors: Outputs(*rnn_cpu.forward(tensors, options, training))
    options = without_kernels(options, reset_states)
    tensors = forward_tensors(inputs, function, training)
    posed = alternatives("forward", options, tensors, training, reset is not None)
    prepared = _prepared(posed, inputs.device)
    if isinstance(prepared, Decision):
        return partial(run_reference, prepared, by_reference)
    problem, run = prepared

    def plan(
        inputs: Tensor, recurrent: Tensor, bias: Tensor, initial: Any, reset: Any, anew: Any
    ) -> Outputs:
        blocks = widened(blocked(inputs, 3))
        outputs = empty_outputs(blocks, function, training)
        start = None if initial is None else dense(widened(initial))
        weight, offset = dense(widened(recurrent, 2)), dense(widened(bias))
        cache = outputs.cache if outputs.cache.numel() else None
        marks = None if reset is None else reset.contiguous()
        if problem.scope == "step":
            with _step_buffers(problem, blocks, marks is not None) as buffers:
                rnn_steps.forward(
                    buffers, run, blocks, weight, offset, start, outputs.states, cache, marks
                )
        else:
            run(
                {
                    "inputs": blocks,
                    "recurrent": weight,
                    "bias": offset,
                    "initial": start,
                    "reset": marks,
                    "states": outputs.states,
                    "cache": cache,
                }
            )
        outputs.last.copy_(outputs.states[:, :, -1])
        return _narrowed(outputs, inputs)

    return plan


def forward_tensors(inputs: Tensor, function: Function, training: bool) -> dict[str, Tensor]:
    """The tensors of a forward pass that have strides, as a kernel takes them; of those that it writes
    no more is there than how they lie."""
    inputs = widened(blocked(inputs, 3))
    outputs = empty_outputs(_shadow(inputs), function, training)
    cache = outputs.cache if outputs.cache.numel() else outputs.states[0].unsqueeze(2)
    return {"inputs": inputs, "states": outputs.states, "cache": cache}


def _shadow(tensor: Tensor) -> Tensor:
    """A tensor on meta that lies like ``tensor``."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _narrowed(outputs: Outputs, inputs: Tensor) -> Outputs:
    """The outputs without the units that were padded, lying as if they had never been."""
    dim = inputs.shape[-1]
    if outputs.last.shape[-1] == dim:
        return outputs
    states = empty_like_inputs(inputs, outputs.states.shape[:1], inputs.shape[3:])
    states.copy_(outputs.states[..., :dim])
    cache = outputs.cache
    if cache.numel():
        cache = empty_like_inputs(inputs, (), (cache.shape[2], *inputs.shape[3:])).copy_(
            cache[..., :dim]
        )
    return Outputs(states, outputs.last[..., :dim].contiguous(), cache)


def _first(initial: Tensor | None, memory: Tensor) -> Tensor:
    return memory.zero_() if initial is None else memory.copy_(initial)


# --- Backward ---------------------------------------------------------------------------------


def backward(
    recurrent: Tensor, states: Tensor, initial: Tensor | None, cache: Tensor, states_grad: Tensor,
    final_grad: Tensor | None, options: Options, reset: Tensor | None = None,
    reset_states: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """gates_grad (B, T, bias, N, D), initial_grad (states, B, N, D), and where there are ``reset_states``
    their gradient."""
    tensors = recurrent, states, initial, cache, states_grad, final_grad, reset, reset_states
    gradients: tuple[Tensor, ...] = _run(plan_backward, tensors, options)
    return gradients


def _run(make: Callable[..., Any], tensors: Sequence[Tensor | None], *options: object) -> Any:
    """What the plan makes."""
    return within_memory(partial(plan_cache.run, make, tensors, *options))


def within_memory(run: Callable[..., Any], *tensors: Tensor | None) -> Any:
    """What ``run`` makes of the tensors; where memory is short, without what is kept for reuse."""
    try:
        return run(*tensors)
    except torch.OutOfMemoryError:
        if not rnn_buffers.clear():
            raise
    return run(*tensors)


def empty_gradients(
    states: Tensor, function: Function, with_reset_states: bool = False
) -> tuple[Tensor, ...]:
    """Memory for the results of ``backward``. ``with_reset_states``: whether there are ``reset_states``."""
    count, batch, _, heads, dim = states.shape
    gates = empty_like_inputs(states[0], (), (SIZES[function].bias, heads, dim))
    grads = 1 + with_reset_states
    return gates, *(states.new_empty(count, batch, heads, dim) for _ in range(grads))


def plan_backward(
    recurrent: Tensor,
    states: Tensor,
    initial: Tensor | None,
    cache: Tensor,
    states_grad: Tensor,
    final_grad: Tensor | None,
    reset: Tensor | None,
    reset_states: Tensor | None,
    options: Options,
) -> Callable[..., Any]:
    """The plan of ``backward``: a function of its tensors."""
    function = options.function
    check_reset(reset, states.shape[1:3])
    with_reset_states = reset_states is not None

    def nothing(
        recurrent: Any, states: Tensor, initial: Any, cache: Any, grad: Any, end: Any,
        reset: Any, anew: Any,
    ) -> Any:  # fmt: skip
        gates_grad, initial_grad, *more = empty_gradients(states, function, with_reset_states)
        return gates_grad, _first(end, initial_grad), *(gradient.zero_() for gradient in more)

    def by_reference(
        recurrent: Tensor, states: Tensor, initial: Any, cache: Tensor, grad: Tensor, end: Any,
        reset: Any, anew: Any,
    ) -> Any:  # fmt: skip
        outputs = empty_gradients(states, function, with_reset_states)
        gradients = reference.backward(
            function, recurrent, states, initial, kept(cache, states), grad, end, options.clips,
            reset=reset, reset_states=anew,
        )  # fmt: skip
        return tuple(out.copy_(grad) for out, grad in zip(outputs, gradients, strict=True))

    if states.numel() == 0:
        return nothing
    if _in_torch(states, options.backend):
        if not rnn_cpu.takes(states, options.backend):
            return by_reference
        return lambda *tensors: rnn_cpu.backward(tensors, options)
    options = without_kernels(options, reset_states)
    strided = backward_tensors(states, cache, states_grad, function)
    posed = alternatives("backward", options, strided, True, reset is not None)
    prepared = _prepared(posed, states.device)
    if isinstance(prepared, Decision):
        return partial(run_reference, prepared, by_reference)
    problem, run = prepared

    def plan(
        recurrent: Tensor, states: Tensor, initial: Any, cache: Tensor, grad: Tensor, end: Any,
        reset: Any, anew: Any,
    ) -> Any:  # fmt: skip
        dim = states.shape[-1]
        known, padded_grad = known_states(states), widened(blocked(grad, 2))
        known_cache = widened(blocked(cache, 3)) if cache.numel() else None
        start = None if initial is None else dense(known_states(initial))
        final = None if end is None else dense(widened(end))
        weight = dense(widened(recurrent, 2))
        gates_grad, initial_grad = empty_gradients(known, function)
        marks = None if reset is None else reset.contiguous()
        if problem.scope == "step":
            with _step_buffers(problem, known, marks is not None) as buffers:
                left = rnn_steps.backward(
                    buffers, run, weight, known, start, cache if known_cache is None else known_cache,
                    padded_grad, final, options.clips, gates_grad, marks,
                )  # fmt: skip
                initial_grad.copy_(left)
        else:
            run(
                {
                    "recurrent": weight,
                    "states": known,
                    "initial": start,
                    "reset": marks,
                    "cache": known_cache,
                    "states_grad": padded_grad,
                    "final_grad": final,
                    "gates_grad": gates_grad,
                    "initial_grad": initial_grad,
                }
            )
        if known.shape[-1] == dim:
            return gates_grad, initial_grad
        outputs = empty_gradients(states, function)
        return outputs[0].copy_(gates_grad[..., :dim]), outputs[1].copy_(initial_grad[..., :dim])

    return plan


def backward_tensors(
    states: Tensor, cache: Tensor, states_grad: Tensor, function: Function
) -> dict[str, Tensor]:
    """The same for a backward pass."""
    known = known_states(states)
    return {
        "states": known,
        "cache": widened(blocked(kept(cache, states), 3)),
        "states_grad": widened(blocked(states_grad, 2)),
        "gates_grad": empty_gradients(_shadow(known), function)[0],
    }


def kept(cache: Tensor, states: Tensor) -> Tensor:
    """The cache, (B, T, cache, N, D), of a function that may keep nothing."""
    return cache if cache.dim() == 5 else states[0].unsqueeze(2)[:, :, :0]
