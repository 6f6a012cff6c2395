"""``linear_scan`` of packed sequences on a GPU, by kernels that cut them and by Triton, against float64.

What is taken is tested without a GPU in test_languages.py and test_scalar_columns.py.
"""

from __future__ import annotations

import pytest
import torch

import scan_registry
from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.linear_scan.cases import TOLERANCE, wide
from scan_registry.kernels.linear_scan.op.bench import Case

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("seeded")]

DEVICE = "cuda"
PACKED = (
    *(
        f"channel_last:{shape}:{dtype}:sequences=30"
        for shape in ("1,11,20001", "3,5,40001", "2,33,30001")
        for dtype in ("float32", "bfloat16")
    ),
    "channel_last:1,10,40001:float32:gates=channel:sequences=30",
    "channel_last:1,64,65536:bfloat16:sequences=4",
    "time_last:1,6,41508:float16:sequences=61",
    "time_last:1,3,50001:float32:sequences=40",
    "channel_last:1,9,40001:bfloat16:sequences=100",
    "channel_last:2,301,2001:float16:sequences=40",
    "channel_last:1,33,5000:float32:gates=channel:sequences=90",
    "time_last:1,8,30001:bfloat16:sequences=1",
)


def tensors_of(case):
    """Gates, tokens, the initial state, and bounds."""
    return (
        case.random_gates(DEVICE),
        case.sequence(DEVICE),
        torch.randn_like(_state(case)),
        case.bounds(DEVICE),
    )


def _state(case):
    shape = [*case.shape]
    if case.sequences:
        shape[case.dim] = case.sequences
    else:
        del shape[case.dim]
    return torch.empty(shape, device=DEVICE)


def outputs(leaves, weights, how):
    """States, the final state, and the gradients of leaves."""
    states, last = scan_registry.linear_scan(*leaves, return_final_state=True, **how)
    return states, last, *torch.autograd.grad((states, last), leaves, weights)


def check(case, reverse):
    gates, tokens, initial, bounds = tensors_of(case)
    leaves = [t.requires_grad_() for t in (gates, tokens, initial)]
    how = {"dim": case.dim, "reverse": reverse, "cu_seqlens": bounds}
    weights = torch.randn_like(tokens), torch.randn_like(initial)
    found = outputs(leaves, weights, how)
    wider = [wide(t.detach()).requires_grad_() for t in leaves]
    expected = outputs(wider, [wide(t) for t in weights], how)
    assert found[0].stride() == tokens.stride()
    assert found[3].stride() == tokens.stride()
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.shape == other.shape
        # What sums up thousands of products of either sign is less exact than they are.
        factor = 10 if number == 2 and gates.shape != tokens.shape else 1
        assert relative_error(one, other) <= factor * TOLERANCE[case.dtype], number


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("case", PACKED)
def test_results_are_right(case, reverse):
    check(Case.parse(case), reverse)
