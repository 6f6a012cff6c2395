"""Malformed files, eight hundred or, once a week, two thousand: archives, cache entries, providers' manifests and attestations.

Whatever a file holds, reading it ends soon, with what is intact or with the documented error that
names the file; no bytes come out whose digest is not the one that is stated. The examples follow
from their numbers alone, so a failure names the example that shows it. ``SCAN_REGISTRY_FUZZ`` sets
how many there are in all, for a longer search.
"""

from __future__ import annotations

import json
import os
import random
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
from attesting import write_attestations
from malformed import damaged, malformed

from scan_registry.artifact import archive
from scan_registry.artifact.archive import SUFFIX, Archive, ArchiveError, Binary, digest
from scan_registry.cache.store import Cache
from scan_registry.catalog import providers
from scan_registry.catalog.inventory import Catalogue, read_attestations, worst_attestations
from scan_registry.catalog.providers import ProviderError
from scan_registry.dispatch.fit import misfit
from scan_registry.dispatch.select import MOST_BLOCKS, System, select
from scan_registry.hardware.device import Device
from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan.problem import LinearScanProblem, Strides
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.model import Variant
from scan_registry.kernels.tuning import Row, Tuning

Make = Callable[..., tuple[Binary, bytes]]
Describe = Callable[..., Device]

FEW, MANY = 800, 2_000
TIME_LIMIT = 5.0  # seconds for an example, which takes about a millisecond
SM90 = Target.parse("sm90")
KEY = "ab" + 62 * "0"
ALIGNED = [
    variant
    for variant in FAMILY.kernel("channel_last_forward", "cuda").variants
    if dict(variant.statics)["access"] == "aligned"
]
VARIANTS = [
    FAMILY.kernel("time_last_forward", "cuda").variants[0],
    FAMILY.kernel("time_last_forward", "triton").variants[0],
    ALIGNED[0],
]


def problems() -> Iterator[LinearScanProblem]:
    """One for each kernel of ``VARIANTS``."""
    state = Strides(0, 4, 1, 0)
    for layout, strides in (
        ("time_last", Strides(0, 4096, 1024, 1)),
        ("channel_last", Strides(0, 4096, 1, 4)),
    ):
        yield LinearScanProblem(
            "forward",
            layout,
            "float32",
            "float32",
            outer=1,
            batch=2,
            channels=4,
            time=1024,
            strides=(strides, strides, strides, state),
            alignment=16,
        )


# --- Running examples -------------------------------------------------------------------------


class Hang(BaseException):
    """Not an ``Exception``, so that nobody takes it for an error of theirs."""


