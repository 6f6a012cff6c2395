"""What ranks do in tests of parts without steps: each operator, with first and second derivatives, against one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from covering import each_pair
from distributed_cases import close, summed
from torch import Tensor

import scan_registry
from scan_registry import distributed

BATCH, CHANNELS, SIZE, STATES, WIDTH, SEQUENCES = 1, 3, 2, 2, 4, 4
#: Lengths of three ranks' parts: without steps on the first, a middle or the last rank, on two, and on all.
CUTS = ((0, 3, 4), (3, 0, 4), (4, 3, 0), (0, 0, 5), (0, 5, 0), (5, 0, 0), (0, 0, 0))


@dataclass(frozen=True)
class Operator:
    """An operator whose tensors have time last.

    timed    shapes of the tensors that are cut along time, without time
    shared   shapes of those that every rank passes whole
    states   shapes of the initial state, of one sequence and of packed ones
    call     calls the function with these tensors, the initial state and options
    ways     options, each for calls of their own
    resets   whether there is ``reset``
    twice    whether there are second derivatives
    """

    timed: Sequence[tuple[int, ...]]
    shared: Sequence[tuple[int, ...]]
    states: tuple[tuple[int, ...], tuple[int, ...]]
    call: Callable[..., tuple[Tensor, Tensor]]
    ways: Sequence[dict[str, Any]] = field(default=({},))
    resets: bool = False
    twice: bool = True


def _selective(function: Any, u: Any, delta: Any, B: Any, C: Any, A: Any, state: Any, **how: Any) -> Any:  # fmt: skip
    return function(u, delta, -A, B, C, initial_state=state, **how)


def _dual(function: Any, x: Any, dt: Any, B: Any, C: Any, A: Any, state: Any, **how: Any) -> Any:
    """Of tensors with time last, in place of second."""
    x, dt, B, C = (t.movedim(-1, 1) for t in (x, dt, B, C))
    results = function(x, dt, -A, B, C, initial_state=state, **how)
    if isinstance(results, tuple):
        return results[0].movedim(1, -1), results[1]
    return results.movedim(1, -1)


_DIRECTIONS: list[dict[str, Any]] = [{}, {"reverse": True}]
_ROWS = BATCH, CHANNELS
_STATES = _ROWS, (*_ROWS, SEQUENCES)
OPERATORS = {
    "linear_scan": Operator(
        *([_ROWS, _ROWS], [], _STATES),
        lambda function, *tensors, **how: function(*tensors, **how),
        *(_DIRECTIONS, True),
    ),
    "gated_scan": Operator(
        *([_ROWS, _ROWS], [], _STATES),
        lambda function, *tensors, **how: function(
            "min_gru", *tensors[:-1], initial_state=tensors[-1], **how
        ),
        *(_DIRECTIONS, True),
    ),
    "selective_scan": Operator(
        [_ROWS, _ROWS, (BATCH, STATES), (BATCH, STATES)],
        [(CHANNELS, STATES)],
        ((*_ROWS, STATES), (BATCH, SEQUENCES, CHANNELS, STATES)),
        _selective,
        twice=False,
    ),
    "ssd_scan": Operator(
        [(BATCH, CHANNELS, SIZE), _ROWS, (BATCH, 1, STATES), (BATCH, 1, STATES)],
        [(CHANNELS,)],
        ((*_ROWS, SIZE, STATES), (BATCH, SEQUENCES, CHANNELS, SIZE, STATES)),
        _dual,
        twice=False,
    ),
    "causal_conv1d": Operator(
        [_ROWS],
        [(CHANNELS, WIDTH), (CHANNELS,)],
        ((*_ROWS, WIDTH - 1), (SEQUENCES, CHANNELS, WIDTH - 1)),
        lambda function, *tensors, **how: function(*tensors[:-1], initial_state=tensors[-1], **how),
        [{"activation": "silu"}, {}],
    ),
}


def check(rank: int, ranks: int, group: Any, name: str, packed: bool, combinations: bool) -> None:
    """Every cut and way of an operator, with and without initial state, final state and resets: each two of these together, or
    all ``combinations``."""
    ways = OPERATORS[name].ways
    columns = CUTS, range(len(ways)), (False, True)
    for lengths, number, every in product(*columns) if combinations else each_pair(*columns):
        way = ways[number]
        try:
            _compare(rank, group, name, lengths, way, packed, every)
        except AssertionError as error:
            raise AssertionError(f"{name} {lengths} {way} every={every}: {error}") from error


def _compare(
    rank: int,
    group: Any,
    name: str,
    lengths: Sequence[int],
    way: dict[str, Any],
    packed: bool,
    every: bool,
) -> None:
    operator, time, first = OPERATORS[name], sum(lengths), sum(lengths[:rank])
    made = torch.Generator().manual_seed(time)

    def draw(*shape: int) -> Tensor:
        return torch.rand(shape, dtype=torch.float64, generator=made)

    def mine(x: Tensor) -> Tensor:
        return x.narrow(-1, first, lengths[rank])

    count = len(operator.timed)
    tensors = [draw(*shape, time) for shape in operator.timed]
    tensors += [draw(*shape) for shape in operator.shared]
    tensors += [draw(*operator.states[packed])] * every
    weights, factors = draw(*operator.timed[0], time), [draw(*each.shape) for each in tensors]
    how: dict[str, Any] = {"return_final_state": every, **way}
    if packed:
        how["cu_seqlens"] = torch.tensor([0, time // 3, time // 3, time - time // 4, time])
    reset = draw(BATCH, time) < 0.3

    def derivatives(function: Any, leaves: list[Tensor], cut: Any, share: float, **more: Any) -> Any:  # fmt: skip
        """Results, first derivatives of a loss that has every second one, and those of the first."""
        leaves = [leaf.clone().requires_grad_() for leaf in leaves]
        if every and operator.resets:
            more["reset"] = cut(reset)
        given = leaves if every else [*leaves, None]
        found = operator.call(function, *given, **how, **more)
        results = list(found) if every else [found]
        loss = (results[0].square() * cut(weights)).sum()
        loss = loss + share * sum(each.square().sum() for each in results[1:])
        firsts = torch.autograd.grad(loss, leaves, create_graph=operator.twice)
        if not operator.twice:
            return results, firsts, ()
        scaled = [cut(each) if n < count else each for n, each in enumerate(factors)]
        again = sum((grad * each).sum() for grad, each in zip(firsts, scaled, strict=True))
        return results, firsts, torch.autograd.grad(again, leaves)

    wanted = derivatives(getattr(scan_registry, name), tensors, lambda x: x, 1)
    how["group"] = group
    local = [mine(each) if n < count else each for n, each in enumerate(tensors)]
    found = derivatives(getattr(distributed, name), local, mine, float(rank == 0))
    for number, (here, whole) in enumerate(zip(found[0], wanted[0], strict=True)):
        close(here, whole if number else mine(whole))
    for here, whole in zip(found[1:], wanted[1:], strict=True):
        for number, (grad, of_whole) in enumerate(zip(here, whole, strict=True)):
            if number < count:
                close(grad, mine(of_whole))
            else:
                close(summed(grad.detach(), group), of_whole)
