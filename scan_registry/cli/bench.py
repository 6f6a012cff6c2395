"""``scan-registry bench``: how fast operators run here, beside installed baselines and the memory's speed."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scan_registry.cli import bench_distributed, bench_random
from scan_registry.cli.errors import INTERRUPTED, UsageError
from scan_registry.cli.parsing import Commands
from scan_registry.cli.tables import by_reason, new_table, screen, show
from scan_registry.dispatch.select import NoKernelError
from scan_registry.ops.benchmark import PerformanceTarget
from scan_registry.ops.operator import SHORT_DTYPES, Operator, operators

if TYPE_CHECKING:
    from rich.console import Console
    from torch import device as Device

    from scan_registry.bench.measure import Bench
    from scan_registry.bench.targets import Outcome
    from scan_registry.ops.benchmark import Case

_ROOFLINE = (
    "Inputs rotate over enough sets to be out of the caches. The roofline is the time in which a kernel that only "
    "streams reads and writes as many tensors of the same size, the fastest of several, interleaved in the same "
    "rounds; on the CPU that in which a large torch.add moves as many bytes. "
)
_LISTED = 10  # that were not timed for the same reason, each with a line of its own
_TARGETS = "--targets times the project's own cases, each with the least fraction of the roofline that it is to reach."
_USES = " --uses likewise times shapes that people use, and sums up each use."


DESCRIPTION = EPILOG = None  # each operator has its own


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments: of the first operator, and of each other one under its name."""
    first, *others = operators().values()
    _add_operator(parser, first)
    named = parser.add_subparsers(dest="timed", metavar="what", title="what to time instead")
    assert isinstance(named, Commands)
    named.own = first.name
    for operator in others:
        subject = operator.benchmark.subject
        _add_operator(named.add_parser(operator.name, help=f"time {subject} instead"), operator)
    bench_distributed.add_arguments(
        named.add_parser(
            bench_distributed.NAME,
            help="time one sequence over all ranks of a group instead",
            description=bench_distributed.DESCRIPTION,
            epilog=bench_distributed.EPILOG,
        )
    )


def _add_operator(parser: argparse.ArgumentParser, operator: Operator) -> None:
    benchmark = operator.benchmark
    targets, usual = benchmark.targets, benchmark.backends[0]
    missed = "1 where a target was not met; " if targets else ""
    parser.description = (
        benchmark.description
        + (f" {_ROOFLINE}" if benchmark.streams else "")
        + (_TARGETS if targets else "")
        + (_USES if benchmark.uses else "")
        + (bench_random.DESCRIPTION if benchmark.draws else "")
    )
    parser.epilog = (
        f"Exit status: 0; {missed}2 for arguments that cannot be meant, and where "
        f"nothing can be timed. The JSON document is described by scan_registry/kernels/{operator.name}/op/bench.json."
    )
    for option in benchmark.options:
        parser.add_argument(*option.names, **option.settings)
    parser.add_argument(
        "--backend",
        action="append",
        default=[],
        metavar="X",
        help=f"{' '.join(operator.backends)}; may repeat; default: {' and '.join(usual)}",
    )
    parser.add_argument("--device", help="cpu or cuda:N; default: the first GPU, else the CPU")
    parser.add_argument(
        "--fwd_only", "--fwd-only", action="store_true", help="time the forward pass alone"
    )
    parser.add_argument(
        "--no-baselines", "--no-peers", action="store_true", help="time this package alone"
    )
    parser.add_argument(
        *("--plot", "--plot_name", "--plot-name"),
        type=Path,
        metavar="FILE",
        help="draw the times into a .png, .svg or .pdf; .png is added to a bare name. Needs matplotlib",
    )
    parser.add_argument(
        "--case", action="append", default=[], metavar="X", help=benchmark.case_help
    )
    if targets:
        parser.add_argument(
            *("--targets", "--goals"),
            action="store_true",
            help="time the cases with targets, and say which are met",
        )
        if benchmark.uses:
            parser.add_argument(
                "--uses",
                action="store_true",
                help="time shapes that people use, and sum up each use",
            )
        parser.add_argument(
            "--only",
            action="append",
            default=[],
            metavar="TEXT",
            help="of those, the cases in whose --case form the text occurs; may repeat",
        )
    if benchmark.draws:
        bench_random.add_arguments(parser)
    parser.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="begin no case after so long; what is left out is listed",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON document instead")
    parser.set_defaults(operator=operator.name, targets=False, uses=False, random=None)


