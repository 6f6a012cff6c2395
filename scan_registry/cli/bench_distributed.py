"""``scan-registry bench distributed``: one sequence on all ranks of a group.

Every rank runs the command, and the first one prints.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from scan_registry.cli.errors import UsageError
from scan_registry.cli.tables import new_table, screen, show

if TYPE_CHECKING:
    from scan_registry.bench.distributed import Case, GroupBench, Timing

NAME = "distributed"
#: Long enough on a GPU that bytes count, and one that is all latency.
CASES = {
    "cuda": (
        "channel_last:1,2048,262144:bfloat16",
        "channel_last:1,2048,65536:bfloat16",
        "channel_last:1,2048,4096:bfloat16",
    ),
    "cpu": ("channel_last:1,256,8192:float32", "channel_last:1,64,512:float32"),
}


DESCRIPTION = (
    "Times a linear scan of `scan_registry.distributed` on the ranks that torchrun has started, NCCL on GPUs "
    "and gloo on the CPU, forward and backward. Beside it stand a copy of one rank's part, an all-gather of two float32 "
    "rows a channel, and one rank with the whole sequence. A time is that of one call, from when all ranks are ready "
    "until the last is done. Without torchrun there is one rank. Example: `torchrun --nproc-per-node 2 -m scan_registry "
    "bench distributed`."
)
EPILOG = (
    "Exit status: 0; 2 for arguments that cannot be meant. The first rank prints. The JSON document is described "
    "by scan_registry/schemas/bench-distributed.json."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--device", help="cpu or cuda; default: cuda with a GPU for each rank, else cpu"
    )
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="X",
        help="layout:batch,channels,time:dtype of the whole sequence, such as "
        "channel_last:1,2048,65536:bfloat16; may repeat",
    )
    parser.add_argument(
        "--fwd_only", "--fwd-only", action="store_true", help="time the forward pass alone"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON document instead")


def run(args: argparse.Namespace) -> int:
    """Time what is asked for; ``UsageError`` for arguments that cannot be meant."""
    import torch.distributed

    if not torch.distributed.is_available():
        raise UsageError("this torch is built without torch.distributed")
    from scan_registry.bench.distributed import PASSES, GroupBench, group_on

    kind = _kind(args.device)
    cases = [_case(text) for text in args.case or CASES[kind]]
    with group_on(kind) as (group, device):
        bench = GroupBench(group, device, PASSES[: 1 if args.fwd_only else None])
        for case in cases:
            try:
                bench.check_room(case)
            except ValueError as error:
                raise UsageError(f"--case: {error}") from error
        for case in cases:
            bench.run(case)
        if bench.rank == 0:
            print(json.dumps(bench.document(), indent=2)) if args.json else show_table(bench)
    return 0


def show_table(bench: GroupBench) -> None:
    """Print what has been timed."""
    console = screen()
    table = new_table(
        *("layout", "B, C, T~", "dtype", "pass", "what", "ms>", "± ms>?"),
        *("host ms>?", "of one rank>!"),
    )
    for timing in bench.timings:
        table.add_row(*timing.cells, f"{timing.host_ms:.4f}", _share(timing, bench.timings))
    show(console, table, bench.name)
    for what, reason in bench.skipped.items():
        console.print(f"not timed: {what}: {reason}", markup=False)


def _share(timing: Timing, timings: Sequence[Timing]) -> str:
    """Of the time that one rank takes with the whole sequence."""
    for other in timings:
        if (other.case, other.direction, other.who) == (timing.case, timing.direction, "one rank"):
            return f"{timing.ms / other.ms:.3f}"
    return ""


def _kind(name: str | None) -> str:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    enough = 0 < local <= count
    if name is None:
        name = "cuda" if enough else "cpu"
    if name not in ("cpu", "cuda"):
        raise UsageError(f"--device is {name!r}; accepted are cpu and cuda")
    if name == "cuda" and not enough:
        raise UsageError(
            f"--device is 'cuda', and {local} ranks need as many GPUs; here are {count}"
        )
    return name


def _case(text: str) -> Case:
    from scan_registry.bench.distributed import Case

    try:
        case = Case.parse(text)
    except ValueError as error:
        raise UsageError(f"--case: {error}") from error
    if case.options:
        raise UsageError(f"--case: {text!r} has options; this command takes none")
    return case
