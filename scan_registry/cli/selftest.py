"""``scan-registry selftest``: run every kernel here and measure its error."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from scan_registry.cli.errors import UsageError
from scan_registry.cli.tables import new_table, screen, show
from scan_registry.ops.operator import DTYPES, operators

if TYPE_CHECKING:
    from scan_registry.dispatch.fit import Tier
    from scan_registry.kernels.cases import Trial
    from scan_registry.kernels.model import Family, Kernel

CPU = "cpu"


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


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "selftest",
        help="run every kernel on this machine and compare it with the float64 reference",
        description="Run every kernel of this machine on random problems and compare it with the "
        "float64 reference.",
        epilog="The exit status is 1 if an error is beyond its tolerance or nothing ran. --json prints "
        "the form of scan_registry/schemas/selftest.json.",
    )
    parser.add_argument("--device", help="cpu or cuda:N; default: the first GPU, else the CPU")
    parser.add_argument("--dtype", metavar="X", help=f"one of {' '.join(DTYPES)}; default: all")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def run(args: argparse.Namespace) -> int:
    import torch

    name = args.device or ("cuda:0" if torch.cuda.is_available() else CPU)
    count = torch.cuda.device_count()
    accepted = [CPU, "cuda", *(f"cuda:{n}" for n in range(count))] if count else [CPU]
    if name not in accepted:
        raise UsageError(f"--device is {name!r}; accepted here are {', '.join(accepted)}")
    if args.dtype is not None and args.dtype not in DTYPES:
        raise UsageError(f"--dtype is {args.dtype!r}; accepted are {', '.join(DTYPES)}")
    device = torch.device(name)
    where = CPU if device.type == CPU else torch.cuda.get_device_name(device)
    results = list(selftest(device, DTYPES.get(args.dtype)))
    if args.json:
        passed = all(result.passed for result in results)
        listed = [asdict(result) | {"passed": result.passed} for result in results]
        print(json.dumps({"device": where, "passed": passed, "results": listed}, indent=2))
    else:
        _print(results, where)
    return 0 if results and all(result.passed for result in results) else 1


def selftest(device: Any, dtype: str | None = None) -> Iterator[Result]:
    """Results for every kernel, language and dtype, or that one, on a torch device."""
    from scan_registry.kernels import families

    for family in families().values():
        if device.type == CPU:
            if family.on_cpu:
                yield from _on_cpu(family, dtype)
        else:
            yield from _on_gpu(family, device.index or 0, dtype)


@dataclass
class _Tally:
    """What came of a kernel in a dtype so far."""

    worst: float = 0.0
    cases: int = 0
    tiers: set[Tier] = field(default_factory=set)
    variants: dict[str, None] = field(default_factory=dict)
    failure: str | None = None


def _on_gpu(family: Family, ordinal: int, only: str | None) -> Iterator[Result]:
    """Whatever selection picks for a few problems, aligned and not; all kernels run on the same."""
    from scan_registry.diagnostics.accuracy import cases_of
    from scan_registry.dispatch.select import NoKernelError
    from scan_registry.hardware.driver import DriverError

    cases = cases_of(family.name)
    dtypes = dict.fromkeys(v.text("dtype") for kernel in family.kernels for v in kernel.variants)
    for dtype in dtypes:
        if only not in (None, dtype):
            continue
        takers = [k for k in family.kernels if any(v.text("dtype") == dtype for v in k.variants)]
        tallies = [(kernel, _Tally()) for kernel in takers]
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

    for aligned in (True, False):
        case = trial.case(kernel.name, aligned=aligned)
        if all(kernel.rules.accepts(variant, case.problem) for variant in kernel.variants):
            continue  # no problem for this language
        ready = prepare(ordinal, family, case.problem, kernel.language, policy.lowest())
        assert ready.launch is not None  # a language was asked for, so not the reference
        start(ordinal, ready.launch, kernel, case, ready.workspace)
        tally.worst, tally.cases = max(tally.worst, case.error()), tally.cases + 1
        tally.tiers.add(ready.decision.taken().tier)
        tally.variants[str(ready.decision.taken().variant)] = None


def _on_cpu(family: Family, only: str | None) -> Iterator[Result]:
    """What CPU tensors get: this package's code for the CPU, compiled with it."""
    from scan_registry.diagnostics.accuracy import cases_of

    cases, operator = cases_of(family.name), operators()[family.name]
    for dtype, tolerance in cases.TOLERANCE.items():
        if only not in (None, dtype):
            continue
        errors: dict[str, list[float]] = {}
        for trial in cases.trials(dtype, cases.QUICK, CPU):
            for kernel in dict.fromkeys(kernel.name for kernel in family.kernels):
                case = trial.case(kernel, aligned=False)
                operator.run_on_cpu(case.problem, case.tensors)
                errors.setdefault(kernel, []).append(case.error())
        for kernel, found in errors.items():
            yield Result(
                family=family.name,
                kernel=kernel,
                language="c",
                dtype=dtype,
                tier=CPU,
                variants=(),
                cases=len(found),
                error=max(found),
                tolerance=tolerance,
            )


def _print(results: list[Result], where: str) -> None:
    console = screen()
    for family in dict.fromkeys(result.family for result in results):
        table = new_table("kernel", "language", "dtype", "tier", "error>", "limit>", "outcome")
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
            console.print(f"{result.kernel} {result.language} {result.dtype}: {result.failure}")
    failed = sum(not result.passed for result in results)
    console.print(f"{len(results) - failed} passed, {failed} failed")
