"""What ranks do in tests: each makes the whole sequence, takes its part, and compares with one process over the whole."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from scan_registry import distributed, gated_scan, linear_scan, selective_scan
from scan_registry.distributed import linear
from scan_registry.kernels.gated_scan.kinds import KINDS


@dataclass(frozen=True)
class Case:
    """One call. ``lengths`` are of the first ranks' parts, in turn if there are more ranks."""

    shape: tuple[int, ...]  # time left out
    lengths: tuple[int, ...]
    dim: int = -1
    reverse: bool = False
    schedule: str = "reduce"
    initial: bool = False
    final: bool = False
    bounds: tuple[float, ...] | None = None  # in parts of the whole time
    gates: tuple[int, ...] | None = None  # shape, with -1 for the time
    dtype: str = "float64"
    seed: int = 0

    def of(self, ranks: int) -> list[int]:
        return [self.lengths[rank % len(self.lengths)] for rank in range(ranks)]


@dataclass
class Whole:
    gates: Tensor
    tokens: Tensor
    initial: Tensor | None
    cu_seqlens: Tensor | None
    states_grad: Tensor
    last_grad: Tensor


def whole(case: Case, ranks: int) -> Whole:
    """The same on every rank."""
    dtype = getattr(torch, case.dtype)
    made = torch.Generator().manual_seed(case.seed)
    lengths, rank = case.of(ranks), len(case.shape) + 1
    time, dim = sum(lengths), case.dim % rank
    shape = [*case.shape]
    shape.insert(dim, time)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, dtype=dtype, generator=made)

    of_gates = shape if case.gates is None else [time if n == -1 else n for n in case.gates]
    gates, tokens = draw(*of_gates), draw(*shape)
    gates = gates / gates.abs().clamp(min=1)
    cu_seqlens, state = None, [*case.shape]
    if case.bounds is not None:
        found = sorted(round(part * time) for part in case.bounds)
        cu_seqlens = torch.tensor([0, *found, time])
        state.insert(dim, len(found) + 1)
    initial = draw(*state) if case.initial else None
    return Whole(gates, tokens, initial, cu_seqlens, draw(*shape), draw(*state))


def has_time(x: Tensor, case: Case, ranks: int) -> bool:
    dim = case.dim if case.dim < 0 else case.dim - len(case.shape) - 1
    return x.dim() >= -dim and x.shape[dim] == sum(case.of(ranks))


def part(x: Tensor, case: Case, ranks: int, rank: int) -> Tensor:
    """This rank's; all of what does not change with time."""
    if not has_time(x, case, ranks):
        return x.clone()
    lengths = case.of(ranks)
    dim = case.dim if case.dim < 0 else case.dim - len(case.shape) - 1
    return x.narrow(dim, sum(lengths[:rank]), lengths[rank]).clone()


def compare(rank: int, ranks: int, group: Any, *cases: Case) -> None:
    for case in cases:
        pieces = 3 if case.schedule == "pass" else 0
        try:
            with patch.object(linear, "pieces_of", lambda choice, pieces=pieces: pieces):
                _compare(rank, ranks, group, case)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def _compare(rank: int, ranks: int, group: Any, case: Case) -> None:
    everything = whole(case, ranks)
    given = everything.gates, everything.tokens, everything.initial
    how: Any = {
        "dim": case.dim,
        "reverse": case.reverse,
        "cu_seqlens": everything.cu_seqlens,
        "return_final_state": True,
    }
    leaves = [x if x is None else x.clone().requires_grad_() for x in given]
    states, last = linear_scan(*leaves, **how)
    loss = (states * everything.states_grad.conj()).sum().real
    if case.final:
        loss = loss + (last * everything.last_grad.conj()).sum().real
    wanted = torch.autograd.grad(loss, [x for x in leaves if x is not None])

    mine = [part(x, case, ranks, rank).requires_grad_() for x in given[:2]]
    if given[2] is not None:
        mine.append(given[2].clone().requires_grad_())
    how["return_final_state"] = case.final
    got = distributed.linear_scan(*mine, group=group, schedule=case.schedule, **how)
    here, end = got if case.final else (got, None)
    close(here, part(states, case, ranks, rank))
    loss = (here * part(everything.states_grad, case, ranks, rank).conj()).sum().real
    if end is not None:
        close(end, last)
        # Each rank has a part of the loss.
        share = (rank + 1) / sum(range(1, ranks + 1))
        loss = loss + share * (end * everything.last_grad.conj()).sum().real
    found = torch.autograd.grad(loss, mine)
    inputs = [x for x in given if x is not None]
    for place, (grad, of_whole) in enumerate(zip(found, wanted, strict=True)):
        if place == 2 or not has_time(inputs[place], case, ranks):
            close(summed(grad, group), of_whole)
        else:
            close(grad, part(of_whole, case, ranks, rank))


