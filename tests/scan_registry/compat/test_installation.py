"""What ``install`` makes importable, as libraries look for packages, and what it refuses."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from scan_registry import compat
from scan_registry.compat import installation

NAMES = ("mamba_ssm", "causal_conv1d")


@pytest.fixture(autouse=True)
def _taken_back() -> Iterator[None]:
    for name in NAMES:
        if importlib.util.find_spec(name) is not None:
            pytest.skip(f"{name} itself is installed here")
    finders = [*sys.meta_path]
    yield
    compat.uninstall()
    assert sys.meta_path == finders


def test_they_are_found_as_installed_packages_are() -> None:
    compat.install(*NAMES)
    for name in NAMES:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.name == name
        version = importlib.metadata.version(name)
        assert version == importlib.metadata.version(name.replace("_", "-"))
        assert "scan.registry" in version
        assert importlib.metadata.packages_distributions()[name] == [name.replace("_", "-")]
        assert importlib.import_module(name).__version__ == version


def test_their_functions_are_this_packages() -> None:
    compat.install(*NAMES)
    for name in NAMES:
        for place, ours in installation.STAND_INS[name].modules.items():
            theirs = importlib.import_module(name + place)
            module = importlib.import_module(f"scan_registry.compat.{ours}")
            assert theirs.__name__ == name + place
            assert theirs.__spec__ is not None
            assert theirs.__spec__.name == name + place
            assert module.__spec__ is not None
            assert module.__spec__.name == f"scan_registry.compat.{ours}"
            assert theirs.__all__ == module.__all__
            for each in module.__all__:
                found = getattr(theirs, each)
                if isinstance(found, ModuleType):
                    assert found is sys.modules[f"{name}{place}.{each}"]
                else:
                    assert found is getattr(module, each)


def test_transformers_alone_finds_no_fused_block() -> None:
    """All that asks by any name gets the functions of whole blocks, but transformers' own code some that return None."""
    compat.install("mamba_ssm")
    one, other = "mamba_inner_fn", "mamba_split_conv1d_scan_combined"
    real: dict[str, Any] = {
        one: compat.mamba_ssm.mamba_inner_fn,
        other: compat.mamba_ssm.ops.triton.ssd_combined.mamba_split_conv1d_scan_combined,
    }
    ways = [
        ("from mamba_ssm.ops.selective_scan_interface import mamba_inner_fn", one),
        ("from mamba_ssm import mamba_inner_fn", one),
        ("from mamba_ssm.ops.selective_scan_interface import *", one),
        ("import mamba_ssm; mamba_inner_fn = getattr(mamba_ssm, 'mamba_inner_fn', None)", one),
        (f"from mamba_ssm.ops.triton.ssd_combined import {other}", other),
        ("from mamba_ssm.ops.triton.ssd_combined import *", other),
    ]
    for way, function in ways:
        for name in ("mine", "transformers_modules.mine", "__main__"):
            names: dict[str, Any] = {"__name__": name}
            exec(way, names)
            assert names[function] is real[function], (way, name)
        names = {"__name__": "transformers.models.mamba.modeling_mamba"}
        exec(way, names)
        assert names[function](torch.zeros(2), delta_softplus=True) is None
    with pytest.raises(AttributeError, match="module 'mamba_ssm' has no attribute 'Mamba3'"):
        _ = importlib.import_module("mamba_ssm").Mamba3


def test_what_there_is_none_of_is_not_found() -> None:
    compat.install(*NAMES)
    for module in ("mamba_ssm.modules.mamba3", "causal_conv1d.causal_conv1d_cuda"):
        with pytest.raises(ModuleNotFoundError, match=module.replace(".", r"\.")):
            importlib.import_module(module)
    assert importlib.util.find_spec("mamba_ssm_too") is None
    # transformers takes 2.0.4 for the mark of Mamba-2's kernels; those of Mamba-3 came with 2.3.
    version = importlib.metadata.version("mamba_ssm").partition("+")[0].split(".")
    assert (2, 0, 4) <= tuple(map(int, version)) < (2, 3)


