"""What is sharded over each dimension of a mesh: pure arithmetic on letters."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from scan_registry import kernels
from scan_registry.distributed import layouts
from scan_registry.distributed.dtensor import LAYOUTS, Input, choose
from scan_registry.distributed.layouts import Layout

for name in kernels.operators():
    import_module(f"{kernels.__name__}.{name}.op.function")  # they register their operators
import_module(f"{kernels.__name__}.linear_scan.op.summary")

WHOLE, CHANNEL = "bct", "c"
LAYOUT = Layout((WHOLE, CHANNEL), (WHOLE,), "bc")


def chosen(*placements: tuple[Placement, ...], layout: Layout = LAYOUT) -> tuple[str, ...]:
    """For x of (batch, channels, time) and a weight for each channel, on a mesh of 2 in each dimension."""
    sizes = [2] * len(placements[0])
    counts = (1000, 10)
    held = [
        Input(letters or "", each, count)
        for letters, each, count in zip(layout.inputs, placements, counts, strict=True)
    ]
    return choose(layout, sizes, held)


def test_what_lies_as_it_is_computed_stays() -> None:
    assert chosen((Shard(0),), (Replicate(),)) == ("b",)
    assert chosen((Shard(1),), (Shard(0),)) == ("c",)
    assert chosen((Replicate(),), (Replicate(),)) == ("",)


def test_the_smaller_tensor_is_moved() -> None:
    assert chosen((Shard(1),), (Replicate(),)) == ("c",)
    assert chosen((Shard(0),), (Shard(0),)) == ("b",)


def test_sums_and_shards_of_time_are_spread_rather_than_gathered() -> None:
    assert chosen((Partial(),), (Replicate(),)) == ("b",)
    assert chosen((Shard(2),), (Replicate(),)) == ("b",)
    assert chosen((Shard(2),), (Shard(0),)) == ("c",)


def test_each_dimension_of_a_mesh_has_its_own_letter() -> None:
    both = (Shard(0), Shard(1)), (Replicate(), Shard(0))
    assert chosen(*both) == ("b", "c")
    assert chosen((Shard(1), Shard(1)), (Shard(0), Shard(0))) == ("c", "c")


def test_groups_are_not_parted() -> None:
    """Six groups over two dimensions of two ranks: the second one would part them."""
    grouped = LAYOUT._replace(whole={"c": 6})
    both = (Shard(1), Shard(1)), (Shard(0), Shard(0))
    assert chosen(*both, layout=grouped)[0] == "c"
    assert chosen(*both, layout=grouped)[1] != "c"
    assert chosen(*both, layout=LAYOUT._replace(whole={"c": 4})) == ("c", "c")


def test_what_is_broadcast_is_not_sharded() -> None:
    assert layouts.broadcast((6, 1), (4, 6, 7), "abt") == "b."
    assert layouts.broadcast((1, 6, 7), (4, 6, 7), "abt") == ".bt"


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_operator_has_letters_for_every_tensor(name: str) -> None:
    """Of a call with all optional tensors, none too many and none too few."""
    tensors: dict[str, Any] = {
        "inputs": [torch.empty(2, 3, 4)] * 3,
        "parameters": [torch.empty(3)],
        **{n: torch.empty(2, 3, 4) for n in ("gates", "tokens", "states", "states_grad", "x")},
        **{n: torch.empty(2, 3, 4) for n in ("u", "delta", "z", "out_grad", "y_grad")},
        **{n: torch.empty(2, 1, 5, 4) for n in "BC"},
    }
    operator = getattr(torch.ops.scan_registry, name).default
    args, count, options = [], 0, {"dim": -1, "kind": "rg_lru", "wanted": [True] * 9}
    outputs = len(operator._schema.returns)
    for argument in operator._schema.arguments:
        kind = str(argument.type)
        if "Tensor" not in kind:
            args.append(options.get(argument.name, True))
            continue
        value = tensors.get(argument.name, torch.empty(2, 3))
        args.append(value)
        count += len(value) if isinstance(value, list) else 1
    if "wanted" in {argument.name for argument in operator._schema.arguments}:
        place = [a.name for a in operator._schema.arguments].index("wanted")
        outputs = {"gated_scan_backward": 5}.get(name, outputs)
        args[place] = [True] * outputs
    layout = LAYOUTS[name](*args)
    assert len(layout.inputs) == count
    assert len(layout.outputs) == outputs
    assert None not in layout.inputs
    first = layout.outputs[0]
    assert first is not None
    assert {*layout.letters} <= {*first}
