"""What ``gated_scan`` accepts, and how its arguments are converted for the operator.

Conversions are torch's own operators, so gradients flow back through them to the dtype and shape that the caller gave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scan_registry.base.symbols import same_shape
from scan_registry.dispatch.select import BACKENDS
from scan_registry.kernels.gated_scan.kinds import KINDS, Kind
from scan_registry.kernels.linear_scan.reference import compute_dtype
from scan_registry.ops.checks import (
    as_bool,
    as_index,
    check_cu_seqlens,
    check_initial_state,
    check_reset,
    check_tensors,
    described,
    shapes_agree,
)
from scan_registry.ops.values import check_range

#: Dtypes that kernels are compiled for; float64 is computed by the module ``composed``.
COMPILED = (torch.float32, torch.bfloat16, torch.float16)
ACCEPTED = (*COMPILED, torch.float64)
#: The values of ``activation``, each with the ending of the kind's name that it selects.
ACTIVATIONS = {"positive": "", "identity": "_identity"}
#: The values that channel parameters may have, where it is not any.
RANGES = {"lower_bound": (0, 1)}


class Options(NamedTuple):
    """The arguments that are not tensors. ``kind`` is a name in ``KINDS``. ``dim`` is -1 for (batch, channels, time) and
    -2 for (batch, time, channels)."""

    kind: str
    dim: int = -1
    reverse: bool = False
    final: bool = False
    backend: str = "auto"


class Arguments(NamedTuple):
    """Tensors as the operator takes them.

    inputs         of one shape and dtype, in any strides
    parameters     (channels,), in the dtype that states are computed in
    reset          (batch, time), bool
    initial_state  in its full shape, in the dtype that states are computed in
    cu_seqlens     int64, without gaps
    """

    inputs: tuple[Tensor, ...]
    parameters: tuple[Tensor, ...] = ()
    reset: Tensor | None = None
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """Inputs, parameters and the initial state."""
        return *self.inputs, *self.parameters, self.initial_state

    @property
    def flat(self) -> tuple[Tensor | None, ...]:
        """All tensors in one tuple, the differentiable ones first."""
        return *self.differentiable, self.reset, self.cu_seqlens

    @classmethod
    def of(cls, kind: str, flat: Sequence[Any]) -> Arguments:
        """The inverse of ``flat``."""
        inputs = len(KINDS[kind].inputs)
        *parameters, initial_state, reset, cu_seqlens = flat[inputs:]
        return cls(tuple(flat[:inputs]), tuple(parameters), reset, initial_state, cu_seqlens)


def check_operator(
    arguments: Arguments, dim: int, others: Mapping[str, Tensor | None], last_grad: Tensor | None
) -> None:
    """Raise for tensors that kernels must not be given: users may call the registered operator directly. ``others`` are as the
    inputs, and ``last_grad`` as the initial state."""
    first = arguments.inputs[0]
    if first.dim() != 3:
        raise ValueError(
            f"inputs have shape {tuple(first.shape)}; the operator takes three dimensions"
        )
    compute, place = compute_dtype(first.dtype), dim % 3
    bounds = arguments.cu_seqlens
    between = () if bounds is None else (bounds.shape[0] - 1,)
    of_state = (*first.shape[:place], *between, *first.shape[place + 1 :])
    channels = first.shape[-1 if dim == -2 else -2]
    every: list[tuple[str, Tensor | None, tuple[int, ...], torch.dtype]] = [
        *(
            (f"input {n}", t, tuple(first.shape), first.dtype)
            for n, t in enumerate(arguments.inputs)
        ),
        *((name, t, tuple(first.shape), first.dtype) for name, t in others.items()),
        *((f"parameter {n}", t, (channels,), compute) for n, t in enumerate(arguments.parameters)),
        ("initial_state", arguments.initial_state, of_state, compute),
        ("final_state's gradient", last_grad, of_state, compute),
        ("reset", arguments.reset, (first.shape[0], first.shape[dim]), torch.bool),
    ]
    for name, tensor, shape, dtype in every:
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != first.device:
            raise ValueError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}; the operator takes "
                f"{dtype} of shape {shape} on {first.device}"
            )


def kind_of(name: Any) -> Kind:
    """The kind called ``name``; otherwise ``TypeError`` or ``ValueError``, which list the kinds' names."""
    if not isinstance(name, str):
        raise TypeError(f"kind must be one of {', '.join(KINDS)}, not {type(name).__name__}")
    if name not in KINDS:
        raise ValueError(f"kind is {name!r}; accepted are {', '.join(KINDS)}")
    return KINDS[name]


def with_activation(kind: str, activation: Any) -> str:
    """The name of the kind that has the activation."""
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; accepted are {', '.join(ACTIVATIONS)}")
    return kind + ACTIVATIONS[activation]


def channel_values(name: str, value: Any, x: Any, dim: Any) -> Any:
    """A number, or None for 0, as a tensor with this value for each channel of ``x``. Other arguments are returned unchanged,
    for ``normalised`` to check."""
    if isinstance(value, Tensor) or not isinstance(x, Tensor):
        return value
    number = 0.0 if value is None else value
    if isinstance(number, Real) and not isinstance(number, (int, float)):
        number = float(number)  # numpy's
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise TypeError(
            f"{name} must be a number, a torch.Tensor or None, not {type(value).__name__}"
        )
    if not 0 <= number <= 1:
        raise ValueError(f"{name} is {value}; accepted are numbers from 0 to 1")
    if x.is_nested or x.layout != torch.strided or x.dim() != 3:
        return torch.empty(0, device=x.device)  # any tensor will do, since ``x`` is refused later
    channels = x.shape[2 if as_index("dim", dim) in (1, -2) else 1]
    return torch.full((channels,), number, dtype=compute_dtype(x.dtype), device=x.device)


