"""NVRTC's two libraries, as the wheels of CUDA 12 and 13 lay them out, in a process without torch."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from processes import captured

import scan_registry
from scan_registry.aot import nvrtc
from scan_registry.dispatch.fit import Toolchain
from scan_registry.runtime.jit import toolchains

PACKAGE = Path(scan_registry.__file__).parent

#: What matters of NVRTC: it knows its version, and opens its builtins by their bare name when it compiles.
SOURCE = """
#include <dlfcn.h>
int nvrtcVersion(int *major, int *minor) {{ *major = {major}; *minor = {minor}; return 0; }}
const char *nvrtcGetErrorString(int status) {{ return status ? "failed to open the builtins" : "fine"; }}
int nvrtcCompileProgram(void) {{ return dlopen("libnvrtc-builtins.so.{major}.{minor}", RTLD_NOW) ? 0 : 6; }}
"""
COMPILE = """
import sys
from scan_registry.aot import nvrtc
library, version = nvrtc._library()
nvrtc._check(library.nvrtcCompileProgram())
print(version, nvrtc._candidates()[0].file, "torch" in sys.modules)
"""
REAL = """
import sys
from scan_registry.aot.compile import compile_variant
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.hardware.target import Target
variant = FAMILY.kernel("time_last_forward", "cuda").variants[0]
binary, content = compile_variant(variant, Target((9, 0)))
print(len(content) == binary.size, "torch" in sys.modules)
"""
LAYOUTS = [("cuda_nvrtc", (12, 4)), ("cu13", (13, 2))]


def run(script: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
    return captured(
        [sys.executable, *options, "-c", script], cwd=os.sep, env={**environment, **variables}
    )


def make(library: Path, source: str) -> None:
    """A library that the loader knows by its file's name."""
    library.parent.mkdir(parents=True, exist_ok=True)
    words = ["-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-x", "c", "-", "-o", library]
    command = [*shlex.split(os.environ.get("CC") or "cc"), *map(str, words), "-ldl"]
    subprocess.run(command, input=source.encode(), check=True)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the package, and nothing else of what is installed."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "scan_registry").symlink_to(PACKAGE)
    return tmp_path / "site"


@pytest.mark.parametrize(("folder", "release"), LAYOUTS)
def test_builtins_are_found_beside_the_compiler(
    site: Path, folder: str, release: tuple[int, int]
) -> None:
    major, minor = release
    place = site / "nvidia" / folder / "lib"
    make(place / f"libnvrtc.so.{major}", SOURCE.format(major=major, minor=minor))
    make(place / f"libnvrtc-builtins.so.{major}.{minor}", "int builtins;")
    done = run(COMPILE, "-S", PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [f"{major}.{minor}", str(place / f"libnvrtc.so.{major}"), "False"]


def test_builtins_that_are_not_there_are_what_nvrtc_says(site: Path) -> None:
    make(site / "nvidia" / "cu13" / "lib" / "libnvrtc.so.13", SOURCE.format(major=13, minor=0))
    done = run(COMPILE, "-S", PYTHONPATH=str(site))
    assert done.stderr.splitlines()[-1].endswith("CompileError: failed to open the builtins")


def test_what_is_installed_compiles_without_torch() -> None:
    result = toolchains()["cuda"]
    if not isinstance(result, Toolchain):
        pytest.skip("NVRTC is not installed")
    done = run(REAL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "False"]


def test_a_library_of_the_system_is_left_to_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bare name says nothing of a folder, least of all of the current one."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("opened")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    nvrtc._load_builtins(nvrtc._Library("libnvrtc.so.13"), "13.0")
