"""``tools/occupancy.py``: what an SM holds, and what is shown of installed archives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from scan_registry.catalog.inventory import catalogue
from scan_registry.kernels.model import Variant

ROWS = "linear_scan.time_last_forward:cuda:dtype=float32,gates=float32,access=aligned,"


@pytest.fixture(scope="module")
def tool(load_tool: Callable[[str], ModuleType]) -> Any:
    return load_tool("occupancy")


@pytest.fixture
def of(a_binary: Any) -> Any:
    """A binary of 128 threads that takes so many registers, and bytes of shared memory."""

    def made(registers: int, dynamic: int, statics: str = "warps=4,rows=1,steps=2") -> Any:
        binary, _ = a_binary(Variant.parse(ROWS + statics))
        return replace(
            binary,
            block=(128, 1, 1),
            registers=registers,
            dynamic_shared=dynamic,
            static_shared=0,
        )

    return made


def test_the_scarcest_resource_decides(tool: Any, of: Any) -> None:
    a100, small = tool.GPUS["sm80"], tool.GPUS["sm89"]
    assert tool.resident(of(128, 0), a100) == 4  # 16 warps of 4096 registers
    assert tool.resident(of(32, 0), a100) == 16  # 2048 threads
    assert tool.resident(of(32, 0), small) == 12  # 1536 threads
    assert tool.resident(of(32, 40_000), a100) == 4
    assert tool.resident(of(32, 101_376), small) == 1
    assert tool.resident(of(32, 101_377), small) == 0


def test_bytes_in_flight(tool: Any, of: Any) -> None:
    assert tool.in_flight(of(32, 0)) == 2 * 2 * 16 * 128  # inputs, steps, bytes, threads
    ring = "warps=1,rows=4,lanes=8,pieces=2,stages={},blocks=4"
    assert tool.in_flight(of(32, 30_000, ring.format(3))) == 20_000
    assert tool.in_flight(of(32, 30_000, ring.format(1))) == 30_000
    # What is composed already waits for others, not for memory.
    assert tool.in_flight(of(32, 30_000, ring.format(3) + ",prefix_lead=1")) == 10_000


@pytest.mark.parametrize("arch", ["sm80", "sm89", "sm90"])
def test_every_compiled_kernel_is_shown_and_fits(
    arch: str, tool: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if all(archive.arch.label != arch for archive in catalogue().archives):
        assert tool.main(["--arch", arch]) == 2
        pytest.skip(f"no archive {arch} is installed")
    monkeypatch.setenv("COLUMNS", "140")
    assert tool.main(["--arch", arch]) == 0
    shown = capsys.readouterr().out
    for kernel in ("time_last_forward", "channel_last_backward"):
        assert kernel in shown
    assert all(use.warps > 0 for use in tool.uses(arch, tool.GPUS[arch]))
