"""What ``selective_state_update`` accepts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from scan_registry.base.symbols import same_shape, surely, surely_contiguous
from scan_registry.kernels.selective_state_update.problem import MOST_STATES
from scan_registry.ops.checks import (
    as_bool,
    as_index,
    check_cu_seqlens,
    check_tensors,
    described,
    refuse_shared_elements,
)

BACKENDS = ("auto", "cuda", "triton", "reference")
COMPILED = (torch.float32, torch.bfloat16, torch.float16)
_INDICES = (torch.int32, torch.int64)


class Arguments(NamedTuple):
    """Tensors as they are given; the kernel reads every dtype and stride of them."""

    state: Tensor
    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    dt_bias: Tensor | None
    indices: Tensor | None
    dst_state: Tensor | None
    dst_indices: Tensor | None
    seed: Tensor | None
    cu_seqlens: Tensor | None
    num_accepted: Tensor | None


#: Names of the public function's arguments.
_PUBLIC = {
    "indices": "state_batch_indices",
    "dst_indices": "dst_state_batch_indices",
    "num_accepted": "num_accepted_tokens",
    "seed": "rand_seed",
}
NAMES = tuple(_PUBLIC.get(name, name) for name in Arguments._fields)
_OPTIONAL = NAMES[6:]
_INTEGERS = (*_PUBLIC.values(), "cu_seqlens")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_backend(backend: Any) -> None:
    """Refuse what is none of the ``BACKENDS``."""
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend is {described(backend)}; accepted are {', '.join(BACKENDS)}")


def check(tensors: tuple[Any, ...], softplus: Any, pad_slot_id: Any, backend: Any) -> Arguments:
    """The arguments; an exception names what is not accepted."""
    as_bool("dt_softplus", softplus)
    as_index("pad_slot_id", pad_slot_id)
    check_backend(backend)
    present = {
        name: tensor
        for name, tensor in zip(NAMES, tensors, strict=True)
        if not (tensor is None and name in _OPTIONAL)
    }
    _check_tensors(present)
    _check_state(present)
    _check_shapes(present, _count_tokens(present))
    state = present["state"]
    if not state.is_cuda and state.device.type in ("cpu", "cuda") and backend in ("cuda", "triton"):
        raise ValueError(
            f"backend is {backend!r}, which needs a CUDA device; state is on {state.device}"
        )
    return Arguments(*tensors)


def _check_tensors(present: dict[str, Any]) -> None:
    check_tensors(present)
    state = present["state"].dtype
    for name, value in present.items():
        accepted, beside = _accepted_dtypes(name, state)
        if value.dtype not in accepted:
            raise TypeError(
                f"{name} has dtype {dtype_name(value.dtype)}; accepted are {', '.join(map(dtype_name, accepted))}{beside}"
            )


def _accepted_dtypes(name: str, state: torch.dtype) -> tuple[tuple[torch.dtype, ...], str]:
    """Of an argument, and what that depends on."""
    beside = f" with a state of {dtype_name(state)}"
    if name == "rand_seed":
        return (torch.int64,), ""
    if name in _INTEGERS:
        return _INDICES, ""
    if name == "state":
        return (*COMPILED, torch.float64), ""
    if name == "dst_state":
        return (state,), beside
    return ((torch.float64,), beside) if state == torch.float64 else (COMPILED, "")


def _check_state(present: dict[str, Tensor]) -> None:
    state, dst_state = present["state"], present.get("dst_state")
    if state.dim() not in (3, 4):
        raise ValueError(
            f"state has shape {tuple(state.shape)}; it must be (batch, channels, states) or "
            "(batch, heads, channels, states)"
        )
    if not 1 <= state.shape[-1] <= MOST_STATES:
        raise ValueError(
            f"state has shape {tuple(state.shape)}; accepted are 1 to {MOST_STATES} states, its last dimension"
        )
    refuse_shared_elements("state", state)
    if dst_state is not None:
        if dst_state.dim() != state.dim() or not same_shape(dst_state.shape[1:], state.shape[1:]):
            raise ValueError(
                f"dst_state has shape {tuple(dst_state.shape)}, state {tuple(state.shape)}; they may differ in the first "
                "dimension only"
            )
        if dst_state.stride()[1:] != state.stride()[1:]:
            raise ValueError(
                f"dst_state has strides {dst_state.stride()}, state {state.stride()}; they may differ in the first "
                "dimension only"
            )
        refuse_shared_elements("dst_state", dst_state)
    seed = present.get("rand_seed")
    if seed is None:
        return
    if seed.numel() != 1:
        raise ValueError(f"rand_seed has shape {tuple(seed.shape)}; it must have one element")
    if state.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(
            f"rand_seed is for states of bfloat16 and float16, which are rounded; state has dtype {dtype_name(state.dtype)}"
        )


def _count_tokens(present: dict[str, Tensor]) -> Any:
    """How many tokens all sequences have; from ``cu_seqlens``, indices or the state, which are checked."""
    indices, cu_seqlens = present.get("state_batch_indices"), present.get("cu_seqlens")
    batch = tokens = present["state"].shape[0]
    if cu_seqlens is not None:
        tokens = present["x"].shape[0] if present["x"].dim() else 0
        check_cu_seqlens(cu_seqlens, tokens, whole=False)
        _refuse_gaps("cu_seqlens", cu_seqlens)
        batch = cu_seqlens.shape[0] - 1
    elif indices is not None:
        batch = tokens = indices.shape[0] if indices.dim() else 0
    for name in ("state_batch_indices", "dst_state_batch_indices"):
        if name in present:
            _check_slots(name, present[name].shape, batch)
    _check_own_slots(present, batch)
    _check_columns(indices, present.get("dst_state_batch_indices"))
    _check_accepted(present.get("num_accepted_tokens"), indices, batch)
    return tokens


def _check_slots(name: str, shape: torch.Size, batch: Any) -> None:
    if len(shape) not in (1, 2) or surely(shape[-1] == 0 and len(shape) == 2):
        raise ValueError(f"{name} has shape {tuple(shape)}; it must be (batch,) or (batch, tokens)")
    if surely(shape[0] != batch):
        raise ValueError(f"{name} has shape {tuple(shape)}; there are {batch} sequences")


def _check_own_slots(present: dict[str, Tensor], batch: Any) -> None:
    """Sequences whose slots have no indices have those of their own numbers."""
    if "state_batch_indices" in present:
        return
    pools = ["state"]
    if "dst_state_batch_indices" not in present and "dst_state" in present:
        pools.append("dst_state")
    for name in pools:
        if surely(present[name].shape[0] < batch):
            raise ValueError(
                f"{name} has shape {tuple(present[name].shape)}; {batch} sequences need as many slots, or indices"
            )


def _check_columns(indices: Tensor | None, targets: Tensor | None) -> None:
    if targets is None or indices is None or targets.dim() + indices.dim() < 4:
        return
    if not same_shape(indices.shape, targets.shape):
        raise ValueError(
            f"dst_state_batch_indices has shape {tuple(targets.shape)}, state_batch_indices {tuple(indices.shape)}; they "
            "must be the same"
        )


def _check_accepted(accepted: Tensor | None, indices: Tensor | None, batch: Any) -> None:
    """Columns of slots and numbers of accepted tokens go together."""
    several = indices is not None and indices.dim() == 2
    if accepted is None:
        if several:
            raise ValueError(
                "state_batch_indices of shape (batch, tokens) need num_accepted_tokens, which is None"
            )
        return
    if not several:
        shape = None if indices is None else tuple(indices.shape)
        raise ValueError(
            "num_accepted_tokens need state_batch_indices of shape (batch, tokens); "
            + ("these are None" if shape is None else f"the shape is {shape}")
        )
    if not same_shape(accepted.shape, (batch,)):
        raise ValueError(
            f"num_accepted_tokens has shape {tuple(accepted.shape)}; it must be ({batch},)"
        )
    _refuse_gaps("num_accepted_tokens", accepted)


def _refuse_gaps(name: str, tensor: Tensor) -> None:
    if not surely_contiguous(tensor):
        raise ValueError(
            f"{name} has the stride {tensor.stride(0)}; it must be contiguous: pass {name}.contiguous()"
        )


def _check_shapes(present: dict[str, Tensor], batch: Any) -> None:
    """``batch`` is the number of rows of x."""
    state = present["state"]
    channels, states = tuple(state.shape[1:-1]), state.shape[-1]
    expected = {
        **dict.fromkeys(("x", "dt", "z"), (batch, *channels)),
        "A": (*channels, states),
        **dict.fromkeys(("D", "dt_bias"), channels),
    }
    by = f"for a state of shape {tuple(state.shape)}"
    if "cu_seqlens" in present:
        by += f" and {batch} tokens of all sequences"
    elif "state_batch_indices" in present:
        by += f" and {batch} state_batch_indices"
    for name, shape in expected.items():
        if name in present and not same_shape(present[name].shape, shape):
            raise ValueError(
                f"{name} has shape {tuple(present[name].shape)}; {by} it must be {shape}"
            )
    for name in "BC":
        _check_projection(name, present[name].shape, batch, channels[0], states, len(channels) == 2)
    if present["B"].dim() == present["C"].dim() == 3 and surely(
        present["B"].shape[1] != present["C"].shape[1]
    ):
        raise ValueError(
            f"B has {present['B'].shape[1]} groups, C {present['C'].shape[1]}; both must have as many"
        )


def _check_projection(
    name: str, shape: Any, batch: Any, divided: Any, states: Any, heads: bool
) -> None:
    """``divided`` are the heads, or channels, that groups share among them."""
    if same_shape(shape, (batch, states)):
        return
    fits = (
        len(shape) == 3
        and same_shape((shape[0], shape[2]), (batch, states))
        and shape[1] > 0
        and divided % shape[1] == 0
    )
    if not fits:
        what = "heads" if heads else "channels"
        raise ValueError(
            f"{name} has shape {tuple(shape)}; it must be {(batch, states)} or ({batch}, groups, {states}) with "
            f"groups that divide the {divided} {what}"
        )
