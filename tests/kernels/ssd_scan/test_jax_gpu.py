"""``scan_registry.jax.ssd_scan`` as it is compiled for a GPU, without one; see the same test of linear_scan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jax")
SUPPORT = Path(__file__).parents[2] / "support"


def test_what_is_launched_computes_scans(stub_driver: Any) -> None:
    script = f"""
import json, sys
sys.path.insert(0, {str(SUPPORT)!r})
from jax_as_gpu import jax, launched
from jaxing import check, drawn
import scan_registry, torch
import scan_registry.jax
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
print(json.dumps(kernels))
"""
    kernels = json.loads(stub_driver.gpu().run(script).stdout)
    names = [name.removeprefix("ssd_scan.") for name in kernels]
    assert {*names} == {"forward", "states", "adjoint", "backward"}
