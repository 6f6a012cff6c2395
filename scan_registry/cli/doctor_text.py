"""What ``scan-registry doctor`` prints for a reader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from scan_registry.catalog.providers import CORE
from scan_registry.cli.listing import size_text
from scan_registry.cli.tables import new_table, say, screen, show
from scan_registry.diagnostics.doctor_report import (
    Answer,
    CacheState,
    Coverage,
    Finding,
    Installation,
    ProviderState,
    Report,
)
from scan_registry.diagnostics.doctor_words import condensed
from scan_registry.diagnostics.first_calls import CALL, DATE, MEASURED_ON
from scan_registry.dispatch import policy
from scan_registry.dispatch.fit import Tier, dotted
from scan_registry.dispatch.select import Backend
from scan_registry.hardware.products import named

LEGEND = """
exact, same-major: machine code; ptx: compiled by the driver, at its first use; jit: compiled here, at \
its first use; reference: plain torch; none: the call raises NoKernelError; –: no such kernel."""


def show_report(report: Report) -> None:
    console = screen()
    _print_installation(console, report.installation)
    for gpu in report.gpus:
        _print_gpu(console, gpu)
    if report.gpus:
        say(console, LEGEND, "dim")
    for finding in report.findings:
        _print_finding(console, finding)
    first = None if report.passed else report.first
    if first:
        say(console, f"\nTo do first: {first.remedies[0]}", "bold")
    say(console, f"\n{_verdict(report)}")


def _print_installation(console: Console, here: Installation) -> None:
    console.print(f"[bold]scan-registry {here.version}[/]")
    say(console, f"python     {here.python}")
    say(console, f"torch      {here.torch or 'not installed'}")
    say(console, f"jax        {here.jax or 'not installed'}")
    for language, tools in here.toolchains.items():
        text = tools if isinstance(tools, str) else f"{tools.identity} (CUDA {dotted(tools.cuda)})"
        say(console, f"{language:10} {text}")
    if here.driver:
        say(console, f"driver     for CUDA {dotted(here.driver)}")
    say(console, f"policy     down to tier {here.lowest}; {policy.VARIABLE} sets it")
    say(console, f"cache      {_cache_words(here.cache)}")
    _print_providers(console, here.providers)
    for provider in here.providers:
        for subject, reason in provider.denied.items():
            say(console, f"{provider.name} {provider.version}: {subject}: {reason}")


def _print_finding(console: Console, finding: Finding) -> None:
    console.print()
    style = "bold red" if finding.severity == "error" else "bold"
    console.print(
        f"[{style}]{finding.severity}:[/] {escape(finding.about)}: {escape(finding.text)}"
    )
    for reason in finding.reasons:
        say(console, f"    {reason}")
    for remedy in finding.remedies:
        say(console, f"  → {remedy}")


def _verdict(report: Report) -> str:
    if report.gpus:
        if not report.passed:
            return f"Not every call that was checked runs a kernel. {_question(report.gpus)}"
        return f"{_checked(report.gpus)} {_question(report.gpus)}"
    if report.installation.cpu:
        return "No call runs."
    broken = any(finding.severity == "error" for finding in report.findings)
    if report.installation.for_jax:
        return f"CPU only: calls of scan_registry.jax run{', but see the errors' if broken else ''}. Others need torch."
    return f"CPU only: calls run this package's code for the CPU{', but see the errors' if broken else ''}."


def _checked(gpus: Sequence[Coverage]) -> str:
    """What was checked, in a sentence, and how it came out."""
    answers = [answer for gpu in gpus for answer in gpu.answers]
    count = len({(answer.family, answer.kernel) for answer in answers})
    without = sum(answer.tiers["auto"] in (Tier.REFERENCE, None) for answer in answers)
    outcome = f"{without} of {len(answers)} problems run none" if without else "each runs one"
    return f"Checked: {count} kernels, with a few problems in each dtype; {outcome}."


def _question(gpus: Sequence[Coverage]) -> str:
    """How to ask about other sizes."""
    gpu = gpus[0]
    answers = sorted(gpu.answers, key=lambda answer: not answer.size)
    product = named(gpu.device.name)
    words = f" --for '{product.name}'" if product else f" --for {gpu.device.arch}"
    if product and " " not in product.name:
        words = f" --for {product.name}"
    dtype, where = answers[0].dtype, "" if gpu.ordinal is not None else words
    command = f"scan-registry explain {answers[0].family} --dtype {dtype} --shape …{where}"
    return f"Ask about your sizes: `{command}`"


def _cache_words(cache: CacheState) -> str:
    count = f"{cache.entries} {'entry' if cache.entries == 1 else 'entries'}"
    contents = f"{count}, {size_text(cache.size)}; {cache.free / 1e9:.1f} GB free"
    return f"{cache.folder}: {f'unusable, {cache.unusable}' if cache.unusable else contents}"


def _print_providers(console: Console, states: Sequence[ProviderState]) -> None:
    table = new_table("archives of", "version?", "made for?", "agrees", "archives!")
    for state in states:
        names = [
            f"{Path(archive.path).stem}{' [red](damaged)[/]' if archive.damage else ''}"
            for archive in state.archives
        ]
        agrees = "[red]no[/]" if state.mismatch else "yes"
        core = f"{CORE} {state.core}"
        table.add_row(state.name, state.version, core, agrees, " ".join(names) or "none")
    show(console, table)


def _print_gpu(console: Console, gpu: Coverage) -> None:
    kernels: dict[str, list[Answer]] = {}
    for answer in gpu.answers:
        kernels.setdefault(f"{answer.family}.{answer.kernel}", []).append(answer)
    backends = list(dict.fromkeys(b for answer in gpu.answers for b in answer.tiers))
    table, narrow = (new_table("kernel", *(f"{b}!" for b in backends)) for _ in range(2))
    for kernel, answers in kernels.items():
        table.add_row(kernel, *(_cell(answers, backend) for backend in backends))
        for name, some in _alike(kernel, answers, backends):
            narrow.add_row(name, *(_cell(some, b) if some else "" for b in backends))
    if not table.fits(console.width):
        table = narrow
    device = gpu.device
    shared = f"{device.shared_memory_per_block} bytes of shared memory per block"
    show(
        console,
        table,
        f"[bold]{escape(gpu.name)}[/], {device.sm_count} SMs, {shared}, driver "
        f"for CUDA {dotted(device.driver)}",
    )
    _print_first_calls(console, gpu)
    if gpu.assumed:
        say(console, f"\nassumed: {'; '.join(gpu.assumed)}")
    tuned = "; ".join(map(str, gpu.tuned)) or "no table for it; the specs' estimates decide"
    say(console, f"\ntuning: {tuned}")


def _alike(
    kernel: str, answers: Sequence[Answer], backends: Sequence[Backend]
) -> Iterator[tuple[str, list[Answer]]]:
    """Rows of a kernel for a narrow terminal, as its first cell with answers that have the same tiers: one, or a row
    without answers and below it one for each group of them."""
    groups: dict[tuple[object, ...], list[Answer]] = {}
    for answer in answers:
        groups.setdefault(tuple(answer.tiers.get(b, "–") for b in backends), []).append(answer)
    if len(groups) == 1:
        yield kernel, [*answers]
        return
    yield kernel, []
    every = [answer.pair for answer in answers]
    for some in groups.values():
        yield f"  {condensed([row.pair for row in some], every)}", some


def _print_first_calls(console: Console, gpu: Coverage) -> None:
    """Print what the first call of a process costs on each tier that calls on this GPU get."""
    table = new_table("tier", "language!", "first call!", "in later processes!")
    for call in gpu.first_calls:
        times = [_milliseconds(call.first_ms), _milliseconds(call.later_ms)]
        table.add_row(str(call.tier), call.language, *times)
    here = (
        ""
        if gpu.device.name in (MEASURED_ON, MEASURED_ON.split()[-1])
        else "; not measured on this GPU"
    )
    show(console, table, f"First calls, as measured on an {MEASURED_ON} ({CALL}, {DATE}){here}:")


def _milliseconds(time: float | None) -> str:
    return "not measured" if time is None else f"{time:.2g} ms" if time < 100 else f"{time:.0f} ms"


def _cell(answers: Iterable[Answer], backend: Backend) -> str:
    """The tier, or a line for each with what gets it."""
    tiers: dict[Tier | None, list[tuple[str, str]]] = {}
    every = []
    for answer in answers:
        if backend in answer.tiers:
            every.append(answer.pair)
            tiers.setdefault(answer.tiers[backend], []).append(every[-1])
    lines = []
    for tier, pairs in tiers.items():
        name = str(tier) if tier is not None else "none"
        text = f"[red]{name}[/]" if tier in (None, Tier.REFERENCE) else name
        which = condensed(pairs, every)
        lines.append(f"{text}: {which}" if which else text)
    return "; ".join(lines) or "–"
