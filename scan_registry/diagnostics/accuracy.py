"""Run binaries on random problems and measure their error against the float64 reference.

A family's ``cases`` module draws the problems; ``selftest`` and ``tools/attest.py`` call this.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

from scan_registry.artifact.archive import Binary
from scan_registry.base.package import NAME
from scan_registry.hardware import driver
from scan_registry.hardware._launcher import Launch
from scan_registry.hardware.device import device
from scan_registry.kernels import family
from scan_registry.kernels.cases import Case, Cases, Launched
from scan_registry.kernels.model import Kernel
from scan_registry.runtime import loader


def cases_of(family_name: str) -> Cases:
    """The module that draws random problems for a family."""
    cases: Cases = importlib.import_module(f"{NAME}.kernels.{family_name}.cases")
    return cases


def run(ordinal: int, binary: Binary, read: Callable[[], bytes], case: Case) -> None:
    """Launch ``binary``, of which ``read`` gets the bytes, on a case's tensors, on the current stream;
    the case holds the outputs."""
    group = family(binary.variant.family)
    function = loader.load(ordinal, binary, read, binary)
    launch = loader.bind(ordinal, group, case.problem, binary, function)
    kernel = group.kernel(binary.variant.kernel, binary.variant.language)
    shape = kernel.launch(binary.variant, case.problem, device(ordinal).sm_count)
    start(ordinal, launch, kernel, case, shape.workspace)


def start(ordinal: int, launch: Launch, kernel: Kernel, case: Launched, workspace: int) -> None:
    """Run a prepared launch on a case's tensors."""
    scratch = torch.empty(workspace, dtype=torch.uint8, device=f"cuda:{ordinal}")
    tensors = {**case.tensors, "workspace": scratch if workspace else None}
    pointers = [
        None if (tensor := tensors.get(name)) is None else tensor.data_ptr()
        for name in kernel.pointers
    ]
    status = launch.run(torch.cuda.current_stream(ordinal).cuda_stream, *pointers)
    if status:
        raise driver.DriverError(
            "cuLaunchKernel", status, f" for {kernel.name} in {kernel.language}"
        )
