"""Time from a fresh process to the first results of a recurrent network.

    python tools/coldstart_rnn.py [--json FILE] [--repeat N] [--baseline] [--device cpu]

A new process for each repetition, once for ``scan_registry.rnn`` and once for ``scan_registry.nn.LSTM``, with
``--baseline`` also for torch.nn's, each with every cache folder new and empty. Each computes an LSTM of 768 units
in bfloat16 on (16, 1024), on the CPU a small one, and measures, in this order,

    torch            importing torch, and nothing of this project
    context          a first tensor on the device, which opens the CUDA context
    product          a first product of matrices, for which torch sets cuBLAS up
    derivative       a first derivative of torch's own
    operations       a first addition and concatenation of torch's own, and product with weights of the module's
                     size, for each of which it loads a kernel
    import           importing the function or module, as far as torch has not been imported
    forward          the first call, to its synchronised result; again: the second
    backward         ``backward()`` of the sum of all h, likewise; again: the second
    explicit         ``backward(gradient)`` of a product of torch's own, for the first time: to compare the
                     shapes, torch imports sympy then, which ``backward()`` of a loss does without

Nothing may be compiled: SCAN_REGISTRY_REQUIRE is ``aot`` there, and no process may leave a file in this
project's cache. The exit status is 1 if one does, or if the median of ``forward`` is more than 30 ms.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from coldstart import circumstances, empty_caches, fresh_process
from records import write_records
from rich.console import Console
from rich.table import Table

TARGET_MS = 30.0
#: Batch, steps, units of one head.
SHAPES = {"cuda": (16, 1024, 768), "cpu": (2, 16, 64)}
NAMES = {
    "scan_registry.rnn": "scan_registry",
    "scan_registry.nn.LSTM": "scan_registry.nn",
    "torch.nn.LSTM": "torch.nn",
}
OURS = tuple(NAMES)[:2]
COLUMNS = (
    "torch",
    "context",
    "product",
    "derivative",
    "operations",
    "import",
    "forward",
    "forward again",
    "backward",
    "backward again",
    "explicit",
)

#: Run in a fresh process with a function or module, where it is, a device and a shape.
CHILD = """
import importlib, json, sys, time

def imported():
    import torch
    return torch

measured = {}
def timed(name, action):
    started = time.perf_counter()
    result = action()
    synchronize()
    measured[name] = 1e3 * (time.perf_counter() - started)
    return result

synchronize = lambda: None
torch = timed("torch", imported)
name, home, device, *shape = sys.argv[1:]
batch, steps, units = map(int, shape)
if device != "cpu":
    synchronize = torch.cuda.synchronize
there = {"device": device, "dtype": torch.bfloat16}
timed("context", lambda: torch.ones(1, **there))
matrix = torch.ones(64, 64, **there)
timed("product", lambda: matrix @ matrix)
one = torch.ones(1, requires_grad=True, **there)
timed("derivative", lambda: (one * 2).sum().backward())
weights = torch.ones(4 * units, units, **there)
sequence = torch.ones(batch, steps, units, **there)

def operate():
    halves = weights[: 2 * units], weights[2 * units :]
    return torch.nn.functional.linear(sequence, torch.cat(halves) + weights)

timed("operations", operate)

short = name.rpartition(".")[2]
made = timed("import", lambda: getattr(importlib.import_module(home), short))
if short == "rnn":
    inputs = (torch.randn(batch, steps, 4, 1, units, **there),
              torch.randn(4, 1, units, units, **there) / units**0.5,
              torch.zeros(4, 1, units, **there))
    for tensor in inputs:
        tensor.requires_grad_()
    call = lambda: made(*inputs)[0][0]
else:
    module = made(units, units, batch_first=True, **there)
    x = torch.randn(batch, steps, units, **there)
    call = lambda: module(x)[0]
synchronize()
for again in ("", " again"):
    h = timed("forward" + again, call)
    total = h.sum()
    synchronize()
    timed("backward" + again, total.backward)
assert torch.isfinite(h).all()
timed("explicit", lambda: (one * 2).backward(torch.ones_like(one)))
print(json.dumps(measured))
"""


@dataclass(frozen=True)
class Measured:
    """What the processes of one function or module said, in ms; and the files that they left in the cache."""

    name: str
    runs: tuple[dict[str, float], ...]
    left: tuple[str, ...]

    def median(self, column: str) -> float:
        return statistics.median(run[column] for run in self.runs)

    def defects(self, target: float) -> list[str]:
        """The failures; ``target`` is the most ms that a first call may take."""
        if self.name not in OURS:
            return []
        found = [f"{self.name}: left {path} in the cache" for path in self.left]
        if not self.median("forward") <= target:
            took = self.median("forward")
            found.append(f"{self.name}: first call {took:.1f} ms > {target:.0f}")
        return found


def measure(name: str, device: str, repeat: int) -> Measured:
    runs: list[dict[str, float]] = []
    left: list[str] = []
    for _ in range(repeat):
        with tempfile.TemporaryDirectory(prefix="coldstart-") as folder:
            environment = empty_caches(Path(folder))
            cache = Path(folder) / "scan-registry"
            environment |= {"SCAN_REGISTRY_REQUIRE": "aot", "SCAN_REGISTRY_CACHE": str(cache)}
            arguments = [name, NAMES[name], device, *SHAPES[device]]
            runs.append(fresh_process(CHILD, arguments, environment))
            left += [path.name for path in cache.rglob("*") if path.is_file()]
    return Measured(name, tuple(runs), tuple(left))


def table(results: Sequence[Measured], shape: Sequence[int]) -> Table:
    """Medians."""
    view = Table(title=f"First calls of a process, {shape} bfloat16 (medians, ms)")
    view.add_column("")
    for result in results:
        view.add_column(result.name, justify="right")
    for column in COLUMNS:
        view.add_row(column, *(f"{result.median(column):.1f}" for result in results))
    return view


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number to FILE")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="processes of each (5)")
    parser.add_argument(
        "--baseline", "--peer", action="store_true", help="measure torch.nn.LSTM, too"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    if options.repeat < 1:
        parser.error("--repeat must be at least 1")
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("error: coldstart_rnn measures on a GPU, and torch finds none", file=sys.stderr)
        return 2
    names = tuple(NAMES) if options.baseline else OURS
    results = [measure(name, options.device, options.repeat) for name in names]
    shape = SHAPES[options.device]
    Console().print(table(results, shape))
    facts = circumstances() if options.device == "cuda" else {"gpu": None}
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    if options.json:
        record = {**facts, "shape": shape, "results": [asdict(result) for result in results]}
        write_records(options.json, record)
    target = TARGET_MS if options.device == "cuda" else float("inf")
    defects = [defect for result in results for defect in result.defects(target)]
    for defect in defects:
        print(f"error: {defect}", file=sys.stderr)
    return 1 if defects else 0


if __name__ == "__main__":
    sys.exit(main())
