"""Whether what is installed is what is stated of it: by its digests, by its sources, and by the images
themselves. ``rebuild`` compiles binaries again and compares the bytes.
"""

from __future__ import annotations

import multiprocessing
import re
import signal
import time
from base64 import urlsafe_b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any, Literal

from scan_registry.aot import elf, image
from scan_registry.aot.compile import COMPILERS, compile_variant, source_digest
from scan_registry.artifact.archive import SUFFIX, Archive, ArchiveError, Binary, digest
from scan_registry.catalog import distributions
from scan_registry.catalog.inventory import Attestation
from scan_registry.catalog.providers import MANIFEST, Provider
from scan_registry.dispatch.fit import Toolchain
from scan_registry.kernels import families
from scan_registry.kernels.model import Kernel, Language, Variant
from scan_registry.runtime import jit

_PTX_TARGET = re.compile(rb"^\s*\.target\s+sm_(\d+)[af]?\b", re.MULTILINE)
_PTX_ENTRY = re.compile(rb"\.entry\s+([\w$]+)")

Row = tuple[Archive, Binary]


@dataclass(frozen=True)
class Defect:
    """Something that is not as it is stated. ``path`` and ``binary`` are None where it is about more
    than one."""

    path: Path | None
    binary: Binary | None
    reason: str

    def __str__(self) -> str:
        return ": ".join(str(part) for part in (self.path, self.binary, self.reason) if part)


# --- Providers --------------------------------------------------------------------------------


def altered(provider: Provider) -> list[Defect]:
    """The provider's manifest and archives that are not those that its installation recorded.

    Nothing is known of an editable installation, which records none of them.
    """
    return [
        Defect(path, None, f"{reason}; reinstall {provider.name}")
        for path, recorded in _recorded(provider)
        if (reason := _altered(path, recorded))
    ]


def missing(provider: Provider) -> list[Path]:
    """The provider's manifest and archives that its installation recorded and that are gone."""
    return [path for path, _ in _recorded(provider) if not path.exists()]


def _recorded(provider: Provider) -> Iterator[tuple[Path, str]]:
    """The provider's manifest and archives with the SHA-256 that its installation recorded of each."""
    folder = provider.folder.resolve()
    manifest, archives = folder / MANIFEST, folder / "archives"
    for distribution in distributions.named(provider.name):
        if distribution.version != provider.version:
            continue  # files that another version left behind did not install these
        for file in Distribution.at(distribution.folder).files or ():
            path = Path(str(file.locate())).resolve()
            ours = path == manifest or (path.parent == archives and path.suffix == SUFFIX)
            if ours and file.hash is not None and file.hash.mode == "sha256":
                yield path, file.hash.value


def _altered(path: Path, recorded: str) -> str | None:
    """``recorded`` is in base64 without padding, as in a wheel's RECORD."""
    expected = urlsafe_b64decode(recorded + "=" * (-len(recorded) % 4)).hex()
    try:
        sha256 = digest(path.read_bytes())
    except OSError as error:
        return error.strerror or str(error)
    wrong = f"SHA-256 is {sha256}, the installed file's was {expected}"
    return None if sha256 == expected else wrong


# --- Binaries ---------------------------------------------------------------------------------


def check(
    archive: Archive,
    binaries: Iterable[Binary],
    attestations: Mapping[str, Attestation],
) -> Iterator[Defect]:
    """Everything that is wrong with binaries of an archive; nothing is compiled. ``attestations`` go by
    the binaries' digests."""
    read = archive.reader()
    for binary in binaries:
        for reason in _reasons(archive, binary, read, attestations.get(binary.sha256)):
            yield Defect(archive.path, binary, reason)


def _reasons(
    archive: Archive,
    binary: Binary,
    read: Callable[[Binary], bytes],
    attestation: Attestation | None,
) -> Iterator[str]:
    target, arch = binary.target, archive.arch
    if (target.capability, target.is_ptx) != (arch.capability, arch.is_ptx):
        yield f"is not for the archive's architecture, {arch}"
    if reason := origin(binary):
        yield reason
    if attestation is not None and not attestation.passed:
        yield (
            f"failed its attestation on {attestation.gpu}, {attestation.date}: error "
            f"{attestation.error:.1e}, tolerance {attestation.tolerance:.1e}"
        )
    try:
        content = read(binary)
    except ArchiveError as error:
        yield str(error).removeprefix(f"{archive.path}: ").removeprefix(f"{binary} ")
    else:
        yield from _contradictions(binary, content)


def origin(binary: Binary) -> str | None:
    """Why the shipped sources and specs do not give this binary, or None if they do.

    The compiler and its version do not enter; no compiler has to be installed.
    """
    variant = binary.variant
    kernel = _kernel(variant)
    if kernel is None or not kernel.allows(variant):
        return "this version's specs have no such variant; install again to compile those that they have"
    compiler = COMPILERS[variant.language]
    options = compiler.options(kernel, variant, binary.target)
    threads = 32 * kernel.code.warps(variant)
    shipped = source_digest(compiler.sources(kernel))
    for what, has, should in (
        ("sources with SHA-256", binary.source_sha256, shipped),
        ("options", " ".join(binary.options), " ".join(options)),
        ("threads per block:", binary.threads, threads),
    ):
        if has != should:
            return f"is made with {what} {has}; this version's are {should}"
    return None


def _kernel(variant: Variant) -> Kernel | None:
    known = families().get(variant.family)
    try:
        return known.kernel(variant.kernel, variant.language) if known else None
    except KeyError:
        return None


