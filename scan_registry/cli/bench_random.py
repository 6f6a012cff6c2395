"""``scan-registry bench --random``: how close to the roofline the kernels are on shapes that nobody has chosen."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from scan_registry.cli.errors import UsageError
from scan_registry.cli.tables import new_table, screen
from scan_registry.cli.tables import show as show_in_columns

if TYPE_CHECKING:
    from scan_registry.bench.measure import Bench
    from scan_registry.ops.benchmark import Benchmark

DESCRIPTION = (
    " --random draws cases, in which neither the sizes nor the options are anybody's choice, and sums up what share "
    "of the roofline they reach."
)
_MOST = 100_000  # cases, which take days
_SEEDS = 1 << 31


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "--random",
        type=int,
        metavar="N",
        help="time so many random cases, with few rounds each: 1 to 100,000 rows, 1 to 2**20 steps, 1 MB to 4 GB of "
        "traffic, each log-uniform; half of the lengths are odd",
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="S",
        help="what the cases depend on; default: another one each time, which is told",
    )


def draw(benchmark: Benchmark, args: argparse.Namespace) -> list[Any]:
    """The cases that ``--random`` asks for, from the seed that is in the arguments then; none without it."""
    if args.random is None:
        if getattr(args, "seed", None) is not None:
            raise UsageError("--seed is for random cases; accepted with --random N")
        return []
    if not 1 <= args.random <= _MOST:
        raise UsageError(f"--random is {args.random}; accepted are numbers from 1 to {_MOST}")
    if other := next(
        (f"--{name}" for name in ("targets", "uses", "case") if getattr(args, name)), None
    ):
        raise UsageError(f"--random draws the cases; accepted without {other}")
    if args.seed is None:
        import secrets  # --help needs none of it

        args.seed = secrets.randbelow(_SEEDS)
    elif args.seed < 0:
        raise UsageError(f"--seed is {args.seed}; accepted are whole numbers from 0 on")
    return benchmark.draw(args.random, args.seed)


def document(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """What the JSON document says of random cases; nothing without them."""
    from scan_registry.bench.shares import shares

    if args.random is None:
        return {}
    passes = [share.to_json() for share in shares(bench.timings)]
    return {"random": {"number": args.random, "seed": args.seed, "passes": passes}}


def show(bench: Bench, args: argparse.Namespace) -> None:
    """Print the means, the worst cases as ``--case`` takes them, and the means of each kind of case."""
    from scan_registry.bench.shares import by_kind, shares

    if args.random is None:
        return
    console = screen()
    for share in shares(bench.timings):
        table = new_table("of roofline>", "ms>", "roofline>", "--case!")
        for reached in share.worst:
            timing = reached.timing
            table.add_row(
                f"{reached.ratio:.3f}",
                f"{timing.ms:.4f}",
                f"{timing.roofline_ms:.4f}",
                str(timing.case),
            )
        title = f"{share.direction}: the worst of {len(share.shares)} cases"
        show_in_columns(console, table, title)
        console.print(
            f"{share.direction}, of the roofline: geometric mean {share.geometric_mean:.3f}, 10th percentile "
            f"{share.tenth_percentile:.3f}, worst {share.worst[0].ratio:.3f}",
            markup=False,
        )
    kinds = by_kind(bench.timings, bench.benchmark.kind)
    if kinds:
        table = new_table("kind", "cases>", *(f"{direction}>" for direction in bench.passes))
        for kind in kinds:
            means = (f"{kind.means[way]:.2f}" if way in kind.means else "" for way in bench.passes)
            table.add_row(kind.kind, str(kind.cases), *means)
        show_in_columns(console, table, "of the roofline, by kind: geometric means")
    console.print(f"--random {args.random} --seed {args.seed}", markup=False)
