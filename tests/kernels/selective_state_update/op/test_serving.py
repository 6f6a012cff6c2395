"""``selective_state_update`` as servers call it, on the CPU: pools of slots, several tokens of a sequence, drafts of which
some are accepted, and stochastic rounding. Against a loop over sequences and tokens in float64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from scan_registry import selective_state_update
from scan_registry.kernels.selective_state_update import reference

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float64: 1e-12}
TENSORS = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias")


def token_inputs(tokens: int, channels: tuple[int, ...], states: int) -> dict[str, Any]:
    """All arguments but the state and slots."""
    return {
        "x": torch.randn(tokens, *channels),
        "dt": torch.rand(tokens, *channels) / 2,
        "A": -torch.rand(*channels, states) * 4,
        "B": torch.randn(tokens, 1, states),
        "C": torch.randn(tokens, 1, states),
        "D": torch.randn(channels),
        "z": torch.randn(tokens, *channels),
        "dt_bias": torch.rand(channels),
    }


def one_step(state: Tensor, call: dict[str, Any], token: int) -> tuple[Tensor, Tensor]:
    """The states of one sequence after a token, and the output, in float64."""
    x, dt, A, B, C, D, z, bias = (call[name].double() for name in TENSORS)
    size = torch.nn.functional.softplus(dt[token] + bias)
    new = torch.exp(size[..., None] * A) * state + (size * x[token])[..., None] * B[token, 0]
    gate = z[token] * torch.sigmoid(z[token])
    return new, ((new * C[token, 0]).sum(-1) + D * x[token]) * gate


def loop(state: Tensor, call: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the pool that is read and the pool that is written, one sequence and token after the other."""
    pad = call.get("pad_slot_id", -1)
    slots, targets = call.get("state_batch_indices"), call.get("dst_state_batch_indices")
    bounds, accepted = call.get("cu_seqlens"), call.get("num_accepted_tokens")
    read = state.double()
    written = read.clone() if call.get("dst_state") is None else call["dst_state"].double()
    out = torch.zeros_like(call["x"], dtype=torch.float64)
    batch = len(out) if bounds is None else len(bounds) - 1

    def is_slot(slot: int, pool: Tensor) -> bool:
        return 0 <= slot < len(pool) and slot != pad

    for b in range(batch):
        own = slots[b] if slots is not None else torch.tensor(b)
        column = 0 if accepted is None else max(int(accepted[b]) - 1, 0)
        first = int(own if own.dim() == 0 else own[column])
        begin, end = (b, b + 1) if bounds is None else (int(bounds[b]), int(bounds[b + 1]))
        if not is_slot(first, read):
            continue
        states = read[first].clone()
        to = own if targets is None else targets[b]
        for token in range(begin, end):
            states, out[token] = one_step(states, call, token)
            t = token - begin
            if (to.dim() == 0 and token + 1 < end) or (to.dim() == 1 and t >= len(to)):
                continue
            slot = int(to if to.dim() == 0 else to[t])
            if is_slot(slot, written):
                written[slot] = states
    return out, read if call.get("dst_state") is not None else written, written


def drawn_slots(first: int, shape: tuple[int, ...], pad: int, dtype: torch.dtype) -> Tensor:
    """Different ones of 20 slots, of which some are none."""
    slots = first + torch.randperm(20)[: torch.Size(shape).numel()].view(shape).to(dtype)
    slots[torch.rand(shape) < 0.15] = pad
    slots[torch.rand(shape) < 0.05] = -7
    return slots


