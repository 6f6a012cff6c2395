"""The PEP 517 backend: setuptools, with the archives compiled first.

``-C archs=sm80,sm90`` or ``SCAN_REGISTRY_ARCHS`` choose the architectures (``all``, ``none``). The
compilers are build requirements only when there is something to compile; torch never is one.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

# setuptools imports plugins that are installed, such as that of Hugging Face's package `kernels`. With this folder on the path,
# or by what newer versions of pip find this module with, it would import the folder `kernels` instead. Some of these versions
# also have it take a former build's version here for its own.
sys.meta_path[:] = [finder for finder in sys.meta_path if not hasattr(finder, "backend_path")]
sys.path[:] = [path for path in sys.path if Path(path).resolve() != ROOT]

import setuptools  # noqa: E402
from setuptools import build_meta  # noqa: E402

Settings = Mapping[str, Any] | None
#: The first major version of setuptools that reads pyproject.toml as it is written.
SETUPTOOLS = 77


def _check_setuptools() -> None:
    """``RuntimeError`` if it is too old, which pip does not check with ``--no-build-isolation``."""
    version = setuptools.__version__
    if int(version.partition(".")[0]) < SETUPTOOLS:
        raise RuntimeError(
            f"this is setuptools {version}; building needs {SETUPTOOLS} or later. "
            f'Without --no-build-isolation pip installs that by itself; with it run `pip install "setuptools>={SETUPTOOLS}"`'
        )


def _mount() -> None:
    """Make the source tree importable as it will be installed.

    ``kernels`` and ``aot`` lie beside ``scan_registry`` and are installed inside it.
    """
    spec = importlib.util.spec_from_file_location(
        "scan_registry",
        ROOT / "scan_registry" / "__init__.py",
        submodule_search_locations=[str(ROOT / "scan_registry"), str(ROOT)],
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["scan_registry"] = package
    spec.loader.exec_module(package)


def _archives(settings: Settings) -> None:
    _check_setuptools()
    from scan_registry.aot.build import build_archives, check_archives
    from scan_registry.aot.pack import forget_tunings, leave_tunings, provenance
    from scan_registry.aot.plan import chosen_archs
    from scan_registry.cache.store import build_folder
    from scan_registry.version import __version__

    forget_tunings()
    paths = build_archives(
        ROOT / "scan_registry" / "archives",
        chosen_archs(settings),
        build_folder(),
        provenance(ROOT, __version__),
    )
    check_archives(paths)
    leave_tunings()


def _requirements(base: list[str], settings: Settings) -> list[str]:
    from scan_registry.aot import COMPILERS
    from scan_registry.aot.plan import chosen_archs

    return [*base, *(COMPILERS if chosen_archs(settings) else ())]


_mount()


def get_requires_for_build_sdist(config_settings: Settings = None) -> list[str]:
    return list(build_meta.get_requires_for_build_sdist(config_settings))


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return _requirements(build_meta.get_requires_for_build_wheel(None), config_settings)


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    return _requirements(build_meta.get_requires_for_build_editable(None), config_settings)


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: Settings = None
) -> str:
    _check_setuptools()
    return str(build_meta.prepare_metadata_for_build_wheel(metadata_directory))


def prepare_metadata_for_build_editable(
    metadata_directory: str, config_settings: Settings = None
) -> str:
    _check_setuptools()
    return str(build_meta.prepare_metadata_for_build_editable(metadata_directory))


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    _check_setuptools()
    return str(build_meta.build_sdist(sdist_directory))


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    # setuptools would pack whatever an earlier build has left in its staging folder.
    for stale in (ROOT / "build").glob("lib*"):
        shutil.rmtree(stale)
    _archives(config_settings)
    return str(build_meta.build_wheel(wheel_directory, None, metadata_directory))


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    _archives(config_settings)
    return str(build_meta.build_editable(wheel_directory, None, metadata_directory))
