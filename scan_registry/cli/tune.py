"""``scan-registry tune``: find the fastest variants on a GPU here, and use them from then on."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from scan_registry.cache import tuned
from scan_registry.catalog.inventory import catalogue
from scan_registry.cli.errors import INTERRUPTED, UsageError
from scan_registry.cli.tables import by_reason, new_table, screen, show
from scan_registry.ops.operator import DTYPES, SHORT_DTYPES

if TYPE_CHECKING:
    from scan_registry.kernels.model import Variant
    from scan_registry.ops.benchmark import Case
    from scan_registry.tuner.engine import Tuner
    from scan_registry.tuner.problems import Posed

LANGUAGES = ("cuda", "triton")


DESCRIPTION = (
    "Times every variant that the kernels' specs allow, on this GPU and problem by "
    "problem; variants that no wheel holds are compiled first. What is found goes into the cache's "
    "folder and comes before what is shipped, for problems near those that were timed; `scan-registry "
    "cache clear` forgets it. Calls never tune. An interruption keeps what has been measured."
)
EPILOG = (
    "Exit status: 0, or 2 for arguments that cannot be meant, without a GPU and where nothing "
    "could be timed or saved. The JSON document is described by scan_registry/schemas/tune.json."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_choice(parser)
    parser.add_argument("--device", metavar="cuda:N", help="default: the first GPU")
    parser.add_argument("--dry-run", action="store_true", help="save nothing")
    parser.add_argument("--json", action="store_true", help="print a JSON document instead")


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Declare what to tune, and for how long."""
    parser.add_argument(
        "--kernel", action="append", metavar="X", help="such as time_last_forward; may repeat"
    )
    parser.add_argument(
        "--language", action="append", metavar="X", help=f"{' '.join(LANGUAGES)}; may repeat"
    )
    parser.add_argument("--dtype", action="append", metavar="X", help="such as bf16; may repeat")
    parser.add_argument(
        "--shapes",
        "--case",
        action="append",
        metavar="X",
        help="layout:batch,channels,time, such as time_last:8,1536,4096, to which :sequences=N and "
        ":gates=channel may be added; may repeat; default: a few of every kind",
    )
    parser.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="begin nothing new after so long; what is left out is listed",
    )
    parser.add_argument(
        "--only",
        metavar="REGEX",
        help="variants in which it is found, and what would run untuned; for trying: no tuning to keep",
    )


def run(args: argparse.Namespace) -> int:
    """Tune and save; ``UsageError`` for arguments that cannot be meant."""
    problems = chosen(args)
    only = wanted(args.only, problems)
    if args.only and not args.dry_run:
        raise UsageError(
            "--only leaves variants out, and what is saved is to be the fastest of all: add --dry-run"
        )
    tuner = tuner_for(args.device, args.budget)
    tuner.only = only
    watched(tuner, problems)
    if not tuner.tuned:
        reasons = "; ".join(dict.fromkeys(tuner.refused.values())) or "no problem was begun"
        raise UsageError(f"nothing was timed on {tuner.device.name}: {reasons}")
    saved = None if args.dry_run else _save(tuner)
    if args.json:
        from scan_registry.tuner.report import document

        print(json.dumps(document(tuner, saved), indent=2))
    else:
        show_report(tuner)
        screen().print(f"saved in {saved}" if saved else "nothing was saved", markup=False)
    return INTERRUPTED if tuner.interrupted else 0


def chosen(args: argparse.Namespace, known: Sequence[Case] | None = None) -> list[Posed]:
    """The problems that the arguments name, or of ``known`` cases those of the kernels that they name;
    ``UsageError`` if they name none."""
    from scan_registry.tuner.problems import cases, posed, usual_cases

    _check_words("--dtype", args.dtype, DTYPES)
    _check_words("--language", args.language, LANGUAGES)
    dtypes = [DTYPES[word] for word in args.dtype or ()]
    try:
        if known is not None:
            wanted = list(known)
        elif args.shapes or args.dtype:
            wanted = cases(args.shapes or (), dtypes)
        else:
            wanted = usual_cases()
    except ValueError as error:
        raise UsageError(f"--shapes: {error}") from error
    problems = list(posed(wanted, args.language or LANGUAGES))
    names = list(dict.fromkeys(problem.kernel.name for problem in problems))
    _check_words("--kernel", args.kernel, names, "accepted with these shapes")
    return [p for p in problems if not args.kernel or p.kernel.name in args.kernel]


def _check_words(
    option: str, words: Sequence[str] | None, known: Collection[str], accepted: str = "accepted"
) -> None:
    """``UsageError`` for a word that an option does not take."""
    for word in words or ():
        if word not in known:
            raise UsageError(f"{option} is {word!r}; {accepted} are {', '.join(known)}")


