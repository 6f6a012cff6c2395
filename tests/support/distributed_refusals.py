"""What ranks do in tests of functions that refuse DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from distributed_cases import raised
from distributed_host_work import Counts
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from scan_registry import distributed

#: The functions, and the argument that is a DTensor.
ARGUMENTS = {
    "linear_scan": ("gates", "tokens", "initial_state", "reset"),
    "gated_scan": ("inputs[0]", "inputs[3]", "initial_state", "reset"),
    "selective_scan": ("u", "A", "B", "initial_state"),
    "ssd_scan": ("x", "A", "B", "initial_state"),
    "causal_conv1d": ("x", "weight", "bias", "seq_idx"),
    "scan_summary": ("gates", "tokens"),
}


def calls(group: Any, function: str) -> tuple[dict[str, Any], Callable[[dict[str, Any]], Any]]:
    """Tensors by name, of which a call takes all, and the call."""
    first, last = torch.rand(2, 6, 4), torch.rand(2, 4, 6)  # time in the middle, and at the end
    if function == "linear_scan":
        named = {"gates": first, "tokens": first, "initial_state": torch.rand(2, 4)}
        named["reset"] = torch.zeros(2, 6, dtype=torch.bool)
        return named, lambda given: distributed.linear_scan(**given, dim=1, group=group)
    if function == "gated_scan":
        named = {f"inputs[{number}]": first for number in range(3)}
        named |= {"inputs[3]": torch.rand(4), "initial_state": torch.rand(2, 4)}
        named["reset"] = torch.zeros(2, 6, dtype=torch.bool)

        def gated(given: dict[str, Any]) -> Any:
            *inputs, state, reset = given.values()
            how = {"initial_state": state, "reset": reset, "dim": 1, "group": group}
            return distributed.gated_scan("rg_lru", *inputs, **how)

        return named, gated
    if function == "selective_scan":
        named = {"u": last, "delta": last, "A": -torch.rand(4, 3), "B": torch.rand(2, 3, 6)}
        named |= {"C": torch.rand(2, 3, 6), "initial_state": torch.rand(2, 4, 3)}
        return named, lambda given: distributed.selective_scan(**given, group=group)
    if function == "ssd_scan":
        named = {"x": torch.rand(2, 6, 4, 3), "dt": first, "A": -torch.rand(4)}
        named |= {"B": torch.rand(2, 6, 2, 5), "C": torch.rand(2, 6, 2, 5)}
        named["initial_state"] = torch.rand(2, 4, 3, 5)
        return named, lambda given: distributed.ssd_scan(**given, group=group)
    if function == "causal_conv1d":
        named = {"x": last, "weight": torch.rand(4, 3), "bias": torch.rand(4)}
        named["seq_idx"] = torch.zeros(2, 6, dtype=torch.int32)
        return named, lambda given: distributed.causal_conv1d(**given, group=group)
    named = {"gates": first, "tokens": first}
    return named, lambda given: distributed.scan_summary(**given, dim=1)


def refused(rank: int, ranks: int, group: Any, function: str, compiled: bool) -> dict[str, str]:
    """What a call says of a DTensor in place of each argument. It may exchange headers, and nothing else; a call of plain
    tensors still works."""
    mesh = DeviceMesh.from_group(group, "cpu")
    named, call = calls(group, function)
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(call, backend="eager")
    call(named)
    said = {}
    for name in ARGUMENTS[function]:
        tensor = named[name]
        # Along time where there is one.
        along = [Shard(tensor.shape.index(6)) if 6 in tensor.shape else Replicate()]
        given = {**named, name: distribute_tensor(tensor, mesh, along)}
        with Counts() as counts:
            said[name] = raised(lambda given=given: call(given))
        assert len(counts.exchanges) <= 1, counts.exchanges
    call(named)
    return said


def refused_on_one(rank: int, ranks: int, group: Any, function: str) -> str:
    """The same, where only the last rank is given a DTensor."""
    mesh = DeviceMesh.from_group(group, "cpu")
    named, call = calls(group, function)
    name = ARGUMENTS[function][0]
    sharded = distribute_tensor(named[name], mesh, [Replicate()])
    said = raised(lambda: call({**named, name: sharded} if rank == ranks - 1 else named))
    call(named)
    return said
