"""The benchmark of gated scans: cases, the bytes that they move, targets, and the baselines."""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

from scan_registry.catalog import distributions
from scan_registry.dispatch.select import Backend
from scan_registry.kernels.gated_scan.kinds import KINDS
from scan_registry.kernels.gated_scan.problem import DTYPES, LAYOUTS
from scan_registry.ops import benchmark
from scan_registry.ops.operator import DTYPES as DTYPE_WORDS
from scan_registry.ops.operator import PASSES, Option, known

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: The kinds that are timed by default. The benchmark of ``linear_scan`` times linear scans.
TIMED = ("min_gru", "rg_lru", "min_lstm", "hgrn")
#: The kinds that can be timed.
ACCEPTED = tuple(kind for kind in KINDS if kind != "linear")
#: Batch, channels, time.
SIZES = ("8,2560,4096", "16,1024,2048", "1,2048,65536")
ON_CPU = "2,64,256"
#: The share of the bandwidth roofline that the kernels are to reach, forward and backward.
TARGETS = (0.80, 0.75)


@dataclass(frozen=True)
class Case(benchmark.SequenceCase):
    """A scan to time, without options: ``min_gru:channel_last:8,2560,4096:bfloat16``, batch, channels and time, whatever
    the layout."""

    family: ClassVar[str] = "gated_scan"

    kind: str
    layout: str
    batch: int
    channels: int
    time: int
    dtype: str

    @classmethod
    def parse(cls, text: str) -> Case:
        """``ValueError`` for anything that is no case."""
        try:
            kind, layout, shape, word = text.split(":")
            dtype = DTYPE_WORDS.get(word, word)
            batch, channels, time = map(int, shape.split(","))
            is_known = kind in ACCEPTED and layout in LAYOUTS and dtype in DTYPES
            if not is_known or min(batch, channels, time) < 1:
                raise ValueError
        except ValueError:
            raise ValueError(
                f"the case is {text!r}; expected kind:layout:batch,channels,time:dtype, where kinds are "
                f"{', '.join(ACCEPTED)}, layouts {', '.join(LAYOUTS)}, and dtypes {', '.join(DTYPES)}"
            ) from None
        return cls(kind, layout, batch, channels, time, dtype)

    def __str__(self) -> str:
        return f"{self.kind}:{self.layout}:{self.sizes.replace(' ', '')}:{self.dtype}"

    @property
    def group(self) -> str:
        return f"{self.kind}, {self.layout}, {self.batch} × {self.channels}"

    @property
    def cells(self) -> tuple[str, ...]:
        return self.kind, self.layout, self.sizes, self.dtype

    def moves(self, direction: str) -> tuple[int, int]:
        """How many sequences a pass reads and writes. Forward reads the inputs and writes the states. Backward reads inputs,
        states and their gradient, and writes the gradients of the inputs."""
        inputs = len(KINDS[self.kind].inputs)
        return (inputs, 1) if direction == PASSES[0] else (inputs + 2, inputs)

    def parameters(self, device: torch.device | str) -> list[Tensor]:
        """New random channel parameters from 0 to 0.9, a range that is valid for a lower bound, too."""
        import torch

        kind = KINDS[self.kind]
        return [torch.rand(self.channels, device=device) * 0.9 for _ in kind.parameters]

    def tensors(self, device: torch.device | str) -> tuple[list[Tensor], list[Tensor]]:
        """Sequences (batch, channels, time) and channel parameters."""
        inputs = [self.sequence(device) for _ in KINDS[self.kind].inputs]
        return inputs, self.parameters(device)


# --- Baselines --------------------------------------------------------------------------------


def composed(case: Case) -> Callable[..., Tensor]:
    """A function that computes gates and tokens by torch's operators and calls ``linear_scan``: what users write without
    ``gated_scan``. Everything is in the dtype of the sequences, which moves the fewest bytes. It takes the tensors in the order
    of ``gated_scan``."""
    from scan_registry.kernels.linear_scan.op.function import linear_scan

    kind, dim = KINDS[case.kind], case.dim

    def run(*tensors: Tensor) -> Tensor:
        inputs, parameters = tensors[: len(kind.inputs)], tensors[len(kind.inputs) :]
        narrow = [p.to(inputs[0].dtype) for p in parameters]
        of_channels = [p if dim == -2 else p[:, None] for p in narrow]
        gates, tokens = kind.gates(*inputs, *of_channels)
        return linear_scan(gates, tokens, dim=dim)

    return run


def _hgrn_with(function: str) -> Callable[[Case], Callable[..., Tensor]]:
    def of(case: Case) -> Callable[..., Tensor]:
        import torch

        scan = getattr(importlib.import_module("fla.ops.hgrn"), function)

        def run(x: Tensor, forget: Tensor, lower_bound: Tensor) -> Tensor:
            gate = lower_bound + (1 - lower_bound) * forget.sigmoid()
            token = (1 - gate) * torch.nn.functional.silu(x)
            out: Tensor = scan(token.to(x.dtype), gate.log().to(x.dtype))[0]
            return out

        return run

    return of


