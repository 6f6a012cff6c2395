"""Run binaries on random problems and measure their error against the float64 reference.

A family's ``cases`` module draws the problems; ``selftest`` and ``tools/attest.py`` call this.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from scan_registry import driver, loader
from scan_registry.archive import Archive, Binary
from scan_registry.kernels import family


def cases_of(family_name: str) -> Any:
    """The module that draws random problems for a family."""
    return importlib.import_module(f"scan_registry.kernels.{family_name}.cases")


def run(ordinal: int, archive: Archive, binary: Binary, case: Any) -> None:
    """Launch ``binary`` on a case's tensors, on the current stream; the case holds the outputs."""
    kernel = family(binary.variant.family).kernel(binary.variant.kernel, binary.variant.language)
    launch, workspace = loader.prepare(ordinal, archive, binary, case.problem)
    scratch = torch.empty(workspace, dtype=torch.uint8, device=f"cuda:{ordinal}")
    tensors = {**case.tensors, "workspace": scratch if workspace else None}
    pointers = [
        None if (tensor := tensors.get(name)) is None else tensor.data_ptr()
        for name in kernel.pointers
    ]
    status = launch.run(torch.cuda.current_stream(ordinal).cuda_stream, *pointers)
    if status:
        raise driver.DriverError("cuLaunchKernel", status, f" for {binary.variant}")
