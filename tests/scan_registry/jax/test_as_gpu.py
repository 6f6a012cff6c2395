"""Programs as JAX compiles them for a GPU, without one.

The stub driver plays the GPU, selection chooses from the archives that are installed, and C code for the CPU or torch runs in the
place of kernels, on the pointers and scalars that they would get: ``tests/support/jax_as_gpu.py``. One process runs all families.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from forked import captured

pytest.importorskip("jax")
SUPPORT = Path(__file__).parents[2] / "support"
PRELUDE = f"""
import json, sys
sys.path.insert(0, {str(SUPPORT)!r})
"""
SCRIPT = """
from jax_as_gpu import jax, launched
from jaxing import check, drawn
import scan_registry, torch
import scan_registry.jax
from scan_registry.jax import linear_scan
kernels_of = {}

# --- linear_scan
kernels = []
for gates, shape, dim, reverse, bounds in (
    ((2, 64, 96), (2, 64, 96), 1, True, [0, 20, 20, 64]),
    ((64, 1), (2, 64, 96), -1, True, [0, 96]),
    ((1, 64, 1), (2, 64, 96), 1, False, None),  # written out for every channel
    ((2, 1, 4, 1, 1), (2, 3, 4, 3, 40), -1, False, None),  # dimensions that do not fold
):
    of_state = list(shape)
    of_state[dim % len(shape):dim % len(shape) + 1] = [] if bounds is None else [len(bounds) - 1]
    operands = [drawn(*s, seed=i, scale=0.5, dtype="float32") for i, s in enumerate((gates, shape, of_state))]
    how = dict(dim=dim, reverse=reverse, return_final_state=True)
    packed, of_torch = (None if bounds is None else of(bounds) for of in (jax.numpy.array, torch.tensor))
    check(lambda *o: linear_scan(*o, **how, cu_seqlens=packed),
          lambda *o: scan_registry.linear_scan(*o, **how, cu_seqlens=of_torch), operands, 1e-5)
    kernels += [call["gpu"].split(":")[0] for call in launched]
    launched.clear()
linear_scan(*[drawn(1, 1 << 18, dtype="bfloat16")] * 2)
last = launched.pop()
kernels_of["linear_scan"] = kernels

# --- gated_scan
kernels = []
for dim, bounds in ((1, [0, 20, 20, 64]), (-1, None)):
    shape, of_state = ((2, 64, 48), (2, 3, 48)) if dim == 1 else ((2, 48, 64), (2, 48))
    operands = [drawn(*s, seed=i, dtype="float32") for i, s in enumerate([shape] * 3 + [(48,), of_state])]
    how = dict(dim=dim, return_final_state=True)
    packed, of_torch = (None if bounds is None else of(bounds) for of in (jax.numpy.array, torch.tensor))
    check(lambda *o: scan_registry.jax.rg_lru(*o[:4], initial_state=o[4], **how, cu_seqlens=packed),
          lambda *o: scan_registry.rg_lru(*o[:4], initial_state=o[4], **how, cu_seqlens=of_torch), operands, 3e-5)
    kernels += [call["gpu"].split(":")[0] for call in launched]
    launched.clear()
kernels_of["gated_scan"] = kernels

# --- causal_conv1d
kernels = []
for dim, bounds in ((1, [0, 20, 20, 64]), (-1, None)):
    shape, rows = ((1, 64, 48), 3) if dim == 1 else ((2, 48, 64), 2)
    shapes = shape, (48, 4), (48,), (rows, 48, 3)
    operands = [drawn(*s, seed=i, dtype="float32") for i, s in enumerate(shapes)]
    packed, of_torch = (None if bounds is None else of(bounds) for of in (jax.numpy.array, torch.tensor))
    how = dict(activation="silu", return_final_state=True)
    turned = (lambda x: x.mT) if dim == 1 else (lambda x: x)
    def torch_call(x, w, b, state):
        y, final = scan_registry.causal_conv1d(turned(x), w, b, initial_state=state, cu_seqlens=of_torch, **how)
        return turned(y), final
    check(lambda x, w, b, s: scan_registry.jax.causal_conv1d(
              x, w, b, initial_state=s, cu_seqlens=packed, dim=dim, **how), torch_call, operands, 1e-5)
    kernels += [call["gpu"].split(":")[0] for call in launched]
    launched.clear()
