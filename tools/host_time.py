"""What a call of a scan or a network costs the CPU: ``python tools/host_time.py [scan] [rnn] [profile]``.

It needs a C compiler and no GPU. Tensors are in the CPU's memory, take the code path of tensors on a GPU, and the driver is a
library whose functions return 0. So torch's own operators run on the CPU, and the driver's time for a launch, some 2 µs, is left
out. Times are CPU times of the process, and the least of several rounds.
"""

from __future__ import annotations

import cProfile
import ctypes
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from scan_registry import linear_scan, nn
from scan_registry.hardware import _launcher
from scan_registry.kernels.linear_scan.spec import parameters
from scan_registry.nn import recurrent, torch_cells
from scan_registry.ops import (
    fast_calls,
    fast_path,
    plans,
    rnn_cpu,
    rnn_derivatives,
    rnn_layer,
    rnn_plans,
)

ROUNDS, CALLS = 20, 100


def bind_nothing() -> Any:
    """Bind a driver whose functions do nothing. The caller has to keep the returned library."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "nothing.c", Path(folder) / "nothing.so"
        source.write_text("int nothing(void) { return 0; }\n", encoding="utf-8")
        command = ["cc", "-O1", "-shared", "-fPIC", str(source), "-o", str(library)]
        subprocess.run(command, check=True)
        found = ctypes.CDLL(str(library))
    address = ctypes.cast(found.nothing, ctypes.c_void_p).value
    assert address is not None
    _launcher.bind(*[address] * 5)
    return found


def launch_of(pointers: int, scalars: tuple[int, ...]) -> _launcher.Launch:
    return _launcher.Launch(0, 0, (1, 1, 1), (32, 1, 1), 0, pointers, scalars, 0, -1, 0)


def run_of(launch: _launcher.Launch, names: list[str]) -> Callable[[Mapping[str, Any]], None]:
    """A function that starts the launch as ``runtime.loader.Plan.run`` does."""
    start = launch.run

    def run(tensors: Mapping[str, Any]) -> None:
        find = tensors.get
        start(0, *[None if (t := find(name)) is None else t.data_ptr() for name in names])

    return run


def pretend_kernels() -> None:
    """Have scans and recurrent networks of CPU tensors take the code path of tensors on a GPU."""

    def scan_launch(problem: Any) -> _launcher.Launch:
        scalars = problem.scalars()
        needed = parameters(problem.direction)
        numbers = tuple(scalars[p.name] for p in needed if p.kind == "i64")
        return launch_of(len(plans.POINTERS[problem.direction]), numbers)

    def runner(problem: Any, *_: Any) -> Any:
        return run_of(scan_launch(problem), plans.POINTERS[problem.direction])

    def prepare(_: Any, family: Any, problem: Any, *others: Any, routed: bool) -> Any:
        own = SimpleNamespace(route=None)
        return SimpleNamespace(launch=scan_launch(problem), workspace=0, refuse=None, decision=own)

    def prepared(posed: Any, device: Any) -> Any:
        problem, _ = posed[0]
        kernel = next(
            k
            for k in rnn_plans.family("rnn").kernels
            if k.language == "cuda" and k.name.endswith(f"sequence_{problem.direction}")
        )
        return problem, run_of(launch_of(len(kernel.pointers), (0,) * 8), [*kernel.pointers])

    everything: Any = SimpleNamespace(plans=plans, fast_path=fast_path, rnn=rnn_plans)
    everything.plans.runner = runner
    everything.fast_path.prepare = prepare
    everything.fast_path.on_gpu = lambda tensor: True
    everything.fast_path._empty = torch._C._dynamo.guards._empty_strided_cpu
    everything.rnn._prepared = prepared
    everything.rnn._in_torch = lambda inputs, backend: False
    everything.layer, everything.cells = rnn_layer, torch_cells
    everything.cells.takes = lambda *given: False  # the CPU's own
    everything.cpu = rnn_cpu
    everything.cpu.takes = lambda *given: False
    everything.layer.on_gpu = lambda tensor: True


def microseconds(call: Callable[[], object]) -> float:
    """The least of the rounds' means."""
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.process_time()
        for _ in range(CALLS):
            call()
        best = min(best, (time.process_time() - begin) / CALLS)
    return 1e6 * best


def there_and_back(given: dict[str, Any]) -> None:
    found = linear_scan(**given)
    outputs = found if isinstance(found, tuple) else (found,)
    torch.autograd.grad(outputs, given["tokens"], [out.detach() for out in outputs])


