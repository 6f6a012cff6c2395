"""What a state space dual scan poses to the kernels: problems, made of tensors.

Arguments are as ``normalised`` makes them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from scan_registry.base.strides import dense_strides
from scan_registry.hardware.device import device
from scan_registry.kernels.ssd_scan.op import calls
from scan_registry.kernels.ssd_scan.op.arguments import COMPILED, Arguments, Options
from scan_registry.kernels.ssd_scan.problem import (
    DIRECTIONS,
    SIZE,
    STRIDED,
    Direction,
    SSDScanProblem,
)
from scan_registry.ops.operator import SingleCall

#: Steps of the least stretch that time is cut into.
LEAST_STRETCH = 1024
#: States of a head of which an SM has two at once in a forward pass, in 16 bits; with more states, and in float32, it has one.
_FEW_STATES = 128
#: Tensors whose rows kernels move by 16 bytes, and which are copied where these do not lie so.
_WHOLE = ("x", "B", "C", "z", "out_grad")


class KernelCall(SingleCall[SSDScanProblem]):
    """One kernel's part in an operator's call: its problem, and the inputs that are copied first."""


def has_kernels(arguments: Arguments) -> bool:
    """Whether there are kernels for the dtype."""
    return arguments.x.dtype in COMPILED


def whole(tensor: Tensor, address: int) -> bool:
    """Whether its rows along the last dimension lie without gaps and start on 16 bytes; ``address`` is where it starts."""
    size = tensor.element_size()
    others = zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
    starts = [address, *(stride * size for stride, count in others if count > 1)]
    return tensor.stride(-1) == 1 and not any(start % 16 for start in starts)


def copied(arguments: Arguments, out_grad: Tensor | None = None) -> tuple[str, ...]:
    """The tensors that kernels take copies of."""
    named = {**arguments._asdict(), "out_grad": out_grad}
    return tuple(
        name
        for name in _WHOLE
        if (t := named[name]) is not None and not whole(t, 0 if t.is_meta else t.data_ptr())
    )


def _strides(tensor: Tensor, copied: bool) -> tuple[int, ...]:
    """Of the first three dimensions; where there is one row at most, what they would be without gaps."""
    dense = dense_strides(tensor.shape, range(tensor.dim()))
    if copied:
        return dense[:3]
    triples = zip(tensor.stride(), dense, tensor.shape, strict=True)
    return tuple(stride if size > 1 else step for stride, step, size in triples)[:3]


def make_problem(
    direction: Direction,
    arguments: Arguments,
    options: Options,
    out_grad: Tensor | None = None,
    copies: tuple[str, ...] = (),
) -> SSDScanProblem:
    """What the arguments pose to one kernel."""
    x, cu_seqlens = arguments.x, arguments.cu_seqlens
    tensors: Mapping[str, Tensor | None] = {**arguments._asdict(), "grad": out_grad}
    strides: list[int] = []
    for name in STRIDED[direction]:
        tensor = tensors[name]
        if tensor is None:
            assert name == "z"
            strides += 0, 0, 0
            continue
        strides += _strides(tensor, ("out_grad" if name == "grad" else name) in copies)
    D = arguments.D
    return calls.make_problem(
        direction,
        str(x.dtype).removeprefix("torch."),
        tuple(x.shape),
        tuple(arguments.B.shape),
        strides,
        softplus=options.softplus,
        limits=(options.low, options.high),
        has_z=arguments.z is not None,
        wide_dt=arguments.dt.dtype.itemsize > 2,
        wide_D=D is not None and D.dim() == 2,
        sequences=0 if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        gpu=device(x.device.index) if x.is_cuda else None,
    )


def stretches(arguments: Arguments) -> int:
    """Stretches of time that a forward pass of few heads runs at the same time, so that it fills the GPU; 1 for others, and where
    sequences begin within a row."""
    x = arguments.x
    batch, time, heads, size = x.shape
    if arguments.cu_seqlens is not None or arguments.seq_idx is not None or time >= 2**30:
        return 1
    sms = device(x.device.index).sm_count if x.is_cuda else calls.USUAL_SMS
    tiles = batch * heads * -(-size // SIZE)
    two = x.dtype != torch.float32 and arguments.B.shape[3] <= _FEW_STATES
    return max(1, min((2 if two else 1) * sms // tiles, time // LEAST_STRETCH))


def describe(arguments: Arguments, options: Options, differentiated: bool) -> dict[str, KernelCall]:
    """The problems of a call by direction, where the output's gradient lies as the output; those of derivatives only if it
    is ``differentiated``."""
    out_grad = torch.empty(arguments.x.shape, dtype=arguments.x.dtype, device="meta")
    copies = copied(arguments)
    backward: tuple[Direction, ...] = DIRECTIONS[1:]
    return {
        direction: KernelCall(
            make_problem(direction, arguments, options, out_grad, copies),
            tuple(name for name in copies if name in STRIDED[direction]),
        )
        for direction in ("forward", *(backward if differentiated else ()))
    }
