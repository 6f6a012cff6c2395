"""``rnn`` by this package's compiled code for the CPU: ``csrc/cpu_rnn.c``.

It computes in float32, to which narrow dtypes are converted before and from which after. Arguments
are as ``normalised`` makes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from scan_registry.kernels.rnn.problem import SIZES, Function
from scan_registry.ops import _cpu
from scan_registry.ops.rnn_arguments import COMPILED, Options
from scan_registry.ops.rnn_layout import empty_like_inputs


def takes(tensor: Tensor, backend: str) -> bool:
    """Whether the compiled code computes it."""
    return tensor.device.type == "cpu" and backend == "auto" and tensor.dtype in COMPILED


def forward(
    inputs: Tensor,
    recurrent: Tensor,
    bias: Tensor,
    initial: Tensor | None,
    options: Options,
    training: bool,
    reset: Tensor | None = None,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """States (states, B, T, N, D), those after the last step (states, rows, N, D), and with ``training``
    the cache (B, T, cache, N, D). ``reset`` (B, T) is bool: the states before a step are zeros.
    ``offsets``, int64, bound sequences packed along time, each of which is a row."""
    function, dtype = options.function, inputs.dtype
    sizes, unit = SIZES[function], tuple(inputs.shape[3:])
    x = _with_block(inputs, 3)
    states = empty_like_inputs(x, (len(sizes.states),), unit)
    kept = len(sizes.cache) if training else 0
    cache = empty_like_inputs(x, (), (kept, *unit)) if kept else x.new_empty(0)
    last = x.new_empty(len(sizes.states), _rows(inputs, offsets), *unit)
    tensors = x, _dense(recurrent), _dense(bias), _dense(initial), reset, offsets, states
    strides = *x.stride()[:2], *states.stride()[:3], *(cache.stride()[:2] if kept else (0, 0))
    scalars = *_sizes(inputs, offsets), 0, 0, *_of_reset(reset), *strides
    _run("forward", function, (*tensors, cache if kept else None, last), scalars, options.clips[0])
    return states.to(dtype), last.to(dtype), cache.to(dtype)


def backward(
    recurrent: Tensor,
    states: Tensor,
    initial: Tensor | None,
    cache: Tensor,
    states_grad: Tensor,
    final_grad: Tensor | None,
    options: Options,
    reset: Tensor | None = None,
    offsets: Tensor | None = None,
    wanted: bool = True,
) -> tuple[Tensor, Tensor]:
    """gates_grad (B, T, bias, N, D) and initial_grad (states, rows, N, D), which means nothing unless it
    is ``wanted``."""
    function, dtype = options.function, states.dtype
    known, grad = _with_block(states, 2), _with_block(states_grad, 2)
    kept = _with_block(cache, 3) if cache.numel() else None
    heads, dim = states.shape[3:]
    gates_grad = empty_like_inputs(known[0], (), (SIZES[function].bias, heads, dim))
    initial_grad = known.new_empty(states.shape[0], _rows(states[0], offsets), heads, dim)
    given = _dense(recurrent), _dense(initial), reset, offsets, known, kept, grad
    made = _dense(final_grad), gates_grad, initial_grad if wanted else None
    strides = *known.stride()[:3], *(kept.stride()[:2] if kept is not None else (0, 0))
    strides = *strides, *grad.stride()[:3], *gates_grad.stride()[:2]
    counts = grad.shape[0], int(options.clips.recurrent_cut)
    scalars = *_sizes(states[0], offsets), *counts, *_of_reset(reset), *strides
    _run("backward", function, (*given, *made), scalars, options.clips.recurrent)
    return gates_grad.to(dtype), initial_grad.to(dtype)


def _run(
    direction: str,
    function: Function,
    tensors: Sequence[Tensor | None],
    scalars: Sequence[int],
    clip: float,
) -> None:
    kernel = _cpu.rnn_forward if direction == "forward" else _cpu.rnn_backward
    pointers = tuple(None if each is None else each.data_ptr() for each in tensors)
    kernel(function, pointers, tuple(scalars), clip, torch.get_num_threads())


def _rows(like: Tensor, offsets: Tensor | None) -> int:
    return like.shape[0] if offsets is None else offsets.shape[0] - 1


def _sizes(like: Tensor, offsets: Tensor | None) -> tuple[int, ...]:
    """Of (B, T, …, N, D): batch, time, heads, units, and packed sequences."""
    return *like.shape[:2], *like.shape[-2:], 0 if offsets is None else offsets.shape[0] - 1


def _of_reset(reset: Tensor | None) -> tuple[int, int]:
    return (0, 0) if reset is None else (reset.stride(0), reset.stride(1))


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float().contiguous()


def _with_block(tensor: Tensor, block: int) -> Tensor:
    """In float32, and copied unless its last ``block`` dimensions are without gaps."""
    wide = tensor.float()
    inner = tensor.shape[tensor.dim() - block :]
    step = math.prod(inner)
    for extent, stride in zip(inner, wide.stride()[tensor.dim() - block :], strict=True):
        step //= max(1, extent)
        if extent != 1 and stride != step:
            lead = tensor.dim() - block - 2
            model = wide[(0,) * lead]
            return empty_like_inputs(model, tensor.shape[:lead], tuple(inner)).copy_(wide)
    return wide
