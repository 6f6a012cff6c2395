"""Time of one call on a device, for the tools that time whole models."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def milliseconds(function: Callable[[], object], device: torch.device) -> float:
    """Of one call, until the device has done it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - begin)
