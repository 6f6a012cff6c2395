"""What the cost model of `scan_registry.distributed` says of 2 to 1024 ranks: a table. Nothing is measured, and no GPU used.

    python tools/distributed_model.py                                    the sequence of the documentation
    python tools/distributed_model.py --channels 1024 --time 1048576 --machine pcie
    python tools/distributed_model.py --each --time 65536                as many steps on each rank

The documentation's table and picture are made of the same rows (tools/docs_distributed.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from scan_registry.distributed.cost import (
    Direction,
    Work,
    best_pieces,
    choose,
    even,
    linear_scan_work,
)
from scan_registry.distributed.machines import MACHINES, Machine

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
RANKS = tuple(2**n for n in range(1, 11))
ITEM_SIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class LongSequence:
    """One sequence, channels contiguous; ``each``: of as many steps on every rank, in place of all of them together."""

    channels: int
    time: int
    dtype: str = "bfloat16"
    each: bool = False

    def steps(self, ranks: int) -> tuple[int, ...]:
        """Of each rank."""
        return (self.time,) * ranks if self.each else even(self.time, ranks)

    def bytes(self, ranks: int) -> int:
        """Of one tensor, on all ranks."""
        return sum(self.steps(ranks)) * self.channels * ITEM_SIZE[self.dtype]


def work_of(sequence: LongSequence, ranks: int, direction: Direction, machine: Machine) -> Work:
    """What the ranks have to do in one pass."""
    return linear_scan_work(
        sequence.steps(ranks),
        sequence.channels,
        ITEM_SIZE[sequence.dtype],
        direction=direction,
        chained=machine.name != MACHINES["cpu"].name,
    )


def rows(
    sequence: LongSequence, machine: Machine, ranks: Sequence[int] = RANKS
) -> list[dict[str, Any]]:
    """For each number of ranks and each pass what both schedules take, in ms."""
    found = []
    for number in ranks:
        for direction in DIRECTIONS:
            work = work_of(sequence, number, direction, machine)
            each = choose(work, machine)
            found.append(
                {
                    "ranks": number,
                    "steps": sequence.steps(number)[0],
                    "direction": direction,
                    "reduce_ms": 1e3 * each.reduce_seconds,
                    "pass_ms": 1e3 * each.pass_seconds,
                    "pieces": best_pieces(work, machine),
                    "auto": each.schedule,
                    "one_rank_ms": 1e3 * each.alone_seconds,
                    "speedup": each.alone_seconds / each.seconds,
                }
            )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--channels", type=int, default=2048, help="batch × channels")
    parser.add_argument("--time", type=int, default=1 << 22, help="steps of the whole sequence")
    parser.add_argument("--each", action="store_true", help="--time is that of each rank")
    parser.add_argument("--dtype", choices=ITEM_SIZE, default="bfloat16")
    parser.add_argument("--machine", choices=MACHINES, default="nvlink")
    parser.add_argument("--ranks-per-node", type=int, help="default: the machine's")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    machine = MACHINES[args.machine]
    if args.ranks_per_node:
        machine = replace(machine, ranks_per_node=args.ranks_per_node)
    found = rows(LongSequence(args.channels, args.time, args.dtype, args.each), machine)
    if args.json:
        print(json.dumps({"machine": vars(machine), "rows": found}, indent=2))
        return 0
    print(f"modelled, not measured: {machine.name}; {machine.source}\n")
    print(
        f"{'ranks':>6}{'steps':>10}  {'pass':9}{'reduce ms':>10}{'pass ms':>10}{'pieces':>8}  auto    speed-up"
    )
    for each in found:
        print(
            f"{each['ranks']:6}{each['steps']:10}  {each['direction']:9}{each['reduce_ms']:10.3f}"
            f"{each['pass_ms']:10.3f}{each['pieces']:8}  {each['auto']:8}{each['speedup']:8.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
