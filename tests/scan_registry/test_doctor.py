"""``doctor``: what it finds on imaginary systems and installations, and what it advises."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from scan_registry import archive, driver, policy, providers
from scan_registry.archive import Archive, Binary
from scan_registry.cache import Cache
from scan_registry.cli import doctor as command
from scan_registry.cli import main
from scan_registry.device import Device
from scan_registry.doctor import Finding, condensed, coverage, lacks
from scan_registry.fit import Rung, Toolchain
from scan_registry.inventory import catalogue
from scan_registry.kernels import families
from scan_registry.kernels.linear_scan.spec import FAMILY as SHIPPED
from scan_registry.kernels.model import Variant
from scan_registry.kernels.tuning import Row, Tuning
from scan_registry.providers import Provider, ProviderError
from scan_registry.select import System
from scan_registry.target import Target

Factory = Callable[..., Archive]
Make = Callable[..., tuple[Binary, bytes]]
Describe = Callable[..., Device]
Capture = pytest.CaptureFixture[str]
Provide = Callable[..., Provider]

SCHEMA = json.loads(files("scan_registry").joinpath("schemas", "doctor.json").read_text())
#: Whatever tables there are.
FAMILY = replace(SHIPPED, kernels=tuple(replace(k, tunings=tuple) for k in SHIPPED.kernels))
FAMILIES = {FAMILY.name: FAMILY}
KERNELS = {kernel.name for kernel in FAMILY.kernels}
#: What there is machine code of.
EVERY = tuple(
    variant
    for kernel in FAMILY.kernels
    for variant in kernel.variants
    if kernel.serves(variant.statics, Target((9, 0)))
)
#: What a wheel holds, or would without tables.
HELD = (
    *EVERY,
    *(v for name, other in families().items() if name != FAMILY.name for v in other.variants()),
)
CUDA = [variant for variant in EVERY if variant.language == "cuda"]
#: Those that solve one of the problems that are asked about.
SOLVING = [
    variant
    for variant in EVERY
    if any(
        sample.problem.kernel == variant.kernel
        and not FAMILY.kernel(variant.kernel, variant.language).accepts(variant, sample.problem)
        for sample in FAMILY.samples
    )
]
SOLVING_CUDA = [variant for variant in SOLVING if variant.language == "cuda"]
NVRTC = Toolchain("nvrtc 12.9.86", (12, 9))
MISSING = {"cuda": "NVRTC is not installed", "triton": "Triton is not installed"}


def findings(there: System, lowest: Rung = Rung.REFERENCE) -> list[Finding]:
    return list(lacks(coverage(there, FAMILIES, lowest), there, FAMILIES, lowest))


def only(there: System, lowest: Rung = Rung.REFERENCE, severity: str | None = None) -> Finding:
    """The one finding, of a severity if that is given."""
    (found,) = [f for f in findings(there, lowest) if severity in (None, f.severity)]
    return found


def rungs(there: System, backend: str, lowest: Rung = Rung.REFERENCE) -> set[str]:
    return {str(a.rungs.get(backend)) for a in coverage(there, FAMILIES, lowest).answers}


# --- What runs --------------------------------------------------------------------------------


def test_every_sample_is_asked_about(archive_factory: Factory, a_device: Describe) -> None:
    there = System(a_device(), (archive_factory("sm90", variants=FAMILY.variants()),))
    found = coverage(there, FAMILIES, Rung.REFERENCE)
    assert {answer.kernel for answer in found.answers} == KERNELS
    asked = [(a.family, a.kernel, a.dtype, a.access) for a in found.answers]
    assert len(set(asked)) == len(asked) == len(FAMILY.samples)
    for answer in found.answers:
        assert answer.rungs == dict.fromkeys(("auto", "cuda", "triton"), Rung.EXACT)
    assert findings(there) == []


def test_a_language_that_is_missing(archive_factory: Factory, a_device: Describe) -> None:
    there = System(a_device(), (archive_factory("sm90"),), MISSING)
    assert (rungs(there, "auto"), rungs(there, "triton")) == ({"exact"}, {"None"})
    found = only(there)
    assert found.severity == "warning"
    assert 'with backend="triton"' in found.text
    assert "every kernel" in found.text
    ptx = "`pip install scan-registry-ptx80`"
    assert found.remedies == (ptx, "Triton is not installed")
    assert found.reasons[-1] == "triton compiled here: Triton is not installed"


def test_a_kernel_without_a_language_has_no_answer_in_it(a_device: Describe) -> None:
    family = replace(FAMILY, kernels=tuple(k for k in FAMILY.kernels if k.language == "cuda"))
    found = coverage(System(a_device()), {"linear_scan": family}, Rung.REFERENCE)
    assert {tuple(answer.rungs) for answer in found.answers} == {("auto", "cuda")}


# --- What would help --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("archs", "capability", "severity", "rung", "remedies"),
    [
        (["sm120", "ptx80"], (12, 1), None, "same-major", []),
        (["sm90", "ptx80"], (12, 1), "note", "ptx", ["built for sm121"]),
        (["sm86", "ptx80"], (8, 7), "note", "ptx", ["built for sm87"]),
        (["sm90", "ptx80"], (13, 0), "note", "ptx", []),
        (["sm90"], (13, 0), "error", "reference", ["-ptx80`", *MISSING.values()]),
        (
            ["sm90"],
            (12, 0),
            "error",
            "reference",
            ["-sm120`", "-ptx80`", *MISSING.values()],
        ),
        (["sm90", "ptx80"], (7, 5), "error", "reference", ["8.0 or later"]),
    ],
)
def test_wheels(
    archive_factory: Factory,
    a_device: Describe,
    archs: list[str],
    capability: tuple[int, int],
    severity: str | None,
    rung: str,
    remedies: list[str],
) -> None:
    archives = tuple(archive_factory(arch, variants=FAMILY.variants()) for arch in archs)
    there = System(a_device(capability), archives, MISSING)
    assert rungs(there, "auto") == {rung}
    if severity is None:
        assert findings(there) == []
        return
    found = only(there, severity=severity)
    assert found.about == "Imaginary {0}.{1} (sm_{0}{1})".format(*capability)
    assert "every kernel" in found.text
    assert len(found.remedies) == len(remedies)
    for given, expected in zip(found.remedies, remedies, strict=True):
        assert given.endswith(expected)


def test_a_driver_that_is_too_old_for_the_ptx(archive_factory: Factory, a_device: Describe) -> None:
    there = System(a_device((8, 7), driver=(12, 4)), (archive_factory("ptx80"),), MISSING)
    assert rungs(there, "auto") == {"reference"}
    found = only(there, severity="error")
    assert found.remedies[0] == "install driver 575 or later, for CUDA 12.9"
    assert "falls to plain torch (reference): every kernel" in found.text
    assert (
        f"{len(SOLVING_CUDA)} variants for compute_80: PTX ISA 8.8 for compute_80 needs a driver for CUDA 12.9; "
        "this one supports 12.4"
    ) in found.reasons
    enough = replace(there, device=a_device((8, 7), driver=(12, 9)))
    assert rungs(enough, "auto") == {"ptx"}
    assert not any("driver" in remedy for remedy in only(enough, severity="note").remedies)


def test_the_oldest_driver_that_helps_is_named(
    archive_factory: Factory, a_device: Describe, a_binary: Make
) -> None:
    binaries = [
        a_binary(variant, "ptx80", oldest_driver=(12, 6) if number % 2 else (12, 5))
        for number, variant in enumerate(CUDA)
    ]
    device = a_device(driver=(12, 4))
    there = System(device, (archive_factory("ptx80", binaries),))
    assert only(there, severity="error").remedies[0] == "install driver 560 or later, for CUDA 12.6"
    unheard_of = [a_binary(variant, "ptx80", oldest_driver=(99, 1)) for variant in CUDA]
    there = System(device, (archive_factory("ptx80", unheard_of),))
    assert only(there, severity="error").remedies[0] == "install a driver for CUDA 99.1"


def test_a_driver_that_is_too_old_for_what_is_compiled_here(a_device: Describe) -> None:
    there = System(a_device((12, 0), driver=(12, 4)), (), {**MISSING, "cuda": NVRTC})
    found = only(there, severity="error")
    assert found.remedies[0] == "install driver 570 or later, for CUDA 12.8"
    assert (
        "cuda compiled here: what nvrtc 12.9.86 makes for sm_120 needs a driver for CUDA 12.8; "
        "this one supports 12.4"
    ) in found.reasons
    enough = replace(there, device=a_device((12, 0), driver=(12, 8)))
    assert rungs(enough, "auto") == {"jit"}


def test_no_driver_is_advised_that_would_not_help(
    archive_factory: Factory, a_device: Describe
) -> None:
    """The machine code that there is runs with any driver; the PTX beside it does not matter."""
    archives = (archive_factory("ptx80"), archive_factory("sm90"))
    there = System(a_device(driver=(12, 4)), archives)
    assert rungs(there, "auto") == {"exact"}
    assert [f for f in findings(there) if any("driver" in r for r in f.remedies)] == []


def test_a_compiler_stands_in(archive_factory: Factory, a_device: Describe) -> None:
    there = System(a_device((12, 0)), (archive_factory("sm90"),), {**MISSING, "cuda": NVRTC})
    assert rungs(there, "auto") == {"jit"}
    jit, triton = findings(there)
    assert (jit.severity, triton.severity) == ("warning", "warning")
    assert jit.text == "compiled here, at its first use: every kernel"
    assert jit.remedies == (
        "`pip install scan-registry-sm120`",
        "`pip install scan-registry-ptx80`",
    )
    assert "Triton is not installed" in triton.remedies


@pytest.mark.parametrize(
    ("level", "rung", "advice"),
    [("aot", "None", "allow rung ptx: SCAN_REGISTRY_REQUIRE=ptx"), ("ptx", "ptx", None)],
)
def test_the_policy(
    archive_factory: Factory,
    a_device: Describe,
    level: policy.Level,
    rung: str,
    advice: str | None,
) -> None:
    archives = (archive_factory("ptx80", variants=EVERY),)
    there = System(a_device((8, 7)), archives, MISSING)
    lowest = policy.LEVELS[level]
    assert rungs(there, "auto", lowest) == {rung}
    found = only(there, lowest)
    if advice is None:
        assert found.severity == "note"
        return
    assert found.severity == "error"
    assert found.text == "nothing runs, the call raises NoKernelError: every kernel"
    assert found.remedies == (advice, "install a scan-registry wheel built for sm87")
    assert (
        f"{len(SOLVING)} variants for compute_80: rung ptx; the policy allows none below same-major"
        in found.reasons
    )


def test_what_is_denied(archive_factory: Factory, a_device: Describe) -> None:
    held = archive_factory("sm90")
    denied = {
        entry.binary.sha256: "denied: it races (somebody 1.0)"
        for entry in held.of("linear_scan", "time_last_forward")
        if entry.variant.text("dtype") == "float16"
    }
    there = System(a_device(), (held,), MISSING, denied)
    assert rungs(there, "auto") == {"exact", "reference"}
    found = only(there, severity="error")
    assert found.text.endswith(": linear_scan.time_last_forward (float16)")
    assert any("package that denies" in remedy for remedy in found.remedies)
    assert "5 variants for sm_90: denied: it races (somebody 1.0)" in found.reasons
    # Where only one is denied, others take its place.
    first = dict(list(denied.items())[:1])
    assert rungs(replace(there, denied=first), "auto") == {"exact"}


def test_reasons_are_those_of_what_would_solve_the_problem(
    archive_factory: Factory, a_device: Describe
) -> None:
    small = a_device(threads_per_block=16)
    found = only(System(small, (archive_factory("sm90"),), MISSING), severity="error")
    reason = f"{len(SOLVING_CUDA)} variants for sm_90: 128 threads per block; the device has 16"
    assert reason in found.reasons
    assert not any("dtype" in reason or "was asked for" in reason for reason in found.reasons)


def test_many_reasons_are_cut(archive_factory: Factory, a_device: Describe) -> None:
    archives = tuple(archive_factory(f"sm{n}", variants=CUDA[:1]) for n in range(90, 99))
    found = only(System(a_device((8, 0)), archives, MISSING), severity="error")
    assert len(found.reasons) == 9
    assert found.reasons[-1].startswith("and more")


def test_pairs_in_few_words() -> None:
    every = [(d, a) for d in ("f", "h") for a in ("x", "y")]
    assert condensed(every, every) == ""
    assert condensed([("f", "x"), ("h", "x")], every) == "x"
    assert condensed([("h", "x"), ("h", "y")], every) == "h"
    assert condensed([("h", "y")], every) == "h y"
    assert condensed([("f", "x"), ("h", "y")], every) == "f x, h y"


def test_a_damaged_archive_does_not_stop_the_advice(
    archive_factory: Factory, a_device: Describe
) -> None:
    held = archive_factory("ptx80")
    held.path.write_bytes(b"")
    found = only(System(a_device((8, 7)), (Archive(held.path),), MISSING), severity="error")
    assert any("are no archive" in reason for reason in found.reasons)


# --- The command: the installation ------------------------------------------------------------


def document(capsys: Capture, *words: str, status: int = 0) -> dict[str, Any]:
    """What the command prints as JSON, which its schema describes."""
    assert main(["doctor", *words, "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    Draft202012Validator(SCHEMA).validate(found)
    assert found["passed"] == (status == 0)
    return found


def text(capsys: Capture, *words: str, status: int = 0) -> str:
    assert main(["doctor", *words]) == status
    return capsys.readouterr().out


def errors(found: Mapping[str, Any]) -> list[str]:
    return [f["text"] for f in found["findings"] if f["severity"] == "error"]


@pytest.fixture
def provide(tmp_path: Path, a_binary: Make, monkeypatch: pytest.MonkeyPatch) -> Provide:
    """Installs an imaginary provider, beside those before it and instead of the real ones."""
    installed: list[Provider] = []
    monkeypatch.setattr(providers, "installed", lambda: (tuple(installed), ()))
    monkeypatch.setattr("scan_registry.jit.toolchains", lambda: MISSING)
    monkeypatch.setenv("SCAN_REGISTRY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "120")

    def make(
        name: str = "scan-registry",
        archs: Iterable[str] = (),
        *,
        core: str = ">=0.1",
        denied: Mapping[str, str] | None = None,
        variants: Iterable[Variant] = HELD,
    ) -> Provider:
        folder = tmp_path / name
        for arch in archs:
            target = Target.parse(arch)
            held = [a_binary(variant, target) for variant in variants]
            path = folder / "archives" / f"{target.label}{archive.SUFFIX}"
            archive.write(path, target, held, {"version": "9.9.9"})
        installed.append(Provider(name, "1.2", folder, core, dict(denied or {})))
        return installed[-1]

    return make


@pytest.mark.parametrize(
    ("words", "status", "rung"),
    [
        (["--for", "sm_90"], 0, "exact"),
        (["--for", "SM120"], 0, "ptx"),
        (
            ["--for", "sm_121", "--driver", "575", "--sms", "48", "--shared-memory", "101376"],
            0,
            "ptx",
        ),
        (["--for", "sm_121", "--driver", "575.57.08"], 0, "ptx"),
        (["--for", "sm_121", "--driver", "CUDA 12.9"], 0, "ptx"),
        (["--for", "sm_121", "--driver", "570"], 1, "reference"),
        (["--for", "sm_87", "--driver", "12.4"], 1, "reference"),
        (["--for", "sm_90", "--driver", "12.4"], 0, "exact"),
        (["--for", "sm_75"], 1, "reference"),
    ],
)
def test_exit_status(
    provide: Provide, capsys: Capture, words: list[str], status: int, rung: str
) -> None:
    provide(archs=["sm90", "ptx80"])
    found = document(capsys, *words, status=status)
    (gpu,) = found["gpus"]
    assert {answer["rungs"]["auto"] for answer in gpu["answers"]} == {rung}
    assert (gpu["ordinal"], gpu["device"]["arch"]) == (None, str(Target.parse(words[1])))
    assert bool(errors(found)) == bool(status)
    out = text(capsys, *words, status=status)
    assert out.splitlines()[-1] == f"{'Not every' if status else 'Every'} call runs a kernel."
    row = next(line.split() for line in out.splitlines() if "channel_last_forward" in line)
    assert row[1] == rung
    assert ("driver 575 or later" in out) == (status == 1 and words[1] != "sm_75")


def test_arguments_describe_the_gpu(provide: Provide, capsys: Capture) -> None:
    provide(archs=["sm90"])
    words = ["--for", "sm_90", "--sms", "3", "--shared-memory", "50000", "--driver", "12.3"]
    (gpu,) = document(capsys, *words)["gpus"]
    device = gpu["device"]
    assert (device["multiprocessors"], device["shared_memory_per_block"]) == (3, 50_000)
    assert device["driver"] == "12.3"


def test_cells_say_what_gets_which_rung(provide: Provide, capsys: Capture) -> None:
    aligned = [v for v in CUDA if dict(v.statics).get("access", "aligned") == "aligned"]
    provide(archs=["sm90"], variants=aligned)
    out = text(capsys, "--for", "sm_90", status=1)
    assert "exact: aligned" in out
    assert "reference: generic" in out
    assert "none" in out


def test_providers_are_listed(provide: Provide, capsys: Capture) -> None:
    provide(archs=["sm90"])
    provide("more-kernels", ["sm120"], core=">=0.1,<9", denied={"ab" * 32: "denied: it races"})
    found = document(capsys, "--for", "sm_120")
    first, second = found["providers"]
    assert (first["name"], first["mismatch"], first["denied"]) == ("scan-registry", None, [])
    assert (second["version"], second["core"]) == ("1.2", ">=0.1,<9")
    assert second["denied"] == [{"subject": "ab" * 32, "reason": "denied: it races"}]
    assert [a["arch"] for p in found["providers"] for a in p["archives"]] == ["sm_90", "sm_120"]
    assert all(a["binaries"] == len(HELD) and a["damage"] is None for a in second["archives"])
    out = text(capsys, "--for", "sm_120")
    assert f"more-kernels 1.2: {'ab' * 32}: denied: it races" in out


def test_a_provider_that_does_not_fit(provide: Provide, capsys: Capture) -> None:
    provide(archs=["sm90"])
    later = provide("later-kernels", ["sm120"], core=">=7")
    # In a later format, for all that this version knows; that is no damage.
    (later.folder / "archives" / "sm120.scanreg").write_bytes(b"SCANREG\x09")
    found = document(capsys, "--for", "sm_90", status=1)
    (message,) = errors(found)
    assert message.startswith("later-kernels 1.2 is made for scan-registry >=7, but scan-registry ")
    assert found["findings"][0]["remedies"][0].startswith("`pip install 'scan-registry>=7'`")
    assert found["providers"][1]["mismatch"]
    assert found["providers"][1]["archives"][0]["binaries"] is None
    # It goes on, without what does not fit.
    assert {a["rungs"]["auto"] for a in found["gpus"][0]["answers"]} == {"exact"}
    found = document(capsys, "--for", "sm_120", status=1)
    assert {a["rungs"]["auto"] for a in found["gpus"][0]["answers"]} == {"reference"}


def test_providers_that_are_not_intact(
    provide: Provide, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so of each, and goes on with the others."""
    intact = provide(archs=["sm90"]), provide("fine-kernels", ["sm120"])
    broken = (ProviderError("a 1.2: provider.json is not JSON"), ProviderError("b 1.0: gone"))
    monkeypatch.setattr(providers, "installed", lambda: (intact, broken))
    found = document(capsys, "--for", "sm_120", status=1)
    assert errors(found) == [f"{error}: every call on a GPU raises it" for error in broken]
    assert [p["name"] for p in found["providers"]] == ["scan-registry", "fine-kernels"]
    assert {a["rungs"]["auto"] for a in found["gpus"][0]["answers"]} == {"exact"}


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_a_damaged_archive(
    provide: Provide, capsys: Capture, archive_parts: Any, damage: str
) -> None:
    held = provide(archs=["sm90", "ptx80"])
    path = held.folder / "archives" / "sm90.scanreg"
    content = archive_parts.flipped(path.read_bytes())
    if damage == "gone":
        path.unlink()
        path.symlink_to("nowhere")
    else:
        path.write_bytes(content[:100] if damage == "cut" else content)
    found = document(capsys, "--for", "sm_90", status=1)
    (message,) = errors(found)
    assert str(path) in message
    (state,) = [a for a in found["providers"][0]["archives"] if a["arch"] == "sm_90"]
    assert state["damage"] == message
    assert state["binaries"] == (len(HELD) - 1 if damage == "flipped" else 0)
    (finding,) = [f for f in found["findings"] if f["severity"] == "error"]
    assert finding["remedies"] == ["reinstall scan-registry"]
    answers = {a["rungs"]["auto"] for a in found["gpus"][0]["answers"]}
    assert answers == ({"exact"} if damage == "flipped" else {"ptx"})
    assert "sm90 (damaged)" in text(capsys, "--for", "sm_90", status=1)


