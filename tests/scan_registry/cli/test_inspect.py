"""The command line: what ``inspect`` shows of synthetic and of installed archives, and its errors."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from processes import captured

from scan_registry.artifact.archive import Archive, Binary
from scan_registry.catalog import inventory
from scan_registry.catalog.inventory import Catalogue
from scan_registry.cli import COMMANDS, main
from scan_registry.cli import inspect as command
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.ops.operator import SHORT_DTYPES

Factory = Callable[..., Archive]
Make = Callable[..., tuple[Binary, bytes]]
Capture = pytest.CaptureFixture[str]

FORWARD = FAMILY.kernel("time_last_forward", "cuda").variants[0]
TRITON = FAMILY.kernel("time_last_forward", "triton").variants[0]
#: Of another dtype, and with a row that 120 columns have room for.
BACKWARD = next(
    variant
    for variant in FAMILY.kernel("channel_last_backward", "cuda").variants
    if variant.text("dtype") == "bfloat16" and "prefix_lead" not in str(variant)
)


def shell(*words: str) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own, started where the sources are not."""
    command_line = [sys.executable, "-m", "scan_registry", *words]
    return captured(command_line, cwd="/")


@pytest.fixture
def installed(
    archive_factory: Factory, a_binary: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Catalogue:
    """ptx80 and sm90 with three binaries each; of sm90's, one is GPU-tested and one has failed."""
    binaries = {
        arch: [
            a_binary(FORWARD, arch, dynamic_shared=512),
            a_binary(TRITON, "sm90a" if arch == "sm90" else arch, compiler="dreamed 2.0"),
            a_binary(BACKWARD, arch, block=(32, 2, 4)),
        ]
        for arch in ("ptx80", "sm90")
    }
    records = [
        {"sha256": b.sha256, "variant": str(b.variant), "target": str(b.target), "cases": 38,
         "error": error, "tolerance": 1e-6}
        for (b, _), error in zip(binaries["sm90"], (1.25e-7, 3.0e-2), strict=False)
    ]  # fmt: skip
    folder = tmp_path / "linear_scan" / "attestations"
    folder.mkdir(parents=True)
    content = {"gpu": "Imaginary H", "date": "2026-01-31", "binaries": records}
    (folder / "imaginary-h.json").write_text(json.dumps(content), encoding="utf-8")
    monkeypatch.setattr(inventory, "ROOT", tmp_path)
    result = Catalogue(
        tuple(archive_factory(arch, contents) for arch, contents in binaries.items())
    )
    monkeypatch.setattr(command, "catalogue", lambda: result)
    monkeypatch.setenv("COLUMNS", "120")
    return result


def inspect(capsys: Capture, *words: str, status: int = 0) -> str:
    assert main(["inspect", *words]) == status
    return capsys.readouterr().out


def document(capsys: Capture, *words: str, status: int = 0) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(inspect(capsys, "--json", *words, status=status))
    return report


def cells(text: str, *start: str) -> list[str]:
    """The words of the one line that begins with ``start``."""
    (line,) = [line.split() for line in text.splitlines() if line.split()[: len(start)] == [*start]]
    return line


# --- Tables -----------------------------------------------------------------------------------


def test_the_summary_says_what_is_gpu_tested(installed: Catalogue, capsys: Capture) -> None:
    """The pages of the documentation show the rest of it."""
    out = inspect(capsys)
    assert cells(out, "sm90")[3:7] == ["3", "1/3", "Imaginary", "H"]
    assert cells(out, "ptx80")[3:5] == ["3", "0/3"]
    assert cells(out, "linear_scan.time_last_forward")[-1] == "1/4"


def test_of_many_kernels_a_family_has_one_line(
    installed: Catalogue, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "MOST_LINES", 16)
    out = inspect(capsys)
    assert cells(out, "linear_scan:", "2", "kernels")[-1] == "1/6"
    assert "linear_scan.time_last_forward" not in out
    assert "--family lists the kernels of one family" in out
    assert len(out.splitlines()) <= 16
    kernels = ["one.a", "three.a", "three.b", "two.a", "three.c", "two.b"]
    assert command._summed_families(kernels, 6) == {}
    assert command._summed_families(kernels, 4) == {"three": "three: 3 kernels"}
    assert [*command._summed_families(kernels, 0)] == ["three", "two"]  # one line for each family


def test_one_row_per_binary(installed: Catalogue, capsys: Capture) -> None:
    out = inspect(capsys, "--all")
    for title in (
        "time_last_forward, cuda",
        "time_last_forward, triton",
        "channel_last_backward, cuda",
    ):
        assert f"linear_scan.{title}" in out
    statics = [SHORT_DTYPES.get(str(value), str(value)) for _, value in FORWARD.statics]
    assert statics[0] == "fp32"
    size = [str(len(f"code of {FORWARD} for sm_90")), "B"]
    expected = ["sm90", *statics, "40", "0", "1024+512", "128", *size, "1.2e-07"]
    assert cells(out, "sm90", *statics) == expected
    assert cells(out, "sm90a")[-2:] == ["!", "3.0e-02"]
    statics = [SHORT_DTYPES.get(str(value), str(value)) for _, value in BACKWARD.statics]
    row = cells(out, "ptx80", *statics)
    assert row[1 + len(statics) :][:4] == ["?", "?", "?+0", "256"]
    assert row[-1] == "no"


def test_a_filter_that_leaves_few_shows_binaries(
    installed: Catalogue, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "channel_last_backward, cuda" in inspect(capsys, "--kernel", "channel_last_backward")
    monkeypatch.setattr(command, "MOST_ROWS", 1)
    assert "channel_last_backward, cuda" not in inspect(capsys, "--kernel", "channel_last_backward")
    assert "channel_last_backward, cuda" in inspect(
        capsys, "--kernel", "channel_last_backward", "--all"
    )


def test_what_is_piped_is_not_cut(
    installed: Catalogue, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever COLUMNS says, which shells set that may not even be the reader's."""
    monkeypatch.setenv("COLUMNS", "40")
    out = inspect(capsys, "--all")
    assert "no room" not in out
    row = cells(out, "sm90", *(SHORT_DTYPES.get(str(v), str(v)) for _, v in FORWARD.statics))
    assert row[-1] == "1.2e-07"


# --- Filters ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["--language", "triton", "--language", "cuda"], 6),
        (["--language", "triton", "--arch", "sm90"], 1),
        (["--arch", "SM90A"], 1),
        (["--arch", "compute_80", "--arch", "sm90"], 6),
        (["--kernel", "time_last_forward"], 4),
        (["--dtype", "fp32"], 4),
        (["--language", "triton", "--kernel", "channel_last_backward"], 0),
    ],
)
def test_filters(installed: Catalogue, capsys: Capture, words: list[str], count: int) -> None:
    status = 0 if count else 2
    assert main(["inspect", "--json", *words]) == status
    caught = capsys.readouterr()
    shown = json.loads(caught.out)
    assert sum(len(archive["binaries"]) for archive in shown["archives"]) == count
    assert all(archive["binaries"] for archive in shown["archives"])
    nothing = "scan-registry: error: no binary matches all of these filters\n"
    assert caught.err == ("" if count else nothing)
    inspect(capsys, *words, status=status)


def test_a_gpu_without_an_archive(installed: Catalogue, capsys: Capture) -> None:
    assert main(["inspect", "--arch", "A100"]) == 2
    words = "no archive of sm80 (A100) is installed; installed are ptx80, sm90, sm90a"
    assert capsys.readouterr().err == f"scan-registry: error: {words}\n"


@pytest.mark.parametrize(
    ("words", "accepted"),
    [
        (["--arch", "sm75"], "ptx80, sm90, sm90a"),
        (["--kernel", "time_last"], "time_last_forward, channel_last_backward"),
        (["--family", "rnn"], "linear_scan"),
        (["--dtype", "float64"], FORWARD.text("dtype")),
    ],
)
def test_an_unknown_value_lists_the_accepted_ones(
    installed: Catalogue, capsys: Capture, words: Sequence[str], accepted: str
) -> None:
    assert main(["inspect", *words]) == 2
    caught = capsys.readouterr()
    assert caught.out == ""
    option, value = words
    start = f"scan-registry: error: {option} {value!r} is not installed; accepted are: {accepted}"
    assert caught.err.startswith(start)
    assert caught.err.count("\n") == 1


# --- JSON -------------------------------------------------------------------------------------


def test_the_json_document(installed: Catalogue, capsys: Capture) -> None:
    report = document(capsys)
    assert set(report) == {"version", "archives"}
    assert report["version"] == version("scan-registry")
    assert [archive["arch"] for archive in report["archives"]] == ["compute_80", "sm_90"]
    entry = report["archives"][1]
    archive = installed.archives[1]
    assert {key: entry[key] for key in entry if key != "binaries"} == {
        "arch": "sm_90",
        "provider": "scan-registry",
        "path": str(archive.path),
        "size": archive.path.stat().st_size,
        "version": "9.9.9",
        "commit": archive.manifest["commit"],
        "dirty": True,
        "error": None,
    }
    assert [record["gpu_tested"] for record in entry["binaries"]] == [True, False, False]
    assert entry["binaries"][0]["attestation"] == {
        "sha256": archive.binaries[0].sha256,
        "variant": str(FORWARD),
        "target": "sm_90",
        "error": 1.25e-7,
        "tolerance": 1e-6,
        "cases": 38,
        "gpu": "Imaginary H",
        "date": "2026-01-31",
    }
    assert entry["binaries"][2]["attestation"] is None
    for record, binary in zip(entry["binaries"], archive.binaries, strict=True):
        assert Binary.from_json(record) == binary


@pytest.mark.slow
def test_what_is_really_installed(capsys: Capture) -> None:
    report = document(capsys)
    real = inventory.catalogue()
    assert [archive["path"] for archive in report["archives"]] == [
        str(a.path) for a in real.archives
    ]
    for entry, archive in zip(report["archives"], real.archives, strict=True):
        assert entry["version"] == report["version"]
        assert [Binary.from_json(record) for record in entry["binaries"]] == list(archive.binaries)
    out = inspect(capsys)
    for archive in real.archives:
        assert cells(out, archive.arch.label)


# --- Damage and absence -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "option"),
    [("cut", []), ("flipped", ["--all"]), ("flipped", ["--json"]), ("gone", ["--json"])],
)
def test_a_damaged_archive_is_named_and_the_rest_is_shown(
    installed: Catalogue, capsys: Capture, damage: str, option: list[str]
) -> None:
    path = installed.archives[1].path
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # in the last binary: nothing but its digest tells
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[:100] if damage == "cut" else content)
    assert main(["inspect", *option]) == 2
    caught = capsys.readouterr()
    assert caught.err.startswith(f"scan-registry: error: {path}: ")
    assert caught.err.count("\n") == 1
    if option == ["--json"]:
        whole, damaged = json.loads(caught.out)["archives"]
        assert len(whole["binaries"]) == 3
        assert whole["error"] is None
        assert str(path) in damaged["error"]
        assert (damaged["arch"], damaged["path"], damaged["binaries"]) == ("sm_90", str(path), [])
    else:
        assert cells(caught.out, "sm90")[-1] == "damaged"
        assert "0/3" in caught.out


