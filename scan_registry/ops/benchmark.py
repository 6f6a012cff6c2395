"""What ``bench`` times of an operator: cases, their bytes, baselines and targets.

``bench`` brings the rest: it measures the bandwidth roofline, interleaves the timings, prints and draws. Defaults are
for kernels that the memory bounds, whose times stand beside the roofline's.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from scan_registry.catalog import distributions
from scan_registry.kernels.model import ITEM_SIZE
from scan_registry.ops.operator import DTYPES, PASSES, Option

if TYPE_CHECKING:
    from torch import Tensor
    from torch import device as Device
    from typing_extensions import Self

Call = Callable[[], Any]
OURS = "scan-registry"  # how the names of what this package runs begin


class Case(Protocol):
    """One call to time: hashable, and prints as ``kind:sizes:dtype``, perhaps with options, as ``--case`` takes it.

    family   the operator's
    time     length of the sequences
    sizes    in words
    options  in words, what is not as usual; empty if nothing is
    group    in words, what cases share whose dtype and ``time`` alone differ
    cells    of a table, under the columns of the benchmark
    """

    @property
    def family(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def time(self) -> int: ...
    @property
    def sizes(self) -> str: ...
    @property
    def options(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def cells(self) -> tuple[str, ...]: ...

    def moves(self, direction: str) -> tuple[int, int] | None:
        """How many tensors of one size the roofline is to read and write; None where memory is no bound."""

    def traffic(self, direction: str) -> int:
        """Bytes that must move, which those tensors share; 0 where memory is no bound."""

    def to_json(self) -> dict[str, Any]: ...


class CaseText(NamedTuple):
    """The parts of ``kind:1,2,3:dtype:name=value``, as which it prints."""

    kind: str
    sizes: tuple[int, ...]
    dtype: str
    options: dict[str, Any]

    def __str__(self) -> str:
        options = (f"{name}={value}" for name, value in self.options.items())
        return ":".join([self.kind, ",".join(map(str, self.sizes)), self.dtype, *options])


class ParsedCase:
    """A case that a text describes in the form of ``CaseText``."""

    #: What texts it reads, in words.
    expected: ClassVar[str]

    @classmethod
    def of(cls, parts: CaseText) -> Self | None:
        """The case of these parts, whose options it takes out; None or ``ValueError`` if there is none."""
        raise NotImplementedError

    @property
    def text(self) -> CaseText:
        """The parts of which this is the case; of options those that are not as usual."""
        raise NotImplementedError

    def unlike(self, **usual: Any) -> dict[str, Any]:
        """The fields of these names that have other values."""
        return {n: getattr(self, n) for n, value in usual.items() if getattr(self, n) != value}

    def __str__(self) -> str:
        return str(self.text)

    @property
    def sizes(self) -> str:
        return ", ".join(map(str, self.text.sizes))

    @property
    def options(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.text.options.items())

    @classmethod
    def parse(cls, text: str) -> Self:
        """``ValueError`` for anything that is no case."""
        with suppress(ValueError):
            kind, sizes, word, *options = text.split(":")
            numbers, chosen = tuple(map(int, sizes.split(","))), dict(o.split("=") for o in options)
            case = cls.of(CaseText(kind, numbers, DTYPES.get(word, word), chosen))
            if case is not None and not chosen:
                return case
        raise ValueError(f"the case is {text!r}; expected {cls.expected}")


class SequenceCase:
    """A case of sequences (batch, channels, time) in the layout ``time_last`` or ``channel_last``. A family's case is a frozen
    dataclass that has these fields among its own."""

    if TYPE_CHECKING:

        @property
        def layout(self) -> str: ...
        @property
        def batch(self) -> int: ...
        @property
        def channels(self) -> int: ...
        @property
        def time(self) -> int: ...
        @property
        def dtype(self) -> str: ...

    @property
    def sizes(self) -> str:
        return f"{self.batch}, {self.channels}, {self.time}"

    @property
    def options(self) -> str:
        return ""

    @property
    def group(self) -> str:
        words = [self.layout, f"{self.batch} × {self.channels}", self.options]
        return ", ".join(filter(None, words))

    @property
    def cells(self) -> tuple[str, ...]:
        return self.layout, ", ".join(filter(None, [self.sizes, self.options])), self.dtype

    @property
    def dim(self) -> int:
        """The time dimension of ``contiguous`` tensors, counted from the last."""
        return -1 if self.layout == "time_last" else -2

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of ``contiguous`` tensors."""
        if self.layout == "time_last":
            return self.batch, self.channels, self.time
        return self.batch, self.time, self.channels

    def contiguous(self, device: Device | str) -> Tensor:
        """A new random tensor, as a model of this layout has it."""
        import torch

        return torch.randn(self.shape, device=device, dtype=getattr(torch, self.dtype))

    def sequence(self, device: Device | str) -> Tensor:
        """A new random tensor (batch, channels, time) in the case's layout."""
        drawn = self.contiguous(device)
        return drawn if self.layout == "time_last" else drawn.transpose(1, 2)

    def moves(self, direction: str) -> tuple[int, int]:
        """How many sequences a pass reads and writes."""
        raise NotImplementedError

    def traffic(self, direction: str) -> int:
        """Bytes that must move."""
        size = self.batch * self.channels * self.time * ITEM_SIZE[self.dtype]
        return size * sum(self.moves(direction))

    def to_json(self) -> dict[str, Any]:
        return {**vars(self)}


