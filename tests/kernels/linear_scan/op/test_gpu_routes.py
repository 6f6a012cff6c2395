"""``linear_scan`` on a GPU where it computes with copies of its tensors, or with Triton for packed rows, against float64.

What is taken, and why, is tested without a GPU in test_routes.py.
"""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from gpu_scans import ROUTED
from graphs import recorded

import scan_registry
from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.linear_scan.cases import TOLERANCE, wide
from scan_registry.kernels.linear_scan.op.bench import Case

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("seeded")]

DEVICE = "cuda"
PACKED = (
    "time_last:1,6,41508:float16:sequences=61",
    "time_last:1,3,50001:float32:sequences=40",
    "channel_last:1,9,40001:bfloat16:sequences=100",
    "channel_last:2,301,2001:float16:sequences=40",
    "channel_last:1,33,5000:float32:gates=channel:sequences=90",
    "time_last:1,8,30001:bfloat16:sequences=1",
)


def runs(case):
    """Whether this is a GPU for which copies were timed: on others, nothing is copied."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("copies were timed on compute capability 9.0")
    return case


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


def routes(gates, tokens, initial, case, bounds):
    gates = gates.detach().requires_grad_()
    found = scan_registry.explain(
        scan_registry.linear_scan,
        *(gates, tokens, initial),
        dim=case.dim,
        cu_seqlens=bounds,
        return_final_state=True,
    )
    return {step.name: step.decision for step in found.steps}


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
    # Kernels for float64 take no route.
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
@pytest.mark.parametrize("case", [*ROUTED, *PACKED])
def test_results_are_right(case, reverse):
    check(Case.parse(case), reverse)


@pytest.mark.parametrize("case", ROUTED)
def test_the_forward_pass_takes_a_route(case):
    case = runs(Case.parse(case))
    gates, tokens, initial, bounds = tensors_of(case)
    decisions = routes(gates, tokens, initial, case, bounds)
    assert decisions["forward"].route is not None


def test_misaligned_packed_rows_are_cut_into_tiles():
    case = Case.parse(PACKED[0])
    gates, tokens, initial, bounds = tensors_of(case)
    forward = routes(gates, tokens, initial, case, bounds)["forward"]
    assert forward.taken().language == "cuda"


@pytest.mark.parametrize("case", ROUTED)
def test_in_a_cuda_graph(case):
    case = Case.parse(case)
    gates, tokens, initial, bounds = tensors_of(case)
    scan = partial(
        scan_registry.linear_scan, gates, tokens, initial, dim=case.dim, cu_seqlens=bounds
    )
    expected = scan()
    torch.cuda.synchronize()
    graph, states = recorded(scan, warm_ups=0)
    for _ in range(3):
        states.fill_(7)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(states, expected) or relative_error(states, wide(expected)) < 1e-2


def test_compiled():
    case = Case.parse(ROUTED[0])
    gates, tokens, initial, bounds = tensors_of(case)

    def scan(gates, tokens):
        how = {"dim": case.dim, "cu_seqlens": bounds}
        return scan_registry.linear_scan(gates, 2 * tokens, initial, **how) + 1

    found = torch.compile(scan, fullgraph=True)(gates, tokens)
    expected = scan(gates, tokens)
    assert found.stride() == expected.stride()
    assert relative_error(found, wide(expected)) <= TOLERANCE[case.dtype]


def requested(when):
    """Bytes of all tensors. Blocks of torch's cache, which it counts elsewhere, may be up to a MiB larger."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{when}"]


@pytest.mark.parametrize("case", ROUTED)
def test_copies_take_the_memory_that_is_explained(case):
    """And leave none behind."""
    case = Case.parse(case)
    gates, tokens, initial, bounds = tensors_of(case)
    scan = partial(
        scan_registry.linear_scan, gates, tokens, initial, dim=case.dim, cu_seqlens=bounds
    )
    scan()
    decision = routes(gates, tokens, initial, case, bounds)["forward"]
    copies = 0 if decision.route is None else decision.route.bytes
    gc.collect()
    torch.cuda.synchronize()
    before = requested("current")
    torch.cuda.reset_peak_memory_stats()
    states = scan()
    torch.cuda.synchronize()
    workspace = decision.launch().workspace
    assert requested("peak") - before <= states.nbytes + copies + workspace
    assert requested("current") - before == states.nbytes
