"""The public functions on DTensors that are sharded along time.

They call the functions of ``scan_registry.distributed`` on the local parts. The dispatch rules of ``dtensor`` cannot do this:
they run below autograd, and the backward pass needs an exchange of its own. So the public functions call this module first.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement

from scan_registry import kernels
from scan_registry.distributed import dtensor
from scan_registry.distributed.dtensor import SHARDINGS
from scan_registry.distributed.layouts import TIME, Layout

__all__ = ["call"]


def call(name: str, tensors: Sequence[Any], options: Sequence[Any]) -> Any:
    """The results of the public function for tensors among which there are DTensors. None if no DTensor is sharded along
    time, or if no function of ``scan_registry.distributed`` supports the call."""
    if not all(tensor is None or isinstance(tensor, Tensor) for tensor in tensors):
        return None  # the public function raises the error
    sharding = SHARDINGS.get(name)
    if sharding is None or any(x is None for x in tensors[: sharding.required]):
        return None
    dimensions = sharding.times(tensors, options)
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
    layout = SHARDINGS[name].layout(tensors, options)
    if layout is None or not _fits(layout, tensors):
        return None
    chosen = [*dtensor.choose(layout, mesh.shape, dtensor.inputs_of(layout, tensors))]
    chosen[place] = TIME
    local = [
        None if tensor is None or letters is None else _local(tensor, mesh, letters, chosen)
        for letters, tensor in zip(layout.inputs, tensors, strict=True)
    ]
    family = import_module(f"{kernels.__name__}.{name}.op.distributed")
    results = family.call(tuple(local), options, mesh.get_group(place))
    one = isinstance(results, Tensor)
    sizes = dtensor.sizes_of(layout, tensors)
    sharded: list[DTensor | None] = []
    for letters, result in zip(layout.outputs, [results] if one else results, strict=False):
        if letters is None:
            sharded.append(None)
            continue
        takes = TIME in letters or mesh.get_local_rank(place) == 0
        placements = [dtensor.argument(letters, letter) for letter in chosen]
        whole = _Once.apply(result, takes)  # type: ignore[no-untyped-call]
        sharded.append(dtensor.wrapped(whole, mesh, placements, letters, sizes))
    return sharded[0] if one else tuple(sharded)


def _fits(layout: Layout, tensors: Sequence[Any]) -> bool:
    """Whether each tensor has as many dimensions as letters."""
    pairs = zip(layout.inputs, tensors, strict=True)
    return all(t is None or (names is not None and len(names) == t.dim()) for names, t in pairs)


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