class Baseline(Protocol):
    """Another implementation to compare with. ``captured``: whether a CUDA graph can record the launches."""

    @property
    def name(self) -> str: ...
    @property
    def captured(self) -> bool: ...

    def refusal(self, case: Any) -> str | None:
        """Why it cannot run the case, if users are to be told."""

    def kernel_call(
        self, case: Any, direction: str, device: Any
    ) -> Callable[[], Callable[[], Any]] | None:
        """A function that makes a call with inputs of its own; None where there is nothing to call."""


class Implementation:
    """A baseline that takes every case, and whose launches a CUDA graph can record, unless a subclass says otherwise."""

    captured: ClassVar[bool] = True

    def refusal(self, case: Any) -> str | None:
        return None

    def new_call(self, case: Any, direction: str, device: Any) -> Call:
        """One with inputs of its own."""
        raise NotImplementedError

    def kernel_call(self, case: Any, direction: str, device: Any) -> Callable[[], Call] | None:
        return None if self.refusal(case) else partial(self.new_call, case, direction, device)


@dataclass(frozen=True)
class Timed:
    """Median and spread (largest minus smallest) of a call, in ms, by who made it."""

    case: Any
    direction: str
    who: str
    ms: float
    spread: float

    @property
    def cells(self) -> tuple[str, ...]:
        """Of a table, from the case's to the spread."""
        times = f"{self.ms:.4f}", f"{self.spread:.4f}"
        return *self.case.cells, self.direction, self.who, *times


@dataclass(frozen=True)
class Timing(Timed):
    """A call whose bytes stream in ``roofline_ms``. ``roofline`` is the stream kernel's variant that measured that, on a GPU."""

    roofline_ms: float | None = None
    roofline: str | None = None

    @property
    def ratio(self) -> float:
        """The share of the roofline: its time over that of the call."""
        assert self.roofline_ms is not None
        return self.roofline_ms / self.ms

    @property
    def us_per_step(self) -> float:
        """Microseconds of a step of the sequence."""
        return 1e3 * self.ms / float(self.case.time)

    def to_json(self) -> dict[str, Any]:
        """The fields, of which those of the roofline only where there is one."""
        record = {**vars(self), "case": self.case.to_json()}
        return {name: value for name, value in record.items() if value is not None}


@dataclass(frozen=True)
class PerformanceTarget:
    """In each pass, the roofline's time over the kernel's has to be at least ``ratio``. ``use`` is what people use such cases
    for, where that is why they are timed."""

    case: Any
    ratio: float
    use: str = ""


class Results(Protocol):
    """What was timed on a device, which streams ``bandwidth`` bytes per ms, and ``facts`` measured before."""

    device: Device
    bandwidth: float
    facts: dict[str, float | None]
    timings: list[Timing]


