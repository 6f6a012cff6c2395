"""``causal_conv1d``: a short causal convolution of each channel along time, differentiable, and its step by step form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from scan_registry.dispatch.select import BACKENDS, Backend
from scan_registry.kernels.causal_conv1d.op import autograd as causal_conv1d_derivatives
from scan_registry.kernels.causal_conv1d.op import plans as causal_conv1d_plans
from scan_registry.kernels.causal_conv1d.op.arguments import normalised
from scan_registry.kernels.causal_conv1d.op.plans import KernelCall
from scan_registry.kernels.causal_conv1d.spec import FAMILY, pieces
from scan_registry.ops.checks import as_bool, as_index, refuse_inference
from scan_registry.ops.operator import describes
from scan_registry.ops.pools import StateRows, refuse_checkpoints, scan_rows, stand_in, timed
from scan_registry.ops.values import are_checked, check_bounds, check_range, check_rows

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    class CommonOptions(TypedDict, total=False):
        """What ``causal_conv1d`` takes by name, with and without ranks."""

        seq_idx: Tensor | None
        cu_seqlens: Tensor | None
        activation: str | None
        backend: Backend

    class ConvolutionOptions(CommonOptions, total=False):
        """Likewise of one process, beside ``return_final_state``."""

        initial_state: Tensor | StateRows | None


__all__ = ["BACKENDS", "causal_conv1d", "causal_conv1d_update", "describe"]


# fmt: off
@overload
def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *,
    return_final_state: Literal[False] = False, **options: Unpack[ConvolutionOptions],
) -> Tensor: ...
@overload
def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *,
    return_final_state: Literal[True], **options: Unpack[ConvolutionOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *,
    return_final_state: bool, **options: Unpack[ConvolutionOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
# fmt: on


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *,
    initial_state: Tensor | StateRows | None = None, seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None, return_final_state: bool = False,
    activation: str | None = None, backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """y[t] = act(bias + Σ weight[width-1-j] · x[t-j]) over j from 0 to width-1, for each channel by itself.

    Args:
        x: (batch, channels, time) of float32, bfloat16 or float16; float64 in plain torch. Where time has stride 1, or
            channels have (a transposed (batch, time, channels) tensor), nothing is copied.
        weight: (channels, width), of a width from 2 to 8. float32 weights go with narrower x as they are.
        bias: (channels,); None for zeros.
        initial_state: (batch, channels, width-1), the inputs before the first step, the oldest first; with
            ``cu_seqlens`` (sequences, channels, width-1). None for zeros. It is taken in the dtype of x. Or
            ``StateRows``, rows (channels, width-1) of a pool, which final states are written to. Where the pool's rows have more
            inputs, pass the view ``pool[..., -(width-1):]``, or ``pool[..., :width-1]`` if ``causal_conv1d_update`` goes on
            with ``num_accepted_tokens``.
        seq_idx: (batch, time) integers within int32. Steps see no further back than to where the number changes. The
            initial state precedes the first such sequence. Numbers below zero mark padding, for which y is zero. Larger
            numbers of int64 are refused on the CPU, and under ``SCAN_REGISTRY_DEBUG=1`` on a GPU; else only the lower
            32 bits count.
        cu_seqlens: (sequences + 1,), int32 or int64: where sequences that are packed along time begin, and where the
            last one ends: 0, …, time. The batch is 1 then. Values that do not rise from 0 to the length of time are
            refused on the CPU, and under ``SCAN_REGISTRY_DEBUG=1`` on a GPU; else results are of no use, but nothing
            outside of the tensors is touched.
        return_final_state: return the last width-1 inputs, too, those of the initial state among them, in the shape of
            ``initial_state``; with ``seq_idx`` those of the last sequence, with zeros for others.
        activation: None, or ``"silu"`` or ``"swish"``, which are the same.
        backend: ``"auto"`` takes the best binary installed for this GPU; ``"cuda"`` pins the language;
            ``"reference"`` is plain torch on any device.

    Returns:
        y, in the dtype and the memory layout of x, and if asked for the final state. Sums are in float32 where that
        dtype is narrower. Differentiable in x, weight, bias and initial_state, any number of times and in both modes;
        the first derivative is a kernel, whose results are the same in every run, others are plain torch.

    Raises:
        TypeError: an argument is not a tensor, or a dtype is not supported or does not mix.
        ValueError: a shape is not as described, devices differ, or an option is out of range.
        NoKernelError: ``require``, ``SCAN_REGISTRY_REQUIRE`` or ``backend`` allows nothing that runs on this GPU.
        DriverError: the driver failed; the message names the kernel, its variant and the launch.

    Warns:
        FallbackWarning: once per kernel, where it is compiled here or plain torch stands in for it.
    """
    if isinstance(initial_state, StateRows):
        both = _convolve_rows(
            x, weight, bias, initial_state, seq_idx, cu_seqlens, activation, backend
        )
        return both if as_bool("return_final_state", return_final_state) else both[0]
    y, final_state = causal_conv1d_derivatives.call(
        (x, weight, bias, initial_state, seq_idx, cu_seqlens),
        (return_final_state, activation, backend),
    )
    return y if final_state is None else (y, final_state)


def _convolve_rows(
    x: Any,
    weight: Any,
    bias: Any,
    rows: StateRows,
    seq_idx: Any,
    cu_seqlens: Any,
    activation: Any,
    backend: Any,
) -> tuple[Tensor, Tensor]:
    """y and the final states, from rows of a pool."""
    along = timed(x=(x, -1), seq_idx=(seq_idx, 1))
    refuse_checkpoints(rows, seq_idx=seq_idx is not None)

    def scan(parts: Mapping[str, Any], states: Tensor, bounds: Any) -> tuple[Tensor, Tensor]:
        own: Any = parts.get
        both: tuple[Tensor, Tensor] = causal_conv1d(
            *(own("x"), weight, bias),
            initial_state=states,
            seq_idx=own("seq_idx"),
            cu_seqlens=bounds,
            return_final_state=True,
            activation=activation,
            backend=backend,
        )
        return both

    return scan_rows(
        *("causal_conv1d", rows, scan, along, -1, cu_seqlens),
        sequences_dim=None,
        others=(weight, bias),
    )


def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None, cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None, *, dst_conv_state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None, num_accepted_tokens: Tensor | None = None,
    pad_slot_id: int = -1, backend: Backend = "auto",
) -> Tensor:  # fmt: skip
    """One step of ``causal_conv1d``, or a few, for generation: the last inputs are kept in ``conv_state``.

    One launch, which a CUDA graph can record; replays read the indices, bounds and counts anew. It has no derivative. Numbers of
    sequences may be int64, too, and are then narrowed, in a launch or two more for each tensor of them.

    Args:
        x: (batch, channels), or (batch, channels, steps); with ``cu_seqlens`` (tokens, channels).
        conv_state: (batch, channels, inputs) of the dtype of x, any strides, changed in place. At least width-1 inputs;
            the last one is the latest.
        weight, bias, activation: as in ``causal_conv1d``.
        cache_seqlens: (batch,) int32, how many inputs came before. The state is a ring then: an input stands at its
            number modulo the ring's length. Other values than 0 to 2**31 - 1 are refused on the CPU, and under
            ``SCAN_REGISTRY_DEBUG=1`` on a GPU.
        conv_state_indices: (batch,) int32. Row ``conv_state_indices[b]`` of the state belongs to batch b. Indices must be
            unique. A negative index gives a zero y and changes no state. Out-of-range and duplicate indices are errors
            on the CPU, and under ``SCAN_REGISTRY_DEBUG=1`` on a GPU. Otherwise on a GPU, an index that is too large acts
            as a negative one, and a duplicate corrupts its state row.
        dst_conv_state_indices: (batch,) int32. The state after the steps goes to row ``dst_conv_state_indices[b]``, and the
            row that is read stays as it is. These indices must be unique, and on a GPU none may be a row that another
            sequence reads; ``conv_state_indices`` may then repeat. A negative index writes no state. Not with
            ``cache_seqlens``.
        cu_seqlens: (batch + 1,), int32 or int64: where the tokens of each sequence begin in x, and where the last ones end:
            0, …, at most tokens. A sequence without tokens changes nothing. y is zero for tokens beyond the last bound.
        num_accepted_tokens: (batch,) int32, for speculative decoding: how many tokens of the last call count; 0 is as 1.
            Rows are laid out otherwise then: the width-2 inputs before the last call come first, then that call's tokens,
            so that T tokens take width-2+T inputs of each row, and what is beyond keeps its values. After a prefill, whose
            last width-1 inputs are at the start of the row, the number is 1. Not with ``cache_seqlens``: a ring of
            width-1+T inputs takes drafts back when ``cache_seqlens`` counts fewer. Other values than 0 to inputs-width+2 are
            refused on the CPU, and under ``SCAN_REGISTRY_DEBUG=1`` on a GPU; otherwise the nearest of these counts.
        pad_slot_id: an index that stands for no row, as negative ones do.
        backend: as in ``causal_conv1d``.

    Returns:
        y, in the shape of x.

    Raises:
        RuntimeError: a derivative is asked for: a tensor requires one, and ``torch.no_grad()`` or
            ``torch.inference_mode()`` is not on. The state that it would need is overwritten. Or ``torch.vmap`` maps
            over a tensor; or the state was made under ``torch.inference_mode()``, which is not on.
        And as ``causal_conv1d``.
    """
    if not torch.compiler.is_compiling():
        refuse_inference("conv_state", conv_state)
    pad_slot_id, apart = as_index("pad_slot_id", pad_slot_id), dst_conv_state_indices is not None
    check_rows("conv_state_indices", conv_state_indices, conv_state, pad_slot_id, unique=not apart)
    check_rows("dst_conv_state_indices", dst_conv_state_indices, conv_state, pad_slot_id)
    check_range("cache_seqlens", cache_seqlens, 0, 2**31 - 1)
    if num_accepted_tokens is not None or cu_seqlens is not None:
        _check_tokens(x, conv_state, weight, cu_seqlens, num_accepted_tokens)
    tensors = x, conv_state, weight, bias
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
        raise RuntimeError(
            "causal_conv1d_update has no derivative, and a tensor requires one; call it under torch.no_grad() or "
            "torch.inference_mode()"
        )
    rows = (
        *(cache_seqlens, conv_state_indices, dst_conv_state_indices),
        *(cu_seqlens, num_accepted_tokens),
    )
    return causal_conv1d_derivatives.call_update(
        (x, conv_state, weight, bias, *rows), (activation, pad_slot_id, backend)
    )


def _check_tokens(x: Any, conv_state: Any, weight: Any, cu_seqlens: Any, accepted: Any) -> None:
    """Refuse values of bounds and counts. Arguments of a wrong type or shape are left to other checks."""
    packed = (
        isinstance(cu_seqlens, Tensor)
        and cu_seqlens.dtype in (torch.int32, torch.int64)
        and cu_seqlens.dim() == 1
        and len(cu_seqlens) > 1
    )
    if packed and isinstance(x, Tensor) and x.dim() == 2:
        check_bounds(cu_seqlens, x.shape[0], whole=False)
    tensors = conv_state, weight
    if accepted is None or not all(isinstance(t, Tensor) and t.dim() > 1 for t in tensors):
        return
    most = conv_state.shape[-1] - weight.shape[-1] + 2
    check_range("num_accepted_tokens", accepted, 0, most)
    if packed and are_checked(cu_seqlens) and int(cu_seqlens.diff().max()) > most:
        raise ValueError(
            f"cu_seqlens has a sequence of {int(cu_seqlens.diff().max())} tokens; with num_accepted_tokens, the "
            f"{conv_state.shape[-1]} inputs of a row take {most} at most"
        )


@describes(causal_conv1d)
def describe(call: Any) -> dict[str, KernelCall]:
    """The problems that a call of ``causal_conv1d`` with these arguments poses, by direction; those of derivatives only
    if they are asked for. Nothing is computed."""
    before = stand_in(call.initial_state, call.cu_seqlens is not None, None)
    tensors = call.x, call.weight, call.bias, before
    wanted: list[Any] = [t is not None and t.requires_grad for t in tensors]
    how = call.return_final_state, call.activation, call.backend
    arguments, options = normalised(*tensors, call.seq_idx, call.cu_seqlens, *how)
    if arguments.x.numel() == 0:
        return {}
    calls = {"forward": causal_conv1d_plans.make_kernel_call("forward", arguments, options)}
    if any(wanted):
        y_grad = torch.empty_like(arguments.x, device="meta")
        backward = causal_conv1d_plans.make_kernel_call("backward", arguments, options, y_grad)
        calls["backward"] = backward
        kernel = FAMILY.kernel(backward.problem.kernel, "cuda")
        takers = [
            (kernel.cost(v, backward.problem), number, v)
            for number, v in enumerate(kernel.variants)
            if kernel.rules.accepts(v, backward.problem) is None
        ]
        if takers and (wanted[1] or wanted[2]):
            count = pieces(min(takers)[2], backward.problem)  # type: ignore[arg-type]
            calls["reduction"] = causal_conv1d_plans.make_reduction_call(arguments, count)
    return calls
