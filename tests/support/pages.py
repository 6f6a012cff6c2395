"""The README and the pages of the documentation site, and the code blocks that they hold."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "pages"

#: Languages whose blocks are code to run, and those whose blocks are shown only.
RUN, SHOWN = ("python", "shell"), ("text", "json", "cuda", "dockerfile", "toml")

_FENCE = re.compile(r"^(`{3,})(\w*)\s*$")
_DIRECTIVE = re.compile(r"^<!-- (gpu|skip|slow|exit|needs)(?:: (.+?))? -->$")


@dataclass(frozen=True)
class Block:
    """A fenced block, and what the comments above it say of running it.

    line   of the fence, from 1
    gpu    it needs a GPU, and why
    skip   it is not run, and why
    needs  a package that this one does not; without it the block is left out
    slow   it takes more than a few seconds
    exits  the statuses with which each of its commands may end
    """

    page: Path
    line: int
    language: str
    text: str
    gpu: str | None = None
    skip: str | None = None
    needs: str | None = None
    slow: bool = False
    exits: tuple[int, ...] = (0,)

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def documents() -> list[Path]:
    """The README, and every page of the site."""
    return [ROOT / "README.md", *sorted(PAGES.rglob("*.md"))]


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order; ``ValueError`` for a fence that does not end."""
    said: dict[str, str] = {}
    lines = iter(enumerate(page.read_text(encoding="utf-8").splitlines(), 1))
    for number, line in lines:
        if directive := _DIRECTIVE.match(line):
            said[directive[1]] = directive[2] or ""
        elif fence := _FENCE.match(line):
            held: list[str] = []
            for _, each in lines:
                if each == fence[1]:
                    break
                held.append(each)
            else:
                raise ValueError(f"{page}:{number}: the block does not end")
            yield Block(
                page,
                number,
                fence[2],
                "".join(f"{each}\n" for each in held),
                gpu=said.get("gpu"),
                skip=said.get("skip"),
                needs=said.get("needs"),
                slow="slow" in said,
                exits=tuple(map(int, said.get("exit", "0").split())),
            )
            said = {}
        elif line.strip():
            said = {}


def commands(block: Block) -> list[str]:
    """The commands of a shell block, without comments; a line that ends with a backslash goes on."""
    joined = block.text.replace("\\\n", " ")
    return [line.strip() for line in joined.splitlines() if line.strip() and line[0] != "#"]
