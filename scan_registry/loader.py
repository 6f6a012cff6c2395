"""From a selected binary to a prepared launch: digest check, driver, launcher."""

from __future__ import annotations

import threading

from scan_registry import driver
from scan_registry._launcher import Launch
from scan_registry.archive import Archive, Binary
from scan_registry.kernels import family
from scan_registry.kernels.model import Problem

_functions: dict[tuple[int, str, str], int] = {}
_lock = threading.Lock()


def function(ordinal: int, archive: Archive, binary: Binary) -> int:
    """The loaded kernel's handle on device ``ordinal``; each binary is loaded once per device.

    ``ArchiveError`` if the bytes do not have their digest, ``DriverError`` if the driver refuses.
    """
    key = (ordinal, binary.sha256, binary.entry)
    with _lock:
        if key not in _functions:
            _functions[key] = driver.load(
                driver.primary_context(ordinal),
                archive.read(binary),
                binary.entry,
                binary.dynamic_shared,
                f"{binary.variant} for {binary.target}",
            )
        return _functions[key]


def prepare(ordinal: int, archive: Archive, binary: Binary, problem: Problem) -> tuple[Launch, int]:
    """A launch of ``binary`` on ``problem``, and the bytes of workspace to allocate for each run.

    Its ``run`` takes the stream and then the kernel's pointers in the order of its parameters.
    """
    kernel = family(binary.variant.family).kernel(binary.variant.kernel, binary.variant.language)
    shape = kernel.launch(binary.variant, problem)
    pointers = kernel.pointers
    launch = Launch(
        context=driver.primary_context(ordinal),
        function=function(ordinal, archive, binary),
        grid=shape.grid,
        block=binary.block,
        shared=binary.dynamic_shared,
        pointers=len(pointers),
        scalars=tuple(shape.scalars[p.name] for p in kernel.parameters if p.kind == "i64"),
        hidden=binary.hidden,
        workspace=pointers.index("workspace") if shape.workspace else -1,
        workspace_bytes=shape.workspace,
    )
    return launch, shape.workspace
