"""``selective_state_update`` on a GPU, through the public function, against the float64 reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from scan_registry import linear_scan_step, selective_state_update
from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.selective_state_update import reference

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
TENSORS = ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias")
#: Batch, channels with their heads, states, groups; whether there is one number of A, dt, D and dt_bias for each head.
SHAPES: tuple[tuple[int, tuple[int, ...], int, int, bool], ...] = (
    (3, (5120,), 16, 0, False),
    (5, (64, 64), 128, 1, True),
    (2, (8, 64), 128, 8, True),
    (4, (7,), 5, 0, False),
    (2, (6, 3), 256, 3, False),
    (64, (1536,), 16, 0, False),
)


def drawn(
    batch: int,
    channels: tuple[int, ...],
    states: int,
    groups: int,
    tied: bool,
    dtype: torch.dtype,
    of_state: torch.dtype = torch.float32,
) -> dict[str, Any]:
    torch.manual_seed(0)
    of_projection = (batch, groups, states) if groups else (batch, states)
    given = {
        "state": torch.randn(batch, *channels, states).to(of_state),
        "x": torch.randn(batch, *channels).to(dtype),
        "dt": (torch.randn(batch, *channels) - 3).to(dtype),
        "A": -torch.rand(*channels, states) * 8,
        "B": torch.randn(of_projection).to(dtype),
        "C": torch.randn(of_projection).to(dtype),
        "D": torch.randn(channels),
        "z": torch.randn(batch, *channels).to(dtype),
        "dt_bias": torch.rand(channels) / 2,
    }
    given = {name: tensor.cuda() for name, tensor in given.items()}
    if tied:
        given["A"] = given["A"][:, :1, :1].expand(*channels, states)
        for name in ("dt", "D", "dt_bias"):
            given[name] = given[name][..., :1].expand(given[name].shape)
    return given


def expected(given: dict[str, Any], indices: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The output and the state after it, in float64."""
    wide = [given[name].double() for name in TENSORS]
    return reference.step(*wide, dt_softplus=True, indices=indices), wide[0]


@pytest.mark.parametrize("narrow", [False, True], ids=["state float32", "state as inputs"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_the_reference(shape: Any, dtype: torch.dtype, narrow: bool) -> None:
    given = drawn(*shape, dtype, dtype if narrow else torch.float32)
    out, state = expected(given)
    found = selective_state_update(**given, dt_softplus=True)
    assert relative_error(found, out) <= TOLERANCE[dtype]
    assert relative_error(given["state"], state) <= TOLERANCE[given["state"].dtype]


def test_rows_by_number() -> None:
    given = drawn(4, (64,), 16, 0, False, torch.float32)
    given["state"] = torch.randn(9, 64, 16, device="cuda")
    before, indices = given["state"].clone(), torch.tensor([8, -1, 3, 0], device="cuda")
    out, state = expected(given, indices)
    found = selective_state_update(**given, dt_softplus=True, state_batch_indices=indices)
    assert relative_error(found, out) <= TOLERANCE[torch.float32]
    assert relative_error(given["state"], state) <= TOLERANCE[torch.float32]
    assert (found[1] == 0).all()
    others = torch.tensor([1, 2, 4, 5, 6, 7], device="cuda")
    assert torch.equal(given["state"][others], before[others])


def test_graphs_record_it() -> None:
    given = drawn(8, (256,), 16, 0, False, torch.bfloat16)
    before = given["state"].clone()
    outputs = [selective_state_update(**given, dt_softplus=True) for _ in range(3)]
    after = given["state"].clone()
    given["state"].copy_(before)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = selective_state_update(**given, dt_softplus=True)
    assert torch.equal(given["state"], before)
    for each in outputs:
        graph.replay()
        assert torch.equal(out, each)
    assert torch.equal(given["state"], after)


@pytest.mark.parametrize("narrow", [False, True])
def test_linear_scan_step_is_one_launch(narrow: bool) -> None:
    """Rounded once, for states of the inputs' dtype and wider ones."""
    dtype = torch.bfloat16 if narrow else torch.float32
    state = torch.randn(64, 512, device="cuda").to(dtype)
    gate, token = torch.rand(2, 64, 512, device="cuda").bfloat16()
    exact = (gate.double() * state.double() + token.double()).float().to(dtype)
    linear_scan_step(state.clone(), gate, token)  # what is loaded the first time
    copy = state.clone()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        linear_scan_step(copy, gate, token)
        torch.cuda.synchronize()
    launched = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(launched) == 1
    assert (copy != exact).sum() <= 2
