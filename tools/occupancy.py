"""What the compiled scans leave a GPU to stream with: warps and bytes in flight on an SM.

    python tools/occupancy.py                 A100 and RTX 4090, by the installed archives sm80 and sm89
    python tools/occupancy.py --arch sm90

It needs no GPU: registers and shared memory are those of the archives' resource reports. Resident blocks are
what registers (handed to warps by 256, a quarter of them to each scheduler), shared memory (with the kilobyte
that a block takes for itself), threads and blocks of an SM allow. In flight are the bytes of inputs
that these blocks have asked for and not used yet: all stages of a ring but one and those that are composed before
they are walked, or a tile ahead of the one in registers. A GPU needs as many as arrive in LATENCY at its whole bandwidth, by Little's law. Bandwidths are
those that the makers state. Triton's kernels are not shown: how far ahead they load is the compiler's choice.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from scan_registry.artifact.archive import Binary
from scan_registry.catalog.inventory import catalogue
from scan_registry.kernels.linear_scan import streams
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.model import ITEM_SIZE

LATENCY = 0.7e-6  # seconds from a load to its bytes, about, where the memory is busy
_REGISTERS, _UNIT, _SCHEDULERS = 65_536, 256, 4
_OWN_SHARED = 1024  # bytes of shared memory that a block takes for itself


@dataclass(frozen=True)
class Gpu:
    """Of an SM: bytes of shared memory, threads and blocks. Bandwidth in bytes per second."""

    name: str
    sm_count: int
    bandwidth: float
    shared: int
    threads: int
    blocks: int

    @property
    def needed(self) -> float:
        """Bytes in flight on each SM that stream at the whole bandwidth."""
        return self.bandwidth * LATENCY / self.sm_count


GPUS = {
    "sm80": Gpu("A100 80GB", 108, 2.039e12, 167_936, 2048, 32),
    "sm89": Gpu("RTX 4090", 128, 1.008e12, 102_400, 1536, 24),
    "sm90": Gpu("H200", 132, 4.8e12, 233_472, 2048, 32),
}


@dataclass(frozen=True)
class Use:
    """How many warps of a binary an SM holds, and how many bytes they have in flight."""

    binary: Binary
    warps: int
    in_flight: int


def resident(binary: Binary, gpu: Gpu) -> int:
    """Blocks that an SM holds at once."""
    warps = binary.threads // 32
    of_warp = -(-(binary.registers or 0) * 32 // _UNIT) * _UNIT
    by_registers = _SCHEDULERS * (_REGISTERS // _SCHEDULERS // max(1, of_warp)) // warps
    by_shared = gpu.shared // (binary.shared + _OWN_SHARED)
    return min(by_registers, by_shared, gpu.threads // binary.threads, gpu.blocks)


def in_flight(binary: Binary) -> int:
    """Bytes of inputs that a block has asked for and not used yet."""
    variant = binary.variant
    if streams.is_streamed(variant):
        held, stages = dict(variant.statics), variant.number("stages")
        composed = int(held.get("aggregate_lead", held.get("prefix_lead", 0)))
        return binary.dynamic_shared * max(1, stages - 1 - composed) // stages
    inputs = 2 if variant.kernel.endswith("forward") else 3
    vector = 16 // ITEM_SIZE[variant.text("dtype")]
    if variant.text("access") == "generic":
        vector = min(4, vector)
    held = dict(variant.statics)
    elements = variant.number("steps") * int(held.get("vector", vector))
    return inputs * elements * ITEM_SIZE[variant.text("dtype")] * binary.threads


def uses(arch: str, gpu: Gpu) -> Iterator[Use]:
    """Of every forward and backward kernel in CUDA that is installed for the architecture."""
    for archive, binary in catalogue():
        variant = binary.variant
        scans = variant.family == FAMILY.name and variant.kernel.endswith(("forward", "backward"))
        if archive.arch.label == arch and scans and variant.language == "cuda":
            blocks = resident(binary, gpu)
            yield Use(binary, blocks * binary.threads // 32, blocks * in_flight(binary))


def table(arch: str, gpu: Gpu, found: list[Use]) -> Table:
    """A row for each kernel and access."""
    title = f"{arch}, {gpu.name}: {gpu.needed / 1e3:.1f} kB in flight on each SM stream"
    shown = Table(title=title)
    shown.add_column("kernel")
    shown.add_column("access")
    for heading in ("binaries", "spills", "registers", "warps", "kB in flight", "enough"):
        shown.add_column(heading, justify="right")
    kinds = dict.fromkeys((u.binary.variant.kernel, u.binary.variant.text("access")) for u in found)
    for kernel, access in kinds:
        here = [
            use
            for use in found
            if (use.binary.variant.kernel, use.binary.variant.text("access")) == (kernel, access)
        ]
        kilobytes = [use.in_flight / 1e3 for use in here]
        shown.add_row(
            kernel,
            access,
            str(len(here)),
            str(sum(bool(use.binary.spill_bytes) for use in here)),
            _span([use.binary.registers or 0 for use in here]),
            _span([use.warps for use in here]),
            f"{min(kilobytes):.0f}–{max(kilobytes):.0f}",
            f"{sum(use.in_flight >= gpu.needed for use in here)} of {len(here)}",
        )
    return shown


def _span(numbers: list[int]) -> str:
    return f"{min(numbers)}–{max(numbers)}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", choices=GPUS, action="append", help="default: sm80 and sm89")
    console = Console(soft_wrap=True) if not sys.stdout.isatty() else Console()
    for arch in parser.parse_args(arguments).arch or ("sm80", "sm89"):
        found = list(uses(arch, GPUS[arch]))
        if not found:
            print(f"tools/occupancy.py: error: no archive {arch} is installed", file=sys.stderr)
            return 2
        console.print(table(arch, GPUS[arch], found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