kernels_of["causal_conv1d"] = kernels

# --- selective_scan
kernels = []
for dim, groups, states, time in ((1, 1, 4, 64), (-1, 2, 20, 1024)):  # in one part; in several, with carries
    sequence = (2, time, 32) if dim == 1 else (2, 32, time)
    projection = (2, time, groups, states) if dim == 1 else (2, groups, states, time)
    shapes = sequence, sequence, (32, states), projection, projection, (32,), sequence, (32,), (2, 32, states)
    operands = [drawn(*s, seed=i, scale=0.5, dtype="float32") for i, s in enumerate(shapes)]
    operands[2] = -jax.numpy.exp(operands[2])
    def torch_call(u, delta, A, B, C, D, z, bias, state):
        if dim == 1:
            u, delta, z = u.mT, delta.mT, z.mT
            B, C = B.movedim(1, -1), C.movedim(1, -1)
        out, final = scan_registry.selective_scan(
            u, delta, A, B, C, D, z, bias, True, state, return_final_state=True)
        return out.mT if dim == 1 else out, final
    check(lambda *o: scan_registry.jax.selective_scan(
              *o[:-1], True, o[-1], dim=dim, return_final_state=True), torch_call, operands, 1e-4)
    kernels += [call["gpu"].split(":")[0] for call in launched]
    launched.clear()
kernels_of["selective_scan"] = kernels

# --- ssd_scan
kernels = []
for D, gated in (((4,), True), ((4, 16), False)):
    projection = (2, 100, 2, 32)
    shapes = (2, 100, 4, 16), (2, 100, 4), (4,), projection, projection, D, (2, 100, 4, 16), (4,), (2, 4, 16, 32)
    # Numbers of bfloat16, so that torch computes with the same ones.
    operands = [drawn(*s, seed=i, scale=0.5, dtype="bfloat16").astype("float32") for i, s in enumerate(shapes)]
    operands[2] = -jax.numpy.exp(operands[2]).astype("bfloat16").astype("float32")
    if not gated:
        del operands[6]
    def call(function, narrow, wide, x, dt, A, B, C, D, *others):
        *gate, bias, state = others
        gate = narrow(gate[0]) if gate else None
        out, final = function(narrow(x), dt, A, narrow(B), narrow(C), D, gate, bias, True, (0.0, 1.0), state,
                              return_final_state=True)
        return wide(out), final
    same = lambda x: x
    check(lambda *o: call(scan_registry.jax.ssd_scan, lambda x: x.astype("bfloat16"),
                          lambda x: x.astype("float32"), *o),
          lambda *o: call(scan_registry.ssd_scan, same, same, *o), operands, 4e-2)
    kernels += [call["gpu"].split(":")[0] for call in launched]
    launched.clear()
kernels_of["ssd_scan"] = kernels

