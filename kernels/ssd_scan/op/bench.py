"""What is timed of state space dual scans: cases, their bytes, and the package mamba_ssm beside them."""

from __future__ import annotations

import importlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from scan_registry.dispatch.select import Backend
from scan_registry.kernels.model import ITEM_SIZE
from scan_registry.ops import benchmark
from scan_registry.ops.operator import PASSES

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: Of Mamba-2's models, and few heads, long sequences, many states and several groups.
USUAL = (
    "dense:8,2048,80,64,128:bfloat16",
    "dense:4,4096,128,64,128:bfloat16",
    "dense:1,32768,128,64,128:bfloat16:groups=8",
    "dense:16,512,24,64,128:bfloat16",
    "dense:2,4096,128,64,256:bfloat16",
    "dense:8,2048,64,64,64:bfloat16:groups=2",
)
ON_CPU = ("dense:1,256,4,64,128:float32",)
#: Steps of a chunk in mamba_ssm, as its modules choose by default.
MAMBA_SSM_CHUNK = 256
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Case(benchmark.ParsedCase):
    """A scan as in Mamba-2's blocks, with D, a bias and softplus: ``dense:8,2048,80,64,128:bfloat16``, batch, time, heads, size of
    a head and states. ``groups`` are of heads that have B and C of their own."""

    family: ClassVar[str] = "ssd_scan"
    expected: ClassVar[str] = (
        f"dense:batch,time,heads,size,states:dtype, and perhaps :groups=N, where dtypes are {', '.join(_DTYPES)}, and "
        "groups divide the heads"
    )

    batch: int
    time: int
    heads: int
    size: int
    states: int
    dtype: str
    groups: int = 1

    @classmethod
    def of(cls, parts: benchmark.CaseText) -> Case | None:
        layout, (batch, time, heads, size, states), dtype, options = parts
        groups = int(options.pop("groups", 1))
        known = layout == "dense" and dtype in _DTYPES
        if not known or min(*parts.sizes, groups) < 1 or heads % groups:
            return None
        return cls(batch, time, heads, size, states, dtype, groups)

    @property
    def text(self) -> benchmark.CaseText:
        sizes = self.batch, self.time, self.heads, self.size, self.states
        return benchmark.CaseText("dense", sizes, self.dtype, self.unlike(groups=1))

    @property
    def options(self) -> str:
        return "" if self.groups == 1 else f"{self.groups} groups"

    @property
    def group(self) -> str:
        sizes = f"{self.batch} × {self.heads} × {self.size}, {self.states} states"
        return ", ".join(filter(None, [sizes, self.options]))

    @property
    def cells(self) -> tuple[str, ...]:
        return ", ".join(filter(None, [self.sizes, self.options])), self.dtype

    def moves(self, direction: str) -> tuple[int, int]:
        """x and the output; backward x, the output's gradient and that of x."""
        return (1, 1) if direction == PASSES[0] else (2, 1)

    def traffic(self, direction: str) -> int:
        """With dt, B and C, and their gradients; without the states that kernels hand on."""
        steps, times = self.batch * self.time, 1 if direction == PASSES[0] else 2
        numbers = steps * self.heads * self.size * sum(self.moves(direction))
        numbers += times * steps * (2 * self.groups * self.states + self.heads)
        return ITEM_SIZE[self.dtype] * numbers

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def sequence(self, device: torch.device | str) -> Tensor:
        """A new random tensor (batch, time, heads, size of a head)."""
        import torch

        shape = self.batch, self.time, self.heads, self.size
        return torch.randn(shape, device=device, dtype=getattr(torch, self.dtype))

    def inputs(self, device: torch.device | str) -> dict[str, Tensor]:
        """New ones. Step sizes are some hundredths."""
        import torch

        of_projection = self.batch, self.time, self.groups, self.states
        B, C = torch.randn(2, *of_projection, device=device, dtype=getattr(torch, self.dtype))
        return {
            "x": self.sequence(device),
            "dt": torch.randn(self.batch, self.time, self.heads, device=device).to(B.dtype) / 2,
            "A": -torch.rand(self.heads, device=device) * 15 - 1,
            "B": B,
            "C": C,
            "D": torch.randn(self.heads, device=device),
            "dt_bias": torch.rand(self.heads, device=device) - 4,
        }


class MambaSsm(benchmark.Implementation):
    """The package of that name: forward as its users call it, backward what its autograd function calls."""

    name: ClassVar[str] = "mamba-ssm"

    def new_call(self, case: Case, direction: str, device: torch.device) -> benchmark.Call:
        import torch

        module: Any = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
        tensors, out_grad = case.inputs(device), case.sequence(device)
        inputs = [tensors[name] for name in ("x", "dt", "A", "B", "C")]
        options = {"D": tensors["D"], "dt_bias": tensors["dt_bias"], "dt_softplus": True}

        def forward() -> Any:
            with torch.no_grad():
                return module.mamba_chunk_scan_combined(*inputs, MAMBA_SSM_CHUNK, **options)

        if direction == PASSES[0]:
            return forward
        out = forward()
        # Autograd would run on the stream of this forward pass, which no graph of another stream can record.
        backward = module._mamba_chunk_scan_combined_bwd
        return lambda: backward(out_grad, *inputs, out, MAMBA_SSM_CHUNK, **options)


class SSDScanBenchmark(benchmark.Benchmark):
    """Scans of the sizes of Mamba-2's blocks."""

    case_type, usual, packages = Case, (USUAL, ON_CPU), (MambaSsm(),)
    subject = "state space dual scans"
    description = (
        "Times the forward and the backward pass of Mamba-2's scans with D, a bias and softplus, and the package "
        "mamba-ssm beside them where that is installed."
    )
    case_help = (
        "dense:batch,time,heads,size,states:dtype, to which :groups=N may be added; may repeat. Default: sizes of "
        "Mamba-2's blocks"
    )
    columns = ("B, T, H, P, N~", "dtype")

    def call(
        self, case: Case, direction: str, backend: Backend, device: torch.device
    ) -> benchmark.Call:
        """The operator forward, and backward what autograd calls."""
        from scan_registry.kernels.ssd_scan.op import plans
        from scan_registry.kernels.ssd_scan.op.arguments import DIFFERENTIABLE, Arguments, Options
        from scan_registry.kernels.ssd_scan.op.function import ssd_scan

        inputs: dict[str, Any] = case.inputs(device)
        if direction == PASSES[0]:
            return lambda: ssd_scan(**inputs, dt_softplus=True, backend=backend)
        arguments = Arguments._make([inputs.get(name) for name in Arguments._fields])
        options = Options(True, backend=backend)
        out_grad = case.sequence(device)
        wanted = tuple(tensor is not None for tensor in arguments[:DIFFERENTIABLE])
        return lambda: plans.backward(arguments, None, out_grad, None, options, wanted)


BENCHMARK = SSDScanBenchmark()
