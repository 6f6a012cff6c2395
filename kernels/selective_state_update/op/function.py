"""``selective_state_update``: one step of a selective scan, in place of its state, for generation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scan_registry.dispatch.select import Backend
from scan_registry.kernels.selective_state_update.op import plans
from scan_registry.kernels.selective_state_update.op.arguments import (
    BACKENDS,
    NAMES,
    Arguments,
    check,
    check_backend,
)
from scan_registry.kernels.selective_state_update.op.flops import FORMULAS
from scan_registry.kernels.selective_state_update.op.plans import KernelCall
from scan_registry.kernels.selective_state_update.op.slots import (
    check_slots,
    without_pad_slot,
)
from scan_registry.ops import flops
from scan_registry.ops.call import has_tangents, unobserved, unwatched
from scan_registry.ops.checks import as_bool, as_index, refuse_inference, refuse_mapped
from scan_registry.ops.operator import describes
from scan_registry.ops.registration import register

__all__ = ["BACKENDS", "describe", "selective_state_update"]

_is_compiling = torch.compiler.is_compiling
# Dynamo cannot trace the fast path, so torch.compile skips it; under other tracers ``plans.fast_step`` returns None.
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
    dst_state: Tensor | None = None,
    dst_state_batch_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    cu_seqlens: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    rand_seed: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """One step of a selective scan, or one for each of a few tokens, for generation; ``state`` is changed in place.

    With δ = dt + dt_bias, or its softplus (the identity above 20), for each channel and its N states:

        state = exp(δ·A)·state + δ·B·x
        y     = Σ_n C·state + D·x
        out   = y, or y·silu(z)

    A call is one launch, which a CUDA graph can record; all slots, bounds and numbers may change between replays. The states of
    several tokens are rounded only where they are written. Steps are computed in float32, and tensors are read with whatever
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
        state_batch_indices: (batch,), int32 or int64: the slot of each sequence. A slot is a row of the state, which may then
            have any number of rows. An index below zero, or ``pad_slot_id``, stands for no slot: that sequence gets a zero output
            and changes no state. With ``num_accepted_tokens``, (batch, tokens): several slots of each sequence.
        dst_state: where new states are written, with as many slots as wanted; None for ``state`` itself. Dtype, shape and strides
            are those of ``state`` but for the first dimension.
        dst_state_batch_indices: the slots to which new states are written; None for those of ``state_batch_indices``, or without
            these for the sequences' own numbers. (batch,): the states after a sequence's last token. (batch, tokens):
            column t is the slot of the states after token t. No slot, as above: these states are not written. With these
            indices several sequences may start from one slot, such as that of a common prefix. No sequence may write to a slot
            that another one starts from.
        pad_slot_id: an index that stands for no slot, beside all those below zero, in the indices that are passed. Without
            ``state_batch_indices`` each sequence starts from the slot of its own number, whatever ``pad_slot_id`` is;
            torch then copies ``dst_state_batch_indices`` first, if ``pad_slot_id`` is not negative.
        cu_seqlens: (batch + 1,), int32 or int64, contiguous. Sequence b has the tokens from ``cu_seqlens[b]`` to
            ``cu_seqlens[b + 1]``, and takes a step for each; ``x``, ``dt``, ``B``, ``C``, ``z`` and the output have one row for
            each token, in place of one for each sequence. A sequence of no tokens changes no state. Rows of the output that belong to
            no sequence are undefined.
        num_accepted_tokens: (batch,), int32 or int64, contiguous: how many tokens of the last call are accepted, with
            ``state_batch_indices`` of shape (batch, tokens). A sequence starts from the slot in column
            ``num_accepted_tokens - 1``, or in the first column where the number is 0; unless ``dst_state_batch_indices`` says
            otherwise, the states after token t are then written to the slot in column t.
        rand_seed: one int64, in a tensor on the device of the state, for a state of bfloat16 or float16: new states are
            rounded up or down at random, so that they are right in the mean and small changes do not get lost. The random
            bits depend on the seed, the slot and the place in the slot alone, so pass another seed in every call. None rounds
            to nearest.
        backend: ``"auto"`` takes the best that this GPU has; ``"cuda"`` a kernel; ``"reference"`` is plain torch.
            ``"triton"`` is accepted, but has no kernel.

    Slots that are out of range, two states that are written to one slot, one that is written to a slot from which another
    sequence starts, bounds that fall or leave ``x``, and more accepted tokens than columns are errors on the CPU, and under
    ``SCAN_REGISTRY_DEBUG=1`` on a GPU. Otherwise on a GPU, a slot that is too large acts as no slot, bounds are cut off at the
    ends of ``x``, numbers of tokens at the number of columns, and a slot to which two sequences write holds parts of both.
    Nothing outside of the pools is read or written.

    Returns:
        The output, in the shape and the dtype of ``x``.

    Raises:
        RuntimeError: a derivative is asked for: a tensor requires one, and ``torch.no_grad()`` or
            ``torch.inference_mode()`` is not in effect. There is none, as the state that it would need is overwritten;
            ``selective_scan`` has derivatives. Or ``torch.vmap`` maps over a tensor; or the state was made under
            ``torch.inference_mode()``, which is not in effect.
        TypeError: an argument is not a tensor, or a dtype is not supported or does not mix.
        ValueError: a shape, value or backend is not as described, or devices differ.
        NoKernelError: ``require``, ``SCAN_REGISTRY_REQUIRE`` or ``backend`` allows nothing that runs
            on this GPU; the message lists what there is.
        DriverError: the driver failed; the message names the kernel, its variant and the launch.

    Warns:
        FallbackWarning: once per kernel, where it is compiled here or plain torch stands in for it.
    """
    if state_batch_indices is None and (type(pad_slot_id) is not int or pad_slot_id >= 0):
        own = without_pad_slot(dst_state_batch_indices, pad_slot_id)
        dst_state_batch_indices, pad_slot_id = own
    tensors = (
        *(state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices),
        *(dst_state, dst_state_batch_indices, rand_seed, cu_seqlens, num_accepted_tokens),
    )
    changed = state if dst_state is None else dst_state
    if not _is_dynamo_compiling():
        refuse_inference("state" if dst_state is None else "dst_state", changed)
    if not (state_batch_indices is dst_state_batch_indices is cu_seqlens is None):
        _check_slots(tensors, pad_slot_id)
    if (
        not _is_dynamo_compiling()
        and unwatched()
        and (fast := plans.fast_step(tensors, (dt_softplus, pad_slot_id, backend))) is not None
    ):
        torch.autograd.graph.increment_version(changed)
        return fast  # type: ignore[no-any-return]
    if not _is_compiling() and _are_dense(tensors) and unobserved(*tensors):
        _refuse_derivatives(tensors)
        as_bool("dt_softplus", dt_softplus)
        check_backend(backend)
        out = plans.step(tensors, dt_softplus, as_index("pad_slot_id", pad_slot_id), backend)
        torch.autograd.graph.increment_version(changed)
        return out
    check(tensors, dt_softplus, pad_slot_id, backend)
    _refuse_derivatives(tensors)
    if not _is_dynamo_compiling():
        refuse_mapped("selective_state_update", "state", *tensors)
        flops.announce()
    return _op(*tensors, bool(dt_softplus), pad_slot_id, backend)  # type: ignore[no-any-return]


def _check_slots(tensors: tuple[Any, ...], pad_slot_id: Any) -> None:
    every = Arguments(*tensors)
    pad = as_index("pad_slot_id", pad_slot_id)
    check_slots(
        *(every.state, every.x, every.indices, every.dst_state, every.dst_indices),
        *(every.cu_seqlens, every.num_accepted, pad),
    )


@describes(selective_state_update)
def describe(call: Any) -> dict[str, KernelCall]:
    """The problem that a call of ``selective_state_update`` with these arguments poses. Nothing is computed."""
    targets, pad = call.dst_state_batch_indices, call.pad_slot_id
    if call.state_batch_indices is None:
        targets, pad = without_pad_slot(targets, pad)
    tensors = (
        *(call.state, call.x, call.dt, call.A, call.B, call.C, call.D, call.z, call.dt_bias),
        *(call.state_batch_indices, call.dst_state, targets),
        *(call.rand_seed, call.cu_seqlens, call.num_accepted_tokens),
    )
    _check_slots(tensors, pad)
    arguments = check(tensors, call.dt_softplus, pad, call.backend)
    if not call.x.numel():
        return {}
    part = plans.make_kernel_call(arguments, call.dt_softplus, pad)
    return {part.problem.kernel: part}


def _are_dense(tensors: tuple[Any, ...]) -> bool:
    """Whether all are tensors that have addresses, by which plans are found; others are for ``check`` to refuse."""
    return all(
        tensor is None or (isinstance(tensor, Tensor) and tensor.layout == torch.strided)
        for tensor in tensors
    )


def _refuse_derivatives(tensors: tuple[Tensor | None, ...]) -> None:
    if not torch.is_grad_enabled():
        return
    for name, tensor in zip(NAMES, tensors, strict=True):
        if tensor is not None and tensor.requires_grad:
            raise RuntimeError(
                f"selective_state_update has no derivative, and {name} requires one; call it under torch.no_grad(), "
                "or train with selective_scan"
            )


# --- Registration -----------------------------------------------------------------------------


def _step(*args: Any) -> Tensor:
    return plans.step(args[:_COUNT], *args[_COUNT:])


def _step_fake(*args: Any) -> Tensor:
    return torch.empty_like(args[1])


def _step_autograd(*args: Any) -> Any:
    differentiable = Arguments._fields.index("indices")
    for name, tensor in zip(NAMES[:differentiable], args, strict=False):
        if has_tangents(tensor):
            raise RuntimeError(
                f"selective_state_update has no derivative, and {name} has a tangent"
            )
    _refuse_derivatives(args[:_COUNT])
    with torch._C._AutoDispatchBelowAutograd():
        out = _op(*args)
    dst_state = args[Arguments._fields.index("dst_state")]
    torch.autograd.graph.increment_version(args[0] if dst_state is None else dst_state)
    return out


_op = register(
    "selective_state_update(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, "
    "Tensor? z, Tensor? dt_bias, Tensor? indices, Tensor(b!)? dst_state, Tensor? dst_indices, Tensor? seed, "
    "Tensor? cu_seqlens, Tensor? num_accepted, bool softplus, int pad_slot, str backend) -> Tensor",
    __name__,
    {"device": "_step", "Autograd": "_step_autograd", "Meta": "_step_fake"},
)
flops.add(FORMULAS)
