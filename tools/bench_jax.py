"""Checks and times the kernels under JAX on a GPU, beside torch's calls and JAX's own scans.

    pip install "jax[cuda12]" && python tools/bench_jax.py [--json results.json]

It needs an NVIDIA GPU, a jaxlib for CUDA, this package with an archive that fits the GPU, and for the comparison torch. Sections
can be chosen by name. Exit status 1: a result is wrong, or memory grew.

    values    states and gradients against JAX's own scan in float64 on the CPU, outside of and under CUDA graphs
    speed     milliseconds of five large shapes, forward and backward: this package under jit, its torch call, associative_scan
              and lax.scan under jit
    first     milliseconds that the first call takes in a new process, import included, beyond what JAX needs to start
    loop      10,000 calls under jit: memory of the GPU and of the process before and after
    disk      a program that another process compiled and kept on disk
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from functools import partial
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
GRAPHS = "--xla_gpu_enable_command_buffer=+CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"
#: Of time-last and channel-last scans: shape, time dimension, dtype.
SHAPES = (
    ((8, 1536, 8192), -1, "bfloat16"),
    ((8, 1536, 8192), -1, "float32"),
    ((8, 8192, 1024), 1, "bfloat16"),
    ((8, 8192, 1024), 1, "float32"),
    ((1, 64, 1 << 20), -1, "float32"),
)
#: Of ours to float64's: by dtype of the arrays.
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}


def values() -> dict[str, Any]:
    """The largest relative error of each case; the same again in a process that records CUDA graphs."""
    errors = _errors()
    script = "import json, sys; sys.path.insert(0, sys.argv[1]); import bench_jax; print(json.dumps(bench_jax._errors()))"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {GRAPHS}"
    done = _python(script, os.path.dirname(os.path.abspath(__file__)), XLA_FLAGS=flags)
    graphs = json.loads(done.splitlines()[-1])
    wrong = [
        name
        for measured in (errors, graphs)
        for name, error in measured.items()
        if not error < TOLERANCE[name.split()[1]]
    ]
    return {"errors": errors, "errors under CUDA graphs": graphs, "wrong": wrong}


def _errors() -> dict[str, float]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    jax.config.update("jax_enable_x64", True)
    from scan_registry.jax import causal_conv1d, linear_scan, rg_lru, selective_scan, ssd_scan

    cpu, gpu = jax.devices("cpu")[0], jax.devices("cuda")[0]
    generator = np.random.default_rng(0)

    def error(function: Callable[..., Any], arrays: list[Any], dtype: str) -> float:
        def loss(*operands: Any) -> Any:
            results = function(*operands)
            return sum((r.astype("float64") ** 2).mean() for r in results), results

        def on(device: Any, operands: list[Any]) -> list[Any]:
            placed = jax.device_put(operands, device)
            places = tuple(range(len(operands)))
            (_, results), grads = jax.jit(jax.value_and_grad(loss, places, has_aux=True))(*placed)
            return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves((results, grads))]

        narrow = [jnp.asarray(a).astype(dtype if a.ndim > 1 else "float32") for a in arrays]
        wide = [a.astype("float64") for a in narrow]
        pairs = zip(on(gpu, narrow), on(cpu, wide), strict=True)
        return max(float(abs(a - b).max() / max(1e-6, abs(b).max())) for a, b in pairs)

    def over(gates: Any, tokens: Any) -> Any:
        """On all GPUs with time cut between them; in float64, which is the reference, at once."""
        options = {"dim": 1, "return_final_state": True}
        if tokens.dtype == "float64":
            return linear_scan(gates, tokens, **options)
        mesh, spec = jax.sharding.Mesh(jax.devices("cuda"), ("t",)), jax.sharding.PartitionSpec
        cut = jax.shard_map(
            partial(linear_scan, axis_name="t", **options),
            mesh=mesh,
            in_specs=(spec(None, "t"), spec(None, "t")),
            out_specs=(spec(None, "t"), spec()),
        )
        return cut(gates, tokens)

    errors = {}
    for dtype in TOLERANCE:
        for dim, shape, gates_shape, reverse, packed in (
            (-1, (3, 40, 4096), (3, 40, 4096), False, None),
            (1, (3, 1000, 96), (3, 1000, 96), True, None),
            (1, (2, 1024, 64), (2, 1024, 64), False, [0, 100, 100, 1024]),
            (-1, (4, 33, 777), (33, 1), False, None),
            (1, (2, 2048, 128), (128,), True, None),
            (-1, (2, 8, 100_000), (1,), False, None),
        ):
            gates = 1 - 0.1 * generator.random(gates_shape)
            tokens = generator.normal(size=shape)
            bounds = None if packed is None else jnp.array(packed, "int32")
            name = f"linear_scan {dtype} {shape} dim={dim} gates={gates_shape} reverse={reverse} packed={packed}"
            errors[name] = error(
                lambda g, x, dim=dim, reverse=reverse, bounds=bounds: linear_scan(
                    *(g, x), dim=dim, reverse=reverse, cu_seqlens=bounds, return_final_state=True
                ),
                [gates.reshape((*(1,) * (3 - gates.ndim), *gates.shape)), tokens],
                dtype,
            )
        arrays = [1 - 0.1 * generator.random((2, 1024, 64)), generator.normal(size=(2, 1024, 64))]
        errors[f"linear_scan {dtype} with time cut between all devices"] = error(
            over, arrays, dtype
        )
        for dim, shape in ((1, (2, 1000, 96)), (-1, (2, 40, 2048))):
            arrays = [generator.normal(size=shape) for _ in range(3)]
            arrays.append(generator.normal(size=shape[3 - dim % 3]))
            name = f"rg_lru {dtype} {shape} dim={dim}"
            errors[name] = error(
                lambda *o, dim=dim: rg_lru(*o, dim=dim, return_final_state=True), arrays, dtype
            )
        for dim in (1, -1):
            shape, projection = (
                ((2, 500, 64), (2, 500, 16)) if dim == 1 else ((2, 64, 500), (2, 16, 500))
            )
            x = generator.normal(size=shape)
            filters = [generator.normal(size=(64, 4)), generator.normal(size=64)]
            errors[f"causal_conv1d {dtype} dim={dim}"] = error(
                lambda *o, dim=dim: causal_conv1d(
                    *o, dim=dim, activation="silu", return_final_state=True
                ),
                [x, *filters],
                dtype,
            )
            steps, A = 0.1 * generator.random(shape), -np.arange(1.0, 17) * np.ones((64, 1))
            projections = [generator.normal(size=projection) for _ in "BC"]
            errors[f"selective_scan {dtype} dim={dim}"] = error(
                lambda *o, dim=dim: selective_scan(
                    *o, dim=dim, delta_softplus=True, return_final_state=True
                ),
                [x, steps, A, *projections, np.ones(64), generator.normal(size=shape)],
                dtype,
            )
        if dtype != "float32":
            heads = [generator.normal(size=(2, 500, 8, 64)), 0.1 * generator.random((2, 500, 8))]
            projections = [generator.normal(size=(2, 500, 2, 64)) for _ in "BC"]
            errors[f"ssd_scan {dtype}"] = error(
                lambda *o: ssd_scan(*o, dt_softplus=True, return_final_state=True),
                [*heads, -np.arange(1.0, 9), *projections, np.ones(8), heads[0]],
                dtype,
            )
    return errors


def speed() -> list[dict[str, Any]]:
    """Rows of milliseconds; ``ratio`` is torch's time by ours, forward."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    from scan_registry.jax import linear_scan

    def associative(gates: Any, tokens: Any, dim: int) -> Any:
        def compose(one: Any, other: Any) -> Any:
            return one[0] * other[0], other[0] * one[1] + other[1]

        return lax.associative_scan(compose, (gates, tokens), axis=dim)[1]

    def stepwise(gates: Any, tokens: Any, dim: int) -> Any:
        def step(state: Any, inputs: Any) -> Any:
            state = inputs[0] * state + inputs[1]
            return state, state

        first = tuple(jnp.moveaxis(array, dim, 0) for array in (gates, tokens))
        return jnp.moveaxis(lax.scan(step, jnp.zeros_like(first[1][0]), first)[1], 0, dim)

    def row_of(shape: tuple[int, ...], dim: int, dtype: str) -> dict[str, Any]:
        keys = jax.random.split(jax.random.key(0), 3)
        gates = (1 - 0.1 * jax.random.uniform(keys[0], shape)).astype(dtype)
        tokens, weights = (jax.random.normal(key, shape).astype(dtype) for key in keys[1:])
        row: dict[str, Any] = {"shape": shape, "dim": dim, "dtype": dtype}
        ways: dict[str, Callable[..., Any]] = {
            "ours": lambda g, x: linear_scan(g, x, dim=dim),
            "associative_scan": lambda g, x: associative(g, x, dim),
        }
        if shape[dim] <= 8192:
            ways["lax.scan"] = lambda g, x: stepwise(g, x, dim)
        for name, scan in ways.items():

            def pulled(g: Any, x: Any, w: Any, scan: Any = scan) -> Any:
                states, pull = jax.vjp(scan, g, x)
                return states, pull(w)

            forward, both = partial(jax.jit(scan), gates, tokens), jax.jit(pulled)
            row[name] = _milliseconds(forward, jax.block_until_ready)
            pull = partial(both, gates, tokens, weights)
            row[f"{name}, with backward"] = _milliseconds(pull, jax.block_until_ready)
        return row

    rows = []
    for shape, dim, dtype in SHAPES:
        row = row_of(shape, dim, dtype) | _torch_row(shape, dim, dtype)
        if "torch" in row:
            row["ratio"] = row["torch"] / row["ours"]
            row["ratio, with backward"] = row["torch, with backward"] / row["ours, with backward"]
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


