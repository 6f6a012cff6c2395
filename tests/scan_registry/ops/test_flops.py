"""What torch's FlopCounterMode counts, against counts by hand and against torch.nn."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from forked import captured
from torch.utils.flop_counter import FlopCounterMode

from scan_registry import (
    causal_conv1d,
    causal_conv1d_update,
    gated_scan,
    linear_scan,
    linear_scan_summary,
    nn,
    rnn,
    selective_scan,
    selective_state_update,
)

OPERATORS = torch.ops.scan_registry


def counted(function: Callable[[], Any], **options: Any) -> tuple[dict[Any, int], Any]:
    """Operations by operator, and the result."""
    with FlopCounterMode(display=False, **options) as counter:
        result = function()
    return dict(counter.get_flop_counts()["Global"]), result


@pytest.mark.parametrize(
    ("gates", "dtype", "forward", "backward"),
    [
        # 2 · 3 · 8 = 48 elements. Forward: a product and a sum each. Backward: the same, and the gates' product.
        ((2, 3, 8), torch.float32, 48 * 2, 48 * 3),
        # One gate for 8 steps: 48 - 6 additions more.
        ((2, 3, 1), torch.float32, 48 * 2, 48 * 3 + 42),
        # Complex: 6 for a product, 2 for a sum.
        ((2, 3, 8), torch.complex64, 48 * 8, 48 * 14),
    ],
)
def test_scans(gates: tuple[int, ...], dtype: torch.dtype, forward: int, backward: int) -> None:
    a = torch.rand(gates, dtype=dtype, requires_grad=True)
    x = torch.rand(2, 3, 8, dtype=dtype, requires_grad=True)
    counts, states = counted(lambda: linear_scan(a, x))
    assert counts == {OPERATORS.linear_scan: forward}
    grad = torch.ones_like(states)
    assert counted(lambda: states.backward(grad))[0] == {OPERATORS.linear_scan_backward: backward}


@pytest.mark.parametrize("reset", [None, torch.ones(2, 8, dtype=torch.bool)], ids=["", "reset"])
def test_gated_scans(reset: Any) -> None:
    """As scans whose gates want a gradient. What computes gates and tokens does not count."""
    x = torch.rand(2, 3, 8, requires_grad=True)
    counts, states = counted(lambda: gated_scan("min_lstm", x, x, x, reset=reset))
    assert counts == {OPERATORS.gated_scan: 48 * 2}
    counts, _ = counted(lambda: states.sum().backward())
    assert counts == {OPERATORS.gated_scan_backward: 48 * 3}


@pytest.mark.parametrize("gated", [False, True])
def test_selective_scans(gated: bool) -> None:
    """2 · 4 · 5 elements of 3 states. Each state: four products and two sums. Each element: delta · u, and if it is gated
    D · u with its sum, and the gate's product. Backward: 7 products, 2 sums, and 5 pairs of both, or 4 without A's."""
    u, delta, z = torch.randn(3, 2, 4, 5)
    A, B, C = -torch.rand(4, 3), *torch.randn(2, 2, 3, 5, requires_grad=True)
    A.requires_grad_(gated)
    more = {"D": torch.ones(4), "z": z} if gated else {}
    counts, out = counted(lambda: selective_scan(u, delta, A, B, C, **more))
    assert counts == {OPERATORS.selective_scan: 40 * (3 * 6 + (4 if gated else 1))}
    grad = torch.ones_like(out)
    counts, _ = counted(lambda: out.backward(grad))
    assert counts == {OPERATORS.selective_scan_backward: 40 * 3 * (9 + 2 * (5 if gated else 4))}


def test_summaries_and_steps() -> None:
    """A summary has a product beside those of the scan, a step what a scan of one step has."""
    a, x = torch.rand(2, 2, 3, 8)
    counts, _ = counted(lambda: linear_scan_summary(a, x))
    assert counts == {OPERATORS.linear_scan_summary: 48 * 3}
    state, x, A = torch.zeros(2, 3, 4), torch.randn(2, 3), -torch.rand(3, 4)
    B, D = torch.randn(2, 4), torch.ones(3)
    counts, _ = counted(lambda: selective_state_update(state, x, x, A, B, B, D, x))
    assert counts == {OPERATORS.selective_state_update: 6 * (4 * 6 + 4)}


@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize(
    ("function", "inputs", "gates", "count"),
    [("lstm", 4, 4, 2), ("gru", 3, 3, 1), ("elman", 1, 1, 1), ("slstm", 4, 4, 4)],
)
def test_networks(function: Any, inputs: int, gates: int, count: int, initial: bool) -> None:
    batch, time, heads, dim = 2, 5, 3, 4
    wx = torch.randn(batch, time, inputs, heads, dim, requires_grad=True)
    r = torch.randn(gates, heads, dim, dim)
    states = torch.zeros(count, batch, 1, heads, dim) if initial else None
    counts, created = counted(lambda: rnn(wx, r, None, states, function=function))
    step = 2 * batch * gates * heads * dim * dim
    assert counts == {OPERATORS.rnn: time * step}
    counts, _ = counted(lambda: created[0].sum().backward())
    # No gradient has to pass R at the first step, unless there is a state before it.
    assert counts == {OPERATORS.rnn_backward: (time if initial else time - 1) * step}


@pytest.mark.parametrize(
    ("kind", "options"),  # torch does not count its LSTM on the CPU
    [("GRU", {"num_layers": 2}), ("RNN", {"bidirectional": True})],
)
def test_modules_count_as_torchs_do(kind: str, options: dict[str, Any]) -> None:
    results = []
    for home in (torch.nn, nn):
        module, x = getattr(home, kind)(5, 6, **options), torch.randn(7, 3, 5)
        forward, result = counted(lambda module=module, x=x: module(x)[0])
        backward, _ = counted(lambda result=result: result.sum().backward())
        results.append((sum(forward.values()), sum(backward.values())))
    assert results[0] == results[1]
    assert all(results[1])


def test_convolutions() -> None:
    """Forward as torch's count, which have the steps of the padding after the last one, too."""
    weight = torch.randn(3, 4, requires_grad=True)
    x = torch.randn(2, 3, 50, requires_grad=True)
    taps = 2 * 4 * x.numel()
    theirs, _ = counted(
        lambda: torch.nn.functional.conv1d(x, weight.unsqueeze(1), padding=3, groups=3)
    )
    assert sum(theirs.values()) // 53 * 50 == taps
    counts, y = counted(lambda: causal_conv1d(x, weight, activation="silu"))
    assert counts == {OPERATORS.causal_conv1d: taps}
    counts, _ = counted(lambda: y.sum().backward())
    assert counts == {OPERATORS.causal_conv1d_backward: 2 * taps}
    fixed = causal_conv1d(x, weight.detach())
    counts, _ = counted(lambda: fixed.sum().backward())
    assert counts == {OPERATORS.causal_conv1d_backward: taps}
    state, step = torch.zeros(2, 3, 3), torch.randn(2, 3)
    counts, _ = counted(lambda: causal_conv1d_update(step, state, weight.detach()))
    assert counts == {OPERATORS.causal_conv1d_update: 2 * 4 * step.numel()}


