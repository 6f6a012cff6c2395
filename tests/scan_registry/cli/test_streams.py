"""What commands print can be written in every encoding."""

from __future__ import annotations

import ast
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

import scan_registry
from scan_registry.cli.streams import make_plain, plain

PACKAGE = Path(scan_registry.__file__).parent
ENCODINGS = {
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "latin-1": {"PYTHONIOENCODING": "latin-1"},
    "a plain locale": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}
#: Runs the program on each line of its argument, in one process: most of a command's time is its imports.
SCRIPT = """
import argparse, sys
from scan_registry.cli import main, parser

def helps(parser, words=()):
    yield [*words, "--help"]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from helps(inner, (*words, name))

lines = list(helps(parser())) if sys.argv[1] == "--help" else [line.split() for line in sys.argv[1].splitlines()]
for words in lines:
    try:
        status = main(words)
    except SystemExit as end:
        status = end.code or 0
    except UnicodeError as error:
        status = repr(error)
    print(f"=== {' '.join(words)} = {status}")
"""
COMMANDS = """
--version
inspect
inspect --all --dtype bfloat16 --kernel time_last_forward
inspect --dtype no-such-thing
explain linear_scan --dtype bfloat16 --shape 8,1536,4096 --arch sm_90 --all
explain linear_scan --dtype float32 --shape 1,…,2
explain rnn --dtype float32 --shape 2,3,4,64 --arch sm_121
doctor
doctor --for sm_90
doctor --for sm_121 --driver 12.4
verify --arch ptx80 --language triton --dtype float64
selftest --device cpu
bench --device nothing
bench rnn --device nothing
tune
cache list
cache clear
"""


def run(what: str, folder: Path, **environment: str) -> str:
    left_out = ("PYTHONIOENCODING", "PYTHONUTF8", "LC_ALL", "LANG", "COLUMNS", "FORCE_COLOR")
    inherited = {name: value for name, value in os.environ.items() if name not in left_out}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, what],
        cwd=folder,
        env={**inherited, "SCAN_REGISTRY_CACHE": str(folder / "cache"), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
        check=False,
    )
    latin = environment.get("PYTHONIOENCODING") == "latin-1"
    # In a plain locale, what was given comes back byte for byte.
    given = done.stdout.replace("…".encode(), b"")
    text = given.decode("latin-1" if latin else "ascii")
    assert done.returncode == 0, text
    return text


@pytest.mark.slow
@pytest.mark.parametrize("what", ["--help", COMMANDS.strip()], ids=["help", "commands"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_command_prints_in_every_encoding(tmp_path: Path, encoding: str, what: str) -> None:
    text = run(what, tmp_path, **ENCODINGS[encoding])
    ends = [line for line in text.splitlines() if line.startswith("=== ")]
    assert len(ends) >= 12
    assert {line.rpartition(" = ")[2] for line in ends} <= {"0", "1", "2"}, ends
    for word in ("\\u", "\\x", "Traceback", "UnicodeEncodeError"):
        assert word not in text.replace("\\u2026,2", "").replace("\\udc", "")
    if what == "--help":
        assert "N,N,..." in text
    else:
        assert "archives of" in text


@pytest.mark.slow
def test_what_is_timed_is_printed_in_ascii(tmp_path: Path) -> None:
    words = "bench --device cpu --seqlens 8 --bs 1 --d-model 8 --no-peers --fwd-only"
    assert f"=== {words} = 0" in run(words, tmp_path, **ENCODINGS["ascii"])


def test_what_users_write_comes_back_to_them(tmp_path: Path) -> None:
    """In ASCII by number: it is not known to have a plain form."""
    text = run("inspect --arch \u4e2d", tmp_path, PYTHONIOENCODING="ascii", PYTHONUTF8="1")
    assert "--arch '\\u4e2d' is not installed" in text


def test_a_path_that_is_no_text_is_written_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding in ("ascii", "latin-1", "utf-8"):
        written = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding))
        make_plain()
        print("in /data/\udcff/archives – – …", flush=True)
        dashes = "– – …" if encoding == "utf-8" else "- - ..."
        assert written.getvalue() == b"in /data/\xff/archives " + f"{dashes}\n".encode()


def test_what_a_user_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii", errors="ignore"))
    make_plain()
    print("a → b", flush=True)
    assert written.getvalue() == b"a  b\n"


def test_a_stream_that_is_none_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    make_plain()


def test_every_character_of_the_packages_texts_has_a_plain_form() -> None:
    """Of all that it may print; docstrings are no such texts."""
    for path in set(PACKAGE.rglob("*.py")) - {PACKAGE / "cli" / "streams.py"}:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in said
            ):
                odd = [each for each in node.value if ord(each) > 127 and plain(each)[0] == "\\"]
                assert not odd, f"{path}:{node.lineno}: {odd}"


def test_tables_are_plain_where_lines_are_not_to_be_had() -> None:
    assert [plain(each) for each in "─│┼┏╸…"] == ["-", "|", "+", "+", "-", "..."]
