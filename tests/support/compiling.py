"""A toy family of kernels, to be compiled and changed."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from changing import changed

from scan_registry.artifact.archive import Binary
from scan_registry.catalog.inventory import catalogue
from scan_registry.hardware.target import Target
from scan_registry.kernels import family, model

# The module, which the package's attribute of this name may hide behind a function one day.
compiling = importlib.import_module("scan_registry.aot.compile")
SM90 = Target.parse("sm90")
LINEAR_SCAN = family("linear_scan")
CUDA = LINEAR_SCAN.kernel("time_last_forward", "cuda").variants[0]
TRITON = LINEAR_SCAN.kernel("time_last_forward", "triton").variants[0]
COPY = """
#include "scale.cuh"
extern "C" __global__ void toy(float* x) { x[threadIdx.x] = scaled(x[threadIdx.x]); }
"""
HEADER = "__device__ inline float scaled(float x) { return SCALE * x; }\n"
#: Keeps 96 numbers alive across a barrier, with leave for 32 registers.
SPILL = """
extern "C" __global__ void __launch_bounds__(1024, 2) toy(float* x) {
    float kept[96];
#pragma unroll
    for (int i = 0; i < 96; i++) kept[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 96; i++) x[i * 1024 + threadIdx.x] = kept[i] * kept[95 - i] * SCALE;
}
"""


def on_sm90(variants: Iterable[model.Variant]) -> Iterator[Binary]:
    """Their binaries for 9.0: those of the installed archive, and the others compiled here."""
    installed = {binary.variant: binary for archive, binary in catalogue() if archive.arch == SM90}
    for variant in variants:
        yield installed.get(variant) or compiling.compile_variant(variant, SM90)[0]


class Toy:
    """A family of one CUDA kernel, whose files and spec a test changes at will."""

    variant = model.Variant("toy", "copy", "cuda", (("dtype", "float32"), ("scale", 2)))

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kernel = model.Kernel(
            family="toy",
            name="copy",
            language="cuda",
            parameters=(model.Parameter("x", "pointer"),),
            defaults=model.Space((self.variant.statics,), lambda kind: ((),)),
            code=model.Code(
                source="copy.cu",
                entry="toy",
                constants=lambda variant: {"SCALE": variant.number("scale")},
                warps=lambda variant: 4,
            ),
            rules=model.Rules(lambda variant, problem: None),
            launch=lambda variant, problem, sm_count: model.Launch((1, 1, 1), {}),
        )
        self.write("copy.cu", COPY)
        self.write("scale.cuh", HEADER)

    def write(self, name: str, text: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text, encoding="utf-8")

    def change(self, **changes: Any) -> None:
        self.kernel = changed(self.kernel, **changes)

    def family(self, name: str) -> model.Family:
        assert name == "toy"
        return model.Family("toy", "y = scale * x", self.folder, (self.kernel,))
