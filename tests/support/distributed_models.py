"""What each rank does in tests of models whose parameters and batches are DTensors."""

from __future__ import annotations

from typing import Any

import torch
from distributed_dtensors import BATCH, CHANNELS, TIME, mesh_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import scan_registry


class Mixer(nn.Module):
    """A convolution and a gated scan between two projections, as models of language have them."""

    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        self.enter = nn.Linear(width, channels, dtype=torch.float64)
        self.gate = nn.Linear(width, channels, dtype=torch.float64)
        self.filters = nn.Parameter(torch.randn(channels, 4, dtype=torch.float64))
        self.a = nn.Parameter(torch.randn(channels, dtype=torch.float64))
        self.leave = nn.Linear(channels, width, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        inner, gate = self.enter(x).transpose(1, 2), self.gate(x).transpose(1, 2)
        inner = scan_registry.causal_conv1d(inner, self.filters, activation="silu")
        states = scan_registry.gated_scan("rg_lru", inner, gate, gate, self.a)
        out: Tensor = self.leave(states.transpose(1, 2))
        return out


def mixer() -> Mixer:
    torch.manual_seed(0)
    return Mixer(8, CHANNELS)


def _expected(x: Tensor, steps: int) -> list[Tensor]:
    """The parameters after so many steps in one process."""
    model = mixer()
    train(model, x, steps)
    return [p.detach() for p in model.parameters()]


def train(model: nn.Module, x: Tensor, steps: int, *, scale: float = 1.0) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss = model(x).square().mean() * scale
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _batch() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(BATCH, TIME, 8, dtype=torch.float64, generator=generator)


def check_fully_sharded(rank: int, ranks: int, group: Any) -> None:
    """FSDP2, over ranks that have a part of the batch each; also with activation checkpointing."""
    from torch.distributed.fsdp import fully_shard
    from torch.utils.checkpoint import checkpoint

    mesh = mesh_of(group)
    expected = _expected(_batch(), 2)
    for checkpointed in (False, True):
        model: Any = mixer()
        inner = model.forward
        if checkpointed:
            model.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
        fully_shard(model, mesh=mesh)
        train(model, _batch().chunk(ranks)[rank], 2)
        for one, other in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(one.full_tensor(), other)


def check_time_and_parameters(rank: int, ranks: int, group: Any) -> None:
    """FSDP2, over ranks that have a part of the time each: the gradients of parameters are summed up as those of batches
    are."""
    from torch.distributed.fsdp import fully_shard

    from scan_registry import distributed

    class Layer(nn.Module):
        """With the functions of a module, which may be those over ranks."""

        def __init__(self, functions: Any, **options: Any) -> None:
            super().__init__()
            self.model, self.functions, self.options = mixer(), functions, options

        def forward(self, x: Tensor) -> Tensor:
            model, convolve = self.model, self.functions.causal_conv1d
            inner, gate = model.enter(x).transpose(1, 2), model.gate(x).transpose(1, 2)
            inner = convolve(inner, model.filters, activation="silu", **self.options)
            gates = gate.sigmoid() * model.a.sigmoid()[:, None]
            states = self.functions.linear_scan(gates, inner, **self.options)
            out: Tensor = model.leave(states.transpose(1, 2))
            return out

    x = torch.cat([_batch(), _batch()[:, :1]], 1)  # of a length that the ranks share evenly
    whole = Layer(scan_registry)
    train(whole, x, 2)
    model: Any = Layer(distributed, group=group)
    fully_shard(model, mesh=mesh_of(group))
    train(model, x.chunk(ranks, 1)[rank], 2)
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.full_tensor(), other.detach())


def check_tensor_parallel(rank: int, ranks: int, group: Any) -> None:
    """Channels over ranks: projections by columns and by rows, and what lies between them on its own channels."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = mesh_of(group)
    model = mixer()
    for name in ("filters", "a"):
        whole = getattr(model, name)
        setattr(model, name, nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(0)])))
    by_columns = ColwiseParallel(use_local_output=False)
    plan = {
        "enter": by_columns,
        "gate": by_columns,
        "leave": RowwiseParallel(input_layouts=Shard(2)),
    }
    parallelize_module(model, mesh, plan)  # type: ignore[arg-type]
    with CommDebugMode() as sent:
        model(_batch())
    assert sent.get_total_counts() == 1, sent.get_comm_counts()  # the sum after the last projection
    train(model, _batch(), 2)
    for one, other in zip(model.parameters(), _expected(_batch(), 2), strict=True):
        torch.testing.assert_close(
            one.full_tensor() if isinstance(one, DTensor) else one.detach(), other
        )
