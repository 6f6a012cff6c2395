"""``gated_scan`` by this package's compiled code for the CPU: ``../cpu/gated_scan.c``.

It computes the kinds that have a header in ``../cpu/kinds``, of all dtypes but float64, with all options. What it does not take
is left to the module ``composed``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from scan_registry.kernels.gated_scan.kinds import KINDS
from scan_registry.kernels.gated_scan.op.arguments import COMPILED, Arguments, Options
from scan_registry.kernels.linear_scan.op.problems import StateLayout
from scan_registry.ops import _cpu
from scan_registry.ops.launching import pointers_of

#: The most inputs of a kind, as the compiled code has it.
_INPUTS = 4
_kinds: Callable[[], Any] = _cpu.gated_scan_kinds
#: The kinds that it computes, by the names of their headers.
HEADERS: tuple[str, ...] = _kinds()


def takes(arguments: Arguments, options: Options) -> bool:
    """Whether the compiled code computes it."""
    first = arguments.inputs[0]
    return (
        first.device.type == "cpu"
        and options.backend == "auto"
        and first.dtype in COMPILED
        and first.numel() > 0
        and KINDS[options.kind].source in HEADERS
    )


def plan_forward(arguments: Arguments, options: Options) -> Callable[..., Any]:
    """The plan of a forward pass: a function of ``Arguments.flat``."""
    layout = StateLayout.of(arguments.inputs[0], options.dim, arguments.cu_seqlens)
    count, end = _counts(options)
    run = _Runner("gated_scan_forward", arguments, options)

    def plan(*flat: Any) -> tuple[Tensor, Tensor | None]:
        initial_state, reset, cu_seqlens = flat[end:]
        states = torch.empty_like(flat[0])
        final_state = layout.leaving(initial_state) if options.final else None
        strided = *_padded(flat[:count]), states, initial_state, final_state
        run(strided, flat[count:end], reset, cu_seqlens)
        return states, final_state

    return plan


def plan_backward(
    arguments: Arguments, options: Options, wanted: Sequence[bool]
) -> Callable[..., Any]:
    """The plan of a backward pass: a function of ``Arguments.flat``, the states, their gradient and the final state's."""
    layout = StateLayout.of(arguments.inputs[0], options.dim, arguments.cu_seqlens)
    count, end = _counts(options)
    run = _Runner("gated_scan_backward", arguments, options)
    for_initial = wanted[-1] and arguments.initial_state is not None

    def plan(*args: Any) -> tuple[Tensor | None, ...]:
        initial_state, reset, cu_seqlens, states, states_grad, final_grad = args[end:]
        grads = [
            torch.empty_like(x) if want else None
            for x, want in zip(args[:count], wanted, strict=False)
        ]
        initial_grad = layout.leaving(final_grad) if for_initial else None
        sums = None
        if any(wanted[count:end]):
            sums = torch.empty((end - count, *args[count].shape), dtype=torch.float32)
        strided = (
            *_padded(args[:count]),
            *(states, states_grad),
            *_padded(grads),
            *(initial_state, final_grad, initial_grad),
        )
        run(strided, args[count:end], reset, cu_seqlens, sums)
        of_parameters = [
            None if sums is None or not wanted[count + n] else sums[n] for n in range(end - count)
        ]
        return *grads, *of_parameters, initial_grad

    return plan


def _counts(options: Options) -> tuple[int, int]:
    """How many inputs the kind has, and how many inputs and parameters."""
    kind = KINDS[options.kind]
    return len(kind.inputs), len(kind.inputs) + len(kind.parameters)


def _padded(tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return *tensors, *[None] * (_INPUTS - len(tensors))


class _Runner:
    """Runs one of the functions on tensors of the shapes that its arguments have."""

    def __init__(self, function: str, arguments: Arguments, options: Options) -> None:
        first, cu_seqlens = arguments.inputs[0], arguments.cu_seqlens
        kind, dim = KINDS[options.kind], options.dim
        sizes = first.shape[0], first.shape[-1 if dim == -2 else -2], first.shape[dim]
        sequences = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self._function = getattr(_cpu, function)
        self._kind, self._dtype = kind.source, str(first.dtype).removeprefix("torch.")
        self._sizes = *sizes, sequences
        self._flags = int(options.reverse) + 2 * int(kind.option)
        self._channel_last = dim == -2

    def __call__(
        self,
        strided: Sequence[Tensor | None],
        parameters: Sequence[Tensor],
        reset: Tensor | None,
        cu_seqlens: Tensor | None,
        *sums: Tensor | None,
    ) -> None:
        # Copies among these live until the function has read them.
        values = None
        if parameters:
            values = torch.stack([*parameters])
        restarts = None if reset is None else reset.contiguous()
        reset_batch = 0 if restarts is None else restarts.stride(0)
        strides = [step for t in strided for step in self._strides(t)]
        pointers = pointers_of([*strided, values, restarts, cu_seqlens, *sums])
        scalars = (*self._sizes, reset_batch, self._flags, *strides)
        self._function(self._kind, self._dtype, pointers, scalars, torch.get_num_threads())

    def _strides(self, tensor: Tensor | None) -> tuple[int, ...]:
        """Of batch, channel and time, or sequence."""
        if tensor is None:
            return 0, 0, 0
        strides = tensor.stride()
        if len(strides) == 2:
            return *strides, 0
        batch, one, other = strides
        return (batch, other, one) if self._channel_last else strides
