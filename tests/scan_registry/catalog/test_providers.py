"""Packages that bring archives: several of them, those that do not fit, and those that are broken."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from scan_registry.artifact import archive
from scan_registry.artifact.archive import Binary
from scan_registry.catalog import providers
from scan_registry.catalog.inventory import Catalogue, catalogue, survey
from scan_registry.catalog.providers import CORE, ProviderError
from scan_registry.cli import main
from scan_registry.dispatch.fit import Tier, Toolchain
from scan_registry.dispatch.select import Decision, System, select
from scan_registry.hardware.device import Device
from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.model import Problem

Make = Callable[..., tuple[Binary, bytes]]
Provide = Callable[..., Path]

SAMPLE = next(s for s in FAMILY.samples if s.problem.kernel == "time_last_forward")
FITS = f"=={version(CORE)}"
IMPORTED = "raise RuntimeError('the provider was imported')\n"


@pytest.fixture(autouse=True)
def _fresh_catalogue() -> Iterator[None]:
    """What other tests found installed is not what these find, and the reverse."""
    catalogue.cache_clear()
    yield
    catalogue.cache_clear()


@pytest.fixture
def provide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Provide:
    """Installs a provider in a folder of its own, first on the import path, and returns its package's
    folder; ``manifest`` is written as it is."""

    def make(
        name: str,
        *contents: tuple[str, list[tuple[Binary, bytes]]],
        manifest: Any = None,
        point: str | None = None,
        number: str = "1.2.3",
        denied: tuple[dict[str, str], ...] = (),
    ) -> Path:
        module = f"archives_of_{name.lower().replace('-', '_')}"
        place = tmp_path / f"{name}-{number}"
        package = place / module
        (package / "archives").mkdir(parents=True)
        (package / "__init__.py").write_text(IMPORTED, encoding="utf-8")
        if manifest is None:
            manifest = {"schema": 1, "core": FITS, "denied": denied}
        if not isinstance(manifest, bytes):
            manifest = json.dumps(manifest).encode()
        (package / "provider.json").write_bytes(manifest)
        for label, binaries in contents:
            path = package / "archives" / f"{label}{archive.SUFFIX}"
            archive.write(path, Target.parse(label), binaries, {"version": number})
        information = place / f"{name.replace('-', '_')}-{number}.dist-info"
        information.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n"
        (information / "METADATA").write_text(metadata, encoding="utf-8")
        entry = f"[{providers.GROUP}]\n{name} = {point or module}\n"
        (information / "entry_points.txt").write_text(entry, encoding="utf-8")
        monkeypatch.syspath_prepend(str(place))
        return package

    return make


def all_cuda(a_binary: Make, label: str, word: str = "") -> list[tuple[Binary, bytes]]:
    """A made-up binary for each CUDA variant of machine code; ``word`` makes the bytes other ones."""
    target = Target.parse(label)
    return [
        a_binary(variant, target, content=f"{word}{variant}".encode())
        for kernel in FAMILY.kernels
        if kernel.language == "cuda"
        for variant in kernel.variants
        if kernel.rules.serves(variant.statics, target)
    ]


def decide(
    device: Device, result: Catalogue, problem: Problem = SAMPLE.problem, **more: Any
) -> Decision:
    there = System(device, result.archives, denied=result.denied, **more)
    return select(there, FAMILY, problem)


# --- Side by side -----------------------------------------------------------------------------


def test_several_side_by_side(provide: Provide, a_binary: Make) -> None:
    """By architecture; this package first among providers, then by name."""
    provide("b", ("sm103", all_cuda(a_binary, "sm103", "b")))
    provide("a", ("sm103", all_cuda(a_binary, "sm103", "a")), ("sm75", all_cuda(a_binary, "sm75")))
    provide("empty")
    result = catalogue()
    assert [provider.name for provider in result.providers] == [CORE, "a", "b", "empty"]
    made_up = [(a.arch.label, a.provider) for a in result.archives if a.provider != CORE]
    assert made_up == [("sm75", "a"), ("sm103", "a"), ("sm103", "b")]
    assert [a.arch for a in result.archives] == sorted(a.arch for a in result.archives)
    assert len(list(result)) == sum(len(a.binaries) for a in result.archives)


def test_of_equals_the_first_provider_wins(
    provide: Provide, a_binary: Make, a_device: Callable[..., Device]
) -> None:
    for name in ("b", "a"):
        provide(name, ("sm103", all_cuda(a_binary, "sm103", name)))
    decision = decide(a_device((10, 3)), catalogue())
    winner = decision.taken()
    assert winner.archive is not None
    assert (winner.tier, winner.archive.provider) == (Tier.EXACT, "a")
    assert (winner.subject, "a has it, too") in [(r.subject, r.reason) for r in decision.rejected]


def test_names_are_normalized(provide: Provide) -> None:
    provide("My_Archives")
    assert "my-archives" in [provider.name for provider in providers.installed()[0]]


def test_a_providers_code_is_never_imported(
    provide: Provide, a_binary: Make, a_device: Callable[..., Device]
) -> None:
    package = provide("a", ("sm103", all_cuda(a_binary, "sm103")))
    result = catalogue()
    for contents, binary in result:
        if contents.provider == "a":
            contents.read(binary)
    assert decide(a_device((10, 3)), result).taken().archive is not None
    assert package.name not in sys.modules
    with pytest.raises(RuntimeError, match="the provider was imported"):
        __import__(package.name)


# --- Those that do not fit --------------------------------------------------------------------


@pytest.mark.parametrize("core", [">=900", "==0.0.1.*,!=0.0.1"])
def test_another_range_is_one_error_with_both_versions(provide: Provide, core: str) -> None:
    provide("fine")
    provide("other", manifest={"schema": 1, "core": core})
    with pytest.raises(ProviderError) as caught:
        catalogue()
    for word in ("other 1.2.3", f"{CORE} {core}", f"{CORE} {version(CORE)}", "pip install"):
        assert word in str(caught.value)


@pytest.mark.parametrize("number", ["0.0.9", "900.1.dev3"])
def test_the_core_has_a_range_for_this_projects_own_providers(
    provide: Provide, number: str
) -> None:
    """The provider would go with any core; this core does not go with it."""
    provide("scan-registry-sm103", manifest={"schema": 1, "core": ">=0"}, number=number)
    with pytest.raises(ProviderError) as caught:
        catalogue()
    own = version(CORE)
    accepted = providers.release_line(own)
    assert str(caught.value) == (
        f"{CORE} {own} goes with scan-registry-sm103 {accepted}, but scan-registry-sm103 {number} "
        f"is installed; `pip install 'scan-registry-sm103{accepted}'`"
    )


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ("0.1.0", ">=0.1.dev0,<0.2"),
        ("0.1.3+cu129", ">=0.1.dev0,<0.2"),
        ("0.2.0rc1", ">=0.2.dev0,<0.3"),
        ("1.4.2", ">=1.dev0,<2"),
    ],
)
def test_a_release_line(own: str, expected: str) -> None:
    assert providers.release_line(own) == expected


def test_a_misfit_is_one_line_on_the_command_line(
    provide: Provide, capsys: pytest.CaptureFixture[str]
) -> None:
    provide("other", manifest={"schema": 1, "core": ">=900"})
    assert main(["inspect"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("scan-registry: error: other 1.2.3 is made for ")
    assert printed.err.count("\n") == 1


# --- Those that are broken --------------------------------------------------------------------

DENIED = {"schema": 1, "core": ">=0"}
WHY = {"reason": "it races"}
DIGITS = "accepted are 64 hexadecimal digits in lower case"


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe{}", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        ({}, "schema None"),
        ({"schema": 2, "core": ">=0"}, "schema 2; this version reads 1"),
        ({"schema": 1}, "core is None"),
        ({"schema": 1, "core": "0.1 or so"}, "core is '0.1 or so', not a range"),
        ({"schema": 1, "core": ""}, "core is '', not a range of versions such as >=0.1,<0.2"),
        ({**DENIED, "denied": {}}, "denied is {}, not a list"),
        ({**DENIED, "denied": [{"reason": "wrong"}]}, "denied has {'reason': 'wrong'}"),
        ({**DENIED, "denied": [{"variant": "a", **WHY}]}, "'a' is not a variant; expected"),
        ({**DENIED, "denied": [{"sha256": 64 * "A", **WHY}]}, DIGITS),
        ({**DENIED, "denied": [{"sha256": 64 * "0", "variant": "a", **WHY}]}, "either sha256 or"),
    ],
)
def test_a_broken_manifest_is_named(provide: Provide, manifest: Any, words: str) -> None:
    package = provide("broken", manifest=manifest)
    with pytest.raises(ProviderError) as caught:
        catalogue()
    assert str(caught.value).startswith(f"broken 1.2.3: {package / 'provider.json'}")
    assert words in str(caught.value)


def test_each_broken_provider_is_named_and_the_others_are_there(provide: Provide) -> None:
    provide("a", manifest=b"")
    provide("b")
    provide("c", manifest={"schema": 1, "core": ">=900"})
    provide("d", point="no_such_package_of_archives")
    result, problems = survey()
    assert [provider.name for provider in result.providers] == [CORE, "b"]
    assert sorted(str(problem)[:7] for problem in problems) == ["a 1.2.3", "c 1.2.3", "d 1.2.3"]
    with pytest.raises(ProviderError, match=str(problems[0])[:8]):
        catalogue()


def test_entry_points_that_cannot_be_read(provide: Provide) -> None:
    place = provide("odd").parent
    path = place / "odd-1.2.3.dist-info" / "entry_points.txt"
    path.write_text(f"[{providers.GROUP}]\nodd\n", encoding="utf-8")
    result, (problem,) = survey()
    assert [provider.name for provider in result.providers] == [CORE]
    assert str(problem).startswith(f"odd 1.2.3: {path} cannot be read: ")


def test_a_file_that_is_named_after_no_architecture(
    provide: Provide, a_binary: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is passed over, and named."""
    package = provide("untidy", ("sm103", all_cuda(a_binary, "sm103")))
    stray = package / "archives" / "backup.scanreg"
    stray.write_bytes((package / "archives" / "sm103.scanreg").read_bytes())
    result = catalogue()
    assert [a.arch.label for a in result.archives if a.provider == "untidy"] == ["sm103"]
    assert result.ignored == (f"{stray} {providers.MISNAMED}",)
    assert main(["inspect", "--arch", "sm103"]) == 0
    assert capsys.readouterr().err == f"scan-registry: warning: {stray} {providers.MISNAMED}\n"