class Benchmark(Protocol):
    """What is timed of one operator.

    case_type    of the family, whose ``parse`` reads what ``--case`` takes
    usual        cases where none is named, as text: on a GPU and on the CPU
    subject      what it times, in a word
    description  how, in the command's help
    case_help    what ``--case`` takes
    options      of the command, which choose cases
    sizes        the option to blame for a case that is too large, unless ``--case`` named it
    columns      heads of the case's cells in tables
    by           head of who was timed
    measures     heads of what ``measured`` says of a timing
    backends     of this package, if none is asked for: on a GPU and on the CPU
    targets      cases, the quickest first, with the share of the roofline that they are to reach
    uses         more of them, of shapes that people use, those of each use together
    packages     baselines that are distributions of their names
    aim          head of the targets of times, and their form; None where there are none
    draws        whether it draws random cases
    streams      whether the memory bounds its kernels: then times stand beside the roofline's, and a picture has
                 lines over the length of sequences; else it has bars for each case
    """

    case_type: Any = None
    usual: tuple[Sequence[str], Sequence[str]] = ((), ())
    subject: str
    description: str
    case_help: str
    columns: tuple[str, ...]
    options: tuple[Option, ...] = ()
    sizes: str = "--case"
    by: str = "kernel"
    passes: tuple[str, ...] = PASSES
    backends: tuple[tuple[str, ...], tuple[str, ...]] = (("cuda",), ("auto",))
    targets: tuple[PerformanceTarget, ...] = ()
    uses: tuple[PerformanceTarget, ...] = ()
    packages: tuple[Baseline, ...] = ()
    aim: tuple[str, str] | None = None
    draws: bool = False
    streams: bool = True

    def parse(self, text: str) -> Case:
        """The case that prints as ``text``; ``ValueError`` for anything else."""
        return self.case_type.parse(text)  # type: ignore[no-any-return]

    def cases(self, options: Namespace, kind: str) -> list[Any]:
        """Those that ``--case`` names, or else the options choose, on a ``cuda`` or ``cpu`` device;
        ``ValueError`` for options that are not valid."""
        return [self.parse(text) for text in options.case or self.usual[kind != "cuda"]]

    def draw(self, number: int, seed: int) -> list[Any]:
        """Random cases, the same for the same seed, where it ``draws`` any."""
        return []

    def kind(self, case: Any) -> str:
        """What a random case is summed up with, in words."""
        return ""

    def call(self, case: Any, direction: str, backend: Any, device: Device) -> Call:
        """One of this package, with inputs of its own."""

    def baselines(self, device: Device) -> Sequence[Baseline]:
        """Those that are installed here, and have a GPU to run on."""
        on_gpu = device.type == "cuda"
        return [p for p in self.packages if on_gpu and distributions.version(p.name) is not None]

    def who(self, backend: str, kind: str) -> str:
        """What times of this package are called."""
        return f"{OURS} {'cpu' if (kind, backend) == ('cpu', 'auto') else backend}"

    def calibrate(
        self, ms: Callable[[Call], float], device: Device
    ) -> Iterator[tuple[str, float | None]]:
        """Facts to measure once, before the cases."""
        return iter(())

    def title(self, results: Results) -> Iterator[str]:
        """What a table says of the device and the cases."""
        unit, scale = _unit(results)
        yield f"streaming {results.bandwidth / scale:.2f} {unit}"

    def measures(self, results: Results) -> tuple[str, ...]:
        speed = (f"{_unit(results)[0]}>", "of roofline>") if self.streams else ("µs/step>",)
        return (*speed, self.aim[0]) if self.aim else speed

    def measured(self, timing: Timing, results: Results) -> tuple[str, ...]:
        if self.streams:
            traffic, roofline_ms = timing.case.traffic(timing.direction), timing.roofline_ms or 0.0
            speed = traffic / timing.ms / _unit(results)[1]
            measured = [f"{speed:.2f}", f"{roofline_ms / timing.ms:.2f}"]
        else:
            measured = [f"{timing.us_per_step:.2f}"]
        return (*measured, *([self._verdict(timing, results, self.aim[1])] if self.aim else ()))

    def record(self, timing: Timing, results: Results) -> Mapping[str, Any]:
        """As JSON."""
        if self.aim is None:
            return timing.to_json()
        return {**timing.to_json(), "target_ms": self.target_ms(timing, results.device.type)}

    def target_ms(self, timing: Timing, kind: str) -> float | None:
        """The most time that this package may take on a GPU; None where there is no target."""
        ours = kind == "cuda" and timing.who.startswith(OURS)
        return self.aimed_at(timing) if ours else None

    def aimed_at(self, timing: Timing) -> float | None:
        """The most milliseconds that a call like this one may take; None where there is no target."""
        return None

    def _verdict(self, timing: Timing, results: Results, form: str) -> str:
        """The target, and whether it is met; empty where there is none."""
        target = self.target_ms(timing, results.device.type)
        if target is None:
            return ""
        return f"{form.format(target)} " + ("met" if timing.ms <= target else "[red]missed[/]")


def _unit(results: Results) -> tuple[str, float]:
    """Of speeds, and bytes per ms in one."""
    return ("TB/s", 1e9) if results.device.type == "cuda" else ("GB/s", 1e6)


def whole_number(name: str, value: int) -> int:
    """An option's value; ``ValueError`` if it is none."""
    if value < 1:
        raise ValueError(f"--{name} is {value}; accepted are whole numbers from 1 on")
    return value


def lengths(text: str, option: str = "--seqlens") -> list[int]:
    """``1024,2048``, each once; ``ValueError`` for anything else."""
    sizes = [size.strip() for size in text.split(",")]
    if not all(size.isdecimal() and len(size) < 100 and int(size) > 0 for size in sizes):
        raise ValueError(f"{option} is {text!r}; accepted are lengths such as 1024,2048")
    return list(dict.fromkeys(map(int, sizes)))
