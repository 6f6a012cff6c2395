"""``scan-registry doctor``: what this installation can do on a GPU, and what is in the way."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from scan_registry.artifact.archive import Archive, ArchiveError
from scan_registry.base.package import NAME
from scan_registry.base.suggestion import accepted_words, nearest
from scan_registry.cache.store import Cache, jit_cache
from scan_registry.catalog import distributions, providers
from scan_registry.catalog.inventory import Catalogue
from scan_registry.catalog.providers import MISNAMED
from scan_registry.cli.doctor_json import document
from scan_registry.cli.errors import UsageError
from scan_registry.cli.gpus import add_gpu, assumed, gpu_of, visible
from scan_registry.cli.listing import size_text
from scan_registry.diagnostics.doctor import Families, coverage, findings_of, lacks
from scan_registry.diagnostics.doctor_report import (
    ArchiveState,
    CacheState,
    Finding,
    Installation,
    ProviderState,
    Report,
    Severity,
)
from scan_registry.diagnostics.verify import missing
from scan_registry.dispatch import policy
from scan_registry.dispatch.fit import Tier, dotted
from scan_registry.dispatch.select import Key, System
from scan_registry.hardware.device import Device, driver_text
from scan_registry.hardware.target import CudaVersion
from scan_registry.version import __version__

_TORCH_BUILDS = "https://pytorch.org/get-started/locally/"
_OLDEST_TORCH = (2, 6)
_KERNEL_MODULE = Path(
    "/proc/driver/nvidia/version"
)  # there wherever the driver's kernel part is loaded
_LITTLE = 16 << 20  # bytes: less is too little for a kernel compiled here, and what goes with it


DESCRIPTION = (
    "Looks at the installation and at the GPUs here, or at one that --for describes "
    "and that need not be here: which kernels would run in which form, what is wrong, and what "
    "to install. Runs and changes nothing."
)
EPILOG = (
    "Exit status 0: every checked call that a wheel has a kernel for would run a kernel, no level that is set "
    "forbids all that a GPU can run, and everything installed is intact and fits. Without a GPU: calls on the CPU work. 1: otherwise. 2: invalid arguments. "
    "The JSON document is described by scan_registry/schemas/doctor.json."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_gpu(parser)
    parser.add_argument(
        "--strict", action="store_true", help="exit with status 1 on a machine without a GPU, too"
    )
    levels = " ".join(policy.LEVELS)
    parser.add_argument(
        "--require",
        metavar="LEVEL",
        help=f"exit with status 1 if a kernel that is checked is below this level: {levels}",
    )
    for name in ("family", "dtype"):
        parser.add_argument(
            f"--{name}",
            action="append",
            default=[],
            metavar="X",
            help=f"check only this {name}; may repeat",
        )
    parser.add_argument("--json", action="store_true", help="print a JSON document instead")


def run(args: argparse.Namespace) -> int:
    """Look, and say what was seen; ``UsageError`` for arguments that cannot be meant."""
    elsewhere = gpu_of(args)
    chosen = _chosen(args)
    if args.require is not None:
        check_known("--require", args.require, [*policy.LEVELS])
    with policy.require(args.require or "reference"):
        report = examine(
            elsewhere, strict=args.strict, chosen=chosen, required=args.require is not None
        )
    if elsewhere is not None:
        (gpu,) = report.gpus
        report = replace(report, gpus=(replace(gpu, assumed=assumed(args, elsewhere)),))
    if args.json:
        print(json.dumps(document(report), indent=2))
    else:
        # Imported by what prints: --help needs none of it.
        from scan_registry.cli.doctor_text import show_report

        show_report(report)
    return 0 if report.passed else 1


def check_known(option: str, word: str, accepted: Sequence[str]) -> None:
    """``UsageError`` if the word is none of those that the option accepts."""
    if word not in accepted:
        raise UsageError(f"{option} is {word!r}; {accepted_words(word, accepted)}")


def _chosen(args: argparse.Namespace) -> Families:
    """The families that are asked for, with the samples of the dtypes that are asked for."""
    from scan_registry.kernels import families
    from scan_registry.ops.operator import DTYPES

    there = families()
    for name in args.family:
        check_known("--family", name, [*there])
    for name in args.dtype:
        check_known("--dtype", name, [*DTYPES])
    dtypes = {DTYPES[name] for name in args.dtype}
    return {
        name: replace(
            family, samples=tuple(s for s in family.samples if not dtypes or s.dtype in dtypes)
        )
        for name, family in there.items()
        if not args.family or name in args.family
    }


def examine(
    elsewhere: Device | None = None,
    *,
    strict: bool = False,
    chosen: Families | None = None,
    required: bool = False,
) -> Report:
    """This installation, on the GPUs here, or on ``elsewhere``, with the families that are chosen (default: all).

    ``required``: a call that raises is an error without exception.
    """
    from scan_registry.cache import tuned
    from scan_registry.kernels import families
    from scan_registry.runtime import jit

    findings: list[Finding] = []
    stock, for_jax = _stock(findings), find_spec("torch") is None and _jax() is None
    cpu = None if for_jax else _cpu()
    if for_jax:
        text = (
            "not installed: functions of torch's tensors do not run, those of scan_registry.jax do"
        )
        findings.append(Finding("note", "torch", text))
    gpus, driver = _gpus(elsewhere, findings, "error" if strict or cpu else "note")
    if cpu and not gpus:
        findings.append(Finding("error", "the CPU", f"calls on it fail: {cpu[0]}", (cpu[1],)))
    here = Installation(
        python=platform.python_version(),
        version=__version__,
        torch=_torch(),
        jax=_version_of("jax"),
        driver=driver,
        toolchains=jit.toolchains(),
        providers=stock.states,
        cache=_cache(jit_cache()),
        lowest=_lowest(findings),
        cpu=cpu[0] if cpu else None,
        for_jax=for_jax,
    )
    findings += findings_of(here, [device for _, device in gpus])
    covered, requested = [], families() if chosen is None else chosen
    for ordinal, device in gpus:
        system = System(
            device,
            stock.installed.archives,
            here.toolchains,
            stock.installed.denied,
            stock.damaged,
            tuned=None if ordinal is None else tuned.archive_of(device),
        )
        covered.append(coverage(system, requested, here.lowest, ordinal))
        findings += lacks(covered[-1], system, requested, here.lowest, without_exception=required)
    return Report(here, tuple(covered), tuple(findings), strict)


# --- Looking ----------------------------------------------------------------------------------


@dataclass
class _Stock:
    """What providers bring: the archives that can be used, and the state of all providers and archives.

    damaged  by key, binaries whose bytes are not those that their entries state
    """

    installed: Catalogue
    states: tuple[ProviderState, ...]
    damaged: dict[Key, str] = field(default_factory=dict)


def _stock(findings: list[Finding]) -> _Stock:
    """What is installed. What makes ``catalogue`` raise is left out, and is a finding."""
    installed, broken = providers.installed()
    for error in broken:
        text, remedy = f"{error}: every call on a GPU raises it", "reinstall the package it names"
        findings.append(Finding("error", "providers", text, (remedy,)))
    damaged: dict[Key, str] = {}
    usable: list[Archive] = []
    states = []
    for provider in installed:
        mismatch = provider.mismatch(__version__)
        archives, about = provider.archives, f"{provider.name} {provider.version}"
        for path in missing(provider):
            text = f"{path.relative_to(provider.folder.resolve())} is missing"
            findings.append(Finding("error", about, text, (f"reinstall {provider.name}",)))
        for path in provider.misnamed:
            findings.append(Finding("warning", about, f"{path} {MISNAMED}", ("remove the file",)))
        states.append(
            ProviderState(
                name=provider.name,
                version=provider.version,
                core=provider.core,
                folder=str(provider.folder),
                mismatch=mismatch,
                denied=provider.denied,
                archives=tuple(
                    _archive(archive, damaged, unread=mismatch is not None) for archive in archives
                ),
            )
        )
        if mismatch is None:
            usable += archives
    ordered = tuple(sorted(usable, key=lambda archive: archive.arch))
    fitting = tuple(p for p, s in zip(installed, states, strict=True) if s.mismatch is None)
    return _Stock(Catalogue(ordered, fitting), tuple(states), damaged)


def _archive(archive: Archive, damaged: dict[Key, str], *, unread: bool) -> ArchiveState:
    """The state of an archive, after every byte was checked; adds to what is ``damaged``."""
    path, damage, intact = archive.path, [], 0
    read = archive.reader()
    try:
        for binary in () if unread else archive.binaries:
            try:
                read(binary)
                intact += 1
            except ArchiveError as error:
                damage.append(str(error))
                damaged[str(binary), str(path)] = str(error)
    except ArchiveError as error:
        damage.append(str(error))
    more = f" (so are {len(damage) - 1} more of its binaries)" if len(damage) > 1 else ""
    return ArchiveState(
        arch=str(archive.arch),
        path=str(path),
        size=path.stat().st_size if path.is_file() else None,
        binaries=None if unread else intact,
        damage=f"{damage[0]}{more}" if damage else None,
    )


def _gpus(
    elsewhere: Device | None, findings: list[Finding], without: Severity
) -> tuple[list[tuple[int | None, Device]], CudaVersion | None]:
    """GPUs with their ordinals, and the CUDA version of this machine's driver if that was asked. A machine
    without a GPU is a finding of the severity ``without``."""
    if elsewhere is not None:
        return [(None, elsewhere)], None
    from scan_registry.hardware import driver

    about, remedy = "this machine", "for a GPU that is elsewhere, say which: --for H100"
    only = "calls run on the CPU alone"
    try:
        supported = driver.version()
    except RuntimeError as error:
        # The linker's own words name the file, as the error that they caused does once more.
        text = f"no CUDA driver, so {only}: {error.__cause__ or error}"
        if _KERNEL_MODULE.exists():
            text += f"; {_KERNEL_MODULE} says that there is a GPU"
            shared = "let this container see the driver: docker run --gpus all"
            findings.append(Finding("error", about, text, (shared, remedy)))
        else:
            findings.append(Finding(without, about, text, (remedy,)))
        return [], None
    try:
        gpus = visible()
    except driver.DriverError as error:
        text = f"the CUDA driver fails, so {only}: {error}"
        findings.append(Finding("error", about, text, (remedy,)))
        return [], supported
    if not gpus:
        text = f"the CUDA driver sees no GPU, so {only}"
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = () if shown is None else (f"CUDA_VISIBLE_DEVICES is {shown!r}: unset it",)
        findings.append(Finding(without, about, text, (*hidden, remedy)))
    else:
        findings += _torch_findings(supported)
    return list(enumerate(gpus)), supported


def _torch_findings(driver: CudaVersion) -> Iterator[Finding]:
    """Why torch cannot use the GPUs that the driver sees, if it cannot."""
    built = f"install a torch that is built for CUDA {driver[0]}: {_TORCH_BUILDS} gives the command"
    consequence = "it cannot put tensors on these GPUs, and calls run on the CPU alone"
    if find_spec("torch") is None:
        if _jax() is not None:
            yield Finding("error", "torch", f"not installed: {consequence}", (built,))
        return
    import torch

    cuda = torch.version.cuda
    if cuda is None:
        text = f"{torch.__version__} is built without CUDA: {consequence}"
        yield Finding("error", "torch", text, (built,))
    elif (release := int(cuda.partition(".")[0])) > driver[0]:
        text = (
            f"{torch.__version__} needs a driver for CUDA {release}.0, and this one supports "
            f"{dotted(driver)}: {consequence}"
        )
        yield Finding("error", "torch", text, (f"install {driver_text((release, 0))}", built))


def _torch() -> str | None:
    """Its installed version."""
    return _version_of("torch")


def _version_of(package: str) -> str | None:
    """The installed version; some installers leave metadata of an older form alone."""
    try:
        return distributions.version(package) or version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> tuple[str, str] | None:
    """Why calls on the CPU fail, with what helps, or None if nothing is known to keep them from working.

    Torch is not imported for it, which takes seconds.
    """
    version, oldest = _torch(), ".".join(map(str, _OLDEST_TORCH))
    if find_spec("torch") is None:
        missing = f"torch is not installed, and calls on JAX's arrays fail: {_jax()}"
        return missing, f"install torch: {_TORCH_BUILDS} gives the command"
    release = re.match(r"(\d+)\.(\d+)", version or "")
    if release and (int(release[1]), int(release[2])) < _OLDEST_TORCH:
        return f"torch {version} is older than {oldest}", f"`pip install 'torch>={oldest}'`"
    try:
        import_module(f"{NAME}.ops._cpu")
    except ImportError as error:
        return f"this package's code for the CPU does not load: {error}", "reinstall scan-registry"
    return None


def _jax() -> str | None:
    """Why calls on JAX's arrays fail, or None if nothing is known to keep them from working. Asked where torch is missing, as it imports
    JAX."""
    if _version_of("jax") is None:
        return "JAX is not installed"
    try:
        import_module(f"{NAME}.jax.ffi")
        import_module(f"{NAME}.ops._cpu")
    except ImportError as error:
        return f"{error}"
    return None


def _lowest(findings: list[Finding]) -> Tier:
    try:
        return policy.lowest()
    except ValueError as error:
        text = f"{error}: every call raises it"
        word = os.environ.get(policy.VARIABLE, "").strip().lower()
        meant = nearest(word, [*policy.LEVELS])
        remedy = f"set {policy.VARIABLE}={meant}" if meant else f"unset {policy.VARIABLE}"
        findings.append(Finding("error", "policy", text, (remedy,)))
        return Tier.REFERENCE


def _cache(cache: Cache) -> CacheState:
    unusable = cache.refusal()
    if not cache.folder.is_absolute():  # nobody knows which folder that is, or what is in it
        return CacheState(str(cache.folder), unusable, 0, 0, 0)
    there = next(path for path in (cache.folder, *cache.folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if unusable is None and not os.access(there, os.W_OK | os.X_OK):
        unusable = f"{there} is read-only"
    if unusable is None and free < _LITTLE:
        unusable = f"its disk has {size_text(free)} left"
    sizes = []
    for entry in cache.entries():
        try:
            sizes.append(entry.path.stat().st_size)
        except FileNotFoundError:
            continue  # cleared by another process meanwhile
    return CacheState(str(cache.folder), unusable, len(sizes), sum(sizes), free)
