"""What is timed of selective scans: cases, their bytes, targets, and the package mamba_ssm beside them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from scan_registry.dispatch.select import Backend
from scan_registry.kernels.model import ITEM_SIZE
from scan_registry.kernels.selective_scan.op.operator import GATES
from scan_registry.kernels.selective_scan.problem import DTYPES, MOST_STATES
from scan_registry.ops import benchmark
from scan_registry.ops.operator import PASSES

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    #: u, delta, A, B, C, D, z, delta_bias.
    Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]

LAYOUTS = ("time_last", "channel_last")
ON_CPU = ("time_last:2,64,128,16:float32",)
#: Milliseconds of mamba_ssm's kernels, forward and backward, on one H100.
MAMBA_SSM = {
    "time_last:8,2048,2048,16:bfloat16": (0.600, 2.488),
    "time_last:8,2048,4096,16:bfloat16": (1.207, 4.924),
    "time_last:4,5120,4096,16:bfloat16": (1.494, 6.165),
    "time_last:1,5120,32768,16:bfloat16": (3.832, 12.58),
    "time_last:8,2048,4096,16:float32": (2.485, 5.675),
    "time_last:32,1536,512,16:bfloat16": (0.445, 1.752),
    "time_last:64,768,196,16:bfloat16:gate=none": (0.395, 1.242),
    "time_last:1,8192,16384,16:bfloat16": (3.022, 10.17),
    "time_last:8,1024,4096,64:bfloat16": (2.062, 9.391),
}
#: Few channels, short sequences and few states, which have no targets.
FURTHER = (
    *("time_last:128,192,197,8:bfloat16", "time_last:4,1536,1000,16:float32"),
    *("time_last:16,384,3136,16:float16", "time_last:2,1536,2048,16:bfloat16"),
    "time_last:8,1536,512,16:bfloat16",
)
#: How many times as fast the kernels are to be, forward and backward.
FACTORS = (2.5, 3.0)


@dataclass(frozen=True)
class Case(benchmark.ParsedCase, benchmark.SequenceCase):
    """A scan as in Mamba's blocks, with D, a bias and softplus: ``time_last:8,2048,2048,16:bfloat16``, batch, channels,
    time and states.

    gate    whether there is a z
    groups  of channels that have B and C of their own
    """

    family: ClassVar[str] = "selective_scan"
    expected: ClassVar[str] = (
        "layout:batch,channels,time,states:dtype, and perhaps :gate=none and :groups=N, where layouts are "
        f"{', '.join(LAYOUTS)}, dtypes {', '.join(DTYPES)}, states 1 to {MOST_STATES}, and groups divide the channels"
    )

    layout: str
    batch: int
    channels: int
    time: int
    states: int
    dtype: str
    gate: str = GATES[0]
    groups: int = 1

    @classmethod
    def of(cls, parts: benchmark.CaseText) -> Case | None:
        layout, (batch, channels, time, states), dtype, options = parts
        gate, groups = options.pop("gate", GATES[0]), int(options.pop("groups", 1))
        known = layout in LAYOUTS and dtype in DTYPES and gate in GATES
        if not known or min(*parts.sizes, groups) < 1 or states > MOST_STATES or channels % groups:
            return None
        return cls(layout, batch, channels, time, states, dtype, gate, groups)

    @property
    def text(self) -> benchmark.CaseText:
        sizes = self.batch, self.channels, self.time, self.states
        options = self.unlike(gate=GATES[0], groups=1)
        return benchmark.CaseText(self.layout, sizes, self.dtype, options)

    @property
    def options(self) -> str:
        ungated = [] if self.gate == GATES[0] else ["no gate"]
        return ", ".join([*ungated, *([] if self.groups == 1 else [f"{self.groups} groups"])])

    @property
    def group(self) -> str:
        sizes = f"{self.batch} × {self.channels}, {self.states} states"
        return ", ".join(filter(None, [self.layout, sizes, self.options]))

    def moves(self, direction: str) -> tuple[int, int]:
        """u, delta, z and the output; backward also the output's gradient and those of u, delta and z."""
        gate = int(self.gate == GATES[0])
        return (2 + gate, 1) if direction == PASSES[0] else (3 + gate, 2 + gate)

    def traffic(self, direction: str) -> int:
        """With B and C, and their gradients."""
        elements = self.batch * self.channels * self.time
        projections = self.batch * self.groups * self.states * self.time
        count = 2 if direction == PASSES[0] else 4
        return ITEM_SIZE[self.dtype] * (elements * sum(self.moves(direction)) + count * projections)

    def inputs(self, device: torch.device | str) -> Inputs:
        """New ones. Step sizes are some hundredths."""
        import torch

        of_projection = self.batch, self.groups, self.states, self.time
        dtype = getattr(torch, self.dtype)
        B, C = torch.randn(2, *of_projection, device=device, dtype=dtype)
        return (
            self.sequence(device),
            self.sequence(device) / 2,
            -torch.arange(1.0, self.states + 1, device=device).repeat(self.channels, 1),
            B,
            C,
            torch.randn(self.channels, device=device),
            self.sequence(device) if self.gate == GATES[0] else None,
            torch.rand(self.channels, device=device) - 4,
        )


