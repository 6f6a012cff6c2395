"""``selective_scan`` by this package's compiled code for the CPU: ``../cpu/selective_scan.c``.

Arguments are as ``normalised`` makes them. The backward pass computes states anew, so that nothing is kept for it but
the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scan_registry.kernels.selective_scan.op.arguments import COMPILED, Arguments, Options
from scan_registry.ops import _cpu
from scan_registry.ops.launching import pointers_of


def takes(arguments: Arguments, options: Options) -> bool:
    """Whether the compiled code computes it: of real numbers, with B and C that change with time."""
    return (
        arguments.u.device.type == "cpu"
        and options.backend == "auto"
        and arguments.u.dtype in COMPILED
        and arguments.u.numel() > 0
        and not arguments.A.is_complex()
        and arguments.B.dim() == arguments.C.dim() == 4
    )


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _run(
    kernel: str,
    arguments: Arguments,
    options: Options,
    strided: Sequence[Tensor | None],
    others: Sequence[Tensor | None],
) -> None:
    """``strided`` are all that have strides, in the kernel's order; ``others`` its pointers after those that both
    directions have."""
    u, _, A, B, C, D, _, bias, initial_state, cu_seqlens = arguments
    # Copies among these live until the kernel has read them.
    dense = [_dense(tensor) for tensor in (A, D, bias, initial_state)]
    pointers = pointers_of([*strided, *dense, cu_seqlens, *others])
    sequences = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    strides = [step for t in strided for step in ((0, 0, 0) if t is None else t.stride())]
    sizes = *u.shape, A.shape[1], B.shape[1], C.shape[1], sequences, int(options.softplus)
    dtype = str(u.dtype).removeprefix("torch.")
    getattr(_cpu, kernel)(dtype, pointers, (*sizes, *strides), torch.get_num_threads())


def forward(arguments: Arguments, options: Options) -> tuple[Tensor, Tensor]:
    """The output and the final state."""
    u, cu_seqlens = arguments.u, arguments.cu_seqlens
    between = () if cu_seqlens is None else (cu_seqlens.shape[0] - 1,)
    out = torch.empty_like(u)
    last = arguments.A.new_empty((u.shape[0], *between, *arguments.A.shape))
    strided = u, arguments.delta, arguments.z, out, arguments.B, arguments.C
    _run("selective_scan_forward", arguments, options, strided, [last])
    return out, last


def backward(
    arguments: Arguments,
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
        else torch.empty_like(arguments.u)
        if name in ("u", "delta", "z")
        else tensor.new_empty(tensor.shape)
        for name, tensor, want in zip(
            Arguments._fields, arguments.differentiable, (True, True, *wanted[2:]), strict=False
        )
    ]
    u_grad, delta_grad, A_grad, B_grad, C_grad, D_grad, z_grad, bias_grad, initial_grad = grads
    strided = (
        arguments.u,
        arguments.delta,
        arguments.z,
        out_grad,
        u_grad,
        delta_grad,
        z_grad,
        arguments.B,
        arguments.C,
    )
    sums = A_grad, D_grad, bias_grad, B_grad, C_grad
    others = _dense(final_grad), initial_grad, *sums
    _run("selective_scan_backward", arguments, options, strided, others)
    return tuple(grad if want else None for grad, want in zip(grads, wanted, strict=True))
