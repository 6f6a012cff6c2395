"""``scan-registry bench``: how fast scans run here, beside installed peers and the memory's speed."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from scan_registry.cli.errors import UsageError
from scan_registry.cli.explain import DTYPES
from scan_registry.cli.tables import new_table, screen, show
from scan_registry.select import BACKENDS

if TYPE_CHECKING:
    from torch import device as Device

    from scan_registry.bench.cases import Case
    from scan_registry.bench.measure import Bench

LAYOUTS = ("channel_last", "time_last")
SEQLENS = {"cuda": "128,256,1024,2048,4096,8192,16384,32768", "cpu": "128,512,2048"}
_MOST_ELEMENTS = 2**60  # their bytes can still be counted


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command's arguments."""
    parser = commands.add_parser(
        "bench",
        help="time scans here, beside installed peers and the memory's speed",
        description="Times the forward and the backward pass over a range of sequence lengths: on a GPU "
        "both languages of this package and the peers that are installed (accelerated-scan, "
        "sequential_scan), as CUDA graphs of kernel launches; on the CPU the calls, beside torch.mul on "
        "tensors of the same size. Inputs rotate over up to 64 sets, to be out of the caches. The floor is "
        "the time in which a large torch.add moves as many bytes.",
        epilog="Exit status: 0; 2 for arguments that cannot be meant, and where nothing can be timed. "
        "The JSON document is described by scan_registry/schemas/bench.json.",
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
    parser.add_argument("--no-peers", action="store_true", help="time this package alone")
    parser.add_argument(
        "--plot",
        "--plot_name",
        "--plot-name",
        type=Path,
        metavar="FILE",
        help="draw the times into a .png, .svg or .pdf; .png is added to a bare name. Needs matplotlib",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON document instead")


def run(args: argparse.Namespace) -> int:
    """Time what is asked for; ``UsageError`` for arguments that cannot be meant."""
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
    cases = _cases(args, device.type)

    import torch
    from rich.console import Console
    from rich.progress import track

    if device.type == "cpu" and args.backend in ("cuda", "triton"):
        raise UsageError(
            f"--backend is {args.backend!r}, which needs a GPU; accepted on the CPU are auto and "
            "reference"
        )
    bench = _bench(args, device)
    try:
        for case in cases:
            bench.check_room(case)
    except ValueError as error:
        raise UsageError(f"--seqlens: {error}") from error
    errors, quiet = Console(stderr=True), not sys.stderr.isatty()
    try:
        for case in track(cases, "timing", console=errors, transient=True, disable=quiet):
            bench.run(case)
    except torch.OutOfMemoryError as error:
        raise UsageError(f"--seqlens: {device} has not enough memory: {error}") from error
    if args.json:
        print(json.dumps(bench.document(), indent=2))
    else:
        show_table(bench)
    if plot is not None:
        _draw(bench, args, plot)
    return 0


def _bench(args: argparse.Namespace, device: Device) -> Bench:
    """What times on the device, whose bandwidth it measures first."""
    import torch

    from scan_registry.bench.measure import Bench

    try:
        return Bench.on(
            device,
            None if args.backend is None else (args.backend,),
            peers=not args.no_peers,
            passes=("forward",) if args.fwd_only else ("forward", "backward"),
        )
    except torch.OutOfMemoryError as error:
        raise UsageError(f"{device} has no room to measure its bandwidth: {error}") from error


def show_table(bench: Bench) -> None:
    """Print what has been timed, and who has not been and why."""
    console, on_gpu = screen(), bench.device.type == "cuda"
    unit, scale = ("TB/s", 1e9) if on_gpu else ("GB/s", 1e6)
    table = new_table(
        "layout", "B, C, T", "dtype", "pass", "kernel", "ms>", "± ms>", f"{unit}>", "of floor>"
    )
    for timing in bench.timings:
        case = timing.case
        table.add_row(
            case.layout,
            f"{case.batch}, {case.channels}, {case.time}",
            case.dtype,
            timing.direction,
            timing.who,
            f"{timing.ms:.4f}",
            f"{timing.spread:.4f}",
            f"{case.traffic(timing.direction) / timing.ms / scale:.2f}",
            f"{timing.floor_ms / timing.ms:.2f}",
        )
    show(console, table, f"{bench.name}; streaming {bench.bandwidth / scale:.2f} {unit}")
    for who, reason in bench.skipped.items():
        console.print(f"not everywhere timed: {who}: {reason}", markup=False)


def _cases(args: argparse.Namespace, kind: str) -> list[Case]:
    from scan_registry.bench.cases import Case

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
    try:
        draw(bench.timings, title, path)
    except OSError as error:
        raise UsageError(f"--plot: {path} cannot be written: {error}") from error
    print(f"wrote {path}", file=sys.stderr)
