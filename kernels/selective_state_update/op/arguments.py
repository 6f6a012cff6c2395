"""What ``selective_state_update`` accepts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from scan_registry.base.symbols import same_shape, surely
from scan_registry.kernels.selective_state_update.problem import MOST_STATES
from scan_registry.ops.checks import as_bool, described, refuse_layout, refuse_shared_elements

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


_NAMES = (*Arguments._fields[:-1], "state_batch_indices")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_backend(backend: Any) -> None:
    """Refuse what is none of the ``BACKENDS``."""
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend is {described(backend)}; accepted are {', '.join(BACKENDS)}")


def check(tensors: tuple[Any, ...], softplus: Any, backend: Any) -> Arguments:
    """The arguments; an exception names what is not accepted."""
    as_bool("dt_softplus", softplus)
    check_backend(backend)
    optional = ("D", "z", "dt_bias", "state_batch_indices")
    present = {
        name: tensor
        for name, tensor in zip(_NAMES, tensors, strict=True)
        if not (tensor is None and name in optional)
    }
    _check_tensors(present)
    _check_shapes(present)
    state = present["state"]
    if not state.is_cuda and state.device.type in ("cpu", "cuda") and backend in ("cuda", "triton"):
        raise ValueError(
            f"backend is {backend!r}, which needs a CUDA device; state is on {state.device}"
        )
    return Arguments(*tensors)


def _check_tensors(present: dict[str, Any]) -> None:
    for name, value in present.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(value).__name__}")
        if value.layout != torch.strided or value.is_nested:
            refuse_layout(name, value)
        if value.device != present["state"].device:
            raise ValueError(
                f"{name} is on {value.device}, state on {present['state'].device}; they must be on one device"
            )
    wide = present["state"].dtype == torch.float64
    for name, value in present.items():
        if name == "state_batch_indices":
            accepted: tuple[torch.dtype, ...] = _INDICES
        elif name == "state":
            accepted = (*COMPILED, torch.float64)
        else:
            accepted = (torch.float64,) if wide else COMPILED
        if value.dtype not in accepted:
            beside = " with a state of float64" if wide and name != "state" else ""
            raise TypeError(
                f"{name} has dtype {dtype_name(value.dtype)}; accepted are {', '.join(map(dtype_name, accepted))}{beside}"
            )


def _check_shapes(present: dict[str, Tensor]) -> None:
    state, indices = present["state"], present.get("state_batch_indices")
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
    if indices is not None and indices.dim() != 1:
        raise ValueError(
            f"state_batch_indices has shape {tuple(indices.shape)}; it must be (batch,)"
        )
    batch = state.shape[0] if indices is None else indices.shape[0]
    channels, states = tuple(state.shape[1:-1]), state.shape[-1]
    expected = {
        **dict.fromkeys(("x", "dt", "z"), (batch, *channels)),
        "A": (*channels, states),
        **dict.fromkeys(("D", "dt_bias"), channels),
    }
    by = f"for a state of shape {tuple(state.shape)}"
    if indices is not None:
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
