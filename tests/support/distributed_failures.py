"""What ranks do in tests of failures: one of them makes a mistake, or stops."""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from distributed_cases import raised
from torch.distributed.device_mesh import DeviceMesh

from scan_registry import distributed
from scan_registry.distributed import opening
from scan_registry.distributed.group import resolve
from scan_registry.distributed.opening import Opening


def groups_of_all_kinds(rank: int, ranks: int, group: Any) -> list[str]:
    """A mesh of one dimension is its group; what is refused, in words."""
    x = torch.rand(2, 3)
    mesh = DeviceMesh.from_group(group, "cpu")
    whole_group = distributed.linear_scan(x, x, group=group)
    assert torch.equal(distributed.linear_scan(x, x, group=mesh), whole_group)
    others = SimpleNamespace(), 3, torch.distributed.GroupMember.NON_GROUP_MEMBER
    return [
        raised(lambda other=other: distributed.linear_scan(x, x, group=other)) for other in others
    ]


def failure(rank: int, ranks: int, group: Any, kind: str, known: bool) -> tuple[str, str]:
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
        "reverse": ({"reverse": True}, {}),
        "option": ({"backend": "quick"}, {}),
        "cu_seqlens": (
            {"cu_seqlens": torch.tensor([0, 2, 4 * ranks])},
            {"cu_seqlens": torch.tensor(bounds)},
        ),
        "total": ({"cu_seqlens": torch.tensor([0, 4 * ranks + 1])},) * 2,
        "no_grad": ({}, {}),
    }[kind]
    arguments: Any = {"gates": good[0], "tokens": tokens, **(wrong if bad else right)}
    torch.set_grad_enabled(not (bad and kind == "no_grad"))
    try:
        distributed.linear_scan(**arguments, group=group)
    except Exception as error:
        found = type(error).__name__, str(error)
    else:
        found = "", ""
    torch.set_grad_enabled(True)
    states = distributed.linear_scan(torch.ones(2, 4), torch.ones(2, 4), group=group)
    assert states[0].tolist() == [4 * rank + step for step in (1, 2, 3, 4)]
    return found


def without_memory(
    rank: int, ranks: int, group: Any, operator: str, backward: bool, known: bool
) -> list[str]:
    """The last rank has no memory for what it sends, in a forward or in a backward pass: the error, and that of the next call."""
    x = torch.rand(1, 4, 5, requires_grad=True)
    shared = torch.rand(2, 1, 2, 5)

    def call() -> torch.Tensor:
        if operator == "selective_scan":
            given = x, x, -torch.rand(4, 2), *shared
            return distributed.selective_scan(*given, group=group)
        if operator == "causal_conv1d":
            return distributed.causal_conv1d(x, torch.rand(4, 3), group=group)
        return distributed.linear_scan(x, x, group=group)

    def fails(self: Opening) -> None:
        raise torch.OutOfMemoryError("no room")

    def train(full: bool) -> None:
        out_of_memory = patch.object(Opening, "_message", fails) if full else nullcontext()
        with nullcontext() if backward else out_of_memory:
            loss = call().sum()
        with out_of_memory if backward else nullcontext():
            loss.backward()

    state = resolve(group).session
    state.plans.clear()
    state.agreed.clear()
    if known:
        call().sum().backward()
    return [raised(lambda full=full: train(full)) for full in (rank == ranks - 1, False)]


def unread(rank: int, ranks: int, group: Any, scale: int) -> tuple[list[bool], list[str]]:
    """Headers are compared and not read, as over NCCL, and the last rank makes another call than the others, both of them known:
    whether results are NaN, and the errors of this call and of later ones. The calls have 2 and 3 times ``scale`` channels."""
    known = [(torch.ones(size * scale, 4), torch.ones(size * scale, 4)) for size in (2, 3)]
    state = resolve(group).session
    usual = state.capacity
    nans, errors = [], []
    with torch.no_grad(), patch.object(opening, "_reading_waits", lambda place: True):
        for given in (*known, *known):
            distributed.linear_scan(*given, group=group)
        for given in (known[rank == ranks - 1], known[0], known[0]):
            try:
                states = distributed.linear_scan(*given, group=group)
            except (RuntimeError, ValueError) as error:
                errors.append(f"{type(error).__name__}: {error}")
            else:
                errors.append("")
                nans.append(bool(states.isnan().all()))
    state.capacity = usual  # for the tests after this one
    assert states[0].tolist() == [4 * rank + step for step in (1, 2, 3, 4)]
    return nans, errors