def test_what_a_user_maps_comes_first() -> None:
    a = torch.rand(3, 8)
    counts, _ = counted(
        lambda: linear_scan(a, a),
        custom_mapping={OPERATORS.linear_scan: lambda *_, out_shape, **__: 7},
    )
    assert counts == {OPERATORS.linear_scan: 7}


#: Programs that find nothing imported but torch, and what the counter imports when it counts: each is a fork of one process.
_PROGRAMS = """
import os, sys, torch, torch._dynamo
assert "torch.utils.flop_counter" not in sys.modules
a = torch.rand(3, 8)

def make():
    from torch.utils.flop_counter import FlopCounterMode
    return FlopCounterMode(display=False)

def count(counter):
    with counter: scan_registry.linear_scan(a, a)
    print(counter.get_total_flops())

def as_its_user():
    import scan_registry.nn
    scan_registry.nn.LSTM(3, 4)(torch.rand(5, 2, 3))
    scan_registry.linear_scan(a, a)
    print("torch.utils.flop_counter" in sys.modules)

def operator_last():
    global scan_registry
    counter = make()
    import scan_registry
    count(counter)

def operator_first():
    global scan_registry
    import scan_registry
    count(make())

def operator_first_and_run():
    global scan_registry
    import scan_registry
    scan_registry.linear_scan(a, a)
    count(make())

for program in as_its_user, operator_last, operator_first, operator_first_and_run:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        program()
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, program
"""


def test_it_does_not_matter_what_is_imported_first() -> None:
    """The operator is imported after the counter was made, or before it was imported; and nothing else imports it."""
    command = [sys.executable, "-c", _PROGRAMS]
    created = captured(command, check=True, cwd="/")
    assert created.stdout.split() == ["False", "48", "48", "48"]


def test_backward_passes_that_are_compiled_count() -> None:
    """Torch compiles nothing while it counts, but what is compiled already may be run."""
    torch.compiler.reset()
    a = torch.rand(2, 3, 8, requires_grad=True)
    make = torch.compile(lambda a: linear_scan(a, a + 1), backend="aot_eager", fullgraph=True)
    states = make(a)
    with FlopCounterMode(display=False) as counter:
        states.sum().backward()
    assert counter.get_total_flops() == 144