def run(args: argparse.Namespace) -> int:
    """Time what is asked for; ``UsageError`` for arguments that are not valid."""
    if args.timed == bench_distributed.NAME:
        return bench_distributed.run(args)
    operator = operators()[args.operator]
    plot = None if args.plot is None else _picture(args.plot)
    device = _device(args.device)
    _check_backends(operator, args.backend, device.type)
    _check_budget(args.budget)
    targets = _targets(operator, args, device)
    drawn = bench_random.draw(operator.benchmark, args)
    cases = [target.case for target in targets] or drawn or _cases(operator, args, device.type)
    bench = _bench(operator, args, device)
    if not targets and not drawn:
        _check_memory(bench, cases, args)
    interrupted = _time(bench, cases, args)
    _print_results(bench, targets, args)
    if plot is not None:
        _draw(bench, plot)
    return INTERRUPTED if interrupted else int(not _all_met(bench, targets))


def _check_budget(budget: float | None) -> None:
    """``UsageError`` for what is no time; infinity is one."""
    if budget is not None and not budget >= 0:
        raise UsageError(f"--budget is {budget}; accepted are seconds from 0 on")


def _check_memory(bench: Bench, cases: Sequence[Case], args: argparse.Namespace) -> None:
    """``UsageError`` for a case that the device has no memory for."""
    try:
        for case in cases:
            bench.check_room(case)
    except ValueError as error:
        raise UsageError(f"{_blamed(bench, args)}: {error}") from error


def _all_met(bench: Bench, targets: Sequence[PerformanceTarget]) -> bool:
    met = [outcome.met for outcome in _outcomes(bench, targets)]
    return all(met) and len(met) == len(targets) * len(bench.passes)


def _check_backends(operator: Operator, backends: Sequence[str], device: str) -> None:
    """``UsageError`` for a backend that the operator does not have, or if none of them is for the CPU."""
    for backend in backends:
        if backend not in operator.backends:
            raise UsageError(
                f"--backend is {backend!r}; accepted are {', '.join(operator.backends)}"
            )
    if device == "cpu" and backends and not {"auto", "reference"} & {*backends}:
        raise UsageError(
            f"--backend is {backends[0]!r}, which needs a GPU; accepted on the CPU are auto and "
            "reference"
        )


def _print_results(
    bench: Bench, targets: Sequence[PerformanceTarget], args: argparse.Namespace
) -> None:
    """Print the results."""
    if args.json:
        content = document(bench, targets)
        print(json.dumps(content | bench_random.document(bench, args), indent=2))
    elif targets:
        show_targets(bench, targets)
    else:
        show_table(bench)
        bench_random.show(bench, args)


