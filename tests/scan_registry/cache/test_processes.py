"""The cache under many processes: ``tests/stress/cache.py`` finds no violation, and would notice one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from processes import captured

from scan_registry.runtime import jit

STRESS = Path(__file__).parents[2] / "stress"

needs_nvrtc = pytest.mark.skipif(
    isinstance(jit.toolchains()["cuda"], str), reason="NVRTC is not installed"
)


def stress(*arguments: object, patch: str = "") -> subprocess.CompletedProcess[str]:
    """Run the tool, after ``patch``, as its workers are forked from it."""
    script = f"""
import sys
import cache
from scan_registry.artifact import archive
from scan_registry.cache import store
{patch}
sys.exit(cache.main(sys.argv[1:]))
"""
    return captured([sys.executable, "-c", script, *map(str, arguments)], cwd=STRESS, timeout=300)


@needs_nvrtc
@pytest.mark.parametrize("scenario", ["race", "flipped", "read-only", "full"])
def test_many_processes(scenario: str) -> None:
    done = stress("--processes", 4, "--rounds", 2, "--kills", 0.3, "--scenario", scenario)
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
        (NO_LOCKS, ("--scenario", "race", "--kills", 0, "--rounds", 1), "at the same time"),
        (NO_DIGESTS, ("--scenario", "flipped", "--rounds", 3), "error: flipped"),
    ],
)
def test_the_stress_would_notice(patch: str, arguments: tuple[object, ...], violation: str) -> None:
    """Without locks, or without digests, there are violations."""
    done = stress("--processes", 3, *arguments, patch=patch)
    assert done.returncode == 1, done.stdout + done.stderr
    assert violation in done.stderr
