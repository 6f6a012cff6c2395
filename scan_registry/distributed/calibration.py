"""Measures the numbers of a group that the cost model needs.

Nothing is measured unless a user calls ``measure``. A measurement consists of many collectives. Hidden in the first call of
an operator, it would keep CUDA graphs from recording that call, and the choice of a schedule would differ from run to run.
Until every rank of a group has called ``measure``, the group uses the defaults of ``scan_registry.distributed.machines``.
"""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from scan_registry.distributed import parts
from scan_registry.distributed.cost import line_of
from scan_registry.distributed.group import Members, resolve, session
from scan_registry.distributed.headers import Terms
from scan_registry.distributed.latency import Call, Stopwatch, all_gather
from scan_registry.distributed.machines import Machine, default
from scan_registry.distributed.opening import agree
from scan_registry.ops.arguments import Options

if TYPE_CHECKING:
    from scan_registry.distributed.group import Group

_PIECES = 8  # one call has so many pieces more than another; their times give the cost of a piece
#: Numbers of floats: for torch.add, and for the all-gather.
_SIZES = {"cuda": (1 << 26, 1 << 22), "cpu": (1 << 24, 1 << 18)}

_measured: WeakKeyDictionary[dist.ProcessGroup, Machine] = WeakKeyDictionary()


def machine_of(group: dist.ProcessGroup, device: torch.device) -> Machine:
    """The machine that ``measure`` found for the group, or else the default for the device.

    The default depends on the GPU's name and, for a group of all ranks, on torchrun's ``LOCAL_WORLD_SIZE``. Where these
    differ from rank to rank, the returned machine differs, too.
    """
    found = _measured.get(group)
    if found is not None:
        return found
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    whole = dist.get_world_size(group) == dist.get_world_size()
    local = os.environ.get("LOCAL_WORLD_SIZE", "") if whole else ""
    return default(device.type, name, ranks_per_node=int(local) if local.isdecimal() else 0)


def measure(group: Group = None, device: torch.device | str | None = None) -> Machine:
    """Measure the numbers by which ``schedule="auto"`` chooses, and use them for later calls with this group.

    Every rank of the group has to call ``measure``, which takes about a second. It measures the memory bandwidth
    (``torch.add``), the latency and the bandwidth of an all-gather, and the cost of a piece of "pass". The cost of a hop cannot
    be told apart from the fixed cost of a message, and keeps its default. The cost of a piece is the difference between real
    calls with few and with many pieces. It is the time of GPU streams or the CPU's time, whichever is longer. The other
    numbers are times of GPU streams alone.

    Args:
        group: a ProcessGroup, a DeviceMesh of one dimension, or None for the default group.
        device: this rank's device, of the same type on every rank: the CPU or a GPU, as a torch.device or as a string. Unless
            given: the CPU if the group's backend is gloo or there is no GPU, else the current GPU.

    Returns:
        The measured machine, which is the same on every rank.

    Raises:
        TypeError, ValueError: the device is none of those that are accepted, or its type differs between ranks.
        RuntimeError: there is no process group, torch knows no such device, or another rank refused its device.
    """
    members = resolve(group)
    device, ranks_per_node = _agreed(members, device)
    watch, ranks = Stopwatch(members.group, device), members.size
    start = default(device.type, ranks_per_node=ranks_per_node)
    streamed, gathered = _SIZES[device.type]
    memory, launch = _memory(watch, streamed)
    found = replace(
        start,
        name=f"{ranks} ranks on {_named(device)}",
        memory=memory,
        launch=launch,
        source="measured by scan_registry.distributed.measure; hops as in the defaults",
    )
    if ranks > 1:
        found = _measure_messages(found, watch, gathered, members)
    _measured[members.group] = found
    session(members).agreed.clear()  # schedules that were chosen by other numbers
    return found


def _memory(watch: Stopwatch, count: int) -> tuple[float, float]:
    """Bytes per second of a large elementwise operation, and seconds of a small one."""
    a, b, out = (torch.rand(count, device=watch.device) for _ in range(3))
    few = torch.zeros(4, device=watch.device)
    large, small = watch.latencies([lambda: torch.add(a, b, out=out), lambda: few.add_(1)])
    return 3 * out.numel() * out.element_size() / large.least, small.least


def _measure_messages(
    machine: Machine, watch: Stopwatch, gathered: int, members: Members
) -> Machine:
    """The machine with the measured costs of an all-gather and of messages from rank to rank."""
    group, ranks = watch.group, members.size
    small, large = (torch.zeros(size, device=watch.device) for size in (4, gathered))
    few, many = (torch.empty(ranks * each.numel(), device=watch.device) for each in (small, large))
    least, most, once, often = watch.latencies(
        [
            lambda: all_gather(few, small, group=group),
            lambda: all_gather(many, large, group=group),
            _passing(members, watch.device, 1),
            _passing(members, watch.device, 1 + _PIECES),
        ]
    )
    size = large.numel() * large.element_size()
    link = (ranks - 1) * size / max(most.least - least.least, 1e-9)
    free = replace(machine, call=0.0, send=0.0, link=link, far_link=link)
    on_stream = max(machine.launch, (often.least - once.least) / _PIECES)
    hops = (once.least - ranks * on_stream - free.passing(ranks, 16)) / (ranks - 1)
    return replace(
        free,
        call=max(0.0, least.least - free.all_gather(ranks, 16)),
        send=max(0.0, hops),
        piece=max(on_stream, (often.host - once.host) / _PIECES),
    )


def _passing(members: Members, device: torch.device, pieces: int) -> Call:
    """The forward pass of "pass", after its opening, with next to no bytes in so many pieces."""
    # They import this module.
    from scan_registry.distributed.opening import Opened
    from scan_registry.distributed.run import Run

    channels = line_of(torch.float32.itemsize) * (1 + _PIECES)
    gates, tokens = (torch.zeros(1, channels, device=device) for _ in range(2))
    run = Run(
        *(
            members,
            Terms("measure", ()),
            Options(dim=-2),
            tuple(tokens.shape),
            tokens.dtype,
            device,
        ),
        *(parts.whole(members.rank, members.size), pieces),
    )

    def call() -> None:
        with torch.no_grad():
            run.forward(gates, tokens, None, Opened(None), False)

    return call


def _agreed(members: Members, device: Any) -> tuple[torch.device, int]:
    """This rank's device, and the number of ranks on a host."""
    try:
        found = _device(members.group, device)
    except Exception as error:
        agree(members, error)
        raise
    host = blake2b(socket.gethostname().encode(), digest_size=7).digest()
    local = (int.from_bytes(host, "little"),)
    terms = Terms("distributed.measure", (("device", found.type),), local)
    hosts: Any = agree(members, terms, found)
    return found, -(-len(hosts) // len({*hosts}))


def _device(group: dist.ProcessGroup, device: Any) -> torch.device:
    if device is None:
        if dist.get_backend(group) == "gloo" or not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())
    if not isinstance(device, (torch.device, str)):
        raise TypeError(f"device is {device!r}; it must be a torch.device, a string or None")
    found = torch.device(device)
    if found.type not in _SIZES:
        raise ValueError(f"device is {str(device)!r}; accepted are cpu and cuda")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {str(device)!r}, and torch finds no GPU; accepted is cpu")
    return found


def _named(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