class MambaSsm(benchmark.Implementation):
    """The package of that name: forward as its users call it, backward its CUDA kernel alone."""

    name: ClassVar[str] = "mamba-ssm"

    def refusal(self, case: Case) -> str | None:
        return "it copies channels that are contiguous" if case.layout != LAYOUTS[0] else None

    def new_call(self, case: Case, direction: str, device: torch.device) -> benchmark.Call:
        import torch

        module: Any = importlib.import_module("mamba_ssm.ops.selective_scan_interface")
        inputs = case.inputs(device)

        def forward() -> Any:
            with torch.no_grad():
                return module.selective_scan_fn(*inputs, delta_softplus=True)

        if direction == PASSES[0]:
            return forward
        # Autograd would run on the stream of this forward pass, which no graph of another stream can record.
        kernels, (*tensors, gate, bias) = module.selective_scan_cuda, inputs
        out, states, *_ = kernels.fwd(*tensors, gate, bias, True)
        grad, out = torch.randn_like(out), None if gate is None else out
        return lambda: kernels.bwd(*tensors, gate, bias, grad, states, out, None, True, False)


class SelectiveScanBenchmark(benchmark.Benchmark):
    """Scans of the sizes of Mamba's blocks, each with what it is to take at most."""

    case_type, usual = Case, ((*MAMBA_SSM, *FURTHER), ON_CPU)
    packages = (MambaSsm(),)
    subject = "selective scans"
    description = (
        "Times the forward and the backward pass of selective scans with D, a bias, softplus and, unless a case says "
        "otherwise, a gate z, and the package mamba-ssm beside them where that is installed with its CUDA kernels."
    )
    case_help = (
        "layout:batch,channels,time,states:dtype, to which :gate=none and :groups=N may be added; may repeat. "
        "Default: those of the project's performance targets, and others of few channels, short sequences or few states"
    )
    columns = ("layout", "B, D, T, N~", "dtype")
    aim = "target ms>", "{:.3f}"

    def call(
        self, case: Case, direction: str, backend: Backend, device: torch.device
    ) -> benchmark.Call:
        """The operator forward, and backward what autograd calls."""
        from scan_registry.kernels.selective_scan.op import plans
        from scan_registry.kernels.selective_scan.op.arguments import Options, normalised
        from scan_registry.kernels.selective_scan.op.function import selective_scan

        inputs = case.inputs(device)
        if direction == PASSES[0]:
            return lambda: selective_scan(*inputs, delta_softplus=True, backend=backend)
        arguments = normalised(*inputs, None, None, True, backend)
        options = Options(True, backend)
        checkpoints = plans.forward(arguments, options, True).checkpoints
        out_grad = case.sequence(device)
        wanted = (*(t is not None for t in inputs), False)
        return lambda: plans.backward(arguments, checkpoints, out_grad, None, options, wanted)

    def baselines(self, device: torch.device) -> Sequence[benchmark.Baseline]:
        known = importlib.util.find_spec("selective_scan_cuda") is not None
        return super().baselines(device) if known else ()

    def aimed_at(self, timing: benchmark.Timing) -> float | None:
        """A share of what mamba_ssm takes."""
        times, place = MAMBA_SSM.get(str(timing.case)), PASSES.index(timing.direction)
        return None if times is None else times[place] / FACTORS[place]


BENCHMARK = SelectiveScanBenchmark()
