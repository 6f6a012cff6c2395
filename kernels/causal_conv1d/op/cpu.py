"""``causal_conv1d`` by this package's compiled code for the CPU: ``../cpu/causal_conv1d.c``.

Arguments are as ``normalised`` makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from scan_registry.kernels.causal_conv1d import reference
from scan_registry.kernels.causal_conv1d.op.arguments import (
    COMPILED,
    Arguments,
    Options,
    UpdateArguments,
    UpdateOptions,
)
from scan_registry.kernels.causal_conv1d.problem import ConvProblem, UpdateProblem
from scan_registry.kernels.causal_conv1d.reference import UpdateRows
from scan_registry.ops import _cpu
from scan_registry.ops.launching import pointers_of

#: What a call does to its tensors; None where the compiled code does not compute it.
Plan = Callable[..., Any] | None


def takes(x: Tensor, options: Options | UpdateOptions) -> bool:
    """Whether the compiled code computes it."""
    here = x.device.type == "cpu" and options.backend == "auto"
    return here and x.dtype in COMPILED and x.numel() > 0


def plan_forward(x: Tensor, options: Options) -> Plan:
    """Of the arguments' tensors."""
    if not takes(x, options):
        return None
    return lambda *tensors: forward(Arguments(*tensors), options)


def plan_backward(x: Tensor, options: Options, wanted: Sequence[bool]) -> Plan:
    """Of the arguments' tensors and the gradients of y and the final state."""
    if not takes(x, options):
        return None
    return lambda *tensors: backward(
        Arguments(*tensors[:6]), tensors[6], tensors[7], options, wanted
    )


def plan_update(arguments: UpdateArguments, options: UpdateOptions) -> Plan:
    """Of the update's tensors. Packed sequences, drafts and rows to write to are left to plain torch."""
    beyond = any(tensor is not None for tensor in arguments[6:]) or options.pad_slot_id >= 0
    if beyond or not takes(arguments.x, options):
        return None
    return lambda *tensors: update(UpdateArguments(*tensors), options)


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _run(
    kernel: str,
    like: tuple[Tensor, Tensor],
    tensors: Sequence[Tensor | None],
    sizes: Sequence[int],
    strided: Sequence[Tensor],
) -> None:
    """Call ``kernel``. ``like`` are x and the weight, which give the dtypes. ``tensors`` are the kernel's pointers.
    The strides of those in ``strided`` are passed too."""
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in like]
    pointers = pointers_of(tensors)
    scalars = tuple(map(int, (*sizes, *(n for tensor in strided for n in tensor.stride()))))
    getattr(_cpu, kernel)(*dtypes, pointers, scalars, torch.get_num_threads())


def _sizes(arguments: Arguments, options: Options) -> tuple[int, ...]:
    cu_seqlens = arguments.cu_seqlens
    sequences = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return *arguments.x.shape, arguments.weight.shape[1], sequences, int(options.silu)


def forward(arguments: Arguments, options: Options) -> tuple[Tensor, Tensor | None]:
    """y, and the final state if it is asked for."""
    x, weight, bias, state, seq_idx, cu_seqlens = arguments
    y = torch.empty_like(x)
    final_state = x.new_empty(arguments.state_shape) if options.final else None
    inputs = weight.contiguous(), _dense(bias), _dense(state), seq_idx, cu_seqlens
    sizes = _sizes(arguments, options)
    _run("causal_conv1d_forward", (x, weight), (x, y, *inputs, final_state), sizes, (x, y))
    return y, final_state


def backward(
    arguments: Arguments,
    y_grad: Tensor,
    final_grad: Tensor | None,
    options: Options,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients that are wanted, in the dtypes of what they are of."""
    x, weight, bias, state, seq_idx, cu_seqlens = arguments
    of_x, of_weight, of_bias, of_state = wanted
    x_grad = torch.empty_like(x)
    weight_grad = weight.new_empty(weight.shape) if of_weight else None
    bias_grad = weight.new_empty(weight.shape[0]) if of_bias else None
    state_grad = x.new_empty(arguments.state_shape) if of_state else None
    inputs = weight.contiguous(), _dense(bias), _dense(state), seq_idx, cu_seqlens
    outputs = x_grad, _dense(final_grad), weight_grad, bias_grad, state_grad
    sizes, strided = _sizes(arguments, options), (x, y_grad, x_grad)
    _run("causal_conv1d_backward", (x, weight), (x, y_grad, *inputs, *outputs), sizes, strided)
    return x_grad if of_x else None, weight_grad, bias_grad, state_grad


def update(arguments: UpdateArguments, options: UpdateOptions) -> Tensor:
    """y; the state is changed in place."""
    x, state, weight, bias, positions, indices = arguments[:6]
    y = torch.empty_like(x)
    tensors = x, state, y, weight.contiguous(), _dense(bias), positions, indices
    sizes = *x.shape, weight.shape[1], state.shape[0], state.shape[2], int(options.silu)
    _run("causal_conv1d_update", (x, weight), tensors, sizes, (x, state, y))
    return y


def run(problem: ConvProblem | UpdateProblem, tensors: Mapping[str, Tensor | None]) -> None:
    """Do what the kernel for a problem does, on its tensors; all of a partial sum goes to its first piece."""

    def of(*names: str) -> list[Any]:
        return [tensors.get(name) for name in names]

    like: Any = of("x", "weight")
    inputs = of("weight", "bias", "initial_state", "seq_idx", "cu_seqlens")
    sizes = problem.batch, problem.channels, problem.time, problem.width
    if isinstance(problem, UpdateProblem):
        strided = of("x", "state", "y")
        numbers = of(*UpdateRows._fields[:-1])
        if any(tensor is not None for tensor in numbers[2:]):
            (x, state, y), (weight, bias) = strided, of("weight", "bias")
            rows = UpdateRows._make([*numbers, problem.pad_slot_id])
            y.copy_(reference.update(x, state, weight, bias, rows, problem.silu))
            return
        pointers = [*strided, *of("weight", "bias", "positions", "indices")]
        of_state = problem.slots, problem.length, problem.silu
        _run("causal_conv1d_update", like, pointers, (*sizes, *of_state), strided)
        return
    counts = *sizes, problem.sequences, problem.silu
    if problem.direction == "forward":
        pointers = [*of("x", "y"), *inputs, *of("final_state")]
        _run("causal_conv1d_forward", like, pointers, counts, of("x", "y"))
        return
    weight, partials = of("weight", "partials")
    sums = torch.empty_like(weight), weight.new_empty(problem.channels)
    outputs = *of("x_grad", "final_state_grad"), *sums, *of("initial_state_grad")
    strided = of("x", "y_grad", "x_grad")
    _run("causal_conv1d_backward", like, [*strided[:2], *inputs, *outputs], counts, strided)
    partials.zero_()
    partials[0, :-1], partials[0, -1] = sums[0].flip(1).T, sums[1]
