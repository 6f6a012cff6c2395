"""Groups of ranks, and how they compare a call's arguments before they exchange data.

A call of this package is collective: every rank of the group makes it, with its own part. If one rank raised an error alone,
the others would wait for its data. Ranks with different shapes would wait for each other, or read past the data that was sent.
So every call *opens* with one all-gather, the *opening*. It has the same number of bytes on every rank, whatever the call is:

    a header    digest of what has to be equal | failed? | number of the call | local numbers | the same in words
    data        the call's own rows, where they are known to fit

**No rank skips an opening, whatever it has cached.** The opening also carries the data of calls that were agreed on before. A
``Session`` remembers the size of the opening (its *capacity*), and the calls that were agreed on. Both change only after all
ranks have read all headers and found them equal, so they change on all ranks in the same call. If a rank makes a call of a new
kind, the other ranks see its header in the opening of their own call. When the headers are read depends on the backend:

- If headers are exchanged in CPU memory, as with gloo, each rank reads all of them. A failure or a disagreement is an error on
  all ranks in the same call, and the next call can succeed.
- With NCCL alone, reading headers would wait for the GPU. A rank reads them in a call that is new to it. In a call that was
  agreed on before, it compares them on the GPU. If they differ, the gathered rows are NaN, and the rank's next call, or the
  backward pass of this one, raises the error. No rank waits for missing data, as the opening is all that such a call exchanges.
- The first call of a kind, and calls with packed sequences, always read the headers first. So do calls that have a further
  collective after the opening. The exception is a ``linear_scan`` or ``gated_scan`` with the schedule "pass" that was agreed
  on before: it goes on without reading. If a rank fails in such a call, with NCCL, the others wait for its states until the group's timeout, or
  until their next call raises the error.

Ranks that make calls in different orders are detected in the same way, as the digest contains the operator. If a rank has
stopped, or makes no call at all, the others' call ends by the group's timeout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from scan_registry.distributed.headers import HEADER, Terms, encoded, read_headers

__all__ = [
    "Incoming",
    "Members",
    "Opened",
    "Session",
    "Terms",
    "agree",
    "all_gather",
    "all_reduce",
    "begun",
    "broadcast",
    "check_unread",
    "finish",
    "is_agreed",
    "open_call",
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

#: Initial and largest capacity of an opening, in bytes.
_CAPACITY, _MOST = 4096, 1 << 20
_KINDS = 4096  # the most kinds of calls that a session remembers


#: The name of this function depends on torch's version; newer versions warn of the old name.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# --- Ranks ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Members:
    """The ranks of a group, and which of them this process is."""

    group: ProcessGroup
    rank: int
    size: int

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
    rank = dist.get_rank(members)
    if members is None or rank < 0:
        raise ValueError("this process is not a member of the group")
    return Members(members, rank, dist.get_world_size(members))


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

    capacity  bytes of an opening
    agreed    kinds of calls that all ranks agreed on; for each, the schedule that was chosen in its first call, if any
    calls     number of the last call
    unread    headers that are being compared on a GPU; the CPU does not know the result yet
    kept      tensors that are being sent
    careful   whether this rank's last call that read its headers failed
    """

    capacity: int = _CAPACITY
    agreed: dict[Any, Any] = field(default_factory=dict)
    calls: int = 0
    unread: list[Unread] = field(default_factory=list)
    kept: list[tuple[Any, Tensor]] = field(default_factory=list)
    careful: bool = False

    def remember(self, kind: Any, value: Any) -> None:
        """All ranks call this in the same call. If there are too many kinds, all ranks forget the oldest one."""
        self.agreed[kind] = value
        if len(self.agreed) > _KINDS:
            del self.agreed[next(iter(self.agreed))]


_sessions: WeakKeyDictionary[Any, Session] = WeakKeyDictionary()


def session(members: Members) -> Session:
    """The group's session, which lives as long as the group."""
    found = _sessions.get(members.group)
    if found is None:
        found = _sessions[members.group] = Session()
    return found


# --- The opening ------------------------------------------------------------------------------


class Opened(NamedTuple):
    """The result of an opening.

    local  the local numbers of each rank; None where the headers were not read
    rows   (ranks, elements); None unless rows were given
    """

    local: tuple[tuple[int, ...], ...] | None
    rows: Tensor | None


class Unread(NamedTuple):
    """Headers that a GPU compares. ``equal`` is valid once the event has completed."""

    event: Any
    equal: Tensor
    headers: Tensor
    operator: str


def agree(members: Members, terms: Terms | Exception, device: torch.device | None = None) -> Any:
    """Compare the terms of all ranks, and return the local numbers of each rank. Every rank of the group has to call this.

    ``terms`` is an exception if the rank's own arguments are bad. This rank then raises the exception, and the others a
    ``RuntimeError`` that names the rank and the exception. If terms differ, all ranks raise a ``ValueError`` whose message
    has the terms of each rank. ``device`` is the device of the rank's tensors.
    """
    return open_call(members, terms, device, None).local


def is_agreed(members: Members, terms: Terms) -> bool:
    """Whether all ranks have agreed on such a call before."""
    return terms.kind in session(members).agreed


