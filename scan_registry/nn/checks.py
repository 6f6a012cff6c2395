"""What the recurrent modules refuse, in torch.nn's style: the same types of exceptions, and the sizes that
were expected and given. Nothing here is computed with, so a wrong call ends before any kernel runs."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from scan_registry.kernels.rnn.op.arguments import ACCEPTED, BACKENDS
from scan_registry.kernels.rnn.problem import SIZES
from scan_registry.nn import common_checks
from scan_registry.ops.checks import described, is_autocast, refuse_layout
from scan_registry.ops.values import are_checked

if TYPE_CHECKING:
    from scan_registry.nn.recurrent import Recurrent

_DTYPES = ", ".join(map(str, ACCEPTED))


class DtypeError(TypeError, ValueError):
    """A wrong dtype of an input. It is a ``TypeError``, as in all of this package, and a ``ValueError``, as torch.nn's."""


class StateDtypeError(TypeError, RuntimeError):
    """A wrong dtype of a state. It is a ``TypeError``, as in all of this package, and a ``RuntimeError``, as torch.nn's."""


# --- Constructors -----------------------------------------------------------------------------


def check_constructor(
    sizes: Mapping[str, Any], bidirectional: Any, dropout: Any, dtype: Any, backend: Any
) -> None:
    """Refuse what torch.nn.RNNBase does not, or only with a message about something else."""
    for name, size in sizes.items():
        common_checks.check_int(name, size)
    if not isinstance(bidirectional, bool):
        raise TypeError(f"bidirectional should be of type bool, got: {bidirectional!r}")
    if not isinstance(dropout, numbers.Number):
        raise ValueError(f"dropout should be a number in range [0, 1], got: {dropout!r}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in ACCEPTED):
        raise TypeError(f"dtype should be one of {_DTYPES}, got: {dtype!r}")
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(
            f"backend should be one of {', '.join(BACKENDS)}, got: {described(backend)}"
        )


def check_heads(num_heads: Any, hidden_size: int) -> None:
    """Refuse heads that do not share ``hidden_size`` equally."""
    common_checks.check_size("num_heads", num_heads)
    if hidden_size % num_heads:
        raise ValueError(
            f"hidden_size ({hidden_size}) must be divisible by num_heads ({num_heads})"
        )


def check_projection(proj_size: Any, backend: Any) -> None:
    """Refuse projections by a kernel, as none has them."""
    common_checks.check_int("proj_size", proj_size)
    if (
        proj_size
        and isinstance(backend, str)
        and backend in BACKENDS
        and backend not in ("auto", "reference")
    ):
        raise ValueError(
            f"backend should be 'auto' or 'reference' with proj_size, got: {backend!r}; no kernel has projections"
        )


def check_nonlinearity(nonlinearity: Any) -> None:
    """Refuse what is not tanh."""
    if nonlinearity == "relu":
        raise ValueError("nonlinearity should be 'tanh', got: 'relu'; for that use torch.nn.RNN")
    if nonlinearity != "tanh":
        raise ValueError(f"Unknown nonlinearity {nonlinearity!r}. It should be 'tanh'")


# --- Calls ------------------------------------------------------------------------------------


def check_input(module: Recurrent[Any], x: Any, packed: bool = False) -> None:
    """Refuse an input that does not go with the module's parameters; that of a PackedSequence if ``packed``."""
    name, what = type(module).__name__, "input.data" if packed else "input"
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{name}: Expected input to be a Tensor or a PackedSequence, got {type(x).__name__}"
        )
    if x.layout != torch.strided or x.is_nested:
        packing = "torch.nn.utils.rnn.pack_sequence([*input.unbind()], enforce_sorted=False)"
        refuse_layout(what, x, of_jagged=packing)
    if packed and x.dim() != 2:
        raise RuntimeError(f"{name}: Expected input.data to be 2D, got {x.dim()}D instead")
    if x.dim() not in (2, 3):
        raise ValueError(f"{name}: Expected input to be 2D or 3D, got {x.dim()}D instead")
    weight: Any = module.weight_ih_l0
    if not _go_together(x, weight):
        module_too = f", or the module: module.to({x.dtype})" if x.dtype in ACCEPTED else ""
        raise DtypeError(
            f"{name}: Expected {what} of dtype {weight.dtype}, as the parameters are, got {x.dtype}. "
            f"Convert the input: input.to({weight.dtype}){module_too}"
        )
    if weight.dtype not in ACCEPTED:
        raise TypeError(f"{name}: Expected parameters of {_DTYPES}, got {weight.dtype}")
    if x.device != weight.device:
        raise RuntimeError(
            f"{name}: Expected {what} and parameters on one device, got input on {x.device} and "
            f"parameters on {weight.device}"
        )
    if x.shape[-1] != module.input_size:
        raise RuntimeError(
            f"{name}: Expected {what}.size(-1) to be input_size, {module.input_size}, got {x.shape[-1]}"
        )


def _go_together(one: Tensor, other: Tensor) -> bool:
    """Whether the dtypes are the same, or will be: autocast converts floating-point ones but float64."""
    if one.dtype == other.dtype:
        return True
    return is_autocast(one) and all(
        t.is_floating_point() and t.dtype != torch.float64 for t in (one, other)
    )