def late(rank: int, ranks: int, group: Any) -> list[str]:
    """The same, but ranks learn of a comparison in different calls: what each of ten later calls raises."""
    known = [(torch.ones(size, 4), torch.ones(size, 4)) for size in (2, 3)]
    queries: dict[int, int] = {}

    def has_come(flag: Any) -> bool:
        queries[id(flag)] = queries.get(id(flag), 0) + 1
        come = queries[id(flag)] > rank
        if come:
            queries[id(flag)] = 0
        return come

    errors = []
    with torch.no_grad(), patch.object(opening, "_reading_waits", lambda place: True):
        for given in (*known, *known):
            distributed.linear_scan(*given, group=group)
        with patch.object(opening._Flag, "has_come", has_come):
            for given in (known[rank == ranks - 1], *[known[0]] * 10):
                errors.append(
                    raised(lambda given=given: distributed.linear_scan(*given, group=group))
                )
    states = distributed.linear_scan(*known[0], group=group)
    assert states[0].tolist() == [4 * rank + step for step in (1, 2, 3, 4)]
    return errors


def killed(rank: int, ranks: int, group: Any) -> str:
    """The last rank dies before its second call."""
    gates, tokens = torch.rand(2, 4), torch.rand(2, 4)
    distributed.linear_scan(gates, tokens, group=group)
    if rank == ranks - 1:
        os._exit(1)
    try:
        distributed.linear_scan(gates, tokens, group=group)
    except RuntimeError as error:
        return str(error)
    return ""


def killed_in_backward(rank: int, ranks: int, group: Any, early: bool) -> str:
    """The middle rank is killed in its backward pass: before the other ranks hear of it, or else when it has told them that
    it takes part. The errors of the others' calls."""
    gates, tokens = (torch.rand(2, 4, requires_grad=True) for _ in range(2))

    def both() -> None:
        distributed.linear_scan(gates, tokens, group=group).sum().backward()

    both()
    exchange = Opening._exchange

    def last(self: Opening, *args: Any, **how: Any) -> Any:
        found = None if early else exchange(self, *args, **how)
        os.kill(os.getpid(), signal.SIGKILL)
        return found

    states = distributed.linear_scan(gates, tokens, group=group)
    if rank == ranks // 2:
        Opening._exchange = last  # type: ignore[method-assign]
    for call in (states.sum().backward, both):
        try:
            call()
        except RuntimeError as error:
            return str(error)
    return ""


def absent(rank: int, ranks: int, group: Any, how: str, timeout: float) -> str:
    """The last rank raises an error of its own before a forward or backward pass, or calls with another group. The other
    ranks' error."""
    gates, tokens = (torch.rand(2, 4, requires_grad=True) for _ in range(2))
    distributed.linear_scan(gates, tokens, group=group).sum().backward()
    last = rank == ranks - 1
    other = {"group": None if last else group} if how == "group" else {"group": group}
    try:
        if last and how == "forward":
            raise KeyError(how)
        states = distributed.linear_scan(gates, tokens, **other)
        if last and how == "backward":
            raise KeyError(how)
        states.sum().backward()
    except RuntimeError as error:
        return str(error)
    except KeyError:
        time.sleep(timeout + 3)  # the process is still there, so its connections are
    return ""


def of_another_dtype(rank: int, ranks: int, group: Any) -> list[str]:
    """``gated_scan`` of float16 on the last rank and float32 on others, and a convolution with a bias on the last alone."""
    last = rank == ranks - 1
    x = torch.rand(1, 4, 3, dtype=torch.float16 if last else torch.float32)
    calls = (
        lambda: distributed.gated_scan("rg_lru", x, x, x, torch.rand(4), group=group),
        lambda: distributed.causal_conv1d(
            *(torch.rand(1, 4, 3), torch.rand(4, 2), torch.rand(4) if last else None), group=group
        ),
    )
    said = []
    for call in calls:
        try:
            call()
        except ValueError as error:
            said.append(str(error))
    return said


def different_backward(rank: int, ranks: int, group: Any) -> str:
    """The ranks run their backward passes in different orders."""
    leaf = torch.rand(2, 4, requires_grad=True)
    losses = [distributed.linear_scan(leaf, leaf, group=group).sum() for _ in range(2)]
    try:
        losses[rank == 0].backward()
    except ValueError as error:
        return str(error)
    return ""