def open_call(
    members: Members,
    terms: Terms | Exception,
    device: torch.device | None,
    rows: Tensor | None = None,
    *,
    read: bool = True,
) -> Opened:
    """Open a call: exchange headers and ``rows``, a contiguous vector of the same size and dtype on all ranks.

    ``read`` is false if the call may go on before this rank has read the headers. Errors are as for ``agree``.
    """
    if members.size == 1:
        if isinstance(terms, Exception):
            raise terms
        return Opened((terms.local,), None if rows is None else rows.unsqueeze(0))
    state = session(members)
    try:
        check_unread(members)
    except (RuntimeError, ValueError) as error:
        # The other ranks may not know of the error yet: this rank's header in the opening tells them.
        terms, rows = error, None
    state.calls += 1
    place = _opening_device(members, device)
    kind = None if isinstance(terms, Exception) else terms.kind
    size = 0 if rows is None else rows.numel() * rows.element_size()
    inline = rows is not None and rows.device.type == place.type and HEADER + size <= state.capacity
    mine = torch.empty(state.capacity, dtype=torch.uint8, device=place)
    header = torch.frombuffer(bytearray(encoded(terms)), dtype=torch.uint8)
    # A blocking copy would make the CPU wait for the GPU.
    mine[:HEADER].copy_(header, non_blocking=True)
    if inline:
        assert rows is not None
        mine[HEADER : HEADER + size].copy_(rows.view(torch.uint8))
    all_of_them = mine.new_empty(members.size, state.capacity)
    _gather(all_of_them.view(-1), mine, members.group)
    headers = all_of_them[:, :HEADER]
    local = None
    known = kind is not None and kind in state.agreed and (inline or rows is None)
    if read or place.type == "cpu" or not known or state.careful:
        # Read headers until a call succeeds: ranks may learn of an error in different calls.
        state.careful = True
        local = read_headers(headers, terms)
        state.careful = False
    assert isinstance(terms, Terms)
    equal = None if local is not None else _compared(state, headers, terms)
    if local is not None and kind not in state.agreed:
        state.remember(kind, None)
    if inline:
        assert rows is not None
        # A copy: a view in another dtype has to be aligned to it, and the headers' memory can be freed.
        found = all_of_them[:, HEADER : HEADER + size].contiguous().view(rows.dtype)
        return Opened(local, found if equal is None else torch.where(equal, found, torch.nan))
    if rows is None:
        return Opened(local, None)
    if rows.device.type == place.type and state.capacity < HEADER + size <= _MOST:
        state.capacity = 1 << (HEADER + size - 1).bit_length()
    return Opened(local, all_gather(members, rows))


def _opening_device(members: Members, device: torch.device | None) -> torch.device:
    """The device for headers. Its kind depends on the group alone, as a rank's tensors may be on a wrong device."""
    kinds = {each.type for each in members.group._device_types}
    if "cpu" in kinds or not kinds:
        return torch.device("cpu")
    if device is not None and device.type in kinds:
        return device
    kind = sorted(kinds)[0]
    return torch.device(kind, torch.cuda.current_device() if kind == "cuda" else 0)


# --- Headers that are compared on a GPU -------------------------------------------------------


def _compared(state: Session, headers: Tensor, terms: Terms) -> Tensor:
    """Whether the headers are equal, as a tensor on the GPU. ``check_unread`` raises the error in a later call."""
    words = headers[:, : 8 * 3].contiguous().view(torch.int64)
    equal = (words == words[:1]).all()
    kept = torch.empty((), dtype=torch.bool, pin_memory=True)
    kept.copy_(equal, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    state.unread.append(Unread(event, kept, headers, terms.operator))
    return equal


def check_unread(members: Members, *, wait: bool = False) -> None:
    """Raise the errors of earlier calls whose headers a GPU compared. Without ``wait`` only comparisons that have finished
    are checked."""
    state = session(members)
    while state.unread and (wait or state.unread[0].event.query()):
        event, equal, headers, operator = state.unread.pop(0)
        event.synchronize()
        if not bool(equal):
            read_headers(headers, Terms(operator, ()))


# --- Exchanges that ranks have agreed on ------------------------------------------------------


def _carrier(members: Members, device: torch.device) -> torch.device:
    """The device on which the group exchanges tensors of ``device``: the CPU with gloo."""
    if device.type == "cpu":
        return device
    backend = members.group._get_backend(device)
    return torch.device("cpu") if backend.name() == "gloo" else device


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
    state = session(members)
    state.kept = [(work, sent) for work, sent in state.kept if not work.is_completed()]
    if not tensor.numel():
        return
    sent = tensor.to(_carrier(members, tensor.device)).contiguous()
    real = torch.view_as_real(sent) if sent.is_complex() else sent
    work = dist.isend(real, dist.get_global_rank(members.group, to), group=members.group)
    state.kept.append((work, real))


class Incoming(NamedTuple):
    """A tensor that is being received."""

    work: Any
    found: Tensor
    device: torch.device

    def wait(self) -> Tensor:
        """The tensor. With gloo the CPU waits for it, with NCCL the GPU's current stream."""
        if self.work is not None:
            self.work.wait()
        return self.found.to(self.device)


def receive(
    members: Members, shape: Sequence[int], dtype: torch.dtype, device: torch.device, source: int
) -> Incoming:
    """Begin to receive what ``source`` sends."""
    found = torch.empty(tuple(shape), dtype=dtype, device=_carrier(members, device))
    work = None
    if found.numel():
        real = torch.view_as_real(found) if found.is_complex() else found
        work = dist.irecv(real, dist.get_global_rank(members.group, source), group=members.group)
    return Incoming(work, found, device)


def begun(coming: Iterator[Incoming], passes_on: bool) -> Iterator[Incoming]:
    """The receives of a call. If this rank passes no state on, all receives begin at once, so that data arrives while
    kernels run: NCCL begins a receive only after the kernels that were on the stream before it. If this rank passes states
    on, each receive begins when its state is needed, since a send may have to wait for receives that began before it."""
    return coming if passes_on else iter([*coming])


def finish(members: Members) -> None:
    """Wait until sends from CPU memory have completed. Sends from a GPU continue without the CPU."""
    state = session(members)
    for work, sent in state.kept:
        if sent.device.type == "cpu":
            work.wait()
    state.kept = [(work, sent) for work, sent in state.kept if sent.device.type != "cpu"]
