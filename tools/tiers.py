"""First-call time and error of every tier, each forced by hiding what stands above it.

    python tools/tiers.py [--json FILE] [--repeat N]

Needs a GPU that an installed archive was built for. For each tier a fresh process, all of its cache
folders new and empty, imports the operator and scans (8, 1536, 2048) float32, forward and backward;
then a second process does the same with what the first has left in the caches ("warm"). Measured are

    import     importing the operator, torch being imported already and a CUDA context open
    forward    the first call, to its synchronised result
    backward   the first derivative, likewise

and by the first pair of processes, in every dtype, the largest relative error ‖out − ref‖ / ‖ref‖ of
the states and of both gradients of a part of that, (2, 96, 2048), against the float64 reference. The exit
status is 1 if a tier is not the one that was to be forced, or if an error is beyond its tolerance.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coldstart import circumstances, empty_caches, fresh_process
from records import write_records
from rich.console import Console
from rich.table import Table

SHAPE = (8, 1536, 2048)

#: Run in a fresh process with a tier, a backend, whether errors are asked for, and a shape.
CHILD = """
import functools, json, sys, time, warnings
import torch

tier, backend, checked, *shape = sys.argv[1:]
shape = [int(size) for size in shape]
gates, tokens, grad = (torch.rand(shape, device="cuda") for _ in range(3))
# The first derivative of a process makes torch import half of sympy, whoever computes it.
torch.ones(1, device="cuda", requires_grad=True).mul(2).backward(torch.ones(1, device="cuda"))
torch.cuda.synchronize()

def milliseconds(action):
    started = time.perf_counter()
    result = action()
    torch.cuda.synchronize()
    return result, 1e3 * (time.perf_counter() - started)

def load():
    import scan_registry
    return scan_registry.linear_scan

linear_scan, imported = milliseconds(load)

from scan_registry.catalog import inventory
from scan_registry.runtime import loader
from scan_registry.hardware.device import device
from scan_registry.dispatch.fit import Tier, nearest_tier
from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.linear_scan import cases, reference

# Hiding takes the place of a machine without: archives of closer tiers, and the compilers.
wanted = {str(each): each for each in Tier}[tier]
class Hidden(inventory.Catalogue):
    def __init__(self, whole):
        there = device(0)
        kept = (a for a in whole.archives if nearest_tier(a.arch, there) >= wanted)
        super().__init__(tuple(kept), whole.providers)

@functools.cache
def catalogue():
    return Hidden(inventory.catalogue())

loader.catalogue = catalogue
if wanted == Tier.REFERENCE:
    loader.jit.toolchains = lambda: dict.fromkeys(("cuda", "triton"), "hidden for this measurement")

for tensor in (gates, tokens):
    tensor.requires_grad_()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    states, forward = milliseconds(lambda: linear_scan(gates, tokens, backend=backend))
    _, backward = milliseconds(lambda: states.backward(grad))
    _, again = milliseconds(lambda: linear_scan(gates, tokens, backend=backend))

errors = {}
for dtype in cases.TOLERANCE if checked == "True" else ():
    # As long as the others, but few rows: the float64 reference runs on the CPU.
    narrow = [t.detach()[:2, :96].to(getattr(torch, dtype)) for t in (gates, tokens, grad)]
    a, b = (t.clone().requires_grad_() for t in narrow[:2])
    out = linear_scan(a, b, backend=backend)
    out.backward(narrow[2])
    wide = [cases.wide(t).cpu() for t in narrow]
    expected, _ = reference.forward(wide[0], wide[1])
    gradients = reference.backward(wide[0], expected, wide[2])
    found = (out, a.grad, b.grad)
    errors[dtype] = max(relative_error(f.cpu(), e)
                        for f, e in zip(found, (expected, *gradients[:2])))

