"""What ``linear_scan`` accepts, and how its arguments become what the kernels take.

Conversions are torch's own operators, so gradients flow back through them: to the dtype, and by a sum
to the shape, that was given.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from scan_registry.base.symbols import numbers, same_shape, surely
from scan_registry.dispatch.select import BACKENDS
from scan_registry.kernels.linear_scan.reference import compute_dtype, state_shape, states_dtype
from scan_registry.ops import values

_is_compiling = torch.compiler.is_dynamo_compiling

COMPILED = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)
#: complex128 has no kernels for GPUs; it is there for tests of derivatives.
ACCEPTED = (*COMPILED, torch.complex128)
_NARROW = (torch.bfloat16, torch.float16)
_OFFSETS = (torch.int32, torch.int64)


class Options(NamedTuple):
    """The arguments of a scan that are no tensors. ``dim`` is negative: it counts from the last
    dimension, and so stays right where a dimension is added in front."""

    dim: int = -1
    reverse: bool = False
    final: bool = False
    backend: str = "auto"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_tensors(gates: Any, tokens: Any, initial_state: Any, cu_seqlens: Any) -> None:
    """Refuse what are no dense tensors on one device; ``TypeError`` or ``ValueError`` names it."""
    optional = {"initial_state": initial_state, "cu_seqlens": cu_seqlens}
    given = {"gates": gates, "tokens": tokens}
    # ``|=`` would break the graph of torch.compile in torch 2.6.
    given.update({name: value for name, value in optional.items() if value is not None})
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(value).__name__}")
        if value.layout != torch.strided or value.is_nested:
            values = f"{name}.values() with dim=0 and cu_seqlens={name}.offsets()"
            refuse_layout(name, value, of_jagged=values)
    for name, value in given.items():
        if value.device != tokens.device:
            raise ValueError(
                f"{name} is on {value.device}, tokens on {tokens.device}; "
                "they must be on one device"
            )


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


def refuse_expanded(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that is to be changed in place if some of its elements share memory, as in an expanded
    tensor."""
    if any(
        surely(stride == 0) and not surely(size <= 1)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise ValueError(
            f"{name} is expanded, with strides {tuple(tensor.stride())}; it is changed in place, so pass {name}.clone()"
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


def as_bool(name: str, value: Any) -> bool:
    """A bool, or numpy's, which torch's own functions take, too; else ``TypeError``."""
    if isinstance(value, bool):
        return value
    kind = type(value)
    if kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"):
        return bool(value)
    raise TypeError(f"{name} is {value!r}; it must be a bool")


def as_index(name: str, value: Any) -> int:
    """An int, or what stands for one, such as numpy's integers; else ``TypeError``."""
    if not isinstance(value, bool):  # which is an int to Python
        if isinstance(value, (int, torch.SymInt)):
            return value  # type: ignore[return-value]
        with suppress(TypeError):
            return operator.index(value)
    raise TypeError(f"{name} is {value!r}; it must be an int")


def check_options(
    gates: Tensor, tokens: Tensor, options: Options
) -> tuple[tuple[int, ...], Options]:
    """The shape of the states, and the options with a negative ``dim``; an exception names what is not
    accepted."""
    backend, dim = options.backend, options.dim
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; accepted are {', '.join(BACKENDS)}")
    accepted = COMPILED if tokens.is_cuda and backend != "reference" else ACCEPTED
    for name, tensor in (("gates", gates), ("tokens", tokens)):
        if tensor.dtype not in accepted:
            names = ", ".join(map(_name, accepted))
            raise TypeError(f"{name} has dtype {tensor.dtype}; accepted are {names}")
    _check_mix(gates.dtype, tokens.dtype)
    if not tokens.is_cuda and backend in ("cuda", "triton"):
        raise ValueError(
            f"backend is {backend!r}, which needs a CUDA device; tokens are on {tokens.device}"
        )
    reverse = as_bool("reverse", options.reverse)
    final = as_bool("return_final_state", options.final)
    dim = as_index("dim", dim)
    shape = common_shape(gates.shape, tokens.shape)
    if shape is None:
        raise ValueError(
            f"gates have shape {tuple(gates.shape)}, tokens {tuple(tokens.shape)}; "
            "they must broadcast to one shape"
        )
    if len(shape) == 0:
        raise ValueError("gates and tokens are scalars; they need a time dimension")
    if not -len(shape) <= dim < len(shape):
        raise ValueError(
            f"dim is {dim}; tensors of {len(shape)} dimensions accept "
            f"{-len(shape)} to {len(shape) - 1}"
        )
    negative = dim if dim < 0 else dim - len(shape)
    return shape, Options(negative, reverse, final, backend)


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


def _check_mix(gates: torch.dtype, tokens: torch.dtype) -> None:
    """float64 and complex128 mix with one another, and the narrower ones with one another."""
    wide = (torch.float64, torch.complex128)
    if (gates in wide) != (tokens in wide):
        raise TypeError(
            f"gates have dtype {gates}, tokens {tokens}; float64 does not mix with narrower dtypes"
        )


def kernel_dtypes(gates: torch.dtype, tokens: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """What gates and tokens have to be converted to, without loss, for a kernel to take them: both are
    of the states' dtype, or narrow tokens have float32 gates."""
    states = states_dtype(gates, tokens)
    if gates == states or (states in _NARROW and gates == torch.float32):
        return gates, states
    return (torch.float32 if states in _NARROW else states), states


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
        raise TypeError(
            f"initial_state has dtype {initial_state.dtype}, which does not go with states of "
            f"{states}"
        )


def check_cu_seqlens(cu_seqlens: Tensor, time: int) -> None:
    """Refuse ``cu_seqlens`` that cannot be bounds of packed sequences. On a GPU the values are checked only under
    ``SCAN_REGISTRY_DEBUG``, as the check waits for the GPU."""
    if cu_seqlens.dtype not in _OFFSETS:
        raise TypeError(f"cu_seqlens has dtype {cu_seqlens.dtype}; accepted are int32 and int64")
    if cu_seqlens.dim() == 1 and _is_compiling():
        torch._check(cu_seqlens.shape[0] >= 2)
    elif cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"cu_seqlens has shape {tuple(cu_seqlens.shape)}; it must be (sequences + 1,), with one "
            "sequence at least"
        )
    values.check_bounds(cu_seqlens, time)


def normalised(
    gates: Any, tokens: Any, initial_state: Any, cu_seqlens: Any, options: Options
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Options]:
    """The arguments as the operator takes them: gates that broadcast to the tokens' shape, in dtypes
    that a kernel has; a state in its full shape and the dtype of the computation; int64 bounds."""
    check_tensors(gates, tokens, initial_state, cu_seqlens)
    shape, options = check_options(gates, tokens, options)
    gates_dtype, states = kernel_dtypes(gates.dtype, tokens.dtype)
    # Tensors that need no conversion are passed on as they are: the first call of any torch operator in a process is
    # slow.
    if gates.dtype != gates_dtype:
        gates = gates.to(gates_dtype)
    if tokens.dtype != states:
        tokens = tokens.to(states)
    if not same_shape(tokens.shape, shape):
        tokens = tokens.expand(shape)
    sequences = None
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, shape[options.dim])
        cu_seqlens = cu_seqlens.to(torch.int64).contiguous()
        sequences = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        of_state = state_shape(shape, options.dim % len(shape), sequences)
        check_initial_state(initial_state, of_state, states)
        initial_state = initial_state.to(compute_dtype(states))
        if not same_shape(initial_state.shape, of_state):
            initial_state = initial_state.expand(of_state)
    return gates, tokens, initial_state, cu_seqlens, options