def _torch_row(shape: tuple[int, ...], dim: int, dtype: str) -> dict[str, float]:
    """What the torch call takes; nothing where torch is not installed."""
    try:
        import torch
    except ImportError:
        return {}
    import scan_registry

    kind = getattr(torch, dtype)
    gates = (1 - 0.1 * torch.rand(shape, device="cuda")).to(kind).requires_grad_()
    tokens = torch.randn(shape, device="cuda").to(kind).requires_grad_()
    weights = torch.randn(shape, device="cuda").to(kind)

    def forward() -> Any:
        with torch.no_grad():
            return scan_registry.linear_scan(gates, tokens, dim=dim)

    def both() -> Any:
        states = scan_registry.linear_scan(gates, tokens, dim=dim)
        return torch.autograd.grad(states, (gates, tokens), weights)

    def wait(_: Any) -> None:
        torch.cuda.synchronize()

    row = {"torch": _milliseconds(forward, wait), "torch, with backward": _milliseconds(both, wait)}
    torch.cuda.empty_cache()
    return row


def _milliseconds(call: Callable[[], Any], wait: Callable[[Any], Any]) -> float:
    """The least mean of five rounds of calls that follow one another on the GPU: as many as take a tenth of a second, 30 at most."""
    wait(call())
    started = time.perf_counter()
    wait(call())
    runs = max(1, min(30, int(0.1 / (time.perf_counter() - started))))
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(runs):
            last = call()
        wait(last)
        best = min(best, (time.perf_counter() - started) / runs)
    return 1e3 * best


