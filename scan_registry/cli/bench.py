"""``scan-registry bench``: how fast scans run here, beside installed baselines and the memory's speed."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import track

from scan_registry.cli import bench_rnn
from scan_registry.cli.errors import UsageError
from scan_registry.cli.explain import DTYPES
from scan_registry.cli.tables import SHORT_DTYPES, new_table, screen, show
from scan_registry.dispatch.select import BACKENDS, Backend, NoKernelError

if TYPE_CHECKING:
    from torch import device as Device

    from scan_registry.bench.cases import Case
    from scan_registry.bench.measure import Bench
    from scan_registry.bench.targets import Outcome, PerformanceTarget

LAYOUTS = ("channel_last", "time_last")
SEQLENS = {"cuda": "128,256,1024,2048,4096,8192,16384,32768", "cpu": "128,512,2048"}
_MOST_ELEMENTS = 2**60  # their bytes can still be counted


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command's arguments."""
    parser = commands.add_parser(
        "bench",
        description="Times the forward and the backward pass over a range of sequence lengths: on a GPU "
        "both languages of this package and the baselines that are installed (accelerated-scan, "
        "sequential_scan), as CUDA graphs of kernel launches; on the CPU the calls, beside torch.mul on "
        "tensors of the same size. Inputs rotate over enough sets to be out of the caches. The roofline is "
        "the time in which a kernel that only streams reads and writes as many tensors of the same size, "
        "the fastest of several, interleaved in the same rounds; on the CPU that in which a large torch.add "
        "moves as many bytes. --targets times the project's own cases, each with the least fraction of the "
        "roofline that it is to reach.",
        epilog="Exit status: 0; 1 where --targets was not met; 2 for arguments that cannot be meant, and "
        "where nothing can be timed. The JSON document is described by scan_registry/schemas/bench.json.",
    )
    parser.add_argument(
        "--d_model",
        "--d-model",
        type=int,
        default=1024,
        metavar="N",
        help="channels; default: 1024",
    )
    parser.add_argument("--bs", type=int, default=8, metavar="N", help="batch size; default: 8")
    parser.add_argument(
        "--seqlens",
        metavar="N,N,…",
        help=f"sequence lengths; default: {SEQLENS['cuda']}, on the CPU {SEQLENS['cpu']}",
    )
    parser.add_argument(
        "--layout",
        default=LAYOUTS[0],
        metavar="X",
        help="channel_last: (batch, time, channels), the default; time_last: (batch, channels, time)",
    )
    parser.add_argument(
        "--dtype", default="bfloat16", metavar="X", help=f"{' '.join(DTYPES)}; default: bfloat16"
    )
    parser.add_argument(
        "--backend", metavar="X", help=f"{' '.join(BACKENDS)}; default: cuda and triton"
    )
    parser.add_argument("--device", help="cpu or cuda:N; default: the first GPU, else the CPU")
    parser.add_argument(
        "--fwd_only", "--fwd-only", action="store_true", help="time the forward pass alone"
    )
    parser.add_argument(
        "--no-baselines", "--no-peers", action="store_true", help="time this package alone"
    )
    parser.add_argument(
        "--plot",
        "--plot_name",
        "--plot-name",
        type=Path,
        metavar="FILE",
        help="draw the times into a .png, .svg or .pdf; .png is added to a bare name. Needs matplotlib",
    )
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="X",
        help="layout:batch,channels,time:dtype, to which :sequences=N (packed along time) and "
        ":gates=channel may be added; in place of the sizes above; may repeat",
    )
    parser.add_argument(
        "--targets",
        "--goals",
        action="store_true",
        help="time the cases with targets, and say which are met",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="TEXT",
        help="of those, the cases in whose --case form the text occurs; may repeat",
    )
    parser.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="begin no case after so long; what is left out is listed",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON document instead")
    bench_rnn.add_parser(parser.add_subparsers(dest="networks", metavar="rnn"))


def run(args: argparse.Namespace) -> int:
    """Time what is asked for; ``UsageError`` for arguments that cannot be meant."""
    if args.networks is None:
        return _run_scans(args)
    plot = None if args.plot is None else _picture(args.plot)
    return bench_rnn.run(args, _device(args.device), plot)


