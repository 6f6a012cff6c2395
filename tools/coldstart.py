"""Time from a fresh process to the first result, and what each call costs the CPU.

    python tools/coldstart.py [--json FILE] [--repeat N]
    python tools/coldstart.py --networks [--json FILE] [--repeat N]

Needs a GPU. For this project and for every installed baseline, a new process measures

    import        importing the module, torch being imported already
    first call    the first scan of (8, 1536, 2048) float32, to its synchronised result, in a
                  process that has a CUDA context
    second call   the same again

once with every cache folder new and empty ("cold"), and once more with what that process left in
them ("warm"). A module that compiles when it is imported pays in the first column, one that imports
or compiles at its first use in the second. The operating system's own file cache is warm both times.

Then one further process calls all of them interleaved on (1, 8, 128) tensors, with and without
gradients. A round is short enough for the GPU's queue and ends with a synchronisation outside the
measured time, so what is measured is the CPU. The median of all rounds counts; torch.mul stands
beside them for scale.

``--networks`` measures an LSTM of 768 units on (16, 1024) in bfloat16 by ``scan_registry.rnn``, ``scan_registry.nn.LSTM`` and
``torch.nn.LSTM``, and the first backward pass between both calls. torch has multiplied, added, concatenated and differentiated
something before, since it loads kernels of its own for that. This project compiles nothing: SCAN_REGISTRY_REQUIRE is ``aot``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import site
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from records import write_records
from rich.console import Console
from rich.table import Table

from scan_registry.ops.linear_scan_baselines import BASELINES, OURS, Baseline

FIRST_SHAPE = (8, 1536, 2048)
#: Batch, steps, units.
NETWORK_SHAPE = {"cuda": (16, 1024, 768), "cpu": (2, 16, 64)}
#: By name: the module that is imported.
NETWORKS = {
    "scan_registry.rnn": "scan_registry",
    "scan_registry.nn.LSTM": "scan_registry.nn",
    "torch.nn.LSTM": "torch.nn",
}
SMALL_SHAPE = (1, 8, 128)
ROUNDS, CALLS = 60, 300  # of calls that fit the driver's queue (1024), so that none ever waits
SCALE = "torch.mul"

#: Run in a fresh process with a baseline's module and function, a device and a shape.
START = """
import importlib, json, sys, time
import torch

module_name, function, device, *shape = sys.argv[1:]
synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None

def milliseconds(action):
    started = time.perf_counter()
    result = action()
    synchronize()
    return result, 1e3 * (time.perf_counter() - started)

started = time.perf_counter()
module = importlib.import_module(module_name)
imported = 1e3 * (time.perf_counter() - started)

torch.zeros(1, device=device)
gates = torch.rand([int(size) for size in shape], device=device)
tokens = torch.rand_like(gates)
synchronize()
states, first = milliseconds(lambda: getattr(module, function)(gates, tokens))
states, second = milliseconds(lambda: getattr(module, function)(gates, tokens))

assert torch.isfinite(states).all()
print(json.dumps({"import_ms": imported, "first_ms": first, "second_ms": second}))
"""

#: Run in a fresh process with a network's module and function, a device and a shape.
NETWORK = """
import importlib, json, sys, time
import torch

home, function, device, *shape = sys.argv[1:]
batch, steps, units = map(int, shape)
synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
where = {"device": device, "dtype": torch.bfloat16}
measured = {}

def timed(name, action):
    started = time.perf_counter()
    result = action()
    synchronize()
    measured[name] = 1e3 * (time.perf_counter() - started)
    return result

one, weights = torch.ones(1, requires_grad=True, **where), torch.ones(4 * units, units, **where)
(one * 2).sum().backward()
x = torch.randn(batch, steps, units, **where)
torch.nn.functional.linear(x, torch.cat([weights[: 2 * units], weights[2 * units :]]) + weights)
synchronize()
imported = timed("import_ms", lambda: getattr(importlib.import_module(home), function))
if function == "rnn":
    inputs = [torch.randn(batch, steps, 4, 1, units, **where),
              torch.randn(4, 1, units, units, **where) / units**0.5, torch.zeros(4, 1, units, **where)]
    for tensor in inputs:
        tensor.requires_grad_()
    call = lambda: imported(*inputs)[0][0]
else:
    module = imported(units, units, batch_first=True, **where)
    call = lambda: module(x)[0]
