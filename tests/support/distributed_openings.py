"""What ranks do in tests of openings: calls that ranks have agreed on, as over NCCL, on pretended streams of a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch
from weakref import ref

import torch

from scan_registry import distributed
from scan_registry.distributed import group as groups
from scan_registry.distributed import opening
from scan_registry.distributed.group import resolve
from scan_registry.distributed.opening import Message


@contextmanager
def on_stream(number: int, *, capturing: bool = False) -> Iterator[None]:
    """Headers are not read, and messages are those of a stream."""
    with (
        patch.object(opening, "_reading_waits", lambda place: True),
        patch.object(opening, "_stream", lambda place: number),
        patch.object(opening, "is_capturing", lambda place: capturing),
        patch.object(groups, "is_capturing", lambda place: capturing),
    ):
        yield


def agreed(rank: int, group: Any) -> tuple[Callable[[], None], list[Message]]:
    """A call, forward and backward, that the ranks have agreed on; and the messages that it has sent on the first stream."""
    state = resolve(group).session
    state.openings.clear()
    state.plans.clear()

    def call() -> None:
        gates, tokens = torch.ones(2, 2, 4, requires_grad=True)
        states = distributed.linear_scan(gates, tokens, group=group)
        assert states[0].tolist() == [4 * rank + step for step in (1, 2, 3, 4)]
        states.sum().backward()

    with on_stream(1):
        for _ in range(3):
            call()
    openings = state.openings.values()
    return call, [message for each in openings for message in each._messages.values()]


def another_stream(rank: int, ranks: int, group: Any) -> None:
    """The first stream has not written its messages yet when the second one sends its own."""
    call, messages = agreed(rank, group)
    for message in messages:
        message.memory.fill_(-1 - rank)
    with on_stream(2):
        call()
        call()  # would raise an error of the call before


def recorded(rank: int, ranks: int, group: Any, stream: int) -> int:
    """A call while a CUDA graph is recorded, on a stream, asks for no event. The number of messages that remain for the graph to read, once
    the group has forgotten the call."""
    call, messages = agreed(rank, group)
    there = [ref(message.memory) for message in messages]
    del messages
    state = resolve(group).session
    assert state.unread

    def has_come(flag: Any) -> bool:
        raise AssertionError("the event of a flag was asked for")

    with on_stream(stream, capturing=True), patch.object(opening._Flag, "has_come", has_come):
        call()
    assert state.unread
    state.openings.clear()
    state.plans.clear()
    gc.collect()
    return sum(each() is not None for each in there)


def unsure(rank: int, ranks: int, group: Any) -> str:
    """The error of a call while a CUDA graph is recorded, in which another rank might want gradients that this one does not."""
    gates = torch.rand(1, 8, 4)

    def call() -> Any:
        return distributed.linear_scan(gates, gates, group=group)

    for context in (torch.enable_grad(), torch.no_grad()):
        with context, on_stream(1):
            call()
            call()
    with torch.no_grad(), on_stream(2, capturing=True):
        call()
    with on_stream(2, capturing=True):
        try:
            call()
        except RuntimeError as error:
            return str(error)
    return ""


def elsewhere(rank: int, ranks: int, group: Any) -> None:
    """Calls while ``torch.set_default_device`` names a device that is not the tensors'."""
    u, B = torch.rand(1, 8, 4, requires_grad=True), torch.rand(1, 3, 4)
    given, bounds = (u, u, -torch.rand(8, 3), B, B), torch.tensor([0, 3, 4 * ranks])
    grad = torch.ones(1, 8, 4)

    def calls(bounds: Any) -> Iterator[Any]:
        final: Any = {"group": group, "cu_seqlens": bounds, "return_final_state": True}
        yield distributed.linear_scan(u, u, **final)
        yield distributed.selective_scan(*given, **final)
        yield distributed.causal_conv1d(u, torch.rand(8, 4, device="cpu"), **final)

    for _ in range(3):
        for each in (None, bounds):
            with on_stream(1), torch.device("meta"):
                for out, last in calls(each):
                    assert out.device == last.device == u.device
                    torch.autograd.grad(out, u, grad)


def large(rank: int, ranks: int, group: Any) -> int:
    """The bytes that are kept of the rows of a call, until this rank learns whether the headers were equal."""
    state = resolve(group).session
    usual = state.capacity
    with on_stream(1), torch.no_grad():
        for _ in range(2):
            distributed.linear_scan(*torch.ones(2, 8192, 4), group=group)
    state.capacity = usual  # for the tests after this one
    return int(state.unread[-1].headers.untyped_storage().nbytes())