def drawn_call(rng: random.Random, dtype: torch.dtype) -> tuple[Tensor, dict[str, Any]]:
    """A pool, and the other arguments."""
    channels, states = rng.choice([((6,), 5), ((4, 3), 8), ((2, 2), 16)])
    batch, columns, count = rng.randint(1, 5), rng.randint(1, 4), 40
    drafted, moved, targeted, packed = (rng.random() < 0.5 for _ in range(4))
    numbers, pad = rng.choice([torch.int32, torch.int64]), rng.choice([-1, 0, 999])
    lengths = torch.randint(0, 6, (batch,)) if packed else torch.ones(batch, dtype=torch.int64)
    call = token_inputs(int(lengths.sum()), channels, states)
    call = {name: tensor.to(dtype) for name, tensor in call.items()}
    call |= {"dt_softplus": True, "pad_slot_id": pad}
    if packed:
        call["cu_seqlens"] = torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(numbers)
    shape = (batch, columns) if drafted else (batch,)
    call["state_batch_indices"] = drawn_slots(0, shape, pad, numbers)
    if drafted:
        call["num_accepted_tokens"] = torch.randint(0, columns + 1, (batch,)).to(numbers)
    if moved:
        call["dst_state"] = torch.randn(count, *channels, states).to(dtype)
    if targeted or moved:
        shape = shape if drafted else rng.choice([(batch,), (batch, columns)])
        call["dst_state_batch_indices"] = drawn_slots(20, shape, pad, numbers)
    return torch.randn(count, *channels, states).to(dtype), call


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("seed", range(25))
def test_matches_a_loop(seed: int, dtype: torch.dtype) -> None:
    """Drawn pools, slots, lengths and numbers of accepted tokens."""
    torch.manual_seed(seed)
    state, call = drawn_call(random.Random(seed), dtype)
    expected = loop(state, call)
    out = selective_state_update(state, **call)
    pools = (state, state if call.get("dst_state") is None else call["dst_state"])
    for actual, exact in zip((out, *pools), expected, strict=True):
        assert actual.dtype == dtype
        assert (actual.double() - exact).norm() <= TOLERANCE[dtype] * exact.norm().clamp_min(1e-9)


def test_nothing_but_the_chosen_slots_changes() -> None:
    torch.manual_seed(0)
    call = token_inputs(6, (4, 3), 8)
    state, pool = torch.randn(9, 4, 3, 8), torch.randn(7, 4, 3, 8)
    before, pool_before = state.clone(), pool.clone()
    bounds = torch.tensor([0, 4, 4, 6])
    slots = torch.tensor([8, 3, 8])  # of a common prefix
    to = torch.tensor([[1, 2, 3], [4, 5, 6], [-1, 0, 6]])
    call |= {"cu_seqlens": bounds, "state_batch_indices": slots}
    selective_state_update(state, **call, dst_state=pool, dst_state_batch_indices=to)
    assert torch.equal(state, before)
    changed = (pool != pool_before).flatten(1).any(1)
    assert changed.tolist() == [True, True, True, True, False, False, False]


def test_several_tokens_are_as_many_steps() -> None:
    torch.manual_seed(0)
    call = token_inputs(5, (4, 3), 8) | {"dt_softplus": True}
    state = torch.randn(1, 4, 3, 8)
    stepped = state.clone()
    shared = {name: call[name] for name in ("A", "D", "dt_bias", "dt_softplus")}
    steps = [
        selective_state_update(
            stepped, **{n: call[n][t : t + 1] for n in ("x", "dt", "B", "C", "z")}, **shared
        )
        for t in range(5)
    ]
    out = selective_state_update(state, **call, cu_seqlens=torch.tensor([0, 5]))
    torch.testing.assert_close(out, torch.cat(steps))
    torch.testing.assert_close(state, stepped)


