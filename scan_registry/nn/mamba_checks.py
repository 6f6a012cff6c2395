"""What ``Mamba`` and ``Mamba2`` refuse, in the style of the recurrent modules: what was expected, and what was given."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from scan_registry.base.symbols import surely
from scan_registry.dispatch.select import BACKENDS
from scan_registry.kernels.selective_scan.problem import MOST_STATES
from scan_registry.nn.common_checks import check_size, expect_device, expect_size, expect_tensor
from scan_registry.nn.submodules import weights_of
from scan_registry.ops.checks import (
    as_index,
    described,
    is_autocast,
    refuse_inference,
    refuse_shared_elements,
)

if TYPE_CHECKING:
    from scan_registry.nn.mamba_states import GeneratingBlock

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DTYPES = ", ".join(map(str, DTYPES))
#: Of the convolution.
WIDTHS = (2, 8)


def check_sizes(
    sizes: Mapping[str, Any], numbers_: Mapping[str, Any], dtype: Any, backend: Any
) -> None:
    """Refuse arguments of the constructors of both blocks that are of the wrong type or out of range."""
    for name, size in sizes.items():
        check_size(name, size)
    check_positive(**numbers_)
    if int(numbers_["expand"] * sizes["d_model"]) < 1:
        raise ValueError(
            f"expand * d_model must be 1 or more, got: {numbers_['expand']!r} * {sizes['d_model']}"
        )
    if sizes["d_state"] > MOST_STATES:
        raise ValueError(f"d_state should be at most {MOST_STATES}, got: {sizes['d_state']}")
    if not WIDTHS[0] <= sizes["d_conv"] <= WIDTHS[1]:
        raise ValueError(
            f"d_conv should be from {WIDTHS[0]} to {WIDTHS[1]}, got: {sizes['d_conv']}"
        )
    check_dtype_and_backend(dtype, backend)


def check_layer(layer_idx: Any) -> None:
    """Refuse what is no key of a layer's states."""
    if layer_idx is not None and (not isinstance(layer_idx, int) or isinstance(layer_idx, bool)):
        raise TypeError(f"layer_idx should be of type int or None, got: {layer_idx!r}")


def check_positive(**values: Any) -> None:
    """Refuse what is no finite number above 0."""
    for name, number in values.items():
        if not isinstance(number, numbers.Real) or isinstance(number, bool):
            raise TypeError(f"{name} should be a number above 0, got: {number!r}")
        if not math.isfinite(number) or number <= 0:
            raise ValueError(f"{name} should be a number above 0, got: {number!r}")


def check_ranks(dt_rank: Any, dt_init: Any) -> None:
    """Refuse what is no rank, and no way to begin, of the projection to step sizes."""
    if not isinstance(dt_rank, str) or dt_rank != "auto":
        check_size("dt_rank", dt_rank, " or 'auto'")
    if not isinstance(dt_init, str) or dt_init not in ("random", "constant"):
        raise ValueError(f"dt_init should be 'random' or 'constant', got: {dt_init!r}")


def check_dtype_and_backend(dtype: Any, backend: Any) -> None:
    """Refuse a dtype of parameters and a backend that modules on scans do not have."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in DTYPES):
        raise TypeError(f"dtype should be one of {_DTYPES}, got: {dtype!r}")
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(
            f"backend should be one of {', '.join(BACKENDS)}, got: {described(backend)}"
        )


def check_options(least: float, most: float, **flags: Any) -> None:
    """Refuse a range of step sizes that is none, and what is no bool."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} should be of type bool, got: {type(flag).__name__}")
    if least > most:
        raise ValueError(f"dt_min should be at most dt_max, got: {least!r} and {most!r}")


