"""What ``causal_conv1d`` and its update accept, and how their arguments become what the kernels take.

Conversions are torch's own operators, so gradients flow back through them to the dtype that was given.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from scan_registry.base.symbols import numbers, same_shape, surely
from scan_registry.dispatch.select import BACKENDS
from scan_registry.kernels.causal_conv1d.problem import WIDTHS
from scan_registry.kernels.causal_conv1d.reference import UpdateRows
from scan_registry.ops.checks import (
    as_bool,
    as_index,
    check_cu_seqlens,
    check_dense,
    described,
    refuse_shared_elements,
)
from scan_registry.ops.values import as_int32

COMPILED = (torch.float32, torch.bfloat16, torch.float16)
#: float64 has no kernels; it is there for checks of derivatives.
ACCEPTED = (*COMPILED, torch.float64)
ACTIVATIONS = (None, "silu", "swish")
_INTEGERS = (torch.int32, torch.int64)


class Options(NamedTuple):
    """The arguments that are no tensors."""

    silu: bool = False
    final: bool = False
    backend: str = "auto"


class Arguments(NamedTuple):
    """Tensors as the operator takes them. Bias is of the weight's dtype, which is that of x or float32; the state is
    contiguous and of the dtype of x; seq_idx is int32 and cu_seqlens int64, both contiguous."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    initial_state: Tensor | None
    seq_idx: Tensor | None
    cu_seqlens: Tensor | None

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Of the states before and after: one for each batch, or for each packed sequence."""
        rows = self.x.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
        return rows, self.x.shape[1], self.weight.shape[1] - 1


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_tensor(name: str, value: Any, dtypes: tuple[torch.dtype, ...], x: Any) -> None:
    """Refuse what is no dense tensor of one of the dtypes, on the device of x."""
    check_dense(name, value)
    if value.dtype not in dtypes:
        names = ", ".join(map(_name, dtypes))
        raise TypeError(f"{name} has dtype {_name(value.dtype)}; accepted are {names}")
    if value.device != x.device:
        raise ValueError(
            f"{name} is on {value.device}, x on {x.device}; they must be on one device"
        )


def check_shape(name: str, value: Tensor, expected: tuple[Any, ...], meaning: str) -> None:
    """Refuse a tensor of another shape; ``meaning`` says what the sizes are."""
    if not same_shape(value.shape, expected):
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}; it must be {meaning}, here {tuple(expected)}"
        )


def as_silu(activation: Any) -> bool:
    """Whether the activation is that, and not none."""
    if activation is not None and (
        not isinstance(activation, str) or activation not in ACTIVATIONS
    ):
        raise ValueError(f"activation is {activation!r}; accepted are None, 'silu' and 'swish'")
    return activation is not None


def _check_backend(backend: Any, x: Tensor) -> None:
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend is {described(backend)}; accepted are {', '.join(BACKENDS)}")
    if x.device.type == "cpu" and backend not in ("auto", "reference"):
        raise ValueError(f"backend is {backend!r}, which needs a CUDA device; x is on {x.device}")
    if x.dtype == torch.float64 and backend not in ("auto", "reference"):
        names = ", ".join(map(_name, COMPILED))
        raise TypeError(f"x has dtype float64; backend {backend!r} accepts {names}")


def _filters(x: Tensor, channels: Any, weight: Any, bias: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias, checked, and converted to a dtype that goes with that of x."""
    check_tensor("weight", weight, ACCEPTED, x)
    if weight.dim() != 2 or surely(weight.shape[0] != channels):
        hint = "; squeeze(1) makes it of a Conv1d's weight" if weight.dim() == 3 else ""
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; it must be (channels, width), and x has {channels} "
            f"channels{hint}"
        )
    width = numbers(weight.shape)[1]
    if not WIDTHS[0] <= width <= WIDTHS[-1]:  # `in` would read the value of a symbolic size
        raise ValueError(
            f"weight has width {width}; accepted are {WIDTHS[0]} to {WIDTHS[-1]} (weight is of shape "
            "(channels, width))"
        )
    tensors = [("weight", weight)]
    if bias is not None:
        check_tensor("bias", bias, ACCEPTED, x)
        check_shape("bias", bias, (channels,), "(channels,)")
        tensors.append(("bias", bias))
    for name, tensor in tensors:
        if (tensor.dtype == torch.float64) != (x.dtype == torch.float64):
            raise TypeError(
                f"x has dtype {_name(x.dtype)}, {name} {_name(tensor.dtype)}; float64 does not mix with "
                "narrower dtypes"
            )
    dtype = weight.dtype
    if dtype not in (x.dtype, torch.float32):
        dtype = torch.promote_types(torch.float32, x.dtype)
    elif dtype != x.dtype and x.dtype == torch.float32:
        dtype = x.dtype
    return weight.to(dtype), None if bias is None else bias.to(dtype)


