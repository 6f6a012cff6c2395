"""The operator ``ssd_scan`` on the CPU: what it accepts and returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ssd_problems import draw
from torch import Tensor

import scan_registry
from scan_registry.kernels.ssd_scan import reference

F32, F64 = torch.float32, torch.float64


def call(**changes: Any) -> Any:
    problem = draw(2, 5, 4, 3, 2, 6, dtype=F32)
    return scan_registry.ssd_scan(**(problem | {"dt_softplus": True} | changes))


def test_it_returns_what_is_asked_for() -> None:
    problem = draw()
    expected, final = reference.forward(**problem)
    out, state = scan_registry.ssd_scan(*list(problem.values())[:8], False, (0, float("inf")), problem["initial_state"], return_final_state=True)  # fmt: skip
    torch.testing.assert_close((out, state), (expected, final))
    alone = scan_registry.ssd_scan(*list(problem.values())[:5])
    assert isinstance(alone, Tensor)
    assert alone.shape == problem["x"].shape


@pytest.mark.parametrize("name", ["dt", "B", "A", "dt_bias", "D", "z", "initial_state"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, F32])
def test_narrow_dtypes_mix(name: str, dtype: torch.dtype) -> None:
    problem = draw(2, 5, 4, 3, 2, 6, dtype=torch.float16)
    rounded = problem[name].to(torch.bfloat16).to(problem[name].dtype)
    expected = call(**{**problem, name: rounded})
    torch.testing.assert_close(call(**{**problem, name: rounded.to(dtype)}), expected)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"x": [1.0]}, TypeError, "x must be a torch.Tensor, not list"),
        ({"z": 1.0}, TypeError, "z must be a torch.Tensor, not float"),
        ({"seq_idx": [0]}, TypeError, "seq_idx must be a torch.Tensor, not list"),
        ({"cu_seqlens": (0, 5)}, TypeError, "cu_seqlens must be a torch.Tensor, not tuple"),
        ({"x": torch.zeros(2, 5, 0, 4)}, ValueError, "with one head at least"),
        ({"x": torch.zeros(2, 5, 4)}, ValueError, r"x has shape \(2, 5, 4\).*size of a head"),
        ({"x": torch.zeros(2, 5, 4, 3).int()}, TypeError, "x has dtype torch.int32; accepted"),
        ({"x": torch.zeros(2, 5, 4, 3) * 1j}, TypeError, "x has dtype torch.complex64"),
        ({"x": torch.zeros(2, 5, 4, 3).to_sparse()}, TypeError, "pass x.to_dense"),
        ({"x": torch.zeros(2, 5, 3, 3)}, ValueError, "B has shape .*groups that divide 3"),
        ({"dt": torch.zeros(2, 4, 5)}, ValueError, r"dt has shape .* be \(2, 5, 4\)"),
        ({"A": torch.zeros(4, 6)}, ValueError, r"A has shape \(4, 6\).* be \(4,\)"),
        ({"A": torch.zeros(4, dtype=F64)}, TypeError, "float64 does not mix"),
        ({"B": torch.zeros(2, 5, 3, 6)}, ValueError, r"B has shape .*\(2, 5, groups, states\)"),
        ({"B": torch.zeros(2, 5, 6)}, ValueError, r"B has shape \(2, 5, 6\)"),
        ({"B": torch.zeros(2, 5, 2, 0)}, ValueError, "one state at least"),
        ({"B": torch.zeros(2, 5, 0, 6)}, ValueError, r"B has shape \(2, 5, 0, 6\)"),
        ({"C": torch.zeros(2, 5, 1, 6)}, ValueError, r"C has shape .* be \(2, 5, 2, 6\)"),
        ({"D": torch.zeros(3)}, ValueError, r"D has shape \(3,\).* be \(4,\) or \(4, 3\)"),
        ({"D": torch.zeros(4, 1)}, ValueError, r"D has shape \(4, 1\)"),
        ({"z": torch.zeros(2, 5, 4, 2)}, ValueError, r"z has shape .* be \(2, 5, 4, 3\)"),
        ({"dt_bias": torch.zeros(4, 1)}, ValueError, r"dt_bias has shape \(4, 1\)"),
        ({"initial_state": torch.zeros(2, 4, 6, 3)}, ValueError, r"be \(2, 4, 3, 6\)"),
        ({"cu_seqlens": torch.tensor([0, 5])}, ValueError, r"be \(2, 1, 4, 3, 6\)"),
        ({"cu_seqlens": torch.tensor([0, 4])}, ValueError, "runs from 0 to 4"),
        ({"cu_seqlens": torch.tensor([0, 3, 2, 5])}, ValueError, "falls from .*"),
        ({"cu_seqlens": torch.tensor([[0, 5]])}, ValueError, r"cu_seqlens has shape \(1, 2\)"),
        ({"cu_seqlens": torch.tensor([0.0, 5.0])}, TypeError, "cu_seqlens has dtype"),
        ({"seq_idx": torch.zeros(5).int()}, ValueError, r"seq_idx has shape .* be \(2, 5\)"),
        ({"seq_idx": torch.zeros(2, 5)}, TypeError, "seq_idx has dtype torch.float32"),
        ({"z": torch.zeros(2, 5, 4, 3, device="meta")}, ValueError, "z is on meta, x on cpu"),
        ({"dt_softplus": 1}, TypeError, "dt_softplus is 1; it must be a bool"),
        ({"dt_limit": 0.1}, TypeError, "dt_limit is 0.1; it must be a pair"),
        ({"dt_limit": (0.1,)}, TypeError, "dt_limit is"),
        ({"dt_limit": (0.1, "1")}, TypeError, "dt_limit is"),
        ({"dt_limit": (1.0, 0.1)}, ValueError, r"dt_limit is \(1.0, 0.1\)"),
        ({"dt_limit": (float("nan"), 1.0)}, ValueError, "dt_limit is"),
        ({"chunk_size": 0}, ValueError, "chunk_size is 0; accepted are positive"),
        ({"chunk_size": 64.0}, TypeError, "chunk_size is 64.0"),
        ({"return_final_state": "no"}, TypeError, "return_final_state is 'no'"),
        ({"backend": "fast"}, ValueError, "backend is 'fast'"),
        ({"backend": "cuda"}, ValueError, "needs a CUDA device; x is on cpu"),
        ({"backend": None}, ValueError, "backend is None; accepted are auto"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        call(**changes)