def check_cache(module: nn.Module, batch_size: Any, max_seqlen: Any, dtype: Any) -> None:
    """Refuse numbers of sequences and steps that cannot be, and dtypes that states cannot have."""
    name = type(module).__name__
    for what, value in (("batch_size", batch_size), ("max_seqlen", max_seqlen)):
        if surely(as_index(what, value) < 0):
            raise ValueError(f"{name}: Expected {what} of 0 or more, got {value}")
    if dtype is not None and dtype not in DTYPES:
        raise TypeError(f"{name}: Expected dtype to be one of {_DTYPES}, got {dtype!r}")


def check_hidden(module: GeneratingBlock, x: Any, what: str = "hidden_states") -> None:
    """Refuse an input that does not go with the module's parameters."""
    name, weights = type(module).__name__, weights_of(module.in_proj)
    expect_tensor(name, what, x)
    if x.dim() != 3 or x.shape[2] != module.d_model:
        raise ValueError(
            f"{name}: Expected {what} of size (batch, time, {module.d_model}), got {tuple(x.shape)}"
        )
    check_dtype(name, what, x, None if weights is None else weights[0])
    check_device(name, what, x, module.A_log)


def check_convolution(module: GeneratingBlock, channels: int) -> None:
    """Refuse an ``nn.Conv1d`` in place of the module's own that looks at other inputs: states hold those of this one."""
    conv: Any = module.conv1d
    if type(conv) is not nn.Conv1d:
        return
    width = module.d_conv
    sizes = conv.kernel_size, conv.stride, conv.padding, conv.dilation
    around = conv.groups, conv.in_channels, conv.out_channels, conv.padding_mode
    usual = (channels, channels, channels, "zeros")
    if sizes == ((width,), (1,), (width - 1,), (1,)) and around == usual:
        return
    expected = {
        "kernel_size": (width,), "stride": (1,), "padding": (width - 1,), "dilation": (1,), "groups": channels,
        "in_channels": channels, "out_channels": channels, "padding_mode": "zeros",
    }  # fmt: skip
    for what, value in expected.items():
        if getattr(conv, what) != value:
            raise ValueError(
                f"{type(module).__name__}: Expected conv1d with {what}={value!r}, got {getattr(conv, what)!r}"
            )


def check_parameter(
    module: GeneratingBlock, what: str, parameter: Tensor, shape: tuple[int, ...]
) -> None:
    """Refuse a parameter of another shape than the module's own, or of a dtype that the scan does not take."""
    if parameter.shape != shape:
        raise ValueError(
            f"{type(module).__name__}: Expected {what} of size {shape}, got {tuple(parameter.shape)}"
        )
    if parameter.dtype == torch.float64 and module.parameters_dtype != torch.float64:
        raise TypeError(
            f"{type(module).__name__}: Expected {what} of a dtype that goes with {module.parameters_dtype}, as other "
            f"parameters are of, got {parameter.dtype}"
        )


def check_linear(module: GeneratingBlock, what: str, into: int, out: int) -> None:
    """Refuse an ``nn.Linear`` in place of the module's own that has other sizes, or a weight of another dtype than what it is to
    multiply. Other modules are only called."""
    linear: Any = module._modules[what]  # at once, as steps ask for it, too
    if type(linear) is not nn.Linear:
        return
    if (linear.in_features, linear.out_features) != (into, out):
        raise ValueError(
            f"{type(module).__name__}: Expected {what} with in_features={into} and out_features={out}, got "
            f"{linear.in_features} and {linear.out_features}"
        )
    first, own = module.in_proj._parameters.get("weight"), linear._parameters.get("weight")
    if first is None or own is None or first.dtype == own.dtype:
        return
    is_cast = is_autocast(own) and torch.float64 not in (first.dtype, own.dtype)
    known = first.dtype in DTYPES and weights_of(module.in_proj) and weights_of(linear)
    if known and not is_cast:
        raise TypeError(
            f"{type(module).__name__}: Expected {what}.weight of dtype {first.dtype}, as in_proj.weight is, got {own.dtype}"
        )


