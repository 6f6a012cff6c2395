"""The loader against the stub driver: what it loads and launches, and what it says of a driver's errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from textwrap import dedent
from typing import Any

import pytest
from driving import PRELUDE

from scan_registry.artifact.archive import Archive, Binary
from scan_registry.kernels.linear_scan.problem import LinearScanProblem, Strides
from scan_registry.kernels.linear_scan.spec import FAMILY

Make = Callable[..., tuple[Binary, bytes]]
Factory = Callable[..., Archive]

VARIANT = FAMILY.kernel("time_last_forward", "cuda").variants[0]
ENTRY = "kernel"

#: ``archive`` is the file that the second argument names, and holds one binary.
LOADER = """
from scan_registry.hardware import driver
from scan_registry.runtime import loader
from scan_registry.artifact.archive import Archive

archive = Archive(Path(sys.argv[1]))
binary = archive.binaries[0]

def load(ordinal=0):
    return loader.load(ordinal, binary, lambda: archive.read(binary), "a kernel")
"""


def play_loader(stub: Any, archive: Archive, script: str) -> Any:
    return json.loads(stub.run(PRELUDE + LOADER + dedent(script), archive.path).stdout)


@pytest.fixture
def one_binary(stub_driver: Any, a_binary: Make, archive_factory: Factory) -> Archive:
    """An archive with machine code for sm_90."""
    content = stub_driver.cubin("sm_90", [ENTRY])
    return archive_factory("sm90", [a_binary(VARIANT, "sm90", content, entry=ENTRY)])


def test_a_failed_launch_runs_again(stub_driver: Any, one_binary: Archive) -> None:
    stub_driver.gpu().fail("cuLaunchKernel", 701, match=ENTRY, after=1, times=1)
    script = f"""
        from scan_registry.kernels.linear_scan.spec import FAMILY
        from scan_registry.kernels.linear_scan.problem import LinearScanProblem, Strides
        bound = loader.bind(0, FAMILY, {a_problem()!r}, binary, load())
        pointers = range(1, 1 + len(FAMILY.kernel("time_last_forward", "cuda").pointers))
        print(json.dumps([bound.run(0, *pointers) for _ in range(3)]))
    """
    assert play_loader(stub_driver, one_binary, script) == [0, 701, 0]
    shape = FAMILY.kernel("time_last_forward", "cuda").launch(VARIANT, a_problem(), 132)
    assert {call.grid for call in stub_driver.calls("cuLaunchKernel")} == {shape.grid}


def test_a_workspace_is_zeroed_unless_the_kernel_does_so(
    stub_driver: Any, one_binary: Archive
) -> None:
    stub_driver.gpu()
    script = f"""
        from dataclasses import replace
        from types import SimpleNamespace
        from scan_registry.kernels.linear_scan.spec import FAMILY
        from scan_registry.kernels.linear_scan.problem import LinearScanProblem, Strides
        kernel = FAMILY.kernel("time_last_forward", "cuda")
        shape, place = kernel.launch(binary.variant, {a_problem()!r}, 132), kernel.pointers.index("workspace")
        statuses = []
        for number, zeroed in enumerate((True, False), 1):
            told = replace(shape, workspace=64 * number, zeroed=zeroed)
            other = SimpleNamespace(kernel=lambda *named: replace(kernel, launch=lambda *given: told))
            pointers = [4096 * number if i == place else None for i in range(len(kernel.pointers))]
            bound = loader.bind(0, other, {a_problem()!r}, binary, load())
            statuses.append(bound.run(0, *pointers))
        print(json.dumps(statuses))
    """
    assert play_loader(stub_driver, one_binary, script) == [0, 0]
    (zeroed,) = stub_driver.calls("cuMemsetD8Async")
    assert (zeroed.number("pointer"), zeroed.number("bytes")) == (4096, 64)
    assert len(stub_driver.calls("cuLaunchKernel")) == 2


def a_problem() -> LinearScanProblem:
    """Two batches of three channels."""
    strides = (*(Strides(0, 3072, 1024, 1),) * 3, Strides(0, 3, 1, 0))
    dtypes, sizes = ("float32", "float32"), (1, 2, 3, 1024)
    return LinearScanProblem("forward", "time_last", *dtypes, *sizes, strides, 16)
