"""``selective_scan`` on its own CUDA kernels, emulated on the CPU: what the operator passes is what they take."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from emulated_selective_scan import Play, player
from in_turn import in_turn
from planning import forget_plans
from selective_gradients import of_reference
from torch import Tensor

from scan_registry import selective_scan
from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.selective_scan import reference
from scan_registry.kernels.selective_scan.op import plans
from scan_registry.kernels.selective_scan.op.arguments import Arguments, Options

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, cuda_emulator: ModuleType, tmp_path: Path) -> Play:
    return player(monkeypatch, cuda_emulator, tmp_path)


BOUNDS = torch.tensor([0, 0, 9, 41, 70])


def drawn(
    dtype: torch.dtype, *, groups: int = 2, rank: int = 4, packed: bool = False, channels: int = 12
) -> list[Tensor]:
    """u, delta, A, B, C, D, z, delta_bias, initial_state."""
    torch.manual_seed(0)
    batch, time, states = 2, 70, 5

    def new(*sizes: int) -> Tensor:
        return torch.randn(sizes).to(dtype)

    projections = [new(batch, groups, states, time), new(batch, groups, states, time)]
    if rank == 3:
        projections = [x[:, 0] for x in projections]
    between = (len(BOUNDS) - 1,) if packed else ()
    return [
        new(batch, channels, time),
        new(batch, channels, time),
        -torch.rand(channels, states),
        *projections,
        torch.randn(channels),
        new(batch, channels, time),
        torch.rand(channels) - 2,
        torch.randn(batch, *between, channels, states),
    ]


def results(
    tensors: list[Any], bounds: Tensor | None, function: Any, final: bool = True
) -> list[Tensor]:
    """Outputs and gradients."""
    leaves = [None if t is None else t.clone().requires_grad_() for t in tensors]
    made = function(leaves, bounds)[: 1 + final]
    used = [t for t in leaves if t is not None]
    torch.manual_seed(1)
    grads = [torch.randn(x.shape).to(x.dtype) for x in made]
    return [x.detach() for x in (*made, *torch.autograd.grad(made, used, grads))]


def call(leaves: list[Any], bounds: Any) -> Any:
    more: Any = {"cu_seqlens": bounds, "return_final_state": True}
    return selective_scan(*leaves[:8], True, leaves[8], **more)


def right(leaves: list[Any], bounds: Any) -> Any:
    return reference.forward(*leaves[:8], True, leaves[8], bounds)


def compare(
    found: list[Tensor], tensors: list[Any], bounds: Any, dtype: torch.dtype, **how: Any
) -> None:
    wide = [None if t is None else t.double() for t in tensors]
    expected = results(wide, bounds, right, **how)
    assert len(found) == len(expected)
    for place, (out, wanted) in enumerate(zip(found, expected, strict=True)):
        assert out.shape == wanted.shape
        assert relative_error(out, wanted) <= TOLERANCE[dtype], place


FORMS: dict[str, dict[str, Any]] = {
    "groups": {},
    "no groups": {"rank": 3, "groups": 1},
    "several CTAs of a group": {"rank": 3, "groups": 1, "channels": 150},
    "packed": {"packed": True},
    "parts": {"parts": 2},
    "plain": {"plain": True},
    "one shares": {"one": True},
}


@pytest.mark.parametrize(
    ("dtype", "name", "quickly"), in_turn([*TOLERANCE], [*FORMS], [True, False]), ids=str
)
def test_matches_plain_torch(
    play: Play, name: str, dtype: torch.dtype, quickly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the fast plan and by the general one."""
    form = dict(FORMS[name])
    parts, plain, one = form.pop("parts", 1), form.pop("plain", False), form.pop("one", False)
    tensors: list[Any] = drawn(dtype, **form)
    if plain:
        tensors[5:] = [None] * 4
    if one:  # B is every channel's
        tensors[3] = tensors[3][:, :1]
    bounds = BOUNDS if form.get("packed") else None
    used = play(parts, quickly)
    plans = forget_plans(monkeypatch, "selective_scan", quickly)
    for _ in range(2):  # planned, and found again
        compare(results(tensors, bounds, call), tensors, bounds, dtype)
    adjoint = ["adjoint"] if parts > 1 else []
    assert used == [*adjoint, "forward", *adjoint, "backward"] * 2
    assert [[plan is not None for plan in each] for each in plans] == [[True] * quickly] * 2


