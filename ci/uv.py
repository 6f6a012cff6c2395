"""uv in place of pip: what tests need it installs in a sixth of the time, from where pip is configured to find it."""

from __future__ import annotations

import ast
import os
import subprocess
from pathlib import Path

from ci.workspace import Environment

__all__ = ["command"]

#: Settings of pip's that name where packages are or which are taken, as options of uv's.
OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraint",
}
#: Settings that uv has as variables.
VARIABLES = {"cert": "SSL_CERT_FILE", "timeout": "UV_HTTP_TIMEOUT"}
#: Settings that have no part in what is installed.
OTHERS = {
    *("cache-dir", "compile", "disable-pip-version-check", "no-cache-dir", "no-color", "no-compile"),
    *("no-input", "no-warn-script-location", "progress-bar", "quiet", "retries", "root-user-action"),
    *("use-feature", "verbose"),
}  # fmt: skip


def settings(environment: Environment) -> dict[str, str]:
    """pip's, for installations: those of its files, and over them those of variables."""
    words = [str(word) for word in environment.pip("config", "list")]
    done = subprocess.run(
        words, check=True, text=True, encoding="utf-8", stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    )  # fmt: skip
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in done.stdout.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in sections:
            sections[section][key.removeprefix("default-")] = ast.literal_eval(value)
    return {**sections["global"], **sections["install"], **sections[":env:"]}


def command(environment: Environment, *words: str | Path) -> list[str | Path] | None:
    """What installs packages into the environment as pip would; None if there is no uv, or pip has settings that it has not."""
    if not environment.program("uv").is_file():
        return None
    configured = settings(environment)
    if not configured.keys() <= {*OPTIONS, *VARIABLES, *OTHERS}:
        return None
    for key, variable in VARIABLES.items():
        if key in configured:
            os.environ.setdefault(variable, configured[key])
    options = [
        word
        for key, option in OPTIONS.items()
        for value in configured.get(key, "").split()
        for word in (option, value)
    ]
    # The latest version is taken wherever it is, as pip takes it.
    usual = ("-q", "--no-config", "--index-strategy", "unsafe-best-match")
    start = [environment.program("uv"), "pip", "install", "--python", environment.python]
    return [*start, *usual, *options, *words]
