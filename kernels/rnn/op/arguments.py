"""What ``rnn`` accepts, and how its arguments become what the kernels take.

Conversions are torch's own operators, so gradients flow back through them to the dtype that was given.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from scan_registry.dispatch.select import Backend
from scan_registry.kernels.rnn.problem import SIZES, Clips, Function, RnnBackend, Scope
from scan_registry.kernels.rnn.reference import compute_dtype
from scan_registry.ops.checks import (
    as_bool,
    as_index,
    check_cu_seqlens,
    check_dense,
    described,
    is_autocast,
    refuse_layout,
)

BACKENDS: tuple[RnnBackend, ...] = get_args(RnnBackend)
FUNCTIONS: tuple[Function, ...] = tuple(SIZES)

#: What each backend tries, in this order: all steps in one launch, or the steps one by one.
WAYS: dict[str, tuple[tuple[Scope, Backend], ...]] = {
    "auto": (("sequence", "auto"), ("step", "auto")),
    "cuda": (("sequence", "cuda"), ("step", "cuda")),
    "cuda_fused": (("sequence", "cuda"),),
    "cuda_alternating": (("step", "cuda"),),
    "triton": (("sequence", "triton"),),
    "reference": (("sequence", "reference"),),
}

COMPILED = (torch.float32, torch.bfloat16, torch.float16)
#: float64 has no kernels; it is there for checks of derivatives.
ACCEPTED = (*COMPILED, torch.float64)


class Options(NamedTuple):
    """The arguments that are no tensors."""

    function: Function = "lstm"
    backend: str = "auto"
    clips: Clips = Clips()

    def flat(self) -> tuple[str, str, float, float, bool]:
        """As the operator takes them."""
        clips = self.clips
        return self.function, self.backend, clips.forward, clips.recurrent, clips.recurrent_cut

    @classmethod
    def of(
        cls, function: Any, backend: str, forward: float, recurrent: float, cut: bool
    ) -> Options:
        """From what ``flat`` gives."""
        return cls(function, backend, Clips(forward, recurrent, cut))


class Arguments(NamedTuple):
    """Tensors as the operator takes them. They have one dtype, except the bias, which has the dtype of the
    computation, and ``reset`` (B, T), which is bool. ``reset_states`` have the shape of ``initial``,
    (states, B, N, D)."""

    inputs: Tensor
    recurrent: Tensor
    bias: Tensor
    initial: Tensor | None
    reset: Tensor | None = None
    reset_states: Tensor | None = None


class Resets(NamedTuple):
    """The arguments of ``rnn`` that say where states start anew and where packed sequences begin."""

    reset: Any = None
    reset_states: Any = None
    cu_seqlens: Any = None
    max_seqlen: Any = None

    @property
    def packed(self) -> bool:
        """Whether there are packed sequences."""
        return self.cu_seqlens is not None


def normalised(
    Wx: Any,
    R: Any,
    b: Any,
    states: Any,
    function: Any,
    backend: Any,
    clips: Clips,
    resets: Resets = Resets(),  # noqa: B008
) -> tuple[Arguments, Options]:
    """The checked arguments, converted; an exception names what is not accepted. States of packed sequences are
    (states, B, sequences, N, D)."""
    if not isinstance(function, str) or function not in FUNCTIONS:
        raise ValueError(f"function is {described(function)}; accepted are {', '.join(FUNCTIONS)}")
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend is {described(backend)}; accepted are {', '.join(BACKENDS)}")
    _check_tensors(Wx, R, b, states, resets.reset_states)
    _check_shapes(Wx, R, b, states, function, resets)
    _check_resets(Wx, resets)
    dtype = working_dtype(Wx)
    if backend not in ("auto", "reference"):
        _check_kernels(Wx, dtype, backend)
    of_bias = dtype if dtype == torch.float64 else torch.float32
    heads, dim = Wx.shape[3:]
    if b is None:
        bias = Wx.new_zeros(SIZES[function].bias, heads, dim, dtype=of_bias)
    else:
        bias = b.to(of_bias)
    initial, anew = (
        t if t is None else (t if resets.packed else t.squeeze(2)).to(dtype)
        for t in (states, resets.reset_states)
    )
    arguments = Arguments(Wx.to(dtype), R.to(dtype), bias, initial, resets.reset, anew)
    return arguments, Options(function, backend, clips)


def _check_kernels(Wx: Tensor, dtype: torch.dtype, backend: str) -> None:
    """Refuse what no kernel takes."""
    if Wx.device.type == "cpu":
        raise ValueError(f"backend is {backend!r}, which needs a CUDA device; Wx is on {Wx.device}")
    if dtype == torch.float64 and Wx.is_cuda:
        names = ", ".join(str(accepted).removeprefix("torch.") for accepted in COMPILED)
        raise TypeError(f"Wx has dtype {Wx.dtype}; backend {backend!r} accepts {names}")


def working_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of the states: the tensor's, or autocast's where that is on and it is not float64."""
    if tensor.dtype != torch.float64 and is_autocast(tensor):
        return torch.get_autocast_dtype(tensor.device.type)
    return tensor.dtype