def normalised(
    x: Any,
    weight: Any,
    bias: Any,
    initial_state: Any,
    seq_idx: Any,
    cu_seqlens: Any,
    return_final_state: Any,
    activation: Any,
    backend: Any,
) -> tuple[Arguments, Options]:
    """The checked arguments, converted; an exception names what is not accepted."""
    silu, final = as_silu(activation), as_bool("return_final_state", return_final_state)
    check_tensor("x", x, ACCEPTED, x)
    if x.dim() != 3:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be (batch, channels, time)")
    _check_backend(backend, x)
    batch, channels, time = numbers(x.shape)
    weight, bias = _filters(x, channels, weight, bias)
    rows, meaning = batch, "(batch, channels, width - 1)"
    if seq_idx is not None:
        if cu_seqlens is not None:
            raise ValueError("seq_idx and cu_seqlens are both given; accepted is one of them")
        check_tensor("seq_idx", seq_idx, _INTEGERS, x)
        check_shape("seq_idx", seq_idx, (batch, time), "(batch, time)")
        seq_idx = as_int32(seq_idx).contiguous()
    if cu_seqlens is not None:
        check_tensor("cu_seqlens", cu_seqlens, _INTEGERS, x)
        check_cu_seqlens(cu_seqlens, time)
        if surely(batch != 1):
            raise ValueError(
                f"x has shape {tuple(x.shape)}; with cu_seqlens, it must be (1, channels, time)"
            )
        cu_seqlens = cu_seqlens.to(torch.int64).contiguous()
        rows, meaning = cu_seqlens.shape[0] - 1, "(sequences, channels, width - 1)"
    if initial_state is not None:
        check_tensor("initial_state", initial_state, ACCEPTED, x)
        check_shape("initial_state", initial_state, (rows, channels, weight.shape[1] - 1), meaning)
        initial_state = initial_state.to(x.dtype).contiguous()
    arguments = Arguments(x, weight, bias, initial_state, seq_idx, cu_seqlens)
    return arguments, Options(silu, final, backend)


class UpdateOptions(NamedTuple):
    """The arguments of an update that are no tensors."""

    silu: bool = False
    backend: str = "auto"
    pad_slot_id: int = -1


class UpdateArguments(NamedTuple):
    """Tensors as the update's operator takes them; x is (B, D, T), or with cu_seqlens (1, D, T)."""

    x: Tensor
    state: Tensor
    weight: Tensor
    bias: Tensor | None
    positions: Tensor | None = None
    indices: Tensor | None = None
    destinations: Tensor | None = None
    cu_seqlens: Tensor | None = None
    accepted: Tensor | None = None

    def rows(self, pad_slot_id: int) -> UpdateRows:
        """As the reference takes them."""
        positions, indices, destinations, cu_seqlens, accepted = self[4:]
        return UpdateRows(positions, indices, destinations, cu_seqlens, accepted, pad_slot_id)


