"""What releases are made for: ``matrix.json``, and the jobs that follow from it.

    python3 ci/matrix.py     the jobs of .github/workflows/wheels.yml, as JSON

Needs nothing but Python, as workflows run it before anything is installed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("matrix.json")
HOST = "x86_64"  # where archives are compiled; they are the same for every platform


@dataclass(frozen=True)
class Arch:
    """A GPU architecture that releases hold an archive for.

    capability, gpus  in words, as the documentation's table has them
    budget            bytes that its archive may take
    attested          whether a release needs every binary GPU-tested
    """

    label: str
    capability: str
    gpus: str
    budget: int
    attested: bool


@dataclass(frozen=True)
class Platform:
    """A kind of machine that the package itself is built for."""

    name: str
    manylinux: str
    runner: str

    @property
    def tag(self) -> str:
        return f"{self.manylinux}_{self.name}"


@dataclass(frozen=True)
class Matrix:
    """``abi`` is the stable ABI's first Python, such as cp310. ``torch`` has the oldest and the newest
    release of torch that are tested, and ``torch_between`` is tested, too. ``wheel_budget`` is the most
    bytes of a wheel."""

    archs: tuple[Arch, ...]
    platforms: tuple[Platform, ...]
    cuda: str
    pythons: tuple[str, ...]
    abi: str
    torch: tuple[str, str]
    torch_between: str
    wheel_budget: int

    @property
    def label(self) -> str:
        """The toolchain as a local version label: cu129."""
        return f"cu{self.cuda.replace('.', '')}"

    @property
    def torches(self) -> tuple[str, str, str]:
        """The releases of torch that the public interface is tested with, oldest first."""
        return self.torch[0], self.torch_between, self.torch[1]

    @property
    def identifiers(self) -> tuple[str, ...]:
        """What cibuildwheel calls the builds."""
        return tuple(f"{self.abi}-manylinux_{platform.name}" for platform in self.platforms)

    def jobs(self) -> dict[str, list[dict[str, Any]]]:
        """``wheels``: one build for each architecture, and one without any for each platform.
        ``trials``: every Python with the newest torch that has it, the oldest with the oldest torch."""
        wheels = [
            {"platform": HOST, "archs": arch.label, "runner": self._platform(HOST).runner}
            for arch in self.archs
        ]
        wheels += [
            {"platform": p.name, "archs": "none", "runner": p.runner} for p in self.platforms
        ]
        oldest, newest = self.torch
        trials = [{"python": python, "torch": newest} for python in self.pythons]
        trials.append({"python": self.pythons[0], "torch": oldest})
        return {"wheels": wheels, "trials": trials}

    def _platform(self, name: str) -> Platform:
        return next(platform for platform in self.platforms if platform.name == name)


@cache
def load(path: Path = PATH) -> Matrix:
    document: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return Matrix(
        archs=tuple(Arch(label, **of) for label, of in document["archs"].items()),
        platforms=tuple(Platform(name, **of) for name, of in document["platforms"].items()),
        cuda=document["cuda"],
        pythons=tuple(document["python"]),
        abi=document["abi"],
        torch=(document["torch"]["oldest"], document["torch"]["newest"]),
        torch_between=document["torch"]["between"],
        wheel_budget=document["wheel_budget"],
    )


if __name__ == "__main__":
    for name, rows in load().jobs().items():
        print(f"{name}={json.dumps(rows)}")
