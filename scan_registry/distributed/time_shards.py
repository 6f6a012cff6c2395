"""The public functions on DTensors that are sharded along time.

They call the functions of ``scan_registry.distributed`` on the local parts. The dispatch rules of ``dtensor`` cannot do this:
they run below autograd, and the backward pass needs an exchange of its own. So the public functions call this module first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement

from scan_registry import distributed
from scan_registry.distributed import dtensor, layouts
from scan_registry.distributed.layouts import TIME, Layout
from scan_registry.kernels.gated_scan.kinds import KINDS
from scan_registry.kernels.linear_scan.op import stretches as resets
from scan_registry.ops.checks import common_shape

__all__ = ["call"]


#: Names of the last tensors of a call, in its order, and of all options.
_KEYWORDS = {
    "linear_scan": ("initial_state", "cu_seqlens", "reset"),
    "gated_scan": ("initial_state", "cu_seqlens", "reset"),
    "selective_scan": ("initial_state", "cu_seqlens"),
    "causal_conv1d": ("initial_state", "seq_idx", "cu_seqlens"),
}
_OPTIONS = {
    "linear_scan": ("dim", "reverse", "return_final_state", "backend"),
    "gated_scan": ("kind", "dim", "reverse", "return_final_state", "backend"),
    "selective_scan": ("delta_softplus", "return_final_state", "backend"),
    "causal_conv1d": ("return_final_state", "activation", "backend"),
}
#: How many of the first tensors a call has to have.
_REQUIRED = {"linear_scan": 2, "gated_scan": 1, "selective_scan": 5, "causal_conv1d": 2}


def call(name: str, tensors: Sequence[Any], options: Sequence[Any]) -> Any:
    """The results of the public function for tensors among which there are DTensors. None if no DTensor is sharded along
    time, or if no function of ``scan_registry.distributed`` supports the call."""
    if not all(tensor is None or isinstance(tensor, Tensor) for tensor in tensors):
        return None  # the public function raises the error
    if name not in _REQUIRED or any(x is None for x in tensors[: _REQUIRED[name]]):
        return None
    dimensions = _TIMES[name](tensors, options)
    for tensor, dim in zip(tensors, dimensions, strict=True):
        if dim is None or not isinstance(tensor, DTensor):
            continue
        for place, placement in enumerate(tensor.placements):
            if placement.is_shard(dim):
                return _run(name, tensors, options, place)
    return None


@_disable_dynamo
def _run(name: str, tensors: Sequence[Any], options: Sequence[Any], place: int) -> Any:
    """The results of a call whose time is sharded over dimension ``place`` of the mesh, or None as in ``call``."""
    mesh = dtensor.mesh_of(name, tensors)
    layout = _LAYOUTS[name](tensors, options)
    if layout is None or not _fits(layout, tensors):
        return None
    chosen = [*dtensor.choose(layout, mesh.shape, dtensor.inputs_of(layout, tensors))]
    chosen[place] = TIME
    local = [
        None if tensor is None or letters is None else _local(tensor, mesh, letters, chosen)
        for letters, tensor in zip(layout.inputs, tensors, strict=True)
    ]
    results = _over_ranks(name, local, options, mesh.get_group(place))
    sizes, sharded = dtensor.sizes_of(layout, tensors), []
    for letters, result in zip(layout.outputs, results, strict=False):
        if letters is not None:
            takes = TIME in letters or mesh.get_local_rank(place) == 0
            placements = [dtensor.argument(letters, letter) for letter in chosen]
            whole = _Once.apply(result, takes)  # type: ignore[no-untyped-call]
            sharded.append(dtensor.wrapped(whole, mesh, placements, letters, sizes))
    if name == "causal_conv1d":
        return sharded[0], sharded[1] if len(sharded) > 1 else None
    return sharded[0] if len(sharded) == 1 else tuple(sharded)


def _fits(layout: Layout, tensors: Sequence[Any]) -> bool:
    """Whether each tensor has as many dimensions as letters."""
    pairs = zip(layout.inputs, tensors, strict=True)
    return all(t is None or (names is not None and len(names) == t.dim()) for names, t in pairs)


def _over_ranks(
    name: str, tensors: Sequence[Any], options: Sequence[Any], group: Any
) -> Sequence[Any]:
    """The results of the function of ``scan_registry.distributed`` on this rank's parts."""
    keywords = _KEYWORDS[name]
    count = len(tensors) - len(keywords)
    how = dict(zip(_OPTIONS[name], options, strict=True))
    how |= zip(keywords, tensors[count:], strict=True)
    kind = [how.pop("kind")] if "kind" in how else []
    results = getattr(distributed, name)(*kind, *tensors[:count], **how, group=group)
    return results if how["return_final_state"] else (results,)


