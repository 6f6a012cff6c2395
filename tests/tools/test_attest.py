"""The release gate of ``tools/attest.py``, on attestations made up for it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from scan_registry.catalog.inventory import catalogue
from scan_registry.hardware.target import Target


@pytest.fixture(scope="module")
def attest(load_tool: Callable[[str], ModuleType]) -> ModuleType:
    return load_tool("attest")


def record(sha256: str, variant: str, target: str, error: float) -> dict[str, Any]:
    return {
        "sha256": sha256,
        "variant": variant,
        "target": target,
        "error": error,
        "tolerance": 1e-6,
        "cases": 1,
    }


@pytest.fixture
def attested(tmp_path: Path) -> Callable[..., Path]:
    """A folder in which all that must be GPU-tested is, but for the changes asked for."""

    def write(gpu: str = "gpu", error: float = 1e-7, extra: str = "", skip: int = 0) -> Path:
        needed = [
            record(binary.sha256, str(binary.variant), str(binary.target), error)
            for archive, binary in catalogue()
            if archive.arch.label in ("sm90", "ptx80")
        ][skip:]
        if extra:
            needed.append(record(extra, "a.b:cuda:c=d", "compute_80", error))
        path = tmp_path / "linear_scan" / "attestations" / f"{gpu}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps({"gpu": gpu, "date": "2026-01-01", "binaries": needed}), encoding="utf-8"
        )
        return tmp_path

    return write


def test_all_gpu_tested(attest: ModuleType, attested: Callable[..., Path]) -> None:
    assert attest.check(attested()) == 0


@pytest.mark.parametrize(
    ("change", "word"),
    [({"skip": 1}, "missing: "), ({"extra": "0" * 64}, "stale: "), ({"error": 1e-5}, "failed: ")],
)
def test_gate(
    attest: ModuleType,
    attested: Callable[..., Path],
    change: dict[str, Any],
    word: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert attest.check(attested(**change)) == 1
    assert word in capsys.readouterr().out


def test_pruning_drops_what_is_not_installed(
    attest: ModuleType, attested: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = attested(extra="0" * 64)
    alone = folder / "gone" / "attestations" / "gpu.json"
    alone.parent.mkdir(parents=True)
    content = {
        "gpu": "a",
        "date": "2026-01-01",
        "binaries": [record("1" * 64, "a.b", "compute_80", 0)],
    }
    alone.write_text(json.dumps(content), encoding="utf-8")
    assert attest.check(folder) == 1
    assert attest.prune(folder) == 0
    assert "gone/attestations/gpu.json: 1 of 1 dropped" in capsys.readouterr().out
    assert not alone.exists()
    assert attest.check(folder) == 0


def test_what_no_installed_archive_could_hold_stays(
    attest: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ptx, digest = Target.parse("ptx80"), "0" * 64
    binary = SimpleNamespace(sha256="1" * 64)
    monkeypatch.setattr(attest, "catalogue", lambda: [(SimpleNamespace(arch=ptx), binary)])
    is_stale = attest.staleness()
    assert is_stale(digest, "compute_80")
    assert not is_stale(binary.sha256, "compute_80")
    assert not is_stale(digest, "sm_80")
    path = tmp_path / "linear_scan" / "attestations" / "gpu.json"
    path.parent.mkdir(parents=True)
    records = [record(digest, "a.b:cuda:c=d", target, 0) for target in ("compute_80", "sm_90")]
    content = {"gpu": "a", "date": "2026-01-01", "binaries": records}
    path.write_text(json.dumps(content), encoding="utf-8")
    assert attest.prune(tmp_path) == 0
    assert json.loads(path.read_text(encoding="utf-8"))["binaries"] == records[1:]


def test_the_worst_of_two_gpus_stands(attest: ModuleType, attested: Callable[..., Path]) -> None:
    attested(gpu="a", error=1e-5)
    assert attest.check(attested(gpu="b")) == 1


def test_a_report_is_one_file_that_another_machine_takes(
    attest: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A GPU is made up: one binary of each family that it runs, and one that the other machine has not."""
    ran = {"gpu": "NVIDIA GeForce RTX 4090", "driver": "13.0", "torch": "2.11", "version": "0.1.0"}
    first = {b.variant.family: b for _, b in reversed(list(catalogue()))}

    def attested_by_a_gpu(family: Any, known: Any) -> list[dict[str, Any]]:
        binary = first[family.name]
        return [
            record(binary.sha256, "said:cuda:dtype=float32,a=1", "sm_89", 1e-9),
            record("f" * 64, "other:cuda:dtype=float32,a=1", "sm_89", 1e-9),
        ]

    monkeypatch.setattr(attest, "circumstances", lambda: {**ran, "date": "2026-01-01"})
    monkeypatch.setattr(attest, "attest", attested_by_a_gpu)
    assert attest.report(list(first), tmp_path) == 0
    sent = tmp_path / "attestation-geforce-rtx-4090.json"
    assert f"{sent}: attach this file to an issue" in capsys.readouterr().out

    assert attest.accept(sent, tmp_path) == 0
    taken = attest.recorded(tmp_path / "linear_scan" / "attestations" / "geforce-rtx-4090.json")
    binary = first["linear_scan"]
    assert taken.keys() == {binary.sha256}
    # What a record says of the binary is this machine's word, not the sender's.
    assert taken[binary.sha256]["variant"] == str(binary.variant)
    assert f"{len(first)} of {2 * len(first)} records taken" in capsys.readouterr().out


