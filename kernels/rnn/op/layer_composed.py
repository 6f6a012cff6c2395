"""One layer of a recurrent network from its inputs and torch.nn's parameters, composed of ``rnn`` and torch's operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from scan_registry.kernels.rnn import problem as rnn_problem
from scan_registry.kernels.rnn import reference
from scan_registry.kernels.rnn.op.function import rnn
from scan_registry.kernels.rnn.problem import SIZES, RnnBackend

#: h (T, B, H) at every step, and the states (1, B, H) after the last one.
Result = tuple[Tensor, list[Tensor]]


class Cell(NamedTuple):
    """What a layer computes, beside its tensors."""

    function: rnn_problem.Function
    backend: RnnBackend
    heads: int


def composed(
    cell: Cell, x: Tensor, w: Tensor, r: Tensor, b: Any, c: Any, reset: Any, *states: Tensor
) -> Result:
    """The layer of x (T, B, I), composed of ``rnn`` and torch's operators. ``w`` (gates · H, I) and ``r`` (gates · H, D) are
    torch.nn's weights, and ``b`` and ``c`` their biases or None. ``reset`` (B, T) is where states start anew from zeros, or
    None. ``states`` are those before the first step, (1, B, H) each; none stands for zeros."""
    sizes, (time, batch, _) = SIZES[cell.function], x.shape
    dim = r.shape[1]
    unit = cell.heads, dim
    inputs = linear(x.contiguous(), w, b).view(time, batch, sizes.inputs, *unit).transpose(0, 1)
    recurrent, bias = _for_kernels(cell.function, r.view(sizes.recurrent, *unit, dim), c, unit)
    start = torch.stack([s.view(batch, 1, *unit) for s in states]) if states else None
    how: dict[str, Any] = {"reset": reset, "function": cell.function, "backend": cell.backend}
    every, last = rnn(inputs, recurrent, bias, start, **how)
    h = every[0].transpose(0, 1).reshape(time, batch, -1)
    return h, [state.reshape(1, batch, -1) for state in last]


def composed_backward(
    cell: Cell, flat: Sequence[Any], grads: Sequence[Tensor | None], wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients that are wanted, of the arguments of ``composed``, from the gradients of its results. All is computed
    step by step, in operators that torch can differentiate and vmap."""
    x, w, r, b, c, reset, *states = flat
    function, of, (time, batch, _) = cell.function, SIZES[cell.function], x.shape
    dim, width = r.shape[1], cell.heads * r.shape[1]
    unit = cell.heads, dim
    inputs = linear(x, w, b).view(time, batch, of.inputs, *unit).transpose(0, 1)
    recurrent, bias = _for_kernels(function, r.view(of.recurrent, *unit, dim), c, unit)
    start = torch.stack([s.view(batch, *unit) for s in states]) if states else None
    every, cache = reference.forward(function, inputs, recurrent, bias, start, reset=reset)
    model = next(g for g in grads if g is not None)

    def heads(grad: Tensor | None, steps: int) -> Tensor:
        grad = torch.zeros_like(model[:1]).expand(steps, -1, -1) if grad is None else grad
        return grad.reshape(steps, batch, *unit)

    zeros = torch.zeros_like(heads(grads[0], time))
    along = [heads(grads[0], time), *[zeros] * (len(of.states) - 1)]
    ends = torch.stack([heads(end, 1)[0] for end in grads[1:]])
    gates, initial = reference.backward(
        *(function, recurrent, every, start, cache, torch.stack(along).transpose(1, 2), ends),
        reset=reset,
    )
    of_inputs, of_recurrent, of_bias = reference.parameter_grads(
        function, gates, every, start, reset=reset
    )
    assert of_recurrent is not None
    assert of_bias is not None
    rows = of_inputs.transpose(0, 1).reshape(time * batch, of.inputs * width)
    if function == "gru":
        of_recurrent = of_recurrent.roll(-1, 0)
    of_hidden = of_bias[[1, 2, 0]] if function == "gru" else of_bias
    grads = (
        torch.mm(rows, w).view(x.shape),
        torch.mm(rows.t(), x.reshape(time * batch, -1)),
        of_recurrent.reshape(r.shape),
        rows.sum(0),
        of_hidden.reshape(-1).to(r.dtype),
        None,
        *(of_state.reshape(1, batch, width) for of_state in initial),
    )
    return tuple(grad if want else None for grad, want in zip(grads, wanted, strict=True))


def _for_kernels(
    function: rnn_problem.Function, recurrent: Tensor, c: Any, unit: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """R (gates, N, D, D) and the bias (gates, N, D) from torch.nn's parameters. The gates of torch.nn's GRU are r, z, n;
    those of R are n, r, z here. The inputs' bias is in the inputs already."""
    dtype = reference.compute_dtype(recurrent.dtype)
    bias = None if c is None else c.view(-1, *unit).to(dtype)
    if function == "gru":
        recurrent = recurrent.roll(1, 0)
        if bias is not None:
            bias = torch.cat([bias[2:], bias[:2], torch.zeros_like(bias[:1])])
    if bias is None:
        bias = recurrent.new_zeros(SIZES[function].bias, *unit, dtype=dtype)
    return recurrent, bias
