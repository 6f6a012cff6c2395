"""``selective_scan``: the state space model of Mamba, whose step sizes, inputs and outputs depend on time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from scan_registry.dispatch.select import Backend
from scan_registry.kernels.selective_scan.op import autograd as selective_scan_derivatives
from scan_registry.kernels.selective_scan.op import problems as selective_scan_problems
from scan_registry.kernels.selective_scan.op.arguments import BACKENDS, Options, normalised
from scan_registry.kernels.selective_scan.op.autograd import fast_scan
from scan_registry.kernels.selective_scan.op.problems import KernelCall
from scan_registry.ops.call import unwatched
from scan_registry.ops.checks import as_bool
from scan_registry.ops.operator import describes
from scan_registry.ops.pools import StateRows, refuse_checkpoints, scan_rows, stand_in, timed
from scan_registry.ops.sharded import call_sharded

_is_compiling = torch.compiler.is_dynamo_compiling

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    class SelectiveScanOptions(TypedDict, total=False):
        """What ``selective_scan`` takes by name alone, beside ``return_final_state``."""

        cu_seqlens: Tensor | None
        backend: Backend


__all__ = ["BACKENDS", "describe", "selective_scan"]


# fmt: off
@overload
def selective_scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
    initial_state: Tensor | StateRows | None = None, *,
    return_final_state: Literal[False] = False, **options: Unpack[SelectiveScanOptions],
) -> Tensor: ...
@overload
def selective_scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
    initial_state: Tensor | StateRows | None = None, *,
    return_final_state: Literal[True], **options: Unpack[SelectiveScanOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def selective_scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
    initial_state: Tensor | StateRows | None = None, *,
    return_final_state: bool, **options: Unpack[SelectiveScanOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
# fmt: on


def selective_scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
    initial_state: Tensor | StateRows | None = None, *, cu_seqlens: Tensor | None = None,
    return_final_state: bool = False, backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """The output of a selective scan; with ``return_final_state`` also the state after the last step.

    With δ = delta + delta_bias, or its softplus (the identity above 20), for each of Dm channels and N states:

        h[t] = exp(δ[t]·A)·h[t-1] + δ[t]·B[t]·u[t]
        y[t] = Σ_n C[t]·h[t] + D·u[t]               (of complex numbers twice the sum's real part)
        out  = y, or y·silu(z)

    Args:
        u: (batch, Dm, L), of any strides. Where channels or time lie without gaps, on 16 bytes, the kernels are the
            fastest. float32, bfloat16, float16 or float64.
        delta: like ``u``.
        A: (Dm, N), float32 or complex64; N up to 256. An entry need not be negative, but then states grow and may be
            infinite.
        B: (batch, G, N, L), where group g has Dm / G channels from g·Dm / G on, or (batch, N, L), or (Dm, N) if it
            does not change with time. If ``A`` is complex, (batch, G, N, 2·L), pairs of real and imaginary parts, or complex64
            (Dm, N).
        C: of the shapes that ``B`` may have; it need not have the shape of ``B``.
        D: (Dm,), or None for zeros.
        z: like ``u``, or None for no gate.
        delta_bias: (Dm,), or None for zeros.
        delta_softplus: whether step sizes are the softplus of ``delta + delta_bias``.
        initial_state: (batch, Dm, N), or None for zeros; with ``cu_seqlens`` (batch, sequences, Dm, N). Or ``StateRows``, rows
            (Dm, N) of a pool, which final states are written to; with ``cu_seqlens`` the batch is 1 then.
        cu_seqlens: (sequences + 1,), bounds of sequences that are packed along time, from 0 to L; each starts anew.
        return_final_state: whether to return the state after the last step, or after each sequence, too.
        backend: ``"auto"`` takes the best that this GPU has; ``"cuda"`` a kernel; ``"reference"`` is plain torch.

    Returns:
        The output, (batch, Dm, L), in the dtype of ``u``; and the final state, in the shape of ``initial_state`` and
        in float32 or complex64. Differentiable in all tensors, any number of times and in both modes. The forward pass
        and the first derivative are kernels, which keep no states but one in a few dozen steps. Complex A, B or C that
        do not change with time, float64, further derivatives and ``torch.func`` are composed of ``linear_scan`` and
        torch's operators, some steps of all channels at a time. Results are the same in every run, but of
        compositions on a GPU only as far as ``linear_scan``'s are.

    Raises:
        TypeError: an argument is not a tensor, or a dtype is not supported or does not mix.
        ValueError: a shape is not as described, devices differ, or ``backend`` has no kernel for such arguments.
        NoKernelError: ``require``, ``SCAN_REGISTRY_REQUIRE`` or ``backend`` allows nothing that runs
            on this GPU; the message lists what there is.
        DriverError: the driver failed; the message names the kernel, its variant and the launch.

    Warns:
        FallbackWarning: once per kernel, where it is compiled here or plain torch stands in for it.
    """
    if isinstance(initial_state, StateRows):
        both = _scan_rows(
            *(u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state),
            *(cu_seqlens, backend),
        )
        return both if as_bool("return_final_state", return_final_state) else both[0]
    tensors = u, delta, A, B, C, D, z, delta_bias, initial_state, cu_seqlens
    how = delta_softplus, return_final_state, backend
    if not _is_compiling() and unwatched():
        outputs = fast_scan(tensors, how)
        if outputs is not None:
            return outputs  # type: ignore[no-any-return]
    if (sharded := call_sharded("selective_scan", tensors, how)) is not None:
        return sharded  # type: ignore[no-any-return]
    final = as_bool("return_final_state", return_final_state)
    arguments = normalised(*tensors, delta_softplus, backend)
    options = Options(bool(delta_softplus), backend)
    out, final_state = selective_scan_derivatives.scan(arguments, options)
    return (out, final_state) if final else out


def _scan_rows(
    u: Any, delta: Any, A: Any, B: Any, C: Any, D: Any, z: Any, delta_bias: Any, delta_softplus: Any,
    rows: StateRows, cu_seqlens: Any, backend: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and final states of a scan from rows of a pool."""
    projections = {
        name: None if isinstance(t, Tensor) and t.dim() == 2 else (t, -1)
        for name, t in (("B", B), ("C", C))
    }
    along = timed(
        u=(u, -1), delta=(delta, -1), z=(z, -1), **{n: p for n, p in projections.items() if p}
    )
    refuse_checkpoints(rows, **{"complex A": isinstance(A, Tensor) and A.is_complex()})

    def scan(parts: Mapping[str, Any], states: Tensor, bounds: Any) -> tuple[Tensor, Tensor]:
        own: Any = parts.get
        both: tuple[Tensor, Tensor] = selective_scan(
            *(own("u"), own("delta"), A, own("B", B), own("C", C)),
            *(D, own("z"), delta_bias, delta_softplus, states),
            cu_seqlens=bounds,
            return_final_state=True,
            backend=backend,
        )
        return both

    others = A, B, C, D, delta_bias
    return scan_rows("selective_scan", rows, scan, along, -1, cu_seqlens, others=others)


@describes(selective_scan)
def describe(call: Any) -> dict[str, KernelCall]:
    """The problems that a call of ``selective_scan`` with these arguments poses, by direction; those of derivatives
    only if they are asked for. Nothing is computed."""
    before = stand_in(call.initial_state, call.cu_seqlens is not None)
    tensors = *(call.u, call.delta, call.A, call.B, call.C), call.D, call.z, call.delta_bias, before
    as_bool("return_final_state", call.return_final_state)
    arguments = normalised(*tensors, call.cu_seqlens, call.delta_softplus, call.backend)
    if arguments.u.numel() == 0:
        return {}
    wanted = any(t is not None and t.requires_grad for t in tensors)
    options = Options(bool(call.delta_softplus), call.backend)
    return selective_scan_problems.describe(arguments, options, wanted)
