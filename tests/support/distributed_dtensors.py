"""What each rank does in tests of operators on DTensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from distributed_cases import raised
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode

import scan_registry

BATCH, CHANNELS, TIME, STATES = 4, 6, 7, 3


class Call(NamedTuple):
    """A function of tensors of these shapes, and which of their dimensions are of batch, of channels and of time."""

    function: Callable[..., Any]
    shapes: Sequence[tuple[int, ...]]
    batch: Sequence[int | None]
    channels: Sequence[int | None]
    time: Sequence[int | None]

    def tensors(self) -> list[Tensor]:
        made = torch.Generator().manual_seed(len(self.shapes))
        return [torch.randn(shape, dtype=torch.float64, generator=made) for shape in self.shapes]


_WHOLE, _STATE = (BATCH, CHANNELS, TIME), (BATCH, CHANNELS)


def _linear(gates: Tensor, tokens: Tensor, initial: Tensor) -> Any:
    return scan_registry.linear_scan(gates.sigmoid(), tokens, initial, return_final_state=True)


def _decayed(gates: Tensor, tokens: Tensor) -> Any:
    """Gates that do not change with time, of a lower rank."""
    return scan_registry.linear_scan(gates * 0.5, tokens, reverse=True)


def _time_first(gates: Tensor, tokens: Tensor) -> Any:
    return scan_registry.linear_scan(gates.sigmoid(), tokens, dim=1)


def _gated(x: Tensor, recurrence: Tensor, entry: Tensor, a: Tensor, initial: Tensor) -> Any:
    return scan_registry.gated_scan(
        *("rg_lru", x, recurrence, entry, a), initial_state=initial, return_final_state=True
    )


def _selective(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Any:
    rates = -A.abs()
    return scan_registry.selective_scan(
        u, delta, rates, B, C, D, u, delta_softplus=True, return_final_state=True
    )


def _biased(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, bias: Tensor) -> Any:
    """Of the same shapes as the arguments of ``_selective``, in other places."""
    return scan_registry.selective_scan(
        u, delta, -A.abs(), B, C, None, None, bias, delta_softplus=True
    )


def _dual(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, S: Tensor) -> Any:
    return scan_registry.ssd_scan(
        *(x, dt, -A.abs(), B, C, D, x, A, True), initial_state=S, return_final_state=True
    )


def _dual_of_one_group(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Any:
    return scan_registry.ssd_scan(x, dt, -A.abs(), B, C)


def _convolved(x: Tensor, weight: Tensor, bias: Tensor, initial: Tensor) -> Any:
    return scan_registry.causal_conv1d(
        *(x, weight, bias), initial_state=initial, return_final_state=True, activation="silu"
    )


def _plainly_convolved(x: Tensor, weight: Tensor, initial: Tensor) -> Any:
    return scan_registry.causal_conv1d(x, weight, initial_state=initial)


_SELECTIVE = (
    [_WHOLE, _WHOLE, (CHANNELS, STATES), (BATCH, STATES, TIME), (BATCH, 2, STATES, TIME), (CHANNELS,)],
    [0, 0, None, 0, 0, None],
    [1, 1, 0, None, 1, 0],
    [2, 2, None, 2, 3, None],
)  # fmt: skip
_HEADS = (BATCH, TIME, CHANNELS, 2), (BATCH, TIME, CHANNELS), (CHANNELS,)
CALLS = {
    "ssd_scan": Call(
        *(_dual, [*_HEADS, *[(BATCH, TIME, 2, STATES)] * 2, (CHANNELS,), (BATCH, CHANNELS, 2, STATES)]),
        *([0, 0, None, 0, 0, None, 0], [2, 2, 0, 2, 2, 0, 1], [1, 1, None, 1, 1, None, None]),
    ),
    "ssd_scan, one group": Call(
        *(_dual_of_one_group, [*_HEADS, *[(BATCH, TIME, 1, STATES)] * 2]),
        *([0, 0, None, 0, 0], [2, 2, 0, None, None], [1, 1, None, 1, 1]),
    ),
    "linear_scan": Call(_linear, [_WHOLE, _WHOLE, _STATE], [0, 0, 0], [1, 1, 1], [2, 2, None]),
    "linear_scan, broadcast": Call(
        _decayed, [(CHANNELS, 1), _WHOLE], [None, 0], [0, 1], [None, 2]
    ),
    "linear_scan, time first": Call(
        _time_first, [(BATCH, TIME, CHANNELS)] * 2, [0, 0], [2, 2], [1, 1]
    ),
    "gated_scan": Call(
        *(_gated, [_WHOLE, _WHOLE, _WHOLE, (CHANNELS,), _STATE], [0, 0, 0, None, 0]),
        *([1, 1, 1, 0, 1], [2, 2, 2, None, None]),
    ),
    "selective_scan": Call(_selective, *_SELECTIVE),
    "selective_scan, bias": Call(_biased, *_SELECTIVE),
    "causal_conv1d": Call(
        *(_convolved, [_WHOLE, (CHANNELS, 4), (CHANNELS,), (BATCH, CHANNELS, 3)], [0, None, None, 0]),
        *([1, 0, 0, 1], [2, None, None, None]),
    ),
    "causal_conv1d, no bias": Call(
        *(_plainly_convolved, [_WHOLE, (CHANNELS, 4), (BATCH, CHANNELS, 3)], [0, None, 0]),
        *([1, 0, 1], [2, None, None]),
    ),
}  # fmt: skip


def outputs(made: Any) -> tuple[Any, ...]:
    return made if isinstance(made, tuple) else (made,)


def mesh_of(group: Any) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu")


def sharded(call: Call, mesh: DeviceMesh, dims: Sequence[int | None]) -> list[Any]:
    return [
        distribute_tensor(t, mesh, [Replicate() if d is None else Shard(d)]).requires_grad_()
        for t, d in zip(call.tensors(), dims, strict=True)
    ]


def compare(call: Call, made: Any, parts: Sequence[Any]) -> list[Any]:
    """Results and gradients with those of one process; the gradients as they lie."""
    whole = [t.requires_grad_() for t in call.tensors()]
    expected = call.function(*whole)
    for one, other in zip(outputs(made), outputs(expected), strict=True):
        assert isinstance(one, DTensor)
        torch.testing.assert_close(one.full_tensor(), other)
        assert one.shape == other.shape
        assert one.stride() == other.stride()
    mesh = outputs(made)[0].device_mesh
    # In which elements differ. A loss of DTensors would take longer than all else: torch tries every way in which its
    # operators may lie on a mesh.
    weights = [each.detach().cos() for each in outputs(expected)]
    placed = [
        distribute_tensor(weight, mesh, one.placements, src_data_rank=None)
        for weight, one in zip(weights, outputs(made), strict=True)
    ]
    wanted = torch.autograd.grad(outputs(expected), whole, weights)
    found = torch.autograd.grad(outputs(made), parts, placed)
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        torch.testing.assert_close(
            one.full_tensor(), other, msg=lambda text, n=number: f"gradient {n}: {text}"
        )
    return [*found]


def check_shards(rank: int, ranks: int, group: Any, name: str, along: str) -> None:
    """Shards of batch or of channels are computed without communication, and their gradients, too."""
    call, mesh = CALLS[name], mesh_of(group)
    dims = getattr(call, along)
    parts = sharded(call, mesh, dims)
    with CommDebugMode() as sent:
        made = call.function(*parts)
        gradients = torch.autograd.grad(
            outputs(made), parts, [torch.ones_like(each) for each in outputs(made)]
        )
    assert sent.get_total_counts() == 0, sent.get_comm_counts()
    for out in outputs(made):
        assert out.placements[0].is_shard(), out.placements
    for grad, dim in zip(gradients, dims, strict=True):
        assert grad.placements == ((Partial() if dim is None else Shard(dim)),)
    compare(call, call.function(*parts), parts)


def check_time(rank: int, ranks: int, group: Any, name: str) -> None:
    """Shards of time give what one process gives, and stay shards of time, without the whole in any place."""
    call, mesh = CALLS[name], mesh_of(group)
    parts = sharded(call, mesh, call.time)
    made = call.function(*parts)
    place = next(d for d in call.time if d is not None)
    assert outputs(made)[0].placements == (Shard(place if name != "linear_scan, broadcast" else 2),)
    if len(outputs(made)) == 2:
        assert outputs(made)[1].placements == (Replicate(),)
    compare(call, made, parts)


def check_redistributed(rank: int, ranks: int, group: Any) -> None:
    """What cannot be computed as it lies is redistributed: parts of sums, states and groups that do not go with shards."""
    mesh = mesh_of(group)
    call = CALLS["selective_scan"]
    tensors = call.tensors()
    places: list[Placement] = [Shard(0), Shard(1), Shard(1), Shard(1), Shard(1), Replicate()]
    parts = [
        distribute_tensor(t, mesh, [p]).requires_grad_()
        for t, p in zip(tensors, places, strict=True)
    ]
    compare(call, call.function(*parts), parts)
    call = CALLS["causal_conv1d"]
    tensors = call.tensors()
    summands = DTensor.from_local(tensors[0] / ranks, mesh, [Partial()])
    others = [distribute_tensor(t, mesh, [Replicate()]) for t in tensors[1:]]
    made = call.function(summands, *others)
    torch.testing.assert_close(made[0].full_tensor(), call.function(*tensors)[0])
    # With the operator itself, time is gathered, or exchanged for another dimension.
    x = distribute_tensor(tensors[0], mesh, [Shard(2)])
    last = torch.ops.scan_registry.causal_conv1d(
        x, others[0], None, None, None, None, False, True, "auto"
    )[1]
    torch.testing.assert_close(last.full_tensor(), tensors[0][..., -3:])


def check_time_with_options(rank: int, ranks: int, group: Any) -> None:
    """Bounds, numbers of sequences and resets, plain or sharded, and what no function over ranks takes."""
    mesh = mesh_of(group)
    made = torch.Generator().manual_seed(1)
    x, gates = (torch.rand(1, CHANNELS, TIME, dtype=torch.float64, generator=made) for _ in "xg")
    # The same on every rank, whatever each has drawn before.
    weight = torch.rand(CHANNELS, 3, dtype=torch.float64, generator=made)
    state = torch.rand(1, CHANNELS, 2, generator=made)
    bounds, numbers = torch.tensor([0, 2, 2, TIME]), torch.tensor([[0, 0, 1, 1, 1, 2, 2]])
    reset = numbers.diff(dim=1, prepend=numbers[:, :1]) != 0
    parts, of_gates = (distribute_tensor(t, mesh, [Shard(2)]) for t in (x, gates))
    filters = distribute_tensor(weight, mesh, [Replicate()])
    states = distribute_tensor(state.double(), mesh, [Replicate()])
    of_numbers = distribute_tensor(numbers, mesh, [Shard(1)])
    conv, scan = scan_registry.causal_conv1d, scan_registry.linear_scan
    both = {"cu_seqlens": bounds, "return_final_state": True}
    pairs: list[tuple[Any, Any]] = [
        (conv(parts, filters, **both), conv(x, weight, **both)),
        (
            conv(parts, filters, initial_state=states, seq_idx=of_numbers),
            conv(x, weight, initial_state=state.double(), seq_idx=numbers),
        ),
        (conv(parts, filters, seq_idx=numbers), conv(x, weight, seq_idx=numbers)),
        (scan(of_gates, parts, **both), scan(gates, x, **both)),
        (scan(of_gates, parts, reverse=True), scan(gates, x, reverse=True)),
        (
            scan_registry.gated_scan("linear", of_gates, parts, reset=reset),
            scan_registry.gated_scan("linear", gates, x, reset=reset),
        ),
        (scan(of_gates, parts, reset=reset), scan(gates, x, reset=reset)),
    ]
    for found, expected in pairs:
        for one, other in zip(outputs(found), outputs(expected), strict=True):
            torch.testing.assert_close(one.full_tensor(), other)


#: What the dimensions of a mesh shard: each in either place, and time along both.
PAIRS = (("batch", "time"), ("time", "channels"), ("channels", "batch"), ("time", "time"))


def check_two_dimensions(rank: int, ranks: int, group: Any, name: str, every: bool) -> None:
    """A mesh of 2 × 2, and some or all pairs of what its dimensions shard."""
    # All processes that there are take part in making its groups.
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("one", "other"))
    if rank > 3:
        return
    call = CALLS[name]
    for along in product(("batch", "channels", "time"), repeat=2) if every else PAIRS:
        dims = zip(*(getattr(call, each) for each in along), strict=True)
        parts = [
            distribute_tensor(t, mesh, [Replicate() if d is None else Shard(d) for d in both])
            for t, both in zip(call.tensors(), dims, strict=True)
        ]
        parts = [part.requires_grad_() for part in parts]
        compare(call, call.function(*parts), parts)


def check_plain_tensors(rank: int, ranks: int, group: Any) -> list[str]:
    """Integers may be no DTensors; what else is refused."""
    mesh = mesh_of(group)
    made = torch.Generator().manual_seed(2)
    x, weight = (
        torch.randn(*size, generator=made) for size in ((1, CHANNELS, TIME), (CHANNELS, 4))
    )
    bounds = torch.tensor([0, 2, TIME])
    expected = scan_registry.causal_conv1d(x, weight, cu_seqlens=bounds)
    parts = distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(weight, mesh, [Shard(0)])
    made: Any = scan_registry.causal_conv1d(*parts, cu_seqlens=bounds)
    torch.testing.assert_close(made.full_tensor(), expected)
    calls = (
        lambda: scan_registry.causal_conv1d(parts[0], weight),
        lambda: scan_registry.linear_scan(parts[0], x),
        lambda: scan_registry.causal_conv1d(distribute_tensor(x, mesh, [Shard(2)]), weight),
        lambda: scan_registry.linear_scan(parts[0], None),  # type: ignore[call-overload]
        lambda: scan_registry.causal_conv1d(parts[0], parts[1][:2]),
    )
    return [*map(raised, calls)]


def check_compiled(rank: int, ranks: int, group: Any, both: bool) -> None:
    """In one graph where no time is sharded, one operator or two; by a break of the graph where it is."""
    mesh = mesh_of(group)
    for name in ("causal_conv1d", "gated_scan")[: 1 + both]:
        call = CALLS[name]
        torch._dynamo.reset()
        parts = sharded(call, mesh, call.channels)
        compiled = torch.compile(call.function, backend="aot_eager", fullgraph=True)
        compare(call, compiled(*parts), parts)
    call = CALLS["causal_conv1d"]
    parts = sharded(call, mesh, call.time)
    compare(call, torch.compile(call.function, backend="aot_eager")(*parts), parts)
