"""The documentation's two examples, done in a scratch copy: a new kernel family, a new architecture."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import by_path
import forked
import pytest
from processes import captured

import scan_registry
import scan_registry.aot
import scan_registry.kernels
from scan_registry.hardware.target import RELEASED
from scan_registry.runtime import jit

ROOT = Path(__file__).parents[2]
DEVELOPERS = ROOT / "docs" / "pages" / "developers"
#: The family of the page, which shows these files.
TEMPLATE = ROOT / "tools" / "family"
FAMILY = (DEVELOPERS / "family.md").read_text(encoding="utf-8")
ARCHITECTURE = (DEVELOPERS / "architecture.md").read_text(encoding="utf-8")

QUIET = ("-q", "-p", "no:cacheprovider", "-m", "not gpu")
#: Of tests/kernels: the files of the emulator of a GPU.
EMULATOR = ("conftest.py", "cuda_emulator.py", "emulator")

needs_nvrtc = pytest.mark.skipif(
    isinstance(jit.toolchains()["cuda"], str), reason="NVRTC is not installed"
)

#: Compile what the family has for every released architecture, into the copy's own archives.
BUILD = """
import json
from pathlib import Path
import scan_registry
from scan_registry.aot.build import compile_all
from scan_registry.aot.pack import pack
from scan_registry.aot.plan import chosen_archs, plan
folder = Path(scan_registry.__file__).parent / "archives"
jobs = {a: [j for j in js if j.variant.family == FAMILY] for a, js in plan(chosen_archs({})).items()}
made = compile_all([job for each in jobs.values() for job in each], None)
for arch, each in jobs.items():
    pack(folder, arch, [made[job] for job in each], {"version": VERSION})
print(json.dumps([arch.label for arch in jobs]))
"""
PREPARE = """
from scan_registry.kernels import family
from scan_registry.kernels.scale.spec import ScaleProblem
from scan_registry.dispatch.fit import Tier
from scan_registry.runtime import loader
def prepared(size):
    problem = ScaleProblem("float32", size, factor=3)
    return loader.prepare(0, family("scale"), problem, "auto", Tier.EXACT)
"""


#: Run commands as the program does, and print their statuses and what they say. Of the families, ``selftest`` takes two.
COMMANDS = """
import contextlib, io, json
from scan_registry import kernels
from scan_registry.cli import main
said, every = {}, kernels.families
for words in WORDS:
    if words[0] == "selftest":
        kernels.families = lambda: {n: every()[n] for n in ("scale", "selective_state_update")}
    heard = io.StringIO()
    with contextlib.redirect_stdout(heard), contextlib.redirect_stderr(heard):
        try:
            status = main(words)
        except SystemExit as end:
            status = end.code
    kernels.families, said[" ".join(words)] = every, [status, heard.getvalue()]
print(json.dumps(said))
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package as it is installed, without archives, in a folder that is first on the path."""
    place = tmp_path / "copy"
    for package in (scan_registry, scan_registry.kernels, scan_registry.aot):
        assert package.__file__ is not None
        shutil.copytree(
            Path(package.__file__).parent,
            place.joinpath(*package.__name__.split(".")),
            ignore=shutil.ignore_patterns(
                "archives"
            ),  # compiled modules fit the copy, as files keep their dates
            dirs_exist_ok=True,
        )
    result = distribution("scan-registry")
    files = [file for file in result.files or () if file.parent.name.endswith(".dist-info")]
    for file in files:
        target = place / file.parent.name / file.name
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(str(file.locate()), target)
    return place


@pytest.fixture
def with_family(copy: Path) -> Path:
    """The copy with the spec and the kernel of the page's family in a folder of its own, and nothing else changed."""
    folder = copy / "scan_registry" / "kernels" / "scale"
    folder.mkdir()
    (folder / "__init__.py").touch()
    for name in ("spec.py", "scale.cu"):
        shutil.copyfile(TEMPLATE / name, folder / name)
    return copy


