"""``doctor`` on the GPUs of imaginary machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from diagnosing import SCHEMA, Capture, Describe, Provide, document, errors, text
from forked import captured
from jsonschema import Draft202012Validator

from scan_registry.cli import doctor as command
from scan_registry.cli import main
from scan_registry.hardware import driver


def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> tuple[int, int]:
        raise RuntimeError("the CUDA driver libcuda.so.1 cannot be opened")

    monkeypatch.setattr(driver, "version", refuse)
    monkeypatch.setattr(command, "_KERNEL_MODULE", Path("/nowhere"))


def test_a_machine_without_a_gpu(
    provide: Provide, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls on the CPU work, and that is all there is to ask of it, unless one is strict."""
    provide(archs=["sm90"])
    no_driver(monkeypatch)
    report = document(capsys)
    assert (report["gpus"], report["driver"], report["strict"]) == ([], None, False)
    assert report["cpu"] == {"works": True, "missing": None}
    (finding,) = report["findings"]
    assert finding["severity"] == "note"
    assert finding["text"].startswith("no CUDA driver, so calls run on the CPU alone: ")
    assert report["first"] is None
    out = text(capsys)
    assert "--for H100" in out
    assert out.splitlines()[-1].startswith("CPU only: ")
    report = document(capsys, "--strict", status=1)
    assert [f["severity"] for f in report["findings"]] == ["error"]
    assert report["strict"]


@pytest.mark.parametrize(
    ("torch", "missing", "remedy"),
    [(None, "torch is not installed", "install torch"), ("2.5.1", "torch 2.5.1 is older", "2.6")],
)
def test_a_machine_on_which_no_call_runs(
    provide: Provide,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    torch: str | None,
    missing: str,
    remedy: str,
) -> None:
    provide(archs=["sm90"])
    no_driver(monkeypatch)
    monkeypatch.setattr(command, "find_spec", lambda _: object() if torch else None)
    monkeypatch.setattr(command, "_torch", lambda: torch)
    monkeypatch.setattr(command, "_version_of", lambda _: None)
    report = document(capsys, status=1)
    assert report["cpu"]["missing"].startswith(missing)
    assert any(missing in error for error in errors(report))
    out = text(capsys, status=1)
    assert out.splitlines()[-1] == "No call runs."
    assert remedy in out


def test_a_machine_with_jax_and_without_torch(
    provide: Provide, capsys: Capture, monkeypatch: pytest.MonkeyPatch, a_device: Describe
) -> None:
    """Calls on JAX's arrays run, and the others are a note."""
    pytest.importorskip("jax")
    provide(archs=["sm90"])
    no_driver(monkeypatch)
    monkeypatch.setattr(command, "find_spec", lambda _: None)
    monkeypatch.setattr(command, "_torch", lambda: None)
    report = document(capsys)
    assert report["cpu"] == {"works": True, "missing": None}
    assert [finding["severity"] for finding in report["findings"]] == ["note", "note"]
    assert "those of scan_registry.jax do" in report["findings"][0]["text"]
    out = text(capsys)
    assert out.splitlines()[-1] == "CPU only: calls of scan_registry.jax run. Others need torch."
    with monkeypatch.context() as patch:
        patch.setattr(driver, "version", lambda: (13, 0))
        patch.setattr(command, "visible", lambda: (a_device(),))
        assert [f["about"] for f in document(capsys)["findings"]] == ["torch"]
    monkeypatch.setattr(command, "import_module", refuse_import)
    report = document(capsys, status=1)
    assert "calls on JAX's arrays fail: no such module" in report["cpu"]["missing"]
    assert text(capsys, status=1).splitlines()[-1] == "No call runs."


def refuse_import(name: str) -> Any:
    raise ImportError("no such module")