def wanted(pattern: str | None, problems: Sequence[Posed]) -> Callable[[Variant], bool]:
    """Which variants ``--only`` asks for; ``UsageError`` if it is no regular expression, or in no variant
    that takes one of the problems."""
    try:
        regex = re.compile(pattern or "")
    except re.error as error:
        raise UsageError(
            f"--only is {pattern!r}, which is no regular expression: {error}"
        ) from error

    def only(variant: Variant) -> bool:
        return regex.search(str(variant)) is not None

    takers = (
        v for p in problems for v in p.kernel.every if p.kernel.rules.accepts(v, p.problem) is None
    )
    if pattern and not any(map(only, takers)):
        raise UsageError(f"--only is {pattern!r}, which is in no variant for these problems")
    return only


def tuner_for(name: str | None, budget: float | None) -> Tuner:
    """A tuner for a GPU of this machine; ``UsageError`` if it is not there."""
    import torch

    from scan_registry.hardware.device import device
    from scan_registry.tuner.engine import Tuner
    from scan_registry.tuner.report import run_here

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    accepted = [f"cuda:{ordinal}" for ordinal in range(count)]
    if not accepted:
        raise UsageError("tuning needs an NVIDIA GPU, and torch sees none here")
    word = accepted[0] if name in (None, "cuda") else name
    if word not in accepted:
        raise UsageError(f"--device is {word!r}; accepted here are {', '.join(accepted)}")
    ordinal = accepted.index(word)
    there = device(ordinal)
    torch.cuda.set_device(ordinal)
    return Tuner(ordinal, there, catalogue().archives, run_here(ordinal, there), budget)


def watched(tuner: Tuner, problems: Sequence[Posed]) -> None:
    """Tune, and say on stderr what is being done; on a terminal with a progress bar."""
    # Imported by what prints: --help needs none of it.
    from rich import progress as bars
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    progress = bars.Progress(
        bars.TextColumn("tuning"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )

    def tell(text: str) -> None:
        console.print(text, markup=False, soft_wrap=not console.is_terminal)

    with progress:
        bar = progress.add_task("tune", total=len(problems))
        tuner.tell, tuner.done = tell, lambda: progress.advance(bar)
        tuner.tune(problems)


def _save(tuner: Tuner) -> str:
    """Save the results, and return where; ``UsageError`` if the cache's folder cannot be used."""
    from scan_registry.tuner.report import tunings

    by_head = tunings(tuner.device, tuner.tuned)
    labels = {head: tuning.labels for head, tuning in by_head.items()}
    try:
        archive = tuned.publish(tuner.device, tuner.binaries(labels), by_head, tuner.run.date)
    except OSError as error:
        raise UsageError(f"what was found cannot be saved: {error}") from error
    return str(archive.path)


def show_report(tuner: Tuner) -> None:
    """Print the fastest variant of each problem, and how far what is shipped is from it."""
    from scan_registry.tuner.report import regret

    console = screen()
    table = new_table(
        "kernel", "lang", "problem!", "best", "ms>", "± ms>", "tried>", "shipped ms>", "regret>"
    )
    for result in tuner.tuned:
        timings, kernel = result.measured.timings, result.posed.kernel
        tile = result.best.removeprefix(f"{result.posed.shape.kind},")
        case = result.posed.case
        options = f", {case.options}" if case.options else ""
        table.add_row(
            kernel.name,
            kernel.language,
            f"{case.sizes} {SHORT_DTYPES[case.dtype]}{options}",
            tile,
            f"{result.best_ms:.4f}",
            f"{timings[result.best].spread:.4f}",
            str(len(timings)),
            "–" if result.shipped_ms is None else f"{result.shipped_ms:.4f}",
            "–" if result.regret is None else f"{result.regret:.3f}",
        )
    show(console, table, f"{tuner.device.name}, {tuner.run.date}")
    total = regret(tuner.tuned)
    if total:
        console.print(
            f"\nregret of what is shipped, its time over the best found, on {total.problems} problems: "
            f"geometric mean {total.geometric_mean:.3f}, worst {total.worst:.3f}"
        )
    _show_rest(tuner)


def _show_rest(tuner: Tuner) -> None:
    """On stderr, what there was no time for and what could not be timed."""
    if tuner.left_out:
        names = "; ".join(f"{problem.kernel.head} {problem}" for problem in tuner.left_out)
        print(f"left out for want of time or memory: {names}", file=sys.stderr)
    reasons = {
        str(variant): text.strip().splitlines()[0] for variant, text in tuner.refused.items()
    }
    for reason, variants in by_reason(reasons).items():
        print(f"not timed: {', '.join(variants)}: {reason}", file=sys.stderr)