traced = jax.jit(linear_scan).trace(*[drawn(2, 8, 64, dtype="float32")] * 2)
text = traced.lower(lowering_platforms=("cuda",)).as_text()
print(json.dumps([kernels_of, last, text]))
"""


BOTH = ["time_last_forward", "time_last_backward"]
COLUMNS = ["channel_last_forward", "channel_last_backward"]
#: In the order of the calls.
KERNELS = {
    "linear_scan": [*COLUMNS, *BOTH, "time_last_reduction", *COLUMNS, "channel_last_reduction", *BOTH],
    "gated_scan": [*COLUMNS, *BOTH],
    "causal_conv1d": [*COLUMNS, *BOTH],
    "selective_scan": ["forward", "backward", "forward", "adjoint", "backward"],
}  # fmt: skip


def test_what_is_launched_computes_the_operator(
    stub_module: tuple[Any, Path], tmp_path: Path
) -> None:
    """Results and gradients are compared with torch's in the process. A call names its binary by the digest, so that another
    process can run the program; and the workspace is one of its buffers."""
    module, library = stub_module
    stub = module.Stub(library, tmp_path)
    kernels, call, text = json.loads(stub.gpu().run(PRELUDE + SCRIPT).stdout)
    of_dual_scan = kernels.pop(
        "ssd_scan"
    )  # the first two of a backward pass do not depend on each other
    assert kernels == {
        family: [f"{family}.{n}" for n in names] for family, names in KERNELS.items()
    }
    names = ("forward", "states", "adjoint", "backward")
    assert {*of_dual_scan} == {f"ssd_scan.{name}" for name in names}
    assert call["workspace"] > 0
    assert call["grid"][0] > 1
    assert len(call["sha256"]) == 64
    assert text.count("custom_call @scan_registry") == 1
    assert "time_last_forward:cuda:dtype=float32" in text


def test_a_gpu_that_no_kernel_fits(stub_driver: Any) -> None:
    """JAX's own operators stand in, unless that is not allowed."""
    script = """
import warnings
from jaxing import drawn, jax
import scan_registry
from scan_registry.jax import linear_scan
operands = [drawn(2, 8, 64, dtype="float32")] * 2
def lowered():
    traced = jax.jit(lambda *o: linear_scan(*o)).trace(*operands)
    return traced.lower(lowering_platforms=("cuda",)).as_text()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    text = lowered()
try:
    with scan_registry.require("jit"):
        lowered()
    refused = None
except scan_registry.NoKernelError as error:
    refused = str(error)
print(json.dumps([text, [str(w.message) for w in caught], refused]))
"""
    stub_driver.gpu((7, 0))
    text, told, refused = json.loads(stub_driver.run(PRELUDE + script, start=captured).stdout)
    assert "custom_call @scan_registry" not in text
    assert [words for words in told if "operators of JAX stand in" in words]
    assert "time_last_forward" in refused


def test_kernels_of_a_sequence_over_devices(stub_driver: Any) -> None:
    """Values and gradients of a sequence whose time is cut between four devices run in kernels, the summaries too."""
    script = """
import re
from functools import partial
from jaxing import drawn, jax
import scan_registry.jax as ours

P = jax.sharding.PartitionSpec
rows = lambda n: (drawn(2, 32, 4 * n, dtype="float32"), P(None, None, "t"))
steps = lambda *shape: (drawn(2, 1024, *shape, dtype="float32").astype("bfloat16"), P(None, "t"))
alike = lambda *shape: (drawn(*shape, dtype="float32"), P())
CALLS = {
    "linear_scan": (rows(4096), rows(4096)),
    "rg_lru": (rows(64), rows(64), rows(64), alike(32)),
    "selective_scan": (rows(64), rows(64), alike(32, 4), *[(drawn(2, 4, 256, dtype="float32"), P(None, None, "t"))] * 2),
    "ssd_scan": (steps(4, 16), steps(4), alike(4), steps(1, 16), steps(1, 16)),
    "causal_conv1d": (rows(64), alike(32, 4)),
}
kernels = {}
for name, pairs in CALLS.items():
    cut = jax.shard_map(
        partial(getattr(ours, name), axis_name="t"),
        mesh=jax.sharding.Mesh(jax.devices(), ("t",)),
        in_specs=tuple(spec for _, spec in pairs),
        out_specs=pairs[0][1],
    )
    gradient = jax.jit(jax.grad(lambda *o: (cut(*o).astype("float32") ** 2).sum(), tuple(range(len(pairs)))))
    text = gradient.trace(*(x for x, _ in pairs)).lower(lowering_platforms=("cuda",)).as_text()
    kernels[name] = sorted(set(re.findall(r'gpu[^a-z]*:[^a-z]*([a-z_0-9]+[.][a-z_]+)', text)))
print(json.dumps(kernels))
"""
    stub_driver.gpu()
    scans = {
        "linear_scan": ["backward", "forward", "summary"],
        "rg_lru": ["backward", "forward"],
        "selective_scan": ["backward", "forward"],
        "ssd_scan": ["adjoint", "backward", "forward", "states"],
        "causal_conv1d": ["backward", "forward"],
    }
    kernels = json.loads(stub_driver.run(PRELUDE + script, start=captured).stdout)
    assert kernels.keys() == scans.keys()
    for name, expected in scans.items():
        endings = [kernel.rpartition(".")[2].removeprefix("time_last_") for kernel in kernels[name]]
        assert endings == expected, name
