"""``scan_registry.jax.causal_conv1d`` as it is compiled for a GPU, without one; see the same test of linear_scan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jax")
SUPPORT = Path(__file__).parents[2] / "support"


def test_what_is_launched_computes_convolutions(stub_driver: Any) -> None:
    script = f"""
import json, sys
sys.path.insert(0, {str(SUPPORT)!r})
from jax_as_gpu import jax, launched
from jaxing import check, drawn
import scan_registry, torch
import scan_registry.jax
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
print(json.dumps(kernels))
"""
    kernels = json.loads(stub_driver.gpu().run(script).stdout)
    assert kernels == [
        "causal_conv1d.channel_last_forward",
        "causal_conv1d.channel_last_backward",
        "causal_conv1d.time_last_forward",
        "causal_conv1d.time_last_backward",
    ]
