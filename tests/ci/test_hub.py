"""The repository for Hugging Face's Hub: what is in it, and what the ``kernels`` library makes of it."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

import hub_programs
import pytest
from forked import captured
from kernels.variants import get_variants_local, resolve_variant
from kernels_data import Digest, DigestAlgorithm, Metadata

import kernels
from ci import hub
from ci.workspace import DevError
from scan_registry.compat import hub_layers
from scan_registry.hardware.target import Target
from scan_registry.packaging.wheel import Wheel

MACHINE = platform.machine()
NAMES = [f"torch-stable-abi26-{backend}-{MACHINE}-linux" for backend in ("cpu", "cu120", "cu130")]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the installed package."""
    folder = tmp_path_factory.mktemp("hub") / "repository"
    assert hub.main([str(folder)]) == 0
    return folder


def run(program: str, *arguments: object, cwd: Path) -> Any:
    """What the program prints as its last line, which is JSON."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    result = captured([sys.executable, "-c", program, *arguments], cwd=cwd, env=variables)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


# --- What is in it ----------------------------------------------------------------------------


def test_a_second_build_gives_the_same_bytes(repository: Path) -> None:
    second = {variant.name: variant for variant in hub.variants(hub.installed(), None)}
    assert sorted(path.name for path in (repository / "build").iterdir()) == NAMES == sorted(second)
    for name, variant in second.items():
        folder = repository / "build" / name
        there = {
            str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()
        }
        assert json.loads(there.pop("metadata.json")) == variant.metadata
        assert there == variant.files


def test_archives_are_those_of_the_package(repository: Path) -> None:
    packed = {n: text for n, text in hub.installed().files.items() if n.endswith(".scanreg")}
    assert packed
    for name in NAMES:
        folder = repository / "build" / name
        copies = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.scanreg")}
        assert copies == ({} if "-cpu-" in name else packed)


@pytest.mark.parametrize("name", NAMES)
def test_the_loader_reads_the_metadata(repository: Path, name: str) -> None:
    folder = repository / "build" / name
    metadata = Metadata.read_from_file(folder / "metadata.json")
    assert (str(metadata.name), metadata.version) == ("scan-registry", hub.VERSION)
    assert (metadata.license, metadata.python_depends) == ("apache-2.0", [])
    assert re.fullmatch(r"scan_registry_(cpu|cuda)_[0-9a-f]{16}", metadata.id)
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, folder))
    _, targets = hub.chosen(hub.installed(), None)
    assert metadata.backend.archs == (
        None if "-cpu-" in name else [hub.capability(target) for target in targets]
    )


def test_targets_as_the_loader_compares_them() -> None:
    labels = ("sm90", "sm90a", "sm120", "ptx80")
    spelt = [hub.capability(Target.parse(label)) for label in labels]
    assert spelt == ["9.0", "9.0a", "12.0", "8.0+PTX"]


def test_no_two_variants_have_the_same_name_in_python(repository: Path) -> None:
    paths = [repository / "build" / name / "metadata.json" for name in NAMES]
    assert len({Metadata.read_from_file(path).id for path in paths}) == len(NAMES)


def test_the_loader_takes_one_variant(repository: Path) -> None:
    variant, trace = resolve_variant(get_variants_local(repository / "build"))
    assert variant is not None, trace
    assert variant.variant_str in NAMES
    assert len([d for d in trace if isinstance(d, kernels.VariantAccepted)]) == 1


def test_no_import_names_the_package(repository: Path) -> None:
    modules = sorted((repository / "build" / NAMES[1]).rglob("*.py"))
    assert len(modules) > 200
    for path in modules:
        text = path.read_text(encoding="utf-8")
        if re.search(
            r"(from|import)\s+scan_registry", text
        ):  # which strings and comments may hold, too
            named = [i for i in hub.imports(text) if i.is_absolute]
            assert not named, f"{path}: {named}"


def test_the_card_says_how_to_load_this_version(repository: Path) -> None:
    card = (repository / "README.md").read_text(encoding="utf-8")
    assert f"version={hub.VERSION}," in card
    assert "{" not in card


def test_archives_can_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, targets = hub.chosen(hub.installed(), [Target.parse("ptx80")])
    assert targets == [Target.parse("ptx80")]
    assert hub.main([str(tmp_path), "--archs", "sm75"]) == 1
    assert "no archive for sm75; the package has " in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path, core: Wheel) -> None:
    (tmp_path / "mine").touch()
    wheel = core.write(tmp_path)
    with pytest.raises(DevError, match="is not empty"):
        hub.write(tmp_path, [*hub.variants(hub.from_wheel(wheel), None)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", wheel.name]


def test_wheels_of_both_platforms_make_one_repository(tmp_path: Path, job: Any) -> None:
    wheels = [job("sm90").write(tmp_path)]
    wheels += [tmp_path / wheels[0].name.replace("x86_64", "aarch64")]
    wheels[1].write_bytes(wheels[0].read_bytes())
    assert hub.main([str(tmp_path / "out"), *map(str, wheels)]) == 0
    names = {path.name for path in (tmp_path / "out" / "build").iterdir()}
    backends = ("cpu", "cu120", "cu130")
    machines = ("aarch64", "x86_64")
    assert names == {f"torch-stable-abi26-{b}-{m}-linux" for b in backends for m in machines}


# --- Relative imports -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("__init__.py", "from scan_registry.base import lazy", "from .base import lazy"),
        ("nn/__init__.py", "from scan_registry.nn import s5", "from ..nn import s5"),
        ("nn/s5.py", "from scan_registry import nn", "from .. import nn"),
        ("a/b/c.py", "def f():\n    from scan_registry.x import (\n    y)", None),
        (
            "nn/s5.py",
            '"""\nfrom scan_registry import nn\n"""',
            '"""\nfrom scan_registry import nn\n"""',
        ),
        ("nn/s5.py", "from scan_registry_sm90 import x", "from scan_registry_sm90 import x"),
    ],
)
def test_imports_are_written_relative(name: str, before: str, after: str | None) -> None:
    after = after or "def f():\n    from ...x import (\n    y)"
    assert hub.relative(f"scan_registry/{name}", before) == after


@pytest.mark.parametrize(
    "text",
    [
        "import scan_registry.nn",
        "if x: from scan_registry import nn",
        "from  scan_registry import nn",
    ],
)
def test_an_import_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(
        DevError, match=r"^scan_registry/nn/s5.py:1: .* must begin with 'from scan_"
    ):
        hub.relative("scan_registry/nn/s5.py", text)


# --- The loader -------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_works_without_the_wheel(repository: Path, tmp_path: Path) -> None:
    """Nor does it need rich, other than for tables. What compiles a kernel of Triton makes the bytes that the wheel has."""
    folder = repository / "build" / NAMES[1]
    cached = tmp_path / "snapshot"
    for path in filter(
        Path.is_file, folder.rglob("*")
    ):  # links to files, as in the cache of the Hub
        link = cached / path.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)
    answer = run(hub_programs.ALONE, cached, cwd=tmp_path)
    name = Metadata.read_from_file(folder / "metadata.json").id
    assert answer["operators"] == answer["modules"] == [name] == [answer["name"]]
    assert answer["error"] < 1e-6
    assert answer["gradient"]
    assert answer["layers"] == hub_layers.__all__
    assert answer["without rich"][0] == 2
    assert "`pip install rich`" in answer["without rich"][1]
    assert {command: status for command, (status, _) in answer["answers"].items()} == {
        "inspect": 0,
        "selftest": 0,
    }
    assert "linear_scan" in answer["answers"]["inspect"][1]
    assert answer["compiled"] == answer["shipped"]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_it_works_beside_the_wheel_and_in_transformers(
    repository: Path, tmp_path: Path, device: str
) -> None:
    answer = run(hub_programs.BESIDE, repository, device, cwd=tmp_path)
    assert answer["same"]
    assert answer["variant"] in NAMES
    assert answer["files"][0] != answer["files"][1]
    models = answer["models"]
    for name in ("mamba", "mamba2"):
        assert models[name]["error"] < 1e-5
        assert models[name]["text"]
        scan = {"mamba": "selective_scan_fn", "mamba2": "mamba_chunk_scan_combined"}[name]
        conv = ["causal_conv1d_fn", "causal_conv1d_update"]
        assert models[name]["replaced"] == sorted([*conv, scan, "selective_state_update"])
    assert models["norm"]["replaced"]
    assert models["norm"]["error"] < 1e-5
    assert models["compiled"] < 1e-5
    assert "does not support backward" in models["training"]
    assert models.get("selftest", 0) == 0


@pytest.mark.slow
@pytest.mark.parametrize("wheel", [pytest.param("alone", marks=pytest.mark.thorough), "beside"])
def test_it_works_with_jax(repository: Path, tmp_path: Path, wheel: str) -> None:
    """Without the wheel, and beside it in one process: each copy has handlers of its own in XLA, and the same results."""
    pytest.importorskip("jax")
    answer = run(hub_programs.JAX, repository, wheel, cwd=tmp_path)
    names = [answer["name"], *(["scan_registry"] if wheel == "beside" else [])]
    assert answer["of"] == answer["name"]
    assert set(answer["explained"]) == {"jax.linear_scan"}
    assert answer["modules"] == sorted(names)
    assert answer["targets"] == names
    assert all(answer["same"])
    assert answer["spread"] < 1e-3
    assert max(answer["error"]) < 1e-4
