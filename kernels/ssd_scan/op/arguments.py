"""What ``ssd_scan`` accepts, and how its arguments become what the kernels take.

Conversions are torch's own operators, so gradients flow back through them to the dtype of the caller's tensor.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scan_registry.base.symbols import same_shape
from scan_registry.kernels.ssd_scan import reference
from scan_registry.ops.checks import as_bool, as_index, check_cu_seqlens, check_tensors, described
from scan_registry.ops.values import as_int32

BACKENDS = ("auto", "cuda", "triton", "reference")
#: Dtypes of ``x`` that kernels are built for.
COMPILED = (torch.float32, torch.bfloat16, torch.float16)
#: Those that run in torch's matrix products, too.
ACCEPTED = (*COMPILED, torch.float64)
_INTEGERS = (torch.int32, torch.int64)


class Options(NamedTuple):
    """The arguments that are no tensors. ``chunk_size`` is what composed calls compute at a time; 0: as they choose. ``final``
    says whether the final state is asked for."""

    softplus: bool = False
    low: float = 0.0
    high: float = math.inf
    chunk_size: int = 0
    final: bool = False
    backend: str = "auto"


class Arguments(NamedTuple):
    """Tensors as the operator takes them: ``x``, ``B``, ``C`` and ``z`` in one dtype; ``dt`` in that, or in the computation's, as
    the others but the last two, which are int32."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None
    seq_idx: Tensor | None
    cu_seqlens: Tensor | None


#: How many of the ``Arguments`` have derivatives, the first ones.
DIFFERENTIABLE = 9


def normalised(
    x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, z: Any, dt_bias: Any, initial_state: Any, seq_idx: Any,
    cu_seqlens: Any, softplus: Any, limit: Any, chunk_size: Any, final: Any, backend: Any,
) -> tuple[Arguments, Options]:  # fmt: skip
    """The checked arguments, converted; an exception names what is not accepted."""
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend is {described(backend)}; accepted are {', '.join(BACKENDS)}")
    low, high = _limits(limit)
    softplus, final = as_bool("dt_softplus", softplus), as_bool("return_final_state", final)
    options = Options(softplus, low, high, _chunk(chunk_size), final, backend)
    required = {"x": x, "dt": dt, "A": A, "B": B, "C": C}
    optional = {"D": D, "z": z, "dt_bias": dt_bias, "initial_state": initial_state}
    # Not `|` of two dicts, which torch.compile of 2.6 does not support.
    present = {**required, **{name: t for name, t in optional.items() if t is not None}}
    _check_tensors(present, seq_idx, cu_seqlens)
    _check_shapes(present, seq_idx, cu_seqlens)
    _check_backend(x, backend)
    dtype, wide = x.dtype, reference.compute_dtype(x.dtype)

    def to(tensor: Any, wanted: torch.dtype) -> Any:
        return None if tensor is None else tensor.to(wanted)

    bounds = None if cu_seqlens is None else cu_seqlens.to(torch.int32).contiguous()
    numbers = None if seq_idx is None else as_int32(seq_idx)
    arguments = Arguments(
        x, dt if dt.dtype == dtype else dt.to(wide), A.to(wide), B.to(dtype), C.to(dtype), to(D, wide), to(z, dtype),
        to(dt_bias, wide), to(initial_state, wide), numbers, bounds,
    )  # fmt: skip
    return arguments, options


def _limits(limit: Any) -> tuple[float, float]:
    pair = isinstance(limit, (tuple, list)) and len(limit) == 2
    if not pair or not all(map(_is_number, limit)):
        raise TypeError(
            f"dt_limit is {described(limit)}; it must be a pair of numbers, such as (0.0, 0.1)"
        )
    low, high = float(limit[0]), float(limit[1])
    if low <= high:
        return low, high
    if math.isnan(low) or math.isnan(high):
        raise ValueError(f"dt_limit is {limit!r}; accepted are two numbers that are not NaN")
    raise ValueError(f"dt_limit is {limit!r}; the first number must not exceed the second")


def _is_number(value: Any) -> bool:
    return type(value) is float or (isinstance(value, Real) and not isinstance(value, bool))


def _chunk(chunk_size: Any) -> int:
    if chunk_size is None:
        return 0
    steps = as_index("chunk_size", chunk_size)
    if steps < 1:
        raise ValueError(f"chunk_size is {chunk_size!r}; accepted are positive integers and None")
    return steps


def _check_backend(x: Tensor, backend: str) -> None:
    """Refuse a kernel where none can run."""
    if backend not in ("cuda", "triton"):
        return
    if x.device.type == "cpu":
        raise ValueError(f"backend is {backend!r}, which needs a CUDA device; x is on {x.device}")
    if x.dtype not in COMPILED:
        raise ValueError(
            f"backend is {backend!r}, which has no kernel for {x.dtype}; accepted are auto and reference"
        )


def _check_tensors(present: dict[str, Any], seq_idx: Any, cu_seqlens: Any) -> None:
    integers = {"seq_idx": seq_idx, "cu_seqlens": cu_seqlens}
    named = {**present, **{name: t for name, t in integers.items() if t is not None}}
    check_tensors(named)
    for name, value in present.items():
        if value.dtype not in ACCEPTED:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in ACCEPTED)
            raise TypeError(f"{name} has dtype {value.dtype}; accepted are {names}")
        if value.dtype == torch.float64 and present["x"].dtype != torch.float64:
            raise TypeError(
                f"{name} has dtype {value.dtype}, x {present['x'].dtype}; float64 does not mix with narrower dtypes"
            )
    if seq_idx is not None and seq_idx.dtype not in _INTEGERS:
        raise TypeError(f"seq_idx has dtype {seq_idx.dtype}; accepted are int32 and int64")


def _check_shapes(
    present: dict[str, Tensor], seq_idx: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    x, B = present["x"], present["B"]
    if x.dim() != 4 or x.shape[2] < 1:
        raise ValueError(
            f"x has shape {tuple(x.shape)}; it must be (batch, time, heads, size of a head) with one head at least"
        )
    batch, time, heads, size = x.shape
    fits = B.dim() == 4 and same_shape(B.shape[:2], (batch, time))
    if not fits or B.shape[2] < 1 or heads % B.shape[2] or B.shape[3] < 1:
        raise ValueError(
            f"B has shape {tuple(B.shape)}; for x of shape {tuple(x.shape)} it must be ({batch}, {time}, groups, "
            f"states) with groups that divide {heads} and one state at least"
        )
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, time)
    between = () if cu_seqlens is None else (cu_seqlens.shape[0] - 1,)
    accepted: dict[str, tuple[tuple[int, ...], ...]] = {
        "dt": ((batch, time, heads),),
        "A": ((heads,),),
        "C": (tuple(B.shape),),
        "D": ((heads,), (heads, size)),
        "z": ((batch, time, heads, size),),
        "dt_bias": ((heads,),),
        "initial_state": ((batch, *between, heads, size, B.shape[3]),),
        "seq_idx": ((batch, time),),
    }
    every = present if seq_idx is None else {**present, "seq_idx": seq_idx}
    for name, shapes in accepted.items():
        if name in every and not any(same_shape(every[name].shape, shape) for shape in shapes):
            raise ValueError(
                f"{name} has shape {tuple(every[name].shape)}; for x of shape {tuple(x.shape)} and B of shape "
                f"{tuple(B.shape)} it must be {' or '.join(map(str, shapes))}"
            )
