"""``scan-registry bench rnn``: how fast recurrent networks run here, beside installed baselines."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import track

from scan_registry.cli.errors import UsageError
from scan_registry.cli.tables import SHORT_DTYPES, new_table, screen, show

if TYPE_CHECKING:
    from torch import device as Device

    from scan_registry.bench.networks import Network, NetworkBench

BACKENDS = ("auto", "cuda", "cuda_fused", "cuda_alternating", "triton", "reference")


def add_parser(networks: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the arguments, of which ``device``, ``plot`` and so on mean what they do for scans."""
    parser = networks.add_parser(
        "rnn",
        help="time recurrent networks instead",
        description="Times forward passes, and forward with backward ones, of recurrent networks: by "
        "this package, by torch.nn (cuDNN on a GPU), whose times include the product with the inputs, as "
        "do those of scan_registry.nn beside it, and by flashrnn where that is installed. Beside the "
        "microseconds of a step stands, on a GPU, what a step takes whose blocks have next to nothing "
        "to do but wait for each other.",
        epilog="Exit status: 0; 2 for arguments that cannot be meant. The JSON document is described "
        "by scan_registry/schemas/bench-rnn.json.",
    )
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="X",
        help="cell:heads,units:dtype, such as lstm:1,768:bfloat16; may repeat. Default: those of "
        "the project's performance targets",
    )
    parser.add_argument("--bs", type=int, default=16, metavar="N", help="batch size; default: 16")
    parser.add_argument("--seqlen", type=int, default=1024, metavar="N", help="default: 1024")
    parser.add_argument(
        "--backend",
        action="append",
        default=[],
        metavar="X",
        help=f"{' '.join(BACKENDS)}; may repeat; default: auto",
    )
    parser.add_argument("--device", help="cpu or cuda:N; default: the first GPU, else the CPU")
    parser.add_argument(
        "--fwd_only", "--fwd-only", action="store_true", help="time the forward pass alone"
    )
    parser.add_argument(
        "--no-baselines", "--no-peers", action="store_true", help="time this package alone"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the times into a .png, .svg or .pdf"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON document instead")


def run(args: argparse.Namespace, device: Device, plot: Path | None) -> int:
    """Time what is asked for; ``UsageError`` for arguments that cannot be meant."""
    import torch

    from scan_registry.bench.networks import PASSES, NetworkBench

    for name in ("bs", "seqlen"):
        if getattr(args, name) < 1:
            raise UsageError(
                f"--{name} is {getattr(args, name)}; accepted are whole numbers from 1 on"
            )
    for backend in args.backend:
        if backend not in BACKENDS:
            raise UsageError(f"--backend is {backend!r}; accepted are {', '.join(BACKENDS)}")
    cases = _cases(args)
    bench = NetworkBench(
        device,
        PASSES[:1] if args.fwd_only else PASSES,
        baselines=not args.no_baselines,
        backends=args.backend or ("auto",),
    )
    errors, quiet = Console(stderr=True), not sys.stderr.isatty()
    try:
        bench.measure_sync()
        for case in track(cases, "timing", console=errors, transient=True, disable=quiet):
            bench.run(case)
    except torch.OutOfMemoryError as error:
        raise UsageError(f"--case: {device} has not enough memory: {error}") from error
    except KeyboardInterrupt:
        print("interrupted: what was timed is kept", file=sys.stderr)
    if args.json:
        print(json.dumps(bench.document(), indent=2))
    else:
        show_table(bench)
    if plot is not None:
        draw(bench, plot)
    return 0


def _cases(args: argparse.Namespace) -> list[Network]:
    from scan_registry.bench.networks import USUAL, Network

    try:
        found = [Network.parse(text, args.bs, args.seqlen) for text in args.case]
    except ValueError as error:
        raise UsageError(f"--case: {error}") from error
    usual = [Network.parse(str(case), args.bs, args.seqlen) for case in USUAL]
    return list(dict.fromkeys(found or usual))


def show_table(bench: NetworkBench) -> None:
    """Print what has been timed, and who has not been and why."""
    console = screen()
    table = new_table(
        "network", "heads × units", "dtype", "pass", "by", "ms>", "± ms>", "µs/step>", "target>"
    )
    for timing in bench.timings:
        network, target = timing.network, timing.target_ms
        outcome = ""
        if target is not None:
            outcome = f"{target:g} " + ("met" if timing.ms <= target else "[red]missed[/]")
        table.add_row(
            network.function,
            f"{network.heads} × {network.dim}",
            SHORT_DTYPES[network.dtype],
            timing.direction,
            timing.who,
            f"{timing.ms:.3f}",
            f"{timing.spread:.3f}",
            f"{timing.us_per_step:.2f}",
            outcome,
        )
    sizes = {(t.network.batch, t.network.time) for t in bench.timings}
    title = "; ".join([bench.name, *(f"batch {batch}, {time} steps" for batch, time in sizes)])
    if bench.sync_us is not None:
        title += f"; one synchronisation {bench.sync_us:.2f} µs"
    show(console, table, title)
    for who, reason in bench.skipped.items():
        console.print(f"not timed: {who}: {reason}", markup=False)


def draw(bench: NetworkBench, path: Path) -> None:
    """Write a picture: microseconds of a step, a bar for everyone, a panel for each pass."""
    from scan_registry.bench.plot import load

    figures = load()
    passes = list(dict.fromkeys(timing.direction for timing in bench.timings))
    names = list(dict.fromkeys(str(timing.network) for timing in bench.timings))
    everyone = list(dict.fromkeys(timing.who for timing in bench.timings))
    figure: Any = figures.Figure(
        figsize=(2 + 1.2 * max(4, len(names)), 4.2 * max(1, len(passes))), layout="constrained"
    )
    panels = figure.subplots(max(1, len(passes)), 1, squeeze=False)[:, 0]
    width = 0.8 / max(1, len(everyone))
    for panel, direction in zip(panels, passes, strict=False):
        for number, who in enumerate(everyone):
            here = [t for t in bench.timings if (t.direction, t.who) == (direction, who)]
            places = [names.index(str(t.network)) + number * width for t in here]
            panel.bar(places, [t.us_per_step for t in here], width, label=who)
        if bench.sync_us is not None:
            panel.axhline(bench.sync_us, linestyle="--", color="gray", label="one synchronisation")
        panel.set(title=direction, ylabel="µs per step")
        panel.set_xticks([n + 0.4 - width / 2 for n in range(len(names))], names, rotation=20)
        panel.legend(fontsize="x-small")
    figure.suptitle(bench.name)
    try:
        figure.savefig(path)
    except OSError as error:
        raise UsageError(f"--plot: {path} cannot be written: {error}") from error
    print(f"wrote {path}", file=sys.stderr)
