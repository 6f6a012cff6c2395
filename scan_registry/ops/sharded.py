"""DTensors among an operator's arguments. ``scan_registry.distributed.time_shards`` knows how to compute with them.

It is imported when the first DTensor is seen, since what it imports takes longer than a first call. The operators
must not import it, since it imports them; so they find it by name.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from scan_registry.base.package import NAME

_HOME = f"{NAME}.distributed.time_shards"
_PLAIN_TYPES = (Tensor, Parameter)


def call_sharded(name: str, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
    """The results of the public function ``name`` if DTensors among the tensors are sharded along time; else None. In that
    case, the function goes on as with other tensors, and torch knows the rules of its operators.

    Tensors and options are in the order in which the family's modules ``op.sharding`` and ``op.distributed`` take them.
    """
    for tensor in tensors:
        if tensor is not None and type(tensor) not in _PLAIN_TYPES and is_dtensor(tensor):
            _load()
            return _call(name, tensors, options)
    return None


def is_dtensor(tensor: Any) -> bool:
    """Whether this is a DTensor. Its class is not imported to find out."""
    kind = type(tensor)
    return kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed.")


def _call(name: str, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
    """``_load`` puts another one in its place."""
    raise NotImplementedError


def _load() -> bool:
    """torch.compile traces the function that is loaded, and not how."""
    globals()["_call"] = import_module(_HOME).call
    return True


# As torch.compiler.assume_constant_result does, but for its import of the whole compiler.
_load._dynamo_marked_constant = True  # type: ignore[attr-defined]
