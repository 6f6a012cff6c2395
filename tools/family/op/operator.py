"""``scale`` as commands know it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING

from scan_registry.ops.operator import Operator, Option, ParsedCall, described_tensor

if TYPE_CHECKING:
    from torch import Tensor

    from scan_registry.kernels.scale.spec import ScaleProblem


class Scale(Operator):
    """Its kernel is not tuned."""

    name = "scale"
    shape = "any sizes"
    options = (
        Option("--factor", type=int, metavar="N", help="what x is multiplied by; default: 2"),
    )

    def parse(self, dtype: str, shape: tuple[int, ...], args: Namespace) -> ParsedCall:
        how = {"factor": 2 if args.factor is None else args.factor}
        return ParsedCall((described_tensor(shape, dtype),), how, how)

    def run_on_cpu(self, problem: ScaleProblem, tensors: Mapping[str, Tensor | None]) -> None:
        from scan_registry.kernels.scale.op.function import scale

        x, y = tensors["x"], tensors["y"]
        assert x is not None
        assert y is not None
        y.copy_(scale(x, problem.factor))


OPERATOR = Scale()
