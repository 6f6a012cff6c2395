"""``scan-registry selftest``: run every kernel here and measure its error."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from scan_registry.base.suggestion import accepted_words
from scan_registry.cli.errors import UsageError
from scan_registry.cli.tables import by_reason, new_table, say, screen, show
from scan_registry.ops.operator import DTYPES, operators

if TYPE_CHECKING:
    from scan_registry.dispatch.fit import Tier
    from scan_registry.hardware.target import Target
    from scan_registry.kernels.cases import Trial
    from scan_registry.kernels.model import Family, Kernel
    from scan_registry.ops.operator import Operator

CPU = "cpu"
#: Elements of the largest problem on the CPU, where the float64 reference takes most of the time.
_MOST_ON_CPU = 300_000


@dataclass(frozen=True)
class Result:
    """One kernel in one dtype: the tier and the variants that ran, and the worst error.

    error is ‖out − ref‖ / ‖ref‖ against float64 over ``cases`` random problems. ``failure`` says
    why nothing ran.
    """

    family: str
    kernel: str
    language: str
    dtype: str
    tier: str
    variants: tuple[str, ...]
    cases: int
    error: float | None
    tolerance: float
    failure: str | None = None

    @property
    def passed(self) -> bool:
        return self.failure is None and self.error is not None and self.error <= self.tolerance


DESCRIPTION = (
    "Run every kernel of this machine on random problems and compare it with the float64 reference."
)
EPILOG = (
    "The exit status is 1 if an error is beyond its tolerance or nothing ran. --json prints "
    "the form of scan_registry/schemas/selftest.json."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu or cuda:N; default: the first GPU, else the CPU")
    parser.add_argument(
        "--family",
        action="append",
        default=[],
        metavar="X",
        help="what its folder in scan_registry/kernels is called; may repeat; default: all",
    )
    parser.add_argument("--dtype", metavar="X", help=f"one of {' '.join(DTYPES)}; default: all")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def run(args: argparse.Namespace) -> int:
    import torch

    from scan_registry.kernels import families

    # A new process of torch draws other numbers. A self-test is to find a broken installation, not the one draw in a hundred
    # whose roundings add up beyond a tolerance.
    torch.manual_seed(0)

    device = _device(args.device)
    if args.dtype is not None and args.dtype not in DTYPES:
        raise UsageError(f"--dtype is {args.dtype!r}; {accepted_words(args.dtype, [*DTYPES])}")
    for name in args.family:
        if name not in families():
            raise UsageError(f"--family is {name!r}; {accepted_words(name, [*families()])}")
    where = CPU if device.type == CPU else torch.cuda.get_device_name(device)
    skipped: dict[str, str] = {}
    threads = torch.get_num_threads()
    if device.type == CPU:
        torch.set_num_threads(
            1
        )  # tensors are small: others would wait, and on a busy machine for long
    try:
        results = _watched(device, DTYPES.get(args.dtype), skipped, args.family)
    finally:
        torch.set_num_threads(threads)
    if args.json:
        passed = all(result.passed for result in results)
        listed = [asdict(result) | {"passed": result.passed} for result in results]
        left_out = [{"subject": subject, "reason": reason} for subject, reason in skipped.items()]
        document = {"device": where, "passed": passed, "results": listed, "skipped": left_out}
        print(json.dumps(document, indent=2))
    else:
        _print(results, where, skipped)
    return 0 if results and all(result.passed for result in results) else 1


def _device(name: str | None) -> Any:
    """The device of that name, or the first GPU, else the CPU; ``UsageError`` if it is not here."""
    import torch

    name = name or ("cuda:0" if torch.cuda.is_available() else CPU)
    count = torch.cuda.device_count()
    accepted = [CPU, "cuda", *(f"cuda:{n}" for n in range(count))] if count else [CPU]
    if name not in accepted:
        raise UsageError(f"--device is {name!r}; accepted here are {', '.join(accepted)}")
    return torch.device(name)


def _watched(
    device: Any, dtype: str | None, skipped: dict[str, str], names: Sequence[str]
) -> list[Result]:
    """All results. If stderr is a terminal, a line there shows meanwhile what is being run."""
    from rich.console import Console

    console, results = Console(stderr=True, highlight=False), list[Result]()
    if not console.is_terminal:
        return list(selftest(device, dtype, skipped, only=names))
    with console.status("selftest") as status:
        for result in selftest(device, dtype, skipped, status.update, names):
            results.append(result)
    return results


def selftest(
    device: Any,
    dtype: str | None = None,
    skipped: dict[str, str] | None = None,
    tell: Callable[[str], object] = lambda _: None,
    only: Sequence[str] = (),
) -> Iterator[Result]:
    """Results for every kernel, language and dtype, or that one, on a torch device; of all families, or of those that
    ``only`` names.

    What is not run goes into ``skipped``, with the reason; ``tell`` hears what is about to be run.
    """
    from scan_registry.kernels import families

    left_out = {} if skipped is None else skipped
    for number, family in enumerate(families().values(), 1):
        start = f"selftest: {family.name}, family {number} of {len(families())}"
        progress = partial(_tell_dtype, tell, start)
        if only and family.name not in only:
            left_out[family.name] = f"only {' and '.join(only)} was asked for"
        elif not (family.folder / "cases.py").is_file():
            left_out[family.name] = "it has no cases.py, which makes problems and their references"
        elif device.type == CPU:
            yield from _on_cpu(family, dtype, left_out, progress)
        else:
            yield from _on_gpu(family, device.index or 0, dtype, left_out, progress)


def _tell_dtype(tell: Callable[[str], object], start: str, dtype: str) -> None:
    tell(f"{start}, {dtype}")


@dataclass
class _Tally:
    """The results of a kernel in a dtype so far."""

    worst: float = 0.0
    cases: int = 0
    tiers: set[Tier] = field(default_factory=set)
    variants: dict[str, None] = field(default_factory=dict)
    failure: str | None = None


def in_wheels(
    family: Family, dtype: str, target: Target, skipped: dict[str, str]
) -> Iterator[Kernel]:
    """The kernels that have variants of the dtype. Those of which wheels hold none would be compiled first, which may take
    minutes: they are ``skipped``."""
    for kernel in family.kernels:
        variants = [v for v in kernel.variants if v.text("dtype") == dtype]
        if any(kernel.rules.ships(v.statics, target) for v in variants):
            yield kernel
        elif variants:
            subject = f"{family.name}.{kernel.name}, {kernel.language}, in {dtype}"
            skipped[subject] = f"wheels hold none for {target}, and a first call compiles it"


def _on_gpu(
    family: Family,
    ordinal: int,
    only: str | None,
    skipped: dict[str, str],
    tell: Callable[[str], object],
) -> Iterator[Result]:
    """Whatever selection picks for a few problems, aligned and not; all kernels run on the same."""
    from scan_registry.diagnostics.accuracy import cases_of
    from scan_registry.dispatch.select import NoKernelError
    from scan_registry.hardware.device import device
    from scan_registry.hardware.driver import DriverError
    from scan_registry.hardware.target import Target

    cases, target = cases_of(family.name), Target(device(ordinal).capability)
    dtypes = dict.fromkeys(v.text("dtype") for kernel in family.kernels for v in kernel.variants)
    for dtype in dtypes:
        if only not in (None, dtype):
            skipped[f"{family.name} in {dtype}"] = f"only {only} was asked for"
            continue
        tell(dtype)
        tallies = [(kernel, _Tally()) for kernel in in_wheels(family, dtype, target, skipped)]
        for trial in cases.trials(dtype, cases.QUICK, f"cuda:{ordinal}"):
            for kernel, tally in tallies:
                if tally.failure is None:
                    try:
                        _run(family, kernel, trial, ordinal, tally)
                    except (NoKernelError, DriverError) as error:
                        tally.failure = str(error)
        for kernel, tally in tallies:
            yield Result(
                family=family.name,
                kernel=kernel.name,
                language=kernel.language,
                dtype=dtype,
                tier=str(max(tally.tiers)) if tally.tiers else "none",
                variants=tuple(tally.variants),
                cases=tally.cases,
                error=tally.worst if tally.cases else None,
                tolerance=cases.TOLERANCE[dtype],
                failure=tally.failure,
            )


def _run(family: Family, kernel: Kernel, trial: Trial, ordinal: int, tally: _Tally) -> None:
    from scan_registry.diagnostics.accuracy import start
    from scan_registry.dispatch import policy
    from scan_registry.runtime.loader import prepare

    for case in trial.launches(kernel.name):
        if all(kernel.rules.accepts(variant, case.problem) for variant in kernel.variants):
            continue  # no problem for this language
        ready = prepare(ordinal, family, case.problem, kernel.language, policy.lowest())
        assert ready.launch is not None  # a language was asked for, so not the reference
        start(ordinal, ready.launch, kernel, case, ready.workspace)
        tally.worst, tally.cases = max(tally.worst, case.error()), tally.cases + 1
        tally.tiers.add(ready.decision.taken().tier)
        tally.variants[str(ready.decision.taken().variant)] = None


def _on_cpu(
    family: Family, only: str | None, skipped: dict[str, str], tell: Callable[[str], object]
) -> Iterator[Result]:
    """What CPU tensors get: this package's code for the CPU, or plain torch."""
    from scan_registry.diagnostics.accuracy import cases_of

    operator = operators().get(family.name)
    if operator is None:
        skipped[family.name] = "no function calls it; its kernels are for GPUs"
        return
    cases, why_not = cases_of(family.name), {k.name: k.not_on_cpu for k in family.kernels}
    skipped |= {f"{family.name}.{name}": reason for name, reason in why_not.items() if reason}
    for dtype, tolerance in cases.TOLERANCE.items():
        if only not in (None, dtype):
            skipped[f"{family.name} in {dtype}"] = f"only {only} was asked for"
            continue
        tell(dtype)
        # Plain torch takes its time, step by step, and has no tiles that a shape may fill or not.
        compiled = family.compiled_for_cpu(dtype)
        shapes = cases.QUICK if compiled else cases.QUICK[:2]
        sizes = {s: s if isinstance(s, int) else prod(s) for s in shapes}
        shapes = tuple(s for s in shapes if sizes[s] <= max(_MOST_ON_CPU, min(sizes.values())))
        kernels = [name for name, reason in why_not.items() if reason is None]
        errors = _errors_on_cpu(operator, kernels, cases.trials(dtype, shapes, CPU))
        for kernel, kernel_errors in errors.items():
            yield Result(
                family=family.name,
                kernel=kernel,
                language="c" if compiled else "torch",
                dtype=dtype,
                tier=CPU,
                variants=(),
                cases=len(kernel_errors),
                error=max(kernel_errors),
                tolerance=tolerance,
            )


