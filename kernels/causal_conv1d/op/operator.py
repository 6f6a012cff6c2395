"""``causal_conv1d`` as commands know it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from scan_registry.kernels.causal_conv1d.problem import WIDTHS
from scan_registry.ops.operator import WITHOUT_DIM, Operator, Option, ParsedCall, described_tensor

if TYPE_CHECKING:
    from torch import Tensor


class CausalConv1d(Operator):
    """Its kernels are not tuned."""

    name = "causal_conv1d"
    shape = "batch, channels and time"
    instead = WITHOUT_DIM
    options = (
        Option("--width", type=int, metavar="N", help="taps of the filter; default: 4"),
        Option(
            "--channel-last", action="store_true", help="channels have stride 1, and time has not"
        ),
    )

    def parse(self, dtype: str, shape: tuple[int, ...], args: Namespace) -> ParsedCall:
        if len(shape) != 3:
            raise ValueError(
                f"--shape is {args.shape!r}; causal_conv1d takes batch, channels and time, such as 8,2048,2048"
            )
        width = 4 if args.width is None else args.width
        if width not in WIDTHS:
            raise ValueError(f"--width is {width}; accepted are {WIDTHS[0]} to {WIDTHS[-1]}")
        batch, channels, time = shape
        if args.channel_last:
            x = described_tensor((batch, time, channels), dtype).transpose(1, 2)
        else:
            x = described_tensor(shape, dtype)
        wide = "float64" if dtype == "float64" else "float32"
        tensors = (
            x,
            described_tensor((channels, width), wide),
            described_tensor((channels,), wide),
        )
        record = {"width": width, "channel_last": bool(args.channel_last)}
        return ParsedCall(tensors, {"activation": "silu"}, record)

    def run_on_cpu(self, problem: Any, tensors: Mapping[str, Tensor | None]) -> None:
        from scan_registry.kernels.causal_conv1d.op import cpu as causal_conv1d_cpu

        causal_conv1d_cpu.run(problem, tensors)


OPERATOR = CausalConv1d()
