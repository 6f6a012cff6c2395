"""What was tuned on this machine: where it lies, what it is valid for, and that it is used."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from scan_registry.artifact.archive import Binary
from scan_registry.cache import tuned
from scan_registry.cli import main
from scan_registry.hardware.device import Device
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.tuning import Row, Tuning

Make = Callable[..., tuple[Binary, bytes]]
Describe = Callable[..., Device]
Capture = pytest.CaptureFixture[str]

KERNEL, OTHER = FAMILY.kernels[:2]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SCAN_REGISTRY_CACHE", str(tmp_path / "cache"))
    tuned.archive_of.cache_clear()
    return tmp_path / "cache"


def rows(ms: float, *times: float, date: str = "2026-01-31") -> Tuning:
    label = KERNEL.label(KERNEL.variants[0])
    return Tuning.of(
        "sm_90", "x", date, {"kind": [Row({"time": time}, {label: ms}) for time in times]}
    )


def test_where_nobody_may_look_nothing_was_tuned(
    a_device: Describe, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as in the home of another user, in a container."""
    look = os.stat

    def refused(path: Any, *others: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(str(folder)):
            raise PermissionError(13, "Permission denied", str(path))
        return look(path, *others, **options)

    monkeypatch.setattr(os, "stat", refused)
    with pytest.raises(PermissionError):
        os.stat(folder)
    assert tuned.archive_of(a_device()) is None


def test_what_is_published_is_found(a_device: Describe, a_binary: Make, folder: Path) -> None:
    device, contents = a_device(), a_binary(KERNEL.every[-1], "sm90")
    assert tuned.archive_of(device) is None
    published = tuned.publish(device, [contents], {KERNEL.head: rows(1.0, 8)}, "2026-01-31")
    result = tuned.archive_of(device)
    assert result is not None
    assert result.path == published.path
    assert result.path.is_relative_to(folder / "tuned")
    assert (result.binaries, result.read(contents[0])) == ((contents[0],), contents[1])
    assert result.tunings(KERNEL.head) == (rows(1.0, 8),)
    assert folder.stat().st_mode & 0o077 == 0
    (listed,) = tuned.tuned_contents()
    assert (listed.state, listed.gpu, listed.kernels) == ("current", device.name, (KERNEL.head,))


def test_it_is_for_one_gpu_one_version_and_these_sources(
    a_device: Describe, a_binary: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = a_device()
    tuned.publish(device, [a_binary()], {KERNEL.head: rows(1.0, 8)}, "2026-01-31")
    assert tuned.archive_of(a_device(name="Another")) is None
    for name, value in (("_sources", lambda: "others"), ("ROOT", Path("/nowhere"))):
        with monkeypatch.context() as patch:
            tuned._sources.cache_clear()
            patch.setattr(tuned, name, value)
            tuned.archive_of.cache_clear()
            assert tuned.archive_of(device) is None
            assert [tuned_content.state for tuned_content in tuned.tuned_contents()] == ["stale"]
        tuned._sources.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(tuned, "__version__", "9.9.9")
        tuned.archive_of.cache_clear()
        assert tuned.archive_of(device) is None
    tuned.archive_of.cache_clear()
    assert tuned.archive_of(device) is not None


def test_later_tuning_adds_to_what_is_there(a_device: Describe, a_binary: Make) -> None:
    device = a_device()
    first, second = (a_binary(variant, "sm90") for variant in KERNEL.every[:2])
    other = a_binary(OTHER.every[0], "sm90")
    tuned.publish(
        device, [first, other], {KERNEL.head: rows(1.0, 8, 16), OTHER.head: rows(5.0, 8)}, "a"
    )
    newer = rows(2.0, 16, 32, date="2026-02-01")
    result = tuned.publish(device, [second], {KERNEL.head: newer}, "b")
    assert set(result.binaries) == {first[0], second[0], other[0]}
    assert all(result.read(binary) for binary in result.binaries)
    (tuning,) = result.tunings(KERNEL.head)
    times = {row.sizes["time"]: [*row.times.values()] for row in tuning.rows("kind")}
    assert (times, tuning.date) == ({8: [1.0], 16: [2.0], 32: [2.0]}, "2026-02-01")
    assert result.tunings(OTHER.head) == (rows(5.0, 8),)


def test_a_damaged_file_is_told_and_written_anew(
    a_device: Describe, a_binary: Make, capsys: Capture, archive_parts: Any
) -> None:
    device, contents = a_device(), a_binary(KERNEL.every[0], "sm90")
    path = tuned.publish(device, [contents], {KERNEL.head: rows(1.0, 8)}, "a").path
    path.write_bytes(archive_parts.flipped(path.read_bytes()))
    assert main(["cache", "list"]) == 1
    assert f"damaged: {path}" in capsys.readouterr().out
    result = tuned.publish(device, [contents], {KERNEL.head: rows(2.0, 16)}, "b")
    assert [row.sizes for row in result.tunings(KERNEL.head)[0].rows("kind")] == [{"time": 16}]
    path.write_bytes(b"not at all")
    tuned.archive_of.cache_clear()
    assert tuned.archive_of(device) is None


def test_a_folder_that_others_can_write_to_is_refused(
    a_device: Describe, a_binary: Make, folder: Path
) -> None:
    device, contents = a_device(), a_binary(KERNEL.every[0], "sm90")
    tuned.publish(device, [contents], {KERNEL.head: rows(1.0, 8)}, "a")
    (folder / "tuned").chmod(0o777)
    tuned.archive_of.cache_clear()
    assert tuned.archive_of(device) is None
    with pytest.raises(OSError, match="others can write to it"):
        tuned.publish(device, [contents], {KERNEL.head: rows(1.0, 8)}, "a")
    assert [tuned_content.state for tuned_content in tuned.tuned_contents()] == ["damaged"]


def schema(name: str) -> Any:
    return json.loads(
        files("scan_registry").joinpath("schemas", f"{name}.json").read_text(encoding="utf-8")
    )


def test_the_cache_command_knows_it(
    a_device: Describe, a_binary: Make, capsys: Capture, folder: Path
) -> None:
    entry = a_binary(KERNEL.every[0], "sm90")
    tuned.publish(a_device(), [entry], {KERNEL.head: rows(1.0, 8)}, "2026-01-31")
    assert main(["cache", "list"]) == 0
    out = capsys.readouterr().out
    assert "Imaginary 9.0" in out
    assert "2026-01-31" in out
    assert main(["cache", "list", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, schema("cache-list"))
    assert document["entries"] == []
    (listed,) = document["tuned"]
    assert (listed["gpu"], listed["binaries"], listed["state"]) == ("Imaginary 9.0", 1, "current")
    assert main(["cache", "clear", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, schema("cache-clear"))
    assert (document["entries"], document["tuned"]) == (0, 1)
    assert document["bytes"] > 0
    assert [*tuned.tuned_contents()] == []