def _time(bench: Bench, cases: Sequence[Case], args: argparse.Namespace) -> bool:
    """Time the cases, with a progress bar, until the budget or the user ends it, and say whether it was the
    user. Of those with targets and random ones, one that cannot be timed does not keep the others from it."""
    import torch

    # Imported by what prints: --help needs none of it.
    from rich.console import Console
    from rich.progress import track

    errors, quiet = Console(stderr=True), not sys.stderr.isatty()
    started = time.monotonic()
    done, interrupted, drawn = 0, False, args.random is not None
    passed_over: tuple[type[Exception], ...] = ()
    if args.targets or args.uses or drawn:
        passed_over = (torch.OutOfMemoryError, NoKernelError)
    if drawn:
        passed_over += (ValueError,)  # for which there is no room
    try:
        for case in track(cases, "timing", console=errors, transient=True, disable=quiet):
            if args.budget is not None and time.monotonic() - started > args.budget:
                break
            try:
                if drawn:
                    bench.make_room(case)
                bench.run(case)
            except passed_over as error:
                bench.skipped[str(case)] = str(error)
            done += 1
    except torch.OutOfMemoryError as error:
        text = f"{_blamed(bench, args)}: {bench.device} has not enough memory: {error}"
        raise UsageError(text) from error
    except RuntimeError as error:  # after an illegal access, say, nothing runs in this process
        if not drawn:
            raise
        print(f"{cases[done]}: the device failed; what was timed is kept", file=sys.stderr)
        bench.skipped[str(cases[done])] = str(error)
    except KeyboardInterrupt:
        interrupted = True
        print("interrupted: what was timed is kept", file=sys.stderr)
    for case in cases[done:]:
        bench.skipped.setdefault(str(case), "not begun in time")
    return interrupted


def _blamed(bench: Bench, args: argparse.Namespace) -> str:
    """The option that chose the cases."""
    return "--case" if args.case else bench.benchmark.sizes


def document(bench: Bench, targets: Sequence[PerformanceTarget]) -> dict[str, Any]:
    """The stable form, as the command's schema describes it: keys are only ever added."""
    outcomes = [outcome.to_json() for outcome in _outcomes(bench, targets)]
    return {**bench.document(), **({"targets": outcomes} if targets else {})}


def _bench(operator: Operator, args: argparse.Namespace, device: Device) -> Bench:
    """The object that times cases on the device, whose bandwidth it measures first. Unless backends are named,
    targets and random cases time what the operator itself chooses."""
    import torch

    from scan_registry.bench.measure import QUICK, Bench

    own = args.targets or args.uses or args.random is not None
    try:
        return Bench.on(
            operator.benchmark,
            device,
            args.backend or (("auto",) if own else None),
            baselines=not (args.no_baselines or own),
            passes=operator.benchmark.passes[: 1 if args.fwd_only else None],
            effort=QUICK if args.random is not None else None,
        )
    except torch.OutOfMemoryError as error:
        raise UsageError(f"{device} has no room to measure its bandwidth: {error}") from error


def _outcomes(bench: Bench, targets: Sequence[PerformanceTarget]) -> list[Outcome]:
    from scan_registry.bench.targets import outcomes

    return outcomes(targets, bench.timings)


def show_targets(bench: Bench, targets: Sequence[PerformanceTarget]) -> None:
    """Print each target with what came of it, and what was not timed."""
    console, outcomes = screen(), _outcomes(bench, targets)
    table = new_table(
        *bench.benchmark.columns,
        *("pass", "ms>", "± ms>?", "roofline>", "ratio>", "target>", ""),
    )
    for outcome in outcomes:
        timing = outcome.timing
        table.add_row(
            *(SHORT_DTYPES.get(cell, cell) for cell in timing.case.cells),
            timing.direction,
            f"{timing.ms:.4f}",
            f"{timing.spread:.4f}",
            f"{timing.roofline_ms:.4f}",
            f"{outcome.ratio:.3f}",
            f"{outcome.target.ratio:.2f}",
            "met" if outcome.met else "[red]missed[/]",
        )
    _show(console, table, bench)
    met = sum(outcome.met for outcome in outcomes)
    console.print(f"{met} of {len(targets) * len(bench.passes)} targets met, {len(outcomes)} timed")
    _show_uses(console, outcomes)
    _show_skipped(console, bench)


def _show_uses(console: Console, outcomes: Sequence[Outcome]) -> None:
    """Print what share of the roofline each use reaches, if the cases have any."""
    from scan_registry.bench.targets import uses

    table = new_table("use", "pass", "cases>", "geometric mean>", "least>")
    rows = uses(outcomes)
    for use in rows:
        table.add_row(
            use.name, use.direction, str(use.cases), f"{use.mean:.3f}", f"{use.least:.3f}"
        )
    if rows:
        show(console, table, "of the roofline, by use")


