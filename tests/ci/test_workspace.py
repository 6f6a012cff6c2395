"""What the scripts share: looking into wheels, and environments."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest

from ci import workspace

#: A wheel's files, as few as are allowed.
COMPLETE = (
    "scan_registry/__init__.py",
    "scan_registry/hardware/_launcher.abi3.so",
    "scan_registry/hardware/_launcher.pyi",
    "scan_registry/ops/_cpu.abi3.so",
    "scan_registry/py.typed",
    "scan_registry/aot/plan.py",
    "scan_registry/archives/ptx80.scanreg",
    "scan_registry/archives/sm90.scanreg",
    "scan_registry/kernels/linear_scan/spec.py",
    "scan_registry/kernels/linear_scan/time_last_forward.cu",
    "scan_registry/kernels/common/affine.cuh",
    "scan_registry-0.1.0.dist-info/METADATA",
    "scan_registry-0.1.0.dist-info/RECORD",
)


def write_wheel(folder: Path, *names: str) -> Path:
    path = folder / "scan_registry-0.1.0-cp310-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name in names:
            wheel.writestr(name, name * 3)
    return path


def test_a_complete_wheel_passes(tmp_path: Path) -> None:
    wheel = workspace.check_wheel(write_wheel(tmp_path, *COMPLETE))
    assert wheel.top_level == ("scan_registry",)
    assert list(wheel.archives) == ["ptx80", "sm90"]
    assert "installs: scan_registry" in str(wheel)


@pytest.mark.parametrize("stray", ["kernels/__init__.py", "setup.py"])
def test_a_second_import_name_is_refused(tmp_path: Path, stray: str) -> None:
    with pytest.raises(workspace.DevError, match=stray.partition("/")[0]):
        workspace.check_wheel(write_wheel(tmp_path, *COMPLETE, stray))


@pytest.mark.parametrize(
    "place", ["scan_registry-0.1.0.data/purelib/kernels.py", "scan_registry-0.1.0.data/data/x"]
)
def test_the_data_folder_is_refused(tmp_path: Path, place: str) -> None:
    with pytest.raises(workspace.DevError, match="must be scan_registry alone"):
        workspace.check_wheel(write_wheel(tmp_path, *COMPLETE, place))


@pytest.mark.parametrize(
    "ending",
    [
        *("_launcher.abi3.so", "_launcher.pyi", "_cpu.abi3.so"),
        *("py.typed", ".cu", ".cuh", ".scanreg"),
    ],
)
def test_a_missing_part_is_named(tmp_path: Path, ending: str) -> None:
    rest = [name for name in COMPLETE if not name.endswith(ending)]
    assert len(rest) < len(COMPLETE)
    with pytest.raises(workspace.DevError, match=re.escape(ending)):
        workspace.check_wheel(write_wheel(tmp_path, *rest))


def test_a_damaged_wheel_is_refused(tmp_path: Path) -> None:
    path = write_wheel(tmp_path, *COMPLETE)
    content = path.read_bytes()
    at = content.index(COMPLETE[0].encode() * 3)  # the stored text of the first file
    path.write_bytes(content[:at] + b"?" + content[at + 1 :])
    with pytest.raises(workspace.DevError, match="damaged"):
        workspace.check_wheel(path)


def test_an_environment_of_another_python_is_not_reused(tmp_path: Path) -> None:
    environment = workspace.Environment(tmp_path)
    assert not environment.healthy()
    environment.stamp.write_text(environment.identity() + "else", encoding="utf-8")
    assert not environment.healthy()


@pytest.mark.parametrize(
    ("answer", "archs"), [("8.9\n9.0\n8.9", "sm89,sm90"), ("8.7\n9.0", "ptx80,sm90"), ("", "ptx80")]
)
def test_a_demo_compiles_for_the_gpus_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, archs: str
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{answer}'\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert workspace.archs_of_this_machine() == archs


@pytest.mark.parametrize("script", [None, "#!/bin/sh\necho 'No devices were found'\nexit 6\n"])
def test_a_demo_without_a_gpu_compiles_ptx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None
) -> None:
    if script:
        program = tmp_path / "nvidia-smi"
        program.write_text(script, encoding="utf-8")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert workspace.archs_of_this_machine() == "ptx80"
