"""``causal_conv1d`` on a GPU, through the public functions, against the float64 reference and among torch's own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from graphs import recorded
from torch import Tensor

from scan_registry import causal_conv1d, causal_conv1d_update
from scan_registry.kernels.causal_conv1d import reference

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
NAMES = ("x", "weight", "bias", "initial_state")

#: Batch, channels, time; and width.
SIZES = (
    ((2, 64, 256), 4),
    ((3, 40, 1000), 3),
    ((1, 33, 613), 4),
    ((2, 24, 7), 8),
    ((5, 17, 2), 2),
    ((2, 768, 2048), 4),
)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "silu": {"bias": True, "activation": "silu"},
    "states": {"bias": True, "state": True, "final": True, "activation": "silu"},
    "indexed": {"bias": True, "indexed": True, "state": True, "final": True, "activation": "silu"},
    "packed": {"sequences": 5, "state": True, "final": True},
    "packed silu": {"bias": True, "sequences": 9, "activation": "silu"},
}


def drawn(
    sizes: tuple[int, int, int], width: int, dtype: torch.dtype, last: bool, **which: Any
) -> dict[str, Any]:
    """The function's arguments; time is contiguous where it is ``last``."""
    batch, channels, time = sizes
    rows = batch = 1 if "sequences" in which else batch
    x = torch.randn((batch, channels, time) if last else (batch, time, channels), device="cuda")
    given: dict[str, Any] = {
        "x": (x if last else x.transpose(1, 2)).to(dtype),
        "weight": torch.randn(channels, width, device="cuda") / width**0.5,
        "activation": which.get("activation"),
        "return_final_state": "final" in which,
    }
    if "bias" in which:
        given["bias"] = torch.randn(channels, device="cuda")
    if "sequences" in which:
        rows = which["sequences"]
        inner = torch.randint(0, time + 1, (rows - 1,)).sort().values.tolist()
        given["cu_seqlens"] = torch.tensor([0, *inner, time], device="cuda")
    if "indexed" in which:
        changes = (torch.rand(batch, time) < 0.1).cumsum(1) - 1
        given["seq_idx"] = changes.int().cuda()
    if "state" in which:
        given["initial_state"] = torch.randn(rows, channels, width - 1, device="cuda").to(dtype)
    for name in NAMES:
        if name in given:
            given[name].requires_grad_()
    return given


def step(given: dict[str, Any], weights: list[Tensor], **options: Any) -> list[Tensor]:
    """Outputs and gradients."""
    found = causal_conv1d(**given, **options)
    outputs = found if isinstance(found, tuple) else (found,)
    leaves = [given[name] for name in NAMES if name in given]
    return [*outputs, *torch.autograd.grad(outputs, leaves, weights[: len(outputs)])]


def gradients_of_outputs(given: dict[str, Any]) -> list[Tensor]:
    found = causal_conv1d(**given)
    outputs = found if isinstance(found, tuple) else (found,)
    return [torch.randn_like(each) for each in outputs]


