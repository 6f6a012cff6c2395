"""``selective_state_update`` on a GPU, through the public function, against the float64 reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import recorded
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
    graph, out = recorded(lambda: selective_state_update(**given, dt_softplus=True), warm_ups=0)
    assert torch.equal(given["state"], before)
    for each in outputs:
        graph.replay()
        assert torch.equal(out, each)
    assert torch.equal(given["state"], after)


# --- As servers call it -----------------------------------------------------------------------


def drafted(
    channels: tuple[int, ...], states: int, tied: bool, of_state: torch.dtype
) -> dict[str, Any]:
    """Four sequences of up to three tokens in a pool of 16 slots, and another pool that is written."""
    given = drawn(8, channels, states, 1, tied, torch.bfloat16, of_state)
    given["state"] = torch.randn(16, *channels, states, device="cuda").to(of_state)
    given["dst_state"] = torch.randn(18, *channels, states, device="cuda").to(of_state)
    slots = torch.randperm(16, device="cuda")[:12].view(4, 3)
    targets = torch.randperm(18, device="cuda")[:12].view(4, 3)
    slots[1, 1] = targets[0, 2] = targets[3, 0] = -1
    return given | {
        "state_batch_indices": slots,
        "dst_state_batch_indices": targets,
        "num_accepted_tokens": torch.tensor([3, 2, 0, 1], device="cuda"),
        "cu_seqlens": torch.tensor([0, 3, 5, 5, 8], device="cuda"),
        "dt_softplus": True,
    }


def expected_of(call: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The output and both pools after a call, in float64."""
    wide = {name: t.double() if name in (*TENSORS, "dst_state") else t for name, t in call.items()}
    names = {
        "state_batch_indices": "indices",
        "dst_state_batch_indices": "dst_indices",
        "num_accepted_tokens": "num_accepted",
    }
    out = reference.step(**{names.get(name, name): t for name, t in wide.items()})
    return out, wide["state"], wide["dst_state"]


#: Channels with their heads, states, and whether A, dt, D and dt_bias are one number for each head; the last is misaligned.
SERVED = (((4, 64), 128, True), ((512,), 16, False), ((4, 24), 256, True), ((7,), 5, False))


@pytest.mark.parametrize("of_state", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SERVED, ids=str)
def test_drafts_match_the_reference(shape: Any, of_state: torch.dtype) -> None:
    call = drafted(*shape, of_state)
    expected = expected_of(call)
    out = selective_state_update(**call)
    assert relative_error(out, expected[0]) <= TOLERANCE[torch.bfloat16]
    for pool, exact in zip((call["state"], call["dst_state"]), expected[1:], strict=True):
        assert relative_error(pool, exact) <= TOLERANCE[of_state]


@pytest.mark.parametrize("of_state", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_at_random_is_that_of_the_reference(of_state: torch.dtype) -> None:
    """But where float32 of the GPU and of torch differ in the last bit."""
    call = drafted((4, 64), 128, True, of_state)
    call["rand_seed"] = torch.tensor([2**40 + 17], device="cuda")
    twin = call | {"dst_state": call["dst_state"].clone()}
    selective_state_update(**call)
    selective_state_update(**twin, backend="reference")
    assert (call["dst_state"] != twin["dst_state"]).float().mean() < 1e-3
    nearest = call | {"dst_state": call["dst_state"].clone(), "rand_seed": None}
    selective_state_update(**nearest)
    assert (call["dst_state"] != nearest["dst_state"]).float().mean() > 0.02


@pytest.mark.parametrize("shape", SERVED, ids=str)
def test_slots_change_between_replays_of_a_graph(shape: Any) -> None:
    """And bounds, and numbers of accepted tokens."""
    call = drafted(*shape, torch.float32)
    changing = (
        "state_batch_indices",
        "dst_state_batch_indices",
        "num_accepted_tokens",
        "cu_seqlens",
    )
    graph, out = recorded(lambda: selective_state_update(**call))
    for bounds in ([0, 1, 2, 3, 8], [0, 0, 0, 8, 8], [0, 2, 4, 6, 8]):
        call["state_batch_indices"].copy_(torch.randperm(16, device="cuda")[:12].view(4, 3))
        call["dst_state_batch_indices"].copy_(torch.randperm(18, device="cuda")[:12].view(4, 3))
        call["num_accepted_tokens"].copy_(torch.randint(0, 4, (4,)))
        call["cu_seqlens"].copy_(torch.tensor(bounds))
        expected = expected_of(
            call | {name: call[name].clone() for name in (*changing, "state", "dst_state")}
        )
        graph.replay()
        assert relative_error(out, expected[0]) <= TOLERANCE[torch.bfloat16]
        assert relative_error(call["dst_state"], expected[2]) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("shape", SERVED, ids=str)
def test_nothing_outside_of_the_pools_is_written(shape: Any) -> None:
    """With slots, bounds and numbers that are out of range."""
    call = drafted(*shape, torch.float32)
    memories = []
    for name in ("state", "dst_state"):
        memory = torch.full((3, *call[name].shape), 12345.0, device="cuda")
        call[name] = memory[1].copy_(call[name])
        memories.append(memory)
    call["state_batch_indices"][2:] = torch.tensor([[2**40, 16, -9], [3, 4, 5]], device="cuda")
    call["dst_state_batch_indices"][3] = torch.tensor([18, 2**40, 7], device="cuda")
    call["num_accepted_tokens"].copy_(torch.tensor([3, 2**40, -(2**40), 1]))
    call["cu_seqlens"].copy_(torch.tensor([-(2**40), 3, 4, 5, 2**40]))
    before = [memory.clone() for memory in memories]
    out = selective_state_update(**call)
    assert (out[4] == 0).all()
    assert torch.equal(memories[0], before[0])
    assert torch.equal(memories[1][[0, 2]], before[1][[0, 2]])
    targets = call["dst_state_batch_indices"]
    allowed = {*targets[0].tolist(), *targets[1].tolist(), 7}
    changed = (memories[1][1] != before[1][1]).flatten(1).any(1).nonzero().flatten().tolist()
    assert {*changed} <= allowed
    assert 7 in changed


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
