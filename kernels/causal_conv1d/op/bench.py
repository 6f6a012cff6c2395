"""The benchmark of causal convolutions: cases, the bytes that they move, and the package causal_conv1d as a
baseline."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from scan_registry.dispatch.select import Backend
from scan_registry.kernels.causal_conv1d.problem import DTYPES, WIDTHS
from scan_registry.ops import benchmark
from scan_registry.ops.operator import PASSES

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LAYOUTS = ("time_last", "channel_last")
#: Those of Mamba's blocks.
USUAL = (
    "time_last:8,2048,2048:bfloat16",
    "channel_last:8,2048,2048:bfloat16",
    "time_last:4,5120,4096:bfloat16",
    "channel_last:1,8192,16384:bfloat16",
    "time_last:8,2048,4096:float32",
    "time_last:64,768,196:bfloat16",
    "time_last:8,2047,2039:bfloat16",
    "channel_last:8,2047,2039:bfloat16",
)
ON_CPU = ("time_last:2,64,256:float32",)


@dataclass(frozen=True)
class Case(benchmark.ParsedCase, benchmark.SequenceCase):
    """A convolution to time, with a bias and SiLU: ``time_last:8,2048,2048:bfloat16``, batch, channels and time."""

    family: ClassVar[str] = "causal_conv1d"
    expected: ClassVar[str] = (
        f"layout:batch,channels,time:dtype, and perhaps :width=N, where layouts are {', '.join(LAYOUTS)}, dtypes "
        f"{', '.join(DTYPES)}, and widths {WIDTHS[0]} to {WIDTHS[-1]}"
    )

    layout: str
    batch: int
    channels: int
    time: int
    dtype: str
    width: int = 4

    @classmethod
    def of(cls, parts: benchmark.CaseText) -> Case | None:
        layout, (batch, channels, time), dtype, options = parts
        width = int(options.pop("width", 4))
        known = layout in LAYOUTS and dtype in DTYPES and width in WIDTHS
        if not known or min(batch, channels, time) < 1:
            return None
        return cls(layout, batch, channels, time, dtype, width)

    @property
    def text(self) -> benchmark.CaseText:
        sizes = self.batch, self.channels, self.time
        return benchmark.CaseText(self.layout, sizes, self.dtype, self.unlike(width=4))

    def moves(self, direction: str) -> tuple[int, int]:
        """x and y; backward x, the gradient of y and that of x."""
        return (1, 1) if direction == PASSES[0] else (2, 1)

    def filters(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """New random weights and biases."""
        import torch

        weight = torch.randn(self.channels, self.width, device=device) / self.width**0.5
        return weight, torch.randn(self.channels, device=device)


class CausalConv1d(benchmark.Implementation):
    """The package of that name: forward as its users call it, backward its kernel alone."""

    name: ClassVar[str] = "causal-conv1d"

    def refusal(self, case: Case) -> str | None:
        if case.width > 4:
            return "it takes widths up to 4"
        odd = case.layout == "channel_last" and case.channels % 8
        return "it takes whole eights of contiguous channels" if odd else None

    def new_call(self, case: Case, direction: str, device: torch.device) -> benchmark.Call:
        import torch

        module: Any = importlib.import_module("causal_conv1d")
        x, filters = case.sequence(device), case.filters(device)

        def forward() -> Any:
            with torch.no_grad():
                return module.causal_conv1d_fn(x, *filters, activation="silu")

        if direction == PASSES[0]:
            return forward
        # Autograd would run on the stream of a forward pass, which no graph of another stream can record.
        functions = importlib.import_module("causal_conv1d.cpp_functions")
        nothing, grad = (None,) * 4, case.sequence(device)
        return lambda: functions.causal_conv1d_bwd_function(
            x, *filters, grad, *nothing, False, True
        )


class ConvBenchmark(benchmark.Benchmark):
    """Convolutions of width 4 in both layouts."""

    case_type, usual, packages = Case, (USUAL, ON_CPU), (CausalConv1d(),)
    subject = "causal convolutions"
    description = (
        "Times the forward and the backward pass of causal convolutions with a bias and SiLU, and the package "
        "causal-conv1d beside them where that is installed."
    )
    case_help = (
        "layout:batch,channels,time:dtype, to which :width=N may be added; may repeat. Default: sizes of Mamba's "
        "blocks"
    )
    columns = ("layout", "B, C, T~", "dtype")

    def call(
        self, case: Case, direction: str, backend: Backend, device: torch.device
    ) -> benchmark.Call:
        """The operator forward, and backward what autograd calls."""
        from scan_registry.kernels.causal_conv1d.op import plans
        from scan_registry.kernels.causal_conv1d.op.arguments import normalised
        from scan_registry.kernels.causal_conv1d.op.function import causal_conv1d

        x, (weight, bias) = case.sequence(device), case.filters(device)
        if direction == PASSES[0]:
            return lambda: causal_conv1d(x, weight, bias, activation="silu", backend=backend)
        arguments, options = normalised(x, weight, bias, None, None, None, False, "silu", backend)
        y_grad, wanted = case.sequence(device), (True, True, True, False)
        return lambda: plans.backward(arguments, y_grad, None, options, wanted)


BENCHMARK = ConvBenchmark()