def test_only_what_is_wanted(play: Play) -> None:
    play()
    tensors = drawn(torch.float32)
    for place in range(9):
        leaf = tensors[place].clone().requires_grad_()
        given = [*tensors[:place], leaf, *tensors[place + 1 :]]
        (found,) = torch.autograd.grad(call(given, None)[0].sum(), leaf)
        wide = [t.detach().double() for t in given]
        wide[place].requires_grad_()
        (wanted,) = torch.autograd.grad(right(wide, None)[0].sum(), wide[place])
        assert relative_error(found, wanted) <= 2e-6, place


def test_nothing_is_kept_that_nobody_needs(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, ...]] = []
    play()
    prepared = plans._prepared

    def watched(*args: Any) -> Any:
        run: Any = prepared(*args)

        def watch(tensors: Mapping[str, Any]) -> None:
            seen.append(tuple(tensors.get(n) is not None for n in ("final_state", "checkpoints")))
            run(tensors)

        return watch

    monkeypatch.setattr(plans, "_prepared", watched)
    tensors = drawn(torch.float32)
    selective_scan(*tensors[:5])
    selective_scan(*tensors[:5], return_final_state=True)
    selective_scan(tensors[0].requires_grad_(), *tensors[1:5])
    assert seen == [(False, False), (True, False), (False, True)]


def test_what_the_fast_path_leaves_to_others(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    play()
    plans, _ = forget_plans(monkeypatch, "selective_scan")
    tensors = drawn(torch.float32)
    tensors[1] = tensors[1].abs()  # step sizes, so that states decay
    with pytest.raises(TypeError, match=r"A has dtype torch\.float64"):
        selective_scan(*tensors[:2], tensors[2].double(), *tensors[3:5])
    with pytest.raises(ValueError, match="backend is 'fast'"):
        selective_scan(*tensors[:5], backend="fast")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="delta_softplus is 1; it must be a bool"):
        selective_scan(*tensors[:5], delta_softplus=1)  # type: ignore[arg-type]
    assert not plans
    narrow = [tensors[0], tensors[1].bfloat16(), *tensors[2:5]]
    wide = [t.double() for t in narrow]
    assert relative_error(selective_scan(*narrow), reference.forward(*wide)[0]) <= 2e-6
    wide, bounds = [t.double() for t in tensors[:5]], BOUNDS.int()
    out = selective_scan(*tensors[:5], cu_seqlens=bounds)
    assert relative_error(out, reference.forward(*wide, cu_seqlens=bounds)[0]) <= 2e-6
    # Both are cast first, which is planned; not so one that gets a dimension, too.
    assert {plan.__qualname__ for plan in plans} == {"casting.<locals>.plan"}
    plans.clear()
    both = tensors[3][:, 0].bfloat16(), tensors[4][:, 0]
    wide = [t.double() for t in (*tensors[:3], *both)]
    out = selective_scan(*tensors[:3], *both)
    assert relative_error(out, reference.forward(*wide)[0]) <= 2e-6
    assert plans == [None]


def test_training_after_a_change_of_an_input_is_refused(play: Play) -> None:
    play()
    tensors = [t.requires_grad_() for t in drawn(torch.float32)]
    out, _ = call(tensors, None)
    with torch.no_grad():
        tensors[3].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_saved_tensors_that_a_hook_lays_otherwise(play: Play) -> None:
    play()
    tensors = drawn(torch.float32)
    tensors[0] = tensors[0].transpose(1, 2).contiguous().transpose(1, 2)

    def hooked(leaves: list[Any], bounds: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.contiguous()):
            return call(leaves, bounds)

    def laid(leaves: list[Any], bounds: Any) -> Any:
        return hooked([leaves[0].transpose(1, 2).contiguous().transpose(1, 2), *leaves[1:]], bounds)

    compare(results(tensors, None, laid), tensors, None, torch.float32)


# --- The backward pass in two halves ----------------------------------------------------------