def _run_scans(args: argparse.Namespace) -> int:
    for name, accepted in (("layout", LAYOUTS), ("dtype", DTYPES), ("backend", BACKENDS)):
        value = getattr(args, name)
        if value is not None and value not in accepted:
            raise UsageError(f"--{name} is {value!r}; accepted are {', '.join(accepted)}")
    for name in ("d_model", "bs"):
        if getattr(args, name) < 1:
            raise UsageError(
                f"--{name} is {getattr(args, name)}; accepted are whole numbers from 1 on"
            )
    plot = None if args.plot is None else _picture(args.plot)
    device = _device(args.device)
    if args.targets and device.type == "cpu":
        raise UsageError("--targets are for GPUs; accepted with it is --device cuda:N, of one here")
    targets = _targets(args) if args.targets else []
    cases = [target.case for target in targets] or _cases(args, device.type)
    if device.type == "cpu" and args.backend in ("cuda", "triton"):
        raise UsageError(
            f"--backend is {args.backend!r}, which needs a GPU; accepted on the CPU are auto and "
            "reference"
        )
    bench = _bench(args, device)
    try:
        for case in () if targets else cases:
            bench.check_room(case)
    except ValueError as error:
        raise UsageError(f"{'--case' if args.case else '--seqlens'}: {error}") from error
    _time(bench, cases, args)
    if args.json:
        print(json.dumps(document(bench, targets), indent=2))
    elif targets:
        show_targets(bench, targets)
    else:
        show_table(bench)
    if plot is not None:
        _draw(bench, args, plot)
    met = [outcome.met for outcome in _outcomes(bench, targets)]
    return 0 if all(met) and len(met) == len(targets) * len(bench.passes) else 1


def _time(bench: Bench, cases: Sequence[Case], args: argparse.Namespace) -> None:
    """Time the cases, with a progress bar, until the budget or the user ends it. Of those with targets,
    one that cannot be timed does not keep the others from it."""
    import torch

    errors, quiet = Console(stderr=True), not sys.stderr.isatty()
    started = time.monotonic()
    done = 0
    try:
        for case in track(cases, "timing", console=errors, transient=True, disable=quiet):
            if args.budget is not None and time.monotonic() - started > args.budget:
                break
            try:
                bench.run(case)
            except (torch.OutOfMemoryError, NoKernelError) as error:
                if not args.targets:
                    raise
                bench.skipped[str(case)] = str(error)
            done += 1
    except torch.OutOfMemoryError as error:
        option = "--case" if args.case else "--seqlens"
        raise UsageError(f"{option}: {bench.device} has not enough memory: {error}") from error
    except KeyboardInterrupt:
        print("interrupted: what was timed is kept", file=sys.stderr)
    for case in cases[done:]:
        bench.skipped.setdefault(str(case), "not begun in time")


def document(bench: Bench, targets: Sequence[PerformanceTarget]) -> dict[str, Any]:
    """The stable form, as ``schemas/bench.json`` describes it: keys are only ever added."""
    found = [outcome.to_json() for outcome in _outcomes(bench, targets)]
    return {**bench.document(), **({"targets": found} if targets else {})}


def _bench(args: argparse.Namespace, device: Device) -> Bench:
    """What times on the device, whose bandwidth it measures first."""
    import torch

    from scan_registry.bench.measure import Bench

    try:
        return Bench.on(
            device,
            _backends(args),
            baselines=not (args.no_baselines or args.targets),
            passes=("forward",) if args.fwd_only else ("forward", "backward"),
        )
    except torch.OutOfMemoryError as error:
        raise UsageError(f"{device} has no room to measure its bandwidth: {error}") from error


def _outcomes(bench: Bench, targets: Sequence[PerformanceTarget]) -> list[Outcome]:
    from scan_registry.bench.targets import outcomes

    return outcomes(targets, bench.timings)


def _backends(args: argparse.Namespace) -> Sequence[Backend] | None:
    """None for the device's usual ones. Targets are for what runs where no language is asked for."""
    if args.backend is not None:
        return (args.backend,)
    return ("auto",) if args.targets else None


