"""The build backend, in a process of its own: importing it mounts the source tree."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from processes import captured

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "call", ["prepare_metadata_for_build_editable", "build_wheel", "build_sdist"]
)
def test_an_old_setuptools_is_named(call: str, tmp_path: Path) -> None:
    """Before anything is built."""
    (needed,) = re.findall(
        r'"setuptools>=(\d+)", "pack', (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    )
    script = (
        f"import sys, setuptools; sys.path.insert(0, {str(ROOT)!r}); setuptools.__version__ = '65.5.0'; "
        f"from aot import backend; backend.{call}({str(tmp_path)!r})"
    )
    done = captured([sys.executable, "-c", script], cwd=tmp_path)
    assert done.returncode != 0
    message = f"this is setuptools 65.5.0; building needs {needed} or later"
    assert f"RuntimeError: {message}" in done.stderr
    assert done.stderr.endswith(f'run `pip install "setuptools>={needed}"`\n')
    assert not [*tmp_path.iterdir()]