def scans() -> None:
    """Scans of tensors (2, 64, 128) with ``dim=1``: without the fast path ("long"), and with it ("short")."""
    module = sys.modules["scan_registry.ops.linear_scan"]
    short, bounds = fast_path.fast_scan, torch.tensor([0, 20, 64])
    x = torch.rand(2, 64, 128)
    state, packed = torch.rand(2, 128), torch.rand(2, 2, 128)
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "reverse": {"reverse": True},
        "initial state": {"initial_state": state},
        "final state": {"return_final_state": True},
        "both states": {"initial_state": state, "return_final_state": True},
        "both, reverse": {"initial_state": state, "return_final_state": True, "reverse": True},
        "packed": {"cu_seqlens": bounds},
        "packed, initial": {"cu_seqlens": bounds, "initial_state": packed},
        "packed, both": {"cu_seqlens": bounds, "initial_state": packed, "return_final_state": True},
        "gates per channel": {"gates": torch.rand(128)},
        "wider gates": {"tokens": x.bfloat16()},
    }
    print(
        f"{'µs a call':20}{'long':>8}{'short':>8}{'recorded: long':>16}{'short':>8}{'with backward: long':>21}{'short':>8}"
    )
    for name, options in cases.items():
        given = {"gates": x, "tokens": x, "dim": 1, **options}
        tracked = {
            key: each.clone().requires_grad_()
            if isinstance(each, torch.Tensor) and each.is_floating_point()
            else each
            for key, each in given.items()
        }

        calls = (
            partial(linear_scan, **given),
            partial(linear_scan, **tracked),
            partial(there_and_back, tracked),
        )
        times = []
        for call in calls:
            for road in ((lambda *_: None), short):
                module.fast_scan = road  # type: ignore[attr-defined]
                times.append(microseconds(call))
        print("{:20}{:8.1f}{:8.1f}{:16.1f}{:8.1f}{:21.1f}{:8.1f}".format(name, *times), flush=True)


def networks(profiled: bool) -> None:
    """Modules on 4 sequences of 8 steps and 32 units, forward and backward: layers composed of operators ("composed") beside
    layers that are one function to autograd ("short")."""
    options: dict[str, dict[str, Any]] = {
        "": {},
        "batch first": {"batch_first": True},
        "2 layers": {"num_layers": 2},
        "both ways": {"bidirectional": True},
        "resets": {},
        "resets, batch first": {"batch_first": True},
    }
    titles = "forward", "recorded", "and backward", "operators forward", "and backward"
    print(f"{'µs a call: composed, short':28}" + "".join(f"{title:>20}" for title in titles))
    for kind in ("LSTM", "GRU", "RNN"):
        for name, how in options.items():
            module = getattr(nn, kind)(32, 32, **how)
            shape = (4, 8, 32) if how.get("batch_first") else (8, 4, 32)
            x, leaves = torch.randn(shape), [*module.parameters()]
            run = partial(module, reset=torch.rand(shape[:2]) < 0.1) if "resets" in name else module
            calls = (
                torch.no_grad()(partial(run, x)),
                partial(run, x),
                partial(trained, run, x, leaves),
            )
            found: list[list[str]] = []
            for short in (False, True):
                recurrent.on_gpu = lambda tensor, short=short: short  # type: ignore[assignment,misc]
                times = [f"{microseconds(call):.0f}" for call in calls]
                found.append([*times, *map(str, operators(run, x, leaves))])
                if profiled:
                    profile(calls[-1])
            both = [" ".join(f"{each:>6}" for each in pair) for pair in zip(*found, strict=True)]
            print(f"{f'{kind} {name}':28}" + "".join(f"{pair:>20}" for pair in both), flush=True)


def trained(module: Any, x: Any, leaves: Any) -> Any:
    out = module(x)[0]
    return torch.autograd.grad(out, leaves, out.detach())


def operators(module: Any, x: Any, leaves: Any) -> list[int]:
    """How many of torch's operators a forward pass calls, and how many a forward and backward pass. The profiler counts
    them. Calls take the path that they take without a profiler."""
    watchers = {rnn_derivatives: "unobserved", rnn_layer: "unobserved", fast_calls: "undisturbed"}
    known = {home: getattr(home, name) for home, name in watchers.items()}
    for home, name in watchers.items():
        setattr(home, name, lambda *tensors: True)
    found = []
    for call in (partial(module, x), partial(trained, module, x, leaves)):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            call()
        found.append(sum(each.name.startswith("aten::") for each in seen.events()))
    for home, name in watchers.items():
        setattr(home, name, known[home])
    return found


def profile(call: Callable[[], object]) -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(CALLS):
        call()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> None:
    chosen = sys.argv[1:] or ["scan", "rnn"]
    torch.set_num_threads(1)
    library = bind_nothing()
    pretend_kernels()
    if "scan" in chosen:
        scans()
    if "rnn" in chosen:
        networks("profile" in chosen)
    del library


if __name__ == "__main__":
    main()
