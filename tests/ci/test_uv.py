"""What uv is told where pip is configured."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ci import uv
from ci.workspace import Environment


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """With a uv, and a Python whose pip prints the file ``said``."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("python", f"#!/bin/sh\ncat {tmp_path}/said\n"), ("uv", "")):
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)
    for variable in uv.VARIABLES.values():
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    return Environment(tmp_path)


def told(environment: Environment, said: str) -> list[str] | None:
    """uv's options, without those that it always has, for what pip says of its settings."""
    (environment.folder / "said").write_text(said, encoding="utf-8")
    command = uv.command(environment, "torch")
    if command is None:
        return None
    words = [str(word) for word in command]
    assert words[1:5] == ["pip", "install", "--python", str(environment.python)]
    assert words[-1] == "torch"
    return words[words.index("unsafe-best-match") + 1 : -1]


def test_settings_are_options(environment: Environment) -> None:
    assert told(environment, "") == []
    said = (
        "global.index-url='https://one/simple'\nglobal.find-links='/wheels'\nglobal.timeout='9'\n"
    )
    said += "install.extra-index-url='https://two/simple\\nfile:///three'\ndownload.pre='true'\n"
    said += ":env:.find-links='/others'\n:env:.default-timeout='180'\n:env:.cert='/ca.crt'\n"
    assert told(environment, said) == [
        *("--default-index", "https://one/simple"),
        *("--index", "https://two/simple", "--index", "file:///three"),
        *("--find-links", "/others"),
    ]
    assert os.environ["UV_HTTP_TIMEOUT"] == "180"
    assert os.environ["SSL_CERT_FILE"] == "/ca.crt"


@pytest.mark.parametrize("setting", ["global.no-binary='torch'", ":env:.trusted-host='one'"])
def test_pip_installs_where_it_has_other_settings(environment: Environment, setting: str) -> None:
    assert told(environment, setting) is None


def test_pip_installs_where_there_is_no_uv(environment: Environment) -> None:
    environment.program("uv").unlink()
    assert told(environment, "") is None
