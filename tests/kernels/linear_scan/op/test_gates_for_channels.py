"""Gates that are the same for all times and for all contiguous channels: kernels read one for each channel."""

from __future__ import annotations

import pytest
import torch

from scan_registry.kernels.linear_scan.op.calls import shape_for_channels
from scan_registry.kernels.linear_scan.op.problems import for_channels, make_kernel_call
from scan_registry.ops.facts import facts_of

SHAPE = (4, 50, 24)  # batch, time, channels


def gates_of(kind: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    whole = torch.rand(4, 1, 1, dtype=dtype, device=device)
    return {
        "one": whole[0],
        "scalar": whole[0, 0, 0],
        "one a batch": whole,
        "expanded": whole[:1].expand(SHAPE),
        "batch expanded": whole.expand(4, 50, 24),
    }[kind]


#: The gates that are written out.
WRITTEN = {
    "one": (1, 1, 24),
    "scalar": (1, 1, 24),
    "one a batch": (4, 1, 24),
    "expanded": (1, 1, 24),
    "batch expanded": (4, 1, 24),
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_they_are_written_out_for_the_channels(kind: str) -> None:
    tokens = torch.empty(SHAPE, device="meta")
    call = make_kernel_call(
        "forward", gates_of(kind, device="meta"), {"tokens": tokens}, None, 1, False
    )
    assert call.gates_shape == WRITTEN[kind]
    assert call.copied == ()
    assert call.problem.layout == "channel_last"
    assert call.problem.has_one_gate()
    assert call.problem.plain()
    assert call.problem.whole_chunks(4)
    gates = gates_of(kind)
    written = for_channels(gates, torch.empty(SHAPE), call.gates_shape)
    assert written.is_contiguous()
    assert written.shape == WRITTEN[kind]
    assert torch.equal(written.expand(SHAPE), gates.expand(SHAPE))


@pytest.mark.parametrize(
    ("gates", "tokens", "dim"),
    [
        (torch.empty(24, device="meta"), torch.empty(SHAPE, device="meta"), 1),
        (torch.empty(50, 1, device="meta"), torch.empty(SHAPE, device="meta"), 1),
        (torch.empty(1, device="meta"), torch.empty(SHAPE, device="meta"), 2),
        (torch.empty(1, device="meta"), torch.empty(4, 1, 24, device="meta"), 1),
        (torch.empty(1, device="meta"), torch.empty(4, 50, 1, device="meta"), 1),
        (torch.empty(1, device="meta"), torch.empty(SHAPE, device="meta", dtype=torch.half), 1),
        (torch.empty(1), torch.empty(SHAPE), 1),  # the CPU's kernels take any strides
    ],
    ids=["a channel", "a step", "rows", "one step", "one channel", "mixed", "cpu"],
)
def test_others_are_read_where_they_lie(
    gates: torch.Tensor, tokens: torch.Tensor, dim: int
) -> None:
    broadcast = facts_of(gates.expand(tokens.shape))
    assert shape_for_channels(broadcast, facts_of(tokens), dim) is None
    call = make_kernel_call("forward", gates, {"tokens": tokens}, None, dim, False)
    assert call.gates_shape is None
    assert for_channels(gates, tokens, None) is gates


def test_their_gradient_is_summed() -> None:
    both = dict.fromkeys(("states", "states_grad"), torch.empty(SHAPE, device="meta"))
    call = make_kernel_call("backward", gates_of("one", device="meta"), both, None, 1, False)
    fused = call.fused()
    assert fused is not None
    assert fused.sums
