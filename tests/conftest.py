"""Fixtures shared by all tests: synthetic devices, binaries and archives; the ``gpu`` marker.

The tests run against the installed package, not against the sources beside them.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import struct
import sys
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from by_path import load
from covering import selection
from rank_pool import RankPool

from scan_registry.artifact import archive, chunks
from scan_registry.artifact.archive import Archive, Binary, digest
from scan_registry.hardware.device import Device
from scan_registry.hardware.target import Target
from scan_registry.kernels import families
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.model import Variant

# For the scripts of ci/ as modules; after the installed package, as beside ci/ lie the sources.
sys.path.append(str(Path(__file__).parents[1]))

pytest.register_assert_rewrite(
    "benching", "caching", "compiling", "diagnosing", "driving", "emulated_kernels", "explaining", "harness", "imaginary", "loading",
    "posing", "selecting", "verifying", "watched",
)  # fmt: skip

# Workers of pytest-xdist whose threads together are more than the cores wait for each other most of the time.
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // workers)))

PROVENANCE: Mapping[str, Any] = {"version": "9.9.9", "commit": "c0ffee" * 6 + "beef", "dirty": True}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-pages",
        action="store_true",
        help="write docs/pages/reference/output anew, in place of comparing",
    )
    parser.addoption(
        "--fresh-numbers",
        action="store_true",
        help="draw other random numbers in each run, to test more cases than the same ones",
    )
    parser.addoption(
        "--thorough",
        action="store_true",
        help="run every combination of parameters, and what is marked thorough, as is done once a week",
    )


def pytest_configure(config: pytest.Config) -> None:
    """hypothesis, too, poses the same examples in every run, few unless asked to be thorough, and measures no time."""
    if find_spec("hypothesis") is None:
        return
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "scan-registry",
        derandomize=not config.getoption("--fresh-numbers"),
        max_examples=100 if config.getoption("--thorough") else 20,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("scan-registry")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without Python's garbage collector, which would go through ever more modules and tests, and during tests through all of
    them again: they stay to the end, and it leaves them alone from here on. During tests it works less often than by default,
    as most of what it goes through is modules that tests import."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 20, 20)
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The selection, unless all are asked for, or single tests. First what takes a type checker long: at the end, another worker
    would wait for it. Then what ranks do: one worker has all of that, as the processes of ranks would be started in the other one, too."""
    if not (config.getoption("--thorough") or any("::" in word for word in config.args)):
        kept = set(selection(items))
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    items.sort(key=lambda item: (item.path.name != "test_typing.py", not starts_ranks(item)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """A worker sends what has a result. That a test begins and ends, and that its fixtures did what they should, is two thirds
    of what would go to the other process, which takes as long as many a test."""
    if "PYTEST_XDIST_WORKER" not in os.environ or item.config.option.durations is not None:
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


def starts_ranks(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and hasattr(item.module, RankPool.__name__)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU: torch.cuda.is_available() is False")


@pytest.fixture(autouse=True)
def _the_same_numbers_in_every_run(request: pytest.FixtureRequest) -> None:
    """Seeds what draws numbers before each test, so that a test that passes once passes always."""
    if request.config.getoption("--fresh-numbers"):
        return
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    if torch := sys.modules.get("torch"):
        # Of what this machine has; or torch would note for each kind of device where it was asked, which takes milliseconds.
        seeded = torch if torch.cuda.is_available() else torch.default_generator
        seeded.manual_seed(seed)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Prints the names of failed tests at the very end, as often only the end of a log is kept."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    stats = {} if reporter is None else reporter.stats
    for report in (*stats.get("failed", ()), *stats.get("error", ())):
        print(f"failed: {report.nodeid}")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tensors so small that torch's threads would only wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_device(capability: tuple[int, int] = (9, 0), **changes: Any) -> Device:
    device = Device(
        name=f"Imaginary {capability[0]}.{capability[1]}",
        capability=capability,
        sm_count=132,
        shared_memory_per_block=232_448,
        registers_per_block=65_536,
        threads_per_block=1024,
        driver=(13, 0),
    )
    return replace(device, **changes)


def make_binary(
    variant: Variant | str | None = None,
    target: Target | str = "sm90",
    content: bytes | None = None,
    **changes: Any,
) -> tuple[Binary, bytes]:
    if variant is None:
        variant = FAMILY.variants()[0]
    elif isinstance(variant, str):
        variant = Variant.parse(variant)
    if isinstance(target, str):
        target = Target.parse(target)
    if content is None:
        content = f"code of {variant} for {target}".encode()
    binary = Binary(
        variant=variant,
        target=target,
        format="ptx" if target.is_ptx else "cubin",
        format_version="8.8" if target.is_ptx else "7",
        oldest_driver=(12, 9) if target.is_ptx else (12, 0),
        entry=f"{variant.family}_{variant.kernel}",
        block=(128, 1, 1),
        cluster=(1, 1, 1),
        dynamic_shared=0,
        hidden=0,
        registers=None if target.is_ptx else 40,
        static_shared=None if target.is_ptx else 1024,
        spill_bytes=None if target.is_ptx else 0,
        size=len(content),
        sha256=digest(content),
        compiler="imaginary 1.0",
        options=("-O3",),
        source_sha256=digest(b"source"),
    )
    return replace(binary, **changes), content


@pytest.fixture(scope="session")
def thorough(pytestconfig: pytest.Config) -> bool:
    """For tests that go through combinations of their own."""
    return bool(pytestconfig.getoption("--thorough"))


@pytest.fixture(scope="session")
def a_device() -> Callable[..., Device]:
    """A GPU of a capability; keywords replace what is ample by default."""
    return make_device


@pytest.fixture(scope="session")
def a_binary() -> Callable[..., tuple[Binary, bytes]]:
    """A binary and its bytes, which are made up unless given; keywords replace its other fields."""
    return make_binary


@pytest.fixture(scope="session")
def _written() -> dict[object, bytes]:
    """Archives of made-up binaries: a write takes longer than most tests that want one."""
    return {}


@pytest.fixture
def archive_factory(tmp_path: Path, _written: dict[object, bytes]) -> Callable[..., Archive]:
    """Puts an archive for an arch into ``tmp_path`` and returns it, unread.

    ``binaries`` defaults to one for each of ``variants``, and these to the arch's defaults of all CUDA
    kernels that an operator calls, which no tuning table changes.
    """

    def make(
        arch: str,
        binaries: Iterable[tuple[Binary, bytes]] | None = None,
        *,
        variants: Iterable[Variant] | None = None,
        **provenance: Any,
    ) -> Archive:
        target = Target.parse(arch)
        path = tmp_path / f"{target.label}{archive.SUFFIX}"
        given = None if variants is None else tuple(variants)
        key = (arch, given and tuple(map(str, given)), tuple(sorted(provenance.items())))
        if binaries is None and key in _written:
            path.write_bytes(_written[key])
            path.chmod(0o644)
            return Archive(path)
        made_up = binaries is None
        if binaries is None:
            chosen = given or (
                variant
                for family in families().values()
                for kernel in family.kernels
                if family.samples and kernel.language == "cuda"
                for variant in kernel.by_text.values()
                if kernel.rules.serves(variant.statics, target)
            )
            binaries = [make_binary(variant, target) for variant in chosen]
        archive.write(path, target, binaries, {**PROVENANCE, **provenance})
        if made_up:
            _written[key] = path.read_bytes()
        return Archive(path)

    return make


@dataclass
class Parts:
    """An archive taken apart, to be changed and put together with the digests that belong to it.

    ``sections`` and ``tunings`` are by how their variants begin, and may be replaced by bytes; ``code`` is the
    chunks. A section's entries are whole in it, but for what they have in common.
    """

    manifest: dict[str, Any]
    sections: dict[str, Any]
    tunings: dict[str, Any]
    code: bytes

    HEADER = struct.Struct("<8sQ32s")

    @classmethod
    def of(cls, content: bytes) -> Parts:
        end = cls.HEADER.size + cls.HEADER.unpack_from(content)[1]
        manifest, rest = json.loads(content[cls.HEADER.size : end]), content[end:]
        found: dict[str, dict[str, bytes]] = {"sections": {}, "tunings": {}}
        for name, texts in found.items():
            for stated in manifest[name]:
                of, offset, size, _ = stated.split()
                texts[of.removesuffix(":")] = rest[int(offset) :][: int(size)]
        tunings = {of: json.loads(text) for of, text in found["tunings"].items()}
        sections = {of: cls.section(text) for of, text in found["sections"].items()}
        return cls(manifest, sections, tunings, rest[: int(manifest["sections"][0].split()[1])])

    @classmethod
    def section(cls, text: bytes) -> dict[str, Any]:
        """A section's head, with entries in place of what it lists of each."""
        head, *own = map(json.loads, text.split(b"\n"))
        named = [{"variant": variant, "target": target} for variant, target in head["binaries"]]
        return {**head, "binaries": [{**n, **each} for n, each in zip(named, own, strict=True)]}

    @classmethod
    def lines(cls, document: Any) -> list[bytes]:
        """What it was before, if it still is one."""
        listed = document.get("binaries") if isinstance(document, dict) else None
        if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
            return [json.dumps(document).encode()]
        named = [[each.get("variant"), each.get("target")] for each in listed]
        own = [{k: v for k, v in e.items() if k not in ("variant", "target")} for e in listed]
        return [json.dumps(each).encode() for each in ({**document, "binaries": named}, *own)]

    @classmethod
    def flipped(cls, content: bytes, number: int = -1) -> bytes:
        """The file, with one bit another of one binary of its last section, in that section's last chunk."""
        parts = cls.of(content)
        document = list(parts.sections.values())[-1]
        whole = {**document["common"], **document["binaries"][number]}
        offset, size = document["chunks"][-1]
        packed = parts.code[offset:][:size]
        held = bytearray(chunks.decompress(packed, 1 << 30))
        held[whole["offset"] + whole["size"] - 1] ^= 1
        parts.code = parts.code[:offset] + chunks.compress(bytes(held))
        document["chunks"][-1] = [offset, len(parts.code) - offset]
        return parts.together()

    def together(self, **changed: bytes) -> bytes:
        """The file. ``changed`` is to stand for a section, if its kernel's name is the keyword."""
        rest, listed = self.code, dict[str, list[str]]()
        for name, documents in (("sections", self.sections), ("tunings", self.tunings)):
            listed[name] = []
            for of, document in documents.items():
                if isinstance(document, bytes):
                    text = document
                elif name == "tunings":
                    text = json.dumps(document).encode()
                else:
                    text = b"\n".join(self.lines(document))
                    text = changed.get(of.split(".")[1].split(":")[0], text)
                listed[name].append(f"{of}: {len(rest)} {len(text)} {digest(text)}")
                rest += text
        return self.sealed(json.dumps({**self.manifest, **listed}).encode(), rest)

    @classmethod
    def sealed(cls, manifest: bytes, rest: bytes, length: int | None = None) -> bytes:
        """A file with that manifest, whatever it says, and its digest."""
        length = len(manifest) if length is None else length
        return cls.HEADER.pack(archive.MAGIC, length, sha256(manifest).digest()) + manifest + rest


@pytest.fixture(scope="session")
def archive_parts() -> type[Parts]:
    """The class ``Parts``: an archive taken apart."""
    return Parts


@pytest.fixture(scope="session")
def stub_module(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The module tests/stub/driver.py, and the library that it built."""
    module = load(Path(__file__).parent / "stub" / "driver.py")
    if shutil.which(module.compiler()[0]) is None:
        pytest.skip("needs a C compiler")
    return module, module.build(tmp_path_factory.mktemp("stub"))


@pytest.fixture
def stub_driver(stub_module: tuple[Any, Path], tmp_path: Path) -> Any:
    """A CUDA driver that plays what it is told to; see ``Stub`` in tests/stub/driver.py."""
    module, library = stub_module
    return module.Stub(library, tmp_path)


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Processes that are the ranks of gloo groups."""
    pool = RankPool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()
