"""The backend ``cuda_alternating``: at each step a product with R, by torch, and a kernel for the rest.

Steps are taken in chunks, in buffers of a chunk's length: what is given is copied to them, and what is
made is copied from them. So a launch does not depend on how the given tensors lie, and a CUDA graph of
one chunk serves sequences of any length.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from scan_registry.kernels.rnn.op.buffers import StepBuffers
from scan_registry.kernels.rnn.problem import (
    SIZES,
    STRIDED,
    Clips,
    Direction,
    Function,
    RnnProblem,
)
from scan_registry.kernels.rnn.reference import previous_first
from scan_registry.ops.launching import Run

CHUNK = 64  # the most steps that buffers hold, and a graph
_LEAST = 4  # steps; with fewer, copying costs more than the steps
_CHUNK_BYTES = 32 << 20  # of what buffers hold of the sequence; longer chunks are no faster by then

Tensors = Mapping[str, Tensor]


def chunk_steps(
    direction: Direction, function: Function, batch: int, width: int, itemsize: int, training: bool
) -> int:
    """How many steps buffers hold; ``width`` is that of all heads, ``itemsize`` in bytes."""
    sizes = SIZES[function]
    states, kept = len(sizes.states), len(sizes.cache) if training else 0
    inputs = sizes.inputs if direction == "forward" else states + sizes.bias
    bytes_of_step = (states + kept + inputs) * batch * width * itemsize
    return max(_LEAST, min(CHUNK, _CHUNK_BYTES // max(1, bytes_of_step)))


def buffer_shapes(
    direction: Direction,
    function: Function,
    size: tuple[int, int, int],
    steps: int,
    training: bool,
) -> dict[str, tuple[int, ...]]:
    """What buffers for ``steps`` steps hold, in the dtype of the sequence; beside it, ``carry`` and ``bias``
    are float32. The states of a backward pass begin with those before the chunk, and after them there is room for
    those that a reset puts before a step. ``size`` is (batch, heads, dim)."""
    sizes, (batch, heads, dim) = SIZES[function], size
    unit, states = (heads, dim), len(sizes.states)
    before = 2 if direction == "backward" else 0
    shapes: dict[str, tuple[int, ...]] = {"states": (states, batch, before + steps, *unit)}
    if sizes.cache and training:
        shapes["cache"] = (batch, steps, len(sizes.cache), *unit)
    if direction == "forward":
        shapes["inputs"] = (batch, steps, sizes.inputs, *unit)
        shapes["weight"] = (heads, dim, sizes.recurrent * dim)
        shapes["terms"] = (heads, batch, sizes.recurrent * dim)
        shapes["before"] = (batch, *unit)
    else:
        shapes["states_grad"] = (states, batch, steps, *unit)
        shapes["gates_grad"] = (batch, steps, sizes.bias, *unit)
        shapes["weight"] = (heads, sizes.recurrent * dim, dim)
        shapes["through"] = (heads, batch, sizes.recurrent, dim)
        shapes["terms"] = (heads, batch, dim)
    return shapes


def make_buffers(
    shapes: Mapping[str, tuple[int, ...]],
    steps: int,
    like: Tensor,
    function: Function,
    resets: bool = False,
) -> StepBuffers:
    """Empty buffers, in the dtype and on the device of ``like``; for ``resets``, where they are, too."""
    _, batch, _, *unit = shapes["states"]
    sizes = SIZES[function]
    tensors = {name: like.new_empty(shape) for name, shape in shapes.items()}
    tensors["carry"] = like.new_empty(len(sizes.states), batch, *unit, dtype=torch.float32)
    tensors["bias"] = like.new_empty(sizes.bias, *unit, dtype=torch.float32)
    if resets:
        tensors["reset"] = like.new_empty(batch, steps, dtype=torch.bool)
    return StepBuffers(tensors, steps)


def step_problem(
    direction: Direction,
    function: Function,
    dtype: str,
    size: tuple[int, int, int, int],
    training: bool,
    clips: Clips,
) -> RnnProblem:
    """What a step poses in buffers; ``size`` is (batch, time, heads, dim)."""
    batch, time, heads, dim = size
    itemsize = getattr(torch, dtype).itemsize
    steps = chunk_steps(direction, function, batch, heads * dim, itemsize, training)
    shapes = buffer_shapes(direction, function, (batch, heads, dim), steps, training)
    strides = []
    for name, dimensions in STRIDED["step", direction].items():
        shape = shapes.get("states" if name == "before" else name, (0,) * 5)
        along = torch.empty(shape, device="meta").stride()
        by_name = {"state": along[0], "batch": along[dimensions.index("batch")]}
        strides += [by_name[dimension] for dimension in dimensions]
    return RnnProblem(
        *("step", direction, function, dtype),
        *(batch, time, heads, dim),
        strides=tuple(strides),
        graded=len(SIZES[function].states) if direction == "backward" else 0,
        training=training,
        clips=clips,
    )


def forward(
    buffers: StepBuffers,
    run: Run,
    inputs: Tensor,
    recurrent: Tensor,
    bias: Tensor,
    initial: Tensor | None,
    states: Tensor,
    cache: Tensor | None,
    reset: Tensor | None = None,
) -> None:
    """Writes states (states, B, T, N, D), and cache where there is one. What a kernel has of a step is set to zeros
    before it where there is a reset."""
    own, time, chunk = buffers.tensors, inputs.shape[1], buffers.steps
    own["weight"].copy_(previous_first(recurrent))
    own["bias"].copy_(bias)
    _set(own["carry"], initial)
    _set(own["before"], None if initial is None else initial[0])

    def body(own: Tensors, steps: int) -> None:
        _forward_steps(run, own, steps)

    for begin in range(0, time, chunk):
        count = min(chunk, time - begin)
        own["inputs"][:, :count].copy_(inputs[:, begin : begin + count])
        if reset is not None:
            own["reset"][:, :count].copy_(reset[:, begin : begin + count])
        buffers.run(count, body)
        states[:, :, begin : begin + count].copy_(own["states"][:, :, :count])
        if cache is not None:
            cache[:, begin : begin + count].copy_(own["cache"][:, :count])
        own["before"].copy_(own["states"][0, :, count - 1])


def _forward_steps(run: Run, own: Tensors, steps: int) -> None:
    h, cache = own["before"], own.get("cache")
    for t in range(steps):
        torch.bmm(h.transpose(0, 1), own["weight"], out=own["terms"])
        if "reset" in own:
            _clear(own["reset"][:, t], own["carry"], own["terms"])
        states = own["states"][:, :, t]
        run(
            {
                **own,
                "inputs": own["inputs"][:, t],
                "states": states,
                "cache": None if cache is None else cache[:, t],
            }
        )
        h = states[0]


def backward(
    buffers: StepBuffers, run: Run, recurrent: Tensor, states: Tensor, initial: Tensor | None,
    cache: Tensor, states_grad: Tensor, final_grad: Tensor | None, clips: Clips,
    gates_grad: Tensor, reset: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Writes gates_grad (B, T, bias, N, D); the gradient of the initial states, in float32."""
    own, time, chunk = buffers.tensors, states.shape[2], buffers.steps
    gates, heads, dim, _ = recurrent.shape
    own["weight"].copy_(recurrent.transpose(0, 1).reshape(heads, gates * dim, dim))
    own["terms"].zero_()
    _set(own["carry"], final_grad)

    def body(own: Tensors, steps: int) -> None:
        _backward_steps(run, own, steps, clips.recurrent_cut)

    for end in range(time, 0, -chunk):
        begin = max(0, end - chunk)
        count = end - begin
        _set(own["states"][:, :, 0], states[:, :, begin - 1] if begin else initial)
        own["states"][:, :, 1 : count + 1].copy_(states[:, :, begin:end])
        if reset is not None:
            own["reset"][:, :count].copy_(reset[:, begin:end])
        own["states_grad"][:, :, :count].copy_(states_grad[:, :, begin:end])
        if "cache" in own:
            own["cache"][:, :count].copy_(cache[:, begin:end])
        buffers.run(count, body)
        gates_grad[:, begin:end].copy_(own["gates_grad"][:, :count])
    grads = own["carry"].clone()
    grads[0] += own["terms"].transpose(0, 1).float().clamp(-clips.recurrent, clips.recurrent)
    return grads


