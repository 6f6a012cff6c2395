"""Times of recurrent networks: by this package, by torch.nn, and by flashrnn where that is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from typing import Any

import torch
from torch import Tensor

from scan_registry import nn
from scan_registry.bench.timing import Call, compete, record
from scan_registry.dispatch.select import NoKernelError
from scan_registry.kernels.rnn.problem import DTYPES, SIZES
from scan_registry.ops.rnn import rnn
from scan_registry.version import __version__

PASSES = ("forward", "forward+backward")
BATCH, TIME = 16, 1024
_WARM_UP, _ROUNDS = 2, 7


@dataclass(frozen=True)
class Network:
    """A network to time."""

    function: str
    heads: int
    dim: int
    dtype: str = "bfloat16"
    batch: int = BATCH
    time: int = TIME

    @classmethod
    def parse(cls, text: str, batch: int = BATCH, time: int = TIME) -> Network:
        """``lstm:1,768:bfloat16``, heads and their units; ``ValueError`` for anything else."""
        try:
            function, sizes, dtype = text.split(":")
            heads, dim = map(int, sizes.split(","))
            if function not in SIZES or dtype not in DTYPES or min(heads, dim) < 1:
                raise ValueError
        except ValueError:
            raise ValueError(
                f"the case is {text!r}; expected cell:heads,units:dtype, where cells are "
                f"{', '.join(SIZES)} and dtypes {', '.join(DTYPES)}"
            ) from None
        return cls(function, heads, dim, dtype, batch, time)

    def __str__(self) -> str:
        return f"{self.function}:{self.heads},{self.dim}:{self.dtype}"

    def inputs(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Wx, R and b, at random, with gradients."""
        sizes = SIZES[self.function]  # type: ignore[index]
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
TARGETS: dict[tuple[str, int, int], tuple[float, float]] = {
    ("lstm", 12, 64): (0.7, 2.2),
    ("lstm", 3, 256): (1.3, 3.9),
    ("lstm", 1, 768): (1.9, 5.8),
    ("slstm", 1, 768): (2.1, 6.3),
    ("gru", 1, 768): (1.9, 5.8),
    ("elman", 1, 768): (1.5, 4.5),
    ("lstm", 1, 1024): (2.2, 7.0),
}
USUAL = tuple(Network(*sizes, dtype) for sizes in TARGETS for dtype in ("bfloat16", "float16"))
#: Its blocks have little to compute, and wait for each other at every step, by way of memory: it is too wide
#: for a cluster.
SYNCHRONISING = Network("elman", 1, 320, "bfloat16", batch=8)


@dataclass(frozen=True)
class NetworkTiming:
    """Median and spread (largest minus smallest) of a call, in ms; ``target_ms`` where there is one."""

    network: Network
    direction: str
    who: str
    ms: float
    spread: float
    target_ms: float | None = None

    @property
    def us_per_step(self) -> float:
        return 1e3 * self.ms / self.network.time

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "us_per_step": self.us_per_step}


