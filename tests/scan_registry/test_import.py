"""Importing is cheap and leaves no trace; modules are short, and kernels described without a compiler.

Which way imports run is for the contracts in pyproject.toml to say."""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import processes
import pytest
from counting import calls_of

import scan_registry
import scan_registry.aot
import scan_registry.kernels

HEAVY = ("torch", "triton", "cuda", "numpy", "rich")


def fresh(
    script: str, cwd: Path, run: Callable[..., Any] = processes.captured, **environment: str
) -> Any:
    """What a new interpreter prints as JSON when it runs ``script`` in ``cwd``."""
    environment = {**os.environ, **environment}
    environment.pop("PYTHONPATH", None)
    result = run([sys.executable, "-c", script], cwd=cwd, env=environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


# --- Importing --------------------------------------------------------------------------------


#: Modules that import nothing heavy, in the order in which one process imports them.
LIGHT = (
    "scan_registry",
    "scan_registry.kernels.model",
    "scan_registry.catalog.inventory",
    "scan_registry.dispatch.select",
    "scan_registry.kernels.linear_scan.op.layout",
    "scan_registry.kernels.linear_scan.op.calls",
    "scan_registry.aot.compile",
    "scan_registry.runtime.loader",
    "scan_registry.diagnostics.explanation",
)


def test_what_imports_bring(tmp_path: Path) -> None:
    """Nor do the specs of all families; the command line alone brings what prints tables."""
    script = f"""
import importlib, json, sys
brought = {{}}
def note(step):
    brought[step] = sorted(set({HEAVY!r}) & {{name.split(".")[0] for name in sys.modules}})
for module in {LIGHT!r}:
    importlib.import_module(module)
    note(module)
from scan_registry.kernels import families
assert [str(v) for family in families().values() for v in family.variants()]
note("specs")
import scan_registry.cli
note("cli")
print(json.dumps(brought))
"""
    brought = fresh(script, tmp_path)
    assert set(brought.pop("cli")) <= {"rich"}
    assert not any(brought.values()), brought


def test_the_operator_leaves_no_trace_and_opens_no_driver(tmp_path: Path) -> None:
    """Nor does it import a compiler; what torch itself imports does not count against it. First calls import nothing, not what
    torch imports at times, either: the whole of sympy. Nor does any public name bring the compiler of torch, whose import takes
    longer than torch's own."""
    home = tmp_path / "home"
    home.mkdir()
    package = Path(scan_registry.__file__).parent

    def listing() -> list[str]:
        files = [p for p in package.rglob("*") if p.suffix != ".pyc" and p.name != "__pycache__"]
        return sorted(map(str, [*files, *tmp_path.rglob("*")]))

    before = listing()
    script = """
import importlib, json, pkgutil, sys
import torch
before = set(sys.modules)
import scan_registry.kernels.linear_scan.op.function
of_operator = sorted({name.split(".")[0] for name in set(sys.modules) - before})
from scan_registry import linear_scan, nn
before = set(sys.modules)
gates, tokens, state = torch.rand(2, 3, 8), torch.rand(2, 3, 8, requires_grad=True), torch.rand(3)
for given in (gates, gates[:1], gates[0, :, :1]):
    linear_scan(given, tokens.detach())
    linear_scan(given, tokens, state, return_final_state=True)[0].sum().backward()
nn.LSTM(3, 3)(gates.mT)[0].sum().backward()
of_calls = sorted(set(sys.modules) - before)
opened = "libcuda.so" in open("/proc/self/maps", encoding="utf-8").read()
import scan_registry
from scan_registry import compat, distributed
for package in (scan_registry, nn, distributed):
    for name in package.__all__:
        getattr(package, name)
for module in pkgutil.walk_packages(compat.__path__, "scan_registry.compat."):
    importlib.import_module(module.name)
compilers = [name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules]
print(json.dumps([of_operator, of_calls, opened, compilers]))
"""
    of_operator, of_calls, opened, compilers = fresh(
        script, home, HOME=str(home), TMPDIR=str(home), XDG_CACHE_HOME=str(home / "cache")
    )
    assert listing() == before
    assert not opened
    assert not {"triton", "cuda", "rich"} & set(of_operator)
    assert [name for name in of_calls if not name.startswith("torch.")] == []
    assert compilers == []


def test_an_import_does_little() -> None:
    """It makes 4,000 to 8,000 calls, most of them in ``typing`` and in what finds modules."""
    assert calls_of() < 16_000


def test_public_names() -> None:
    for name in scan_registry.__all__:
        assert getattr(scan_registry, name) is not None
        assert name in dir(scan_registry)
    with pytest.raises(AttributeError, match="no attribute 'scan'"):
        _ = scan_registry.scan


def test_subpackages_are_attributes_that_nothing_loads_before(tmp_path: Path) -> None:
    """Each in a process in which nothing else has imported it, other than torch."""
    script = """
import json, sys
import scan_registry
loaded = [name for name in sys.modules if name.startswith("scan_registry.")]
listed = [name in dir(scan_registry) for name in ("compat", "distributed", "nn")]
compat = scan_registry.compat
here = [name for name in dir(compat) + dir(compat.accelerated_scan) if name[:1] != "_"]
found = [scan_registry.nn.LSTM, compat.accelerated_scan.warp.scan, compat.accelerated_scan.triton.scan,
         compat.sequential_scan.scan_cu, compat.flashrnn.flashrnn, scan_registry.kernels.rnn.op.function.rnn,
         scan_registry.distributed.scan_summary]
print(json.dumps([loaded, listed, here, [each.__name__ for each in found]]))
"""
    loaded, listed, here, result = fresh(script, tmp_path, forked.captured)
    assert loaded == ["scan_registry.base", "scan_registry.base.lazy"]
    assert all(listed)
    assert {"accelerated_scan", "flashrnn", "sequential_scan", "complex", "ref", "warp"} <= set(
        here
    )
    assert result == ["LSTM", "scan", "scan", "scan_cu", "flashrnn", "rnn", "scan_summary"]


#: What is done in between, and what makes the package load ``nn`` before, where it has to be there.
AGAIN = {
    "importlib.reload(scan_registry)": "",
    "importlib.reload(scan_registry); importlib.reload(scan_registry.nn)": "",
    "sys.modules.pop('scan_registry'); import scan_registry": "",
    "sys.modules.pop('scan_registry.nn'); importlib.import_module('scan_registry.nn')": "first.nn",
    "[sys.modules.pop(n) for n in list(sys.modules) if n.split('.')[0] == 'scan_registry']; "
    "import scan_registry": "",
}


def test_what_is_imported_again_works(tmp_path: Path) -> None:
    """Before and after its names were used; the first copy stays of use, too. Each in a fork of a process that has nothing
    but torch and what a first call has torch import, which takes most of the time."""
    script = f"""
import importlib, json, os, sys, torch, torch._dynamo
answers = []
for again, loaded in {AGAIN!r}.items():
    ours, theirs = os.pipe()
    if child := os.fork():
        os.close(theirs)
        with open(ours, encoding="utf-8") as answer:
            answers.append(answer.read())
        os.waitpid(child, 0)
        continue
    try:
        assert "scan_registry" not in sys.modules
        import scan_registry
        first = scan_registry
        exec(loaded)
        exec(again)
        before = scan_registry.nn.__name__
        exec(again)
        tokens = torch.ones(1, 2, 3)
        sums = [float(torch.vmap(each.linear_scan)(tokens, tokens).sum()) for each in (first, scan_registry)]
        found = [before, sums, first.compat.__name__, scan_registry.compat.__name__]
    except Exception as error:
        found = [repr(error)]
    os.write(theirs, json.dumps(found).encode())
    os._exit(0)
print(json.dumps(answers))
"""
    expected = ["scan_registry.nn", [12.0, 12.0], "scan_registry.compat", "scan_registry.compat"]
    answers = map(json.loads, fresh(script, tmp_path, forked.captured))
    assert dict(zip(AGAIN, answers, strict=True)) == dict.fromkeys(AGAIN, expected)


# --- Modules ----------------------------------------------------------------------------------

#: The only modules of ``kernels`` that may import more than the standard library.
KERNELS_MAY = {
    "reference": {"torch"},
    "cases": {"torch"},
    "functions": {"torch"},
    "jax": {"jax"},
    "jax_gates": {"jax"},
    "jax_operator": {"jax"},
    "jax_sharded": {"jax"},
    "kinds": {"torch"},  # in functions: a spec that imports it imports no torch
    "solution": {"torch"},
    "triton_columns": {"triton"},
    "triton_kernels": {"triton"},
    "triton_tiles": {"triton"},
}


def modules() -> Iterator[tuple[str, Path]]:
    """Every module, by its name below ``scan_registry``, wherever its file is."""
    for package in (scan_registry, scan_registry.kernels, scan_registry.aot):
        assert package.__file__ is not None
        folder = Path(package.__file__).parent
        prefix = package.__name__.split(".")[1:]
        for path in sorted(folder.rglob("*.py")):
            words = [*prefix, *path.relative_to(folder).with_suffix("").parts]
            if not prefix and words[0] in ("kernels", "aot"):
                continue  # walked on its own, as it may lie elsewhere
            yield ".".join(word for word in words if word != "__init__"), path


def imports(path: Path) -> set[str]:
    result = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports are not used here"
            result |= {f"{node.module}.{alias.name}" for alias in node.names}
    return result


MODULES = dict(modules())


def test_all_modules_are_found() -> None:
    expected = {"", "hardware.target", "kernels", "kernels.model", "aot.plan", "cli.inspect"}
    assert expected <= set(MODULES)


@pytest.mark.parametrize(
    "module", [name for name in MODULES if name.startswith("kernels") and ".op" not in name]
)
def test_kernels_are_described_by_the_standard_library(module: str) -> None:
    used = {name.partition(".")[0] for name in imports(MODULES[module])}
    allowed = (
        sys.stdlib_module_names
        | {"scan_registry"}
        | KERNELS_MAY.get(module.rpartition(".")[2], set())
    )
    assert used <= allowed


#: Attributes that need NumPy; torch does not depend on it, and its collectives of objects fail without it.
OF_NUMPY = {
    *("numpy", "from_numpy", "all_gather_object", "gather_object"),
    *("broadcast_object_list", "scatter_object_list"),
}


@pytest.mark.parametrize("name", ["import", "attribute"])
def test_no_module_needs_numpy(name: str) -> None:
    def used(path: Path) -> set[str]:
        if name == "import":
            return {item for item in imports(path) if item.partition(".")[0] == "numpy"}
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        return {node.attr for node in nodes if isinstance(node, ast.Attribute)} & OF_NUMPY

    users = {module: result for module, path in MODULES.items() if (result := used(path))}
    # JAX itself depends on NumPy, whose arrays and numbers its functions take.
    of_jax = {f"jax.{module}": {"numpy"} for module in ("checks", "explaining", "sharded")}
    assert users == (of_jax if name == "import" else {})


def test_no_module_is_long() -> None:
    lengths = {
        module: len(path.read_text(encoding="utf-8").splitlines())
        for module, path in MODULES.items()
    }
    assert max(lengths.values()) <= 450, max(lengths, key=lengths.__getitem__)
