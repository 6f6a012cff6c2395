"""``selective_scan`` on a GPU, through the public function, against the float64 reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import scan_registry
from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.selective_scan import reference
from scan_registry.ops import selective_scan_plans
from scan_registry.ops.launching import PlanCache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU"),
]

#: Of gradients of A, which are sums over all steps, a little more than of one element.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}

#: Batch, channels, time, states, groups; dtype; whether channels are contiguous; whether sequences are packed; and
#: parts of the backward pass.
CASES = (
    ((2, 96, 200, 16, 1), torch.float32, False, False, 1),
    ((2, 96, 200, 16, 2), torch.bfloat16, True, False, 1),
    ((1, 70, 333, 7, 1), torch.float32, False, True, 1),
    ((2, 64, 256, 16, 1), torch.float16, True, False, 3),
    ((1, 66, 517, 40, 3), torch.float32, True, False, 4),
    ((1, 8, 300, 200, 1), torch.float32, False, False, 2),
)


def drawn(sizes: tuple[int, ...], dtype: torch.dtype, turned: bool, packed: bool) -> list[Tensor]:
    """u, delta, A, B, C, D, z, delta_bias, initial_state."""
    batch, channels, time, states, groups = sizes
    torch.manual_seed(0)

    def sequence() -> Tensor:
        if turned:
            return torch.randn(batch, time, channels, device="cuda").transpose(1, 2)
        return torch.randn(batch, channels, time, device="cuda")

    between = (3,) if packed else ()
    return [
        sequence().to(dtype),
        (sequence() / 2 - 3).to(dtype),
        -torch.rand(channels, states, device="cuda") * 4,
        *torch.randn(2, batch, groups, states, time, device="cuda").to(dtype),
        torch.randn(channels, device="cuda"),
        sequence().to(dtype),
        torch.rand(channels, device="cuda"),
        torch.randn(batch, *between, channels, states, device="cuda"),
    ]


@pytest.mark.parametrize(("sizes", "dtype", "turned", "packed", "parts"), CASES)
def test_results_and_gradients_and_the_same_in_every_run(
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    turned: bool,
    packed: bool,
    parts: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(selective_scan_plans, "_parts", lambda *_: parts)
    monkeypatch.setattr(selective_scan_plans, "plan_cache", PlanCache())
    tensors = [t.requires_grad_() for t in drawn(sizes, dtype, turned, packed)]
    time = sizes[2]
    bounds = torch.tensor([0, time // 3, time // 3, time], device="cuda") if packed else None

    def run() -> tuple[Any, ...]:
        made = scan_registry.selective_scan(
            *tensors[:8], True, tensors[8],
            cu_seqlens=bounds, return_final_state=True, backend="cuda",
        )  # fmt: skip
        return *made, *torch.autograd.grad(made, tensors, [torch.ones_like(x) for x in made])

    found = run()
    wide = [t.detach().double().cpu().requires_grad_() for t in tensors]
    made = reference.forward(*wide[:8], True, wide[8], None if bounds is None else bounds.cpu())
    expected = *made, *torch.autograd.grad(made, wide, [torch.ones_like(x) for x in made])
    for out, right in zip(found, expected, strict=True):
        assert relative_error(out.cpu(), right.detach()) <= TOLERANCE[dtype]
    for one, other in zip(found, run(), strict=True):
        assert torch.equal(one, other)
