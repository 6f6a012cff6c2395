"""``causal_conv1d`` as commands know it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from scan_registry.kernels.causal_conv1d.problem import WIDTHS
from scan_registry.ops import operator

if TYPE_CHECKING:
    from torch import Tensor


class CausalConv1d(operator.Operator):
    """Its kernels are not tuned."""

    name = "causal_conv1d"
    shape = "batch, channels and time"
    instead = operator.WITHOUT_DIM
    options = (
        operator.Option("--width", type=int, metavar="N", help="taps of the filter; default: 4"),
        operator.CHANNEL_LAST,
    )

    def parse(self, dtype: str, shape: tuple[int, ...], args: Namespace) -> operator.ParsedCall:
        _, channels, _ = operator.sequence_sizes(self, shape, args)
        width = 4 if args.width is None else args.width
        if width not in WIDTHS:
            raise ValueError(f"--width is {width}; accepted are {WIDTHS[0]} to {WIDTHS[-1]}")
        wide = "float64" if dtype == "float64" else "float32"
        tensors = (
            operator.described_sequence(shape, dtype, args),
            operator.described_tensor((channels, width), wide),
            operator.described_tensor((channels,), wide),
        )
        record = {"width": width, "channel_last": bool(args.channel_last)}
        return operator.ParsedCall(tensors, {"activation": "silu"}, record)

    def run_on_cpu(self, problem: Any, tensors: Mapping[str, Tensor | None]) -> None:
        from scan_registry.kernels.causal_conv1d.op import cpu as causal_conv1d_cpu

        causal_conv1d_cpu.run(problem, tensors)


OPERATOR = CausalConv1d()
