"""Counts what a call over ranks does on the CPU: torch's operators, collectives, and reads of a device's values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from scan_registry import distributed
from scan_registry.distributed import opening
from scan_registry.ops import call

#: Operators whose result is a number of the CPU, or has a size that the values decide.
READS = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select")
METHODS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__")


class Counts(TorchDispatchMode):
    """``operators`` leaves out views and new memory, which launch nothing on a GPU."""

    FREE = ("view", "_unsafe_view", "slice", "select", "unsqueeze", "expand", "detach", "narrow",
            "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "alias", "unbind", "split", "t",
            "transpose", "as_strided", "permute")  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []
        self.exchanges: list[str] = []
        self.reads: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        space, name = function.name().split("::")
        name = name.split(".")[0]
        if space == "c10d":
            self.exchanges.append(name)
        elif name in READS:
            self.reads.append(name)
        elif name not in self.FREE:
            self.operators.append(name)
        return function(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Counts]:
    """Counts in a call that takes the paths which it takes on a GPU, as far as a CPU can."""
    counts = Counts()

    def watched(name: str) -> Callable[..., Any]:
        usual = getattr(Tensor, name)

        def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            counts.reads.append(name)
            return usual(self, *args, **kwargs)

        return read

    with ExitStack() as stack:
        for name in METHODS:
            stack.enter_context(patch.object(Tensor, name, watched(name)))
        # The mode only watches, so nothing has to go through the dispatcher because of it.
        stack.enter_context(patch.object(call, "dispatch_modes", lambda: 0))
        stack.enter_context(patch.object(call, "OBSERVERS", ()))
        stack.enter_context(counts)
        yield counts


def steady(rank: int, ranks: int, group: Any, operator: str, final: bool) -> list[Any]:
    """Of a forward and of a backward pass of a call whose shapes were agreed on before: operators, exchanges and reads."""

    def sequence(*shape: int) -> Tensor:
        return torch.rand(shape, requires_grad=True)

    how: Any = {"group": group, "return_final_state": final}
    if operator == "selective_scan":
        inputs = [sequence(1, 8, 6), sequence(1, 8, 6)]
        A, B, C = -torch.rand(8, 2), torch.rand(1, 2, 6), torch.rand(1, 2, 6)

        def call() -> Any:
            return distributed.selective_scan(*inputs, A, B, C, **how)
    elif operator == "causal_conv1d":
        inputs = [sequence(1, 8, 6), sequence(8, 4)]

        def call() -> Any:
            return distributed.causal_conv1d(*inputs, **how)
    else:
        inputs = [sequence(1, 6, 8), sequence(1, 6, 8)]

        def call() -> Any:
            return distributed.linear_scan(*inputs, dim=1, **how)

    with patch.object(opening, "_reading_waits", lambda place: True):
        for _ in range(2):
            results = call()
            results = results if final else (results,)
            torch.autograd.grad(results, inputs, [torch.ones_like(each) for each in results])
        with counted() as forward:
            results = call()
        results = results if final else (results,)
        grads = [torch.ones_like(each) for each in results]
        with counted() as backward:
            torch.autograd.grad(results, inputs, grads)
    return [(each.operators, each.exchanges, each.reads) for each in (forward, backward)]


def first(rank: int, ranks: int, group: Any) -> list[str]:
    """The reads of a call of a new kind."""
    with patch.object(opening, "_reading_waits", lambda place: True), counted() as counts:
        distributed.linear_scan(torch.rand(11, 5), torch.rand(11, 5), group=group)
    return counts.reads
