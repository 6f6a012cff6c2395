"""What commands alone need, such as cases of ``bench``, is not imported by calls of functions and modules."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
from forked import captured

import scan_registry
from scan_registry import kernels

#: The package and the families, which lie elsewhere in an editable installation.
FOLDERS = {
    package.__name__: Path(str(package.__file__)).parent for package in (scan_registry, kernels)
}
#: Modules that commands alone need.
OF_COMMANDS = (
    *(f"scan_registry.{name}" for name in ("__main__", "bench", "cli", "tuner")),
    *(f"scan_registry.{name}.*" for name in ("bench", "cli", "tuner")),
    "scan_registry.ops.benchmark",
    *(f"scan_registry.kernels.*.op.{name}" for name in ("bench", "baselines", "random_cases")),
)


def of_commands(module: str) -> bool:
    return any(fnmatch(module, pattern) for pattern in OF_COMMANDS)


def imported(tree: ast.AST) -> Iterator[str]:
    """Modules that are imported at run time, inside functions too; names that may be modules count."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from imported(node)


def test_no_other_module_imports_them() -> None:
    wrong = [
        (name, target)
        for package, folder in FOLDERS.items()
        for path in folder.rglob("*.py")
        if not of_commands(name := ".".join((package, *path.relative_to(folder).with_suffix("").parts)))
        for target in imported(ast.parse(path.read_text(encoding="utf-8")))
        if of_commands(target)
    ]  # fmt: skip
    assert wrong == []


@pytest.mark.parametrize(
    ("source", "modules"),
    [
        ("from scan_registry.kernels.rnn.op import bench", True),
        ("def f():\n    import scan_registry.tuner.engine", True),
        ("if TYPE_CHECKING:\n    from scan_registry.kernels.rnn.op.bench import Case", False),
        ("from scan_registry.kernels.rnn.op import function", False),
    ],
)
def test_an_import_of_one_is_seen(source: str, modules: bool) -> None:
    assert any(map(of_commands, imported(ast.parse(source)))) is modules


CALLS = """
import importlib, json, pkgutil, sys
import torch
import scan_registry
from scan_registry import kernels
from scan_registry import compat, distributed, nn

for package in (scan_registry, nn, distributed):
    for name in package.__all__:
        getattr(package, name)
for module in pkgutil.walk_packages(compat.__path__, "scan_registry.compat."):
    importlib.import_module(module.name)

def rand(*shape):
    return torch.rand(shape, requires_grad=True)

x, rows = rand(2, 8, 12), rand(2, 12, 8)
scan, state = (rand(8, 3), *(rand(2, 3, 12) for _ in range(2))), torch.rand(2, 8, 3)
step, filters = torch.rand(2, 8), rand(8, 4)
outputs = [
    scan_registry.linear_scan(x, x),
    scan_registry.linear_scan(x, x, reset=torch.rand(2, 12) < 0.5),
    *scan_registry.linear_scan_summary(x, x),
    scan_registry.linear_scan_step(step, step, step),
    scan_registry.min_gru(x, x), scan_registry.hgrn(x, x),
    scan_registry.rnn(rand(2, 12, 4, 1, 8), rand(4, 1, 8, 8), rand(4, 1, 8))[0],
    scan_registry.causal_conv1d(x, filters),
    scan_registry.causal_conv1d_update(step, torch.rand(2, 8, 3), filters.detach()),
    scan_registry.selective_scan(x, x, *scan),
    scan_registry.ssd_scan(rand(2, 12, 2, 4), rand(2, 12, 2), -rand(2), *(rand(2, 12, 1, 3) for _ in "BC")),
    scan_registry.selective_state_update(state, step, step, *(torch.rand(n, 3) for n in (8, 2, 2))),
    compat.accelerated_scan.warp.scan(rand(2, 8, 32), rand(2, 8, 32)),
    compat.mamba_ssm.selective_scan_fn(x, x, *scan),
    compat.causal_conv1d.causal_conv1d_fn(x, filters),
]
OF_TWO_SIZES = ("GRU", "LSTM", "RNN", "SLSTM", "LRU", "S5", "RGLRU")
for name in nn.__all__:
    options = {"headdim": 4} if name == "Mamba2" else {}
    module = getattr(nn, name)(*[8] * (2 if name in OF_TWO_SIZES else 1), **options)
    result = module(rows)
    outputs.append(result[0] if isinstance(result, tuple) else result)

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
outputs += [
    distributed.linear_scan(x, x),
    distributed.gated_scan("min_gru", x, x),
    distributed.causal_conv1d(x, filters),
    distributed.selective_scan(x, x, *scan),
]
real = [output.real if output.is_complex() else output for output in outputs]
sum(output.sum() for output in real).backward()
torch.distributed.destroy_process_group()
scan_registry.explain(scan_registry.linear_scan, x, x)
print(json.dumps([name for name in sys.modules if name.startswith("scan_registry.")]))
"""


def test_calls_import_none_of_them(tmp_path: Path) -> None:
    done = captured([sys.executable, "-W", "ignore", "-c", CALLS], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    modules = json.loads(done.stdout.splitlines()[-1])
    assert "scan_registry.kernels.selective_scan.op.function" in modules
    assert [name for name in modules if of_commands(name)] == []