def run(place: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(place), **environment}
    done = forked.captured([sys.executable, *words], cwd=place, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def build(place: Path) -> list[str]:
    version = distribution("scan-registry").version
    script = f"FAMILY, VERSION = 'scale', {version!r}\n{BUILD}"
    labels: list[str] = json.loads(run(place, "-c", script).stdout.splitlines()[-1])
    return labels


@needs_nvrtc
def test_a_family_is_a_folder(with_family: Path, stub_driver: Any) -> None:
    """It compiles for every architecture, is listed, and runs."""
    assert build(with_family) == list(RELEASED)
    listed = json.loads(run(with_family, "-m", "scan_registry", "inspect", "--json").stdout)
    assert [a["arch"].replace("_", "").replace("compute", "ptx") for a in listed["archives"]]
    assert len(listed["archives"]) == len(RELEASED)
    for archive in listed["archives"]:
        (binary,) = archive["binaries"]
        assert binary["variant"] == "scale.scale:cuda:dtype=float32,threads=256"

    stub_driver.gpu((8, 6))
    script = f"{PREPARE}\nready = prepared(1000)\nprint(ready.launch.run(0, 4096, 8192))"
    variables = {**stub_driver.environment(), "SCAN_REGISTRY_CACHE": str(with_family / "none")}
    assert run(with_family, "-c", script, **variables).stdout == "0\n"
    (launch,) = stub_driver.calls("cuLaunchKernel")
    assert (launch.entry, launch.grid, launch.block) == ("scale", (4, 1, 1), (256, 1, 1))


def test_commands_know_a_family_that_is_only_a_folder(with_family: Path) -> None:
    """Those that the page lists, and what says that a function is missing."""
    match = re.search(r"```shell\n(scan-registry inspect\n.*?)```\n", FAMILY, re.DOTALL)
    assert match is not None
    listed = [line.split()[1:] for line in match[1].splitlines()]
    explained = "explain scale --dtype fp32 --shape 1000 --for sm_90"
    words = [*listed, explained.split(), ["bench", "scale"]]
    script = f"WORDS = {words!r}\n{COMMANDS}"
    said = json.loads(run(with_family, "-c", script, COLUMNS="200").stdout)
    status, doctor = said.pop("doctor --for sm_90")
    assert status in (0, 1)  # by whether there is a compiler
    assert "scale.scale" in doctor
    status, selftest = said.pop("selftest --device cpu")
    assert status == 0, selftest
    assert "skipped: scale: it has no cases.py" in selftest
    status, refused = said.pop(explained)
    assert status == 2
    assert "no function calls the kernels of scale" in refused
    status, refused = said.pop("bench scale")
    assert status == 2
    assert "'scale'" in refused
    ((command, (status, _)),) = said.items()
    assert (command, status) == ("inspect", 0)


def test_a_spec_that_is_not_called_what_its_folder_is(with_family: Path) -> None:
    """Commands that read its spec say so on one line."""
    spec = with_family / "scan_registry" / "kernels" / "scale" / "spec.py"
    text = spec.read_text(encoding="utf-8")
    assert text.count('    name="scale",\n    summary') == 1
    other = text.replace('    name="scale",\n    summary', '    name="scales",\n    summary')
    spec.write_text(other, encoding="utf-8")
    words = [["doctor"], ["explain", "scale", "--dtype", "fp32", "--shape", "8", "--for", "sm_90"]]
    script = f"WORDS = {words!r}\n{COMMANDS}"
    for status, text in json.loads(run(with_family, "-c", script).stdout).values():
        assert status == 2
        (line,) = text.splitlines()
        assert line.startswith("scan-registry: error: ")
        assert "defines family 'scales'; its folder is 'scale'" in line


def copy_tests(copy: Path, *more: str) -> None:
    """The emulator of a GPU and what tests share, and more files of ``tests/``, beside the package's copy."""
    for name in ("conftest.py", "support", *(f"kernels/{name}" for name in EMULATOR), *more):
        target = copy / "tests" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        put = shutil.copytree if (ROOT / "tests" / name).is_dir() else shutil.copyfile
        put(ROOT / "tests" / name, target)
    shutil.copyfile(ROOT / "pyproject.toml", copy / "pyproject.toml")


@pytest.mark.slow
def test_a_new_gate_passes_its_tests(copy: Path) -> None:
    """The kind of ``tools/new_family.py --gate``, as it is written: its header, what runs on the CPU, and what JAX has."""
    by_path.load_tool("new_family").new_gate("decay", copy / "scan_registry")
    folder = "kernels/gated_scan"
    files = [
        f"{folder}/{name}.py"
        for name in ("test_kinds", "test_jax", "op/test_gated_scan", "op/test_numbers")
    ]
    copy_tests(copy, *files)
    chosen = ("-k", "decay or gates_are_those", *(f"tests/{file}" for file in files))
    said = run(copy, "-m", "pytest", *QUIET, *chosen).stdout
    assert re.search(r"\d\d passed", said)
    assert "failed" not in said


def test_a_new_family_passes_its_tests(copy: Path) -> None:
    """All that tools/new_family.py writes, under a name of two words."""
    kernels, tests = copy / "scan_registry" / "kernels", copy / "tests"
    files = by_path.load_tool("new_family").family_files(
        "twice_or_more", kernels, tests / "kernels"
    )
    copy_tests(copy)
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    said = run(copy, "-m", "pytest", *QUIET, str(tests)).stdout
    assert re.search(r"\d+ passed", said)
    assert "failed" not in said
    if shutil.which("g++") and not isinstance(jit.toolchains()["cuda"], str):
        assert "skipped" not in said  # the emulator ran the kernel
    words = ["--dtype", "fp32", "--shape", "2,8,64", "--device", "cpu"]
    calls = [["explain", operator, *words] for operator in ("linear_scan", "twice_or_more")]
    explained = json.loads(run(copy, "-c", f"WORDS = {calls!r}\n{COMMANDS}").stdout)
    for call in calls:
        status, text = explained[" ".join(call)]
        assert status == 0, text
        assert text.startswith(call[1])


@needs_nvrtc
@pytest.mark.gpu
def test_a_family_computes(with_family: Path) -> None:
    build(with_family)
    script = f"""{PREPARE}
import torch
x = torch.arange(1000.0, device="cuda")
y = torch.empty_like(x)
status = prepared(1000).launch.run(torch.cuda.current_stream().cuda_stream, x.data_ptr(), y.data_ptr())
torch.cuda.synchronize()
print(status, bool((y == 3 * x).all()))
"""
    assert run(with_family, "-c", script).stdout == "0 True\n"


@pytest.mark.slow
def test_a_familys_folder_is_packed_into_wheels(tmp_path: Path) -> None:
    """Without a word about it anywhere else."""
    tree = tmp_path / "tree"
    skip = shutil.ignore_patterns("build", "dist", ".*", "__pycache__", "archives", "*.so", "tests")
    shutil.copytree(ROOT, tree, ignore=skip)
    folder = tree / "kernels" / "scale"
    folder.mkdir()
    (folder / "__init__.py").touch()
    for name in ("spec.py", "scale.cu"):
        shutil.copyfile(TEMPLATE / name, folder / name)
    project = tree / "pyproject.toml"
    text = project.read_text(encoding="utf-8")
    extensions = re.compile(r"\[\[tool\.setuptools\.ext-modules\]\]\n.*?\n\n", re.DOTALL)
    text, count = extensions.subn("", text)
    assert count == 2  # whose compilation takes longest, and which hold nothing of a new family
    project.write_text(text, encoding="utf-8")
    command = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-C", "archs=none"]
    run(tmp_path, *command, "--wheel-dir", str(tmp_path), str(tree), PYTHONPATH="")
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for family, source in (("scale", "scale.cu"), ("linear_scan", "step.cuh")):
        for name in ("__init__.py", "spec.py", source):
            assert f"scan_registry/kernels/{family}/{name}" in names
    assert "scan_registry/kernels/common/affine.cuh" in names


def test_an_architecture_is_three_lines(copy: Path, tmp_path: Path) -> None:
    """One in the matrix, one in the package, one in the table of GPUs, as the page says."""
    for line in ('"sm103": {"capability": "10.3"', "RELEASED = (", "| sm103 | 10.3 | B300 |"):
        assert line in ARCHITECTURE
    target = copy / "scan_registry" / "hardware" / "target.py"
    text = target.read_text(encoding="utf-8")
    assert text.count('"sm100", ') == 1
    target.write_text(text.replace('"sm100", ', '"sm100", "sm103", '), encoding="utf-8")

    script = "from scan_registry.aot.plan import chosen_archs; print(*(a.label for a in chosen_archs({})))"
    assert "sm103" in run(copy, "-c", script).stdout.split()
    requested = [sys.executable, "-m", "scan_registry", "doctor", "--for", "sm_103", "--json"]
    result = captured(requested, cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)})
    remedies = [r for finding in json.loads(result.stdout)["findings"] for r in finding["remedies"]]
    assert "`pip install scan-registry-sm103`" in remedies

    shutil.copytree(ROOT / "ci", tmp_path / "ci")
    matrix = tmp_path / "ci" / "matrix.json"
    document = json.loads(matrix.read_text(encoding="utf-8"))
    (entry,) = re.findall(r'^\s*("sm103": \{.*\})', ARCHITECTURE, re.MULTILINE)
    document["archs"] |= json.loads(f"{{{entry}}}")
    matrix.write_text(json.dumps(document), encoding="utf-8")
    jobs = run(tmp_path, str(tmp_path / "ci" / "matrix.py")).stdout
    assert '"archs": "sm103"' in jobs
