"""One list of architectures, Pythons and platforms: everything that repeats it is in step with it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from processes import captured

from ci.matrix import PATH, Matrix, load
from scan_registry.aot.plan import chosen_archs
from scan_registry.hardware.target import FIRST_CUDA, RELEASED, Target

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GPUS = (ROOT / "docs" / "pages" / "guides" / "gpus.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOW = (ROOT / ".github" / "workflows" / "wheels.yml").read_text(encoding="utf-8")
MATRIX = load()


def cibuildwheel(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("cibuildwheel")
    assert program.is_file(), "pip install -r ci/requirements.txt"
    return captured([program, *words, str(ROOT)], env={**os.environ, **environment})


def test_what_the_package_knows_of() -> None:
    """Doctor's advice, and what a build compiles unless it is told otherwise."""
    labels = tuple(arch.label for arch in MATRIX.archs)
    assert labels == RELEASED
    assert tuple(arch.label for arch in chosen_archs({"archs": "all"})) == labels


def test_attestations_are_asked_for_of_the_same_architectures() -> None:
    tool = (ROOT / "tools" / "attest.py").read_text(encoding="utf-8")
    stated = re.search(r"^MUST_BE_TESTED = \((.*)\)$", tool, re.MULTILINE)
    assert stated is not None
    attested = [str(Target.parse(arch.label)) for arch in MATRIX.archs if arch.attested]
    assert re.findall(r'"(\w+)"', stated[1]) == attested


def test_capabilities_are_those_of_the_architectures() -> None:
    for arch in MATRIX.archs:
        target = Target.parse(arch.label)
        capability = "{}.{}".format(*target.capability)
        assert capability in arch.capability
        if not target.is_ptx:
            assert arch.capability == capability
            first = FIRST_CUDA[target.capability]
            assert first <= tuple(map(int, MATRIX.cuda.split(".")))


def test_the_page_on_gpus_has_the_same_rows() -> None:
    table = re.search(
        r"\| archive \| compute capability \| such as \|\n\| --- .*\n((\|.*\n)+)", GPUS
    )
    assert table is not None
    rows = [tuple(map(str.strip, row.split("|")[1:-1])) for row in table[1].splitlines()]
    assert rows == [(arch.label, arch.capability, arch.gpus) for arch in MATRIX.archs]


def test_the_project_has_the_same_versions() -> None:
    project = PROJECT["project"]
    oldest, newest = MATRIX.torch
    assert project["requires-python"] == f">={MATRIX.pythons[0]}"
    (torch,) = (r for r in map(Requirement, project["dependencies"]) if r.name == "torch")
    assert torch.specifier == SpecifierSet(f">={oldest}")
    assert PROJECT["tool"]["distutils"]["bdist_wheel"]["py-limited-api"] == MATRIX.abi
    assert MATRIX.abi == f"cp{MATRIX.pythons[0].replace('.', '')}"
    pinned = (ROOT / "ci" / "constraints.txt").read_text(encoding="utf-8")
    assert f"\ntorch=={newest}." in pinned
    assert f"Python {MATRIX.pythons[0]} or later, torch {oldest} or later" in README


def test_the_workflow_takes_its_jobs_from_the_matrix() -> None:
    for name in ("wheels", "trials"):
        assert f"{name}: ${{{{ steps.matrix.outputs.{name} }}}}" in WORKFLOW
        assert f"include: ${{{{ fromJSON(needs.plan.outputs.{name}) }}}}" in WORKFLOW
    for arch in MATRIX.archs:
        assert not re.search(rf"\b{arch.label}\b", WORKFLOW), (
            "architectures are in the matrix alone"
        )


def test_the_jobs() -> None:
    printed = captured([sys.executable, "-I", PATH.with_name("matrix.py")], check=True)
    jobs = dict(line.split("=", 1) for line in printed.stdout.splitlines())
    wheels, trials = json.loads(jobs["wheels"]), json.loads(jobs["trials"])
    assert {job["archs"] for job in wheels} == {"none", *RELEASED}
    without = [job["platform"] for job in wheels if job["archs"] == "none"]
    assert without == [platform.name for platform in MATRIX.platforms]
    assert len(wheels) == len(RELEASED) + len(without)
    assert {trial["python"] for trial in trials} == set(MATRIX.pythons)
    assert {trial["torch"] for trial in trials} == set(MATRIX.torch)


def test_cibuildwheel_builds_what_the_matrix_says() -> None:
    names: list[str] = []
    for platform in MATRIX.platforms:
        result = cibuildwheel(
            "--print-build-identifiers", "--platform", "linux", "--archs", platform.name
        )
        assert result.returncode == 0, result.stderr
        names += result.stdout.split()
    assert tuple(names) == MATRIX.identifiers


def test_a_matrix_of_another_shape_is_refused(tmp_path: Path) -> None:
    document = json.loads(PATH.read_text(encoding="utf-8"))
    document["archs"]["sm90"]["colour"] = "green"
    path = tmp_path / "matrix.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(TypeError, match="colour"):
        load(path)
    assert isinstance(MATRIX, Matrix)
