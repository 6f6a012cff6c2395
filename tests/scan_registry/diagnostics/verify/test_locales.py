"""Sources are UTF-8, whatever the locale of who verifies or compiles them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from processes import captured
from verifying import shell

from scan_registry.aot.compile import recipe
from scan_registry.dispatch.fit import Toolchain
from scan_registry.hardware.target import Target
from scan_registry.kernels import families
from scan_registry.kernels.model import Language
from scan_registry.runtime.jit import toolchains

#: A locale in which nothing but ASCII can be read, as in a container that sets none and forbids UTF-8.
ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": "utf-8"}
TARGET = Target((9, 0))

KEYS = """
import json, locale
from scan_registry.aot.compile import recipe
from scan_registry.kernels import families
from scan_registry.hardware.target import Target
assert locale.getpreferredencoding(False) == "ANSI_X3.4-1968"
target = Target((9, 0))
print(json.dumps([recipe(kernel.variants[0], target).key for family in families().values()
                  for kernel in family.kernels]))
"""
COMPILE = """
import sys
from scan_registry.runtime import jit
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.hardware.target import Target
kernel = FAMILY.kernel("time_last_forward", sys.argv[1])
compiled = jit.compile(kernel.variants[0], Target((9, 0)))
print(compiled.cached, compiled.binary.size == len(compiled.content))
"""


def in_ascii(script: str, *words: str, folder: Path) -> str:
    done = captured(
        [sys.executable, "-c", script, *words],
        cwd=folder,
        env={**os.environ, **ASCII, "SCAN_REGISTRY_CACHE": str(folder / "cache")},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_verify_reads_sources_as_utf8(provided: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, also to compile it again."""
    for name, value in ASCII.items():
        monkeypatch.setenv(name, value)
    assert "0 defects" in shell(provided)
    shell(provided, "--rebuild")


def test_what_sources_give_is_the_same_in_every_locale(tmp_path: Path) -> None:
    kernels = [kernel for family in families().values() for kernel in family.kernels]
    report = json.loads(in_ascii(KEYS, folder=tmp_path))
    assert report == [recipe(kernel.variants[0], TARGET).key for kernel in kernels]


@pytest.mark.parametrize("language", ["cuda", "triton"])
def test_what_is_compiled_here_needs_no_locale(tmp_path: Path, language: Language) -> None:
    if not isinstance(toolchains().get(language), Toolchain):
        pytest.skip(f"no compiler of {language} is installed")
    assert in_ascii(COMPILE, language, folder=tmp_path).split() == ["False", "True"]