synchronize()
total = timed("first_ms", call).sum()
synchronize()
timed("backward_ms", total.backward)
assert torch.isfinite(timed("second_ms", call)).all()
print(json.dumps(measured))
"""

#: Run in a fresh process with a device, a number of rounds and of calls, a shape, and a JSON list
#: of name, module and function.
CALLS_SCRIPT = """
import gc, importlib, json, sys, time
import torch

device, rounds, calls, shape, baselines = sys.argv[1:]
synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
scans = {n: getattr(importlib.import_module(m), f) for n, m, f in json.loads(baselines)}
plain = [torch.rand(json.loads(shape), device=device) for _ in range(2)]
tracked = [tensor.clone().requires_grad_() for tensor in plain]
microseconds = {(name, kind): [] for name in scans for kind in ("plain", "tracked")}

def one_round(scan, gates, tokens):
    started = time.perf_counter()
    for _ in range(int(calls)):
        scan(gates, tokens)
    elapsed = time.perf_counter() - started
    synchronize()
    return 1e6 * elapsed / int(calls)

gc.disable()
for number in range(-3, int(rounds)):
    for (name, kind), measured in microseconds.items():
        inputs = tracked if kind == "tracked" else plain
        result = one_round(scans[name], *inputs)
        if number >= 0:  # the rounds before that warm up
            measured.append(result)
    gc.collect()
print(json.dumps([[name, kind, values] for (name, kind), values in microseconds.items()]))
"""


class MeasurementError(RuntimeError):
    """A measuring process that failed; the message holds what it said."""


@dataclass(frozen=True)
class Start:
    """One fresh process's times, in milliseconds."""

    import_ms: float
    first_ms: float
    second_ms: float
    backward_ms: float | None = None


@dataclass(frozen=True)
class Result:
    """What one implementation costs.

    version     None where it is not installed
    failure     why it could not be measured, where it is installed but does not start
    cold, warm  a ``Start`` per repetition
    plain_us, tracked_us
                microseconds per call of every round, without and with gradients
    """

    name: str
    version: str | None
    failure: str | None = None
    cold: tuple[Start, ...] = ()
    warm: tuple[Start, ...] = ()
    plain_us: tuple[float, ...] = ()
    tracked_us: tuple[float, ...] = ()


def empty_caches(folder: Path) -> dict[str, str]:
    """This process's environment with every cache folder that anything here uses under ``folder``."""
    environment = dict(os.environ)
    for name in (
        "CUDA_CACHE_PATH",
        "HOME",
        "SCAN_REGISTRY_BUILD_CACHE",
        "TORCHINDUCTOR_CACHE_DIR",
        "TORCH_EXTENSIONS_DIR",
        "TRITON_CACHE_DIR",
        "TRITON_HOME",
        "XDG_CACHE_HOME",
        "XDG_CONFIG_HOME",
        "XDG_DATA_HOME",
    ):
        place = folder / name.lower()
        place.mkdir(exist_ok=True)
        environment[name] = str(place)
    # Packages that are installed for the user are found through HOME unless this says where.
    environment.setdefault("PYTHONUSERBASE", site.getuserbase())
    return environment


