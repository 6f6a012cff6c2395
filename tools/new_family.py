"""Begin a family of kernels, or a kind of gate: write files that build and pass their tests, for you to change.

    python tools/new_family.py NAME          kernels/NAME with spec, source, reference, cases and public function, and
                                             tests/kernels/NAME, from the template tools/family, which multiplies a tensor
    python tools/new_family.py --gate NAME   kernels/gated_scan/kinds/NAME.cuh, and its line in kernels/gated_scan/kinds.py,
                                             from the example of docs/pages/developers/gates.md

Neither writes over a file that is there. After it, install the package anew, and run `python tools/docs.py` and
`python tools/completion.py`.
"""

from __future__ import annotations

import argparse
import builtins
import keyword
import re
import sys
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
    page = GATES.read_text(encoding="utf-8")
    header, line = (
        re.search(rf"```{language}\n(.*?)```", page, re.DOTALL) for language in ("cuda", "python")
    )
    if header is None or line is None:
        raise Refused(f"{GATES} has no example")
    kinds = root / "kernels" / "gated_scan" / "kinds.py"
    text = kinds.read_text(encoding="utf-8")
    if f'"{name}"' in text:
        raise Refused(f"{kinds} already has {name!r}")
    file = root / "kernels" / "gated_scan" / "kinds" / f"{name}.cuh"
    added = line[1].replace("decay", name)
    write({file: header[1]}, {kinds: f"{text.rstrip()}\n\n\n{added}"})
    return [file, kinds]


# --- The command ------------------------------------------------------------------------------


def write(files: dict[Path, str], changed: dict[Path, str]) -> None:
    """New files and changed ones: all of them, or none if a new one is there already."""
    present = [str(path) for path in files if path.exists()]
    if present:
        raise Refused(f"there is already {', '.join(present)}")
    for path, text in (files | changed).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


#: What the template's files already call something else.
USED = {"describe", "kernel", "launch", "problem", "reference", "cases", "spec", "op", "function"}
#: What C++ and CUDA call something else: types, and words that Python does not have.
OF_CUDA = set(
    re.findall(
        r"\w+",
        """auto bool case catch char const default delete do double enum explicit extern float goto half inline int long mutable
        new operator private protected public register short signed sizeof static struct switch template this throw typedef
        typename union unsigned using virtual void volatile""",
    )
)


def check(name: str, root: Path) -> None:
    """Refuse what is no name of a module and of a function, or names something already."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise Refused(f"{name!r} is no name of a Python module in small letters")
    kernels = root / "kernels"
    if name in USED | OF_CUDA | set(dir(builtins)) or any(
        path.stem == name for path in kernels.glob("*")
    ):
        raise Refused(f"{name!r} already names something in kernels, Python, C++ or CUDA")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="of the family and its function, or of the kind of gate")
    parser.add_argument("--gate", action="store_true", help="a kind of gate of gated_scan")
    parser.add_argument("--root", type=Path, default=ROOT, help="the working copy")
    args = parser.parse_args()
    try:
        check(args.name, args.root)
        written = (new_gate if args.gate else new_family)(args.name, args.root)
    except Refused as reason:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    for path in written:
        print(path.relative_to(args.root))
    return 0


if __name__ == "__main__":
    sys.exit(main())
