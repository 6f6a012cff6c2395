"""How the fused kernels may be tiled: variables, their domains, and what constrains them.

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

A problem gives ``dim``, ``gates`` (that R feeds), ``item`` (bytes of an element) and ``backward`` (0, 1);
a GPU ``sm_count``, ``shared_memory`` (bytes per block), ``threads`` and ``registers`` (per block),
and ``capability`` (90 for 9.0).
The same constraints enumerate the tilings of a kind (``enumerate_tilings``; a solver can do that, too,
see ``solve.py``) and tell at run time what a tiling is not for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

from scan_registry.kernels.rnn.constraints import (
    Constraint,
    Expression,
    Name,
    Values,
    ceil_div,
    expression,
)

Tiling: TypeAlias = Mapping[str, int]

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

rows, split, batches, chunks, layers, cluster = map(Name, DOMAINS)
dim, gates, item, backward = map(Name, ("dim", "gates", "item", "backward"))
sm_count, shared_memory = Name("sm_count"), Name("shared_memory")
most_threads, registers = Name("threads"), Name("registers")
capability = Name("capability")

#: Whether (0, 1) blocks are in clusters; whether these are of more than one; whether a block works on one
#: sequence; else, whether a warp has whole rows of R, and whether it has parts.
clustered: Expression = ceil_div(cluster, 16)
several: Expression = ceil_div(cluster - 1, 16)
single: Expression = ceil_div(expression(1) - batches, 2)
whole: Expression = clustered * (expression(1) - backward) * (expression(1) - single)
parts: Expression = (expression(1) - whole) * (expression(1) - single)

threads: Expression = 16 * rows * split * (expression(2) - single)
units: Expression = 16 * rows
#: Batches of a group, and its blocks.
tile: Expression = 8 * batches + single
members: Expression = (expression(1) - clustered) * ceil_div(dim, units) + cluster
#: Values of a row that one word of each lane covers: a chunk.
chunk: Expression = ceil_div(64, item)
#: Previous units that R's rows have room for.
row_units: Expression = (chunks + layers) * (
    (whole + parts) * chunk * (split - whole) + 16 * single
)
#: A lane's part of R: two words of 16 bytes for each gate, or two gates, and chunk; or its share of 16 values.
lane_values: Expression = 8 * chunks * (
    parts * gates + whole * ceil_div(gates, 2)
) + single * ceil_div(16 * chunks * gates, split)
#: What else a thread holds: sums, a window of words on their way, and the states and inputs of its slot or unit.
others: Expression = (whole + parts) * (72 + 24 * batches + 6 * item) + 60 * single
#: Of shared memory: R's layers; the sums that the warps of a row exchange, in two rounds; and the values
#: of a block that is alone, or of a cluster, in two rounds.
layer_bytes: Expression = gates * layers * ((whole + parts) * 32 * threads + single * 64 * units)
forward_gates: Expression = gates - backward * (gates - 1)
local_gates: Expression = 1 + backward * (gates - 1)
sums_bytes: Expression = 2 * 256 * split * rows * batches * 2 * forward_gates
local_bytes: Expression = 2 * tile * (128 * ceil_div(units * local_gates * item, 128) + 64)
rounds_bytes: Expression = 2 * tile * (128 * ceil_div(chunks, 2) + 64) + 16
vectors_bytes: Expression = 8 * local_gates * row_units
static_bytes: Expression = (
    parts * (sums_bytes + local_bytes) + whole * rounds_bytes + single * vectors_bytes
)
shared_bytes: Expression = layer_bytes + static_bytes

#: What a tiling has to meet, whatever the problem's sizes.
TILES = (
    Constraint("rows with tensor cores", (whole + parts) * rows, "<=", 4),
    Constraint("lanes of a unit where a block has one sequence", single * split, "<=", 4),
    Constraint(
        "bytes of an element where a block has one sequence", single * item, "==", 4 * single
    ),
    Constraint("blocks of a head where a block has one sequence", single * cluster, "==", single),
    Constraint("threads of a block", threads, "<=", most_threads),
    Constraint("threads that are to have work", 128, "<=", threads),
    Constraint("registers per thread", lane_values + others, "<=", 255),
    Constraint("registers of a block", (lane_values + others) * threads, "<=", registers),
    Constraint("bytes of shared memory", shared_bytes, "<=", shared_memory),
    Constraint("bytes of shared memory beside R's", static_bytes, "<=", 48 * 1024),
    Constraint("chunks in shared memory beside those in registers", layers, "<=", 2 * chunks),
    Constraint("warps that share 16 units where rows are whole", whole * split, "==", 2 * whole),
    Constraint("tiles of 8 batches where rows are whole", whole * batches, "==", whole),
    Constraint("chunks in shared memory where rows are whole", whole * layers, "<=", 0),
    Constraint("bytes of an element that blocks of a cluster exchange", several * item, "<=", 2),
    Constraint("backward passes in clusters of several blocks", several * backward, "<=", 0),
    Constraint("compute capability that clusters need", 90 * several, "<=", capability),
    Constraint(
        "values of a row, beside the units of a block that has one sequence",
        single * row_units,
        "<=",
        single * units,
    ),
)
#: What a problem has to meet, too.
PROBLEM = (
    Constraint("16 hidden units go together", 16, "divides", dim),
    Constraint("hidden units that R's rows have room for", dim, "<=", row_units),
    Constraint("hidden units of a cluster", clustered * dim, "<=", cluster * units),
)
#: What a problem and a GPU have to meet together: blocks wait for one another, so all have to run.
RESIDENT = (Constraint("blocks of a group at once", members, "<=", sm_count),)

#: A GPU with the least of everything among those of compute capability 8.0 and later.
LEAST = {"threads": 1024, "registers": 65_536, "shared_memory": 99 * 1024, "capability": 80}
#: What those of 9.0 have more of.
HOPPER = {"shared_memory": 227 * 1024, "capability": 90}


def windows(values: Values) -> int:
    """How many times in a step a warp waits for words: as many are under way at a time as ``block.cuh`` has
    registers for. ``values`` has the tiling, the kind and ``dim``."""
    if not values["batches"]:
        return 1
    factor = values["gates"] if values["backward"] else 1
    split_in_parts = 4 if values["gates"] > factor else 6
    most = split_in_parts if values["item"] == 4 else 8 if values["rows"] > 1 else 12
    window = min(most // values["batches"], factor * (values["chunks"] + values["layers"]))
    chunks_of_row = ceil_div(factor * dim, chunk * split).value(values)
    return -(-chunks_of_row // window)


def blocks_per_sm(values: Values) -> int:
    """An estimate of how many blocks that wait for nobody run at a time on an SM, by registers and shared memory."""
    by_registers = LEAST["registers"] // ((lane_values + others) * threads).value(values)
    return max(1, min(by_registers, LEAST["shared_memory"] // shared_bytes.value(values)))


def most_units(values: Values) -> int:
    """The largest ``dim`` for a tiling on a GPU; ``values`` has the tiling, ``item``, ``backward`` and
    ``sm_count``."""
    blocks = (expression(1) - clustered) * sm_count + cluster
    return min(row_units.value(values), (units * blocks).value(values)) // 16 * 16


def enumerate_tilings(fixed: Values) -> Iterator[Tiling]:
    """Every tiling that no constraint excludes whose names all have values."""
    tilings, known, left = [dict(fixed)], set(fixed), [*TILES, *PROBLEM, *RESIDENT]
    for name, values in DOMAINS.items():
        known.add(name)
        # Each is asked as soon as it can be, so that most combinations are never made.
        ready = [one for one in left if one.names <= known]
        left = [one for one in left if not one.names <= known]
        longer = ({**tiling, name: value} for tiling in tilings for value in values)
        tilings = [tiling for tiling in longer if not any(one.broken(tiling) for one in ready)]
    for tiling in tilings:
        yield {name: tiling[name] for name in DOMAINS}
