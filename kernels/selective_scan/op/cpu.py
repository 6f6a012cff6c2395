"""``selective_scan`` by this package's compiled code for the CPU: ``../cpu/selective_scan.c``.

Arguments are as ``normalised`` makes them. The backward pass computes states anew, so that nothing is kept for it but
the inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from scan_registry.kernels.selective_scan.op.arguments import COMPILED, Arguments, Options
from scan_registry.ops import _cpu


def takes(given: Arguments, options: Options) -> bool:
    """Whether the compiled code computes it: of real numbers, with B and C that change with time."""
    return (
        given.u.device.type == "cpu"
        and options.backend == "auto"
        and given.u.dtype in COMPILED
        and given.u.numel() > 0
        and not given.A.is_complex()
        and given.B.dim() == given.C.dim() == 4
    )


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _addresses(tensors: Sequence[Tensor | None]) -> tuple[int | None, ...]:
    return tuple(None if each is None else each.data_ptr() for each in tensors)


def _scalars(given: Arguments, options: Options, strided: Sequence[Tensor | None]) -> Iterator[int]:
    yield from given.u.shape
    yield given.A.shape[1]
    yield from (given.B.shape[1], given.C.shape[1])
    yield 0 if given.cu_seqlens is None else given.cu_seqlens.shape[0] - 1
    yield int(options.softplus)
    for tensor in strided:
        yield from (0, 0, 0) if tensor is None else tensor.stride()


def _run(
    kernel: str,
    given: Arguments,
    options: Options,
    strided: Sequence[Tensor | None],
    others: Sequence[Tensor | None],
) -> None:
    """``strided`` are all that have strides, in the kernel's order; ``others`` its pointers after those that both
    directions have."""
    inputs = [_dense(t) for t in (given.A, given.D, given.delta_bias, given.initial_state)]
    pointers = _addresses([*strided, *inputs, given.cu_seqlens, *others])
    scalars = tuple(_scalars(given, options, strided))
    dtype = str(given.u.dtype).removeprefix("torch.")
    getattr(_cpu, kernel)(dtype, pointers, scalars, torch.get_num_threads())


def forward(given: Arguments, options: Options) -> tuple[Tensor, Tensor]:
    """The output and the final state."""
    u, bounds = given.u, given.cu_seqlens
    between = () if bounds is None else (bounds.shape[0] - 1,)
    out = torch.empty_like(u)
    last = given.A.new_empty((u.shape[0], *between, *given.A.shape))
    strided = u, given.delta, given.z, out, given.B, given.C
    _run("selective_scan_forward", given, options, strided, [last])
    return out, last


def backward(
    given: Arguments,
    out_grad: Tensor,
    final_grad: Tensor | None,
    options: Options,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients that are wanted, of all arguments but the bounds, each in its own dtype. Those of sequences have the
    strides of ``empty_like(u)``, others are contiguous."""
    grads = [
        None
        if tensor is None or not want
        else torch.empty_like(given.u)
        if name in ("u", "delta", "z")
        else tensor.new_empty(tensor.shape)
        for name, tensor, want in zip(
            Arguments._fields, given.differentiable, (True, True, *wanted[2:]), strict=False
        )
    ]
    u_grad, delta_grad, A_grad, B_grad, C_grad, D_grad, z_grad, bias_grad, initial_grad = grads
    strided = given.u, given.delta, given.z, out_grad, u_grad, delta_grad, z_grad, given.B, given.C
    sums = A_grad, D_grad, bias_grad, B_grad, C_grad
    others = _dense(final_grad), initial_grad, *sums
    _run("selective_scan_backward", given, options, strided, others)
    return tuple(grad if want else None for grad, want in zip(grads, wanted, strict=True))