def _local(tensor: Tensor, mesh: DeviceMesh, letters: str, chosen: Sequence[str]) -> Tensor:
    """A rank's part. If a letter is sharded that the tensor lacks, the part's gradient is ``Partial``."""
    placements = [dtensor.argument(letters, letter) for letter in chosen]
    gradients: list[Placement] = [
        Partial() if letter and now.is_replicate() else now
        for now, letter in zip(placements, chosen, strict=True)
    ]
    part: Tensor = dtensor.placed(tensor, mesh, placements).to_local(grad_placements=gradients)
    return part


class _Once(torch.autograd.Function):
    """A result that is the same on all ranks. All ranks have its whole gradient, so only one rank passes it on: the function
    below sums over ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, takes: bool) -> Tensor:
        ctx.takes = takes
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad if ctx.takes else torch.zeros_like(grad), None


# --- Of each function: the time dimension of each tensor, None without time, and the layout -------


def _linear_times(tensors: Sequence[Any], options: Sequence[Any]) -> list[int | None]:
    gates, tokens, *_, reset = tensors
    rank, dim = max(gates.dim(), tokens.dim()), options[0]
    back = dim if dim < 0 else dim - rank
    places = [tensor.dim() + back for tensor in (gates, tokens)]
    of_reset = None if reset is None else reset.dim() - 1
    return [*(place if place >= 0 else None for place in places), None, None, of_reset]


def _linear(tensors: Sequence[Any], options: Sequence[Any]) -> Layout | None:
    *others, reset = tensors
    if common_shape(others[0].shape, others[1].shape) is None:
        return None
    layout = layouts.linear_scan(*others, *options)
    names = layout.outputs[0]
    assert names is not None
    batch = "" if len(names) == 1 else names[resets.batch_dim(len(names), options[0])]
    return layout._replace(inputs=(*layout.inputs, None if reset is None else batch + TIME))


def _gated_times(tensors: Sequence[Any], options: Sequence[Any]) -> list[int | None]:
    *inputs, _, _, reset = tensors
    dim = options[1] % 3
    places = [dim if isinstance(x, Tensor) and x.dim() == 3 else None for x in inputs]
    return [*places, None, None, None if reset is None else 1]


def _gated(tensors: Sequence[Any], options: Sequence[Any]) -> Layout:
    *inputs, initial_state, cu_seqlens, reset = tensors
    kind, *others = options
    count = len(KINDS[kind].inputs)
    parts = inputs[:count], inputs[count:]
    layout = layouts.gated_scan(kind, *parts, reset, initial_state, cu_seqlens, *others)
    *letters, of_reset, of_initial, of_bounds = layout.inputs
    return layout._replace(inputs=(*letters, of_initial, of_bounds, of_reset))


def _selective_times(tensors: Sequence[Any], options: Sequence[Any]) -> list[int | None]:
    B, C, z = tensors[3], tensors[4], tensors[6]
    of_B, of_C = (x.dim() - 1 if x.dim() > 2 else None for x in (B, C))
    return [2, 2, None, of_B, of_C, None, None if z is None else 2, None, None, None]


def _selective(tensors: Sequence[Any], options: Sequence[Any]) -> Layout | None:
    A, B, C = tensors[2:5]
    if A.is_complex() and max(B.dim(), C.dim()) > 2:
        return None  # time holds pairs of numbers
    layout = layouts.selective_scan(*tensors, *options)
    out, state, _ = layout.outputs
    return layout._replace(outputs=(out, state if options[1] else None))


def _convolution_times(tensors: Sequence[Any], options: Sequence[Any]) -> list[int | None]:
    return [2, None, None, None, None if tensors[4] is None else 1, None]


def _convolution(tensors: Sequence[Any], options: Sequence[Any]) -> Layout:
    final, activation, backend = options
    return layouts.causal_conv1d(*tensors, activation, final, backend)


_TIMES: dict[str, Callable[..., list[int | None]]] = {
    "linear_scan": _linear_times,
    "gated_scan": _gated_times,
    "selective_scan": _selective_times,
    "causal_conv1d": _convolution_times,
}
#: None if no function of ``scan_registry.distributed`` supports the call.
_LAYOUTS: dict[str, Callable[..., Layout | None]] = {
    "linear_scan": _linear,
    "gated_scan": _gated,
    "selective_scan": _selective,
    "causal_conv1d": _convolution,
}