@pytest.mark.parametrize("imported", [False, True])
def test_a_folder_of_the_name_is_no_original(
    imported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a checkout in the working directory, which Python takes for a package."""
    (tmp_path / "mamba_ssm" / "mamba_ssm").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    if imported:
        importlib.import_module("mamba_ssm")
    compat.install(*NAMES)
    for name in NAMES:
        assert "scan.registry" in importlib.import_module(name).__version__
    assert importlib.import_module("mamba_ssm.ops.selective_scan_interface").selective_scan_fn
    compat.uninstall("mamba_ssm")
    assert importlib.util.find_spec("mamba_ssm").origin is None
    compat.install("mamba_ssm")
    assert importlib.import_module("mamba_ssm").__version__
    compat.uninstall()
    importlib.invalidate_caches()
    sys.modules.pop("mamba_ssm", None)


def test_a_folder_with_the_packages_modules_is_an_original(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "causal_conv1d"
    folder.mkdir()
    (folder / "causal_conv1d_interface.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="importable already"):
        compat.install("causal_conv1d")
    sys.modules.pop("causal_conv1d", None)


def test_installing_twice_changes_nothing() -> None:
    compat.install("mamba_ssm")
    module = importlib.import_module("mamba_ssm")
    finders = [*sys.meta_path]
    compat.install("mamba_ssm", "mamba_ssm")
    assert sys.meta_path == finders
    assert importlib.import_module("mamba_ssm") is module
    assert importlib.util.find_spec("causal_conv1d") is None


def test_uninstall_takes_it_back() -> None:
    compat.install(*NAMES)
    for name in NAMES:
        importlib.import_module(name)
    compat.uninstall("mamba_ssm")
    assert not [m for m in sys.modules if m == "mamba_ssm" or m.startswith("mamba_ssm.")]
    assert importlib.util.find_spec("mamba_ssm") is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("mamba_ssm")
    assert importlib.util.find_spec("causal_conv1d") is not None
    compat.uninstall("mamba_ssm")
    compat.uninstall()
    assert importlib.util.find_spec("causal_conv1d") is None
    compat.install("mamba_ssm")
    assert importlib.util.find_spec("mamba_ssm") is not None


def test_an_original_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mamba_ssm").mkdir()
    (tmp_path / "mamba_ssm" / "__init__.py").write_text("original = True\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ImportError, match=r"mamba_ssm is importable already, from .*mamba_ssm.__init__"
    ):
        compat.install("causal_conv1d", "mamba_ssm")
    assert importlib.util.find_spec("causal_conv1d") is None
    assert importlib.import_module("mamba_ssm").original
    try:
        with pytest.raises(ImportError, match="is not replaced"):
            compat.install("mamba_ssm")
    finally:
        del sys.modules["mamba_ssm"]


@pytest.mark.parametrize("names", [("torch",), ("flashrnn",), ("mamba-ssm",), (7,), ()])
def test_other_names_are_refused(names: tuple[Any, ...]) -> None:
    message = "accepted are .*mamba_ssm.*" if names else "mamba_ssm"
    with pytest.raises(ValueError, match=message):
        compat.install(*names)
    if names:
        with pytest.raises(ValueError, match=repr(names[0])):
            compat.uninstall(*names)


def test_what_is_meant_is_suggested() -> None:
    with pytest.raises(ValueError, match=r"'mamba-ssm' is not .*; did you mean mamba_ssm\? Stand"):
        compat.install("mamba-ssm")
    for names in (["mamba_ssm", "causal_conv1d"], ("mamba_ssm", "causal_conv1d")):
        for call in (compat.install, compat.uninstall):
            with pytest.raises(TypeError, match="pass the names one by one: 'mamba_ssm', 'causal"):
                call(names)  # type: ignore[arg-type]


def test_a_model_that_looked_before_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "transformers.models.mamba.modeling_mamba"
    early = ModuleType(name)
    vars(early)["mamba_selective_scan"] = None
    monkeypatch.setitem(sys.modules, name, early)
    monkeypatch.setitem(sys.modules, "transformers.models.bert.modeling_bert", ModuleType("bert"))
    with pytest.warns(
        RuntimeWarning,
        match=rf"(^|, ){name}(,| was imported before and keeps its| were imported before and keep their)",
    ):
        compat.install("mamba_ssm")


def test_installing_imports_no_torch() -> None:
    program = (
        "import sys; from scan_registry import compat; compat.install('mamba_ssm', 'causal_conv1d'); "
        "import importlib.util; importlib.util.find_spec('mamba_ssm'); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], cwd="/", check=True)
