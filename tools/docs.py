"""Write the parts of the documentation that are made, not written: run it after a change of what they show.

    python tools/docs.py

Made are the command-line reference (from the parsers of scan_registry.cli), the pictures, and the tables between
``<!-- made: NAME -->`` and ``<!-- end -->`` (both from tools/results, but for those of many ranks, which are the cost
model's). None of it needs a GPU. Import the package
whose commands are to be described: the installed one.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import docs_pictures
import docs_tables

from scan_registry import cli

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "pages"

_PREFACE = """# Command line

`scan-registry COMMAND --help` prints the same on a terminal. `python -m scan_registry` is the same program. Options
have to be written whole. Ctrl-C ends every command with status 130, a pipe that nobody reads any more (`| head -1`) with
141, and a disk that is full with one line on stderr and status 1.

Tables have one line a row. On a narrow terminal columns are left out, and named, and text is folded; in a pipe nothing
is cut, so that `grep` finds rows. What commands print at 80 and 120 columns and in a pipe:
[inspect](output/inspect.txt), [explain](output/explain.txt), [doctor](output/doctor.txt),
[verify](output/verify.txt), [selftest](output/selftest.txt), [bench](output/bench.txt), [tune](output/tune.txt) without
a GPU, [cache](output/cache.txt), [help and mistakes](output/help.txt).

bash, zsh and fish complete commands and options with a script that [`completion`](#completion) prints. For bash:

<!-- skip: it writes into the home folder -->
```shell
mkdir -p ~/.local/share/bash-completion/completions
scan-registry completion bash > ~/.local/share/bash-completion/completions/scan-registry
```
"""


# --- The command line -------------------------------------------------------------------------


def command_line() -> str:
    """The page on the command line, from the parsers."""
    parts = [_PREFACE]
    for name, parser in _commands(cli.parser()):
        level = "##" if " " not in name else "###"
        parts += [f"{level} {name}\n", f"{_plain(parser.description or '')}\n"]
        parts += [f"```text\n{_usage(parser)}\n```\n", _arguments(parser)]
        if parser.epilog:
            parts.append(f"{_plain(parser.epilog)}\n")
    return "\n".join(part for part in parts if part)


def _commands(
    parser: argparse.ArgumentParser, before: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command and command of a command, by its words, in the order of ``--help``."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                words = f"{before} {name}".strip()
                yield words, command
                yield from _commands(command, words)


def _listed(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [
        action
        for action in parser._actions
        if action.help is not argparse.SUPPRESS
        and not isinstance(action, (argparse._SubParsersAction, argparse._HelpAction))
    ]


def _usage(parser: argparse.ArgumentParser) -> str:
    """The usage line. argparse's own differs from one release of Python to another."""
    words = [parser.prog]
    for action in _listed(parser):
        shown = _name(action, action.option_strings[0] if action.option_strings else "")
        words.append(shown if action.required else f"[{shown}]")
    words += ["…" for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    lines, indent = [words[0]], " " * (len(words[0]) + 1)
    for word in words[1:]:
        if len(lines[-1]) + 1 + len(word) > 84:
            lines.append(indent + word)
        else:
            lines[-1] += f" {word}"
    return "\n".join(lines)


def _name(action: argparse.Action, option: str) -> str:
    if action.nargs == 0:
        return option
    value = action.metavar or (
        "{{{}}}".format(",".join(map(str, action.choices)))
        if action.choices
        else (action.dest.upper() if option else action.dest)
    )
    return f"{option} {value}".strip()


def _arguments(parser: argparse.ArgumentParser) -> str:
    rows = []
    for action in _listed(parser):
        names = [_name(action, option) for option in action.option_strings] or [_name(action, "")]
        said = (action.help or "").replace("%(default)s", str(action.default))
        cell = _plain(said).replace("|", "\\|")
        rows.append(("<br>".join(f"`{name}`" for name in names), cell))
    return f"{docs_tables.table(('argument', 'meaning'), rows)}\n" if rows else ""


def _plain(text: str) -> str:
    """Text in Markdown: what looks like code is code, and nothing is a link or a tag."""
    text = re.sub(r"\s+", " ", text).strip().replace("<", "&lt;").replace("*", "\\*")
    pieces = re.split(r"(`[^`]*`)", text)
    option = re.compile(
        r"(?<![\w`-])(--[a-z][\w-]*|SCAN_REGISTRY_[A-Z_]+|scan_registry(?:[/.]\w[\w-]*)+)"
    )
    return "".join(p if p.startswith("`") else option.sub(r"`\1`", p) for p in pieces)


# --- All of it --------------------------------------------------------------------------------


def generated() -> dict[Path, str]:
    """Every file that is made, in whole or in part, with what it should hold."""
    files = {PAGES / "reference" / "command-line.md": command_line()}
    for name, text in docs_pictures.files().items():
        files[PAGES / "assets" / name] = text
    for page in (ROOT / "README.md", *PAGES.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if "<!-- made: " in text:
            files[page] = docs_tables.with_tables(text)
    return files


def stale() -> list[Path]:
    """The files that are not as they should be."""
    return [
        path
        for path, text in generated().items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]


def main() -> None:
    files = generated()
    for path in stale():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files[path], encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
