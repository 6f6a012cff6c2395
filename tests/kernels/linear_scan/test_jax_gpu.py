"""``scan_registry.jax.linear_scan`` as it is compiled for a GPU, without one.

The stub driver plays the GPU, selection chooses from the archives that are installed, and the C code for CPUs runs in the
place of kernels, on the pointers and scalars that they would get.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jax")
SUPPORT = Path(__file__).parents[2] / "support"
PRELUDE = f"""
import json, sys
sys.path.insert(0, {str(SUPPORT)!r})
"""


def test_what_is_launched_computes_scans(stub_driver: Any) -> None:
    script = """
from jax_as_gpu import jax, launched
from jaxing import check, drawn
import scan_registry, torch
from scan_registry.jax import linear_scan
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
    kernels.append([call["gpu"].split(":")[0] for call in launched])
    launched.clear()
linear_scan(*[drawn(1, 1 << 18, dtype="bfloat16")] * 2)
print(json.dumps([kernels, launched[-1]]))
"""
    kernels, call = json.loads(stub_driver.gpu().run(PRELUDE + script).stdout)
    names = [[name.removeprefix("linear_scan.") for name in own] for own in kernels]
    both = ["time_last_forward", "time_last_backward"]
    assert names == [
        ["channel_last_forward", "channel_last_backward"],
        [*both, "time_last_reduction"],
        ["channel_last_forward", "channel_last_backward", "channel_last_reduction"],
        both,
    ]
    assert call["workspace"] > 0
    assert call["grid"][0] > 1


def test_a_program_for_gpus_on_a_machine_without(stub_driver: Any) -> None:
    """It names the binary by its digest, so that another process can run it."""
    script = """
from jaxing import drawn, jax
from scan_registry.jax import linear_scan
traced = jax.jit(linear_scan).trace(*[drawn(2, 8, 64, dtype="float32")] * 2)
print(json.dumps(traced.lower(lowering_platforms=("cuda",)).as_text()))
"""
    text = json.loads(stub_driver.gpu().run(PRELUDE + script).stdout)
    assert text.count("custom_call @scan_registry") == 1
    assert "time_last_forward:cuda:dtype=float32" in text
    assert "sha256" in text


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
    text, told, refused = json.loads(stub_driver.run(PRELUDE + script).stdout)
    assert "custom_call @scan_registry" not in text
    assert [words for words in told if "operators of JAX stand in" in words]
    assert "time_last_forward" in refused