def normalised(
    kind: Any,
    inputs: Sequence[Any],
    reset: Any,
    initial_state: Any,
    cu_seqlens: Any,
    options: Options,
) -> tuple[Arguments, Options]:
    """The checked arguments, converted; an exception names what is not accepted."""
    of = kind_of(kind)
    names = of.inputs + of.parameters
    if len(inputs) != len(names):
        raise TypeError(
            f"{of.name} takes {len(names)} tensors, {', '.join(names)}; {len(inputs)} were given"
        )
    required = dict(zip(names, inputs, strict=True))
    optional = {"reset": reset, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    check_tensors({**required, **{name: t for name, t in optional.items() if t is not None}})
    sequences = {name: required[name] for name in of.inputs}
    first = inputs[0]
    options = _check_options(of, first, options)
    _check_sequences(sequences)
    dim, compute = options.dim, compute_dtype(first.dtype)
    parameters = tuple(
        [_parameter(name, required[name], of, first, options) for name in of.parameters]
    )
    between: tuple[int, ...] = ()
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, first.shape[dim])
        cu_seqlens = cu_seqlens.to(torch.int64).contiguous()
        between = (cu_seqlens.shape[0] - 1,)
    if reset is not None:
        check_reset(reset, (first.shape[0], first.shape[dim]), first.device)
    if initial_state is not None:
        place = dim % 3
        of_state = (*first.shape[:place], *between, *first.shape[place + 1 :])
        check_initial_state(initial_state, of_state, first.dtype)
        initial_state = initial_state.to(compute)
        if not same_shape(initial_state.shape, of_state):
            initial_state = initial_state.expand(of_state)
    tensors = tuple(sequences.values()), parameters, reset, initial_state, cu_seqlens
    return Arguments(*tensors), options


def _check_options(kind: Kind, first: Tensor, options: Options) -> Options:
    """The checked options, with a negative ``dim``."""
    name, backend = kind.inputs[0], options.backend
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend is {described(backend)}; accepted are {', '.join(BACKENDS)}")
    if backend in ("cuda", "triton") and first.device.type != "meta":
        if not first.is_cuda:
            raise ValueError(
                f"backend is {backend!r}, which needs a CUDA device; {name} is on {first.device}"
            )
        if first.dtype not in COMPILED:
            raise ValueError(
                f"backend is {backend!r}, which has no kernel for {_short(first.dtype)}; accepted are auto and "
                "reference"
            )
    if first.dim() != 3:
        raise ValueError(
            f"{name} has shape {tuple(first.shape)}; it must be (batch, channels, time), or with dim=1 "
            "(batch, time, channels)"
        )
    dim = as_index("dim", options.dim)
    if dim not in (-2, -1, 1, 2):
        raise ValueError(f"dim is {dim}; accepted are -1 or 2, and 1 or -2")
    reverse = as_bool("reverse", options.reverse)
    final = as_bool("return_final_state", options.final)
    return Options(kind.name, dim if dim < 0 else dim - 3, reverse, final, backend)


def _check_sequences(sequences: Mapping[str, Tensor]) -> None:
    """Raise if the sequences differ in shape or dtype, or the dtype is not accepted."""
    first, model = next(iter(sequences.items()))
    for name, tensor in sequences.items():
        if tensor.dtype not in ACCEPTED:
            names = ", ".join(map(_short, ACCEPTED))
            raise TypeError(f"{name} has dtype {tensor.dtype}; accepted are {names}")
        if tensor.dtype != model.dtype:
            raise TypeError(
                f"{name} has dtype {tensor.dtype}, {first} {model.dtype}; all sequences must have one dtype, so "
                f"convert one of them"
            )
        if not shapes_agree(tensor.shape, model.shape):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, {first} {tuple(model.shape)}; all sequences must have one "
                "shape"
            )


def _parameter(name: str, tensor: Tensor, kind: Kind, first: Tensor, options: Options) -> Tensor:
    """The checked channel parameter, in the dtype of the computation."""
    compute = compute_dtype(first.dtype)
    if tensor.dtype not in ACCEPTED:
        names = ", ".join(map(_short, ACCEPTED))
        raise TypeError(f"{name} has dtype {tensor.dtype}; accepted are {names}")
    if tensor.dtype == torch.float64 and compute != torch.float64:
        raise TypeError(
            f"{name} has dtype {tensor.dtype}, {kind.inputs[0]} {first.dtype}; float64 does not mix with narrower "
            "dtypes"
        )
    channels = first.shape[-1 if options.dim == -2 else -2]
    if not shapes_agree(tensor.shape, (channels,)):
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; for {kind.inputs[0]} of shape {tuple(first.shape)} with "
            f"dim={options.dim} it must be ({channels},), one value for each channel"
        )
    check_parameter(name, tensor)
    return tensor.to(compute)


def check_parameter(name: str, tensor: Tensor) -> None:
    """Refuse values out of range; allow rounding of 4 eps."""
    if name in RANGES:
        check_range(name, tensor, *RANGES[name], slack=4 * torch.finfo(tensor.dtype).eps)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
