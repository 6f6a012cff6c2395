"""A rank's arguments are plain tensors: DTensors are refused before anything is computed or sent."""

from __future__ import annotations

from typing import Any

from scan_registry.distributed import opening
from scan_registry.distributed.group import Members
from scan_registry.ops.derivatives import PLAIN_TYPES
from scan_registry.ops.sharded import is_dtensor

__all__ = ["check_local", "refused"]


def check_local(members: Members, function: str, **tensors: Any) -> None:
    """Raise a ``TypeError`` if a tensor is a DTensor. The other ranks learn of it, as of any argument that is refused."""
    for name, tensor in tensors.items():
        if tensor is not None and type(tensor) not in PLAIN_TYPES and is_dtensor(tensor):
            opening.agree(members, refused(function, name, tensor), tensor.device)


def refused(function: str, name: str, tensor: Any) -> TypeError:
    """The error of this function of ``scan_registry.distributed``."""
    return TypeError(
        f"{name} is a DTensor with placements {tensor.placements}; distributed.{function} takes local tensors, each "
        f"rank's own part: pass {name}.to_local(). The operators of scan_registry itself take DTensors"
    )
