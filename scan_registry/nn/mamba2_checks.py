"""What ``Mamba2`` refuses beyond what ``Mamba`` does."""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scan_registry.nn.common_checks import check_size, expect_device, expect_size
from scan_registry.ops.checks import check_cu_seqlens

if TYPE_CHECKING:
    from scan_registry.nn.mamba2 import Mamba2

_INTEGERS = (torch.int32, torch.int64)


def check_ranges(conv_init: Any, A_init_range: Any, dt_limit: Any, dt_init_floor: Any) -> None:
    """Refuse what is no pair of numbers, no range, or out of range."""
    if conv_init is not None and not _is_number(conv_init):
        raise TypeError(f"conv_init should be a number or None, got: {conv_init!r}")
    if conv_init is not None and not 0 <= conv_init < math.inf:
        raise ValueError(f"conv_init should be 0 or more, got: {conv_init!r}")
    if not _is_number(dt_init_floor):
        raise TypeError(f"dt_init_floor should be a number, got: {dt_init_floor!r}")
    if not 0 < dt_init_floor < math.inf:
        raise ValueError(f"dt_init_floor should be above 0, got: {dt_init_floor!r}")
    for name, pair in {"A_init_range": A_init_range, "dt_limit": dt_limit}.items():
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(map(_is_number, pair)):
            raise TypeError(f"{name} should be two numbers, got: {pair!r}")
        if math.isnan(pair[0]) or math.isnan(pair[1]):
            raise ValueError(f"{name} should have no NaN, got: {pair!r}")
        if not pair[0] <= pair[1]:
            raise ValueError(f"{name} should not begin above its end, got: {pair!r}")
    if not 0 < A_init_range[0] <= A_init_range[1] < math.inf:
        raise ValueError(f"A_init_range should be two numbers above 0, got: {A_init_range!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_split(features: int, d_ssm: Any, headdim: int, ngroups: int) -> None:
    """Refuse heads that do not divide the features of the scan, and groups that do not divide the heads."""
    if d_ssm is not None:
        check_size("d_ssm", d_ssm, " or None")
        if d_ssm > features:
            raise ValueError(
                f"d_ssm should be at most expand * d_model, here {features}, got: {d_ssm}"
            )
    channels = features if d_ssm is None else d_ssm
    if channels % headdim:
        what = "d_ssm" if d_ssm is not None else "expand * d_model"
        raise ValueError(f"headdim should divide {what}, got: {headdim} and {channels}")
    if channels // headdim % ngroups:
        raise ValueError(
            f"ngroups should divide the heads, got: {ngroups} and {channels // headdim}"
        )


def unfolded(module: Mamba2, u: Any, seqlen: Any) -> Any:
    """``u`` with batch and time in two dimensions."""
    if seqlen is None or not isinstance(u, Tensor):
        return u
    name = type(module).__name__
    if not isinstance(seqlen, int) or isinstance(seqlen, bool):
        raise TypeError(f"{name}: Expected seqlen of type int, got {type(seqlen).__name__}")
    if seqlen < 1:
        raise ValueError(f"{name}: Expected seqlen of 1 or more, got {seqlen}")
    if u.dim() != 2 or u.shape[0] % seqlen:
        raise ValueError(
            f"{name}: Expected u of size (batch * seqlen, {module.d_model}) with seqlen={seqlen}, got {tuple(u.shape)}"
        )
    return u.unflatten(0, (u.shape[0] // seqlen, seqlen))


def folded(y: Tensor, seqlen: int | None) -> Tensor:
    """``y`` with batch and time in one dimension, if ``u`` had them so."""
    return y if seqlen is None else y.flatten(0, 1)


def packed_sequences(module: Mamba2, u: Tensor, seq_idx: Any, cu_seqlens: Any) -> int:
    """How many sequences have states of their own. Refuses ``seq_idx`` and ``cu_seqlens`` that do not go with u."""
    name, (batch, time) = type(module).__name__, u.shape[:2]
    for what, value in {"seq_idx": seq_idx, "cu_seqlens": cu_seqlens}.items():
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: Expected {what} to be a Tensor, got {type(value).__name__}")
        if value.dtype not in _INTEGERS:
            raise TypeError(
                f"{name}: Expected {what} of dtype torch.int32, torch.int64, got {value.dtype}"
            )
        expect_device(name, what, value, u)
    if seq_idx is not None:
        expect_size(name, "seq_idx", seq_idx, (batch, time))
    if cu_seqlens is None:
        return batch
    if batch != 1:
        raise ValueError(
            f"{name}: Expected u of one batch row with cu_seqlens, got {batch} rows of {time} steps, {tuple(u.shape)}. "
            f"For rows that are packed each in its own way pass seq_idx of shape {(batch, time)} instead; or make one row of "
            f"them, u.reshape(1, {batch * time}, {module.d_model}), and add {time} times the number of its row to each bound"
        )
    check_cu_seqlens(cu_seqlens, time)
    return int(cu_seqlens.shape[0]) - 1
