"""``scan-registry completion``: scripts for shells, which are part of the package."""

from __future__ import annotations

import subprocess

import pytest

from scan_registry.cli import COMMANDS, completion, main, parser


def test_scripts_know_every_command_and_option(capsys: pytest.CaptureFixture[str]) -> None:
    options = {
        option
        for action in parser()._actions
        for option in action.option_strings
        if option.startswith("--")
    }
    for shell in completion.SHELLS:
        assert main(["completion", shell]) == 0
        script = capsys.readouterr().out
        assert [name for name in COMMANDS if name not in script] == []
        # fish has options without their dashes
        assert [option for option in options if option.strip("-") not in script] == []


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("scan-registry cache e", ["export"]),
        ("scan-registry sel", ["selftest"]),
        ("scan-registry completion f", ["fish"]),
        ("scan-registry doctor --dr", ["--driver"]),
    ],
)
def test_bash_completes_words(line: str, offered: list[str]) -> None:
    words = line.split()
    script = f"""{completion.script("bash")}
COMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words) - 1}
_shtab_scan_registry scan-registry {words[-1]} {words[-2]}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    result = subprocess.run(
        ["bash", "--norc"],
        input=script,
        check=True,
        text=True,
        encoding="utf-8",
        stdout=subprocess.PIPE,
    )
    assert result.stdout.split() == offered