def update_arguments(
    x: Any,
    conv_state: Any,
    weight: Any,
    bias: Any,
    cache_seqlens: Any,
    conv_state_indices: Any,
    dst_conv_state_indices: Any,
    cu_seqlens: Any,
    num_accepted_tokens: Any,
    activation: Any,
    pad_slot_id: Any,
    backend: Any,
) -> tuple[UpdateArguments, UpdateOptions]:
    """The tensors of ``causal_conv1d_update`` in their usual forms, checked, and its options."""
    silu = as_silu(activation)
    check_tensor("x", x, ACCEPTED, x)
    steps = _steps_of(x, cu_seqlens)
    _check_backend(backend, x)
    channels = numbers(steps.shape)[1]
    weight, bias = _filters(x, channels, weight, bias)
    sequences = numbers(steps.shape)[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    by_index = conv_state_indices is not None
    _check_conv_state(conv_state, x, channels, sequences, weight.shape[1] - 1, by_index)
    numbered = {
        "cache_seqlens": cache_seqlens,
        "conv_state_indices": conv_state_indices,
        "dst_conv_state_indices": dst_conv_state_indices,
        "num_accepted_tokens": num_accepted_tokens,
    }
    positions, indices, destinations, accepted = (
        _as_int32(name, value, x, sequences) for name, value in numbered.items()
    )
    _check_drafts(steps, conv_state, weight.shape[1], numbered, cu_seqlens is not None)
    arguments = UpdateArguments(
        *(steps, conv_state, weight.contiguous(), bias),
        *(positions, indices, destinations),
        None if cu_seqlens is None else cu_seqlens.contiguous(),
        accepted,
    )
    return arguments, UpdateOptions(silu, backend, as_index("pad_slot_id", pad_slot_id))


def _steps_of(x: Tensor, cu_seqlens: Any) -> Tensor:
    """The inputs of an update as (batch, channels, steps)."""
    if cu_seqlens is not None:
        check_tensor("cu_seqlens", cu_seqlens, _INTEGERS, x)
        if x.dim() != 2:
            raise ValueError(
                f"x has shape {tuple(x.shape)}; with cu_seqlens, it must be (tokens, channels)"
            )
        check_cu_seqlens(cu_seqlens, numbers(x.shape)[0], whole=False)
        return x.t().unsqueeze(0)
    if x.dim() not in (2, 3):
        raise ValueError(
            f"x has shape {tuple(x.shape)}; it must be (batch, channels) or (batch, channels, steps)"
        )
    return x if x.dim() == 3 else x.unsqueeze(-1)


def _check_conv_state(
    conv_state: Any, x: Tensor, channels: Any, sequences: Any, least: int, by_index: bool
) -> None:
    """``least`` is how many inputs of each channel it has to hold, and ``by_index`` whether sequences name their rows."""
    check_tensor("conv_state", conv_state, ACCEPTED, x)
    if conv_state.dtype != x.dtype:
        raise TypeError(
            f"conv_state has dtype {_name(conv_state.dtype)}, x {_name(x.dtype)}; it is changed in place, so "
            "both must be of one dtype"
        )
    if (
        conv_state.dim() != 3
        or surely(conv_state.shape[1] != channels)
        or surely(conv_state.shape[2] < least)
        or (not by_index and surely(conv_state.shape[0] != sequences))
    ):
        first = "slots" if by_index else "batch"
        raise ValueError(
            f"conv_state has shape {tuple(conv_state.shape)}; it must be ({first}, channels, inputs), with "
            f"{least} inputs at least, and x is of shape {tuple(x.shape)}"
        )
    refuse_shared_elements("conv_state", conv_state)


def _as_int32(name: str, value: Any, x: Tensor, sequences: Any) -> Tensor | None:
    """Numbers of sequences, checked."""
    if value is None:
        return None
    check_tensor(name, value, _INTEGERS, x)
    check_shape(name, value, (sequences,), "(batch,)")
    # Below zero and beyond int32 there is no row; the conversion must not make one of them.
    rows = name.endswith("conv_state_indices") and value.dtype == torch.int64
    narrowed: Tensor = value.clamp(-1, 2**31 - 1) if rows else value
    return narrowed.to(torch.int32).contiguous()


def _check_drafts(
    steps: Tensor, conv_state: Tensor, width: int, numbered: dict[str, Any], packed: bool
) -> None:
    """Refuse options that contradict each other, and rows with too few inputs for drafts."""
    others = ("num_accepted_tokens", "dst_conv_state_indices")
    for name in others:
        if numbered["cache_seqlens"] is not None and numbered[name] is not None:
            raise ValueError(
                f"{name} does not go with cache_seqlens: a ring is changed where it stands, and to take drafts back is to "
                "count fewer inputs"
            )
    if numbered["num_accepted_tokens"] is None or packed:
        return
    most = conv_state.shape[2] - width + 2
    if surely(steps.shape[2] > most):
        raise ValueError(
            f"conv_state has {conv_state.shape[2]} inputs of each channel; with num_accepted_tokens, {steps.shape[2]} steps "
            f"of a filter of width {width} take {steps.shape[2] + width - 2}"
        )
