"""A kernel repository for Hugging Face's Hub, from wheels: what ``kernels.get_kernel`` loads. Nothing is compiled.

    python -m ci.hub OUT [WHEEL …]          from these wheels, one for each platform; by default from the installed package
    python -m ci.hub OUT --archs sm90,ptx80     with these archives only, for a smaller download

    OUT/README.md                           what the Hub shows
    OUT/build/<variant>/metadata.json       what the ``kernels`` library reads before it loads the variant
    OUT/build/<variant>/scan_registry/      the package

The package needs nothing of torch's C++ interface, so one variant serves every release of torch from 2.6 on. Each platform has a
variant for each major release of CUDA that torch is built with, and a variant without archives for torch without CUDA. The
loader downloads one variant.

The loader imports the package under the name ``id`` of metadata.json, which is unique to the content. So the copy's imports
are relative, and it has its own namespace in torch.ops, whatever other copies a process has loaded. The same files give the same
repository, byte for byte.
"""

from __future__ import annotations

import argparse
import ast
import json
import platform
import sys
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# After everything that is installed: beside this folder lie the sources of what is.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from ci.matrix import load
from ci.workspace import DISTRIBUTION, PACKAGE, ROOT, DevError
from scan_registry.artifact.archive import SUFFIX
from scan_registry.hardware.target import Target
from scan_registry.packaging.wheel import Wheel

#: The version on the Hub, whose branch there is v1. A release that breaks callers of this one gets the next number.
VERSION = 1
#: The loader takes a variant of CUDA x.y for torch with CUDA x.z if z is at least y.
CUDA = ("cu120", "cu130")
#: How variants begin that serve every torch from the oldest in ci/matrix.json on.
FRAMEWORK = "torch-stable-abi{}"
#: What the Hub shows about the repository.
CARD = Path(__file__).with_suffix(".md")
ARCHIVES = PurePosixPath(PACKAGE, "archives")
INIT = f"{PACKAGE}/__init__.py"
LAYERS = f"{PACKAGE}/layers.py"
#: ``layers`` is what the loader looks for; ``cli`` is the command line, since no program is installed.
MODULES = '\n_HOMES |= {"cli": None, "layers": None}\n'
LAYERS_TEXT = '''"""Where ``kernels.kernelize`` looks for layers."""

from .compat.hub_layers import *
from .compat.hub_layers import __all__ as __all__
'''


# --- What is packed ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A platform, such as x86_64, and the package's files for it by their paths in a wheel."""

    machine: str
    files: Mapping[str, bytes]


def from_wheel(path: Path) -> Source:
    """``DevError`` if the wheel is not one of this package for a platform of the matrix."""
    wheel = Wheel.read(path)
    machines = [p.name for p in load().platforms if wheel.tag.endswith(f"_{p.name}")]
    if wheel.name != PACKAGE or len(machines) != 1:
        platforms = ", ".join(p.name for p in load().platforms)
        raise DevError(f"{path.name} is not a wheel of {DISTRIBUTION} for one of {platforms}")
    return Source(machines[0], wheel.files)


def installed() -> Source:
    """What a wheel of the installed package has. The folders of an editable install have more."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    setuptools = settings["tool"]["setuptools"]
    files: dict[str, bytes] = {}
    for package in setuptools["packages"]:
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise DevError(f"{package} is not installed; run `pip install {ROOT}`, or name a wheel")
        folder = Path(spec.submodule_search_locations[0])
        for pattern in ("*.py", "*.pyi", "*.so", *setuptools["package-data"].get(package, ())):
            for path in folder.glob(pattern):
                inner = path.relative_to(folder).as_posix()
                files[f"{package.replace('.', '/')}/{inner}"] = path.read_bytes()
    return Source(platform.machine(), files)


def chosen(source: Source, archs: Sequence[Target] | None) -> tuple[Source, list[Target]]:
    """The source with the archives for ``archs`` alone, by default with all, and what its archives are for."""
    archives = {_target(name): name for name in source.files if _is_archive(name)}
    wanted = list(archives if archs is None else archs)
    if absent := [target.label for target in wanted if target not in archives]:
        there = ", ".join(target.label for target in archives) or "none"
        raise DevError(f"no archive for {', '.join(absent)}; the package has {there}")
    left_out = {name for target, name in archives.items() if target not in wanted}
    files = {name: text for name, text in source.files.items() if name not in left_out}
    return Source(source.machine, files), sorted(wanted)


def _is_archive(name: str) -> bool:
    return PurePosixPath(name).parent == ARCHIVES and name.endswith(SUFFIX)


def _target(name: str) -> Target:
    return Target.parse(PurePosixPath(name).name.removesuffix(SUFFIX))


# --- Relative imports -------------------------------------------------------------------------


@dataclass(frozen=True)
class Import:
    """An import statement: its line, how many dots precede the module, the module, and the names from it."""

    line: int
    dots: int
    module: str
    names: tuple[str, ...]

    @property
    def is_absolute(self) -> bool:
        """Whether it names this package."""
        return not self.dots and self.module.partition(".")[0] == PACKAGE

    def meaning(self, name: str) -> tuple[str, tuple[str, ...]]:
        """What it imports in the module ``name``, in absolute terms."""
        parents = PurePosixPath(name).parts[:-1]
        home = parents[: len(parents) - self.dots + 1] if self.dots else ()
        return ".".join(filter(None, (*home, self.module))), self.names


def imports(text: str) -> Iterator[Import]:
    """Every import of a module, also those within functions."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            yield Import(node.lineno, node.level, node.module or "", names)
        elif isinstance(node, ast.Import):
            yield from (Import(node.lineno, 0, alias.name, ()) for alias in node.names)


