"""Begin a family of kernels, or a kind of gate: write files that build and pass their tests, for you to change.

    python tools/new_family.py NAME          kernels/NAME with spec, source, reference, cases and public function, and
                                             tests/kernels/NAME, from the template tools/family, which multiplies a tensor
    python tools/new_family.py --gate NAME   kernels/gated_scan/kinds/NAME.cuh, and its entries in kinds.py and jax_gates.py of
                                             kernels/gated_scan, from the example of docs/pages/developers/gates.md

Neither writes over a file that is there. After it, install the package anew, and run `python tools/docs.py` and
`python tools/completion.py`.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import keyword
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = Path(__file__).resolve().parent / "family"
API = Path("docs/pages/reference/api/scans.md")
GATES = ROOT / "docs" / "pages" / "developers" / "gates.md"


class Refused(Exception):
    """What was asked for cannot be done; nothing was written."""


# --- A family ---------------------------------------------------------------------------------


def renamed(text: str, name: str) -> str:
    """The template's text with another name in place of ``scale``, which the template uses for nothing else."""
    camel = "".join(word.capitalize() for word in name.split("_"))
    return text.replace("SCALE", name.upper()).replace("Scale", camel).replace("scale", name)


def family_files(name: str, kernels: Path, tests: Path) -> dict[Path, str]:
    """The files of a new family, by their places."""
    files = {}
    for source in sorted(TEMPLATE.rglob("*")):
        if source.suffix in (".py", ".cu", ".json"):
            place = renamed(source.relative_to(TEMPLATE).as_posix(), name)
            folder = tests if source.name.startswith("test_") else kernels
            files[folder / name / place] = renamed(source.read_text(encoding="utf-8"), name)
    return files


def inserted(text: str, line: str, others: str) -> str:
    """A text with a line more among the lines that match ``others``, which are in their order."""
    lines = re.findall(others, text, re.MULTILINE)
    if line in lines:
        raise Refused(f"there is already {line.strip()}")
    after = next((other for other in lines if other > line), None)
    if after is None:
        return text.replace(lines[-1], lines[-1] + line)
    return text.replace(after, line + after)


def with_public_name(package: str, name: str) -> str:
    """The text of scan_registry/__init__.py with the function's name in the lists that readers and type checkers go by."""
    line = f"    from scan_registry.kernels.{name}.op.function import {name}\n"
    package = inserted(package, line, r"^    from scan_registry\.kernels\..* import .*\n")
    before, opening, rest = package.partition("__all__ = [\n")
    names, closing, after = rest.partition("]\n")
    names = inserted(names, f'    "{name}",\n', r'^    "[a-z]\w*",\n')
    return before + opening + names + closing + after


def new_family(name: str, root: Path) -> list[Path]:
    """Write a family into a working copy; returns the files."""
    package, page = root / "scan_registry" / "__init__.py", root / API
    files = family_files(name, root / "kernels", root / "tests" / "kernels")
    changed = {
        package: with_public_name(package.read_text(encoding="utf-8"), name),
        page: page.read_text(encoding="utf-8").rstrip() + f"\n\n::: scan_registry.{name}\n",
    }
    write(files, changed)
    return [*files, *changed]


# --- A kind of gate ---------------------------------------------------------------------------


def new_gate(name: str, root: Path) -> list[Path]:
    """Write a kind of gate into a working copy; returns the files."""
    page, folder = GATES.read_text(encoding="utf-8"), root / "kernels" / "gated_scan"
    blocks = re.findall(r"```(?:cuda|python)\n(.*?)```", page, re.DOTALL)
    if len(blocks) != 3:
        raise Refused(f"{GATES} has no example of a header and of entries for torch and JAX")
    header, *entries = blocks
    changed = {}
    for path, entry in zip((folder / "kinds.py", folder / "jax_gates.py"), entries, strict=True):
        text = path.read_text(encoding="utf-8")
        if f'"{name}"' in text:
            raise Refused(f"{path} already has {name!r}")
        changed[path] = f"{text.rstrip()}\n\n\n{entry.replace('decay', name)}"
    file = folder / "kinds" / f"{name}.cuh"
    write({file: header}, changed)
    return [file, *changed]


# --- The command ------------------------------------------------------------------------------


def write(files: dict[Path, str], changed: dict[Path, str]) -> None:
    """New files and changed ones: all of them, or none if a new one is there already."""
    present = [str(path) for path in files if path.exists()]
    if present:
        raise Refused(f"there is already {', '.join(present)}")
    for path, text in (files | changed).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


#: What C++ and CUDA call something else: types, and words that Python does not have.
OF_CUDA = """
auto bool case catch char const default delete do double enum explicit extern float goto half inline int long mutable new
operator private protected public register short signed sizeof static struct switch template this throw typedef typename
union unsigned using virtual void volatile
"""


def names_in(text: str) -> Iterator[str]:
    """The names in a Python source: of modules, of what it binds and reads, of parameters and of attributes."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for module in (getattr(node, "module", None), *(alias.name for alias in node.names)):
                yield from (module or "").split(".")
        for field in ("id", "attr", "arg", "name", "asname"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield name


def used() -> set[str]:
    """What the template's files already call something else than the family, and ``scale.cu`` its parameters."""
    sources = [path.read_text(encoding="utf-8") for path in sorted(TEMPLATE.rglob("*.py"))]
    kernel = (TEMPLATE / "scale.cu").read_text(encoding="utf-8")
    names = {name for text in sources for name in names_in(text)}
    return (names | {*re.findall(r"\w+", kernel)}) - {"scale"}


def check(name: str, root: Path, *, gate: bool) -> None:
    """Refuse what is no name of a module and of a function, or names something already."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise Refused(f"{name!r} is no name of a Python module in small letters")
    if not gate and (root / "kernels" / name / "spec.py").exists():
        raise Refused(f"there is already a family {name}")
    folders = (root, root / "kernels", root / "scan_registry")
    if name in {path.stem for folder in folders for path in folder.glob("*")}:
        raise Refused(f"{name!r} already names a file or folder of the repository")
    if name in {*OF_CUDA.split(), *dir(builtins)} or (not gate and name in used()):
        raise Refused(f"{name!r} already names something in Python, C++, CUDA or the template")


# --- What comes next --------------------------------------------------------------------------

FAMILY_STEPS = """
Next, and the first two again after each change of {name}.cu:
    pip install -e . -C archs=ptx80
    pytest -q tests/kernels/{name}
    python tools/docs.py
    python tools/completion.py
"""
GATE_STEPS = """
Next, and the first two again after each change of {name}.cuh:
    pip install -e . -C archs=ptx80
    pytest -q tests/kernels/gated_scan -k "{name} or jax"
    python tools/docs.py
    python tools/completion.py
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="of the family and its function, or of the kind of gate")
    parser.add_argument("--gate", action="store_true", help="a kind of gate of gated_scan")
    parser.add_argument("--root", type=Path, default=ROOT, help="the working copy")
    args = parser.parse_args()
    try:
        check(args.name, args.root, gate=args.gate)
        written = (new_gate if args.gate else new_family)(args.name, args.root)
    except Refused as reason:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    for path in written:
        print(path.relative_to(args.root))
    print((GATE_STEPS if args.gate else FAMILY_STEPS).format(name=args.name), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
