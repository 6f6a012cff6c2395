"""tools/dev.py: what it decides, without building anything."""

from __future__ import annotations

import importlib.util
import re
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]

#: A wheel's files, as few as are allowed.
COMPLETE = (
    "scan_registry/__init__.py",
    "scan_registry/_launcher.abi3.so",
    "scan_registry/_launcher.pyi",
    "scan_registry/_signature.abi3.so",
    "scan_registry/_cpu.abi3.so",
    "scan_registry/py.typed",
    "scan_registry/aot/plan.py",
    "scan_registry/archives/ptx80.scanreg",
    "scan_registry/archives/sm90.scanreg",
    "scan_registry/kernels/linear_scan/spec.py",
    "scan_registry/kernels/linear_scan/time_last_forward.cu",
    "scan_registry/kernels/linear_scan/affine.cuh",
    "scan_registry-0.1.0.dist-info/METADATA",
    "scan_registry-0.1.0.dist-info/RECORD",
)


@pytest.fixture(scope="module")
def dev() -> ModuleType:
    """The script as a module; it is not in a package."""
    spec = importlib.util.spec_from_file_location("dev_script", ROOT / "tools" / "dev.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def write_wheel(folder: Path, *names: str) -> Path:
    path = folder / "scan_registry-0.1.0-cp310-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name in names:
            wheel.writestr(name, name * 3)
    return path


def test_a_complete_wheel_passes(dev: ModuleType, tmp_path: Path) -> None:
    wheel = dev.check_wheel(write_wheel(tmp_path, *COMPLETE))
    assert wheel.top_level == ("scan_registry",)
    assert list(wheel.archives) == ["ptx80", "sm90"]
    assert "installs: scan_registry" in str(wheel)


@pytest.mark.parametrize(
    "stray", ["kernels/__init__.py", "aot/plan.py", "setup.py", "tests/test_x.py"]
)
def test_a_second_import_name_is_refused(dev: ModuleType, tmp_path: Path, stray: str) -> None:
    with pytest.raises(dev.DevError, match=stray.partition("/")[0]):
        dev.check_wheel(write_wheel(tmp_path, *COMPLETE, stray))


@pytest.mark.parametrize(
    "place", ["scan_registry-0.1.0.data/purelib/kernels.py", "scan_registry-0.1.0.data/data/x"]
)
def test_the_data_folder_is_refused(dev: ModuleType, tmp_path: Path, place: str) -> None:
    with pytest.raises(dev.DevError, match="must be scan_registry alone"):
        dev.check_wheel(write_wheel(tmp_path, *COMPLETE, place))


@pytest.mark.parametrize(
    "ending",
    [
        *("_launcher.abi3.so", "_launcher.pyi", "_signature.abi3.so", "_cpu.abi3.so"),
        *("py.typed", ".cu", ".cuh", ".scanreg"),
    ],
)
def test_a_missing_part_is_named(dev: ModuleType, tmp_path: Path, ending: str) -> None:
    rest = [name for name in COMPLETE if not name.endswith(ending)]
    assert len(rest) < len(COMPLETE)
    with pytest.raises(dev.DevError, match=re.escape(ending)):
        dev.check_wheel(write_wheel(tmp_path, *rest))


def test_a_damaged_wheel_is_refused(dev: ModuleType, tmp_path: Path) -> None:
    path = write_wheel(tmp_path, *COMPLETE)
    content = path.read_bytes()
    at = content.index(COMPLETE[0].encode() * 3)  # the stored text of the first file
    path.write_bytes(content[:at] + b"?" + content[at + 1 :])
    with pytest.raises(dev.DevError, match="damaged"):
        dev.check_wheel(path)


def test_the_whole_suite_runs_in_parallel(dev: ModuleType) -> None:
    assert dev.pytest_arguments([], workers=2) == ["-n", "2"]
    assert dev.pytest_arguments([], workers=64) == ["-n", "8"]


def test_a_choice_of_tests_is_passed_on(dev: ModuleType) -> None:
    assert dev.pytest_arguments(["-k", "select", "-x"], workers=2) == ["-k", "select", "-x"]


def test_types_are_checked_under_the_import_names(
    dev: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dev, "WORK", tmp_path)
    dev.stage_for_types()
    package = dev.stage_for_types() / "scan_registry"  # twice: it replaces what was there
    for name, source in (
        ("select.py", "scan_registry/select.py"),
        ("aot/plan.py", "aot/plan.py"),
        ("kernels/model.py", "kernels/model.py"),
    ):
        assert (package / name).samefile(ROOT / source)


def test_an_environment_of_another_python_is_not_reused(dev: ModuleType, tmp_path: Path) -> None:
    environment = dev.Environment(tmp_path)
    assert not environment.healthy()
    environment.stamp.write_text(environment.identity() + "else")
    assert not environment.healthy()


def test_linters_are_pinned_alike_everywhere() -> None:
    pins = dict(
        line.split("==")
        for line in (ROOT / "ci" / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert f"ruff-pre-commit\n    rev: v{pins['ruff']}\n" in hooks
    assert "tools/dev.py types" in hooks  # mypy comes from the same environment
    assert pins["torch"]
