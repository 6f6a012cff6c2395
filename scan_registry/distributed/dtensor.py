"""The operators on DTensors: each rank computes its shards by itself where these are of batch or of channels.

The rules are torch's own kind for an operator and a subclass of tensors (``torch.library.register_torch_dispatch``). A
rule sees every argument, None and bool among them, which sharding strategies are cached without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from scan_registry.distributed.layouts import LAYOUTS, Layout
from scan_registry.ops.layout import dense_strides, memory_order
from scan_registry.ops.registration import NAMESPACE

__all__ = ["Layout", "choose", "register"]

#: Which letter is sharded over each dimension of a mesh; an empty one if none is.
Choice = tuple[str, ...]


class Held(NamedTuple):
    """How a tensor lies now: its letters, its placements, and how many elements it has in all."""

    letters: str
    placements: tuple[Placement, ...]
    elements: int


def choose(layout: Layout, sizes: Sequence[int], held: Sequence[Held]) -> Choice:
    """The letters to shard over a mesh of these sizes, by the elements that have to be sent; none rather than one if
    that is the same."""
    chosen: list[str] = []
    for place, size in enumerate(sizes):
        options = [
            "",
            *(letter for letter in layout.letters if _fits(layout, letter, sizes, chosen)),
        ]
        costs = [
            sum(
                _cost(each.placements[place], argument(each.letters, letter), each.elements, size)
                for each in held
            )
            for letter in options
        ]
        chosen.append(options[costs.index(min(costs))])
    return tuple(chosen)


def _fits(layout: Layout, letter: str, sizes: Sequence[int], chosen: Sequence[str]) -> bool:
    """Whether the letter can be sharded over the next dimension of the mesh as well."""
    shards = sizes[len(chosen)]
    for size, other in zip(sizes, chosen, strict=False):
        shards *= size if other == letter else 1
    whole = layout.whole.get(letter)
    return whole is None or whole % shards == 0


def _cost(now: Placement, then: Placement, count: int, ranks: int) -> float:
    """How many elements each rank sends or receives, about."""
    if now == then or now.is_replicate():
        return 0
    if now.is_partial():
        return 2 * count if then.is_replicate() else count
    return count if then.is_replicate() else count / ranks


def argument(letters: str, letter: str) -> Placement:
    """How a tensor lies that is an argument."""
    place = letters.lower().find(letter) if letter else -1
    return Replicate() if place < 0 else Shard(place)


def _result(letters: str, letter: str) -> Placement:
    """Likewise of a result, which is a sum over the shards of a letter that it lacks."""
    found = argument(letters, letter)
    return Partial() if letter and found.is_replicate() else found


def mesh_of(operator: str, tensors: Sequence[Tensor | None]) -> DeviceMesh:
    """The mesh of the DTensors among the tensors. What is no DTensor may only hold integers or bools: bounds and numbers
    of sequences, which are the same on all ranks.

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
    """The tensor in these placements; if it is no DTensor, it is the same on all ranks."""
    if not isinstance(tensor, DTensor):
        tensor = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    if tuple(tensor.placements) == tuple(placements):
        return tensor
    found: DTensor = tensor.redistribute(mesh, placements)
    return found


def wrapped(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    letters: str,
    sizes: dict[str, int],
) -> DTensor:
    """The DTensor of which each rank has ``local``; ``sizes`` are those of the whole dimensions, by letter."""
    shape = tuple(
        sizes.get(letter, size) for letter, size in zip(letters, local.shape, strict=True)
    )
    stride = dense_strides(shape, memory_order(local.stride()))
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def sizes_of(layout: Layout, tensors: Sequence[Tensor | None]) -> dict[str, int]:
    """Of the whole dimensions, by letter."""
    found: dict[str, int] = {}
    for letters, tensor in zip(layout.inputs, tensors, strict=True):
        if letters is not None and tensor is not None:
            found.update(zip(letters, tensor.shape, strict=True))
    found.pop(".", None)
    return found


def held(layout: Layout, tensors: Sequence[Tensor | None]) -> list[Held]:
    """How the DTensors lie now."""
    return [
        Held(letters, tuple(tensor.placements), tensor.numel())
        for letters, tensor in zip(layout.inputs, tensors, strict=True)
        if letters is not None and isinstance(tensor, DTensor)
    ]


# --- Rules for the operators ------------------------------------------------------------------


_KINDS = ("Tensor", "Optional[Tensor]", "List[Tensor]")


def _places(operator: Any) -> list[int]:
    """Which arguments are tensors, may be, or are lists of them."""
    return [n for n, a in enumerate(operator._schema.arguments) if str(a.type) in _KINDS]


def _flat(args: Sequence[Any], places: Sequence[int]) -> Iterator[Tensor | None]:
    for place in places:
        if isinstance(args[place], (list, tuple)):
            yield from args[place]
        else:
            yield args[place]


def _filled(args: Sequence[Any], places: Sequence[int], flat: Sequence[Any]) -> list[Any]:
    """The arguments with those tensors in their places."""
    new, left = list(args), iter(flat)
    for place in places:
        if isinstance(args[place], (list, tuple)):
            new[place] = [next(left) for _ in args[place]]
        else:
            new[place] = next(left)
    return new


def compute(operator: Any, args: Sequence[Any]) -> Any:
    """The operator's results, DTensors, of arguments among which there are some. No derivative is recorded."""
    name, places = operator._schema.name.partition("::")[2], _places(operator)
    layout, tensors = LAYOUTS[name](*args), list(_flat(args, places))
    mesh = mesh_of(name, tensors)
    choice = choose(layout, mesh.shape, held(layout, tensors))
    with torch.no_grad():
        local = [
            None
            if tensor is None or letters is None
            else placed(tensor, mesh, [argument(letters, letter) for letter in choice]).to_local()
            for letters, tensor in zip(layout.inputs, tensors, strict=True)
        ]
        made = operator(*_filled(args, places, local))
        sizes = sizes_of(layout, tensors)
        found = []
        for name, result in zip(layout.outputs, made, strict=True):
            stands_for_none = name is None or len(name) != result.dim()
            letters = "." * result.dim() if name is None or stands_for_none else name
            placements = [
                Replicate() if stands_for_none else _result(letters, letter) for letter in choice
            ]
            found.append(wrapped(result, mesh, placements, letters, sizes))
    return found if isinstance(made, list) else tuple(found)


def _rule(cls: Any, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """What torch calls. It looks the function up by name, as the package may have been imported again."""
    names = [argument.name for argument in operator._schema.arguments]
    given = [*args, *((kwargs or {})[name] for name in names[len(args) :])]
    return import_module(__name__).compute(operator, given)


def register() -> None:
    """Tell torch the rules, once in a process."""
    for name in LAYOUTS:
        operator = f"{NAMESPACE}::{name}"
        if _registered(operator):
            continue
        torch.library.register_torch_dispatch(operator, DTensor, _rule)


def _registered(operator: str) -> bool:
    from torch._library.simple_registry import singleton

    return singleton.find(operator).torch_dispatch_rules.find(DTensor) is not None


register()
