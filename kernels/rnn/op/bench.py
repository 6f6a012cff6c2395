"""What is timed of recurrent networks: cases, targets, and torch.nn, scan_registry.nn and flashrnn beside them."""

from __future__ import annotations

import importlib
import importlib.util
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from scan_registry.base.package import NAME
from scan_registry.dispatch.select import NoKernelError
from scan_registry.kernels.rnn.problem import DTYPES, SIZES, Function, RnnBackend
from scan_registry.ops import benchmark
from scan_registry.ops.benchmark import OURS
from scan_registry.ops.operator import Option

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PASSES = ("forward", "forward+backward")
BATCH, TIME = 16, 1024


@dataclass(frozen=True)
class Network(benchmark.ParsedCase):
    """A network to time. Steps wait for each other, and not for the memory."""

    family: ClassVar[str] = "rnn"
    expected: ClassVar[str] = (
        f"cell:heads,units:dtype, where cells are {', '.join(SIZES)} and dtypes {', '.join(DTYPES)}"
    )

    function: Function
    heads: int
    dim: int
    dtype: str = "bfloat16"
    batch: int = BATCH
    time: int = TIME

    @classmethod
    def of(cls, parts: benchmark.CaseText) -> Network | None:
        """``lstm:1,768:bfloat16``, heads and their units."""
        word, (heads, dim), dtype, _ = parts
        (function,) = (name for name in SIZES if name == word)
        return cls(function, heads, dim, dtype) if dtype in DTYPES and min(heads, dim) > 0 else None

    @property
    def text(self) -> benchmark.CaseText:
        return benchmark.CaseText(self.function, (self.heads, self.dim), self.dtype, {})

    @property
    def sizes(self) -> str:
        return f"{self.heads} × {self.dim}"

    @property
    def group(self) -> str:
        return f"{self.function}:{self.heads},{self.dim}"

    @property
    def cells(self) -> tuple[str, ...]:
        return self.function, self.sizes, str(self.time), self.dtype

    def moves(self, direction: str) -> None:
        return None

    def traffic(self, direction: str) -> int:
        return 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def inputs(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Wx, R and b, at random, with gradients."""
        import torch

        sizes = SIZES[self.function]
        unit = self.heads, self.dim

        def new(*shape: int, by: float = 1.0) -> Tensor:
            drawn = torch.randn(shape, device=device) * by
            return drawn.to(getattr(torch, self.dtype)).requires_grad_()

        return (
            new(self.batch, self.time, sizes.inputs, *unit),
            new(sizes.recurrent, *unit, self.dim, by=self.dim**-0.5),
            new(sizes.bias, *unit),
        )


#: What each is to take on one H200 at most, in ms, in 16 bits at the usual batch and time.
TARGETS: dict[tuple[Function, int, int], tuple[float, float]] = {
    ("lstm", 12, 64): (0.7, 2.2),
    ("lstm", 3, 256): (1.3, 3.9),
    ("lstm", 1, 768): (1.9, 5.8),
    ("slstm", 1, 768): (2.1, 6.3),
    ("gru", 1, 768): (1.9, 5.8),
    ("elman", 1, 768): (1.5, 4.5),
    ("lstm", 1, 1024): (2.2, 7.0),
}
#: Its blocks have little to compute, and wait for each other at every step, by way of memory: it is too wide
#: for a cluster.
SYNCHRONISING = Network("elman", 1, 320, "bfloat16", batch=8)


# --- Who runs it ------------------------------------------------------------------------------


def _passes(run: Callable[[], Tensor], wanted: Sequence[Tensor], direction: str) -> benchmark.Call:
    """A call of one or both passes of what gives h."""
    import torch

    if direction == PASSES[0]:

        def forward() -> Tensor:
            with torch.no_grad():
                return run()

        return forward
    grad = torch.randn_like(run().detach())
    return lambda: torch.autograd.grad(run(), wanted, grad)


@dataclass(frozen=True)
class Module(benchmark.Implementation):
    """A module of torch.nn or scan_registry.nn, whose times include the product of the inputs with W."""

    home: str
    kind: str
    function: Function
    captured: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return f"{self.home}.{self.kind}"

    def kernel_call(
        self, case: Network, direction: str, device: torch.device
    ) -> Callable[[], benchmark.Call] | None:
        if (case.function, case.heads) != (self.function, 1):
            return None
        return super().kernel_call(case, direction, device)

    def new_call(self, case: Network, direction: str, device: torch.device) -> benchmark.Call:
        import torch

        new = getattr(importlib.import_module(self.home), self.kind)
        dtype = getattr(torch, case.dtype)
        module = new(case.dim, case.dim, batch_first=True, device=device, dtype=dtype)
        x = torch.randn(case.batch, case.time, case.dim, device=device).to(dtype)
        x.requires_grad_()
        return _passes(lambda: module(x)[0], [x, *module.parameters()], direction)


@dataclass(frozen=True)
class FlashRnn(benchmark.Implementation):
    """One backend of flashrnn."""

    backend: str
    captured: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return f"flashrnn {self.backend}"

    def new_call(self, case: Network, direction: str, device: torch.device) -> benchmark.Call:
        module: Any = importlib.import_module("flashrnn")
        inputs = case.inputs(device)
        options = {"function": case.function, "backend": self.backend, "dtype": case.dtype}
        return _passes(lambda: module.flashrnn(*inputs, **options)[0][0], inputs, direction)


_KINDS: dict[Function, str] = {"lstm": "LSTM", "gru": "GRU", "elman": "RNN"}
MODULES = tuple(
    Module(home, kind, function)
    for function, kind in _KINDS.items()
    for home in ("torch.nn", f"{NAME}.nn")
)


# --- The benchmark ----------------------------------------------------------------------------


class NetworkBenchmark(benchmark.Benchmark):
    """Networks of the usual batch and time, each with what it is to take at most."""

    case_type = Network
    subject = "recurrent networks"
    description = (
        "Times forward passes, and forward with backward ones, of recurrent networks: by this package, by "
        "torch.nn (cuDNN on a GPU), whose times include the product with the inputs, as do those of "
        "scan_registry.nn beside it, and by flashrnn where that is installed. Beside the microseconds of a step "
        "stands, on a GPU, what a step takes whose blocks have next to nothing to do but wait for each other."
    )
    case_help = (
        "cell:heads,units:dtype, such as lstm:1,768:bfloat16; may repeat. Default: those of the project's "
        "performance targets"
    )
    columns = ("network", "heads × units", "steps", "dtype")
    by = "by"
    passes = PASSES
    backends = (("auto",), ("auto",))
    streams = False
    aim = "target>", "{:g}"
    options = (
        Option("--bs", type=int, default=BATCH, metavar="N", help=f"batch size; default: {BATCH}"),
        Option(
            *("--seqlens", "--seqlen"),
            default=str(TIME),
            metavar="N,N,…",
            help=f"sequence lengths; default: {TIME}",
        ),
    )

    def cases(self, args: Namespace, kind: str) -> list[Network]:
        usual = [f"{f}:{n},{d}:{t}" for f, n, d in TARGETS for t in ("bfloat16", "float16")]
        batch, times = benchmark.whole_number("bs", args.bs), benchmark.lengths(args.seqlens)
        named = args.case or usual
        networks = [Network.parse(text) for text in named]
        return [replace(network, batch=batch, time=time) for time in times for network in networks]

    def call(
        self, case: Network, direction: str, backend: RnnBackend, device: torch.device
    ) -> benchmark.Call:
        from scan_registry.kernels.rnn.op.function import rnn

        inputs = case.inputs(device)

        def run() -> Tensor:
            return rnn(*inputs, function=case.function, backend=backend)[0][0]

        return _passes(run, inputs, direction)

    def baselines(self, device: torch.device) -> Sequence[benchmark.Baseline]:
        there = device.type == "cuda" and importlib.util.find_spec("flashrnn") is not None
        return (*MODULES, *(FlashRnn(word) for word in ("cuda_fused", "cuda") if there))

    def who(self, backend: str, kind: str) -> str:
        return OURS if backend == "auto" else f"{OURS} {backend}"

    def calibrate(
        self, ms: Callable[[benchmark.Call], float], device: torch.device
    ) -> Iterator[tuple[str, float | None]]:
        """Of one synchronisation; none on the CPU, which has nothing to wait for."""
        sync_us = None
        if device.type == "cuda":
            try:
                call = self.call(SYNCHRONISING, PASSES[0], "cuda_fused", device)
                sync_us = 1e3 * ms(call) / SYNCHRONISING.time
            except NoKernelError:
                pass
        yield "sync_us", sync_us

    def title(self, results: benchmark.Results) -> Iterator[str]:
        for batch, time in dict.fromkeys((t.case.batch, t.case.time) for t in results.timings):
            yield f"batch {batch}, {time} steps"
        if (sync_us := results.facts.get("sync_us")) is not None:
            yield f"one synchronisation {sync_us:.2f} µs"

    def record(self, timing: benchmark.Timing, results: benchmark.Results) -> Mapping[str, Any]:
        return {
            "network": timing.case.to_json(),
            "direction": timing.direction,
            "who": timing.who,
            "ms": timing.ms,
            "spread": timing.spread,
            "target_ms": self.target_ms(timing, results.device.type),
            "us_per_step": timing.us_per_step,
        }

    def aimed_at(self, timing: benchmark.Timing) -> float | None:
        case: Network = timing.case
        target = TARGETS.get((case.function, case.heads, case.dim))
        usual = (case.batch, case.time) == (BATCH, TIME) and case.dtype != "float32"
        return target[PASSES.index(timing.direction)] if target and usual else None


BENCHMARK = NetworkBenchmark()