def composed_back(adjoints: plans.Adjoints, A: Tensor, after: Tensor) -> Tensor:
    """The gradient of the state before all parts, from that of the state after them."""
    for part in reversed(range(adjoints.sizes.shape[1])):
        decay = torch.exp(adjoints.sizes[:, part, :, None] * A)
        after = adjoints.gradients[:, part] + decay * after
    return after


@pytest.mark.parametrize(
    ("dtype", "layout", "sizes"),
    in_turn(
        [*TOLERANCE],
        ["time_last", "channel_last"],
        [(1, 70, False), (3, 96, True), (4, 129, False), (2, 7, True)],
    ),
    ids=str,
)
def test_adjoints_of_all_parts(
    play: Play, dtype: torch.dtype, layout: str, sizes: tuple[int, int, bool]
) -> None:
    """They say what the gradient of the state before all steps is, for any gradient of the state after them. The backward pass
    that is handed them does not compute them again."""
    torch.manual_seed(4)
    parts, time, one = sizes  # whether all channels share one B
    batch, channels, states = 2, 16, 5
    sequences = [torch.randn(batch, channels, time).to(dtype) for _ in range(4)]
    if layout == "channel_last":
        sequences = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in sequences]
    u, delta, z, out_grad = sequences
    B, C = (torch.randn(batch, 1 + (not one) * n, states, time).to(dtype) for n in range(2))
    given = Arguments(
        *(u, delta, -torch.rand(channels, states), B, C, torch.randn(channels), z),
        *(torch.rand(channels) - 2, torch.randn(batch, channels, states), None),
    )
    options, after = Options(True), torch.randn(batch, channels, states)
    used = play(parts)
    for _ in range(2):  # planned, and found again
        checkpoints = plans.forward(given, options, True).checkpoints
        adjoints = plans.adjoint(given, out_grad, options)
        assert adjoints is not None
        wanted = (True,) * 9
        found = plans.backward(given, checkpoints, out_grad, after, options, wanted, adjoints)
    earlier = ["adjoint"] if parts > 1 else []  # of the forward pass
    assert used == [*earlier, "forward", "adjoint", "backward"] * 2
    assert adjoints.gradients.shape == (batch, parts, channels, states)

    wide = [None if t is None else t.double() for t in given.differentiable]
    with torch.no_grad():
        ends = out_grad.double(), after.double()
        expected = of_reference(wide, True, None, *ends, wanted)
    for place, (mine, right_one) in enumerate(zip(found, expected, strict=True)):
        assert mine is not None
        assert right_one is not None
        assert relative_error(mine, right_one) <= TOLERANCE[dtype], place
    before = composed_back(adjoints, given.A, after)
    # In 16 bits, of gates by the GPU's approximation of 2^x.
    assert relative_error(before, expected[8]) <= (4e-6 if dtype == torch.float32 else 2e-5)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("layout", ["time_last", "channel_last"])
@pytest.mark.parametrize(("parts", "time"), [(1, 70), (3, 96), (4, 129), (2, 7)])
@pytest.mark.parametrize("biased", [False, True])
def test_sums_of_step_sizes_alone(
    play: Play, dtype: torch.dtype, layout: str, parts: int, time: int, biased: bool
) -> None:
    """The kernel ``adjoint`` with no states reads the step sizes and nothing else."""
    torch.manual_seed(5)
    batch, channels = 2, 24
    delta = torch.randn(batch, channels, time).to(dtype)
    if layout == "channel_last":
        delta = delta.transpose(1, 2).contiguous().transpose(1, 2)
    unread = torch.full_like(delta, torch.nan)
    projection = torch.full((batch, 1, 5, time), torch.nan).to(dtype)
    bias = torch.rand(channels) - 2 if biased else None
    rates, start = torch.full((channels, 5), torch.nan), torch.full((batch, channels, 5), torch.nan)
    given = Arguments(unread, delta, rates, projection, projection, None, unread, bias, start, None)
    used = play(parts)
    for softplus in (True, False):
        found = plans.sizes(given, Options(softplus))
        assert found is not None
        assert found.shape == (batch, channels)
        wide = delta.double() if bias is None else delta.double() + bias.double()[:, None]
        expected = (torch.nn.functional.softplus(wide) if softplus else wide).sum(-1)
        assert relative_error(found, expected) <= (2e-7 if dtype == torch.float32 else 2e-5)
    assert used == ["adjoint"] * 2
