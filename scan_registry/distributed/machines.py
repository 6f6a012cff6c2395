"""The numbers of a machine that the cost model needs: memory bandwidth, and the costs of messages and launches.

The defaults are in ``MACHINES``. ``scan_registry.distributed.measure`` measures a group, with the same result on every rank.
If ranks have different machines, the first rank's choice of a schedule counts. The module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Machine:
    """The machine that a group runs on. Times are in seconds, and rates in bytes per second.

    name            description in words
    memory          memory bandwidth of one rank: reads and writes of a large elementwise operation
    call            fixed time of an all-gather besides its hops: its kernel's start, and the synchronization of streams
    send            fixed time of a message to the next rank
    piece           fixed time of a piece of "pass" on a rank, without its bytes: launches, a receive and a send, on the GPU or
                    on the CPU, whichever takes longer
    launch          time of a kernel that moves next to no bytes
    hop             latency of a message to the next rank of the same node
    link            bandwidth between two ranks of the same node, in one direction
    far_hop         latency of a message to a rank of another node
    far_link        bandwidth between two ranks of different nodes, in one direction
    ranks_per_node  how many ranks share a node; ranks are numbered node by node
    source          where the numbers are from
    """

    name: str
    memory: float
    call: float
    send: float
    piece: float
    launch: float
    hop: float
    link: float
    far_hop: float
    far_link: float
    ranks_per_node: int
    source: str

    def __post_init__(self) -> None:
        for name in ("call", "send", "piece", "launch", "hop", "far_hop"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; a time is 0 or more")
        for name in ("memory", "link", "far_link", "ranks_per_node"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; accepted is more than 0")

    def __str__(self) -> str:
        """The name and all numbers."""
        numbers = [f"{value:.4g}" for value in vars(self).values() if not isinstance(value, str)]
        return f"{self.name} ({' '.join(numbers)})"

    def nodes(self, ranks: int) -> int:
        """The number of nodes that ``ranks`` ranks occupy."""
        return -(-ranks // self.ranks_per_node)

    def all_gather(self, ranks: int, size: float) -> float:
        """Seconds of an all-gather in which each rank gives ``size`` bytes.

        The all-gather is a ring, as in NCCL's own model (src/graph/tuning.cc, ``ncclTopoTuneModel``). It has ranks − 1
        steps, of which nodes − 1 cross nodes. In each step the bytes of one rank go over the slowest link.
        """
        if ranks < 2:
            return 0.0
        far = self.nodes(ranks) - 1
        hops = far * self.far_hop + (ranks - 1 - far) * self.hop
        return self.call + hops + (ranks - 1) * size / (self.far_link if far else self.link)

    def passing(self, ranks: int, size: float) -> float:
        """Seconds that a message of ``size`` bytes takes from the first rank through all others to the last. Each rank
        sends it to the next rank by a call of its own."""
        if ranks < 2:
            return 0.0
        far = self.nodes(ranks) - 1
        near = ranks - 1 - far
        hops = far * (self.far_hop + size / self.far_link) + near * (self.hop + size / self.link)
        return (ranks - 1) * self.send + hops


_NCCL = "hops: NCCL's src/graph/tuning.cc, ring, LL128"
_CALL = (
    "call: 11 µs of an all-gather measured on two H100s, less its hop; send, piece and launch: measured there by "
    "scan_registry.distributed.measure, in round numbers (tools/results/h100x2-distributed.json)"
)
_H100 = "memory: torch.add on an H100, measured (tools/results/h100-bench.json)"
_FAR = {"far_hop": 4.0e-6, "far_link": 50e9}
_FAR_SOURCE = "between nodes: 400 Gb/s for each rank"

#: Machines whose numbers are known, by name. Each ``source`` says which of them are measured.
MACHINES: Mapping[str, Machine] = {
    "nvlink": Machine(
        name="H100s on NVLink",
        memory=3.04e12, call=9e-6, send=7e-6, piece=110e-6, launch=5e-6,
        hop=1.9e-6, link=450e9, **_FAR, ranks_per_node=8,
        source=f"{_H100}; {_CALL}; {_NCCL}; link: NVLink 4's data sheet; {_FAR_SOURCE}",
    ),
    "pcie": Machine(
        name="GPUs on PCIe",
        memory=1.6e12, call=9e-6, send=7e-6, piece=110e-6, launch=5e-6,
        hop=2.5e-6, link=25e9, **_FAR, ranks_per_node=8,
        source=f"memory: of a GPU with 2 TB/s, assumed; {_CALL}; {_NCCL}; link: PCIe 4.0 × 16, less its "
        f"protocol; {_FAR_SOURCE}",
    ),
    "nodes": Machine(
        name="one H100 a node",
        memory=3.04e12, call=9e-6, send=7e-6, piece=110e-6, launch=5e-6,
        hop=4.0e-6, link=50e9, **_FAR, ranks_per_node=1,
        source=f"{_H100}; {_CALL}; {_NCCL}; {_FAR_SOURCE}",
    ),
    "cpu": Machine(
        name="processes of one machine, gloo",
        memory=1e10, call=100e-6, send=50e-6, piece=120e-6, launch=5e-6,
        hop=50e-6, link=1.5e9, far_hop=100e-6, far_link=1e9, ranks_per_node=1 << 20,
        source="measured with two processes on two cores of an x86-64 machine, torch 2.13, in round numbers; between "
        "nodes: assumed",
    ),
}  # fmt: skip


def default(device: str, name: str = "", *, ranks_per_node: int = 0) -> Machine:
    """The machine to assume where nothing was measured.

    device          "cuda" or "cpu"
    name            name of the GPU, such as "NVIDIA H100 PCIe"; a GPU with PCIe in its name is taken to have no NVLink
    ranks_per_node  how many of the group's ranks share a node; 0 if unknown, for the machine's own number
    """
    if device != "cuda":
        found = MACHINES["cpu"]
    elif ranks_per_node == 1:
        found = MACHINES["nodes"]
    else:
        found = MACHINES["pcie" if "pcie" in name.lower() else "nvlink"]
    if ranks_per_node in (0, found.ranks_per_node):
        return found
    return replace(found, ranks_per_node=ranks_per_node)
