"""Types as a user's checker sees them, of the installed package: mypy's and pyright's strict modes on a program
that uses every public name, and on mistakes that both are to find."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import forked
import pytest
from processes import captured

PROGRAM = Path(__file__).resolve().parents[1] / "support" / "user_program.py"
#: Whose public names the program has to use.
MODULES = (
    "scan_registry",
    "scan_registry.compat",
    "scan_registry.compat.accelerated_scan",
    "scan_registry.compat.mamba_ssm",
    "scan_registry.distributed",
    "scan_registry.nn",
)
#: Modules whose public names are the functions and classes that they define.
REPLACEMENTS = (
    *(
        f"scan_registry.compat.accelerated_scan.{name}"
        for name in ("complex", "ref", "scalar", "triton", "warp")
    ),
    "scan_registry.compat.causal_conv1d",
    "scan_registry.compat.causal_conv1d.cpp_functions",
    "scan_registry.compat.flashrnn",
    "scan_registry.compat.mamba_ssm.ops.selective_scan_interface",
    "scan_registry.compat.mamba_ssm.ops.triton.layernorm_gated",
    "scan_registry.compat.mamba_ssm.ops.triton.selective_state_update",
    "scan_registry.compat.mamba_ssm.ops.triton.ssd_combined",
    "scan_registry.compat.sequential_scan",
)
#: Every line with a comment is a mistake.
MISTAKES = """\
import torch
from scan_registry import linear_scan, nn, require, rnn

x = torch.rand(2, 3, 8)
linear_scan(0.5, x)  # no tensor
linear_scan(x, x, return_final_state="no")  # no bool
linear_scan(x, x, backend="cudnn")  # no such backend
linear_scan(x, x).numel()
linear_scan(x, x, return_final_state=True).numel()  # two results
rnn(x, x, x, function="LSTM")  # no such function
nn.LSTM(5, "6")  # no int
nn.LSTM(5, 6, 1, True, False, 0.0, False, 0, None, None, "auto")  # backend is a keyword
nn.GRU(5, 6, proj_size=2)  # no such argument
nn.RNN(5, 6, backend="cudnn")  # no such backend
nn.LSTM(5, 6)(x, x)  # one state
nn.Mamba(5, "16")  # no int
nn.Mamba(5, dt_rank="all")  # no such rank
nn.Mamba(8)(x, states=x)  # two states
nn.Mamba2(8, headdim="4")  # no int
nn.Mamba2(8, headdim=4)(x, cu_seqlens=[0, 3])  # no tensor
nn.RMSNormGated(8)(x, "silu")  # no tensor
nn.MinGRU(8, activation="tanh")  # no such activation
nn.RGLRU(8)  # no heads
nn.LRU(4, 8)(x, return_final_state=True).numel()  # two results
nn.HGRN(8)(x, lower_bounds=0.5)  # no such argument
nn.S5(8, degree=1, bcInit="factorized")  # no such values
nn.LSTM(5, 6)([1.0])  # no tensor
nn.GRU(5, 6)(x)[1][0].numel()
nn.LSTM(5, 6)(x)[1].numel()  # a tuple
require("everything")  # no such level
"""


def public_names() -> Iterator[str]:
    for module in map(importlib.import_module, MODULES):
        yield from module.__all__
    for module in map(importlib.import_module, REPLACEMENTS):
        for name, value in vars(module).items():
            own = getattr(value, "__module__", None) == module.__name__
            if callable(value) and own and not name.startswith("_"):
                yield name


def test_the_program_uses_every_public_name() -> None:
    tree = ast.parse(PROGRAM.read_text(encoding="utf-8"))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names = [*public_names()]
    assert {"linear_scan", "LSTM", "scan_forward", "FlashRNNConfig"} <= {*names}
    assert [name for name in names if name not in used] == []


def test_the_program_runs(tmp_path: Path) -> None:
    forked.captured([sys.executable, PROGRAM], cwd=tmp_path, check=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's: with the program and the mistakes, and without these sources."""
    (tmp_path / "program.py").write_bytes(PROGRAM.read_bytes())
    (tmp_path / "mistakes.py").write_text(MISTAKES, encoding="utf-8")
    return tmp_path


def mistaken_lines() -> list[int]:
    return [n for n, line in enumerate(MISTAKES.splitlines(), 1) if "  # " in line]


def output_of(folder: Path, *command: str | Path) -> str:
    """A checker's standard output; it exits with 1 where it finds something, and with more where it cannot run."""
    created = captured([sys.executable, "-m", *map(str, command)], cwd=folder)
    assert created.returncode in (0, 1), created.stderr
    return created.stdout


@pytest.mark.slow
@pytest.mark.thorough  # pyright checks the same, in a quarter of the time
def test_mypy_finds_the_mistakes_alone(folder: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    result = output_of(
        folder, "mypy", "--strict", "--cache-dir=/dev/null", "program.py", "mistakes.py"
    )
    errors = re.findall(r"^(\w+\.py):(\d+): error", result, re.MULTILINE)
    assert sorted({*errors}, key=str) == sorted(
        [("mistakes.py", str(line)) for line in mistaken_lines()], key=str
    ), result


@pytest.mark.slow
def test_pyright_finds_the_mistakes_alone(folder: Path) -> None:
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("pyright is not installed")
    try:  # the package fetches pyright, and Node.js where there is none
        output_of(folder, "pyright", "--version")
    except AssertionError as error:
        pytest.skip(f"pyright does not start here, perhaps for want of Node.js: {error}")
    options = {"typeCheckingMode": "strict", "include": ["program.py", "mistakes.py"]}
    (folder / "pyrightconfig.json").write_text(json.dumps(options), encoding="utf-8")
    result = output_of(
        folder, "pyright", "--outputjson", "--pythonpath", sys.executable, "--project", folder
    )
    errors = {
        (Path(generaldiagnostic["file"]).name, generaldiagnostic["range"]["start"]["line"] + 1)
        for generaldiagnostic in json.loads(result)["generalDiagnostics"]
        if generaldiagnostic["severity"] == "error"
    }
    assert errors == {("mistakes.py", line) for line in mistaken_lines()}, result