# --- What is denied ---------------------------------------------------------------------------


def test_any_provider_can_deny_a_binary(
    provide: Provide, a_binary: Make, a_device: Callable[..., Device]
) -> None:
    """By its digest: the variant itself stays, here from another provider."""
    device = a_device((10, 3))
    provide("a", ("sm103", all_cuda(a_binary, "sm103", "a")))
    first = decide(device, catalogue()).taken()
    assert first.binary is not None
    sha256, variant = first.binary.sha256, first.variant

    catalogue.cache_clear()
    provide("b", ("sm103", all_cuda(a_binary, "sm103", "b")))
    provide("warning", denied=({"sha256": sha256, "reason": "loses the last element"},))
    decision = decide(device, catalogue())
    winner = decision.taken()
    assert winner.archive is not None
    assert (winner.variant, winner.archive.provider) == (variant, "b")
    lost = [r.reason for r in decision.rejected if r.subject == first.subject]
    assert lost == ["denied: loses the last element (warning 1.2.3)"]


def test_a_denied_variant_runs_from_nowhere(
    provide: Provide, a_binary: Make, a_device: Callable[..., Device]
) -> None:
    """Neither from any archive nor compiled here; the next best takes its place."""
    device = a_device((10, 3))
    for name in ("a", "b"):
        provide(name, ("sm103", all_cuda(a_binary, "sm103", name)))
    here = {"cuda": Toolchain("nvrtc 12.9.86", (12, 9))}
    first = decide(device, catalogue(), toolchains=here).taken()

    catalogue.cache_clear()
    provide("warning", denied=({"variant": str(first.variant), "reason": "hangs"},))
    decision = decide(device, catalogue(), toolchains=here)
    assert decision.taken().tier == Tier.EXACT
    assert decision.taken().variant != first.variant
    lost = [r.reason for r in decision.rejected if r.subject == first.subject]
    reason = "denied: hangs (warning 1.2.3)"
    assert lost == [reason] * 3  # a's, b's, and the one that could be compiled

    compiled = decide(device, Catalogue((), catalogue().providers), toolchains=here)
    assert compiled.taken().tier == Tier.JIT
    assert compiled.taken().variant != first.variant


# --- The path ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "words"),
    [
        ("no_such_package_of_archives", "'no_such_package_of_archives'"),
        ("__main__", "'__main__'"),
        ("scan_registry.artifact.archive", "must name a top-level package"),
        ("scan_registry:catalogue", "must name a top-level package"),
    ],
)
def test_an_entry_point_names_a_package_that_is_there(
    provide: Provide, point: str, words: str
) -> None:
    (provide("without_a_manifest") / "provider.json").unlink()
    provide("odd", point=point)
    _, problems = survey()
    missing, odd = sorted(map(str, problems), reverse=True)
    assert missing.startswith("without-a-manifest 1.2.3: ")
    assert "provider.json: No such file or directory" in missing
    assert odd.startswith("odd 1.2.3: ")
    assert words in odd
