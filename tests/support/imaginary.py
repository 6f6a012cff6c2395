"""What there is on imaginary machines: kernels without tables, compilers, and none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from changing import changed

from scan_registry.dispatch.fit import Toolchain
from scan_registry.kernels.linear_scan.spec import FAMILY as SHIPPED
from scan_registry.kernels.model import Language

#: Whatever tables there are.
FAMILY = replace(SHIPPED, kernels=tuple(changed(k, tunings=tuple) for k in SHIPPED.kernels))
NVRTC = Toolchain("nvrtc 12.9.86", (12, 9))
COMPILERS: Mapping[Language, Toolchain | str] = {
    "cuda": NVRTC,
    "triton": Toolchain("triton 3.6.0", (12, 9)),
}
MISSING: Mapping[Language, Toolchain | str] = {
    "cuda": "NVRTC is not installed",
    "triton": "Triton is not installed",
}
