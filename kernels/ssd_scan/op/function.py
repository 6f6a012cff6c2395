"""``ssd_scan``: the state space model of Mamba-2, whose decay is one number a head and step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from scan_registry.dispatch.select import Backend
from scan_registry.kernels.ssd_scan.op import problems as ssd_scan_problems
from scan_registry.kernels.ssd_scan.op.arguments import BACKENDS, normalised
from scan_registry.kernels.ssd_scan.op.autograd import fast_scan, scan
from scan_registry.kernels.ssd_scan.op.problems import KernelCall
from scan_registry.ops.call import unwatched
from scan_registry.ops.checks import as_bool
from scan_registry.ops.operator import describes
from scan_registry.ops.pools import StateRows, refuse_checkpoints, scan_rows, stand_in, timed
from scan_registry.ops.sharded import call_sharded

_is_compiling = torch.compiler.is_dynamo_compiling

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    class SSDScanOptions(TypedDict, total=False):
        """What ``ssd_scan`` takes by name alone, beside ``return_final_state``."""

        seq_idx: Tensor | None
        cu_seqlens: Tensor | None
        chunk_size: int | None
        backend: Backend


__all__ = ["BACKENDS", "describe", "ssd_scan"]

_NO_LIMIT = (0.0, float("inf"))


# fmt: off
@overload
def ssd_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
    dt_bias: Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = _NO_LIMIT,
    initial_state: Tensor | StateRows | None = None, *,
    return_final_state: Literal[False] = False, **options: Unpack[SSDScanOptions],
) -> Tensor: ...
@overload
def ssd_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
    dt_bias: Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = _NO_LIMIT,
    initial_state: Tensor | StateRows | None = None, *,
    return_final_state: Literal[True], **options: Unpack[SSDScanOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def ssd_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
    dt_bias: Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = _NO_LIMIT,
    initial_state: Tensor | StateRows | None = None, *,
    return_final_state: bool, **options: Unpack[SSDScanOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
# fmt: on


def ssd_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = _NO_LIMIT, initial_state: Tensor | StateRows | None = None, *,
    seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None,
    return_final_state: bool = False, chunk_size: int | None = None, backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """The state space dual scan of Mamba-2::

        δ    = clamp(softplus(dt + dt_bias), *dt_limit)   without softplus unless dt_softplus
        s[t] = exp(δ[t]·A)·s[t-1] + δ[t]·x[t] ⊗ B[t]
        out  = (s[t]·C[t] + D·x[t])·silu(z[t])            without what is None

    Args:
        x: (batch, time, heads, P), float32, bfloat16, float16 or float64, with any strides.
        dt: (batch, time, heads). In the default limits, a negative step size becomes 0.
        A: (heads,), negative.
        B: (batch, time, groups, N); each group serves heads / groups consecutive heads.
        C: like ``B``.
        D: (heads,) or (heads, P).
        z: Like ``x``.
        dt_bias: (heads,).
        dt_softplus: Whether δ is softplus(dt + dt_bias), taken as dt + dt_bias above 20.
        dt_limit: The least and the greatest δ.
        initial_state: (batch, heads, P, N); with ``cu_seqlens`` (batch, sequences, heads, P, N). Zeros by default. Or
            ``StateRows``, rows (heads, P, N) of a pool, which final states are written to; with ``cu_seqlens`` the batch is 1 then.
        seq_idx: (batch, time), int32 or int64. A step whose number differs from the previous step's starts from a zero state;
            the first step of a sequence starts from the initial state.
        cu_seqlens: Sequences packed along time: the (sequences + 1,) offsets of their first steps, int32 or int64, from
            0 to ``time``, which hold for the whole batch. A sequence may be empty. Each has a state of its own.
        return_final_state: Whether to return the final state, too; with ``cu_seqlens`` one for each sequence.
        chunk_size: Steps of a chunk where torch's matrix products compute; kernels ignore it. It changes results by rounding
            only.
        backend: "auto", "cuda" for the kernels, or "reference" for plain torch. "triton" is accepted, but has no kernel.

    Returns:
        The output, with the shape and dtype of ``x``; with ``return_final_state`` also the final state, of the shape of
        ``initial_state`` and in float32. In float64 all is float64. Differentiable in all tensors, any number of times and in
        both modes. On a GPU, float32, bfloat16 and float16 run in kernels, forwards and in the first derivative, if P is at
        most 128, N at most 256, and both are multiples of 8; all else is composed of torch's matrix products, chunk by chunk,
        with states in float32. So is what takes more shared memory than a CTA of the GPU can have: forwards 111 KB for more
        than 128 states, and in float32 121 KB for more than 64 and 217 KB for more than 128; backwards in float32 154 KB.
        Kernels apply ``D`` and ``z`` in float32, and round the output once. For the gradient of ``z`` they keep
        s[t]·C[t] + D·x[t] in the dtype of ``x``. Float32 is multiplied as the sum of two numbers of TF32, whatever torch's
        settings are, and is as exact as in torch's matrix products without TF32.

    Raises:
        TypeError: an argument is not a tensor, or a dtype is not supported or does not mix.
        ValueError: a shape or a value is not as described, devices differ, or ``backend`` has no kernel for such arguments.
        NoKernelError, DriverError, FallbackWarning: as for ``scan_registry.selective_scan``.
    """
    if isinstance(initial_state, StateRows):
        both = _scan_rows(
            *(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, initial_state),
            *(seq_idx, cu_seqlens, chunk_size, backend),
        )
        return both if as_bool("return_final_state", return_final_state) else both[0]
    tensors = x, dt, A, B, C, D, z, dt_bias, initial_state, seq_idx, cu_seqlens
    pair = type(dt_limit) is tuple and len(dt_limit) == 2
    if pair and not _is_compiling() and unwatched():
        how = dt_softplus, *dt_limit, chunk_size, return_final_state, backend
        outputs = fast_scan(tensors, how)
        if outputs is not None:
            return outputs[:2] if return_final_state else outputs[0]  # type: ignore[no-any-return]
    options = dt_softplus, dt_limit, chunk_size, return_final_state, backend
    if (sharded := call_sharded("ssd_scan", tensors, options)) is not None:
        return sharded  # type: ignore[no-any-return]
    out, final_state = scan(*normalised(*tensors, *options))
    return out if final_state is None else (out, final_state)


def _scan_rows(
    x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, z: Any, dt_bias: Any, dt_softplus: Any, dt_limit: Any,
    rows: StateRows, seq_idx: Any, cu_seqlens: Any, chunk_size: Any, backend: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and final states of a scan from rows of a pool."""
    along = timed(x=(x, 1), dt=(dt, 1), B=(B, 1), C=(C, 1), z=(z, 1), seq_idx=(seq_idx, 1))
    refuse_checkpoints(rows, seq_idx=seq_idx is not None)

    def scan(parts: Mapping[str, Any], states: Tensor, bounds: Any) -> tuple[Tensor, Tensor]:
        own: Any = parts.get
        both: tuple[Tensor, Tensor] = ssd_scan(
            *(
                own("x"),
                own("dt"),
                A,
                own("B"),
                own("C"),
                D,
                own("z"),
                dt_bias,
            ),
            *(dt_softplus, dt_limit, states),
            seq_idx=own("seq_idx"),
            cu_seqlens=bounds,
            return_final_state=True,
            chunk_size=chunk_size,
            backend=backend,
        )
        return both

    others = A, D, dt_bias
    return scan_rows("ssd_scan", rows, scan, along, 1, cu_seqlens, others=others)


@describes(ssd_scan)
def describe(call: Any) -> dict[str, KernelCall]:
    """The problems that a call of ``ssd_scan`` with these arguments poses, by direction; those of derivatives only if they
    are asked for. Nothing is computed."""
    before = stand_in(call.initial_state, call.cu_seqlens is not None)
    tensors = call.x, call.dt, call.A, call.B, call.C, call.D, call.z, call.dt_bias, before
    how = call.dt_softplus, call.dt_limit, call.chunk_size, call.return_final_state, call.backend
    arguments, options = normalised(*tensors, call.seq_idx, call.cu_seqlens, *how)
    if arguments.x.numel() == 0:
        return {}
    wanted = any(t is not None and t.requires_grad for t in tensors)
    return ssd_scan_problems.describe(arguments, options, wanted)