def _errors_on_cpu(
    operator: Operator, kernels: Sequence[str], trials: Iterable[Trial]
) -> Mapping[str, Sequence[float]]:
    """Of every trial by each kernel."""
    errors: dict[str, list[float]] = {}
    with _one_thread() as all_threads:
        for trial in trials:
            for kernel in kernels:
                case = trial.case(kernel, aligned=False)
                with all_threads():
                    operator.run_on_cpu(case.problem, case.tensors)
                errors.setdefault(kernel, []).append(case.error())
    return errors


@contextmanager
def _one_thread() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Torch with one thread. The reference consists of many small steps, between which threads would wait for one
    another, which takes long on a busy machine. Yields a context in which torch has all of its threads."""
    import torch

    threads = torch.get_num_threads()

    @contextmanager
    def with_threads(number: int, afterwards: int) -> Iterator[None]:
        torch.set_num_threads(number)
        try:
            yield
        finally:
            torch.set_num_threads(afterwards)

    with with_threads(1, threads):
        yield partial(with_threads, threads, 1)


def _print(results: list[Result], where: str, skipped: dict[str, str]) -> None:
    console = screen()
    for family in dict.fromkeys(result.family for result in results):
        table = new_table("kernel", "language", "dtype", "tier?", "error>!", "limit>", "outcome!")
        for result in results:
            if result.family == family:
                table.add_row(
                    result.kernel,
                    result.language,
                    result.dtype,
                    result.tier,
                    "–" if result.error is None else f"{result.error:.1e}",
                    f"{result.tolerance:.0e}",
                    "passed" if result.passed else "[red]failed[/]",
                )
        show(console, table, f"{family} on {where}")
    for result in results:
        if result.failure:
            say(console, f"{result.kernel} {result.language} {result.dtype}: {result.failure}")
    failed = sum(not result.passed for result in results)
    console.print()
    for reason, subjects in by_reason(skipped).items():
        say(console, f"skipped: {', '.join(subjects)}: {reason}")
    console.print(f"{len(results) - failed} passed, {failed} failed, {len(skipped)} skipped")