def gated(rank: int, ranks: int, group: Any, kind: str, dim: int, packed: bool) -> None:
    """``gated_scan`` with resets, initial and final states, against one process."""
    torch.manual_seed(5)
    lengths = [(3, 0, 4)[each % 3] for each in range(ranks)]
    time, begin = sum(lengths), sum(lengths[:rank])
    shape = (2, 3, time) if dim == -1 else (2, time, 3)
    inputs = [torch.randn(shape, dtype=torch.float64) for _ in KINDS[kind].inputs]
    values = [torch.rand(3, dtype=torch.float64) for _ in KINDS[kind].parameters]
    reset = torch.rand(2, time) < 0.2
    bounds = torch.tensor([0, time // 3, time // 3, time]) if packed else None
    initial = torch.randn((2, 3) if not packed else (2, 3, 3), dtype=torch.float64)
    weights = torch.randn(shape, dtype=torch.float64)
    how: Any = {"dim": dim, "cu_seqlens": bounds, "return_final_state": True}

    def cut(x: Tensor, along: int = dim) -> Tensor:
        return x.narrow(along, begin, lengths[rank]).clone()

    leaves = [x.clone().requires_grad_() for x in (*inputs, *values, initial)]
    states, last = gated_scan(kind, *leaves[:-1], initial_state=leaves[-1], reset=reset, **how)
    wanted = torch.autograd.grad((states * weights).sum() + last.square().sum(), leaves)
    mine = [cut(x).requires_grad_() for x in inputs]
    mine += [x.clone().requires_grad_() for x in (*values, initial)]
    here, end = distributed.gated_scan(
        kind, *mine[:-1], initial_state=mine[-1], reset=cut(reset, 1), group=group, **how
    )
    close(here, cut(states))
    close(end, last)
    loss = (here * cut(weights)).sum() + (end.square().sum() if rank == 0 else 0)
    for place, (grad, of_whole) in enumerate(
        zip(torch.autograd.grad(loss, mine), wanted, strict=True)
    ):
        if place < len(inputs):
            close(grad, cut(of_whole))
        else:
            close(summed(grad, group), of_whole)


def selective(
    rank: int, ranks: int, group: Any, groups: tuple[int, int], packed: bool, every: bool
) -> None:
    """``selective_scan``, with all that it takes or the least, against one process."""
    torch.manual_seed(7)
    lengths = [(3, 0, 4)[each % 3] for each in range(ranks)]
    time, begin = sum(lengths), sum(lengths[:rank])
    batch, channels, states = 2, 24, 3

    def draw(*size: int) -> Tensor:
        return torch.randn(size, dtype=torch.float64)

    def projection(count: int) -> Tensor:
        return draw(channels, states) if count == 0 else draw(batch, count, states, time)

    bounds = torch.tensor([0, time // 3, time // 3, time]) if packed else None
    given: list[Any] = [draw(batch, channels, time), draw(batch, channels, time)]
    given += [-torch.rand(channels, states, dtype=torch.float64), *map(projection, groups)]
    between = (3,) if packed else ()
    optional = [draw(channels), draw(batch, channels, time), draw(channels)]
    given += optional if every else [None] * 3
    initial = draw(batch, *between, channels, states) if every else None
    weights, last_weights = draw(batch, channels, time), draw(batch, *between, channels, states)
    timed = (0, 1, *(3 + n for n, count in enumerate(groups) if count), 6)
    how: Any = {"cu_seqlens": bounds, "return_final_state": True}

    def cut(x: Tensor) -> Tensor:
        return x.narrow(-1, begin, lengths[rank]).clone()

    def with_gradient(x: Any) -> Any:
        return None if x is None else x.clone().requires_grad_()

    leaves = [with_gradient(x) for x in (*given, initial)]
    out, last = selective_scan(*leaves[:8], True, leaves[8], **how)
    loss = (out * weights).sum() + (last * last_weights).sum()
    wanted = iter(torch.autograd.grad(loss, [x for x in leaves if x is not None]))
    mine = [
        with_gradient(cut(x) if n in timed and x is not None else x) for n, x in enumerate(given)
    ]
    mine.append(with_gradient(initial))
    here, end = distributed.selective_scan(*mine[:8], True, mine[8], group=group, **how)
    close(here, cut(out))
    close(end, last)
    loss = (here * cut(weights)).sum() + (end * last_weights).sum() / ranks
    found = iter(torch.autograd.grad(loss, [x for x in mine if x is not None]))
    for number, x in enumerate(mine):
        if x is not None and number in timed:
            close(next(found), cut(next(wanted)))
        elif x is not None:
            close(summed(next(found), group), next(wanted))


# --- Derivatives of derivatives, and what else calls are composed with --------------------------


def second_derivatives(rank: int, ranks: int, group: Any, *cases: Case) -> None:
    for case in cases:
        _compare_second(rank, ranks, group, case)


def _compare_second(rank: int, ranks: int, group: Any, case: Case) -> None:
    everything = whole(case, ranks)
    given = everything.gates, everything.tokens, everything.initial
    how: Any = {"dim": case.dim, "reverse": case.reverse, "cu_seqlens": everything.cu_seqlens}
    how["return_final_state"] = case.final

    def derivatives(scan: Any, leaves: list[Tensor], states_grad: Tensor, share: float) -> Any:
        """Of the squares of states, and of what the gradients make with numbers that depend on the inputs."""
        made = scan(*leaves)
        states, last = made if case.final else (made, None)
        loss = (states.square() * states_grad).sum()
        if last is not None:
            loss = loss + share * (last.square() * everything.last_grad).sum()
        grads = torch.autograd.grad(loss, leaves, create_graph=True)
        pairs = zip(grads, leaves, strict=True)
        again = sum((grad * (leaf.detach() + 1)).sum() for grad, leaf in pairs)
        return grads, torch.autograd.grad(again, leaves)

    leaves = [x.clone().requires_grad_() for x in given if x is not None]
    wanted = derivatives(
        lambda *xs: linear_scan(*xs, **how), leaves, everything.states_grad, share=1
    )
    mine = [part(x, case, ranks, rank).requires_grad_() for x in given[:2]]
    if given[2] is not None:
        mine.append(given[2].clone().requires_grad_())
    found = derivatives(
        lambda *xs: distributed.linear_scan(*xs, group=group, schedule=case.schedule, **how),
        mine,
        part(everything.states_grad, case, ranks, rank),
        share=(rank + 1) / sum(range(1, ranks + 1)),
    )
    for got, expected in zip(found, wanted, strict=True):
        for place, (grad, of_whole) in enumerate(zip(got, expected, strict=True)):
            if place == 2:
                close(summed(grad.detach(), group), of_whole)
            else:
                close(grad, part(of_whole, case, ranks, rank))


def checkpointed(rank: int, ranks: int, group: Any) -> None:
    """Two layers under activation checkpointing: gradients are as without."""
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(rank)
    gates, tokens = (torch.rand(2, 3 + rank, 4, dtype=torch.float64) for _ in range(2))

    def layers(x: Tensor) -> Tensor:
        for _ in range(2):
            x = distributed.linear_scan(gates, x.sin(), dim=1, group=group)
        return x

    grads = []
    for run in (layers, lambda x: checkpoint(layers, x, use_reentrant=False)):
        leaf = tokens.clone().requires_grad_()
        run(leaf).square().sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def two_in_flight(rank: int, ranks: int, group: Any) -> None:
    """Two calls whose backward passes run one after the other, of different sizes and against one another."""
    case, other = Case((2, 3), (4, 0, 5), seed=1), Case((7,), (2, 3), reverse=True, seed=2)
    losses, leaves, wanted = [], [], []
    for each in (case, other):
        everything = whole(each, ranks)
        given = [x.requires_grad_() for x in (everything.gates, everything.tokens)]
        states = linear_scan(*given, reverse=each.reverse)
        wanted += [
            part(grad, each, ranks, rank)
            for grad in torch.autograd.grad((states * everything.states_grad).sum(), given)
        ]
        mine = [part(x.detach(), each, ranks, rank).requires_grad_() for x in given]
        here = distributed.linear_scan(*mine, reverse=each.reverse, group=group)
        losses.append((here * part(everything.states_grad, each, ranks, rank)).sum())
        leaves += mine
    for found, expected in zip(torch.autograd.grad(sum(losses), leaves), wanted, strict=True):
        close(found, expected)


def some_gradients(rank: int, ranks: int, group: Any) -> None:
    """One rank's tokens alone require gradients, which reach it from the others' losses."""
    case = Case((3,), (4, 2), seed=3)
    everything = whole(case, ranks)
    tokens = everything.tokens.clone().requires_grad_()
    states = linear_scan(everything.gates, tokens)
    (wanted,) = torch.autograd.grad((states * everything.states_grad).sum(), tokens)
    for schedule in ("reduce", "pass"):
        mine = part(everything.tokens, case, ranks, rank).requires_grad_(rank == 0)
        gates = part(everything.gates, case, ranks, rank)
        here = distributed.linear_scan(gates, mine, group=group, schedule=schedule)
        assert here.requires_grad
        (here * part(everything.states_grad, case, ranks, rank)).sum().backward()
        if rank == 0:
            close(mine.grad, part(wanted, case, ranks, rank))
    with torch.no_grad():
        assert not distributed.linear_scan(gates, mine, group=group).requires_grad
    with torch.inference_mode():
        distributed.linear_scan(gates, mine, group=group)


def groups_of_all_kinds(rank: int, ranks: int, group: Any) -> list[str]:
    """A mesh of one dimension is its group; what is refused, in words."""
    x = torch.rand(2, 3)
    mesh = DeviceMesh.from_group(group, "cpu")
    whole_group = distributed.linear_scan(x, x, group=group)
    assert torch.equal(distributed.linear_scan(x, x, group=mesh), whole_group)
    said = []
    for other in (SimpleNamespace(), 3, torch.distributed.GroupMember.NON_GROUP_MEMBER):
        try:
            distributed.linear_scan(x, x, group=other)
        except (TypeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


# --- Failures ---------------------------------------------------------------------------------


def failure(rank: int, ranks: int, group: Any, kind: str, known: bool) -> tuple[str, str, float]:
    """The last rank makes a mistake: the error, and how long it took; then all make a good call."""
    bad, good = rank == ranks - 1, (torch.rand(2, 4), torch.rand(2, 4))
    if known:
        distributed.linear_scan(*good, group=group)
    tokens, bounds = good[1], [0, 3, 4 * ranks]
    # What differs from a good call: on the rank that is wrong, and on the others.
    wrong, right = {
        "shape": ({"gates": torch.rand(3, 4), "tokens": torch.rand(3, 4)}, {}),
        "dtype": ({"tokens": tokens.bfloat16()}, {}),
        "mismatch": ({"gates": torch.rand(5, 4)}, {}),
        "no tensor": ({"tokens": None}, {}),
        "initial_state": ({}, {"initial_state": torch.zeros(2)}),
        "schedule": ({"schedule": "pass"}, {"schedule": "reduce"}),
        "option": ({"schedule": "quick"}, {}),
        "cu_seqlens": (
            {"cu_seqlens": torch.tensor([0, 2, 4 * ranks])},
            {"cu_seqlens": torch.tensor(bounds)},
        ),
        "total": ({"cu_seqlens": torch.tensor([0, 4 * ranks + 1])},) * 2,
        "no_grad": ({}, {}),
    }[kind]
    arguments: Any = {"gates": good[0], "tokens": tokens, **(wrong if bad else right)}
    torch.set_grad_enabled(not (bad and kind == "no_grad"))
    begin = time.perf_counter()
    try:
        distributed.linear_scan(**arguments, group=group)
    except Exception as error:
        found = type(error).__name__, str(error)
    else:
        found = "", ""
    seconds = time.perf_counter() - begin
    torch.set_grad_enabled(True)
    states = distributed.linear_scan(torch.ones(2, 4), torch.ones(2, 4), group=group)
    assert states[0].tolist() == [4 * rank + step for step in (1, 2, 3, 4)]
    return (*found, seconds)


def killed(rank: int, ranks: int, group: Any) -> tuple[str, float]:
    """The last rank dies before its second call."""
    gates, tokens = torch.rand(2, 4), torch.rand(2, 4)
    distributed.linear_scan(gates, tokens, group=group)
    if rank == ranks - 1:
        os._exit(1)
    begin = time.perf_counter()
    try:
        distributed.linear_scan(gates, tokens, group=group)
    except RuntimeError as error:
        return str(error), time.perf_counter() - begin
    return "", 0.0


def different_backward(rank: int, ranks: int, group: Any) -> str:
    """The ranks run their backward passes in different orders."""
    leaf = torch.rand(2, 4, requires_grad=True)
    losses = [distributed.linear_scan(leaf, leaf, group=group).sum() for _ in range(2)]
    try:
        losses[rank == 0].backward()
    except ValueError as error:
        return str(error)
    return ""


def summed(x: Tensor, group: Any) -> Tensor:
    total = torch.view_as_real(x).clone() if x.is_complex() else x.clone()
    torch.distributed.all_reduce(total, group=group)
    return torch.view_as_complex(total) if x.is_complex() else total


def close(found: Tensor, wanted: Tensor) -> None:
    tolerance = 1e-12 if wanted.dtype in (torch.float64, torch.complex128) else 2e-5
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def draw_cases(count: int, seed: int) -> list[Case]:
    """Cases at random, the same for the same seed."""
    drawn = random.Random(seed)
    cases = []
    for number in range(count):
        rank = drawn.choice([1, 2, 3, 3])
        shape = tuple(drawn.choice([1, 2, 3, 5, 9]) for _ in range(rank - 1))
        dim = drawn.randrange(-rank, rank)
        lengths = tuple(drawn.choice([0, 1, 1, 2, 3, 7]) for _ in range(drawn.randint(1, 7)))
        bounds = None
        if drawn.random() < 0.5:
            bounds = tuple(
                drawn.choice([0, 1, drawn.random(), 0.5]) for _ in range(drawn.randint(0, 5))
            )
        gates = None
        if drawn.random() < 0.4:
            whole_shape = [*shape]
            whole_shape.insert(dim % rank, -1)
            gates = tuple(drawn.choice([n, n, 1]) for n in whole_shape)
        cases.append(
            Case(
                shape,
                lengths,
                dim,
                reverse=drawn.random() < 0.5,
                schedule=drawn.choice(["reduce", "pass", "auto"]),
                initial=drawn.random() < 0.6,
                final=drawn.random() < 0.6,
                bounds=bounds,
                gates=gates,
                dtype=drawn.choice(["float64", "float64", "complex128", "float32"]),
                seed=number,
            )
        )
    return cases