def show_targets(bench: Bench, targets: Sequence[PerformanceTarget]) -> None:
    """Print each target with what came of it, and what was not timed."""
    console, found = screen(), _outcomes(bench, targets)
    table = new_table(
        "layout", "B, C, T~", "dtype", "pass", "ms>", "± ms>", "roofline>", "ratio>", "target>", ""
    )
    for outcome in found:
        case, timing = outcome.target.case, outcome.timing
        table.add_row(
            case.layout,
            _sizes(case),
            SHORT_DTYPES[case.dtype],
            timing.direction,
            f"{timing.ms:.4f}",
            f"{timing.spread:.4f}",
            f"{timing.roofline_ms:.4f}",
            f"{outcome.ratio:.3f}",
            f"{outcome.target.ratio:.2f}",
            "met" if outcome.met else "[red]missed[/]",
        )
    show(console, table, f"{bench.name}; streaming {bench.bandwidth / 1e9:.2f} TB/s")
    met = sum(outcome.met for outcome in found)
    console.print(f"{met} of {len(targets) * len(bench.passes)} targets met, {len(found)} timed")
    _show_skipped(console, bench)


def _sizes(case: Case) -> str:
    sizes = f"{case.batch}, {case.channels}, {case.time}"
    return f"{sizes}, {case.options}" if case.options else sizes


def _show_skipped(console: Console, bench: Bench) -> None:
    for who, reason in bench.skipped.items():
        console.print(f"not everywhere timed: {who}: {reason}", markup=False)


def show_table(bench: Bench) -> None:
    """Print what has been timed, and who has not been and why."""
    console, on_gpu = screen(), bench.device.type == "cuda"
    unit, scale = ("TB/s", 1e9) if on_gpu else ("GB/s", 1e6)
    table = new_table(
        "layout", "B, C, T", "dtype", "pass", "kernel", "ms>", "± ms>", f"{unit}>", "of roofline>"
    )
    for timing in bench.timings:
        case = timing.case
        table.add_row(
            case.layout,
            _sizes(case),
            case.dtype,
            timing.direction,
            timing.who,
            f"{timing.ms:.4f}",
            f"{timing.spread:.4f}",
            f"{case.traffic(timing.direction) / timing.ms / scale:.2f}",
            f"{timing.roofline_ms / timing.ms:.2f}",
        )
    show(console, table, f"{bench.name}; streaming {bench.bandwidth / scale:.2f} {unit}")
    _show_skipped(console, bench)


def _targets(args: argparse.Namespace) -> list[PerformanceTarget]:
    from scan_registry.bench.targets import TARGETS

    chosen = [target for target in TARGETS if all(text in str(target.case) for text in args.only)]
    if not chosen:
        raise UsageError(
            f"--only {' '.join(args.only)!r} leaves no case; accepted are parts of cases such as "
            f"{TARGETS[0].case}"
        )
    return chosen


def _cases(args: argparse.Namespace, kind: str) -> list[Case]:
    from scan_registry.bench.cases import Case

    try:
        named = [Case.parse(text) for text in args.case]
    except ValueError as error:
        raise UsageError(f"--case: {error}") from error
    if named:
        return list(dict.fromkeys(named))
    text = SEQLENS[kind] if args.seqlens is None else args.seqlens
    sizes = [size.strip() for size in text.split(",")]
    if not all(size.isdecimal() and len(size) < 100 and int(size) > 0 for size in sizes):
        raise UsageError(f"--seqlens is {text!r}; accepted are lengths such as 1024,2048")
    lengths = list(dict.fromkeys(map(int, sizes)))
    if args.bs * args.d_model * max(lengths) > _MOST_ELEMENTS:
        raise UsageError(
            f"--bs {args.bs} --d_model {args.d_model} --seqlens {text} is a tensor of more than "
            "2**60 elements"
        )
    dtype = DTYPES[args.dtype]
    return [Case(args.layout, args.bs, args.d_model, length, dtype) for length in lengths]


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


def _draw(bench: Bench, args: argparse.Namespace, path: Path) -> None:
    from scan_registry.bench.plot import draw

    title = f"{bench.name}: {args.layout}, B {args.bs}, C {args.d_model}, {DTYPES[args.dtype]}"
    if args.targets or args.case:
        title = bench.name
    try:
        draw(bench.timings, title, path)
    except OSError as error:
        raise UsageError(f"--plot: {path} cannot be written: {error}") from error
    print(f"wrote {path}", file=sys.stderr)
