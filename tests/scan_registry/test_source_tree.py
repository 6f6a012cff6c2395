"""In the root of a clone, Python finds the sources before the installed package. They give way to it, or say what to do."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from processes import captured

import scan_registry
import scan_registry.aot
import scan_registry.kernels

ROOT = Path(__file__).parents[2]
#: What an editable install puts at the end of ``sys.meta_path``.
EDITABLE = f"""
import sys
from importlib.util import spec_from_file_location
folders = {{"scan_registry": "scan_registry", "scan_registry.kernels": "kernels", "scan_registry.aot": "aot"}}
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in folders:
            return spec_from_file_location(name, {str(ROOT)!r} + "/" + folders[name] + "/__init__.py")
sys.meta_path.append(Finder)
"""
USE = """
import scan_registry, scan_registry.kernels
assert scan_registry.FallbackWarning and "gated_scan" in scan_registry.kernels.families()
print(scan_registry.__file__)
"""


def run(words: list[str], *path: Path) -> tuple[str, str]:
    """Both outputs of Python in the root of the clone. It knows of no installed package but those on ``path``."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = captured([sys.executable, "-S", *words], cwd=ROOT, env=environment)
    return done.stdout.strip(), done.stderr.strip()


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder that has the package as a wheel installs it, by links."""
    package = tmp_path / "site" / "scan_registry"
    package.mkdir(parents=True)
    for item in (scan_registry, scan_registry.kernels, scan_registry.aot):
        folder = Path(str(item.__file__)).parent
        entries = folder.iterdir() if item is scan_registry else [folder]
        for entry in entries:
            name = item.__name__.rpartition(".")[2] if entry == folder else entry.name
            if not (package / name).exists():
                (package / name).symlink_to(entry)
    (package / "__init__.py").unlink()  # Links to one file are one file.
    (package / "__init__.py").write_bytes(Path(str(scan_registry.__file__)).read_bytes())
    return package.parent


@pytest.mark.parametrize("words", [["-c", USE], ["-m", "scan_registry", "--version"]], ids=str)
def test_without_an_installation_one_line_says_what_to_do(words: list[str]) -> None:
    said, error = run(words)
    assert not said
    assert f"ImportError: {ROOT} is the source tree" in error.splitlines()[-1]
    assert f"pip install -e {ROOT}" in error.splitlines()[-1]


def test_an_installed_package_is_used(installed: Path) -> None:
    said, error = run(["-c", USE], installed)
    assert (said, error) == (str(installed / "scan_registry" / "__init__.py"), "")
    # The command line needs packages that are installed, too.
    packages = [Path(path) for path in sys.path if path.endswith("-packages")]
    said, error = run(["-m", "scan_registry", "--version"], installed, *packages)
    assert (said, error) == (f"scan-registry {scan_registry.__version__}", "")


def test_an_editable_install_is_the_source_tree() -> None:
    said, error = run(["-c", EDITABLE + USE])
    assert (said, error) == (str(ROOT / "scan_registry" / "__init__.py"), "")


def test_two_source_trees_do_not_give_way_to_each_other(tmp_path: Path) -> None:
    other = tmp_path / "clone"
    (other / "scan_registry").mkdir(parents=True)
    for entry in (ROOT / "scan_registry").iterdir():
        if entry.name != "__init__.py":
            (other / "scan_registry" / entry.name).symlink_to(entry)
    initialisation = (ROOT / "scan_registry" / "__init__.py").read_bytes()
    (other / "scan_registry" / "__init__.py").write_bytes(initialisation)
    _, error = run(["-c", "import scan_registry; scan_registry.linear_scan"], other)
    assert f"ImportError: {other} is the source tree" in error.splitlines()[-1]
    # Where a third one is installed editable, it is used.
    said, error = run(["-c", f"import sys; sys.path.insert(0, {str(other)!r})" + EDITABLE + USE])
    assert (said, error) == (str(ROOT / "scan_registry" / "__init__.py"), "")
