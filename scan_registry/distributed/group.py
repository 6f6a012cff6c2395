"""Groups of ranks, what a group remembers between calls, and the exchanges of data that ranks have agreed on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "Incoming",
    "Members",
    "Session",
    "all_gather",
    "all_reduce",
    "begun",
    "broadcast",
    "finish",
    "is_capturing",
    "receive",
    "resolve",
    "send",
    "session",
]

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    #: The types that users may pass as a group. None is the default group.
    Group = ProcessGroup | DeviceMesh | None

_CAPACITY = 4096  # initial bytes of an opening
_KINDS = 4096  # the most kinds of calls that a session remembers


#: The name of this function depends on torch's version; newer versions warn of the old name.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

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
        found = self.of()
        if found is None:
            raise RuntimeError("the process group of this call has been destroyed")
        return found

    def neighbour(self, step: int) -> int | None:
        """The rank ``step`` further in the group; None if there is no such rank."""
        other = self.rank + step
        return other if 0 <= other < self.size else None

    def position(self, reverse: bool) -> int:
        """How many ranks' parts are scanned before this one's."""
        return self.size - 1 - self.rank if reverse else self.rank

    def rank_at(self, position: int, reverse: bool) -> int:
        """The rank at this position of the scan."""
        return self.size - 1 - position if reverse else position


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
    found = None if members is None else _known.get(members)
    if found is not None:
        return found
    rank = dist.get_rank(members)
    if members is None or rank < 0:
        raise ValueError("this process is not a member of the group")
    kinds = frozenset(each.type for each in members._device_types)
    found = Members(ref(members), rank, dist.get_world_size(members), Session(kinds))
    _known[members] = found
    return found


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
    agreed    kinds of calls that all ranks agreed on; for each, the schedule that was chosen in its first call, if any
    calls     number of the last call
    plans     what this rank knows of calls with the same shapes and options
    openings  the openings of calls without a plan
    unread    headers that are being compared on a GPU; the CPU does not know the result yet
    flags     memory for results of comparisons, to be used again
    captured  messages whose headers CUDA graphs read, as long as the group exists
    kept      tensors that are being sent, in order
    careful   whether this rank's last call that read its headers failed
    carriers  for tensors of a device: the device on which the group exchanges them
    """

    kinds: frozenset[str]
    capacity: int = _CAPACITY
    agreed: dict[Any, Any] = field(default_factory=dict)
    calls: int = 0
    plans: dict[Any, Any] = field(default_factory=dict)
    openings: dict[Any, Any] = field(default_factory=dict)
    unread: deque[Any] = field(default_factory=deque)
    flags: list[Any] = field(default_factory=list)
    captured: list[Any] = field(default_factory=list)
    kept: deque[tuple[Any, Tensor]] = field(default_factory=deque)
    careful: bool = False
    carriers: dict[torch.device, torch.device] = field(default_factory=dict)

    def remember(self, kind: Any, value: Any) -> None:
        """All ranks call this in the same call. If there are too many kinds, all ranks forget the oldest one."""
        self.agreed[kind] = value
        if len(self.agreed) > _KINDS:
            del self.agreed[next(iter(self.agreed))]


#: The groups of this process; each is known as long as it exists.
_known: WeakKeyDictionary[Any, Members] = WeakKeyDictionary()


def session(members: Members) -> Session:
    """The group's session, which lives as long as the group."""
    return members.session


# --- Exchanges that ranks have agreed on ------------------------------------------------------


def _carrier(members: Members, device: torch.device) -> torch.device:
    """The device on which the group exchanges tensors of ``device``: the CPU with gloo."""
    if device.type == "cpu":
        return device
    found = members.session.carriers.get(device)
    if found is None:
        on_cpu = members.group._get_backend(device).name() == "gloo"
        found = members.session.carriers[device] = torch.device("cpu") if on_cpu else device
    return found


def is_capturing(place: torch.device) -> bool:
    """Whether what is launched on this device now becomes a part of a CUDA graph."""
    return place.type == "cuda" and torch.cuda.is_current_stream_capturing()


def all_gather(members: Members, row: Tensor) -> Tensor:
    """All ranks' rows as a tensor (ranks, elements). Rows have the same size and dtype on all ranks."""
    place = _carrier(members, row.device)
    mine = row.to(place).contiguous().view(torch.uint8)
    found = mine.new_empty(members.size * mine.numel())
    if found.numel():
        _gather(found, mine, members.group)
    return found.view(row.dtype).view(members.size, row.numel()).to(row.device)


def all_reduce(members: Members, tensor: Tensor) -> Tensor:
    """The sum over ranks, in a new tensor."""
    total = tensor.to(_carrier(members, tensor.device)).clone(memory_format=torch.contiguous_format)
    if total.numel():
        real = torch.view_as_real(total) if total.is_complex() else total
        dist.all_reduce(real, group=members.group)
    return total.to(tensor.device)


def broadcast(members: Members, tensor: Tensor, source: int) -> Tensor:
    """The tensor of one rank, on all of them."""
    sent = tensor.to(_carrier(members, tensor.device)).contiguous()
    if sent is tensor:
        sent = sent.clone()
    if sent.numel():
        real = torch.view_as_real(sent) if sent.is_complex() else sent
        dist.broadcast(real, dist.get_global_rank(members.group, source), group=members.group)
    return sent.to(tensor.device)


def send(members: Members, tensor: Tensor, to: int) -> None:
    """Begin to send a tensor, and keep it alive until the send has completed."""
    kept, place = members.session.kept, _carrier(members, tensor.device)
    capturing = is_capturing(place)
    while not capturing and kept and kept[0][0].is_completed():  # sends complete in order
        kept.popleft()
    if not tensor.numel():
        return
    sent = (tensor if tensor.device == place else tensor.to(place)).contiguous()
    real = torch.view_as_real(sent) if sent.is_complex() else sent
    work = members.group.send([real], to, 0)
    if capturing:  # A CUDA graph has to wait for what it begins, and whether that has completed cannot be asked.
        work.wait()
    else:
        kept.append((work, real))


class Incoming(NamedTuple):
    """A tensor that is being received."""

    work: Any
    found: Tensor
    device: torch.device

    def wait(self) -> Tensor:
        """The tensor. With gloo the CPU waits for it, with NCCL the GPU's current stream."""
        if self.work is not None:
            self.work.wait()
        found = self.found
        return found if found.device == self.device else found.to(self.device)


def receive(
    members: Members, shape: Sequence[int], dtype: torch.dtype, device: torch.device, source: int
) -> Incoming:
    """Begin to receive what ``source`` sends."""
    found = torch.empty(tuple(shape), dtype=dtype, device=_carrier(members, device))
    work = None
    if found.numel():
        real = torch.view_as_real(found) if found.is_complex() else found
        work = members.group.recv([real], source, 0)
    return Incoming(work, found, device)


def begun(coming: Iterator[Incoming], passes_on: bool) -> Iterator[Incoming]:
    """The receives of a call. If this rank passes no state on, all receives begin at once, so that data arrives while
    kernels run: NCCL begins a receive only after the kernels that were on the stream before it. If this rank passes states
    on, each receive begins when its state is needed, since a send may have to wait for receives that began before it."""
    return coming if passes_on else iter([*coming])


def finish(members: Members) -> None:
    """Wait until sends from CPU memory have completed. Sends from a GPU continue without the CPU."""
    kept = members.session.kept
    if kept and kept[-1][1].device.type == "cpu":
        for work, _ in kept:
            work.wait()
        kept.clear()
