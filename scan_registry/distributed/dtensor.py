"""The operators on DTensors that are sharded along batch or channels: each rank computes its own shards.

The rules are registered with ``torch.library.register_torch_dispatch``. DTensor's own sharding strategies do not fit: their
cache ignores arguments such as None and bools. A rule of ``register_torch_dispatch`` sees every argument.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from scan_registry import kernels
from scan_registry.base.strides import dense_strides, memory_order
from scan_registry.distributed.layouts import Layout, Sharding
from scan_registry.ops.registration import NAMESPACE

__all__ = ["LAYOUTS", "SHARDINGS", "Layout", "choose", "register"]

#: What families say of their tensors, by the families' names.
SHARDINGS: dict[str, Sharding] = {
    name: import_module(f"{kernels.__name__}.{name}.op.sharding").SHARDING
    for name in kernels.operators("sharding")
}
#: The functions that return an operator's layout, by the operators' names.
LAYOUTS = {
    name: layout for sharding in SHARDINGS.values() for name, layout in sharding.operators.items()
}
#: For each dimension of a mesh the letter that is sharded over it (see ``layouts``); an empty string if none is.
Choice = tuple[str, ...]


class Input(NamedTuple):
    """A DTensor before the call: its letters, its placements, and the number of elements of the whole tensor."""

    letters: str
    placements: tuple[Placement, ...]
    elements: int


def choose(layout: Layout, sizes: Sequence[int], tensors: Sequence[Input]) -> Choice:
    """The letters to shard over a mesh of these sizes, such that the fewest elements have to be sent. Where sharding saves
    nothing, no letter is sharded."""
    chosen: list[str] = []
    for place, size in enumerate(sizes):
        options = [
            "",
            *(letter for letter in layout.letters if _fits(layout, letter, sizes, chosen)),
        ]
        costs = [
            sum(
                _cost(
                    tensor.placements[place],
                    argument(tensor.letters, letter),
                    tensor.elements,
                    size,
                )
                for tensor in tensors
            )
            for letter in options
        ]
        chosen.append(options[costs.index(min(costs))])
    return tuple(chosen)


def _fits(layout: Layout, letter: str, sizes: Sequence[int], chosen: Sequence[str]) -> bool:
    """Whether the letter can be sharded over the next dimension of the mesh, on top of those chosen so far."""
    shards = sizes[len(chosen)]
    for size, other in zip(sizes, chosen, strict=False):
        shards *= size if other == letter else 1
    whole = layout.whole.get(letter)
    return whole is None or whole % shards == 0


def _cost(now: Placement, then: Placement, count: int, ranks: int) -> float:
    """About how many elements each rank sends or receives to change the placement."""
    if now == then or now.is_replicate():
        return 0
    if now.is_partial():
        return 2 * count if then.is_replicate() else count
    return count if then.is_replicate() else count / ranks


def argument(letters: str, letter: str) -> Placement:
    """The placement of an argument, if ``letter`` is sharded."""
    place = letters.lower().find(letter) if letter else -1
    return Replicate() if place < 0 else Shard(place)


def _result(letters: str, letter: str) -> Placement:
    """The placement of a result, if ``letter`` is sharded. A result without that letter is a sum over shards (``Partial``)."""
    placement = argument(letters, letter)
    return Partial() if letter and placement.is_replicate() else placement


def mesh_of(operator: str, tensors: Sequence[Tensor | None]) -> DeviceMesh:
    """The mesh of the DTensors among the tensors. Plain tensors may only hold integers or bools, such as the bounds of
    packed sequences, and are taken to be the same on all ranks.

    Raises:
        TypeError: a tensor of floating-point numbers is no DTensor.
        ValueError: the DTensors lie on different meshes.
    """
    meshes: list[DeviceMesh] = []
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            meshes.append(tensor.device_mesh)
        elif tensor is not None and (tensor.is_floating_point() or tensor.is_complex()):
            raise TypeError(
                f"{operator} has DTensors among its arguments, and a torch.Tensor of {tensor.dtype}; make it a DTensor, "
                "with torch.distributed.tensor.distribute_tensor or DTensor.from_local"
            )
    for mesh in meshes:
        if mesh != meshes[0]:
            raise ValueError(
                f"{operator} has DTensors on two meshes, {meshes[0]} and {mesh}; all must be on one"
            )
    return meshes[0]


def placed(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """The tensor in these placements. A plain tensor is taken to be the same on all ranks."""
    if not isinstance(tensor, DTensor):
        tensor = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    if tuple(tensor.placements) == tuple(placements):
        return tensor
    moved: DTensor = tensor.redistribute(mesh, placements)
    return moved


def wrapped(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    letters: str,
    sizes: dict[str, int],
) -> DTensor:
    """The DTensor whose shard on each rank is ``local``. ``sizes`` are the global sizes by letter."""
    shape = tuple(
        sizes.get(letter, size) for letter, size in zip(letters, local.shape, strict=True)
    )
    stride = dense_strides(shape, memory_order(local.stride()))
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def sizes_of(layout: Layout, tensors: Sequence[Tensor | None]) -> dict[str, int]:
    """The global sizes of dimensions by letter."""
    sizes: dict[str, int] = {}
    for letters, tensor in zip(layout.inputs, tensors, strict=True):
        if letters is not None and tensor is not None:
            sizes.update(zip(letters, tensor.shape, strict=True))
    sizes.pop(".", None)
    return sizes


def inputs_of(layout: Layout, tensors: Sequence[Tensor | None]) -> list[Input]:
    """The letters and placements of the DTensors before the call."""
    return [
        Input(letters, tuple(tensor.placements), tensor.numel())
        for letters, tensor in zip(layout.inputs, tensors, strict=True)
        if letters is not None and isinstance(tensor, DTensor)
    ]


# --- Rules for the operators ------------------------------------------------------------------


_KINDS = ("Tensor", "Optional[Tensor]", "List[Tensor]")


def _places(operator: Any) -> list[int]:
    """The places of arguments that are tensors, optional tensors, or lists of tensors."""
    return [n for n, a in enumerate(operator._schema.arguments) if str(a.type) in _KINDS]


def _flat(args: Sequence[Any], places: Sequence[int]) -> Iterator[Tensor | None]:
    for place in places:
        if isinstance(args[place], (list, tuple)):
            yield from args[place]
        else:
            yield args[place]


def _filled(args: Sequence[Any], places: Sequence[int], flat: Sequence[Any]) -> list[Any]:
    """The arguments with their tensors replaced by those of ``flat``."""
    new, left = list(args), iter(flat)
    for place in places:
        if isinstance(args[place], (list, tuple)):
            new[place] = [next(left) for _ in args[place]]
        else:
            new[place] = next(left)
    return new


def compute(operator: Any, args: Sequence[Any]) -> Any:
    """The operator's results as DTensors, if some arguments are DTensors. Records nothing for autograd."""
    name, places = operator._schema.name.partition("::")[2], _places(operator)
    layout, tensors = LAYOUTS[name](*args), list(_flat(args, places))
    mesh = mesh_of(name, tensors)
    choice = choose(layout, mesh.shape, inputs_of(layout, tensors))
    with torch.no_grad():
        local = [
            None
            if tensor is None or letters is None
            else placed(tensor, mesh, [argument(letters, letter) for letter in choice]).to_local()
            for letters, tensor in zip(layout.inputs, tensors, strict=True)
        ]
        results = operator(*_filled(args, places, local))
        sizes = sizes_of(layout, tensors)
        sharded = []
        for name, result in zip(layout.outputs, results, strict=True):
            stands_for_none = name is None or len(name) != result.dim()
            letters = "." * result.dim() if name is None or stands_for_none else name
            placements = [
                Replicate() if stands_for_none else _result(letters, letter) for letter in choice
            ]
            sharded.append(wrapped(result, mesh, placements, letters, sizes))
    return sharded if isinstance(results, list) else tuple(sharded)


def _rule(cls: Any, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """The function that torch calls. It looks ``compute`` up by name, as the package may have been imported again."""
    names = [argument.name for argument in operator._schema.arguments]
    every = [*args, *((kwargs or {})[name] for name in names[len(args) :])]
    return import_module(__name__).compute(operator, every)


def register() -> None:
    """Register the rules with torch, once in a process."""
    for name in LAYOUTS:
        operator = f"{NAMESPACE}::{name}"
        if _registered(operator):
            continue
        torch.library.register_torch_dispatch(operator, DTensor, _rule)


def _registered(operator: str) -> bool:
    from torch._library.simple_registry import singleton

    return singleton.find(operator).torch_dispatch_rules.find(DTensor) is not None


register()
