"""Checks of arguments that operators share. Each raises before anything is computed, and names the argument, what was passed and
what is accepted."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch import Tensor

from scan_registry.base.symbols import numbers, same_shape, surely
from scan_registry.ops import values

_is_compiling = torch.compiler.is_dynamo_compiling

_OFFSETS = (torch.int32, torch.int64)


def refuse_layout(name: str, tensor: Tensor, of_jagged: str | None = None) -> NoReturn:
    """Raise ``TypeError`` for a tensor that is not dense. The message says what to pass instead; ``of_jagged`` is
    that advice for a jagged tensor."""
    if tensor.layout == torch.jagged:
        kind, instead = "jagged", of_jagged or f"{name}.to_padded_tensor(0.0)"
    elif tensor.is_nested:
        kind, instead = "nested", f"{name}.to_padded_tensor(0.0)"
    elif tensor.is_mkldnn:
        kind, instead = "in oneDNN's layout", f"{name}.to_dense()"
    else:
        kind, instead = "sparse", f"{name}.to_dense()"
    raise TypeError(f"{name} is {kind}; accepted are dense tensors, so pass {instead}")


def refuse_shared_elements(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that is to be changed in place if some of its elements share memory, as in a tensor that is expanded
    or of overlapping windows."""
    if type(tensor) is Tensor and not _is_compiling() and _in_order(tensor):
        return
    if any(
        surely(stride == 0) and not surely(size <= 1)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise ValueError(
            f"{name} is expanded, with strides {tuple(tensor.stride())}; it is changed in place, so pass {name}.clone()"
        )
    if _may_overlap(tensor):
        raise ValueError(
            f"{name} has elements that share memory, with strides {tuple(tensor.stride())}; it is changed in place, so "
            f"pass {name}.clone()"
        )


def _in_order(tensor: Tensor) -> bool:
    """Whether each stride is at least what the dimensions behind it extend over, as in nearly all tensors."""
    extent = 1
    for size, stride in zip(tensor.shape[::-1], tensor.stride()[::-1], strict=True):
        if size > 1:
            if stride < extent:
                return False
            extent += (size - 1) * stride
    return True


def _may_overlap(tensor: Tensor) -> bool:
    """Whether a stride is smaller than what the dimensions of smaller strides extend over. Sizes and strides that
    torch.compile does not know yet are taken not to overlap."""
    sizes, strides = tensor.shape, tensor.stride()
    if not all(isinstance(number, int) for number in (*sizes, *strides)) or 0 in sizes:
        return False
    extent = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1:
            if stride < extent:
                return True
            extent += (size - 1) * stride
    return False


def check_dense(name: str, value: Any) -> None:
    """Refuse what is no dense tensor; ``TypeError`` names the argument."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(value).__name__}")
    if value.layout != torch.strided or value.is_nested:
        refuse_layout(name, value)


def check_tensors(named: Mapping[str, Any]) -> None:
    """Refuse what are no dense tensors on the device of the first."""
    first = next(iter(named))
    for name, value in named.items():
        check_dense(name, value)
        if value.device != named[first].device:
            raise ValueError(
                f"{name} is on {value.device}, {first} on {named[first].device}; they must be on one device"
            )


def refuse_inference(name: str, state: Any) -> None:
    """Refuse to change a tensor in place that was made under ``torch.inference_mode()``, in a call outside of it.
    Torch refuses this too, but only after the change."""
    if isinstance(state, Tensor) and state.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{name} was made under torch.inference_mode(), and is changed in place; call this under "
            f"torch.inference_mode(), too, or pass {name}.clone()"
        )


def refuse_mapped(operator: str, name: str, *tensors: Tensor | None) -> None:
    """Refuse tensors that ``torch.vmap`` maps over, for an operator that changes one in place."""
    if not torch._C._are_functorch_transforms_active():
        return
    if any(tensor is not None and values.is_mapped(tensor) for tensor in tensors):
        raise RuntimeError(
            f"{operator} changes {name} in place, which torch.vmap does not map over; pass the mapped dimension as a "
            "part of the batch"
        )


def described(value: Any) -> str:
    """A value as messages show it: tensors and arrays by their type and shape, as their elements would be pages."""
    if isinstance(shape := getattr(value, "shape", None), tuple):
        return f"a {type(value).__name__} of shape {tuple(shape)}"
    return repr(value)


def is_autocast(tensor: Tensor) -> bool:
    """Whether autocast is on where a tensor is; torch refuses to say so of devices that have none, such as meta."""
    kind = tensor.device.type
    # The usual devices first: of these torch.compile of every release knows what this says.
    has_autocast = kind in ("cpu", "cuda") or torch.amp.is_autocast_available(kind)
    return has_autocast and torch.is_autocast_enabled(kind)


def as_bool(name: str, value: Any) -> bool:
    """A bool, or numpy's, which torch's own functions take, too; else ``TypeError``."""
    if isinstance(value, bool):
        return value
    kind = type(value)
    if kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"):
        return bool(value)
    raise TypeError(f"{name} is {described(value)}; it must be a bool")


def as_index(name: str, value: Any) -> int:
    """An int, or what stands for one, such as numpy's integers; else ``TypeError``."""
    if not isinstance(value, bool):  # which is an int to Python
        if isinstance(value, (int, torch.SymInt)):
            return value  # type: ignore[return-value]
        with suppress(TypeError):
            return operator.index(value)
    raise TypeError(f"{name} is {described(value)}; it must be an int")


def common_shape(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...] | None:
    """The shape that both broadcast to, if there is one; no ``torch.Size``, which would break the graph of
    torch.compile in torch 2.6; nor ``torch.broadcast_shapes``, which makes a process import sympy. That
    takes longer than all else that a first call does."""
    one, other = numbers(one), numbers(other)
    if _is_compiling() or not all(isinstance(size, int) for size in (*one, *other)):
        return _common_symbols(one, other)
    if one == other:
        return tuple(one)
    pairs = [*_aligned(one, other)]
    if any(a != b and 1 not in (a, b) for a, b in pairs):
        return None
    return tuple(b if a == 1 else a for a, b in pairs)


def _aligned(one: Sequence[int], other: Sequence[int]) -> zip[tuple[int, int]]:
    """Pairs of sizes, counted from the last dimension."""
    rank = max(len(one), len(other))
    mine, yours = ((1,) * (rank - len(shape)) + tuple(shape) for shape in (one, other))
    return zip(mine, yours, strict=True)


def _common_symbols(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...] | None:
    """The same for sizes that torch.compile may not know yet. As for torch's own operators, one that may
    or may not be 1 is taken not to be, and that two such ones agree is checked when they are known."""
    sizes = []
    for a, b in _aligned(one, other):
        if surely(a == 1):
            sizes.append(b)
        elif surely(b == 1):
            sizes.append(a)
        elif surely(a != b):
            return None
        else:
            torch._check(a == b)
            sizes.append(a)
    return tuple(sizes)


def check_initial_state(initial_state: Tensor, shape: Sequence[int], states: torch.dtype) -> None:
    """Refuse a state that does not broadcast to ``shape``, or is not of a dtype that goes with it."""
    common = common_shape(initial_state.shape, shape)
    if common is None or not same_shape(common, shape):
        raise ValueError(
            f"initial_state has shape {tuple(initial_state.shape)}; it must broadcast to the "
            f"state's shape, {tuple(shape)}"
        )
    fractions = initial_state.is_floating_point() or initial_state.is_complex()
    if not fractions or (initial_state.is_complex() and not states.is_complex):
        kinds = (
            "floating-point and complex dtypes" if states.is_complex else "floating-point dtypes"
        )
        raise TypeError(
            f"initial_state has dtype {initial_state.dtype}, which does not go with states of "
            f"{states}; accepted are {kinds}"
        )


def check_cu_seqlens(cu_seqlens: Tensor, time: int, whole: bool = True) -> None:
    """Refuse ``cu_seqlens`` that cannot be bounds of packed sequences, of all steps or, with ``whole=False``, of some. There may
    be no sequence where there is no step. On a GPU the values are checked only under ``SCAN_REGISTRY_DEBUG``, as the check
    waits for the GPU."""
    if cu_seqlens.dtype not in _OFFSETS:
        raise TypeError(f"cu_seqlens has dtype {cu_seqlens.dtype}; accepted are int32 and int64")
    least = 1 if surely(time == 0) else 2
    if cu_seqlens.dim() == 1 and _is_compiling():
        torch._check(cu_seqlens.shape[0] >= least)
    elif cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < least:
        raise ValueError(
            f"cu_seqlens has shape {tuple(cu_seqlens.shape)}; it must be (sequences + 1,), with one "
            "sequence at least"
        )
    values.check_bounds(cu_seqlens, time, whole)


def check_reset(reset: Any, shape: Sequence[int], device: torch.device) -> None:
    """Raise if ``reset`` is not a bool tensor of ``shape``, which is batch and time, or time alone."""
    check_dense("reset", reset)
    if reset.dtype != torch.bool:
        raise TypeError(f"reset has dtype {reset.dtype}; accepted is bool")
    if reset.device != device:
        raise ValueError(
            f"reset is on {reset.device}, the sequences on {device}; they must be on one device"
        )
    if not shapes_agree(reset.shape, shape):
        raise ValueError(
            f"reset has shape {tuple(reset.shape)}; it must be {tuple(shape)}, "
            + ("batch and time" if len(shape) == 2 else "time")
        )


def shapes_agree(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two shapes are the same. Sizes that torch.compile does not know yet are assumed to agree, and checked when the
    compiled code runs."""
    one, other = numbers(one), numbers(other)
    if len(one) != len(other) or any(surely(a != b) for a, b in zip(one, other, strict=True)):
        return False
    if not same_shape(one, other):
        for a, b in zip(one, other, strict=True):
            torch._check(a == b)
    return True