def test_a_container_that_does_not_see_the_driver(
    provide: Provide, capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its machine has one, so it is no machine without a GPU."""
    provide(archs=["sm90"])
    no_driver(monkeypatch)
    monkeypatch.setattr(command, "_KERNEL_MODULE", tmp_path)
    report = document(capsys, status=1)
    assert report["first"]["remedy"].endswith("docker run --gpus all")


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
    monkeypatch.setattr(command, "_jax", lambda: "JAX is not installed")
    status = 1 if trouble else 0
    report = document(capsys, status=status)
    assert [gpu["ordinal"] for gpu in report["gpus"]] == [0, 1]
    assert report["driver"] == ".".join(map(str, supported))
    mine = [f for f in report["findings"] if f["about"] == "torch"]
    assert len(errors(report)) == len(mine) == status
    for finding in mine:
        assert str(trouble) in finding["text"]
        assert finding["text"].endswith("calls run on the CPU alone")
        assert len(finding["remedies"]) == len(remedies)
        for inputs, expected in zip(finding["remedies"], remedies, strict=True):
            assert expected in inputs
    assert "cuda:1, B (sm_90), 132 SMs" in text(capsys, status=status)


#: Without what is installed, which takes a while to read.
ALONE = """
import sys
from scan_registry.catalog import providers
from scan_registry.cli import main
providers.installed = lambda: ((), ())
sys.exit(main(["doctor", *sys.argv[1:]]))
"""


def shell(*words: str, alone: bool = False, **variables: str) -> subprocess.CompletedProcess[str]:
    program = ["-c", ALONE] if alone else ["-m", "scan_registry", "doctor"]
    return captured([sys.executable, *program, *words], cwd="/", env={**os.environ, **variables})


@pytest.mark.slow
def test_every_gpu_of_a_machine(stub_driver: Any, tmp_path: Path) -> None:
    stub_driver.gpu((9, 0), name="Imaginary A").gpu((7, 5), sms=5, name="Imaginary B")
    environment = {**stub_driver.environment(), "SCAN_REGISTRY_CACHE": str(tmp_path / "cache")}
    result = shell("--json", **environment)
    assert result.returncode == 1  # the second is too old for the kernels
    report = json.loads(result.stdout)
    Draft202012Validator(SCHEMA).validate(report)
    assert report["driver"] == "13.0"
    devices = [gpu["device"] for gpu in report["gpus"]]
    assert [(d["name"], d["arch"]) for d in devices] == [
        ("Imaginary A", "sm_90"),
        ("Imaginary B", "sm_75"),
    ]
    assert devices[1]["sm_count"] == 5
    assert [
        f["about"]
        for f in report["findings"]
        if f["text"].startswith("too old: its compute capability is 7.5")
    ][-1] == ("cuda:1, Imaginary B (sm_75)")
    assert not stub_driver.calls("cuDevicePrimaryCtxRetain", "cuModuleLoadData")
    assert not (tmp_path / "cache").exists()


def test_a_driver_without_a_gpu(stub_driver: Any) -> None:
    result = shell(alone=True, **stub_driver.environment(), CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0
    strict = shell("--strict", alone=True, **stub_driver.environment(), CUDA_VISIBLE_DEVICES="")
    assert strict.returncode == 1
    assert "the CUDA driver sees no GPU, so calls run on the CPU alone" in result.stdout
    assert "CUDA_VISIBLE_DEVICES is ''" in result.stdout
    assert "driver     for CUDA 13.0" in result.stdout


def test_a_driver_that_fails(stub_driver: Any) -> None:
    stub_driver.gpu().fail("cuInit", 3)
    result = shell(alone=True, **stub_driver.environment())
    assert result.returncode == 1
    assert "the CUDA driver fails, so calls run on the CPU alone" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--for", "hopper"],
            "--for is 'hopper'; accepted are a GPU's name, its compute capability",
        ),
        (["--for", "sm_90", "--driver", "10"], "--driver is '10'; accepted are a driver's version"),
        (["--driver", "575"], "--driver describes a GPU that is not here; it needs --for"),
        (["--for", "sm_90", "--sms", "0"], "--sms is 0; accepted are positive numbers"),
    ],
)
def test_wrong_arguments(capsys: Capture, words: list[str], message: str) -> None:
    assert main(["doctor", *words]) == 2
    caught = capsys.readouterr()
    assert caught.out == ""
    assert caught.err.startswith(f"scan-registry: error: {message}")


def test_what_is_said_is_not_assumed(provide: Provide, capsys: Capture) -> None:
    provide(archs=["sm90"])
    (gpu,) = document(capsys, "--for", "H100", "--driver", "12.9", "--sms", "9")["gpus"]
    (fact,) = gpu["assumed"]
    assert fact == "232448 bytes of shared memory per block (--shared-memory)"
    assert f"assumed: {fact}" in text(capsys, "--for", "H100", "--driver", "12.9", "--sms", "9")


def test_what_to_do_first(provide: Provide, capsys: Capture) -> None:
    """One remedy, of the first of the errors."""
    provide(archs=["sm90"])
    report = document(capsys, "--for", "RTX 5090", status=1)
    worst = next(f for f in report["findings"] if f["severity"] == "error")
    assert report["first"] == {"about": worst["about"], "remedy": worst["remedies"][0]}
    out = text(capsys, "--for", "RTX 5090", status=1)
    assert out.splitlines()[-3] == "To do first: `pip install scan-registry-sm120`"
