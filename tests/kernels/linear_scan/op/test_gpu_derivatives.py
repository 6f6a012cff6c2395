"""Derivatives of ``linear_scan`` on a GPU over all of its options: against finite differences, against
loops, and what torch asks of operators.

Calls are drawn from numbered seeds rather than by hypothesis, which need not be where there is a GPU.
"""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

import scan_registry

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BACKENDS = ("cuda", "triton")


def view(chance, values):
    """The values in memory of their own, their dimensions in any order, perhaps with gaps."""
    order = list(range(values.dim()))
    chance.shuffle(order)
    gaps = [chance.choice([1, 1, 2]) for _ in order]
    room = values.new_zeros([gap * values.shape[d] for gap, d in zip(gaps, order, strict=True)])
    strided = room[tuple(slice(None, None, gap) for gap in gaps)]
    return strided.permute([order.index(d) for d in range(values.dim())]).copy_(values)


def drawn(seed, dtype=torch.float64):
    """Gates, tokens and perhaps an initial state of random shapes and strides, and options."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    full = [chance.choice([1, 2, 3]) for _ in range(chance.choice([0, 1, 2, 3]))]
    time, place = chance.choice([1, 2, 5, 9]), chance.randint(0, len(full))
    full.insert(place, time)
    of_gates = [1 if chance.random() < 0.3 else size for size in full]
    of_state, bounds = full[:place] + full[place + 1 :], None
    if chance.random() < 0.5:
        inner = sorted(chance.randint(0, time) for _ in range(chance.randint(0, 3)))
        bounds = torch.tensor([0, *inner, time], device=DEVICE)
        of_state.insert(place, len(bounds) - 1)
    gates = 1.8 * torch.rand(of_gates, dtype=torch.float64, device=DEVICE) - 0.9
    tensors = [gates, torch.randn(full, dtype=torch.float64, device=DEVICE)]
    if chance.random() < 0.6:
        tensors.append(torch.randn(of_state, dtype=torch.float64, device=DEVICE))
    options = {
        "dim": place - chance.choice([0, len(full)]),
        "reverse": chance.random() < 0.5,
        "cu_seqlens": bounds,
    }
    return [view(chance, t.to(dtype)).requires_grad_() for t in tensors], options


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(60))
def test_finite_differences_of_drawn_calls(seed, backend):
    """First derivatives in both modes, second ones in reverse."""
    tensors, options = drawn(seed)
    scan = partial(
        scan_registry.linear_scan, **options, backend=backend, return_final_state=seed % 3 > 0
    )
    assert torch.autograd.gradcheck(scan, tensors, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(scan, tensors, fast_mode=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(12))
def test_opcheck(seed, backend):
    assert scan_registry.linear_scan  # its first use registers the operator
    tensors, options = drawn(seed, torch.float32)
    gates, tokens, *state = tensors
    dim = options["dim"] % tokens.dim() - tokens.dim()
    args = (gates, tokens, state[0] if state else None, options["cu_seqlens"])
    how = (dim, options["reverse"], seed % 2 == 0, backend)
    torch.library.opcheck(torch.ops.scan_registry.linear_scan.default, (*args, *how))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(24))
def test_transforms_against_loops(seed, backend):
    """vmap over each input and all of them, and jvp against a difference quotient in float64."""
    tensors, options = drawn(seed)
    leaves = [t.detach() for t in tensors]
    scan = partial(scan_registry.linear_scan, **options, backend=backend, return_final_state=True)
    copies = [torch.stack([t, t / 2, -t / 3]) for t in leaves]
    for mapped in (*range(len(leaves)), None):
        places = tuple(0 if mapped in (number, None) else None for number in range(len(leaves)))
        inputs = [c if p == 0 else t for c, t, p in zip(copies, leaves, places, strict=True)]
        together = torch.func.vmap(scan, in_dims=places)(*inputs)
        for number in range(3):
            each = [t[number] if p == 0 else t for t, p in zip(inputs, places, strict=True)]
            for found, expected in zip(together, scan(*each), strict=True):
                torch.testing.assert_close(found[number], expected)
    tangents = tuple(torch.randn_like(t) for t in leaves)
    values, slopes = torch.func.jvp(scan, tuple(leaves), tangents)
    torch.testing.assert_close(values, scan(*leaves))
    step = 1e-6
    ends = [
        scan(*(t + sign * step * v for t, v in zip(leaves, tangents, strict=True)))
        for sign in (1, -1)
    ]
    for slope, above, below in zip(slopes, *ends, strict=True):
        torch.testing.assert_close(slope, (above - below) / (2 * step), rtol=1e-6, atol=1e-7)