def report_of(attest: ModuleType, path: Path, family: str, **changed: Any) -> tuple[Path, str]:
    """A report of one binary of a family, and the binary's digest."""
    binary = next(b for _, b in catalogue() if b.variant.family == family)
    ran = dict.fromkeys(("gpu", "driver", "torch", "version", "date"), "x")
    records = [record(binary.sha256, "a:cuda:dtype=float32,b=1", "sm_89", 1e-9) | changed]
    content = {**ran, "shapes": {family: attest.shapes(family)}, "binaries": records}
    path.write_text(json.dumps(content), encoding="utf-8")
    return path, binary.sha256


def test_a_report_is_added_to_what_is_known_of_a_gpu(attest: ModuleType, tmp_path: Path) -> None:
    sent, digest = report_of(attest, tmp_path / "sent.json", "roofline")
    file = attest.place("roofline", "x", tmp_path)
    attest.write(file, "roofline", {"gpu": "x"}, [record("e" * 64, "b", "sm_89", 0)])
    assert attest.accept(sent, tmp_path) == 0
    assert attest.recorded(file).keys() == {"e" * 64, digest}


@pytest.mark.parametrize("changed", [{"error": math.inf}, {"error": -1.0}, {"cases": 0}], ids=str)
def test_a_report_of_no_case_is_not_taken(
    attest: ModuleType, tmp_path: Path, changed: dict[str, Any]
) -> None:
    sent, _ = report_of(attest, tmp_path / "sent.json", "roofline", **changed)
    assert attest.accept(sent, tmp_path) == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"gpu": 1, "binaries": [{}]}'])
def test_what_is_no_report_is_refused(
    attest: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    sent = tmp_path / "sent.json"
    sent.write_text(text, encoding="utf-8")
    assert attest.accept(sent, tmp_path) == 2
    assert f"{sent} is not what --report writes" in capsys.readouterr().err


def test_a_report_of_other_binaries_is_not_taken(attest: ModuleType, tmp_path: Path) -> None:
    sent = tmp_path / "sent.json"
    ran = dict.fromkeys(("gpu", "driver", "torch", "version", "date"), "x")
    records = [record("f" * 64, "a:cuda:dtype=float32,b=1", "sm_89", 0)]
    sent.write_text(json.dumps({**ran, "shapes": {}, "binaries": records}), encoding="utf-8")
    assert attest.accept(sent, tmp_path) == 1
    assert list(tmp_path.rglob("attestations")) == []