def test_damage_is_named_even_if_a_filter_asks_for_what_is_damaged(
    installed: Catalogue, capsys: Capture
) -> None:
    path = installed.archives[1].path
    path.write_bytes(b"")
    assert main(["inspect", "--arch", "sm90"]) == 2
    err = capsys.readouterr().err
    assert str(path) in err
    assert "--arch 'sm90' is not installed; accepted are: ptx80" in err


def test_an_installation_without_archives(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(command, "catalogue", lambda: Catalogue(()))
    for words in ([], ["--all"], ["--arch", "sm90"]):
        out = inspect(capsys, *words)
        assert "holds no archives" in out
        assert "pip install scan-registry-sm90" in out
        assert "SCAN_REGISTRY_ARCHS" in out
    assert document(capsys) == {"version": version("scan-registry"), "archives": []}


# --- The program ------------------------------------------------------------------------------


def test_version() -> None:
    result = shell("--version")
    assert (result.returncode, result.stdout) == (0, f"scan-registry {version('scan-registry')}\n")


def test_without_a_command_it_shows_the_commands() -> None:
    result = shell()
    assert result.returncode == 2
    assert result.stderr.startswith("usage: scan-registry ")
    for name in COMMANDS:
        assert name in result.stderr


def test_that_torch_finds_no_numpy_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: object) -> int:
        warnings.warn("Failed to initialize NumPy: No module named 'numpy'", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        return 0

    monkeypatch.setattr(command, "run", run)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert main(["inspect"]) == 0
    assert [str(item.message) for item in caught] == ["something else"]


def test_a_reader_that_leaves_early_is_no_error() -> None:
    """As in ``scan-registry inspect --json | head``."""
    command_line = [sys.executable, "-m", "scan_registry", "inspect", "--json"]
    with subprocess.Popen(
        command_line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/"
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""


def test_the_console_script_is_the_same_program() -> None:
    script = Path(sys.executable).with_name("scan-registry")
    if not script.exists():
        pytest.skip("the environment's scripts are elsewhere")
    result = captured([script, "--version"], check=True)
    assert result.stdout == shell("--version").stdout


@pytest.mark.slow
@pytest.mark.parametrize("words", [["inspect", "--all"]])
def test_looking_needs_neither_torch_nor_a_compiler(words: list[str]) -> None:
    script = f"""
import sys
import warnings
from scan_registry.cli import main
try:
    main({words!r})
except SystemExit as exit:
    assert not exit.code, exit.code
heavy = {{"torch", "triton", "numpy", "cuda"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", script], cwd="/", check=True, stdout=subprocess.DEVNULL)