def test_drafts_of_which_some_are_accepted_continue_as_if_there_had_been_no_others() -> None:
    """Three drafted tokens of each sequence; the next call starts after those accepted, with no copy of any state."""
    torch.manual_seed(0)
    accepted, batch, drafts = torch.tensor([1, 3, 2]), 3, 3
    slots = torch.randperm(batch * drafts).view(batch, drafts)
    state = torch.randn(batch * drafts, 4, 3, 8)
    alone = state[slots[:, 0]].clone()
    first, second = token_inputs(9, (4, 3), 8), token_inputs(9, (4, 3), 8)
    second |= {name: first[name] for name in ("A", "D", "dt_bias")}
    bounds = torch.arange(batch + 1) * drafts
    served: dict[str, Any] = {"state_batch_indices": slots, "cu_seqlens": bounds}
    ones = torch.ones(batch, dtype=torch.int64)
    selective_state_update(state, **first, **served, num_accepted_tokens=ones)
    out = selective_state_update(state, **second, **served, num_accepted_tokens=accepted)
    for b, count in enumerate(accepted.tolist()):
        tokens = {
            n: torch.cat([first[n][b * drafts :][:count], second[n][b * drafts :][:drafts]])
            for n in ("x", "dt", "B", "C", "z")
        }
        shared = {name: first[name] for name in ("A", "D", "dt_bias")}
        length = torch.tensor([0, count + drafts])
        whole = selective_state_update(alone[b : b + 1], **tokens, **shared, cu_seqlens=length)
        torch.testing.assert_close(out[b * drafts :][:drafts], whole[count:])
        torch.testing.assert_close(state[slots[b, -1]], alone[b])


# --- Stochastic rounding ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_at_random_is_right_in_the_mean(dtype: torch.dtype) -> None:
    """To one of the two neighbours, from the largest numbers to the smallest and below zero."""
    torch.manual_seed(0)
    sizes = torch.tensor([3e4, 1.0, 1e-3, 7e-5, 5e-5, 2e-6, 1e-7, 0.0])
    exact = (torch.randn(8, 4, 16).sign() * sizes.view(-1, 1, 1)) * (1 + torch.rand(8, 4, 16))
    slots, draws = torch.arange(8), 512
    rounded = torch.stack(
        [
            reference.stochastically_rounded(exact, dtype, torch.tensor([seed]), slots)
            for seed in range(draws)
        ]
    )
    assert torch.equal(rounded.to(dtype).float(), rounded)
    nearest = exact.to(dtype).float()
    gap = (rounded.amax(0) - rounded.amin(0)).double()
    assert (rounded.amin(0) <= exact).all()
    assert (rounded.amax(0) >= exact).all()
    assert (gap > 0).sum() > 0.9 * (nearest != exact).sum()
    off = (rounded.double().mean(0) - exact.double()) / gap.clamp_min(1e-30)
    assert off.abs().max() < 6 * 0.5 / draws**0.5
    assert off.mean().abs() < 6 * 0.5 / (draws * off.numel()) ** 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_leaves_numbers_of_the_dtype_and_what_is_no_number(dtype: torch.dtype) -> None:
    exact = torch.tensor(
        [[[0.0, -0.0, 1.5, -(2.0**-14), 2.0**-20, torch.inf, -torch.inf, torch.nan]]]
    )
    seed, slot = torch.tensor([5]), torch.tensor([0])
    rounded = reference.stochastically_rounded(exact, dtype, seed, slot)
    torch.testing.assert_close(rounded, exact, rtol=0, atol=0, equal_nan=True)


def test_rounding_depends_on_the_seed_the_slot_and_nothing_else() -> None:
    torch.manual_seed(0)
    call = token_inputs(3, (4, 3), 8)
    state = torch.randn(5, 4, 3, 8).bfloat16()

    def updated(seed: int, slots: list[int], x: Tensor) -> Tensor:
        copy = state[:1].expand(5, -1, -1, -1).clone()
        indices, number = torch.tensor(slots), torch.tensor([seed])
        selective_state_update(
            copy, **{**call, "x": x}, state_batch_indices=indices, rand_seed=number
        )
        return copy

    same = {name: call[name][:1].expand_as(call[name]) for name in ("x", "dt", "B", "C")}
    call |= same
    one = updated(1, [0, 1, 2], call["x"])
    assert torch.equal(one, updated(1, [2, 0, 1], call["x"]))
    assert not torch.equal(one[0], one[1])
    assert not torch.equal(one, updated(2, [0, 1, 2], call["x"]))
    assert not torch.equal(one, updated(1 + 2**32, [0, 1, 2], call["x"]))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_calls_in_which_no_sequence_has_a_slot(
    dtype: torch.dtype, packed: bool, device: str
) -> None:
    state = torch.randn(5, 4, 3, 8, device=device).to(dtype)
    before, call = state.clone(), token_inputs(3, (4, 3), 8)
    call["state_batch_indices"] = torch.tensor([-1, 2, -9])
    if packed:
        call["cu_seqlens"] = torch.tensor([0, 2, 2, 3])
    if dtype == torch.bfloat16:
        call["rand_seed"] = torch.tensor([3])
    call = {name: tensor.to(device) for name, tensor in call.items()}
    assert (selective_state_update(state, **call, pad_slot_id=2) == 0).all()
    assert torch.equal(state, before)


