"""What ``selective_scan`` accepts, and how its arguments become what the kernels take.

Conversions are torch's own operators, so gradients flow back through them to the dtype that was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scan_registry.kernels.selective_scan import reference
from scan_registry.kernels.selective_scan.problem import MOST_STATES
from scan_registry.ops.checks import as_bool, check_cu_seqlens, check_tensors, described

BACKENDS = ("auto", "cuda", "triton", "reference")
COMPILED = (torch.float32, torch.bfloat16, torch.float16)
#: float64 has no kernels; it is there for checks of derivatives.
ACCEPTED = (*COMPILED, torch.float64)
_COMPLEX = (torch.complex64, torch.complex128)
_WIDE = (torch.float64, torch.complex128)


class Options(NamedTuple):
    """The arguments that are no tensors."""

    softplus: bool = False
    backend: str = "auto"


class Arguments(NamedTuple):
    """Tensors as the operator takes them: ``u``, ``delta``, ``z``, and ``B`` and ``C`` if they change with time, in one
    dtype; the others in that of the computation. ``B`` and ``C`` that change with time have a dimension of groups."""

    u: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    delta_bias: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """All but the bounds."""
        return tuple(self)[:9]


def grouped(arguments: Arguments) -> Arguments:
    """With a dimension of groups in B and C that change with time."""
    if arguments.B.dim() != 3 and arguments.C.dim() != 3:
        return arguments
    B, C = (x.unsqueeze(1) if x.dim() == 3 else x for x in (arguments.B, arguments.C))
    return arguments._replace(B=B, C=C)


def as_given(raw: Sequence[Tensor | None], taken: Arguments) -> tuple[Tensor | None, ...]:
    """What ``normalised`` made of ``raw``, with the raw tensors where all that it added are dimensions of one group."""
    pairs = zip(raw, taken, strict=True)
    return tuple(
        one if one is other or (n in (3, 4) and _same_memory(one, other)) else other
        for n, (one, other) in enumerate(pairs)
    )


def _same_memory(one: Any, other: Any) -> bool:
    return bool(one.dtype == other.dtype and one.data_ptr() == other.data_ptr())


def normalised(
    u: Any, delta: Any, A: Any, B: Any, C: Any, D: Any, z: Any, delta_bias: Any, initial_state: Any,
    cu_seqlens: Any, softplus: Any, backend: Any,
) -> Arguments:  # fmt: skip
    """The checked arguments, converted; an exception names what is not accepted."""
    as_bool("delta_softplus", softplus)
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend is {described(backend)}; accepted are {', '.join(BACKENDS)}")
    required = {"u": u, "delta": delta, "A": A, "B": B, "C": C}
    optional = {"D": D, "z": z, "delta_bias": delta_bias, "initial_state": initial_state}
    # Not `|` of two dicts, which torch.compile of 2.6 does not support.
    present = {**required, **{name: t for name, t in optional.items() if t is not None}}
    _check_tensors(present, cu_seqlens)
    _check_shapes(present, cu_seqlens)
    if not u.is_cuda and u.device.type in ("cpu", "cuda") and backend in ("cuda", "triton"):
        raise ValueError(f"backend is {backend!r}, which needs a CUDA device; u is on {u.device}")
    if backend in ("cuda", "triton"):
        _check_kernels(present, backend)
    dtype, state = u.dtype, reference.state_dtype(u.dtype, A.dtype)
    real = reference.compute_dtype(dtype)

    def to(tensor: Any, wanted: torch.dtype) -> Any:
        return None if tensor is None else tensor.to(wanted)

    def projection(tensor: Tensor) -> Tensor:
        if tensor.dim() == 2:
            return tensor.to(state)
        return (tensor.unsqueeze(1) if tensor.dim() == 3 else tensor).to(dtype)

    bounds = None if cu_seqlens is None else cu_seqlens.to(torch.int64).contiguous()
    return Arguments(
        u, delta.to(dtype), A.to(state), projection(B), projection(C), to(D, real), to(z, dtype),
        to(delta_bias, real), to(initial_state, state), bounds,
    )  # fmt: skip


def _check_kernels(present: dict[str, Tensor], backend: str) -> None:
    """Refuse what no kernel computes, where one is asked for."""
    lacking = [
        "complex A" if present["A"].is_complex() else "",
        "float64" if present["u"].dtype not in COMPILED else "",
        *(f"{name} of two dimensions" for name in "BC" if present[name].dim() == 2),
    ]
    if any(lacking):
        what = " and ".join(filter(None, lacking))
        raise ValueError(
            f"backend is {backend!r}, which has no kernel for {what}; accepted are auto and reference"
        )


def _check_tensors(present: dict[str, Any], cu_seqlens: Any) -> None:
    named = present if cu_seqlens is None else {**present, "cu_seqlens": cu_seqlens}
    check_tensors(named)
    _check_dtypes(present)


def _check_dtypes(present: dict[str, Tensor]) -> None:
    complex_numbers = present["A"].is_complex()
    for name, value in present.items():
        may_be_complex = name == "A" or (
            complex_numbers and (name == "initial_state" or (name in "BC" and value.dim() == 2))
        )
        if value.dtype not in (ACCEPTED if not may_be_complex else (*ACCEPTED, *_COMPLEX)):
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in ACCEPTED)
            beside = " and complex64" if may_be_complex else ""
            why = _why_real(name, value, present["A"])
            raise TypeError(f"{name} has dtype {value.dtype}; accepted are {names}{beside}{why}")
        if value.dtype in _WIDE and present["u"].dtype != torch.float64:
            raise TypeError(
                f"{name} has dtype {value.dtype}, u {present['u'].dtype}; float64 and complex128 do not mix with "
                "narrower dtypes"
            )


def _why_real(name: str, value: Tensor, A: Tensor) -> str:
    """What a message says beside about a complex tensor where real ones are accepted."""
    if not value.is_complex() or name not in ("B", "C", "initial_state"):
        return ""
    if A.is_complex():
        return (
            f": with complex A, {name} that changes with time is real, real and imaginary parts side by side, so pass "
            f"torch.view_as_real({name}).flatten(-2)"
        )
    may_be = name if name == "initial_state" else f"{name} of shape (channels, states)"
    return f", as A is real ({A.dtype}); {may_be} may be complex where A is"


def _check_shapes(present: dict[str, Tensor], cu_seqlens: Tensor | None) -> None:
    u, A = present["u"], present["A"]
    if u.dim() != 3:
        raise ValueError(f"u has shape {tuple(u.shape)}; it must be (batch, channels, time)")
    batch, channels, time = u.shape
    if A.dim() != 2 or A.shape[0] != channels:
        raise ValueError(
            f"A has shape {tuple(A.shape)}; for u of shape {tuple(u.shape)} it must be ({channels}, states)"
        )
    states = A.shape[1]
    if not 1 <= states <= MOST_STATES:
        raise ValueError(f"A has {states} states; accepted are 1 to {MOST_STATES}")
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, time)
    between = () if cu_seqlens is None else (cu_seqlens.shape[0] - 1,)
    expected = {
        "delta": (batch, channels, time),
        "D": (channels,),
        "z": (batch, channels, time),
        "delta_bias": (channels,),
        "initial_state": (batch, *between, channels, states),
    }
    for name, shape in expected.items():
        if name in present and tuple(present[name].shape) != shape:
            raise ValueError(
                f"{name} has shape {tuple(present[name].shape)}; for u of shape {tuple(u.shape)} and "
                f"{states} states it must be {shape}"
            )
    for name in "BC":
        _check_projection(name, tuple(present[name].shape), u, A)


def _check_projection(name: str, shape: tuple[int, ...], u: Tensor, A: Tensor) -> None:
    (batch, channels, time), states = u.shape, A.shape[1]
    length = 2 * time if A.is_complex() else time
    # Only shapes of as many dimensions are compared: a batch of as many as channels is none that a graph may
    # depend on.
    if len(shape) == 4:
        fits = (
            (shape[0], *shape[2:]) == (batch, states, length)
            and shape[1] > 0
            and channels % shape[1] == 0
        )
    else:
        fits = shape == ((channels, states) if len(shape) == 2 else (batch, states, length))
    if not fits:
        twice = f"; as A is complex, {2 * time} are real and imaginary parts of {time} steps"
        raise ValueError(
            f"{name} has shape {shape}; for u of shape {tuple(u.shape)} and {states} states it must be "
            f"{(channels, states)}, {(batch, states, length)} or ({batch}, groups, {states}, {length}) with "
            f"groups that divide {channels}{twice if A.is_complex() else ''}"
        )
