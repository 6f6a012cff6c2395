"""``linear_scan_step``: one step of a linear recurrence, in place of its state, for generation."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from scan_registry.base.symbols import same_shape
from scan_registry.kernels.linear_scan.op.arguments import ACCEPTED, COMPILED
from scan_registry.ops.checks import (
    check_dense,
    common_shape,
    refuse_inference,
    refuse_mapped,
    refuse_shared_elements,
)
from scan_registry.ops.pools import StateRows, step_rows

__all__ = ["linear_scan_step"]

_is_compiling = torch.compiler.is_compiling
_NARROW = (torch.bfloat16, torch.float16)
_WIDE = (torch.float64, torch.complex128)


def linear_scan_step(state: Tensor | StateRows, gate: Tensor, token: Tensor) -> Tensor:
    """state = gate · state + token, in place: one step of ``linear_scan`` along time, for generation.

    It is torch's own ``addcmul``, so one launch on a GPU, which a CUDA graph can record and ``torch.compile`` fuses with
    what is around it. Narrow dtypes are computed in float32 and rounded once, when the state is written.

    Args:
        state: (batch, channels), or of any shape and strides: float32, bfloat16, float16, float64 or complex64, on the
            CPU complex128 too. A float32 state goes with narrower gates and tokens, as the final state of
            ``linear_scan`` does. No element may be there twice, as in an expanded tensor. Or ``StateRows``, rows of a
            pool, of which the tensors below have one each; torch's operators then gather and scatter them.
        gate: broadcasts to the shape of ``state``. Its dtype may differ from those of the others; float64 goes with
            float64 only, and complex numbers with a complex state.
        token: broadcasts to the shape of ``state``; its dtype is free as that of ``gate`` is.

    Returns:
        ``state``; of ``StateRows`` the new states of the sequences.

    Raises:
        RuntimeError: a derivative is asked for: a tensor requires one, and ``torch.no_grad()`` or
            ``torch.inference_mode()`` is not in effect. There is none, as the state that it would need is overwritten;
            ``linear_scan`` has derivatives. Or ``torch.vmap`` maps over a tensor; or the state was made under
            ``torch.inference_mode()``, which is not in effect.
        TypeError: an argument is not a tensor, or a dtype is not supported or does not mix.
        ValueError: a shape does not broadcast to that of the state, or devices differ.
    """
    if isinstance(state, StateRows):
        step = partial(linear_scan_step, gate=gate, token=token)
        return step_rows("linear_scan_step", state, step, gate, token)
    if not _is_usual(state, gate, token):
        _check(state, gate, token)
    if not _is_compiling():
        refuse_inference("state", state)
        refuse_mapped("linear_scan_step", "state", state, gate, token)
    if torch.is_grad_enabled() and (
        state.requires_grad or gate.requires_grad or token.requires_grad
    ):
        raise RuntimeError(
            "linear_scan_step has no derivative, and a tensor requires one; call it under torch.no_grad(), or train "
            "with linear_scan"
        )
    if _is_compiling():  # which takes no ``out`` with gaps
        return state.copy_(torch.addcmul(token, gate, state))
    return torch.addcmul(token, gate, state, out=state)


def _is_usual(state: Any, gate: Any, token: Any) -> bool:
    """Whether these are tensors that ``_check`` would accept, as those of nearly all calls are; this costs less."""
    tensors = state, gate, token
    if not all(type(tensor) is Tensor and not tensor.is_nested for tensor in tensors):
        return False
    narrower = state.dtype == torch.float32 and gate.dtype in _NARROW
    return bool(
        state.dtype in COMPILED
        and (gate.dtype == state.dtype or narrower)
        and gate.dtype == token.dtype
        and state.layout == gate.layout == token.layout == torch.strided
        and state.device == gate.device == token.device
        and not _is_compiling()
        and state.shape == gate.shape == token.shape
        and state.is_contiguous()
    )


def _check(state: Any, gate: Any, token: Any) -> None:
    named = (("state", state), ("gate", gate), ("token", token))
    for name, tensor in named:
        check_dense(name, tensor)
        accepted = COMPILED if tensor.is_cuda else ACCEPTED
        if tensor.dtype not in accepted:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in accepted)
            raise TypeError(f"{name} has dtype {tensor.dtype}; accepted are {names}")
        if tensor.device != state.device:
            raise ValueError(
                f"{name} is on {tensor.device}, state on {state.device}; they must be on one device"
            )
    for name, tensor in named[1:]:
        if (tensor.dtype in _WIDE) != (state.dtype in _WIDE):
            raise TypeError(
                f"state has dtype {state.dtype}, {name} {tensor.dtype}; float64 does not mix with narrower dtypes"
            )
        if tensor.is_complex() and not state.is_complex():
            raise TypeError(
                f"{name} has dtype {tensor.dtype}, which does not go with a state of {state.dtype}"
            )
        common = common_shape(tensor.shape, state.shape)
        if common is None or not same_shape(common, state.shape):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; it must broadcast to the state's shape, "
                f"{tuple(state.shape)}"
            )
    refuse_shared_elements("state", state)
