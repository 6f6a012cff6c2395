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
    shape = common_shape(gates.shape, tokens.shape)
    if shape is None or len(shape) > layouts.MOST:
        return None
    names = layouts.names_of(len(shape), dim).replace(".", TIME)
    state = layouts.state_of(names, dim, bounds is not None).replace(TIME, ".")
    of_state = [size for letter, size in zip(names, shape, strict=True) if letter != TIME]
    if bounds is not None:
        of_state.insert(dim % len(shape), bounds.shape[0] - 1)
    inputs = (
        layouts.broadcast(gates.shape, shape, names),
        layouts.broadcast(tokens.shape, shape, names),
        None if initial is None else layouts.broadcast(initial.shape, of_state, state),
        None if bounds is None else ".",
        None
        if reset is None
        else names[resets.batch_dim(len(shape), dim)] * (len(shape) > 1) + TIME,
    )

    def function(local: Sequence[Any], group: Any) -> Any:
        gates, tokens, initial, bounds, reset = local
        how = {"dim": dim, "reverse": reverse, "cu_seqlens": bounds, "reset": reset}
        how |= {"return_final_state": final, "backend": backend, "group": group}
        return _public("linear_scan")(gates, tokens, initial, **how)

    outputs = names, state if final else None
    others = names.replace(TIME, "")
    return Request(Layout(inputs, outputs, others), _both(function, final))


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
    names = "bct" if dim % 3 == 2 else "btc"
    state = "bc" if bounds is None else names.replace(TIME, ".")
    shape = [size for size, letter in zip(inputs[0].shape, names, strict=True) if letter != TIME]
    if bounds is not None:
        shape.insert(dim % 3, bounds.shape[0] - 1)
    letters = (
        *[names for _ in inputs[:count]],
        *["c" for _ in inputs[count:]],
        None if initial is None else layouts.broadcast(initial.shape, shape, state),
        None if bounds is None else ".",
        None if reset is None else "bt",
    )

    def function(local: Sequence[Any], group: Any) -> Any:
        *inputs, initial, bounds, reset = local
        how = {"dim": dim, "reverse": reverse, "cu_seqlens": bounds, "reset": reset}
        how |= {"initial_state": initial, "return_final_state": final, "group": group}
        how |= {"backend": backend}
        return _public("gated_scan")(kind, *inputs, **how)

    outputs = names, state if final else None
    return Request(Layout(letters, outputs, "bc"), _both(function, final))


# --- selective_scan ---------------------------------------------------------------------------


def _selective_times(tensors: Sequence[Any], options: Sequence[Any]) -> list[int | None]:
    B, C, z = tensors[3], tensors[4], tensors[6]
    of_B, of_C = (each.dim() - 1 if each.dim() > 2 else None for each in (B, C))
    return [2, 2, None, of_B, of_C, None, None if z is None else 2, None, None, None]


def _selective(tensors: Sequence[Any], options: Sequence[Any]) -> Request | None:
    A, B, C, bounds = tensors[2], tensors[3], tensors[4], tensors[-1]
    softplus, final, backend = options
    state = "bc." if bounds is None else "b.c."
    whole: dict[str, int] = {}
    projections = [layouts.projection(each, whole, TIME) for each in (B, C)]
    if A.is_complex() and any(TIME in each for each in projections):
        return None  # time holds pairs of numbers, which a shard of odd length would split
    letters = ["bct", "bct", "c.", *projections, "c", "bct", "c", state, "."]
    inputs = [None if t is None else names for t, names in zip(tensors, letters, strict=True)]

    def function(local: Sequence[Any], group: Any) -> Any:
        *tensors, initial, bounds = local
        how = {"cu_seqlens": bounds, "return_final_state": final, "group": group}
        how |= {"backend": backend}
        return _public("selective_scan")(*tensors, softplus, initial, **how)

    outputs = "bct", state if final else None
    return Request(Layout(tuple(inputs), outputs, "bc", whole), _both(function, final))


# --- causal_conv1d ----------------------------------------------------------------------------


def _convolution_times(tensors: Sequence[Any], options: Sequence[Any]) -> list[int | None]:
    return [2, None, None, None, None if tensors[4] is None else 1, None]


def _convolution(tensors: Sequence[Any], options: Sequence[Any]) -> Request | None:
    bounds = tensors[-1]
    final, activation, backend = options
    state = "bc." if bounds is None else ".c."
    letters = ["bct", "c.", "c", state, "bt", "."]
    inputs = [None if t is None else names for t, names in zip(tensors, letters, strict=True)]

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

    outputs = "bct", state if final else None
    shardable = "bc" if bounds is None else "c"
    return Request(Layout(tuple(inputs), outputs, shardable), _both(function, final))


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