def expected(given: dict[str, Any], weights: list[Tensor]) -> list[Tensor]:
    """Of ``step``, by the reference in float64."""
    wide = {
        n: t.detach().double() if t.is_floating_point() else t
        for n, t in given.items()
        if isinstance(t, Tensor)
    }
    runs = reference.Runs(wide.get("seq_idx"), wide.get("cu_seqlens"))
    filters = wide["weight"], wide.get("bias"), wide.get("initial_state")
    silu, final = given["activation"] is not None, given["return_final_state"]
    y, last = reference.forward(wide["x"], *filters, runs, silu, final)
    ends = weights[1].double() if final else None
    grads = reference.backward(wide["x"], *filters, weights[0].double(), ends, runs, silu)
    of = {"x": grads.x, "weight": grads.weight, "bias": grads.bias, "initial_state": grads.state}
    return [y, *([] if last is None else [last]), *(of[n] for n in NAMES if n in given)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("last", [True, False], ids=["time last", "channel last"])
@pytest.mark.parametrize("name", OPTIONS)
def test_results_and_gradients_and_the_same_in_every_run(
    name: str, last: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    for sizes, width in SIZES:
        given = drawn(sizes, width, dtype, last, **OPTIONS[name])
        weights = gradients_of_outputs(given)
        found = step(given, weights, backend="cuda")
        for one, right in zip(found, expected(given, weights), strict=True):
            error = (one.double() - right).norm()
            assert error <= TOLERANCE[dtype] * right.norm(), (sizes, width)
        assert all(map(torch.equal, found, step(given, weights, backend="cuda")))


@pytest.mark.parametrize("last", [True, False], ids=["time last", "channel last"])
@pytest.mark.parametrize("name", OPTIONS)
def test_graph_capture_of_a_training_step(name: str, last: bool) -> None:
    given = drawn((2, 136, 515), 4, torch.bfloat16, last, **OPTIONS[name])
    weights = gradients_of_outputs(given)
    run = partial(step, given, weights)
    graph, captured = recorded(run)
    with torch.no_grad():
        for n in NAMES:
            if n in given:
                given[n].copy_(torch.randn_like(given[n]))
    graph.replay()
    assert all(map(torch.equal, captured, run()))


@pytest.mark.parametrize("last", [True, False], ids=["time last", "channel last"])
def test_compiled_as_a_whole(last: bool) -> None:
    given = drawn((2, 64, 200), 4, torch.bfloat16, last, **OPTIONS["states"])
    weights = gradients_of_outputs(given)
    run = torch.compile(partial(causal_conv1d, **given), fullgraph=True)
    leaves = [given[n] for n in NAMES]
    found = run()
    grads = torch.autograd.grad(found, leaves, weights)
    for one, other in zip([*found, *grads], step(given, weights), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("last", [True, False], ids=["time last", "channel last"])
def test_operators_are_as_they_say(last: bool) -> None:
    given = drawn((2, 24, 40), 4, torch.float32, last, **OPTIONS["states"])
    tensors = [given[n] for n in NAMES]
    ops = torch.ops.scan_registry
    torch.library.opcheck(ops.causal_conv1d.default, (*tensors, None, None, True, True, "auto"))
    grads = [t.detach() for t in gradients_of_outputs(given)]
    given_grads = (*tensors, None, None, *grads, True, "auto", [True] * 4)
    torch.library.opcheck(ops.causal_conv1d_backward.default, given_grads)
    x, state = torch.randn(3, 24, 2, device="cuda"), torch.randn(3, 24, 5, device="cuda")
    filters = [t.detach() for t in tensors[1:3]]
    torch.library.opcheck(
        ops.causal_conv1d_update.default, (x, state, *filters, None, None, True, "auto")
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("ring", [False, True], ids=["", "ring"])
@pytest.mark.parametrize("rows", [False, True], ids=["", "rows"])
def test_updates(rows: bool, ring: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for batch, channels, steps, width, length in (
        (1, 5, 1, 4, 3), (64, 2048, 1, 4, 4), (7, 33, 3, 3, 9), (2, 100, 12, 8, 7), (3, 65, 1, 2, 1),
        (6, 260, 1, 4, 3), (5, 256, 1, 4, 8), (3, 256, 1, 4, 3),
    ):  # fmt: skip
        x = torch.randn(batch, channels, steps, device="cuda").to(dtype)
        state = torch.randn(batch + 3, length, channels, device="cuda").to(dtype).transpose(1, 2)
        if batch % 2 == 0:
            state = state.contiguous()
        weight, bias = (
            torch.randn(channels, width, device="cuda"),
            torch.randn(channels, device="cuda"),
        )
        positions = indices = None
        if ring:
            positions = torch.randint(0, 99, (batch,), dtype=torch.int32, device="cuda")
        if rows:
            indices = torch.randperm(batch + 3, device="cuda")[:batch].int()
            indices[0] = -1
        else:
            state = state[:batch]
        after = state.double()
        wide = x.double(), after, weight.double(), bias.double()
        right = reference.update(*wide, reference.UpdateRows(positions, indices), True)
        y = causal_conv1d_update(x, state, weight, bias, "silu", positions, indices, backend="cuda")
        assert (y.double() - right).norm() <= TOLERANCE[dtype] * right.norm()
        assert torch.equal(state.double(), after)


def test_an_update_is_one_launch() -> None:
    """In a CUDA graph, too, which goes on with what the states hold when it is replayed."""
    x, state = torch.randn(8, 512, device="cuda"), torch.zeros(8, 512, 4, device="cuda")
    weight, bias = torch.randn(512, 4, device="cuda"), torch.randn(512, device="cuda")
    update = partial(causal_conv1d_update, x, state, weight, bias, "silu")
    update()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        update()
        torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert kernels == ["causal_conv1d_update"]
    graph, captured = recorded(update)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        kept = state.clone()
        graph.replay()
        right = causal_conv1d_update(x, kept, weight, bias, "silu")
        assert torch.equal(captured, right)
        assert torch.equal(state, kept)