@cache
def relative(name: str, text: str) -> str:
    """The module ``name``, such as scan_registry/nn/s5.py, with relative imports of its own package.

    ``DevError`` if an import is of a form that cannot be written so, or does not mean the same any more.
    """
    lines, statements = text.split("\n"), [*imports(text)]
    dots = "." * (len(PurePosixPath(name).parts) - 1)
    for statement in filter(lambda s: s.is_absolute, statements):
        line, start = lines[statement.line - 1], f"from {statement.module} "
        if not line.lstrip().startswith(start):
            raise DevError(f"{name}:{statement.line}: {line.strip()!r} must begin with {start!r}")
        inner = statement.module.removeprefix(PACKAGE).removeprefix(".")
        lines[statement.line - 1] = line.replace(start, f"from {dots}{inner} ", 1)
    changed = "\n".join(lines)
    results = [*imports(changed)]
    if any(r.is_absolute for r in results) or [r.meaning(name) for r in results] != [
        s.meaning(name) for s in statements
    ]:
        raise DevError(f"{name}: its relative imports do not mean what its absolute ones do")
    return changed


def copied(source: Source) -> dict[str, bytes]:
    """The files of the copy, in alphabetical order."""
    files = dict(source.files)
    if INIT not in files or LAYERS in files:
        raise DevError(f"the package must have {INIT}, and no {LAYERS}, which is written here")
    for name, content in files.items():
        if name.endswith(".py"):
            files[name] = relative(name, content.decode()).encode()
    files[INIT] += MODULES.encode()
    files[LAYERS] = LAYERS_TEXT.encode()
    return dict(sorted(files.items()))


# --- The repository ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """One folder of ``build``: its name, the metadata, and the package."""

    name: str
    metadata: Mapping[str, object]
    files: Mapping[str, bytes]

    @property
    def size(self) -> int:
        return sum(map(len, self.files.values()))


def variants(source: Source, archs: Sequence[Target] | None) -> Iterator[Variant]:
    """A platform's variants."""
    source, targets = chosen(source, archs)
    files = copied(source)
    framework = FRAMEWORK.format(load().torch[0].replace(".", ""))
    for backend in CUDA:
        info = {"type": "cuda", "archs": [capability(target) for target in targets]}
        yield _variant(f"{framework}-{backend}-{source.machine}-linux", info, files)
    bare = {name: text for name, text in files.items() if not _is_archive(name)}
    yield _variant(f"{framework}-cpu-{source.machine}-linux", {"type": "cpu"}, bare)


def capability(target: Target) -> str:
    """A target as the loader compares it with the GPU: 9.0, or 8.0+PTX."""
    major, minor = target.capability
    return f"{major}.{minor}{target.suffix}{'+PTX' if target.is_ptx else ''}"


def _variant(name: str, backend: Mapping[str, object], files: Mapping[str, bytes]) -> Variant:
    digests = {path: b64encode(sha256(text).digest()).decode() for path, text in files.items()}
    content = sha256(json.dumps([name, digests]).encode()).hexdigest()
    metadata = {
        "id": f"{PACKAGE}_{backend['type']}_{content[:16]}",
        "name": DISTRIBUTION,
        "version": VERSION,
        "license": "apache-2.0",
        "python-depends": [],
        "backend": backend,
        "digest": {"algorithm": "sha256", "files": digests},
    }
    return Variant(name, metadata, files)


def write(folder: Path, built: Sequence[Variant]) -> None:
    """Write the repository into a folder that is absent or empty."""
    if folder.exists() and any(folder.iterdir()):
        raise DevError(f"{folder} is not empty; remove it, or name another folder")
    for variant in built:
        place = folder / "build" / variant.name
        for name, content in variant.files.items():
            path = place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        text = json.dumps(variant.metadata, indent=2) + "\n"
        (place / "metadata.json").write_text(text, encoding="utf-8")
    card = CARD.read_text(encoding="utf-8").replace("{version}", str(VERSION))
    (folder / "README.md").write_text(card, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="a folder that is absent or empty")
    parser.add_argument("wheels", nargs="*", type=Path, metavar="WHEEL")
    parser.add_argument("--archs", help="such as sm90,ptx80; by default all that there are")
    options = parser.parse_args(argv)
    try:
        archs = [Target.parse(a) for a in options.archs.split(",")] if options.archs else None
        sources = [from_wheel(path) for path in options.wheels] or [installed()]
        built = [variant for source in sources for variant in variants(source, archs)]
        write(options.out, built)
    except (DevError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{'MB':>8}  {'files':>5}  variant")
    for variant in built:
        print(f"{variant.size / 1e6:8.2f}  {len(variant.files):5}  {variant.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