def _show(console: Console, table: Any, bench: Bench) -> None:
    show(console, table, "; ".join([bench.name, *bench.benchmark.title(bench)]))


def _show_skipped(console: Console, bench: Bench) -> None:
    for reason, names in by_reason(bench.skipped).items():
        shown = names if len(names) <= _LISTED else [f"{names[0]} and {len(names) - 1} others"]
        for who in shown:
            console.print(f"not everywhere timed: {who}: {reason}", markup=False)


def show_table(bench: Bench) -> None:
    """Print what has been timed, and what has not been and why."""
    console, benchmark = screen(), bench.benchmark
    measures = benchmark.measures(bench)
    table = new_table(*benchmark.columns, "pass", benchmark.by, "ms>", "± ms>?", *measures)
    for timing in bench.timings:
        table.add_row(*timing.cells, *benchmark.measured(timing, bench))
    _show(console, table, bench)
    _show_skipped(console, bench)


def _targets(
    operator: Operator, args: argparse.Namespace, device: Device
) -> list[PerformanceTarget]:
    """Those that are asked for; none without ``--targets`` and ``--uses``."""
    only = getattr(args, "only", None) or []
    chosen_by = "--uses" if args.uses else "--targets"
    if not (args.targets or args.uses):
        if only:
            raise UsageError("--only needs --targets, whose cases it chooses among")
        return []
    if args.targets and args.uses:
        raise UsageError("--targets and --uses are two lists of cases; accepted is one of them")
    if device.type == "cpu":
        raise UsageError(
            f"{chosen_by} are for GPUs; accepted with it is --device cuda:N, of one here"
        )
    benchmark = operator.benchmark
    every = benchmark.uses if args.uses else benchmark.targets
    chosen = [target for target in every if all(text in str(target.case) for text in only)]
    if not chosen:
        raise UsageError(
            f"--only {' '.join(only)!r} leaves no case; accepted are parts of cases such as "
            f"{every[0].case}"
        )
    return chosen


def _cases(operator: Operator, args: argparse.Namespace, kind: str) -> list[Case]:
    try:
        return list(dict.fromkeys(operator.benchmark.cases(args, kind)))
    except ValueError as error:
        raise UsageError(f"--case: {error}" if args.case else str(error)) from error


def _device(name: str | None) -> Device:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    accepted = ["cpu", *(f"cuda:{n}" for n in range(count))]
    if name is None:
        name = accepted[min(1, count)]
    elif name == "cuda" and count:
        name = "cuda:0"
    if name not in accepted:
        raise UsageError(f"--device is {name!r}; accepted here are {', '.join(accepted)}")
    return torch.device(name)


# --- The picture ------------------------------------------------------------------------------


def _picture(path: Path) -> Path:
    """Where it goes; ``UsageError``, before anything is timed, if it cannot be drawn there."""
    from scan_registry.bench.plot import FORMATS, PlotError, load

    if not path.name or path.is_dir():
        raise UsageError(f"--plot is {str(path)!r}, a folder; it takes a file")
    if not path.suffix:
        path = path.with_name(path.name + ".png")
    if path.suffix[1:] not in FORMATS:
        raise UsageError(f"--plot is {str(path)!r}; accepted are files in {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise UsageError(f"--plot is {str(path)!r}; its folder does not exist")
    try:
        load()
    except PlotError as error:
        raise UsageError(f"--plot: {error}") from error
    return path


def _draw(bench: Bench, path: Path) -> None:
    from scan_registry.bench.plot import draw

    try:
        draw(bench, path)
    except OSError as error:
        raise UsageError(f"--plot: {path} cannot be written: {error}") from error
    print(f"wrote {path}", file=sys.stderr)