def test_damaged_bytes_do_not_count_as_a_kernel(
    provide: Provide, capsys: Capture, archive_parts: Any
) -> None:
    held = provide(archs=["sm90"], variants=CUDA[:1])
    path = held.folder / "archives" / "sm90.scanreg"
    path.write_bytes(archive_parts.flipped(path.read_bytes()))
    found = document(capsys, "--for", "sm_90", status=1)
    assert {a["rungs"]["cuda"] for a in found["gpus"][0]["answers"]} == {None}


def test_a_file_that_is_no_architectures(provide: Provide, capsys: Capture) -> None:
    """It is not used; that is no reason for anything else not to work."""
    held = provide(archs=["sm90"])
    path = held.folder / "archives" / "hopper.scanreg"
    path.write_bytes(b"")
    found = document(capsys, "--for", "sm_90")
    (finding,) = found["findings"]
    assert (finding["severity"], finding["about"]) == ("warning", "scan-registry 1.2")
    assert finding["text"] == f"{path} {providers.MISNAMED}"
    assert finding["remedies"] == ["remove the file"]
    assert [a["arch"] for a in found["providers"][0]["archives"]] == ["sm_90"]
    assert {a["rungs"]["auto"] for a in found["gpus"][0]["answers"]} == {"exact"}


def test_the_policy_in_force(
    provide: Provide, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    provide(archs=["ptx80"])
    assert document(capsys, "--for", "sm_90")["lowest_rung"] == "reference"
    with policy.require("aot"):
        found = document(capsys, "--for", "sm_90", status=1)
        assert found["lowest_rung"] == "same-major"
        assert "down to rung same-major" in text(capsys, "--for", "sm_90", status=1)
    monkeypatch.setenv(policy.VARIABLE, "sometimes")
    policy._default.cache_clear()
    try:
        found = document(capsys, "--for", "sm_90", status=1)
    finally:
        policy._default.cache_clear()
    assert errors(found)[0].startswith("SCAN_REGISTRY_REQUIRE is 'sometimes'; accepted are aot")


# --- The command: the cache -------------------------------------------------------------------


def test_the_cache(provide: Provide, capsys: Capture, tmp_path: Path, a_binary: Make) -> None:
    provide(archs=["sm90"])
    folder = tmp_path / "cache"
    cache = document(capsys, "--for", "sm_90")["cache"]
    assert (cache["folder"], cache["unusable"], cache["entries"]) == (str(folder), None, 0)
    assert cache["free"] > 0
    assert not folder.exists()
    key = "ab" * 32
    Cache(folder).put(key, Target.parse("sm90"), a_binary())
    path = folder / key[:2] / key / "sm90.scanreg"
    cache = document(capsys, "--for", "sm_90")["cache"]
    assert (cache["entries"], cache["size"]) == (1, path.stat().st_size)
    assert ": 1 entry, " in text(capsys, "--for", "sm_90")


def test_a_cache_that_others_can_write_to(
    provide: Provide, capsys: Capture, tmp_path: Path
) -> None:
    provide(archs=["sm90"])
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(stat.S_IRWXU | stat.S_IWOTH)
    found = document(capsys, "--for", "sm_90")  # a warning: nothing has to be compiled
    (finding,) = found["findings"]
    assert (finding["severity"], finding["about"]) == ("warning", f"cache folder {folder}")
    assert "others can write to it" in finding["text"]
    assert finding["remedies"][0] == f"chmod go-w {folder}"
    assert f"→ chmod go-w {folder}" in text(capsys, "--for", "sm_90")
    folder.chmod(stat.S_IRWXU)
    assert document(capsys, "--for", "sm_90")["findings"] == []


@pytest.mark.parametrize("trouble", ["a file", "read-only", "full"])
def test_a_cache_that_cannot_be_used(
    provide: Provide,
    capsys: Capture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trouble: str,
) -> None:
    provide(archs=["sm90"])
    folder = tmp_path / "cache"
    if trouble == "a file":
        folder.write_text("")
    elif trouble == "read-only":
        monkeypatch.setattr(command.os, "access", lambda *_: False)
    else:
        usage = command.shutil.disk_usage(tmp_path)
        monkeypatch.setattr(command.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    found = document(capsys, "--for", "sm_90")
    words = {"a file": "it is not a folder", "read-only": "is read-only", "full": "1.0 kB left"}
    assert words[trouble] in found["cache"]["unusable"]
    (finding,) = found["findings"]
    assert finding["severity"] == "warning"
    assert "SCAN_REGISTRY_CACHE" in finding["remedies"][0]


# --- The command: GPUs ------------------------------------------------------------------------


def test_no_driver(provide: Provide, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> tuple[int, int]:
        raise RuntimeError("the CUDA driver libcuda.so.1 cannot be opened")

    provide(archs=["sm90"])
    monkeypatch.setattr(driver, "version", refuse)
    found = document(capsys, status=1)
    assert found["gpus"] == []
    assert found["driver"] is None
    (message,) = errors(found)
    assert message.startswith(
        "no CUDA driver, so calls run on the CPU alone, by this package's code for it: "
    )
    assert "--for sm_90" in text(capsys, status=1)


def test_a_described_gpu_asks_nothing_of_the_driver(
    provide: Provide, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise AssertionError("the driver was opened")

    provide(archs=["sm90"])
    monkeypatch.setattr(driver, "library", fail)
    document(capsys, "--for", "sm_90")


@pytest.mark.parametrize(
    ("cuda", "there", "supported", "trouble", "remedies"),
    [
        ("13.0", True, (13, 0), None, []),
        ("12.9", True, (12, 0), None, []),
        (
            None,
            True,
            (13, 0),
            "is built without CUDA: it cannot",
            ["torch that is built for CUDA 13"],
        ),
        ("13.0", False, (12, 4), "not installed: it cannot", ["torch that is built for CUDA 12"]),
        (
            "13.0",
            True,
            (12, 9),
            "needs a driver for CUDA 13.0, and this one supports 12.9: it cannot",
            ["install driver 580 or later, for CUDA 13.0", "torch that is built for CUDA 12"],
        ),
    ],
)
def test_a_torch_that_cannot_use_the_gpus(
    provide: Provide,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    a_device: Describe,
    cuda: str | None,
    there: bool,
    supported: tuple[int, int],
    trouble: str | None,
    remedies: list[str],
) -> None:
    """Its calls all run the reference on the CPU: an error, whatever the kernels could do."""
    provide(archs=["sm90"])
    monkeypatch.setattr(driver, "version", lambda: supported)
    monkeypatch.setattr(command, "visible", lambda: (a_device(), a_device((9, 0), name="B")))
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr(command, "find_spec", lambda _: object() if there else None)
    status = 1 if trouble else 0
    found = document(capsys, status=status)
    assert [gpu["ordinal"] for gpu in found["gpus"]] == [0, 1]
    assert found["driver"] == ".".join(map(str, supported))
    mine = [f for f in found["findings"] if f["about"] == "torch"]
    assert len(errors(found)) == len(mine) == status
    for finding in mine:
        assert str(trouble) in finding["text"]
        assert finding["text"].endswith("calls run on the CPU alone")
        assert len(finding["remedies"]) == len(remedies)
        for given, expected in zip(finding["remedies"], remedies, strict=True):
            assert expected in given
    assert "cuda:1, B (sm_90), 132 multiprocessors" in text(capsys, status=status)


def shell(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scan_registry", "doctor", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env={**os.environ, **variables},
    )


def test_every_gpu_of_a_machine(stub_driver: Any, tmp_path: Path) -> None:
    stub_driver.gpu((9, 0), name="Imaginary A").gpu((7, 5), sms=5, name="Imaginary B")
    environment = {**stub_driver.environment(), "SCAN_REGISTRY_CACHE": str(tmp_path / "cache")}
    result = shell("--json", **environment)
    assert result.returncode == 1  # the second is too old for the kernels
    found = json.loads(result.stdout)
    Draft202012Validator(SCHEMA).validate(found)
    assert found["driver"] == "13.0"
    devices = [gpu["device"] for gpu in found["gpus"]]
    assert [(d["name"], d["arch"]) for d in devices] == [
        ("Imaginary A", "sm_90"),
        ("Imaginary B", "sm_75"),
    ]
    assert devices[1]["multiprocessors"] == 5
    assert [f["about"] for f in found["findings"] if f["text"].startswith("falls to plain")][
        -1
    ] == ("cuda:1, Imaginary B (sm_75)")
    assert not stub_driver.calls("cuDevicePrimaryCtxRetain", "cuModuleLoadData")
    assert not (tmp_path / "cache").exists()


def test_a_driver_without_a_gpu(stub_driver: Any) -> None:
    result = shell(**stub_driver.environment(), CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 1
    assert "the CUDA driver sees no GPU, so calls run on the CPU alone" in result.stdout
    assert "CUDA_VISIBLE_DEVICES is ''" in result.stdout
    assert "driver     for CUDA 13.0" in result.stdout


def test_a_driver_that_fails(stub_driver: Any) -> None:
    stub_driver.gpu().fail("cuInit", 3)
    result = shell(**stub_driver.environment())
    assert result.returncode == 1
    assert "the CUDA driver fails, so calls run on the CPU alone" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--for", "hopper"], "--for is 'hopper'; accepted is a GPU's architecture, such as sm_90"),
        (["--for", "ptx80"], "--for is 'ptx80'"),
        (["--for", "sm_90", "--driver", "10"], "--driver is '10'; accepted are a driver's version"),
        (["--driver", "575"], "--driver describes a GPU that is not here; it needs --for"),
        (["--shared-memory", "5"], "--shared-memory describes a GPU that is not here"),
        (["--for", "sm_90", "--sms", "0"], "--sms is 0; accepted are positive numbers"),
    ],
)
def test_wrong_arguments(capsys: Capture, words: list[str], message: str) -> None:
    assert main(["doctor", *words]) == 2
    caught = capsys.readouterr()
    assert caught.out == ""
    assert caught.err.startswith(f"scan-registry: error: {message}")


# --- What is really installed -----------------------------------------------------------------


@pytest.mark.parametrize(
    "arch", ["sm_75", "sm_80", "sm_86", "sm_87", "sm_90", "sm_103", "sm_121", "sm_130"]
)
def test_whatever_is_installed(capsys: Capture, arch: str) -> None:
    """Its form is that of the schema; what is installed for a GPU runs on it."""
    status = main(["doctor", "--for", arch, "--json"])
    found = json.loads(capsys.readouterr().out)
    Draft202012Validator(SCHEMA).validate(found)
    assert status == (0 if found["passed"] else 1)
    assert not any(archive["damage"] for p in found["providers"] for archive in p["archives"])
    capability = Target.parse(arch).capability
    fitting = [a for a in catalogue().archives if a.arch.misfit(capability) is None]
    rungs = {answer["rungs"]["auto"] for answer in found["gpus"][0]["answers"]}
    if capability < (8, 0):
        assert (status, rungs) == (1, {"reference"})
    elif any(a.arch.capability == capability and not a.arch.is_ptx for a in fitting):
        assert (status, rungs) == (0, {"exact"})
    elif fitting:
        assert status == 0
        assert rungs in ({"same-major"}, {"ptx"})
    else:
        assert rungs in ({"jit"}, {"reference"})


def test_the_schema_is_strict(capsys: Capture) -> None:
    main(["doctor", "--for", "sm_75", "--json"])
    found = json.loads(capsys.readouterr().out)
    found["gpus"][0]["answers"][0]["rungs"]["hip"] = None
    assert list(Draft202012Validator(SCHEMA).iter_errors(found))


def test_it_says_whether_there_is_a_table(tmp_path: Path, a_binary: Any, a_device: Any) -> None:
    kernel = FAMILY.kernel("time_last_forward", "cuda")
    sample = next(s for s in FAMILY.samples if s.problem.kernel == kernel.name)
    assert kernel.shape is not None
    shape = kernel.shape(sample.problem)
    taken = next(v for v in kernel.variants if kernel.accepts(v, sample.problem) is None)
    row = Row(shape.sizes, {kernel.label(taken): 1.0})
    tuning = Tuning.of("sm_90", "Imaginary T", "2026-02-01", {shape.kind: [row]})
    path, held = tmp_path / "sm90.scanreg", [a_binary(v, "sm90") for v in kernel.variants]
    for given, expected in (({kernel.head: [tuning]}, 1), (None, 0)):
        archive.write(path, Target.parse("sm90"), held, {}, given)
        found = coverage(
            System(a_device(), (Archive(path),)), {FAMILY.name: FAMILY}, Rung.REFERENCE
        )
        assert len(found.tuned) == expected
        for origin in found.tuned:
            assert str(origin) == "the shipped table, sm_90, Imaginary T, 2026-02-01"
