"""The public functions on DTensors that are sharded along time.

They call the functions of ``scan_registry.distributed`` on the local parts. The dispatch rules of ``dtensor`` cannot do this:
they run below autograd, and the backward pass needs an exchange of its own. So the public functions call this module first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement

from scan_registry import distributed
from scan_registry.distributed import dtensor, layouts
from scan_registry.distributed.layouts import TIME, Layout
from scan_registry.kernels.gated_scan.kinds import KINDS
from scan_registry.ops import resets
from scan_registry.ops.arguments import common_shape

__all__ = ["call"]


class Request(NamedTuple):
    """A call that a function of ``scan_registry.distributed`` supports.

    layout    layout of its tensors and results, with a letter for time
    function  computes the results from local tensors and a group
    """

    layout: Layout
    function: Callable[..., Any]


#: Makes a request from the tensors and options of a call; None if no function of ``scan_registry.distributed`` supports it.
Reader = Callable[[Sequence[Any], Sequence[Any]], "Request | None"]


def call(name: str, tensors: Sequence[Any], options: Sequence[Any]) -> Any:
    """The results of the public function for tensors among which there are DTensors. None if no DTensor is sharded along
    time, or if no function of ``scan_registry.distributed`` supports the call."""
    if not all(each is None or isinstance(each, Tensor) for each in tensors):
        return None  # the public function raises the error
    if any(each is None for each in tensors[: _REQUIRED[name]]) or name not in distributed.__all__:
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
    request = _READERS[name](tensors, options)
    if request is None:
        return None
    layout, function = request
    pairs = zip(layout.inputs, tensors, strict=True)
    if any(t is not None and (names is None or len(names) != t.dim()) for names, t in pairs):
        return None
    chosen = [*dtensor.choose(layout, mesh.shape, dtensor.held(layout, tensors))]
    chosen[place] = TIME
    local = [
        None if tensor is None or letters is None else _local(tensor, mesh, letters, chosen)
        for letters, tensor in zip(layout.inputs, tensors, strict=True)
    ]
    results = function(local, mesh.get_group(place))
    sizes = dtensor.sizes_of(layout, tensors)
    found: list[Any] = []
    for letters, result in zip(layout.outputs, results, strict=True):
        if letters is None:
            found.append(None)
            continue
        if TIME not in letters:
            result = _Once.apply(result, mesh.get_local_rank(place) == 0)  # type: ignore[no-untyped-call]  # noqa: PLW2901
        placements = [dtensor.argument(letters, letter) for letter in chosen]
        found.append(dtensor.wrapped(result, mesh, placements, letters, sizes))
    if name == "causal_conv1d":
        return found[0], found[1]
    return found[0] if found[1] is None else (found[0], found[1])


def _local(tensor: Tensor, mesh: DeviceMesh, letters: str, chosen: Sequence[str]) -> Tensor:
    """A rank's part. If a letter is sharded that the tensor lacks, the part's gradient is ``Partial``."""
    placements = [dtensor.argument(letters, letter) for letter in chosen]
    gradients: list[Placement] = [
        Partial() if letter and now.is_replicate() else now
        for now, letter in zip(placements, chosen, strict=True)
    ]
    found: Tensor = dtensor.placed(tensor, mesh, placements).to_local(grad_placements=gradients)
    return found


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


# --- linear_scan ------------------------------------------------------------------------------


def _linear_times(tensors: Sequence[Any], options: Sequence[Any]) -> list[int | None]:
    """The time dimension of each tensor; None for a tensor without time."""
    gates, tokens, *_, reset = tensors
    rank, dim = max(gates.dim(), tokens.dim()), options[0]
    back = dim if dim < 0 else dim - rank
    places = [each.dim() + back for each in (gates, tokens)]
    of_reset = None if reset is None else reset.dim() - 1
    return [*(place if place >= 0 else None for place in places), None, None, of_reset]


def _linear(tensors: Sequence[Any], options: Sequence[Any]) -> Request | None:
    gates, tokens, initial, bounds, reset = tensors
    dim, reverse, final, backend = options
    if common_shape(gates.shape, tokens.shape) is None:
        return None
    layout = layouts.linear_scan(gates, tokens, initial, bounds, *options)
    names = layout.outputs[0]
    assert names is not None
    batch = "" if len(names) == 1 else names[resets.batch_dim(len(names), dim)]
    layout = layout._replace(inputs=(*layout.inputs, None if reset is None else batch + TIME))

    def function(local: Sequence[Any], group: Any) -> Any:
        gates, tokens, initial, bounds, reset = local
        how = {"dim": dim, "reverse": reverse, "cu_seqlens": bounds, "reset": reset}
        how |= {"return_final_state": final, "backend": backend, "group": group}
        return _public("linear_scan")(gates, tokens, initial, **how)

    return Request(layout, _both(function, final))


def _public(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(distributed, name)
    return found


def _both(function: Callable[..., Any], final: bool) -> Callable[..., Any]:
    """The function with two results: None in place of a final state that is not asked for."""

    def call(*args: Any) -> Any:
        made = function(*args)
        return made if final else (made, None)

    return call


# --- gated_scan -------------------------------------------------------------------------------


def _gated_times(tensors: Sequence[Any], options: Sequence[Any]) -> list[int | None]:
    *inputs, _, _, reset = tensors
    dim = options[1] % 3
    places = [dim if isinstance(each, Tensor) and each.dim() == 3 else None for each in inputs]
    return [*places, None, None, None if reset is None else 1]


def _gated(tensors: Sequence[Any], options: Sequence[Any]) -> Request | None:
    kind, dim, reverse, final, backend = options
    *inputs, initial, bounds, reset = tensors
    count = len(KINDS[kind].inputs)
    parts = inputs[:count], inputs[count:]
    layout = layouts.gated_scan(kind, *parts, reset, initial, bounds, *options[1:])
    *letters, of_reset, of_initial, of_bounds = layout.inputs
    layout = layout._replace(inputs=(*letters, of_initial, of_bounds, of_reset))

    def function(local: Sequence[Any], group: Any) -> Any:
        *inputs, initial, bounds, reset = local
        how = {"dim": dim, "reverse": reverse, "cu_seqlens": bounds, "reset": reset}
        how |= {"initial_state": initial, "return_final_state": final, "group": group}
        how |= {"backend": backend}
        return _public("gated_scan")(kind, *inputs, **how)

    return Request(layout, _both(function, final))


# --- selective_scan ---------------------------------------------------------------------------


def _selective_times(tensors: Sequence[Any], options: Sequence[Any]) -> list[int | None]:
    B, C, z = tensors[3], tensors[4], tensors[6]
    of_B, of_C = (each.dim() - 1 if each.dim() > 2 else None for each in (B, C))
    return [2, 2, None, of_B, of_C, None, None if z is None else 2, None, None, None]


def _selective(tensors: Sequence[Any], options: Sequence[Any]) -> Request | None:
    A, B, C = tensors[2:5]
    softplus, final, backend = options
    if A.is_complex() and max(B.dim(), C.dim()) > 2:
        return None  # time holds pairs of numbers
    layout = layouts.selective_scan(*tensors, *options)
    layout = layout._replace(outputs=(layout.outputs[0], layout.outputs[1] if final else None))

    def function(local: Sequence[Any], group: Any) -> Any:
        *tensors, initial, bounds = local
        how = {"cu_seqlens": bounds, "return_final_state": final, "group": group}
        how |= {"backend": backend}
        return _public("selective_scan")(*tensors, softplus, initial, **how)

    return Request(layout, _both(function, final))


# --- causal_conv1d ----------------------------------------------------------------------------


def _convolution_times(tensors: Sequence[Any], options: Sequence[Any]) -> list[int | None]:
    return [2, None, None, None, None if tensors[4] is None else 1, None]


def _convolution(tensors: Sequence[Any], options: Sequence[Any]) -> Request | None:
    final, activation, backend = options

    def function(local: Sequence[Any], group: Any) -> Any:
        x, weight, bias, initial, seq_idx, bounds = local
        return _public("causal_conv1d")(
            *(x, weight, bias),
            group=group,
            initial_state=initial,
            seq_idx=seq_idx,
            cu_seqlens=bounds,
            return_final_state=final,
            activation=activation,
            backend=backend,
        )

    layout = layouts.causal_conv1d(*tensors, activation, final, backend)
    return Request(layout, _both(function, final))


_TIMES: dict[str, Callable[..., list[int | None]]] = {
    "linear_scan": _linear_times,
    "gated_scan": _gated_times,
    "selective_scan": _selective_times,
    "causal_conv1d": _convolution_times,
}
_REQUIRED = {"linear_scan": 2, "gated_scan": 1, "selective_scan": 5, "causal_conv1d": 2}
_READERS: dict[str, Reader] = {
    "linear_scan": _linear,
    "gated_scan": _gated,
    "selective_scan": _selective,
    "causal_conv1d": _convolution,
}
