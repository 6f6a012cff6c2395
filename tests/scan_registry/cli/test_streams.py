"""What commands print can be written in every encoding."""

from __future__ import annotations

import argparse
import ast
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from benching import time_quickly

import scan_registry
from scan_registry.catalog import providers
from scan_registry.catalog.inventory import catalogue
from scan_registry.catalog.providers import Provider
from scan_registry.cli import inspect, main, parser
from scan_registry.cli.errors import CLOSED_PIPE
from scan_registry.cli.streams import make_plain, plain

PACKAGE = Path(scan_registry.__file__).parent
#: What is in every source with a character in its texts that is not ASCII's.
ODD = re.compile(r"[^\x00-\x7f]|\\[uUNx0-7]")
ENCODINGS = {
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "latin-1": {"PYTHONIOENCODING": "latin-1"},
    "a plain locale": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}
#: Runs the program on each line of its argument, in one process: most of a command's time is its imports.
SCRIPT = """
import sys
from scan_registry.cli import main

for line in sys.argv[1].splitlines():
    try:
        status = main(line.split())
    except SystemExit as end:
        status = end.code or 0
    except UnicodeError as error:
        status = repr(error)
    print(f"=== {line} = {status}")
"""
#: Of a process whose streams Python itself opens: what is written is printed there, and comes back from users.
IN_A_PROCESS = """
--version
explain --help
inspect --arch 1,…,2
cache list
"""
COMMANDS = """
--version
inspect
inspect --all --dtype bfloat16 --kernel time_last_forward
inspect --dtype no-such-thing
explain linear_scan --dtype bfloat16 --shape 8,1536,4096 --arch sm_90 --all
explain linear_scan --dtype float32 --shape 1,…,2
explain rnn --dtype float32 --shape 2,3,4,64 --arch sm_121
doctor --for sm_121 --driver 12.4
verify --arch ptx80 --language triton --dtype float64
selftest --device cpu --dtype float64
bench --device cpu --seqlens 8 --bs 1 --d-model 8 --no-peers --fwd-only
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
    inputs = done.stdout.replace("…".encode(), b"")
    text = inputs.decode("latin-1" if latin else "ascii")
    assert done.returncode == 0, text
    return text


def ends_well(text: str, calls: int) -> None:
    """As many calls have ended, each with a status of its own, and every character had a plain form."""
    ends = [line for line in text.splitlines() if line.startswith("=== ")]
    assert len(ends) == calls
    assert {line.rpartition(" = ")[2] for line in ends} <= {"0", "1", "2"}, ends
    for word in ("\\u", "\\x", "Traceback", "UnicodeEncodeError"):
        assert word not in text.replace("\\u2026,2", "").replace("\\udc", "")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_process_prints_in_every_encoding(tmp_path: Path, encoding: str) -> None:
    text = run(IN_A_PROCESS.strip(), tmp_path, **ENCODINGS[encoding])
    ends_well(text, 4)
    assert "N,N,..." in text


def helps(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[str]:
    yield " ".join((*words, "--help"))
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from helps(inner, (*words, name))


@pytest.fixture(params=["ascii", "latin-1"])
def printed(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Iterable[str]], str]]:
    """What the program prints, called with each of some lines, into streams of the encoding. Two of the archives that are
    here are installed, as reading all of them takes most of the time."""
    (tmp_path / "archives").mkdir()
    for archive in catalogue().archives:
        if archive.arch.label in ("ptx80", "sm86"):
            (tmp_path / "archives" / archive.path.name).symlink_to(archive.path)
    here = Provider("scan-registry", scan_registry.__version__, tmp_path, "", {})
    monkeypatch.setattr(providers, "installed", lambda: ((here,), ()))
    catalogue.cache_clear()
    monkeypatch.setenv("SCAN_REGISTRY_CACHE", str(tmp_path / "cache"))
    time_quickly(monkeypatch)
    for name in ("COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def call(lines: Iterable[str]) -> str:
        written = io.BytesIO()
        stream = io.TextIOWrapper(written, request.param, write_through=True)
        with redirect_stdout(stream), redirect_stderr(stream):
            for line in lines:
                try:
                    status: object = main(line.split())
                except SystemExit as end:
                    status = end.code or 0
                print(f"=== {line} = {status}")
        return written.getvalue().decode(request.param)

    yield call
    catalogue.cache_clear()


def test_every_help_prints(printed: Callable[[Iterable[str]], str]) -> None:
    lines = [*helps(parser())]
    assert len(lines) >= 12
    text = printed(lines)
    ends_well(text, len(lines))
    assert "N,N,..." in text


@pytest.mark.slow
@pytest.mark.parametrize("printed", ["ascii"], indirect=True)
def test_every_command_prints(printed: Callable[[Iterable[str]], str]) -> None:
    """Characters go one at a time, those that latin-1 has not as those that ASCII has not."""
    lines = COMMANDS.strip().splitlines()
    text = printed(lines)
    ends_well(text, len(lines))
    assert "archives of" in text
    assert "--no-peers --fwd-only = 0" in text


@pytest.mark.parametrize("printed", ["ascii"], indirect=True)
def test_what_users_write_comes_back_to_them(printed: Callable[[Iterable[str]], str]) -> None:
    """In ASCII by number: it is not known to have a plain form."""
    assert "--arch '\\u4e2d' is not installed" in printed(["inspect --arch \u4e2d"])


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


def test_every_character_of_the_packages_texts_has_a_plain_form() -> None:
    """Of all that it may print; docstrings are no such texts."""
    for path in set(PACKAGE.rglob("*.py")) - {PACKAGE / "cli" / "streams.py"}:
        source = path.read_text(encoding="utf-8")
        if not ODD.search(source):
            continue
        tree = ast.parse(source)
        said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in said
            ):
                odd = [item for item in node.value if ord(item) > 127 and plain(item)[0] == "\\"]
                assert not odd, f"{path}:{node.lineno}: {odd}"


def test_tables_are_plain_where_lines_are_not_to_be_had() -> None:
    assert [plain(item) for item in "─│┼┏╸…"] == ["-", "|", "+", "+", "-", "..."]


def status_of(words: str) -> object:
    """The exit status of a call, however it ends."""
    try:
        return main(words.split())
    except SystemExit as end:
        return end.code


CALLS = ("inspect", "cache list", "--help", "explain --help", "--version")


@pytest.mark.parametrize("words", CALLS)
def test_a_full_disk_is_one_line(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert status_of(words) == 1
    said = capsys.readouterr().err
    assert said == (
        "scan-registry: error: standard output cannot be written: No space left on device\n"
    )


@pytest.mark.parametrize("words", CALLS)
def test_a_pipe_that_nobody_reads_is_silent(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", encoding="utf-8") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert status_of(words) == CLOSED_PIPE == 141
    assert capsys.readouterr().err == ""


def test_output_of_many_pages_that_cannot_be_written_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than the stream holds back: nothing is left for a last flush to fail at."""
    monkeypatch.setattr(inspect, "run", lambda _: print("x" * 100_000))
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert status_of("inspect") == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_closed_output_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["inspect"]) == 1
    assert capsys.readouterr().err.endswith("standard output cannot be written: it is closed\n")


def test_an_error_that_is_not_the_outputs_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: object) -> int:
        raise OSError("a defect")

    monkeypatch.setattr(inspect, "run", fail)
    with pytest.raises(OSError, match="a defect"):
        main(["inspect"])