@contextmanager
def limited() -> Iterator[None]:
    """``Hang`` if the block takes too long."""

    def ring(*_: object) -> NoReturn:
        raise Hang(f"took more than {TIME_LIMIT} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(name: str, share: float, example: Callable[[random.Random], object], many: bool) -> None:
    """Run ``share`` of all examples; fail with the first of each kind that does not end well."""
    failures: dict[str, str] = {}
    total = int(os.environ.get("SCAN_REGISTRY_FUZZ") or (MANY if many else FEW))
    for number in range(int(total * share)):
        try:
            with limited():
                example(random.Random(f"{name} {number}"))
        except (Exception, Hang) as error:
            frames = traceback.extract_tb(error.__traceback__)
            where = next(
                f for f in frames[::-1] if "fuzz" in f.filename or "registry" in f.filename
            )
            failures.setdefault(
                f"{type(error).__name__} in {where.name}",
                f"example {number}: {error!r:.200} at {where.filename}:{where.lineno}",
            )
    assert not failures, "\n".join(failures.values())


def check_error(error: Exception, path: Path) -> None:
    """It names the file, and can be printed."""
    assert str(path) in str(error)
    str(error).encode()


# --- Archives ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def entries(a_binary: Make) -> list[tuple[Binary, bytes]]:
    """What is in the archive before it is damaged."""
    return [a_binary(v, content=bytes([n + 1]) * (50 + n)) for n, v in enumerate(VARIANTS)]


@pytest.fixture
def intact(entries: list[tuple[Binary, bytes]], tmp_path: Path) -> bytes:
    """The archive's content."""
    path = tmp_path / "intact" / f"sm90{SUFFIX}"
    tunings = dict(map(tuned, problems(), (VARIANTS[0], VARIANTS[2])))
    archive.write(path, SM90, entries, {"version": "9.9.9", "commit": "c0ffee"}, tunings)
    return path.read_bytes()


def tuned(problem: LinearScanProblem, variant: Variant) -> tuple[str, list[Tuning]]:
    """What tuning might have found of a variant on a problem, and what kernel that goes by."""
    kernel = FAMILY.kernel(variant.kernel, variant.language)
    assert kernel.tunable.shape is not None
    shape = kernel.tunable.shape(problem)
    rows = [Row({**shape.sizes, "time": t}, {kernel.label(variant): 0.5}) for t in (8, 4096)]
    return kernel.head, [Tuning.of("sm_90", "Imaginary", "2026-01-31", {shape.kind: rows})]


def malformed_section(parts: Any, section: Any, chance: random.Random) -> bytes:
    """One of its lines is malformed, or what all of them say together."""
    lines = parts.lines(section)
    if chance.random() < 0.6:
        number = chance.randrange(len(lines))
        lines[number] = malformed(json.loads(lines[number]), chance)
    else:
        text = malformed(section, chance)
        try:
            lines = parts.lines(json.loads(text))
        except (ValueError, RecursionError):
            lines = [text]
    return b"\n".join(lines)


def malformed_tunings(tunings: Any, chance: random.Random) -> bytes:
    """The rows of one kind are malformed, or all of them around the rows."""
    if chance.random() < 0.5:
        return malformed(tunings, chance)
    ((kind, rows),) = tunings[0]["kinds"].items()
    text = malformed(json.loads(rows), chance).decode(errors="replace")
    return json.dumps([{**tunings[0], "kinds": {kind: text}}]).encode()


def sealed(parts: Any, chance: random.Random) -> bytes:
    """A file with a malformed manifest, or a malformed section, or malformed tunings, and the digests that
    belong to them; the manifest's length may be a lie."""
    if chance.random() < 0.65:
        holder = parts.tunings if parts.tunings and chance.random() < 0.3 else parts.sections
        of = chance.choice([*holder])
        if holder is parts.tunings:
            holder[of] = malformed_tunings(holder[of], chance)
        else:
            holder[of] = malformed_section(parts, holder[of], chance)
        return bytes(parts.together())
    end = parts.HEADER.size + parts.HEADER.unpack_from(whole := parts.together())[1]
    manifest = malformed(json.loads(whole[parts.HEADER.size : end]), chance)
    length = len(manifest)
    if chance.random() < 0.05:
        length = max(0, length + chance.choice([-1, 1, 2**32, 2**63 - 1]))
    return bytes(parts.sealed(manifest, whole[end:], length))


def consult(path: Path, device: Device) -> list[bytes]:
    """Do with an archive all that the package does; what could be read of it, with its digest."""
    contents: list[bytes] = []

    def attempt(action: Callable[[], Any]) -> Any:
        try:
            return action()
        except ArchiveError as error:
            check_error(error, path)
            return None

    def read(opened: Archive, binary: Binary) -> None:
        content = attempt(lambda: opened.read(binary))
        if content is not None:
            assert digest(content) == binary.sha256
            contents.append(content)

    opened = Archive(path, "acme")
    attempt(lambda: opened.arch)
    for binary in attempt(lambda: opened.binaries) or ():
        str(binary).encode()
        json.dumps(binary.to_json()).encode()
        misfit(binary, device)
        read(opened, binary)
    for problem in problems():
        fresh = Archive(path, "acme")
        of_kernel = partial(fresh.of, FAMILY.name, problem.kernel)
        for entry in attempt(of_kernel) or ():
            str(entry).encode()
            binary = attempt(partial(getattr, entry, "binary"))
            if binary is not None:
                read(fresh, binary)
        decision = select(System(device, (Archive(path, "acme"),)), FAMILY, problem)
        for loser in decision.rejected:
            assert str(path) in loser.reason or not loser.damaged
            f"{loser.subject}: {loser.reason}".encode()
        winner, launch = decision.winner, decision.launch()
        if launch is not None:
            pairs = zip(launch.grid, MOST_BLOCKS, strict=True)
            assert all(1 <= blocks <= most for blocks, most in pairs)
            assert launch.workspace >= 0
        if winner is not None and winner.archive is not None and winner.binary is not None:
            winner.binary.entry.encode()
            read(winner.archive, winner.binary)
    return contents


@pytest.mark.slow
def test_damaged_archives(
    tmp_path: Path,
    intact: bytes,
    entries: list[tuple[Binary, bytes]],
    a_device: Describe,
    thorough: bool,
) -> None:
    device, path = a_device(), tmp_path / f"sm90{SUFFIX}"
    original = {content for _, content in entries}

    def example(chance: random.Random) -> None:
        path.write_bytes(damaged(intact, chance))
        assert original.issuperset(consult(path, device))

    run("damaged archive", 0.35, example, thorough)


@pytest.mark.slow
def test_archives_that_are_sealed_and_wrong(
    tmp_path: Path, intact: bytes, archive_parts: Any, a_device: Describe, thorough: bool
) -> None:
    """A writer with a defect, rather than a disk with one: the digests are right."""
    device, path = a_device(), tmp_path / f"sm90{SUFFIX}"

    def example(chance: random.Random) -> None:
        path.write_bytes(sealed(archive_parts.of(intact), chance))
        consult(path, device)

    run("sealed archive", 0.4, example, thorough)


def test_an_undamaged_archive_is_read(
    tmp_path: Path,
    intact: bytes,
    entries: list[tuple[Binary, bytes]],
    archive_parts: Any,
    a_device: Describe,
) -> None:
    """So that the tests above do not pass because nothing is ever read."""
    path = tmp_path / f"sm90{SUFFIX}"
    path.write_bytes(archive_parts.of(intact).together())
    contents = consult(path, a_device())
    assert set(contents) == {content for _, content in entries}
    assert len(contents) == 8  # each once by itself and once by kernel, and the two winners


def test_cache_entries(
    tmp_path: Path, entries: list[tuple[Binary, bytes]], archive_parts: Any, thorough: bool
) -> None:
    """A bad entry counts as missing, and says nothing."""
    folder = tmp_path / "cache"
    Cache(folder).put(KEY, SM90, entries[0])
    path = folder / KEY[:2] / KEY / f"sm90{SUFFIX}"
    whole = path.read_bytes()

    def example(chance: random.Random) -> None:
        seal = chance.random() < 0.5
        content = sealed(archive_parts.of(whole), chance) if seal else damaged(whole, chance)
        path.write_bytes(content)
        result = Cache(folder).get(KEY, SM90)
        if result is not None:
            assert digest(result[1]) == result[0].sha256
            assert seal or result == entries[0]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run("cache entry", 0.1, example, thorough)


# --- Providers and attestations ---------------------------------------------------------------

RANGES = [">=0.1,<0.2", "", "==0.1.*", "~=0.1", "===x", ">=0.1.*", "<", ">=1!0", "0.1", ">=0.1,,<1"]
RANGES += [">=" + "9" * 5000, ">=" + "1." * 5000 + "1", ">=0.1" + ",>=0.1" * 300, "\ud800", ">=٩"]


def test_manifests_of_providers(tmp_path: Path, thorough: bool) -> None:
    path = tmp_path / providers.MANIFEST
    good = {
        "schema": 1,
        "core": ">=0.1,<0.2",
        "denied": [
            {"sha256": "0" * 64, "reason": "it races"},
            {"variant": str(VARIANTS[0]), "reason": "it is slow"},
        ],
    }

    def example(chance: random.Random) -> None:
        stated = {**good, "core": chance.choice([good["core"], *RANGES])}
        content = (
            malformed(stated, chance) if chance.random() < 0.9 else json.dumps(stated).encode()
        )
        path.write_bytes(content)
        try:
            result = providers.read("acme", "1.0", tmp_path)
        except ProviderError as error:
            check_error(error, path)
            return
        for version in ("0.1.0", "0.2.0.dev1"):
            assert result.mismatch(version) is None or "acme 1.0" in str(result.mismatch(version))
        assert result.archives == ()
        for subject, reason in Catalogue((), (result,)).denied.items():
            assert isinstance(subject, str)
            assert reason.startswith("denied: ")
            f"{subject}: {reason}".encode()

    run("provider", 0.1, example, thorough)


def test_attestations(tmp_path: Path, entries: list[tuple[Binary, bytes]], thorough: bool) -> None:
    binaries = [binary for binary, _ in [entries[0], *entries]]  # one twice: the worse counts
    path = write_attestations(tmp_path, "gpu", *binaries)
    good = json.loads(path.read_text(encoding="utf-8"))

    def example(chance: random.Random) -> None:
        path.write_bytes(malformed(good, chance))
        for read in (lambda: read_attestations(path), lambda: worst_attestations(tmp_path)):
            try:
                result = read()
            except ValueError as error:
                check_error(error, path)
                continue
            for attestation in result.values() if isinstance(result, dict) else result:
                assert attestation.passed in (True, False)
                assert isinstance(attestation.sha256, str)
                f"{attestation.gpu} {attestation.date} {attestation.cases}".encode()

    run("attestation", 0.05, example, thorough)
