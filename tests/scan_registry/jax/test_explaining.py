"""``explain`` of calls on JAX's arrays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jaxing import jax

import scan_registry
import scan_registry.jax

SUPPORT = Path(__file__).parents[2] / "support"


def test_a_call_on_the_cpu() -> None:
    """Arguments by place and by name, arrays or outlines of arrays."""
    tokens = jax.numpy.ones((2, 8, 64), "float32")
    gates = jax.ShapeDtypeStruct((2, 8, 64), "bfloat16")
    explained = scan_registry.explain(scan_registry.jax.linear_scan, gates, tokens=tokens, dim=1)
    assert [step.name for step in explained.steps] == [
        "channel_last_forward",
        "channel_last_backward",
    ]
    assert explained.device is None
    assert "jax.linear_scan on the CPU" in str(explained)
    assert "this package's compiled code for the CPU" in explained.brief()


def test_a_call_of_which_jax_computes_all() -> None:
    x = jax.ShapeDtypeStruct((2, 8, 64), "float32")
    explained = scan_registry.explain(scan_registry.jax.linear_scan, x, x, backend="reference")
    assert explained.steps == ()
    assert "JAX's own operators" in explained.brief()
    assert "empty" not in explained.brief()


def test_what_the_call_refuses() -> None:
    """By the values of bounds, too; numbers of NumPy are what they are in a call."""
    x = jax.ShapeDtypeStruct((1, 8, 64), "float32")
    for bounds in (jax.numpy.array([0, 9, 8]), np.array([0, 2**32 + 8])):
        with pytest.raises(ValueError, match="cu_seqlens is"):
            scan_registry.explain(scan_registry.jax.linear_scan, x, x, dim=1, cu_seqlens=bounds)
    outline = jax.ShapeDtypeStruct((3,), "int32")
    for bounds in (jax.numpy.array([0, 3, 8]), outline):
        options = {"cu_seqlens": bounds, "dim": np.int64(1)}
        call = scan_registry.jax.hgrn, x, x, np.float32(0.3)
        assert len(scan_registry.explain(*call, **options).steps) == 2


def test_other_functions_are_refused_as_before() -> None:
    with pytest.raises(TypeError, match="cannot be explained"):
        scan_registry.explain(scan_registry.jax.__getattr__)


def test_a_call_on_a_gpu(stub_driver: Any) -> None:
    """Nothing is loaded."""
    script = f"""
import json, sys
sys.path.insert(0, {str(SUPPORT)!r})
from jaxing import jax
import scan_registry.jax
jax.default_backend = lambda: "gpu"  # as it is with a GPU
x, a = jax.ShapeDtypeStruct((2, 512, 64), "bfloat16"), jax.ShapeDtypeStruct((64,), "float32")
explained = scan_registry.explain(scan_registry.jax.rg_lru, x, x, x, a, dim=1)
print(json.dumps(explained.to_json()))
"""
    explained = json.loads(stub_driver.gpu(name="Imaginary GPU").run(script).stdout)
    assert explained["device"]["name"] == "Imaginary GPU"
    steps = explained["steps"]
    assert [step["kernel"] for step in steps] == ["channel_last_forward", "channel_last_backward"]
    assert all(step["variant"].startswith("gated_scan.") and step["launch"] for step in steps)
    assert stub_driver.calls("cuModuleLoadData") == []
