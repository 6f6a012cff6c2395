"""What ranks do in tests: each makes the whole sequence, takes its part, and compares with one process over the whole."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from scan_registry import distributed, linear_scan
from scan_registry.distributed import opening


@dataclass(frozen=True)
class Case:
    """One call. ``lengths`` are of the first ranks' parts, in turn if there are more ranks."""

    shape: tuple[int, ...]  # time left out
    lengths: tuple[int, ...]
    dim: int = -1
    reverse: bool = False
    initial: bool = False
    final: bool = False
    bounds: tuple[float, ...] | None = None  # in parts of the whole time
    gates: tuple[int, ...] | None = None  # shape, with -1 for the time
    dtype: str = "float64"
    seed: int = 0
    reset: bool = False

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
    reset: Tensor | None


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
    reset = None
    if case.reset:
        reset = torch.rand(*case.shape[:1], time, generator=made) < 0.3
    return Whole(gates, tokens, initial, cu_seqlens, draw(*shape), draw(*state), reset)


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


def _part_of_reset(everything: Whole, case: Case, ranks: int, rank: int) -> Tensor | None:
    """This rank's; None where it has none, as ranks may differ in that."""
    lengths, reset = case.of(ranks), everything.reset
    if reset is None:
        return None
    mine = reset.narrow(-1, sum(lengths[:rank]), lengths[rank])
    return mine if mine.any() else None


def compare(rank: int, ranks: int, group: Any, *cases: Case) -> None:
    for case in cases:
        try:
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
        "reset": everything.reset,
        "return_final_state": True,
    }
    leaves = [x if x is None else x.clone().requires_grad_() for x in given]
    states, last = linear_scan(*leaves, **how)
    loss = (states * everything.states_grad.conj()).sum().real
    if case.final:
        loss = loss + (last * everything.last_grad.conj()).sum().real
    wanted = torch.autograd.grad(loss, [x for x in leaves if x is not None])

    how |= {
        "return_final_state": case.final,
        "reset": _part_of_reset(everything, case, ranks, rank),
    }
    for known in (False, True):
        with reading_waits(known):
            _compare_with(rank, ranks, group, case, everything, how, (states, last), wanted)


def _compare_with(
    rank: int,
    ranks: int,
    group: Any,
    case: Case,
    everything: Whole,
    how: Any,
    results: Any,
    wanted: Any,
) -> None:
    given = everything.gates, everything.tokens, everything.initial
    states, last = results
    mine = [part(x, case, ranks, rank).requires_grad_() for x in given[:2]]
    if given[2] is not None:
        mine.append(given[2].clone().requires_grad_())
    got = distributed.linear_scan(*mine, group=group, **how)
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


def check_outputs(out: Tensor, last: Tensor, x: Tensor) -> None:
    """They can be changed in place, and what is kept for the backward pass keeps no more memory than it has."""
    node: Any = out.grad_fn
    for kept in node.saved_tensors:
        assert kept is None or kept.untyped_storage().nbytes() == kept.nbytes
    (wanted,) = torch.autograd.grad(out.sum() + last.sum(), x, retain_graph=True)
    out += 1
    last *= 1
    (gradient,) = torch.autograd.grad(out.sum() + last.sum(), x)
    assert torch.equal(gradient, wanted)