@dataclass
class NetworkBench:
    """Times networks on one device, all contenders of a network interleaved.

    sync_us  microseconds of a step of ``SYNCHRONISING``, on a GPU that has a kernel for it
    skipped   why somebody was not timed on everything, by name
    """

    device: torch.device
    passes: Sequence[str] = PASSES
    baselines: bool = True
    backends: Sequence[str] = ("auto",)
    timings: list[NetworkTiming] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    sync_us: float | None = None

    @property
    def name(self) -> str:
        """The GPU's, or cpu."""
        return torch.cuda.get_device_name(self.device) if self.on_gpu else "cpu"

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def measure_sync(self) -> None:
        """Of one synchronisation; none on the CPU, which has nothing to wait for."""
        if not self.on_gpu:
            return
        inputs = [tensor.detach() for tensor in SYNCHRONISING.inputs(self.device)]
        try:
            call = _ours(inputs, SYNCHRONISING.function, "cuda_fused", PASSES[0])
            ((ms, _),) = self._times([call])
        except NoKernelError as error:
            self.skipped["the synchronisation"] = str(error)
        else:
            self.sync_us = 1e3 * ms / SYNCHRONISING.time

    def run(self, network: Network) -> None:
        """Time every pass of a network."""
        for direction in self.passes:
            calls: dict[str, Call] = {}
            for who, make in self._contenders(network, direction):
                try:
                    calls[who] = make()
                    calls[who]()
                # Baselines fail in ways of their own, of which each is to be told.
                except Exception as error:
                    if isinstance(error, torch.OutOfMemoryError):
                        raise
                    calls.pop(who, None)
                    self.skipped[f"{who}, {network}"] = str(error).strip().split("\n")[0]
            found = self._times([*calls.values()])
            for who, (ms, spread) in zip(calls, found, strict=True):
                target = (
                    self._target(network, direction) if who.startswith("scan-registry") else None
                )
                timing = NetworkTiming(network, direction, who, ms, spread, target)
                self.timings.append(timing)

    def _times(self, calls: Sequence[Call]) -> list[tuple[float, float]]:
        recordings = [record([call], self.device, captured=False) for call in calls]
        return compete(recordings, _WARM_UP, _ROUNDS)

    def _target(self, network: Network, direction: str) -> float | None:
        target = TARGETS.get((network.function, network.heads, network.dim))
        usual = (network.batch, network.time) == (BATCH, TIME) and network.dtype != "float32"
        if target is None or not usual or not self.on_gpu:
            return None
        return target[PASSES.index(direction)]

    def _contenders(
        self, network: Network, direction: str
    ) -> Iterator[tuple[str, Callable[[], Call]]]:
        inputs = network.inputs(self.device)
        for backend in self.backends:
            who = "scan-registry" if backend == "auto" else f"scan-registry {backend}"
            yield (
                who,
                lambda backend=backend: _ours(  # type: ignore[misc]
                    inputs, network.function, backend, direction
                ),
            )
        if not self.baselines:
            return
        kind = {"lstm": "LSTM", "gru": "GRU", "elman": "RNN"}.get(network.function)
        if kind is not None and network.heads == 1:
            # The product of the inputs with W is included in what torch can time.
            for home, name in ((torch.nn, "torch.nn"), (nn, "scan_registry.nn")):
                who = f"{name}.{kind}"
                yield (
                    who,
                    lambda home=home: _module(  # type: ignore[misc]
                        getattr(home, kind), network, self.device, direction
                    ),
                )
        if self.on_gpu and importlib.util.find_spec("flashrnn") is not None:
            for backend in ("cuda_fused", "cuda"):
                yield (
                    f"flashrnn {backend}",
                    lambda backend=backend: _flashrnn(  # type: ignore[misc]
                        inputs, network, backend, direction
                    ),
                )

    def document(self) -> dict[str, Any]:
        """Every number, as ``schemas/bench-rnn.json`` describes it."""
        return {
            "gpu": self.name if self.on_gpu else None,
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "scan_registry": __version__,
            "sync_us": self.sync_us,
            "timings": [timing.to_json() for timing in self.timings],
            "skipped": self.skipped,
        }


def _passes(run: Callable[[], Tensor], wanted: Sequence[Tensor], direction: str) -> Call:
    """A call of one or both passes of what gives h."""
    if direction == PASSES[0]:

        def forward() -> Tensor:
            with torch.no_grad():
                return run()

        return forward
    grad = torch.randn_like(run().detach())
    return lambda: torch.autograd.grad(run(), wanted, grad)


def _ours(inputs: Sequence[Tensor], function: str, backend: str, direction: str) -> Call:
    def run() -> Tensor:
        states, _ = rnn(*inputs, function=function, backend=backend)  # type: ignore[arg-type]
        return states[0]

    return _passes(run, inputs, direction)


def _module(kind: Any, network: Network, device: torch.device, direction: str) -> Call:
    dtype = getattr(torch, network.dtype)
    module = kind(network.dim, network.dim, batch_first=True, device=device, dtype=dtype)
    x = torch.randn(network.batch, network.time, network.dim, device=device).to(dtype)
    x.requires_grad_()
    return _passes(lambda: module(x)[0], [x, *module.parameters()], direction)


def _flashrnn(inputs: Sequence[Tensor], network: Network, backend: str, direction: str) -> Call:
    module: Any = importlib.import_module("flashrnn")
    options = {"function": network.function, "backend": backend, "dtype": network.dtype}
    return _passes(lambda: module.flashrnn(*inputs, **options)[0][0], inputs, direction)