def _contradictions(binary: Binary, content: bytes) -> Iterator[str]:
    """The facts on which the image and its entry in the manifest disagree."""
    form = "ptx" if binary.target.is_ptx else "cubin"
    if binary.format != form:
        yield f"format: the entry states {binary.format}, but code for {binary.target} is {form}"
    try:
        said = _of_ptx(binary, content) if form == "ptx" else _of_cubin(binary, content)
    except ValueError as error:
        yield f"the image: {error}"
        return
    for name, value in said.items():
        stated = binary.target.number if name == "architecture" else getattr(binary, name)
        if value != stated:
            yield f"{name}: the entry states {stated}, the image {value}"


def _of_cubin(binary: Binary, content: bytes) -> Mapping[str, Any]:
    form = image.of_cubin(content, binary.target)
    resources = elf.resources(content, binary.entry)
    return {
        "architecture": elf.arch_number(content),
        "format_version": form.version,
        "oldest_driver": form.oldest_driver,
        "registers": resources.registers,
        "static_shared": resources.static_shared,
        "spill_bytes": resources.stack,
    }


def _of_ptx(binary: Binary, content: bytes) -> Mapping[str, Any]:
    form, target = image.of_ptx(content), _PTX_TARGET.search(content)
    if target is None:
        raise ValueError("the PTX states no target")
    entries = [name.decode() for name in _PTX_ENTRY.findall(content)]
    if binary.entry not in entries:
        raise ValueError(f"no kernel {binary.entry!r}; there are: {', '.join(entries) or 'none'}")
    return {
        "architecture": int(target[1]),
        "format_version": form.version,
        "oldest_driver": form.oldest_driver,
    }


# --- Compiling again --------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """A binary beside what the shipped sources give here, in ``seconds``, and why it is no other.

    ``install`` is what makes one comparable that is not for want of its compiler.
    """

    archive: Archive
    binary: Binary
    outcome: Literal["identical", "different", "not comparable"]
    reason: str = ""
    seconds: float = 0.0
    install: str | None = None


def rebuild(rows: Iterable[Row], workers: int) -> Iterator[Comparison]:
    """Compile binaries again, in forked processes and without any cache, and compare.

    What another compiler, or another version of it, has made is not comparable. Not for a process
    that has started threads or imported torch: a fork copies neither safely.
    """
    here, comparable = jit.toolchains(), []
    for archive, binary in rows:
        if reason := _obstacle(archive, binary, here):
            install = None if _is_here(binary, here) else requirement(binary.compiler)
            yield Comparison(archive, binary, "not comparable", reason, install=install)
        else:
            comparable.append((archive, binary))
    # Forked workers inherit how this process finds the packages, whatever that is.
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_leave_interrupts)
    try:
        outcomes = pool.map(_again, [binary for _, binary in comparable])
        for (archive, binary), (rebuilt, seconds) in zip(comparable, outcomes, strict=True):
            reason = _difference(binary, rebuilt)
            outcome: Literal["identical", "different"] = "different" if reason else "identical"
            yield Comparison(archive, binary, outcome, reason, seconds)
    finally:
        pool.shutdown(cancel_futures=True)


def requirement(compiler: str) -> str | None:
    """What pip installs to have a compiler in the very version that ``compiler`` names; None for one that is
    in no package."""
    name, _, version = compiler.partition(" ")
    if name == "nvrtc":
        release, _, rest = version.partition(".")
        package = "nvidia-cuda-nvrtc" + (f"-cu{release}" if int(release) < 13 else "")
        return f"{package}=={version}{'' if '.' in rest else '.*'}"
    return f"{name}=={version}" if name == "triton" else None


def _is_here(binary: Binary, here: Mapping[Language, Toolchain | str]) -> bool:
    toolchain = here[binary.variant.language]
    return not isinstance(toolchain, str) and toolchain.identity == binary.compiler


def _obstacle(
    archive: Archive, binary: Binary, here: Mapping[Language, Toolchain | str]
) -> str | None:
    """Why compiling here would tell nothing of the binary, or None."""
    toolchain = here[binary.variant.language]
    if isinstance(toolchain, str):
        return f"made by {binary.compiler}; here: {toolchain}"
    if toolchain.identity != binary.compiler:
        return f"made by {binary.compiler}; here is {toolchain.identity}"
    if origin(binary):
        return "made from other sources or options"
    try:
        archive.read(binary)
    except ArchiveError:
        return "its bytes are damaged"
    return None


def _leave_interrupts() -> None:
    """Leave Ctrl-C, which the terminal sends to workers, too, to the process that started them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _again(binary: Binary) -> tuple[Binary | str, float]:
    """The binary compiled here, or why there is none, and the seconds that it took."""
    started = time.perf_counter()
    rebuilt: Binary | str
    try:
        rebuilt, _ = compile_variant(binary.variant, binary.target)
    except jit.CompileError as error:
        rebuilt = f"does not compile here: {error}"
    return rebuilt, time.perf_counter() - started


def _difference(binary: Binary, rebuilt: Binary | str) -> str:
    """How the binary that was compiled here differs; empty if it does not."""
    if isinstance(rebuilt, str):
        return rebuilt
    if rebuilt.sha256 != binary.sha256:
        return (
            f"compiled here has SHA-256 {rebuilt.sha256} ({rebuilt.size} bytes), "
            f"installed {binary.sha256} ({binary.size} bytes)"
        )
    others = [
        f"{field.name} is {getattr(rebuilt, field.name)}, installed {getattr(binary, field.name)}"
        for field in fields(Binary)
        if getattr(rebuilt, field.name) != getattr(binary, field.name)
    ]
    return f"compiled here to the same bytes, but {'; '.join(others)}" if others else ""
