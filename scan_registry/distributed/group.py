"""Groups of ranks, what a group remembers between calls, and the exchanges of data that ranks have agreed on."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo

__all__ = [
    "Members",
    "Session",
    "all_gather",
    "all_reduce",
    "gather",
    "is_capturing",
    "resolve",
    "untraced",
]

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    #: The types that users may pass as a group. None is the default group.
    Group = ProcessGroup | DeviceMesh | None

_CAPACITY = 4096  # initial bytes of an opening
_KINDS = 4096  # the most kinds of calls that a session remembers
_PLANS = 64  # the most plans that a session keeps


#: The name of this function depends on torch's version; newer versions warn of the old name.
gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# --- Ranks ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Members:
    """The ranks of a group, and which of them this process is.

    of       a weak reference to the group: plans hold ``Members``, and a group holds its plans
    session  what the group remembers between calls
    """

    of: ref[ProcessGroup]
    rank: int
    size: int
    session: Session

    @property
    def group(self) -> ProcessGroup:
        group = self.of()
        if group is None:
            raise RuntimeError("the process group of this call has been destroyed")
        return group

    def position(self, reverse: bool) -> int:
        """How many ranks' parts are scanned before this one's."""
        return self.size - 1 - self.rank if reverse else self.rank


def resolve(group: Group = None) -> Members:
    """The ranks of a ProcessGroup, of a one-dimensional DeviceMesh, or of the default group.

    ``RuntimeError`` if there is no group yet, ``ValueError`` if this process is no member or the mesh has more
    dimensions, ``TypeError`` for anything else.
    """
    if not dist.is_available():
        raise RuntimeError("this build of torch has no torch.distributed")
    if not dist.is_initialized():
        raise RuntimeError(
            "there is no process group; call torch.distributed.init_process_group first, or start the program with torchrun"
        )
    members: Any = group
    if group is None:
        members = dist.group.WORLD
    elif members is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this process is not a member of the group")
    elif not isinstance(group, dist.ProcessGroup):
        members = _of_mesh(group)
    resolved = None if members is None else _known.get(members)
    if resolved is not None:
        return resolved
    rank = dist.get_rank(members)
    if members is None or rank < 0:
        raise ValueError("this process is not a member of the group")
    kinds = frozenset(device.type for device in members._device_types)
    resolved = Members(ref(members), rank, dist.get_world_size(members), Session(kinds))
    _known[members] = resolved
    return resolved


def _of_mesh(mesh: Any) -> ProcessGroup:
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"group is a {type(mesh).__name__}; accepted are a ProcessGroup, a DeviceMesh of one dimension, and None"
        )
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        example = f"mesh[{names[-1]!r}]" if names else "a mesh with names, and mesh[name]"
        raise ValueError(
            f"group is a mesh of {mesh.ndim} dimensions; time is cut along one, so pass {example}"
        )
    return mesh.get_group()


# --- What a group remembers -------------------------------------------------------------------


@dataclass
class Session:
    """The state of a group between calls. ``capacity``, ``agreed`` and ``calls`` are equal on all ranks.

    kinds     kinds of devices whose tensors the group can exchange
    capacity  bytes of an opening
    agreed    kinds of calls that all ranks agreed on, in the order of their first calls
    calls     number of the last call
    plans     what this rank knows of calls with the same shapes and options
    openings  the openings of calls without a plan
    unread    headers that are being compared on a GPU; the CPU does not know the result yet
    flags     memory for results of comparisons, to be used again
    captured  messages whose headers CUDA graphs read, as long as the group exists
    careful   whether this rank's last call that read its headers failed
    carriers  for tensors of a device: the device on which the group exchanges them
    """

    kinds: frozenset[str]
    capacity: int = _CAPACITY
    agreed: dict[Any, None] = field(default_factory=dict)
    calls: int = 0
    plans: dict[Any, Any] = field(default_factory=dict)
    openings: dict[Any, Any] = field(default_factory=dict)
    unread: deque[Any] = field(default_factory=deque)
    flags: list[Any] = field(default_factory=list)
    captured: list[Any] = field(default_factory=list)
    careful: bool = False
    carriers: dict[torch.device, torch.device] = field(default_factory=dict)

    def remember(self, kind: Any) -> None:
        """All ranks call this in the same call. If there are too many kinds, all ranks forget the oldest one."""
        self.agreed[kind] = None
        if len(self.agreed) > _KINDS:
            del self.agreed[next(iter(self.agreed))]

    def keep(self, key: Any, plan: Any) -> None:
        """Keep a plan. If there are too many, forget all others."""
        if len(self.plans) >= _PLANS:
            self.plans.clear()
        self.plans[key] = plan


#: The groups of this process; each is known as long as it exists.
_known: WeakKeyDictionary[Any, Members] = WeakKeyDictionary()


# --- Exchanges that ranks have agreed on ------------------------------------------------------


def _carrier(members: Members, device: torch.device) -> torch.device:
    """The device on which the group exchanges tensors of ``device``: the CPU with gloo."""
    if device.type == "cpu":
        return device
    carrier = members.session.carriers.get(device)
    if carrier is None:
        on_cpu = members.group._get_backend(device).name() == "gloo"
        carrier = members.session.carriers[device] = torch.device("cpu") if on_cpu else device
    return carrier


def is_capturing(place: torch.device) -> bool:
    """Whether what is launched on this device now becomes a part of a CUDA graph."""
    return place.type == "cuda" and torch.cuda.is_current_stream_capturing()


def all_gather(members: Members, row: Tensor) -> Tensor:
    """All ranks' rows as a tensor (ranks, elements). Rows have the same size and dtype on all ranks."""
    place = _carrier(members, row.device)
    mine = row.to(place).contiguous().view(torch.uint8)
    rows = mine.new_empty(members.size * mine.numel())
    if rows.numel():
        gather(rows, mine, members.group)
    return rows.view(row.dtype).view(members.size, row.numel()).to(row.device)


def all_reduce(members: Members, tensor: Tensor) -> Tensor:
    """The sum over ranks, in a new tensor."""
    total = tensor.to(_carrier(members, tensor.device)).clone(memory_format=torch.contiguous_format)
    if total.numel():
        real = torch.view_as_real(total) if total.is_complex() else total
        dist.all_reduce(real, group=members.group)
    return total.to(tensor.device)


# --- torch.compile ----------------------------------------------------------------------------

_is_compiling = torch.compiler.is_dynamo_compiling


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, at which torch.compile breaks the graph.

    The compiler may give up tracing a frame, and run it as it is, while it goes on to trace the functions that the frame
    calls. So the function is kept from the compiler wherever the compiler has been imported, and not only while it traces.
    Elsewhere the import, which takes seconds, is saved.
    """
    hidden = _disable_dynamo(function)

    def call(*args: Any) -> Any:
        if _is_compiling() or "torch._dynamo" in sys.modules:
            return hidden(*args)
        return function(*args)

    return call