def _backward_steps(run: Run, own: Tensors, steps: int, cut: bool) -> None:
    cache, through = own.get("cache"), own["through"]
    for t in reversed(range(steps)):
        gates_grad, before = own["gates_grad"][:, t], own["states"][:, :, t]
        if "reset" in own:
            # The step before still needs what is there.
            before = own["states"][:, :, -1].copy_(before)
            _clear(own["reset"][:, t], before)
        run(
            {
                **own,
                "before": before,
                "states": own["states"][:, :, t + 1],
                "states_grad": own["states_grad"][:, :, t],
                "cache": None if cache is None else cache[:, t],
                "gates_grad": gates_grad,
            }
        )
        if not cut:
            through.copy_(gates_grad[:, : through.shape[2]].permute(2, 0, 1, 3))
            torch.bmm(through.flatten(2), own["weight"], out=own["terms"])
        if "reset" in own:
            _clear(own["reset"][:, t], own["carry"], own["terms"])


def _clear(reset: Tensor, states: Tensor, terms: Tensor | None = None) -> None:
    """Sets states (states, B, N, D) and terms (N, B, …) to zeros in batches with a reset."""
    states.masked_fill_(reset.view(-1, 1, 1), 0)
    if terms is not None:
        terms.masked_fill_(reset.view(-1, 1), 0)


def _set(buffer: Tensor, value: Tensor | None) -> None:
    if value is None:
        buffer.zero_()
    else:
        buffer.copy_(value)
