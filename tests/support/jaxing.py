"""JAX as its tests want it: on the CPU, which counts as four devices, and with float64.

``check`` compares a function of arrays and its derivatives with a reference in torch, which torch differentiates; only that
imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
if jax.__version_info__[:2] == (0, 10):  # XLA ends a process for a flag that it does not know
    # Its older emitters compile in two thirds of the time.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_use_fusion_emitters=false"
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_disable_most_optimizations", True)  # compiling takes longer than running

Arrays = Sequence[Any]


def drawn(*shape: int, seed: int = 0, scale: float = 1.0, dtype: str = "float64") -> Any:
    """Numbers around 0; complex ones too."""
    generator = np.random.default_rng([seed, *shape])
    numbers = scale * generator.normal(size=shape)
    if dtype.startswith("complex"):
        numbers = numbers + 1j * scale * generator.normal(size=shape)
    return jax.numpy.asarray(numbers).astype(dtype)


def as_torch(array: Any, gradient: bool = False) -> Any:
    """A torch tensor of the same values, in float64 or complex128."""
    import torch

    tensor = torch.from_numpy(np.array(array, dtype=np.result_type(array.dtype, np.float64)))
    return tensor.requires_grad_(gradient)


def errors(results: Any, expected: Any) -> list[float]:
    """The largest difference of each pair, relative to the largest number."""
    worst = []
    for one, other in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        ours, theirs = np.asarray(one).astype(np.complex128), np.asarray(other)
        assert ours.shape == theirs.shape
        largest = max(1.0, float(abs(theirs).max(initial=0)))
        worst.append(float(abs(ours - theirs).max(initial=0)) / largest)
    return worst


def check(
    function: Callable[..., Any],
    reference: Callable[..., Any],
    arrays: Arrays,
    tolerance: float = 1e-10,
) -> None:
    """Results and the gradients of all arrays, from cotangents drawn at random, against torch's. Both functions return a tuple."""
    import torch

    tensors = [as_torch(array, gradient=True) for array in arrays]
    expected = reference(*tensors)
    outlines = jax.eval_shape(function, *arrays)
    cotangents = [drawn(*r.shape, seed=i, dtype=str(r.dtype)) for i, r in enumerate(outlines)]

    @jax.jit  # one program compiles faster than one for each operator
    def both(inputs: Any, cotangents: Any) -> Any:
        results, pull = jax.vjp(function, *inputs)
        return results, pull(tuple(cotangents))

    results, gradients = both(list(arrays), cotangents)
    assert max(errors(results, [e.detach() for e in expected])) < tolerance
    # torch's gradients are of real functions of complex numbers: conjugated on both sides.
    torch.autograd.backward(expected, [as_torch(c).conj().resolve_conj() for c in cotangents])
    of_torch = [t.grad.conj().resolve_conj() for t in tensors]
    assert max(errors(gradients, of_torch)) < tolerance
    assert [g.dtype for g in gradients] == [a.dtype for a in arrays]