def check_reset(module: Recurrent[Any], reset: Any, reset_hx: Any, x: Tensor) -> None:
    """Refuse what is no boolean for each step of each sequence, and states without it."""
    if reset is None and reset_hx is not None:
        name = type(module).__name__
        raise ValueError(f"{name}: Expected reset beside reset_hx, got reset_hx alone")
    common_checks.check_reset(
        module, reset, x, dtype_error=DtypeError, size_error=RuntimeError
    )  # as torch.nn's for input and hx


def _check_packing(module: Recurrent[Any], packed: PackedSequence) -> None:
    """Refuse ``batch_sizes`` and orders of sequences that no ``PackedSequence`` of torch's own making has."""
    name, sizes, steps = type(module).__name__, packed.batch_sizes, packed.data.shape[0]
    if not are_checked(sizes):
        return
    counts = sizes.flatten().tolist()
    falls = all(one >= following for one, following in pairwise(counts))
    if sizes.dim() != 1 or not falls or sum(counts) != steps or not counts or counts[-1] < 1:
        raise RuntimeError(
            f"{name}: Expected input.batch_sizes to be 1D and not to rise, with numbers above 0 whose sum is "
            f"input.data.size(0), {steps}, got {counts}"
        )
    sorted_indices, unsorted_indices = packed.sorted_indices, packed.unsorted_indices
    if unsorted_indices is None or not are_checked(unsorted_indices):
        return
    every, places = [*range(counts[0])], unsorted_indices.tolist()
    order = every if sorted_indices is None else sorted_indices.tolist()
    if sorted(places) != every or len(order) != counts[0] or [order[n] for n in places] != every:
        raise RuntimeError(
            f"{name}: Expected input.sorted_indices and input.unsorted_indices to be orders of {counts[0]} sequences, "
            f"one the inverse of the other, got {order} and {places}"
        )


def check_packed_reset(
    module: Recurrent[Any], reset: Any, reset_hx: Any, packed: PackedSequence
) -> None:
    """Refuse a packing that torch does not make, and a reset that is not a boolean ``PackedSequence``."""
    _check_packing(module, packed)
    if reset is None:
        check_reset(module, reset, reset_hx, packed.data)
        return
    name = type(module).__name__
    if not isinstance(reset, PackedSequence):
        raise TypeError(
            f"{name}: Expected reset to be a PackedSequence, as the input is, got {type(reset).__name__}"
        )
    check_reset(module, reset.data, reset_hx, packed.data)
    order, other = packed.sorted_indices, reset.sorted_indices
    alike = torch.equal(packed.batch_sizes, reset.batch_sizes) and (order is None) == (
        other is None
    )
    if (
        alike and order is not None and other is not None and order.is_cpu
    ):  # else it would wait for a GPU
        alike = torch.equal(order, other)
    if not alike:
        raise RuntimeError(
            f"{name}: Expected reset packed as the input is, got other lengths or another order"
        )


def states_of(
    module: Recurrent[Any], hx: Any, x: Tensor, batch: int | None, called: str = "hx"
) -> list[Tensor] | None:
    """The states before the first step, checked; ``batch`` is None where ``input`` has none."""
    if hx is None:
        return None
    name, states = type(module).__name__, SIZES[module.function].states
    rows = module.num_layers * (2 if module.bidirectional else 1)
    lead = (rows,) if batch is None else (rows, batch)
    if len(states) == 1:
        tensors, names = [hx], [called]
        expected = "a Tensor"
    else:
        tensors = [*hx] if isinstance(hx, (tuple, list)) else [hx]
        names = [f"{called}[{k}] ({state})" for k, state in enumerate(states)]
        expected = f"a tuple of {len(states)} Tensors, ({', '.join(states)})"
    if len(tensors) != len(states) or not all(isinstance(state, Tensor) for state in tensors):
        raise TypeError(f"{name}: Expected {called} to be {expected}, got {_kind(hx)}")
    for k, (what, state) in enumerate(zip(names, tensors, strict=True)):
        units = module.proj_size if module.proj_size and k == 0 else module.hidden_size
        _check_state(name, what, state, (*lead, units), x)
    return tensors


def _check_state(name: str, what: str, state: Tensor, size: tuple[int, ...], x: Tensor) -> None:
    """Refuse a state that is not dense, or not of this size or of the dtype and device of the input ``x``."""
    if state.layout != torch.strided or state.is_nested:
        refuse_layout(what, state)
    if state.dim() != len(size):
        raise RuntimeError(
            f"{name}: For {'unbatched 2-D' if len(size) == 2 else 'batched'} input, expected {what} "
            f"to be {len(size)}-D, {size}, got {state.dim()}-D, {tuple(state.shape)}"
        )
    common_checks.expect_size(name, what, state, size, RuntimeError)
    if not _go_together(state, x):
        raise StateDtypeError(
            f"{name}: Expected {what} of the input's dtype, {x.dtype}, got {state.dtype}"
        )
    common_checks.expect_device(name, what, state, x, RuntimeError)


def _kind(hx: Any) -> str:
    if isinstance(hx, (tuple, list)):
        return (
            f"{type(hx).__name__} of {', '.join(type(item).__name__ for item in hx) or 'nothing'}"
        )
    return type(hx).__name__