def fresh_process(script: str, arguments: Sequence[object], environment: Mapping[str, str]) -> Any:
    """What ``script`` prints on its last line, as JSON; ``MeasurementError`` if it fails."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    # A folder of its own, so that neither tools/ nor the sources are on the process's path.
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(
            command,
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=False,
        )
    if result.returncode:
        raise MeasurementError(
            f"a measurement of {arguments[0]} failed with exit status {result.returncode}\n"
            f"{result.stdout}{result.stderr}"
        )
    return json.loads(result.stdout.splitlines()[-1])


def starts(
    script: str, arguments: Sequence[object], repeat: int, **variables: str
) -> dict[str, tuple[Start, ...]]:
    """Cold and warm starts: ``repeat`` pairs of processes, each pair with caches of its own."""
    cold: list[Start] = []
    warm: list[Start] = []
    for _ in range(repeat):
        with tempfile.TemporaryDirectory(prefix="coldstart-") as folder:
            environment = empty_caches(Path(folder)) | variables
            for processes in (cold, warm):
                processes.append(Start(**fresh_process(script, arguments, environment)))
    return {"cold": tuple(cold), "warm": tuple(warm)}


def measure_start(baseline: Baseline, device: str, repeat: int) -> Result:
    arguments = [baseline.module, baseline.function, device, *FIRST_SHAPE]
    return Result(baseline.name, baseline.version, **starts(START, arguments, repeat))


def measure_networks(device: str, repeat: int) -> list[Result]:
    results = []
    for name, module in NETWORKS.items():
        version = importlib.metadata.version(module.partition(".")[0])
        arguments = [module, name.rpartition(".")[2], device, *NETWORK_SHAPE[device]]
        measured = starts(NETWORK, arguments, repeat, SCAN_REGISTRY_REQUIRE="aot")
        results.append(Result(name, version, **measured))
    return results


def measure_calls(
    baselines: Sequence[Baseline], device: str, rounds: int = ROUNDS
) -> dict[tuple[str, str], tuple[float, ...]]:
    """Microseconds per call of each round, by name and by ``plain`` or ``tracked``."""
    called = [(baseline.name, baseline.module, baseline.function) for baseline in baselines]
    called.append((SCALE, "torch", "mul"))
    arguments = [device, rounds, CALLS, list(SMALL_SHAPE), json.dumps(called)]
    measured = fresh_process(CALLS_SCRIPT, arguments, os.environ)
    return {(name, kind): tuple(values) for name, kind, values in measured}


def measure(device: str, repeat: int) -> list[Result]:
    """Everything, this project first. What is not installed, or does not start, is there by name."""
    results = []
    for baseline in (OURS, *BASELINES):
        if baseline.version is None:
            results.append(Result(baseline.name, None))
            continue
        print(f"starting {baseline.name}: {repeat} x cold and warm", file=sys.stderr, flush=True)
        try:
            results.append(measure_start(baseline, device, repeat))
        except MeasurementError as error:
            # A baseline that does not build here does not end the run; the exit status tells of it.
            results.append(Result(baseline.name, baseline.version, failure=str(error)))
    results.append(Result(SCALE, ""))
    started = [p for p, r in zip((OURS, *BASELINES), results, strict=False) if r.cold]
    print("calling all of them interleaved", file=sys.stderr, flush=True)
    calls = measure_calls(started, device)
    return [
        replace(
            result,
            plain_us=calls.get((result.name, "plain"), ()),
            tracked_us=calls.get((result.name, "tracked"), ()),
        )
        for result in results
    ]


def _median(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):,.{digits}f}" if values else "-"


def _milliseconds(starts: Sequence[Start], column: str) -> str:
    return _median([getattr(start, column) for start in starts], 2)


def table(results: Sequence[Result]) -> Table:
    """Medians; what is not installed or does not start says so."""
    view = Table(title="Cold start and cost per call (medians)")
    view.add_column("", no_wrap=True)
    columns = {
        "import, ms": "import_ms",
        "first call, ms": "first_ms",
        "second call, ms": "second_ms",
    }
    if any(start.backward_ms is not None for result in results for start in result.cold):
        columns["first backward, ms"] = "backward_ms"
    for heading in columns:
        view.add_column(f"{heading}\ncold / warm", justify="right")
    view.add_column("CPU per call, µs\nplain / with gradients", justify="right")
    for result in results:
        cells = [
            f"{_milliseconds(result.cold, column)} / {_milliseconds(result.warm, column)}"
            for column in columns.values()
        ]
        if not result.cold:
            why = "does not start" if result.failure else "not installed"
            cells = ["" if result.name == SCALE else why, *[""] * (len(columns) - 1)]
        cost = f"{_median(result.plain_us, 2)} / {_median(result.tracked_us, 2)}"
        cells.append(cost if result.plain_us else "")
        view.add_row(f"{result.name} {result.version or ''}".strip(), *cells)
    return view


def circumstances() -> dict[str, Any]:
    """The GPU, versions and date, without which the numbers mean nothing."""
    import torch

    from scan_registry.hardware import driver

    return {
        "gpu": torch.cuda.get_device_name(0),
        "driver": "CUDA {}.{}".format(*driver.version()),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "python": sys.version.split()[0],
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number to FILE")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="cold starts (3)")
    parser.add_argument("--networks", action="store_true", help="of an LSTM, in place of scans")
    options = parser.parse_args()
    if options.repeat < 1:
        parser.error("--repeat must be at least 1")
    import torch

    if not torch.cuda.is_available():
        print("error: coldstart measures on a GPU, and torch finds none here", file=sys.stderr)
        return 2
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    facts = circumstances()
    results = (measure_networks if options.networks else measure)("cuda", options.repeat)
    console.print(table(results))
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()), highlight=False)
    if options.json:
        record = {**facts, "shape": NETWORK_SHAPE["cuda"] if options.networks else FIRST_SHAPE}
        record["results"] = [asdict(result) for result in results]
        write_records(options.json, record)
    failed = [result for result in results if result.failure]
    for result in failed:
        print(f"error: {result.name}: {result.failure}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