def first() -> dict[str, float]:
    """Three processes; the median."""
    script = """
import time
start = time.perf_counter()
import jax, jax.numpy as jnp
gates = jnp.full((8, 512, 4096), 0.9)
tokens = jnp.ones((8, 512, 4096))
jax.jit(lambda g, x: jnp.cumsum(g * x, -1))(gates, tokens).block_until_ready()
ready = time.perf_counter()
from scan_registry.jax import linear_scan
imported = time.perf_counter()
jax.jit(linear_scan)(gates, tokens).block_until_ready()
print(1e3 * (ready - start), 1e3 * (imported - ready), 1e3 * (time.perf_counter() - imported))
"""
    times = sorted([*map(float, _python(script).split())] for _ in range(3))
    start, imported, call = times[1]
    return {"JAX": start, "import": imported, "call": call}


def loop(calls: int = 10_000) -> dict[str, Any]:
    """Bytes of the GPU and of the process, after a hundred calls and after all."""
    import jax
    import jax.numpy as jnp

    from scan_registry.jax import linear_scan

    device = jax.devices("cuda")[0]
    gates, tokens = jnp.full((8, 64, 1024), 0.9), jnp.ones((8, 64, 1024))
    step = jax.jit(lambda g, x: linear_scan(g, x) * 0.5)

    def used() -> tuple[int, int]:
        jax.block_until_ready(tokens)
        with open("/proc/self/statm", encoding="utf-8") as file:
            pages = int(file.read().split()[1])
        return int(device.memory_stats()["bytes_in_use"]), pages * resource.getpagesize()

    for _ in range(100):
        tokens = step(gates, tokens)
    before = used()
    started = time.perf_counter()
    for _ in range(calls):
        tokens = step(gates, tokens)
    jax.block_until_ready(tokens)
    microseconds = 1e6 * (time.perf_counter() - started) / calls
    after = used()
    grown = [a - b for a, b in zip(after, before, strict=True)]
    flat = grown[0] == 0 and grown[1] < 4 << 20
    return {
        "GPU bytes grown": grown[0],
        "process bytes grown": grown[1],
        "us a call": microseconds,
        "flat": flat,
    }


def disk() -> dict[str, Any]:
    """The sums that two processes print, of which the second finds the program on disk."""
    script = """
import sys
import jax, jax.numpy as jnp
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
from scan_registry.jax import linear_scan
print(float(jax.jit(linear_scan)(jnp.full((8, 64, 1024), 0.5), jnp.ones((8, 64, 1024))).sum()))
"""
    with tempfile.TemporaryDirectory() as folder:
        sums = [float(_python(script, folder).split()[-1]) for _ in range(2)]
        kept = len(os.listdir(folder))
    return {"sums": sums, "files": kept, "same": sums[0] == sums[1]}


def _python(script: str, *arguments: str, **variables: str) -> str:
    command = [sys.executable, "-c", script, *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    ).stdout


SECTIONS: dict[str, Callable[[], Any]] = {
    "values": values,
    "speed": speed,
    "first": first,
    "loop": loop,
    "disk": disk,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--json", metavar="FILE", help="write all results into a file")
    args = parser.parse_args()
    if unknown := set(args.sections) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    import jax

    gpu = jax.devices("cuda")[0].device_kind
    results: dict[str, Any] = {"gpu": gpu, "date": date.today().isoformat(), "jax": jax.__version__}
    with suppress(ImportError):
        results["torch"] = importlib.import_module("torch").__version__
    for name in args.sections or SECTIONS:
        results[name] = SECTIONS[name]()
        print(json.dumps({name: results[name]}, indent=1), flush=True)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
    right = not results.get("values", {}).get("wrong")
    flat = results.get("loop", {}).get("flat", True) and results.get("disk", {}).get("same", True)
    return 0 if right and flat else 1


if __name__ == "__main__":
    sys.exit(main())
