"""``scan_registry.jax.gated_scan`` as it is compiled for a GPU, without one; see the same test of linear_scan."""

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
for dim, bounds in ((1, [0, 20, 20, 64]), (-1, None)):
    shape, of_state = ((2, 64, 48), (2, 3, 48)) if dim == 1 else ((2, 48, 64), (2, 48))
    operands = [drawn(*s, seed=i, dtype="float32") for i, s in enumerate([shape] * 3 + [(48,), of_state])]
    how = dict(dim=dim, return_final_state=True)
    packed, of_torch = (None if bounds is None else of(bounds) for of in (jax.numpy.array, torch.tensor))
    check(lambda *o: scan_registry.jax.rg_lru(*o[:4], initial_state=o[4], **how, cu_seqlens=packed),
          lambda *o: scan_registry.rg_lru(*o[:4], initial_state=o[4], **how, cu_seqlens=of_torch), operands, 3e-5)
    kernels += [call["gpu"].split(":")[0] for call in launched]
    launched.clear()
print(json.dumps(kernels))
"""
    kernels = json.loads(stub_driver.gpu().run(script).stdout)
    assert kernels == [
        "gated_scan.channel_last_forward",
        "gated_scan.channel_last_backward",
        "gated_scan.time_last_forward",
        "gated_scan.time_last_backward",
    ]
