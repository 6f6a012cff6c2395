"""How the fused kernels may be tiled: variables, their domains, and what a tiling has to meet.

A tiling is a value for each variable; ``block.cuh`` has the picture.

    rows     times 16 hidden units of a block
    split    warps that share a row of R
    batches  times 8 batches that a block works on. 0: a block computes one sequence of one head, without
             tensor cores, see ``matrix_vector.cuh``; then ``split`` lanes share a row, and a chunk is 16
             values of it
    chunks   of a row of R that a warp keeps in registers (backward: times the gates that R feeds)
    layers   of them that it keeps in shared memory, likewise
    cluster  0: blocks tell each other through memory; else so many, which reach each other's shared
             memory, have a whole head. Forwards, ``split`` warps then share 16 units, and not a row of
             R, see ``clustered.cuh``

The same numbers tell which tilings of a kind there are (``Tiling.fits``), and at run time what a tiling is not for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from scan_registry.base.frozen import dataclass

#: Publications that the blocks of a group have room for, as in ``hidden_state_exchange.cuh``.
RING = 16

#: What each variable may be.
DOMAINS: Mapping[str, tuple[int, ...]] = {
    "rows": (1, 2, 4, 8),
    "split": (1, 2, 4, 8, 16),
    "batches": (0, 1, 2),
    "chunks": (1, 2, 3, 4, 5, 6, 8, 12, 16),
    "layers": (0, 1, 2, 3, 4, 8),
    "cluster": (0, 1, 8),
}


@dataclass(frozen=True)
class Limits:
    """What a GPU has: threads and registers of a block, bytes of shared memory of one, and the compute capability, 90 for 9.0.
    By default the least among those of 8.0 and later."""

    threads: int = 1024
    registers: int = 65_536
    shared_memory: int = 99 * 1024
    capability: int = 80


LEAST = Limits()
#: What those of 9.0 have.
HOPPER = Limits(shared_memory=227 * 1024, capability=90)


@dataclass(frozen=True)
class Tiling:
    """A tiling for a kind: for so many ``gates`` that R feeds, elements of ``item`` bytes, and a direction."""

    gates: int
    item: int
    backward: bool
    rows: int
    split: int
    batches: int
    chunks: int
    layers: int
    cluster: int

    @property
    def single(self) -> bool:
        """Whether a block works on one sequence."""
        return not self.batches

    @property
    def whole(self) -> bool:
        """Whether a warp has whole rows of R; else, of more sequences than one, parts of them."""
        return self.cluster > 0 and not self.backward and not self.single

    @property
    def threads(self) -> int:
        return 16 * self.rows * self.split * (1 if self.single else 2)

    @property
    def units(self) -> int:
        return 16 * self.rows

    @property
    def tile(self) -> int:
        """Batches of a group."""
        return 8 * self.batches or 1

    def members(self, dim: int) -> int:
        """Blocks of a group."""
        return self.cluster or -(-dim // self.units)

    @property
    def row_units(self) -> int:
        """Previous units that R's rows have room for. One word of each lane covers a chunk of a row."""
        chunk = 16 if self.single else 64 // self.item * (self.split - self.whole)
        return (self.chunks + self.layers) * chunk

    @property
    def registers(self) -> int:
        """Of a thread. Its part of R is two words of 16 bytes for each gate, or two gates, and chunk, or its share of 16 values.
        Others are sums, a window of words on their way, and the states and inputs of its slot or unit."""
        if self.single:
            return -(-16 * self.chunks * self.gates // self.split) + 60
        words = -(-self.gates // 2) if self.whole else self.gates
        return 8 * self.chunks * words + 72 + 24 * self.batches + 6 * self.item

    @property
    def layer_bytes(self) -> int:
        """Of shared memory, for R's layers."""
        return self.gates * self.layers * (64 * self.units if self.single else 32 * self.threads)

    @property
    def static_bytes(self) -> int:
        """Of shared memory, for the sums that the warps of a row exchange, in two rounds; and the values of a block that is alone, or
        of a cluster, in two rounds."""
        local_gates = self.gates if self.backward else 1
        if self.single:
            return 8 * local_gates * self.row_units
        if self.whole:
            return 2 * self.tile * (128 * -(-self.chunks // 2) + 64) + 16
        forward_gates = 1 if self.backward else self.gates
        sums = 2 * 256 * self.split * self.rows * self.batches * 2 * forward_gates
        return sums + 2 * self.tile * (128 * -(-self.units * local_gates * self.item // 128) + 64)

    @property
    def shared_bytes(self) -> int:
        return self.layer_bytes + self.static_bytes

    def fits(self, gpu: Limits) -> bool:
        """Whether there is such a tiling on a GPU, whatever a problem's sizes. Threads are to have work, and registers to hold as much
        of R as shared memory."""
        if not 128 <= self.threads <= gpu.threads or self.layers > 2 * self.chunks:
            return False
        if self.single:
            shape = self.split <= 4 and self.item == 4 and self.cluster == 1
            shape = shape and self.row_units <= self.units
        elif self.whole:
            shape = self.rows <= 4 and (self.split, self.batches, self.layers) == (2, 1, 0)
        else:
            shape = self.rows <= 4
        if self.cluster > 1:
            shape = shape and self.item <= 2 and not self.backward and gpu.capability >= 90
        return (
            shape
            and self.registers <= 255
            and self.registers * self.threads <= gpu.registers
            and self.static_bytes <= 48 * 1024
            and self.shared_bytes <= gpu.shared_memory
        )

    def exceeded(self, dim: int) -> str | None:
        """Why it is not for heads of ``dim`` units; None if it is."""
        if dim % 16:
            return f"16 hidden units go together: 16 does not divide {dim}"
        if dim > self.row_units:
            return f"hidden units that R's rows have room for: {dim} > {self.row_units}"
        if self.cluster and dim > self.cluster * self.units:
            return f"hidden units of a cluster: {dim} > {self.cluster * self.units}"
        return None

    def windows(self, dim: int) -> int:
        """How many times in a step a warp waits for words: as many are under way at a time as ``block.cuh`` has
        registers for."""
        if self.single:
            return 1
        factor = self.gates if self.backward else 1
        split_in_parts = 4 if self.gates > factor else 6
        most = split_in_parts if self.item == 4 else 8 if self.rows > 1 else 12
        window = min(most // self.batches, factor * (self.chunks + self.layers))
        chunks_of_row = -(-factor * dim // (64 // self.item * self.split))
        return -(-chunks_of_row // window)

    @property
    def blocks_per_sm(self) -> int:
        """An estimate of how many blocks that wait for nobody run at a time on an SM, by registers and shared memory."""
        by_registers = LEAST.registers // (self.registers * self.threads)
        return max(1, min(by_registers, LEAST.shared_memory // self.shared_bytes))


def enumerate_tilings(gates: int, item: int, backward: bool, gpu: Limits) -> Iterator[Tiling]:
    """Every tiling of a kind that a GPU has room for."""
    for values in product(*DOMAINS.values()):
        tiling = Tiling(gates, item, backward, *values)
        if tiling.fits(gpu):
            yield tiling