def test_rounding_where_no_state_is_written() -> None:
    """A batch of padding, and drafts whose states are not wanted: outputs are there, and no slot changes."""
    state, call = torch.randn(3, 4, 3, 8).bfloat16(), token_inputs(2, (4, 3), 8)
    before, seed, none = state.clone(), torch.tensor([1]), torch.tensor([-1, -1])
    read = {"state_batch_indices": torch.tensor([0, 2])}
    expected = selective_state_update(state.clone(), **call, **read)
    rows = {**read, "dst_state_batch_indices": none}
    out = selective_state_update(state, **call, **rows, rand_seed=seed)
    torch.testing.assert_close(out, expected)
    out = selective_state_update(state, **call, state_batch_indices=none, rand_seed=seed)
    assert (out == 0).all()
    assert torch.equal(state, before)


def test_rounding_at_random_keeps_changes_that_rounding_to_nearest_loses() -> None:
    """A state near 1 that gains a thousandth in each of many steps."""
    state = torch.ones(1, 64, 1).bfloat16()
    nearest = state.clone()
    x, one = torch.full((1, 64), 1e-3), torch.ones(1, 64)
    shape = torch.ones(1, 1)
    for seed in range(500):
        for copy, number in ((state, torch.tensor([seed])), (nearest, None)):
            selective_state_update(copy, x, one, torch.zeros(64, 1), shape, shape, rand_seed=number)
    assert (nearest == 1).all()
    assert abs(float(state.float().mean()) - 1.5) < 0.02


# --- In torch ---------------------------------------------------------------------------------


def drafted() -> tuple[Tensor, dict[str, Any]]:
    call = token_inputs(4, (4, 3), 8)
    call |= {
        "state_batch_indices": torch.tensor([[0, 1], [2, 3]]),
        "cu_seqlens": torch.tensor([0, 2, 4]),
        "num_accepted_tokens": torch.tensor([2, 1]),
        "rand_seed": torch.tensor([3]),
        "dst_state": torch.randn(6, 4, 3, 8).bfloat16(),
        "dst_state_batch_indices": torch.tensor([[5, 1], [2, -1]]),
    }
    return torch.randn(5, 4, 3, 8).bfloat16(), call


def test_compiled_as_a_whole() -> None:
    state, call = drafted()

    def called(state: Tensor, **call: Any) -> Tensor:
        return selective_state_update(state, **call) * 1

    compiled = torch.compile(called, fullgraph=True, backend="aot_eager")
    twin = call | {"dst_state": call["dst_state"].clone()}
    torch.testing.assert_close(
        compiled(state.clone(), **call), selective_state_update(state.clone(), **twin)
    )
    assert torch.equal(call["dst_state"], twin["dst_state"])


def test_opcheck() -> None:
    state, call = drafted()
    served = ("dst_state", "dst_state_batch_indices", "rand_seed", "cu_seqlens")
    tensors = (*(call[name] for name in TENSORS), call["state_batch_indices"])
    more = (*(call[name] for name in served), call["num_accepted_tokens"])
    operator = torch.ops.scan_registry.selective_state_update.default
    torch.library.opcheck(operator, (state, *tensors, *more, True, -1, "auto"))


def test_autograd_knows_that_another_pool_changed() -> None:
    state, call = drafted()
    product = call["dst_state"].float() * torch.ones(()).requires_grad_()
    kept = call["dst_state"] * torch.rand_like(call["dst_state"]).requires_grad_()
    selective_state_update(state, **call)
    product.sum().backward()  # a copy in float32
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()
