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
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from records import write_records

from scan_registry.kernels.linear_scan.op.baselines import BASELINES, OURS, Baseline

#: Of one implementation: its name, its version (None: not installed), why it does not start (``failure``), runs that are
#: ``cold`` and ``warm``, and microseconds of each round of calls without (``plain_us``) and with gradients (``tracked_us``).
Result = dict[str, Any]

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


def empty_caches(folder: Path) -> dict[str, str]:
    """This process's environment with every cache folder that anything here uses under ``folder``."""
    environment = dict(os.environ)
    for name in (
        *("CUDA_CACHE_PATH", "HOME", "SCAN_REGISTRY_BUILD_CACHE", "TORCHINDUCTOR_CACHE_DIR"),
        *("TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR", "TRITON_HOME"),
        *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"),
    ):
        place = folder / name.lower()
        place.mkdir(exist_ok=True)
        environment[name] = str(place)
    # Packages that are installed for the user are found through HOME unless this says where.
    environment.setdefault("PYTHONUSERBASE", site.getuserbase())
    return environment


def fresh_process(script: str, arguments: Sequence[object], environment: Mapping[str, str]) -> Any:
    """What ``script`` prints on its last line, as JSON; ``MeasurementError`` if it fails."""
    # A folder of its own, so that neither tools/ nor the sources are on the process's path.
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(
            [sys.executable, "-c", script, *map(str, arguments)],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=False,
        )
    if result.returncode:
        raise MeasurementError(f"exit status {result.returncode}\n{result.stdout}{result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])


def starts(
    script: str, arguments: Sequence[object], repeat: int, **variables: str
) -> dict[str, list[dict[str, float]]]:
    """Cold and warm starts, in ms: ``repeat`` pairs of processes, each pair with caches of its own."""
    runs: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for _ in range(repeat):
        with tempfile.TemporaryDirectory(prefix="coldstart-") as folder:
            environment = empty_caches(Path(folder)) | variables
            for processes in runs.values():
                processes.append(fresh_process(script, arguments, environment))
    return runs


def measure_networks(device: str, repeat: int) -> list[Result]:
    results = []
    for name, module in NETWORKS.items():
        version = importlib.metadata.version(module.partition(".")[0])
        arguments = [module, name.rpartition(".")[2], device, *NETWORK_SHAPE[device]]
        runs = starts(NETWORK, arguments, repeat, SCAN_REGISTRY_REQUIRE="aot")
        results.append({"name": name, "version": version, **runs})
    return results


def measure_calls(baselines: Sequence[Baseline], device: str) -> dict[str, dict[str, list[float]]]:
    """Microseconds per call of each round, by name, without gradients and with them."""
    called = [(baseline.name, baseline.module, baseline.function) for baseline in baselines]
    called.append((SCALE, "torch", "mul"))
    arguments = [device, ROUNDS, CALLS, list(SMALL_SHAPE), json.dumps(called)]
    measured: dict[str, dict[str, list[float]]] = {}
    for name, kind, values in fresh_process(CALLS_SCRIPT, arguments, os.environ):
        measured.setdefault(name, {})[f"{kind}_us"] = values
    return measured


def measure_scans(device: str, repeat: int) -> list[Result]:
    """This project first. A baseline that is not installed, or does not start here, does not end the run."""
    results: list[Result] = []
    started = []
    for baseline in (OURS, *BASELINES):
        result: Result = {"name": baseline.name, "version": baseline.version}
        results.append(result)
        if baseline.version is None:
            continue
        print(f"starting {baseline.name}: {repeat} x cold and warm", file=sys.stderr, flush=True)
        arguments = [baseline.module, baseline.function, device, *FIRST_SHAPE]
        try:
            result |= starts(START, arguments, repeat)
            started.append(baseline)
        except MeasurementError as error:
            result["failure"] = str(error)
    results.append({"name": SCALE, "version": ""})
    print("calling all of them interleaved", file=sys.stderr, flush=True)
    calls = measure_calls(started, device)
    return [result | calls.get(result["name"], {}) for result in results]


def summary(result: Result) -> str:
    """A line: medians of what was measured."""
    parts = []
    for column in ("import_ms", "first_ms", "second_ms", "backward_ms"):
        states = [
            [run[column] for run in result.get(state, ()) if column in run]
            for state in ("cold", "warm")
        ]
        if all(states):
            times = " / ".join(f"{statistics.median(runs):,.2f}" for runs in states)
            parts.append(f"{column.removesuffix('_ms')} {times} ms cold / warm")
    if "plain_us" in result:
        times = " / ".join(
            f"{statistics.median(result[key]):.2f}" for key in ("plain_us", "tracked_us")
        )
        parts.append(f"CPU per call {times} µs plain / with gradients")
    why = "does not start" if "failure" in result else "not installed"
    return f"{result['name']} {result['version'] or ''}: {', '.join(parts) or why}"


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
    facts = circumstances()
    results = (measure_networks if options.networks else measure_scans)("cuda", options.repeat)
    print("\n".join(map(summary, results)))
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    if options.json:
        shape = NETWORK_SHAPE["cuda"] if options.networks else FIRST_SHAPE
        write_records(options.json, {**facts, "shape": shape, "results": results})
    failed = [result for result in results if "failure" in result]
    for result in failed:
        print(f"error: {result['name']}: {result['failure']}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
