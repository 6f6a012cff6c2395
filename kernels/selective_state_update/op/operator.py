"""``selective_state_update`` as commands know it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING

from scan_registry.ops.operator import Operator, ParsedCall, described_tensor

if TYPE_CHECKING:
    from torch import Tensor

    from scan_registry.kernels.selective_state_update.problem import StepProblem

#: The kernel's pointers that are arguments, in their order.
_ARGUMENTS = (
    *("state", "x", "dt", "A", "B", "C", "D", "z", "bias", "indices"),
    *("dst_state", "dst_indices", "seed", "cu_seqlens", "num_accepted"),
)


class SelectiveStateUpdate(Operator):
    """Its kernel is not tuned."""

    name = "selective_state_update"
    shape = "batch, channels and states, or batch, heads, channels and states"

    def parse(self, dtype: str, shape: tuple[int, ...], args: Namespace) -> ParsedCall:
        """All tensors but A, D and the bias are of the dtype."""
        if len(shape) not in (3, 4):
            raise ValueError(
                f"--shape is {args.shape!r}; selective_state_update takes batch, channels and states, such as "
                "64,5120,16, or batch, heads, channels and states"
            )
        batch, *channels, states = shape
        wide = "float64" if dtype == "float64" else "float32"
        row, projection = (batch, *channels), (batch, states)
        tensors = (
            *(described_tensor(of_tensor, dtype) for of_tensor in (shape, row, row)),
            described_tensor((*channels, states), wide),
            *(described_tensor(projection, dtype) for _ in "BC"),
            described_tensor(tuple(channels), wide),
            described_tensor(row, dtype),
            described_tensor(tuple(channels), wide),
        )
        return ParsedCall(tensors, {"dt_softplus": True}, {})

    def run_on_cpu(self, problem: StepProblem, tensors: Mapping[str, Tensor | None]) -> None:
        from scan_registry.kernels.selective_state_update.cases import without_heads
        from scan_registry.kernels.selective_state_update.op import plans

        named, out = without_heads(tensors), tensors["out"]
        arguments = tuple(named[name] for name in _ARGUMENTS)
        result = plans.step(arguments, problem.softplus, problem.pad_slot, "auto")
        assert out is not None
        out.copy_(result.view_as(out))


OPERATOR = SelectiveStateUpdate()