@dataclass(frozen=True)
class Composition:
    """A baseline: another function of the same tensors, eager or under torch.compile. Its backward pass is timed as autograd runs
    it. Autograd uses the stream of the forward pass, so a CUDA graph that records another stream cannot capture it."""

    name: str
    function: Callable[[Case], Callable[..., Tensor]]
    compiled: bool = False
    kinds: tuple[str, ...] = ()
    layouts: tuple[str, ...] = LAYOUTS
    captured: ClassVar[bool] = False

    def refusal(self, case: Case) -> str | None:
        if self.kinds and case.kind not in self.kinds:
            return f"it computes {', '.join(self.kinds)}"
        if case.layout not in self.layouts:
            return f"it takes {', '.join(self.layouts)}"
        return None

    def kernel_call(
        self, case: Case, direction: str, device: torch.device
    ) -> Callable[[], benchmark.Call] | None:
        if self.refusal(case):
            return None
        function = self.function(case)
        if self.compiled:
            import torch

            # All cases compile the same code, and after a few of them it would be left as it is.
            torch._dynamo.reset()
            function = torch.compile(function, dynamic=False)

        def make() -> benchmark.Call:
            import torch

            inputs = [case.contiguous(device) for _ in KINDS[case.kind].inputs]
            leaves = [*inputs, *case.parameters(device)]
            if direction == PASSES[0]:

                def forward() -> Any:
                    with torch.no_grad():
                        return function(*leaves)

                return forward
            for leaf in leaves:
                leaf.requires_grad_()
            # The graph is run again and again, so nothing that it keeps may be reused for results.
            settings: Any = importlib.import_module("torch._functorch.config")
            with settings.patch(donated_buffer=False):
                out = function(*leaves)
            grad = case.contiguous(device)
            return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)

        return make


_FLA = ("flash-linear-attention", "fla-core")
EAGER = Composition("linear_scan composed", composed)
COMPILED = Composition("linear_scan composed, torch.compile", composed, True)
BASELINES = (
    Composition(
        "fla chunk_hgrn",
        _hgrn_with("chunk_hgrn"),
        kinds=("hgrn",),
        layouts=("channel_last",),
    ),
    Composition(
        "fla fused_recurrent_hgrn",
        _hgrn_with("fused_recurrent_hgrn"),
        kinds=("hgrn",),
        layouts=("channel_last",),
    ),
)


# --- The benchmark ----------------------------------------------------------------------------


class GatedScanBenchmark(benchmark.Benchmark):
    """Times scans of three sizes in both layouts, and compares them with the targets."""

    case_type = Case
    subject = "gated scans"
    description = (
        "Times the forward and the backward pass of gated scans, and beside them gates by torch's operators with "
        "linear_scan, eager and under torch.compile; and for hgrn what fla has, where that is installed."
    )
    case_help = "kind:layout:batch,channels,time:dtype; may repeat. Default: those of the project's performance targets"
    columns = ("kind", "layout", "B, C, T~", "dtype")
    backends = (("cuda", "triton"), ("auto",))
    aim = "target>", "{:.3f} ms"
    options = (
        Option(
            "--kind",
            action="append",
            default=[],
            metavar="X",
            help=f"of gates, where no case is named: {', '.join(ACCEPTED)}; may repeat; default: {', '.join(TIMED)}",
        ),
    )

    def cases(self, args: Namespace, kind: str) -> list[Case]:
        kinds = [known("--kind", kind_name, ACCEPTED) for kind_name in args.kind] or TIMED
        if args.case:
            return super().cases(args, kind)
        if kind == "cuda":
            every = product(kinds, ("channel_last", "time_last"), SIZES, ("bfloat16", "float32"))
        else:
            every = product(kinds, ("channel_last",), (ON_CPU,), ("float32",))
        return [Case.parse(":".join(parts)) for parts in every]

    def call(
        self, case: Case, direction: str, backend: Backend, device: torch.device
    ) -> benchmark.Call:
        """The operator forward, and backward what autograd calls."""
        from scan_registry.kernels.gated_scan.op import plans
        from scan_registry.kernels.gated_scan.op.arguments import Options, normalised
        from scan_registry.kernels.gated_scan.op.function import gated_scan

        inputs, parameters = case.tensors(device)
        tensors = *inputs, *parameters
        if direction == PASSES[0]:
            return lambda: gated_scan(case.kind, *tensors, backend=backend)
        options = Options(case.kind, backend=backend)
        arguments, options = normalised(case.kind, tensors, None, None, None, options)
        states, _ = plans.forward(arguments, options)
        grad, wanted = case.sequence(device), (*(True for _ in tensors), False)
        return lambda: plans.backward(arguments, states, grad, None, options, wanted)

    def baselines(self, device: torch.device) -> Sequence[benchmark.Baseline]:
        there = any(distributions.version(name) is not None for name in _FLA)
        if device.type != "cuda":
            return (EAGER,)
        return (EAGER, COMPILED, *(BASELINES if there else ()))

    def aimed_at(self, timing: benchmark.Timing) -> float | None:
        """A share of the roofline."""
        case, roofline_ms = timing.case, timing.roofline_ms
        aimed = case.kind in TIMED and case.sizes.replace(" ", "") in SIZES
        if not aimed or roofline_ms is None:
            return None
        return roofline_ms / TARGETS[PASSES.index(timing.direction)]


BENCHMARK = GatedScanBenchmark()
