"""What a state space dual scan poses to the kernels: problems, made of tensors.

Arguments are as ``normalised`` makes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from scan_registry.base.frozen import dataclass
from scan_registry.base.strides import dense_strides
from scan_registry.dispatch.select import Backend
from scan_registry.hardware.device import Device, device
from scan_registry.kernels.model import Problem
from scan_registry.kernels.ssd_scan.op.arguments import COMPILED, Arguments, Options
from scan_registry.kernels.ssd_scan.problem import (
    BLOCK,
    DIRECTIONS,
    SIZE,
    SMALL_BLOCK,
    STRIDED,
    Direction,
    SSDScanProblem,
    most_heads,
)

#: Of a GPU that is not there: as many as an H100 has.
_USUAL_SMS = 132
#: CTAs of a forward pass that an SM runs at once; steps of the least stretch that time is cut into; and the fewest stretches, as
#: each step is then multiplied with B twice.
_FORWARD_CTAS, LEAST_STRETCH, _FEWEST_STRETCHES = 2, 1024, 3
#: CTAs of the backward pass that each SM is to get.
_CTAS_OF_SM = 4
#: Bytes of shared memory that a CTA of the backward pass wants for large blocks of states, with one stage.
_SHARED_OF_BLOCK = 130_048
#: Tensors whose rows kernels move by 16 bytes, and which are copied where these do not lie so.
_WHOLE = ("x", "B", "C", "z", "out_grad")


@dataclass(frozen=True)
class KernelCall:
    """One kernel's part in an operator's call: its problem, and the inputs that are copied first."""

    problem: SSDScanProblem
    copied: tuple[str, ...] = ()

    def alternatives(self, backend: Backend) -> tuple[tuple[Problem, Backend], ...]:
        """The problem alone."""
        return ((self.problem, backend),)

    def fused(self) -> None:
        """No kernel of this family does what another one does, too."""


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
    batch, time, heads, size = x.shape
    tensors: Mapping[str, Tensor | None] = {**arguments._asdict(), "grad": out_grad}
    strides: list[int] = []
    for name in STRIDED[direction]:
        tensor = tensors[name]
        if tensor is None:
            assert name == "z"
            strides += 0, 0, 0
            continue
        strides += _strides(tensor, ("out_grad" if name == "grad" else name) in copies)
    problem = SSDScanProblem(
        direction=direction,
        dtype=str(x.dtype).removeprefix("torch."),
        batch=batch,
        time=time,
        heads=heads,
        groups=arguments.B.shape[2],
        head_size=size,
        state_size=arguments.B.shape[3],
        strides=tuple(strides),
        has_z=direction == "forward" and arguments.z is not None,
        softplus=options.softplus,
        wide_dt=arguments.dt.dtype.itemsize > 2,
        wide_D=arguments.D is not None and arguments.D.dim() == 2,
        low=options.low,
        high=options.high,
        sequences=0 if cu_seqlens is None else cu_seqlens.shape[0] - 1,
    )
    if direction != "backward":
        return problem
    return cut(problem, device(x.device.index) if x.is_cuda else None)


def cut(problem: SSDScanProblem, gpu: Device | None) -> SSDScanProblem:
    """The problem of the backward pass with what its CTAs work on: a block of states at a time, as large as shared memory has room
    for; and splits of a group's heads, so many that CTAs fill the GPU evenly. None: a GPU that nothing is known of."""
    sms, shared = _USUAL_SMS, _SHARED_OF_BLOCK
    if gpu is not None:
        sms, shared = gpu.sm_count, gpu.shared_memory_per_block
    large = problem.state_size > SMALL_BLOCK and shared >= _SHARED_OF_BLOCK
    large = large and problem.dtype != "float32"
    ctas, heads = problem.batch * problem.slots * problem.groups, problem.group_heads
    splits = max(-(-heads // most_heads(problem.dtype)), min(heads, -(-_CTAS_OF_SM * sms // ctas)))
    return replace(
        problem, splits=-(-heads // -(-heads // splits)), block=BLOCK if large else SMALL_BLOCK
    )


def stretches(arguments: Arguments) -> int:
    """Stretches of time that a forward pass of few heads runs at the same time, so that it fills the GPU; 1 for others, and where
    sequences begin within a row."""
    x = arguments.x
    batch, time, heads, size = x.shape
    if arguments.cu_seqlens is not None or arguments.seq_idx is not None or time >= 2**30:
        return 1
    sms = device(x.device.index).sm_count if x.is_cuda else _USUAL_SMS
    ctas = batch * heads * -(-size // SIZE)
    count = min(_FORWARD_CTAS * sms // ctas, time // LEAST_STRETCH)
    return count if count >= _FEWEST_STRETCHES else 1


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
