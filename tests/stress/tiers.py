"""First-call time of every tier, each forced by hiding what stands above it.

    python tests/stress/tiers.py [--json FILE] [--repeat N]

Needs a GPU that an installed archive was built for. For each tier a fresh process, all of its cache folders new and empty,
imports the operator and scans (8, 1536, 2048) float32, forward and backward; then a second process does the same with what the
first has left in the caches ("warm"). Measured are

    import     importing the operator, torch being imported already and a CUDA context open
    forward    the first call, to its synchronised result
    backward   the first derivative, to its synchronised result
    again      a later call

The exit status is 1 if a tier is not the one that was to be forced, or if the states or a gradient are off.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from coldstart import circumstances, empty_caches, fresh_process
from records import write_records

SHAPE = (8, 1536, 2048)
#: By name: the tier to force, and the backend that it is asked for with.
TIERS = {
    "exact": ("exact", "auto"),
    "ptx": ("ptx", "auto"),
    "jit, NVRTC": ("jit", "cuda"),
    "jit, Triton": ("jit", "triton"),
    "reference": ("reference", "auto"),
}
COLUMNS = ("import_ms", "forward_ms", "backward_ms", "again_ms")
#: Run in a fresh process with a tier, a backend and a shape.
CHILD = """
import functools, json, sys, time
import torch

tier, backend, *shape = sys.argv[1:]
gates, tokens, grad = (torch.rand([int(size) for size in shape], device="cuda") for _ in range(3))
# The first derivative of a process makes torch import half of sympy, whoever computes it.
torch.ones(1, device="cuda", requires_grad=True).mul(2).backward(torch.ones(1, device="cuda"))
torch.cuda.synchronize()
measured = {}

def timed(name, action):
    started = time.perf_counter()
    result = action()
    torch.cuda.synchronize()
    measured[name] = 1e3 * (time.perf_counter() - started)
    return result

def load():
    import scan_registry
    return scan_registry.linear_scan

linear_scan = timed("import_ms", load)

from scan_registry import explain
from scan_registry.catalog import inventory
from scan_registry.runtime import loader
from scan_registry.hardware.device import device
from scan_registry.dispatch.fit import Tier, nearest_tier

# Hiding takes the place of a machine without: archives of closer tiers, and the compilers.
wanted = {str(one): one for one in Tier}[tier]
class Hidden(inventory.Catalogue):
    def __init__(self, whole):
        kept = (a for a in whole.archives if nearest_tier(a.arch, device(0)) >= wanted)
        super().__init__(tuple(kept), whole.providers)

loader.catalogue = functools.cache(lambda: Hidden(inventory.catalogue()))
if wanted == Tier.REFERENCE:
    loader.jit.toolchains = lambda: dict.fromkeys(("cuda", "triton"), "hidden for this measurement")

for tensor in (gates, tokens):
    tensor.requires_grad_()
states = timed("forward_ms", lambda: linear_scan(gates, tokens, backend=backend))
timed("backward_ms", lambda: states.backward(grad))
timed("again_ms", lambda: linear_scan(gates, tokens, backend=backend))

few = [tensor.detach()[:2, :96] for tensor in (gates, tokens, grad)]
wide = [tensor.double().requires_grad_() for tensor in few[:2]]
expected = linear_scan(*wide, backend="reference")
expected.backward(few[2].double())
outputs = zip((states, gates.grad, tokens.grad), (expected, wide[0].grad, wide[1].grad))
measured["error"] = max(float((a[:2, :96] - b).norm() / b.norm()) for a, b in outputs)
steps = explain(linear_scan, gates, tokens, backend=backend).steps
measured["tiers"] = sorted({str(step.decision.taken().tier) for step in steps})
print(json.dumps(measured))
"""


def measure(tier: str, backend: str, repeat: int) -> dict[str, list[dict[str, Any]]]:
    """What the processes print: a cold one and a warm one for each repetition."""
    runs: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    for _ in range(repeat):
        with tempfile.TemporaryDirectory(prefix="tiers-") as folder:
            environment = empty_caches(Path(folder))
            for pair in runs.values():
                pair.append(fresh_process(CHILD, [tier, backend, *SHAPE], environment))
    return runs


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number to FILE")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="pairs of processes (3)")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("error: tiers measures on a GPU, and torch finds none here", file=sys.stderr)
        return 2
    results, failed = [], False
    for name, (tier, backend) in TIERS.items():
        runs = measure(tier, backend, options.repeat)
        results.append({"name": name, "tier": tier, **runs})
        for state, processes in runs.items():
            medians = (
                f"{c} {statistics.median(run[c] for run in processes):,.2f}" for c in COLUMNS
            )
            print(f"{name}, {state}: {', '.join(medians)}", flush=True)
        wrong = [r for processes in runs.values() for r in processes if r["tiers"] != [tier] or not r["error"] < 1e-6]  # fmt: skip
        failed |= bool(wrong)
        if wrong:
            print(f"error: {name}: {wrong[0]}", file=sys.stderr)
    if options.json:
        write_records(options.json, {**circumstances(), "shape": SHAPE, "results": results})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
