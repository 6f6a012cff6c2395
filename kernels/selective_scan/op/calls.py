"""What a selective scan poses to the kernels, from facts about its tensors: pure, and alike for every array library."""

from __future__ import annotations

from collections.abc import Mapping

from scan_registry.base.tensor_facts import TensorFacts
from scan_registry.kernels.model import ITEM_SIZE
from scan_registry.kernels.selective_scan.problem import (
    STRIDED,
    Direction,
    Layout,
    SelectiveScanProblem,
)


def make_problem(
    direction: Direction,
    tensors: Mapping[str, TensorFacts],
    *,
    states: int,
    layout: Layout,
    softplus: bool,
    sequences: int | None,
    addresses: int,
    parts: int = 1,
) -> SelectiveScanProblem:
    """One direction of a scan. ``tensors`` are those that have strides, by the names in ``STRIDED``, with the dimensions in the
    order there. B and C are of as many groups. ``addresses`` say how far all tensors are aligned, up to 16 bytes."""
    u = tensors["u"]
    batch, channels, time = u.shape
    groups = tensors["B"].shape[1]
    along, length = (2, time) if layout == "time_last" else (1, channels // groups)
    strides: list[int] = []
    for name, dimensions in STRIDED[direction].items():
        facts = tensors.get(name)
        strides += [0] * len(dimensions) if facts is None else facts.strides
    sequence = [facts for name, facts in tensors.items() if name not in ("B", "C")]
    return SelectiveScanProblem(
        *(direction, u.dtype, layout),
        *(batch, channels, time, states, groups),
        strides=tuple(strides),
        softplus=softplus,
        parts=parts,
        sequences=sequences or 0,
        aligned=sequences is None
        and length % (16 // ITEM_SIZE[u.dtype]) == 0
        and all(_on_16_bytes(facts, along, addresses) for facts in sequence),
        whole=(
            sequences is None and _on_16_bytes(tensors["B"], 3, addresses),
            sequences is None and _on_16_bytes(tensors["C"], 3, addresses),
        ),
    )


def _on_16_bytes(tensor: TensorFacts, along: int, addresses: int) -> bool:
    """Whether its rows along a dimension lie without gaps and start on 16 bytes."""
    size = ITEM_SIZE[tensor.dtype]
    others = [
        stride * size
        for dim, stride in enumerate(tensor.strides)
        if dim != along and tensor.shape[dim] > 1
    ]
    return tensor.strides[along] == 1 and not any(
        distance % 16 for distance in (addresses, *others)
    )
