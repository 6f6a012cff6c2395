"""tools/new_family.py: what it writes, and what it refuses. tests/ci/test_scratch.py runs a family that it wrote."""

from __future__ import annotations

import ast
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]
PACKAGE, KINDS = "scan_registry/__init__.py", "kernels/gated_scan/kinds.py"
IN_JAX = "kernels/gated_scan/jax_gates.py"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def tool(load_tool: Callable[[str], ModuleType]) -> ModuleType:
    return load_tool("new_family")


@pytest.fixture
def tree(tmp_path: Path, tool: ModuleType) -> Path:
    """The files of a working copy that are changed."""
    for name in (
        PACKAGE,
        KINDS,
        IN_JAX,
        "kernels/linear_scan/spec.py",
        "kernels/model.py",
        "kernels/common/types.cuh",
        str(tool.API),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    return tmp_path


def begin(tool: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["new_family.py", *words, "--root", str(tree)])
    status: int = tool.main()
    return status


def public_names(package: Path) -> list[str]:
    (names,) = (
        node.value
        for node in ast.parse(package.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return list(ast.literal_eval(names))


def test_a_family_has_its_name_everywhere(
    tool: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = public_names(tree / PACKAGE)
    assert begin(tool, tree, monkeypatch, "moving_sum") == 0
    written = {path for path in tree.rglob("*moving_sum*/**/*") if path.is_file()}
    assert len(written) == len([p for p in tool.TEMPLATE.rglob("*.*") if p.suffix != ".pyc"])
    for path in written:
        text = path.read_text(encoding="utf-8")
        assert "scale" not in text.lower(), path
        if path.suffix == ".py":
            ast.parse(text)
    assert public_names(tree / PACKAGE) == sorted(
        [*before, "moving_sum"], key=lambda name: (not name[0].isupper(), name)
    )
    package = (tree / PACKAGE).read_text(encoding="utf-8")
    assert "    from scan_registry.kernels.moving_sum.op.function import moving_sum\n" in package
    assert "::: scan_registry.moving_sum\n" in (tree / tool.API).read_text(encoding="utf-8")


def test_a_gate_is_a_header_and_two_entries(
    tool: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert begin(tool, tree, monkeypatch, "fade", "--gate") == 0
    assert "struct Kind" in (tree / "kernels/gated_scan/kinds/fade.cuh").read_text(encoding="utf-8")
    known = runpy.run_path(str(tree / KINDS))["KINDS"]
    assert known["fade"].inputs == ("x", "s")
    assert (tree / IN_JAX).read_text(encoding="utf-8").endswith('\n\n\nGATES["fade"] = _fade\n')


def test_the_gate_that_is_written_is_the_same_in_jax(
    tool: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jax = pytest.importorskip("jax")
    assert begin(tool, tree, monkeypatch, "fade", "--gate") == 0
    in_torch = runpy.run_path(str(tree / KINDS))["KINDS"]["fade"].gates
    in_jax = runpy.run_path(str(tree / IN_JAX))["GATES"]["fade"]
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    expected = in_torch(*x.double())
    for result, value in zip(in_jax(None, *jax.numpy.asarray(x.numpy())), expected, strict=True):
        assert abs(torch.tensor(result.tolist()).double() - value).max() < 1e-6


@pytest.mark.parametrize(
    "words",
    [
        *(("linear_scan",), ("rg_lru", "--gate"), ("Sum",), ("class",), ("float",), ("describe",)),
        *(
            ("model",),
            ("common",),
            ("double", "--gate"),
            ("torch",),
            ("kernels",),
            ("launching",),
            ("factor",),
        ),
        *(("tensors",), ("blocks",), ("runtime",), ("kernel",)),
    ],
)
def test_what_is_there_or_no_name_is_refused(
    tool: ModuleType,
    tree: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    words: tuple[str, ...],
) -> None:
    before = {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()}
    assert begin(tool, tree, monkeypatch, *words) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert before == {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()}


def test_the_templates_own_name_is_accepted(
    tool: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert begin(tool, tree, monkeypatch, "scale") == 0
    assert (tree / "kernels/scale/scale.cu").exists()


def test_a_family_that_is_there_is_named_as_one(
    tool: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert begin(tool, tree, monkeypatch, "linear_scan") == 2
    assert capsys.readouterr().err == "error: there is already a family linear_scan\n"


@pytest.mark.parametrize("gate", [False, True], ids=["family", "gate"])
def test_the_next_steps_are_printed(
    tool: ModuleType,
    tree: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    gate: bool,
) -> None:
    assert begin(tool, tree, monkeypatch, "fade", *(["--gate"] if gate else [])) == 0
    _, _, steps = capsys.readouterr().out.partition("Next")
    of = 'tests/kernels/gated_scan -k "fade or jax"' if gate else "tests/kernels/fade"
    for step in ("pip install -e .", f"pytest -q {of}", "tools/docs.py", "tools/completion.py"):
        assert step in steps
