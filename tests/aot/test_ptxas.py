"""The assembler: which one is taken, what it is given, and what it says where it fails."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from scan_registry.aot import elf, ptxas
from scan_registry.aot.nvrtc import Nvrtc
from scan_registry.aot.toolchain import CompileError
from scan_registry.hardware.target import Target

VERSION = Nvrtc().identity().removeprefix("nvrtc ")
PTX = b"""// for sm_80
.version 8.0
.target sm_80
.address_size 64
.visible .entry toy() { ret; }
"""


@pytest.fixture
def nothing_known() -> Iterator[None]:
    """Nothing is known from before, nor afterwards of what was made up."""
    ptxas.find.cache_clear()
    yield
    ptxas.find.cache_clear()


def test_only_the_compilers_own_release_will_do(nothing_known: None) -> None:
    program = ptxas.find(VERSION)
    assert program is not None
    assert ptxas._version(program) == VERSION
    assert ptxas.find("12.9") is None
    assert ptxas.find("") is None


def test_without_triton_there_is_none(nothing_known: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert ptxas.find(VERSION) is None


def test_what_does_not_run_here_has_no_version(tmp_path: Path) -> None:
    program = tmp_path / "ptxas"
    program.write_bytes(b"for another machine")
    program.chmod(0o755)
    assert ptxas._version(program) is None
    program.write_text("#!/bin/sh\necho unknown\n", encoding="utf-8")
    assert ptxas._version(program) is None


def test_only_the_target_is_another() -> None:
    created = ptxas.retargeted(PTX, Target.parse("sm89"))
    assert created == PTX.replace(b".target sm_80", b".target sm_89")
    specific = PTX.replace(b".target sm_80", b".target sm_100a")
    assert b"\n.target sm_120a\n" in ptxas.retargeted(specific, Target.parse("sm120"))


def test_machine_code() -> None:
    program = ptxas.find(VERSION)
    assert program is not None
    created = ptxas.assemble(program, PTX, Target.parse("sm86"))
    assert elf.arch_number(created) == 86


def test_an_error_holds_the_log() -> None:
    program = ptxas.find(VERSION)
    assert program is not None
    with pytest.raises(CompileError, match=r"(?s)ptxas.* ended with \d+.*rte"):
        ptxas.assemble(program, PTX.replace(b"ret;", b"rte;"), Target.parse("sm80"))
