"""What ranks do in tests of scans over ranks under activation checkpointing, torch.compile, FSDP2 and tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from distributed_dtensors import BATCH
from distributed_host_work import Counts
from distributed_models import Mixer, mixer, train
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from scan_registry import distributed

TIME = 8  # of both ranks together


def _linear(x: Tensor, group: Any) -> Tensor:
    return distributed.linear_scan(x.sigmoid(), x.sin(), group=group).tanh()


def _gated(x: Tensor, group: Any) -> Tensor:
    a = x.detach()[0, :, 0]
    return distributed.gated_scan("rg_lru", x.sin(), x, x, a, group=group).tanh()


def _selective(x: Tensor, group: Any) -> Tensor:
    u, rates = x.sin(), -x.detach()[0, :, :3].exp()
    B, C = x[:, :3], x[:, 1:]
    return distributed.selective_scan(u, x, rates, B, C, group=group).tanh()


SCANS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "linear_scan": _linear,
    "gated_scan": _gated,
    "selective_scan": _selective,
}


def _gradient(run: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    made = run(leaf)
    made.square().sum().backward()
    assert leaf.grad is not None
    return made.detach(), leaf.grad


def check_checkpointed(rank: int, ranks: int, group: Any, name: str) -> None:
    """Two layers, whose forward passes the backward pass computes again."""
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(rank)
    x = torch.randn(2, 4, 3 + rank, dtype=torch.float64)
    scan, calls = SCANS[name], []

    def layers(x: Tensor) -> Tensor:
        calls.append(x.requires_grad)
        return scan(scan(x, group), group)

    expected = _gradient(layers, x)
    found = _gradient(lambda x: checkpoint(layers, x, use_reentrant=False), x)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert len(calls) == 3


def check_compiled(rank: int, ranks: int, group: Any, name: str) -> str:
    """What is before the scan and after it is compiled; what torch says if one graph is asked for."""
    torch.manual_seed(rank)
    x = torch.randn(2, 4, 3 + rank, dtype=torch.float64)
    scan, graphs = SCANS[name], []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(scan, backend=backend)
    found = _gradient(lambda x: compiled(x, group), x)
    for one, other in zip(found, _gradient(lambda x: scan(x, group), x), strict=True):
        assert torch.equal(one, other)
    assert len(graphs) == 2, len(graphs)
    try:
        torch.compile(scan, backend="eager", fullgraph=True)(x, group)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def check_given_up(rank: int, ranks: int, group: Any, name: str) -> None:
    """In a call under a mode, torch.compile gives up tracing some frames for good. It goes on to trace what those call."""
    scan = SCANS[name]
    torch._dynamo.reset()
    compiled = torch.compile(scan, backend="eager")
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    with Counts():
        compiled(x, group)
    before = counters["frames"]["total"]
    found = _gradient(lambda x: compiled(x, group), x)
    assert counters["frames"]["total"] - before < 6
    for one, other in zip(found, _gradient(lambda x: scan(x, group), x), strict=True):
        assert torch.equal(one, other)


# --- Time over some ranks, channels over others ---------------------------------------------------


class MixerOverTime(nn.Module):
    """A mixer whose ranks have a part of the time each. Its parameters may be sharded along channels."""

    def __init__(self, time: Any) -> None:
        super().__init__()
        self.mixer, self.time = mixer(), time

    def forward(self, x: Tensor) -> Tensor:
        mixer = self.mixer
        filters, a = (
            each.to_local() if isinstance(each, DTensor) else each
            for each in (mixer.filters, mixer.a)
        )
        inner, gate = mixer.enter(x).transpose(1, 2), mixer.gate(x).transpose(1, 2)
        inner = distributed.causal_conv1d(inner, filters, activation="silu", group=self.time)
        states = distributed.gated_scan("rg_lru", inner, gate, gate, a, group=self.time)
        made: Tensor = mixer.leave(states.transpose(1, 2))
        return made


def _batch() -> Tensor:
    made = torch.Generator().manual_seed(3)
    return torch.randn(BATCH, TIME, 8, dtype=torch.float64, generator=made)


def _mesh(rank: int) -> DeviceMesh:
    # All processes that there are take part in making its groups.
    return DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("time", "channels"))


def _expected() -> Mixer:
    model = mixer()
    train(model, _batch(), 3)
    return model


def check_time_and_channels(rank: int, ranks: int, group: Any) -> None:
    """Tensor parallelism over channels within FSDP2 over the ranks that share a sequence."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = _mesh(rank)
    if rank > 3:
        return
    time, channels = mesh["time"], mesh["channels"]
    x = _batch().chunk(2, dim=1)[time.get_local_rank()]
    model: Any = MixerOverTime(time)
    with CommDebugMode() as whole:
        model(x)
    for name in ("filters", "a"):
        parameter = distribute_tensor(getattr(model.mixer, name).detach(), channels, [Shard(0)])
        setattr(model.mixer, name, nn.Parameter(parameter))
    plan = {"enter": ColwiseParallel(), "gate": ColwiseParallel(), "leave": RowwiseParallel()}
    parallelize_module(model.mixer, channels, plan)  # type: ignore[arg-type]
    with CommDebugMode() as sent:
        model(x)
    # The sum after the last projection is all that ranks with other channels exchange.
    assert sent.get_total_counts() == whole.get_total_counts() + 1
    fully_shard(model, mesh=time)
    train(model, x, 3)
    for one, other in zip(model.mixer.parameters(), _expected().parameters(), strict=True):
        torch.testing.assert_close(one.full_tensor(), other.detach())


def check_dtensors_of_time_and_channels(rank: int, ranks: int, group: Any) -> None:
    """The same by DTensors alone. Their gradients are sums over the ranks that share a sequence."""
    mesh = _mesh(rank)
    if rank > 3:
        return
    model = mixer()
    for name, parameter in [*model.named_parameters()]:
        owner, _, attribute = name.rpartition(".")
        along = {"leave.weight": Shard(1), "leave.bias": Replicate()}.get(name, Shard(0))
        placed = distribute_tensor(parameter.detach(), mesh, [Replicate(), along])
        setattr(model.get_submodule(owner), attribute, nn.Parameter(placed))
    x = distribute_tensor(_batch(), mesh, [Shard(1), Replicate()])
    train(model, x, 3)
    for one, other in zip(model.parameters(), _expected().parameters(), strict=True):
        assert isinstance(one, DTensor)
        torch.testing.assert_close(one.full_tensor().detach(), other.detach())
