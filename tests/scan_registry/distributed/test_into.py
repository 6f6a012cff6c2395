"""Scans into some channels of larger tensors: the same numbers as a scan of copies, and not a byte beside them."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from scan_registry.distributed import into
from scan_registry.ops import plans
from scan_registry.ops.arguments import Options

SHAPE = (2, 21, 12)  # (batch, time, channels), or with the last two swapped


def tensors(time_last: bool, dtype: torch.dtype, count: int) -> list[Tensor]:
    torch.manual_seed(3)
    made = [torch.rand(SHAPE, dtype=dtype) for _ in range(count)]
    return [each.mT.contiguous() if time_last else each for each in made]


def piece(x: Tensor, time_last: bool, begin: int = 4, count: int = 5) -> Tensor:
    return x.narrow(1 if time_last else 2, begin, count)


def untouched(x: Tensor, time_last: bool) -> bool:
    """Whether everything beside the piece is still NaN, and nothing within it."""
    inside = torch.zeros_like(x, dtype=torch.bool)
    piece(inside, time_last).fill_(True)
    return bool((x.isnan() ^ inside).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("time_last", "reverse", "packed", "broadcast"), [*product((False, True), repeat=4)]
)
def test_results_lie_where_they_are_wanted(
    dtype: torch.dtype, time_last: bool, reverse: bool, packed: bool, broadcast: bool
) -> None:
    options = Options(-1 if time_last else -2, reverse, True, "auto")
    gates, tokens, grad = tensors(time_last, dtype, 3)
    if broadcast:
        gates = gates[..., :1] if time_last else gates[:, :1]
    bounds = torch.tensor([0, 7, 7, 21]) if packed else None
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    shape = [2, 3, 5] if packed else [2, 5]
    if packed and time_last:
        shape = [2, 5, 3]
    initial, last_grad = (torch.rand(shape, dtype=compute) for _ in range(2))
    own = [piece(each, time_last) for each in (gates, tokens, grad)]

    states = torch.full_like(tokens, torch.nan)
    last = into.forward_into(piece(states, time_last), *own[:2], initial, bounds, options)
    expected, final = plans.forward(*own[:2], initial, bounds, options)
    assert untouched(states, time_last)
    assert torch.equal(piece(states, time_last), expected)
    assert last is not None
    assert final is not None
    assert torch.equal(last, final)

    tokens_grad = torch.full_like(tokens, torch.nan)
    gates_grad = torch.zeros_like(gates) if broadcast else torch.full_like(gates, torch.nan)
    before = into.backward_into(
        *(piece(gates_grad, time_last), piece(tokens_grad, time_last)),
        *(own[0], piece(states, time_last), own[2], initial, last_grad, bounds, options),
        add=broadcast,
    )
    found = plans.backward(
        *(own[0], expected, own[2], initial, last_grad, bounds, options, (True, True, True))
    )
    for given, wanted in zip(
        (piece(gates_grad, time_last), piece(tokens_grad, time_last), before), found, strict=True
    ):
        assert wanted is not None
        # Sums over gates are made in another order where states lie otherwise.
        torch.testing.assert_close(given, wanted)
    assert untouched(tokens_grad, time_last)
    assert broadcast or untouched(gates_grad, time_last)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_only_what_is_wanted_is_written(backend: str) -> None:
    options = Options(-2, False, False, backend)
    gates, tokens, grad = tensors(False, torch.float64, 3)
    states = torch.empty_like(tokens)
    assert into.forward_into(states, gates, tokens, None, None, options) is None
    torch.testing.assert_close(states, plans.forward(gates, tokens, None, None, options)[0])
    for wanted in ((True, False), (False, True), (False, False)):
        gates_grad, tokens_grad = (torch.empty_like(tokens) if want else None for want in wanted)
        known = states if wanted[0] else None
        before = into.backward_into(
            *(gates_grad, tokens_grad, gates, known, grad, None, None, None, options)
        )
        found = plans.backward(
            *(gates, states, grad, None, None, None, options, (True, True, True))
        )
        for given, expected in zip((gates_grad, tokens_grad, before), found, strict=True):
            if given is not None:
                torch.testing.assert_close(given, expected)


def test_gradients_add_up_in_a_wider_dtype() -> None:
    """Also of a piece of one channel, which gates of one channel do not broadcast to."""
    options = Options(-2, False, False, "auto")
    gates, tokens, grad = (each[..., :1].contiguous() for each in tensors(False, torch.bfloat16, 3))
    states, _ = plans.forward(gates, tokens, None, None, options)
    gates_grad = torch.full_like(gates, 1e4, dtype=torch.float32)
    into.backward_into(
        *(gates_grad, None, gates, states, grad, None, None, None, options), add=True
    )
    (found, _, _) = plans.backward(
        *(gates, states, grad, None, None, None, options, (True, False, False))
    )
    assert found is not None
    torch.testing.assert_close(gates_grad, 1e4 + found.float())


@pytest.mark.parametrize("time_last", [False, True])
@pytest.mark.parametrize("shape", [(1, 6, 4), (2, 5, 3), (3, 0, 2)], ids=str)
def test_a_summary_is_written_in_the_order_of_states(
    time_last: bool, shape: tuple[int, ...]
) -> None:
    gates, tokens = (torch.rand(shape, dtype=torch.float64) for _ in range(2))
    if time_last:  # of other memory, with time contiguous
        gates, tokens = (x.mT.contiguous().mT for x in (gates, tokens))
    options = Options(-2, False, False, "auto")
    row = torch.full((2 * shape[0] * shape[2],), torch.nan, dtype=torch.float64)
    into.summary_into(row, gates, tokens, options)
    expected = plans.summary(gates, tokens, options)
    torch.testing.assert_close(row, torch.cat([each.reshape(-1) for each in expected]))


def test_a_part_without_steps_passes_its_state_on() -> None:
    options = Options(-2, False, True, "auto")
    empty = torch.empty(2, 0, 12)
    state = torch.rand(2, 12)
    last = into.forward_into(empty, empty, empty, state, None, options)
    assert last is not None
    assert torch.equal(last, state)


@pytest.mark.parametrize("time_last", [False, True])
def test_nothing_is_copied(time_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel writes into the larger tensor: the scan that makes tensors of its own is not called."""

    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(plans, "forward", refuse)
    monkeypatch.setattr(plans, "backward", refuse)
    options = Options(-1 if time_last else -2, False, True, "auto")
    # Of sizes that no other test has a plan for.
    gates, tokens, grad, states, first, second = (
        piece(each[:1], time_last) for each in tensors(time_last, torch.float32, 6)
    )
    into.forward_into(states, gates, tokens, None, None, options)
    into.backward_into(first, second, gates, states, grad, None, None, None, options)
