"""What ``linear_scan`` accepts, and how its arguments become what the kernels take.

Conversions are torch's own operators, so gradients flow back through them: to the dtype, and by a sum
to the shape, that was given.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from scan_registry.base.symbols import same_shape
from scan_registry.dispatch.select import BACKENDS
from scan_registry.kernels.linear_scan.reference import compute_dtype, state_shape, states_dtype
from scan_registry.ops.checks import (
    as_bool,
    as_index,
    check_cu_seqlens,
    check_initial_state,
    common_shape,
    described,
    refuse_layout,
)

_is_compiling = torch.compiler.is_dynamo_compiling

COMPILED = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)
#: complex128 has no kernels for GPUs; it is there for tests of derivatives.
ACCEPTED = (*COMPILED, torch.complex128)
_NARROW = (torch.bfloat16, torch.float16)


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
    tensors = {"gates": gates, "tokens": tokens}
    # ``|=`` would break the graph of torch.compile in torch 2.6.
    tensors.update({name: value for name, value in optional.items() if value is not None})
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(value).__name__}")
        if value.layout != torch.strided or value.is_nested:
            values = f"{name}.values() with dim=0 and cu_seqlens={name}.offsets()"
            refuse_layout(name, value, of_jagged=values)
    for name, value in tensors.items():
        if value.device != tokens.device:
            raise ValueError(
                f"{name} is on {value.device}, tokens on {tokens.device}; "
                "they must be on one device"
            )


def check_options(
    gates: Tensor, tokens: Tensor, options: Options
) -> tuple[tuple[int, ...], Options]:
    """The shape of the states, and the options with a negative ``dim``; an exception names what is not
    accepted."""
    backend, dim = options.backend, options.dim
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend is {described(backend)}; accepted are {', '.join(BACKENDS)}")
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