def compare_parts(
    rank: int,
    ranks: int,
    group: Any,
    lengths: list[int],
    calls: tuple[Any, Any],
    tensors: dict[str, Tensor],
    timed: dict[str, int],
    dim: int,
    contexts: Iterable[Any],
) -> None:
    """What a call over parts returns, and its gradients, against one over the whole: the two ``calls`` take the tensors by name,
    of which ``timed`` are cut along a dimension, as the output is along ``dim``. The second is made in each of the contexts."""
    begin, time = sum(lengths[:rank]), sum(lengths)

    def cut(x: Tensor, along: int | None) -> Tensor:
        if along is None:
            return x.clone()
        numbers = x.shape[along] // max(1, time)  # of a step
        return x.narrow(along, numbers * begin, numbers * lengths[rank]).clone()

    def loss(out: Tensor, last: Tensor, weights: Tensor, share: float) -> Tensor:
        real = last.real - 2 * last.imag if last.is_complex() else last
        return (out * weights).sum() + share * (real.sin() + real).sum()

    whole = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    out, last = calls[0](**whole)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    wanted = torch.autograd.grad(loss(out, last, weights, 1), [*whole.values()])
    for context in contexts:
        part = {name: cut(x, timed.get(name)).requires_grad_() for name, x in tensors.items()}
        with context:
            here, end = calls[1](**part)
            close(here, cut(out, dim))
            close(end, last)
            of_part = loss(here, end, cut(weights, dim), 1 / ranks)
            gradients = torch.autograd.grad(of_part, [*part.values()])
        for name, gradient, of_whole in zip(part, gradients, wanted, strict=True):
            if name in timed:
                close(gradient, cut(of_whole, timed[name]))
            else:
                close(summed(gradient, group), of_whole)


def reading_waits(known: bool) -> Any:
    """A call that is ``known`` goes by the plan of the one before; headers are then compared as over NCCL, and not read."""
    return patch.object(opening, "_reading_waits", lambda place: known)


def raised(call: Callable[[], Any]) -> str:
    """What the call raises, in words; nothing if it raises nothing."""
    try:
        call()
    except (TypeError, ValueError, RuntimeError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


# --- Derivatives of derivatives, and what else calls are composed with --------------------------


def second_derivatives(rank: int, ranks: int, group: Any, *cases: Case) -> None:
    for case in cases:
        _compare_second(rank, ranks, group, case)


def _compare_second(rank: int, ranks: int, group: Any, case: Case) -> None:
    everything = whole(case, ranks)
    given = everything.gates, everything.tokens, everything.initial
    how: Any = {"dim": case.dim, "reverse": case.reverse, "cu_seqlens": everything.cu_seqlens}
    how |= {"return_final_state": case.final, "reset": everything.reset}

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
    how["reset"] = _part_of_reset(everything, case, ranks, rank)
    mine = [part(x, case, ranks, rank).requires_grad_() for x in given[:2]]
    if given[2] is not None:
        mine.append(given[2].clone().requires_grad_())
    found = derivatives(
        lambda *xs: distributed.linear_scan(*xs, group=group, **how),
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
    mine = part(everything.tokens, case, ranks, rank).requires_grad_(rank == 0)
    gates = part(everything.gates, case, ranks, rank)
    here = distributed.linear_scan(gates, mine, group=group)
    assert here.requires_grad
    (here * part(everything.states_grad, case, ranks, rank)).sum().backward()
    if rank == 0:
        close(mine.grad, part(wanted, case, ranks, rank))
    with torch.no_grad():
        assert not distributed.linear_scan(gates, mine, group=group).requires_grad


def modes(rank: int, ranks: int, group: Any) -> None:
    """Calls with the same shapes under inference mode, without gradients and with them, in each order."""
    gates, tokens = torch.rand(5, 7), torch.rand(5, 7)
    recorded = torch.rand(5, 7, requires_grad=True)
    found = []
    with reading_waits(True):
        for _ in range(2):
            with torch.inference_mode():
                found.append(distributed.linear_scan(gates, tokens, group=group))
            with torch.no_grad():
                found.append(distributed.linear_scan(gates, tokens, group=group))
            states = distributed.linear_scan(gates, recorded, group=group)
            torch.autograd.grad(states.sum(), recorded)
    for each in found:
        close(each, found[0])


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
                initial=drawn.random() < 0.6,
                final=drawn.random() < 0.6,
                bounds=bounds,
                gates=gates,
                dtype=drawn.choice(["float64", "float64", "complex128", "float32"]),
                seed=number,
                reset=drawn.random() < 0.3,
            )
        )
    return cases
