"""``selective_state_update``: one step of a selective scan, in place of its state, for generation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scan_registry.dispatch.select import Backend
from scan_registry.kernels.selective_state_update.op import plans
from scan_registry.kernels.selective_state_update.op.arguments import (
    BACKENDS,
    Arguments,
    check,
    check_backend,
)
from scan_registry.kernels.selective_state_update.op.flops import FORMULAS
from scan_registry.kernels.selective_state_update.op.plans import KernelCall
from scan_registry.ops import flops
from scan_registry.ops.call import has_tangents, unobserved, unwatched
from scan_registry.ops.checks import as_bool, refuse_inference, refuse_mapped
from scan_registry.ops.registration import register
from scan_registry.ops.values import check_rows

__all__ = ["BACKENDS", "describe", "selective_state_update"]

_is_compiling = torch.compiler.is_compiling
# What torch compiles is not to see the fast path; what it traces otherwise is told there.
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_COUNT = len(Arguments._fields)


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """One step of a selective scan, for generation; ``state`` is changed in place.

    With δ = dt + dt_bias, or its softplus (the identity above 20), for each channel and its N states:

        state = exp(δ·A)·state + δ·B·x
        y     = Σ_n C·state + D·x
        out   = y, or y·silu(z)

    That is one launch, which a CUDA graph can record. It is computed in float32, and tensors are read with whatever
    strides and dtypes they have: nothing is converted or copied first, and ``A``, ``dt``, ``dt_bias`` and ``D`` may be
    expanded, as those of Mamba-2 are along channels and states.

    Args:
        state: (batch, channels, N), or of several heads (batch, heads, channels, N), of N up to 256. float32, bfloat16
            or float16; float64 in plain torch, where all tensors are of that dtype. No element may be there twice, as
            in an expanded tensor.
        x: (batch, channels), or (batch, heads, channels). Here and below float32, bfloat16 or float16, of which each
            tensor may have another one.
        dt: like ``x``.
        A: (channels, N), or (heads, channels, N). An entry need not be negative, but then states grow and may be
            infinite.
        B: (batch, N), or (batch, groups, N) with groups that divide the heads, or without heads the channels. Group g
            has those from g · heads / groups on.
        C: (batch, N) or (batch, groups, N). If both ``B`` and ``C`` have groups, they have as many.
        D: (channels,), or (heads, channels); None for zeros.
        z: like ``x``; None for no gate.
        dt_bias: like ``D``.
        dt_softplus: whether step sizes are the softplus of ``dt + dt_bias``.
        state_batch_indices: (batch,), int32 or int64. Row ``state_batch_indices[b]`` of the state belongs to batch b; the
            state may then have any number of rows. Indices must be unique. A negative index gives a zero output and
            changes no state. Out-of-range and duplicate indices are errors on the CPU, and under
            ``SCAN_REGISTRY_DEBUG=1`` on a GPU. Otherwise on a GPU, an index that is too large acts as a negative one,
            and a duplicate corrupts its state row.
        backend: ``"auto"`` takes the best that this GPU has; ``"cuda"`` a kernel; ``"reference"`` is plain torch.

    Returns:
        The output, in the shape and the dtype of ``x``.

    Raises:
        RuntimeError: a derivative is asked for: a tensor requires one, and ``torch.no_grad()`` or
            ``torch.inference_mode()`` is not in effect. There is none, as the state that it would need is overwritten;
            ``selective_scan`` has derivatives. Or ``torch.vmap`` maps over a tensor; or the state was made under
            ``torch.inference_mode()``, which is not in effect.
        TypeError: an argument is not a tensor, or a dtype is not supported or does not mix.
        ValueError: a shape is not as described, or devices differ.
        NoKernelError: ``require``, ``SCAN_REGISTRY_REQUIRE`` or ``backend`` allows nothing that runs
            on this GPU; the message lists what there is.
        DriverError: the driver failed; the message names the kernel, its variant and the launch.

    Warns:
        FallbackWarning: once per kernel, where it is compiled here or plain torch stands in for it.
    """
    tensors = state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices
    if not _is_dynamo_compiling():
        refuse_inference("state", state)
    if state_batch_indices is not None:
        check_rows("state_batch_indices", state_batch_indices, state)
    if (
        not _is_dynamo_compiling()
        and unwatched()
        and (fast := plans.fast_step(tensors, (dt_softplus, backend))) is not None
    ):
        torch.autograd.graph.increment_version(state)
        return fast  # type: ignore[no-any-return]
    if not _is_compiling() and _are_dense(tensors) and unobserved(*tensors):
        _refuse_derivatives(tensors)
        as_bool("dt_softplus", dt_softplus)
        check_backend(backend)
        out = plans.step(tensors, dt_softplus, backend)
        torch.autograd.graph.increment_version(state)
        return out
    check(tensors, dt_softplus, backend)
    _refuse_derivatives(tensors)
    if not _is_dynamo_compiling():
        refuse_mapped("selective_state_update", "state", *tensors)
        flops.announce()
    return _op(*tensors, bool(dt_softplus), backend)  # type: ignore[no-any-return]


def describe(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> dict[str, KernelCall]:
    """The problem that a call of ``selective_state_update`` with these arguments poses. Nothing is computed."""
    tensors = state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices
    if state_batch_indices is not None:
        check_rows("state_batch_indices", state_batch_indices, state)
    arguments = check(tensors, dt_softplus, backend)
    return {"step": plans.make_kernel_call(arguments, dt_softplus)} if x.numel() else {}


def _are_dense(tensors: tuple[Any, ...]) -> bool:
    """Whether all are tensors that have addresses, by which plans are found; others are for ``check`` to refuse."""
    return all(
        tensor is None or (isinstance(tensor, Tensor) and tensor.layout == torch.strided)
        for tensor in tensors
    )


def _refuse_derivatives(tensors: tuple[Tensor | None, ...]) -> None:
    if not torch.is_grad_enabled():
        return
    if any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise RuntimeError(
            "selective_state_update has no derivative, and a tensor requires one; call it under torch.no_grad(), "
            "or train with selective_scan"
        )


# --- Registration -----------------------------------------------------------------------------


def _step(*args: Any) -> Tensor:
    return plans.step(args[:_COUNT], *args[_COUNT:])


def _step_fake(*args: Any) -> Tensor:
    return torch.empty_like(args[1])


def _step_autograd(*args: Any) -> Any:
    if has_tangents(*args[: _COUNT - 1]):
        raise RuntimeError("selective_state_update has no derivative, and a tensor has a tangent")
    _refuse_derivatives(args[:_COUNT])
    with torch._C._AutoDispatchBelowAutograd():
        out = _op(*args)
    torch.autograd.graph.increment_version(args[0])
    return out


_op = register(
    "selective_state_update(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, "
    "Tensor? z, Tensor? dt_bias, Tensor? indices, bool softplus, str backend) -> Tensor",
    __name__,
    {"device": "_step", "Autograd": "_step_autograd", "Meta": "_step_fake"},
)
flops.add(FORMULAS)