def clips_of(forward: Any, recurrent: Any, cut: Any) -> Clips:
    """The clips, checked; None clips nothing."""
    for name, value in (
        ("forward_clipval", forward),
        ("gradient_recurrent_clipval", recurrent),
    ):
        number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if value is not None and not (number and value > 0):
            raise ValueError(
                f"{name} is {described(value)}; accepted are positive numbers, and None"
            )
    cut = as_bool("gradient_recurrent_cut", cut)
    none = math.inf
    return Clips(
        none if forward is None else float(forward),
        none if recurrent is None else float(recurrent),
        cut,
    )


def _check_tensors(Wx: Any, R: Any, b: Any, states: Any, reset_states: Any) -> None:
    optional = {"b": b, "states": states, "reset_states": reset_states}
    tensors = {"Wx": Wx, "R": R, **{k: v for k, v in optional.items() if v is not None}}
    for name, value in tensors.items():
        check_dense(name, value)
        if value.dtype not in ACCEPTED:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in ACCEPTED)
            raise TypeError(f"{name} has dtype {value.dtype}; accepted are {names}")
        if (value.dtype == torch.float64) != (Wx.dtype == torch.float64):
            raise TypeError(
                f"Wx has dtype {Wx.dtype}, {name} {value.dtype}; float64 does not mix with narrower "
                "dtypes"
            )
        if value.device != Wx.device:
            raise ValueError(
                f"{name} is on {value.device}, Wx on {Wx.device}; they must be on one device"
            )


def _check_shapes(
    Wx: Tensor, R: Tensor, b: Tensor | None, states: Tensor | None, name: Any, resets: Resets
) -> None:
    sizes = SIZES[name]
    if Wx.dim() != 5 or Wx.shape[2] != sizes.inputs:
        raise ValueError(
            f"Wx has shape {tuple(Wx.shape)}; for {name} it must be (batch, time, {sizes.inputs}, "
            "heads, units)"
        )
    batch, _, _, heads, dim = Wx.shape
    rows = 1
    if resets.packed:
        check_offsets(resets.cu_seqlens, Wx)
        rows = resets.cu_seqlens.shape[0] - 1
    of_state = (len(sizes.states), batch, rows, heads, dim)
    expected: list[tuple[str, Tensor | None, tuple[int, ...]]] = [
        ("R", R, (sizes.recurrent, heads, dim, dim)),
        ("b", b, (sizes.bias, heads, dim)),
        ("states", states, of_state),
        ("reset_states", resets.reset_states, of_state),
    ]
    for argument, tensor, shape in expected:
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(
                f"{argument} has shape {tuple(tensor.shape)}; for {name} and Wx of shape "
                f"{tuple(Wx.shape)}{of_sequences(resets)} it must be {shape}"
            )


def of_sequences(resets: Resets) -> str:
    """The words about packed sequences in an error message."""
    return f" with {resets.cu_seqlens.shape[0] - 1} packed sequences" if resets.packed else ""


def check_offsets(cu_seqlens: Any, Wx: Tensor) -> None:
    """Refuse a ``cu_seqlens`` that has no bounds of packed sequences along the time of ``Wx``."""
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens must be a torch.Tensor, not {type(cu_seqlens).__name__}")
    if cu_seqlens.layout != torch.strided or cu_seqlens.is_nested:
        refuse_layout("cu_seqlens", cu_seqlens)
    if cu_seqlens.device != Wx.device and not cu_seqlens.is_cpu:
        raise ValueError(
            f"cu_seqlens is on {cu_seqlens.device}, Wx on {Wx.device}; accepted are Wx's device, and the CPU"
        )
    check_cu_seqlens(cu_seqlens, Wx.shape[1])


def _check_resets(Wx: Tensor, resets: Resets) -> None:
    if resets.reset is not None:
        from scan_registry.ops.checks import check_reset

        check_reset(resets.reset, Wx.shape[:2], Wx.device)
    elif resets.reset_states is not None:
        raise ValueError("reset_states are given without reset, which says where states start anew")
    if resets.max_seqlen is None:
        return
    if not resets.packed:
        raise ValueError("max_seqlen is given without cu_seqlens, whose longest sequence it is")
    if as_index("max_seqlen", resets.max_seqlen) < 0:
        raise ValueError(f"max_seqlen is {resets.max_seqlen}; it must be 0 at least")


def check_operator(inputs: Tensor, recurrent: Tensor, bias: Tensor, function: Function) -> None:
    """The operator itself may be called with anything, and kernels read what they are given."""
    sizes, (heads, dim) = SIZES[function], inputs.shape[3:]
    expected = {
        "inputs": (inputs, (*inputs.shape[:2], sizes.inputs, heads, dim)),
        "recurrent": (recurrent, (sizes.recurrent, heads, dim, dim)),
        "bias": (bias, (sizes.bias, heads, dim)),
    }
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != tuple(shape) or tensor.device != inputs.device:
            raise ValueError(
                f"the operator's {name} has shape {tuple(tensor.shape)} on {tensor.device}; for "
                f"{function} it must be {tuple(shape)} on {inputs.device}"
            )
    if recurrent.dtype != inputs.dtype or bias.dtype != compute_dtype(inputs.dtype):
        raise TypeError(
            f"the operator's tensors have dtypes {inputs.dtype}, {recurrent.dtype} and {bias.dtype}; "
            f"they must be one, and the bias {compute_dtype(inputs.dtype)}"
        )
