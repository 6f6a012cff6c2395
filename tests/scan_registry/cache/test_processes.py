"""The cache under many processes: ``tools/stress_cache.py`` finds no violation, and would notice one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scan_registry.runtime import jit

TOOLS = Path(__file__).parents[3] / "tools"

needs_nvrtc = pytest.mark.skipif(
    isinstance(jit.toolchains()["cuda"], str), reason="NVRTC is not installed"
)


def stress(*arguments: object, patch: str = "") -> subprocess.CompletedProcess[str]:
    """Run the tool, after ``patch``, as its workers are forked from it."""
    script = f"""
import sys
import stress_cache
from scan_registry.artifact import archive
from scan_registry.cache import store
{patch}
sys.exit(stress_cache.main(sys.argv[1:]))
"""
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=TOOLS,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
        timeout=300,
    )


@needs_nvrtc
@pytest.mark.parametrize("scenario", ["race", "flipped", "read-only", "full"])
def test_many_processes(scenario: str) -> None:
    done = stress("--processes", 12, "--rounds", 2, "--kills", 0.3, "--scenario", scenario)
    assert done.returncode == 0, done.stdout + done.stderr
    assert scenario in done.stdout


NO_LOCKS = "store._take = lambda handle: None"
NO_DIGESTS = """
from scan_registry.artifact.archive import Archive
Archive.read = lambda self, binary: self.path.read_bytes()[-binary.size:]
"""


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize(
    ("patch", "arguments", "violation"),
    [
        (NO_LOCKS, ("--scenario", "race", "--kills", 0), "at the same time"),
        (NO_DIGESTS, ("--scenario", "flipped", "--rounds", 6), "error: flipped"),
    ],
)
def test_the_stress_would_notice(patch: str, arguments: tuple[object, ...], violation: str) -> None:
    """Without locks, or without digests, there are violations."""
    done = stress("--processes", 8, "--rounds", 2, *arguments, patch=patch)
    assert done.returncode == 1, done.stdout + done.stderr
    assert violation in done.stderr


def test_the_stress_refuses_what_makes_no_sense() -> None:
    for arguments in (("--kills", 1), ("--processes", 0), ("--scenario", "flood")):
        done = stress(*arguments)
        assert done.returncode == 2
        assert str(arguments[1]) in done.stderr
