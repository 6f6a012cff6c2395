"""``ssd_scan`` by its kernels, against a loop in float64."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from graphs import recorded
from ssd_problems import NAMES, draw, gradients_of
from torch import Tensor

import scan_registry
from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.ssd_scan import reference
from scan_registry.kernels.ssd_scan.cases import TOLERANCE
from scan_registry.kernels.ssd_scan.op.arguments import normalised
from scan_registry.kernels.ssd_scan.op.problems import stretches

pytestmark = pytest.mark.gpu

run = partial(scan_registry.ssd_scan, dt_softplus=True, return_final_state=True, backend="cuda")
right = partial(reference.forward, dt_softplus=True)
#: (batch, time, heads, size of a head, groups, states).
SHAPES = [
    (2, 130, 4, 64, 1, 128),
    (1, 64, 2, 32, 2, 16),
    (2, 257, 6, 128, 3, 64),
    (1, 300, 2, 80, 1, 256),
    (3, 1, 2, 8, 1, 8),
    (1, 200, 2, 128, 1, 96),  # the last numbers and states fill no tile
]

#: Gradients that are sums over all steps, which may cancel: attestations compare them with the size of their terms.
_SUMS = ("A", "D", "dt_bias")


def on_gpu(problem: dict[str, Any]) -> dict[str, Any]:
    return {name: t.cuda() if isinstance(t, Tensor) else t for name, t in problem.items()}


def agrees(problem: dict[str, Any], dtype: torch.dtype) -> None:
    """Results and gradients, to what roundings of the dtype allow; and bit for bit the same once more."""
    results, grads = gradients_of(run, on_gpu(problem))
    exact = {n: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for n, t in problem.items()}  # fmt: skip
    expected, wanted = gradients_of(right, exact)
    most = TOLERANCE[str(dtype).removeprefix("torch.")]
    names = [name for name in NAMES if name in problem]
    pairs = zip((*results, *grads), (*expected, *wanted), ("out", "final", *names), strict=True)
    for result, value, name in pairs:
        if name not in _SUMS:
            assert relative_error(result.cpu(), value) < most, name
    again, grads_again = gradients_of(run, on_gpu(problem))
    for result, value in zip((*results, *grads), (*again, *grads_again), strict=True):
        assert torch.equal(result, value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    problem = draw(*shape, dtype=dtype)
    del problem["z"]
    problem["dt"] = problem["dt"].to(dtype)
    problem["dt_limit"] = (0.01, 2.0)
    agrees(problem, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gates_and_wide_skips(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Both in the kernels, also where z is a part of a larger tensor, as Mamba-2's modules pass it."""
    problem = draw(*shape, dtype=dtype, wide_D=True)
    agrees(problem, dtype)
    problem = on_gpu(problem)
    part = torch.cat([problem["x"], problem["z"]], 2)[:, :, shape[2] :]
    assert not part.is_contiguous() or shape[:2] == (1, 1)
    torch.testing.assert_close(run(**problem | {"z": part}), run(**problem), rtol=0, atol=0)


def test_a_gate_is_applied_before_rounding() -> None:
    problem = draw(2, 200, 4, 64, 1, 128, dtype=torch.float16)
    problem |= {"x": problem["x"] * 0 + 1, "D": problem["D"] * 0 + 1e6, "z": problem["z"] * 0 - 9}
    out, _ = run(**on_gpu(problem))
    expected, _ = right(**{n: t.double() for n, t in problem.items()})
    assert relative_error(out.cpu(), expected) < 1e-3


@pytest.mark.parametrize("bounds", [(0, 0, 70, 200), (0, 64, 128, 200), (0, 1, 2, 200), (0, 200, 200, 200)])  # fmt: skip
@pytest.mark.parametrize("indexed", [False, True], ids=["", "indexed"])
def test_packed(bounds: tuple[int, ...], indexed: bool) -> None:
    problem = draw(2, 200, 4, 64, 2, 64, 3, torch.bfloat16)
    del problem["z"]
    problem["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32)
    if indexed:
        problem["seq_idx"] = (torch.arange(200) // 45).repeat(2, 1).int()
    agrees(problem, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [1e-6, 1e-2, 60.0])
def test_decays_of_any_size(scale: float, dtype: torch.dtype) -> None:
    problem = draw(1, 200, 2, 64, 1, 64, dtype=dtype)
    problem |= {"A": -torch.ones(2), "dt": torch.rand(1, 200, 2) * scale}
    for name in ("z", "dt_bias"):
        del problem[name]
    results, grads = gradients_of(partial(run, dt_softplus=False), on_gpu(problem))
    expected, wanted = gradients_of(reference.forward, {n: t.double() for n, t in problem.items()})
    names = [name for name in NAMES if name in problem]
    pairs = zip((*results, *grads), (*expected, *wanted), ("out", "final", *names), strict=True)
    for result, value, name in pairs:
        assert torch.isfinite(result).all()
        if name not in _SUMS:
            most = 1e-2 if dtype == torch.bfloat16 else 5e-6
            assert relative_error(result.cpu(), value) < most, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["x", "dt", "B", "C", "z", "initial_state"])
def test_nan_stays_in_its_row(name: str, dtype: torch.dtype) -> None:
    problem = draw(2, 90, 2, 64, 1, 64, dtype=dtype)
    (clean, _), clean_grads = gradients_of(run, on_gpu(problem))
    problem[name][0].view(-1)[5] = torch.nan
    (out, _), grads = gradients_of(run, on_gpu(problem))
    assert out[0].isnan().any()
    assert torch.equal(out[1], clean[1])
    names = [n for n in NAMES if n in problem]
    for key, grad, value in zip(names, grads, clean_grads, strict=True):
        if key in ("x", "dt", "B", "C", "z", "initial_state"):
            assert torch.equal(grad[1], value[1]), key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_time_of_few_heads_is_cut(dtype: torch.dtype) -> None:
    problem = draw(2, 3111, 2, 80, 1, 64, dtype=dtype)
    problem["A"] = problem["A"] / 100  # states last through several stretches
    rest: dict[str, Any] = {
        "seq_idx": None,
        "cu_seqlens": None,
        "softplus": True,
        "chunk_size": None,
    }
    rest |= {"limit": (0.0, math.inf), "final": True, "backend": "cuda"}
    assert stretches(normalised(**on_gpu(problem), **rest)[0]) == 3
    results = run(**on_gpu(problem))
    expected = right(**{n: t.double() for n, t in problem.items()})
    for result, value in zip(results, expected, strict=True):
        assert relative_error(result.cpu(), value) < TOLERANCE[str(dtype).removeprefix("torch.")]


@pytest.mark.parametrize("time", [130, 3100])
def test_a_cuda_graph_records_a_call(time: int) -> None:
    problem = on_gpu(draw(1, time, 2, 64, 1, 64, dtype=torch.bfloat16))
    expected = run(**problem)
    graph, results = recorded(lambda: run(**problem))
    for result in results:
        result.zero_()
    graph.replay()
    torch.testing.assert_close(results, expected, rtol=0, atol=0)


def test_float64_is_composed() -> None:
    problem = draw(2, 130, 4, 8, 2, 16, dtype=torch.float64)
    compose = partial(scan_registry.ssd_scan, return_final_state=True)
    results, grads = gradients_of(compose, on_gpu(problem))
    expected, wanted = gradients_of(reference.forward, {n: t.double() for n, t in problem.items()})
    for result, value in zip((*results, *grads), (*expected, *wanted), strict=True):
        assert relative_error(result.cpu(), value) < 1e-12