def check_dtype(name: str, what: str, x: Tensor, weight: Tensor | None) -> None:
    """Refuse an input whose dtype differs from its projection's weight. Without a readable weight, refuse what is not
    floating-point."""
    expected = None if weight is None or weight.dtype not in DTYPES else weight.dtype
    if expected is None:
        if not x.is_floating_point():
            raise TypeError(f"{name}: Expected {what} of a floating-point dtype, got {x.dtype}")
    elif x.dtype != expected and not (is_autocast(x) and x.is_floating_point()):
        raise TypeError(
            f"{name}: Expected {what} of dtype {expected}, as the parameters are, got {x.dtype}. "
            f"Convert the input: {what}.to({expected})"
        )


def check_device(name: str, what: str, x: Tensor, parameter: Tensor) -> None:
    """Refuse an input that is on another device than the parameters."""
    if x.device == parameter.device:
        return
    note = " (hooks that fill them in run in a call of the module, not in step)"
    raise ValueError(
        f"{name}: Expected {what} and parameters on one device, got {what} on {x.device} and parameters on "
        f"{parameter.device}{note if parameter.is_meta else ''}"
    )


def as_pair(module: GeneratingBlock, states: Any) -> tuple[Any, Any]:
    """The states, of which there must be two."""
    if isinstance(states, (tuple, list)) and len(states) == 2:
        return states[0], states[1]
    got = f"{len(states)} of them" if isinstance(states, (tuple, list)) else type(states).__name__
    raise TypeError(
        f"{type(module).__name__}: Expected states to be (conv_state, ssm_state), as "
        f"allocate_inference_cache makes them, got {got}"
    )


def check_states(
    module: GeneratingBlock, x: Tensor, sequences: int, conv_state: Any, ssm_state: Any
) -> None:
    """Refuse states of another size, dtype or device, and those that cannot be written in place: before anything is
    written to either of them."""
    compiling = torch.compiler.is_dynamo_compiling()
    name, parameters = type(module).__name__, module.parameters_dtype
    conv_size, scan_size = module.state_sizes
    accepted = (torch.float64,) if parameters == torch.float64 else DTYPES[:3]
    expected = {
        "conv_state": (conv_state, (sequences, *conv_size)),
        "ssm_state": (ssm_state, (sequences, *scan_size)),
    }
    for what, (state, size) in expected.items():
        if not isinstance(state, Tensor):
            raise TypeError(f"{name}: Expected {what} to be a Tensor, got {type(state).__name__}")
        expect_size(name, what, state, size)
        expect_device(name, what, state, x)
        if state.dtype not in accepted:
            raise TypeError(
                f"{name}: Expected {what} of dtype {', '.join(map(str, accepted))}, as parameters are of {parameters}, "
                f"got {state.dtype}"
            )
        refuse_shared_elements(what, state)
        if not compiling:
            refuse_inference(what, state)
    if not compiling and _share_memory(conv_state, ssm_state):
        raise ValueError(
            f"{name}: Expected conv_state and ssm_state in separate memory, got two views of the same; both are changed "
            "in place, so pass ssm_state.clone()"
        )


def _share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors without shared elements of their own have memory in common, apart from rows of one buffer, of which
    each has its part. False for tensors without addresses."""
    if type(one) is not Tensor or type(other) is not Tensor:
        return False
    if torch._C._are_functorch_transforms_active():
        return False
    begin, later = one.data_ptr(), other.data_ptr()
    if begin > later:
        one, other, begin, later = other, one, later, begin
    if not begin or later - begin >= _extent(one, 0):  # 0 is the address of nothing
        return False
    row = one.stride(0) * one.element_size()
    if row != other.stride(0) * other.element_size() or 1 in (one.shape[0], other.shape[0]):
        return True
    between = (later - begin) % row
    return between < _extent(one, 1) or row - between < _extent(other, 1)


def _extent(tensor: Tensor, first: int) -> int:
    """The bytes from the first element to the end of the last one, over the dimensions from ``first`` on."""
    sizes, strides = tensor.shape[first:], tensor.stride()[first:]
    steps = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return (1 + steps) * tensor.element_size()
