"""``scan_registry.jax.selective_scan`` as it is compiled for a GPU, without one; see the same test of linear_scan."""

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
print(json.dumps(kernels))
"""
    kernels = json.loads(stub_driver.gpu().run(script).stdout)
    names = [name.removeprefix("selective_scan.") for name in kernels]
    assert names == ["forward", "backward", "forward", "adjoint", "backward"]
