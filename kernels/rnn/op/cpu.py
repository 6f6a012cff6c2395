"""``rnn`` by this package's compiled code for the CPU: ``../cpu/rnn.c``.

It computes in float32: bfloat16 and float16 are converted before and after. Arguments are as
``normalised`` makes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scan_registry.kernels.rnn.op.arguments import COMPILED, Options
from scan_registry.kernels.rnn.op.layout import empty_like_inputs
from scan_registry.kernels.rnn.problem import SIZES, Function
from scan_registry.ops import _cpu
from scan_registry.ops.launching import pointers_of


def takes(tensor: Tensor, backend: str) -> bool:
    """Whether the compiled code runs for inputs like this tensor."""
    return tensor.device.type == "cpu" and backend == "auto" and tensor.dtype in COMPILED


def forward(
    tensors: Sequence[Any], options: Options, training: bool, offsets: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """States (states, B, T, N, D), those after the last step (states, rows, N, D), and with ``training``
    the cache (B, T, cache, N, D).

    ``tensors`` are inputs, recurrent, bias and initial; ``reset`` and ``reset_states`` may follow. Where
    ``reset``, (B, T), bool, is True, the states before the step are replaced by ``reset_states``
    (states, rows, N, D), or by zeros. ``offsets``, int64, are the bounds of sequences packed along time;
    each sequence is a row.
    """
    inputs, recurrent, bias, initial, reset, anew = _padded(tensors, 6)
    function, dtype = options.function, inputs.dtype
    sizes, unit = SIZES[function], tuple(inputs.shape[3:])
    x = _with_block(inputs, 3)
    # Strides follow ``inputs``, not ``x``: converting expanded inputs to float32 makes them dense.
    states = empty_like_inputs(inputs, (len(sizes.states),), unit, x.dtype)
    kept = len(sizes.cache) if training else 0
    cache = empty_like_inputs(inputs, (), (kept, *unit), x.dtype) if kept else x.new_empty(0)
    last = x.new_empty(len(sizes.states), _rows(inputs, offsets), *unit)
    arguments = x, _dense(recurrent), _dense(bias), _dense(initial), reset, _dense(anew), offsets
    strides = *x.stride()[:2], *states.stride()[:3], *(cache.stride()[:2] if kept else (0, 0))
    scalars = *_sizes(inputs, offsets), 0, 0, *_of_reset(reset), *strides
    pointed = *arguments, states, cache if kept else None, last
    _run("forward", function, pointed, scalars, options.clips.forward)
    return states.to(dtype), last.to(dtype), cache.to(dtype)


def backward(
    tensors: Sequence[Any], options: Options, offsets: Tensor | None = None
) -> tuple[Tensor, ...]:
    """gates_grad (B, T, bias, N, D), initial_grad (states, rows, N, D), and the gradient of
    ``reset_states`` if they are given. ``tensors`` are recurrent, states, initial, cache, states_grad and
    final_grad; ``reset`` and ``reset_states`` may follow, as in ``forward``."""
    recurrent, states, initial, cache, states_grad, final_grad, *more = tensors
    reset, anew = _padded(more, 2)
    function, dtype = options.function, states.dtype
    known, grad = _with_block(states, 2), _with_block(states_grad, 2)
    kept = _with_block(cache, 3) if cache.numel() else None
    heads, dim = states.shape[3:]
    gates_grad = empty_like_inputs(states[0], (), (SIZES[function].bias, heads, dim), known.dtype)
    of_states = [known.new_empty(states.shape[0], _rows(states[0], offsets), heads, dim)]
    if anew is not None:
        of_states.append(torch.zeros_like(of_states[0]))
    arguments = _dense(recurrent), known, _dense(initial), kept, grad, _dense(final_grad)
    outputs = gates_grad, *of_states, *([None] if anew is None else [])
    strides = *known.stride()[:3], *(kept.stride()[:2] if kept is not None else (0, 0))
    strides = *strides, *grad.stride()[:3], *gates_grad.stride()[:2]
    counts = grad.shape[0], int(options.clips.recurrent_cut)
    scalars = *_sizes(states[0], offsets), *counts, *_of_reset(reset), *strides
    pointed = *arguments, reset, _dense(anew), offsets, *outputs
    _run("backward", function, pointed, scalars, options.clips.recurrent)
    return gates_grad.to(dtype), *(gradient.to(dtype) for gradient in of_states)


def _padded(tensors: Sequence[Any], count: int) -> tuple[Any, ...]:
    """``count`` tensors: those given, then None."""
    return *tensors, *[None] * (count - len(tensors))


def _run(
    direction: str,
    function: Function,
    tensors: Sequence[Tensor | None],
    scalars: Sequence[int],
    clip: float,
) -> None:
    kernel = _cpu.rnn_forward if direction == "forward" else _cpu.rnn_backward
    pointers = pointers_of(tensors)
    kernel(function, pointers, tuple(scalars), clip, torch.get_num_threads())


def _rows(like: Tensor, offsets: Tensor | None) -> int:
    return like.shape[0] if offsets is None else offsets.shape[0] - 1


def _sizes(like: Tensor, offsets: Tensor | None) -> tuple[int, ...]:
    """Batch, time, heads and units of a tensor (B, T, …, N, D), and the number of packed sequences, or
    0."""
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