import scan_registry
steps = scan_registry.explain(linear_scan, gates, tokens, backend=backend).steps
print(json.dumps({
    "tiers": sorted({str(step.decision.taken().tier) for step in steps}),
    "import_ms": imported, "forward_ms": forward, "backward_ms": backward, "again_ms": again,
    "errors": errors, "warnings": [str(each.message) for each in caught],
}))
"""


@dataclass(frozen=True)
class Forced:
    """A tier to force, the backend that it is asked for with, and what it is called here."""

    name: str
    tier: str
    backend: str


TIERS = (
    Forced("exact", "exact", "auto"),
    Forced("ptx", "ptx", "auto"),
    Forced("jit, NVRTC", "jit", "cuda"),
    Forced("jit, Triton", "jit", "triton"),
    Forced("reference", "reference", "auto"),
)


@dataclass(frozen=True)
class Measured:
    """What the processes of one tier said: a cold one and a warm one per repetition."""

    name: str
    tier: str
    cold: tuple[dict[str, Any], ...]
    warm: tuple[dict[str, Any], ...]

    def median(self, column: str, *, warm: bool = False) -> float:
        return statistics.median(run[column] for run in (self.warm if warm else self.cold))

    def error(self, dtype: str) -> float:
        return max(float(runs[0]["errors"][dtype]) for runs in (self.cold, self.warm))

    def defects(self, tolerance: dict[str, float]) -> list[str]:
        """The failures."""
        found = {tier for run in (*self.cold, *self.warm) for tier in run["tiers"]}
        defects = (
            [f"{self.name}: ran on {', '.join(sorted(found))}"] if found != {self.tier} else []
        )
        for dtype, limit in tolerance.items():
            if not self.error(dtype) <= limit:
                defects.append(f"{self.name}: {dtype} error {self.error(dtype):.1e} > {limit:.0e}")
        return defects


def measure(forced: Forced, repeat: int) -> Measured:
    cold: list[dict[str, Any]] = []
    warm: list[dict[str, Any]] = []
    for number in range(repeat):
        with tempfile.TemporaryDirectory(prefix="tiers-") as folder:
            environment = empty_caches(Path(folder))
            for runs in (cold, warm):
                arguments = [forced.tier, forced.backend, number == 0, *SHAPE]
                runs.append(fresh_process(CHILD, arguments, environment))
    return Measured(forced.name, forced.tier, tuple(cold), tuple(warm))


def table(results: Sequence[Measured], dtypes: Sequence[str]) -> Table:
    view = Table(title=f"First calls on {SHAPE} float32, by tier (medians, ms)")
    view.add_column("tier", no_wrap=True)
    for heading in ("import", "forward, cold", "backward, cold", "forward, warm", "backward, warm"):
        view.add_column(heading, justify="right")
    view.add_column("again", justify="right")
    for dtype in dtypes:
        view.add_column(f"error\n{dtype}", justify="right")
    for result in results:
        times = [
            result.median("import_ms"),
            result.median("forward_ms"),
            result.median("backward_ms"),
            result.median("forward_ms", warm=True),
            result.median("backward_ms", warm=True),
            result.median("again_ms"),
        ]
        errors = [f"{result.error(dtype):.1e}" for dtype in dtypes]
        view.add_row(result.name, *(f"{time:,.2f}" for time in times), *errors)
    return view


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number to FILE")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="pairs of processes (3)")
    options = parser.parse_args()
    if options.repeat < 1:
        parser.error("--repeat must be at least 1")
    import torch

    if not torch.cuda.is_available():
        print("error: tiers measures on a GPU, and torch finds none here", file=sys.stderr)
        return 2
    from scan_registry.kernels.linear_scan.cases import TOLERANCE

    results = []
    for forced in TIERS:
        print(f"forcing {forced.name}", file=sys.stderr, flush=True)
        results.append(measure(forced, options.repeat))
    console = Console(width=None if "COLUMNS" in os.environ or sys.stdout.isatty() else 140)
    console.print(table(results, list(TOLERANCE)))
    facts = circumstances()
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()), highlight=False)
    if options.json:
        record = {**facts, "shape": SHAPE, "results": [asdict(result) for result in results]}
        write_records(options.json, record)
    defects = [defect for result in results for defect in result.defects(TOLERANCE)]
    for defect in defects:
        print(f"error: {defect}", file=sys.stderr)
    return 1 if defects else 0


if __name__ == "__main__":
    sys.exit(main())
