"""The catalogue: order, contents, and which binaries count as GPU-tested."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attesting import write_attestations

import scan_registry.kernels
from scan_registry.artifact.archive import Archive, ArchiveError, Binary
from scan_registry.catalog import inventory, providers
from scan_registry.catalog.inventory import Attestation, Catalogue, catalogue, read_attestations
from scan_registry.catalog.providers import Provider
from scan_registry.kernels import families, family
from scan_registry.kernels.linear_scan.spec import FAMILY

Factory = Callable[..., Archive]
Make = Callable[..., tuple[Binary, bytes]]

VARIANTS = FAMILY.variants()[:3]


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty stand-in for the folder of the kernel families."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    monkeypatch.setattr(inventory, "ROOT", folder)
    return folder


def test_iteration_gives_every_binary_in_order(archive_factory: Factory) -> None:
    archives = tuple(archive_factory(arch, variants=VARIANTS) for arch in ("sm80", "sm90"))
    pairs = [(archive.path.stem, binary.variant) for archive, binary in Catalogue(archives)]
    assert pairs == [(label, v) for label in ("sm80", "sm90") for v in VARIANTS]


def test_gpu_tested_means_attested_within_tolerance(
    archive_factory: Factory, a_binary: Make, kernels: Path
) -> None:
    good, bad, unknown = (a_binary(variant)[0] for variant in VARIANTS)
    result = Catalogue((archive_factory("sm90", variants=VARIANTS),))
    write_attestations(kernels, "a", good)
    write_attestations(kernels, "b", bad, error=2e-6)
    assert result.is_gpu_tested(good)
    assert not result.is_gpu_tested(bad)
    assert not result.is_gpu_tested(unknown)
    assert result.attestations[good.sha256] == Attestation(
        sha256=good.sha256,
        variant=str(good.variant),
        target="sm_90",
        error=1e-7,
        tolerance=1e-6,
        cases=38,
        gpu="Imaginary H",
        date="2026-01-31",
    )
    assert not result.attestations[bad.sha256].passed
    assert unknown.sha256 not in result.attestations


def test_an_error_of_exactly_the_tolerance_passes() -> None:
    common: dict[str, Any] = dict.fromkeys(("sha256", "variant", "target", "gpu", "date"), "")
    common["cases"] = 1
    assert Attestation(error=1e-6, tolerance=1e-6, **common).passed
    assert not Attestation(error=float("nan"), tolerance=1e-6, **common).passed
    assert not Attestation(error=float("inf"), tolerance=1e-6, **common).passed


def test_the_worst_of_several_gpus_stands(a_binary: Make, kernels: Path) -> None:
    (binary, _) = a_binary(VARIANTS[0])
    write_attestations(kernels, "a", binary, gpu="first", error=2e-7)
    write_attestations(kernels, "b", binary, gpu="second", error=5e-6)
    write_attestations(kernels, "c", binary, gpu="third", error=3e-7)
    result = Catalogue(())
    assert result.attestations[binary.sha256].gpu == "second"
    assert not result.is_gpu_tested(binary)


def test_another_digest_is_another_binary(a_binary: Make, kernels: Path) -> None:
    write_attestations(kernels, "a", a_binary(VARIANTS[0], content=b"measured")[0])
    assert not Catalogue(()).is_gpu_tested(a_binary(VARIANTS[0], content=b"built again")[0])


def test_what_is_installed_is_sorted_and_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Archives are found in a provider's folder; damaged ones are found too, and read later."""
    (tmp_path / "archives").mkdir()
    for label in ("sm120", "sm90", "sm100", "ptx80", "sm80"):
        (tmp_path / "archives" / f"{label}.scanreg").write_bytes(b"garbage")
    (tmp_path / "archives" / "README").write_text("not an archive", encoding="utf-8")
    strays = [tmp_path / "archives" / f"{name}.scanreg" for name in ("backup", "sm90 (copy)")]
    for stray in strays:
        stray.write_bytes(b"garbage")
    own = Provider("scan-registry", "0.1.0", tmp_path, ">=0.1", {})
    monkeypatch.setattr(providers, "installed", lambda: ((own,), ()))
    result = catalogue.__wrapped__()
    assert result.providers == (own,)
    assert [a.arch.label for a in result.archives] == ["ptx80", "sm80", "sm90", "sm100", "sm120"]
    assert result.ignored == tuple(
        f"{stray} is not used: it is named after no architecture, as sm90.scanreg is"
        for stray in strays
    )
    with pytest.raises(ArchiveError):
        list(result)


def test_the_installed_archives_are_intact_and_well_formed() -> None:
    readers = {archive.path: archive.reader() for archive in catalogue().archives}
    for archive, binary in catalogue():
        content = readers[archive.path](binary)
        assert content[:4] == b"\x7fELF" or (binary.format == "ptx" and b".version" in content)
        assert binary.target.is_ptx == archive.arch.is_ptx == (binary.format == "ptx")
        assert binary.target.capability == archive.arch.capability
        variant = binary.variant
        assert family(variant.family).kernel(variant.kernel, variant.language).allows(variant)


def test_the_installed_archives_are_in_the_order_of_the_specs() -> None:
    """A kernel's variants by dtype, and each once."""
    kernels = [kernel for family in families().values() for kernel in family.kernels]
    heads = [kernel.head for kernel in kernels]
    for archive in catalogue().archives:
        entries = [binary.variant for binary in archive.binaries]
        assert len(set(entries)) == len(entries)
        assert entries == sorted(entries, key=lambda variant: heads.index(variant.head))
        stems = list(dict.fromkeys(variant.stem for variant in entries))
        assert entries == sorted(entries, key=lambda variant: stems.index(variant.stem))


def test_the_installed_attestations_are_well_formed() -> None:
    for path in scan_registry.kernels.ROOT.glob("*/attestations/*.json"):
        for attestation in read_attestations(path):
            assert len(attestation.sha256) == 64
            assert attestation.cases > 0
            assert attestation.tolerance > 0
