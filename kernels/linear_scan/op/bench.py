"""What is timed of scans: cases, the bytes that each has to move, and the targets."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

from scan_registry.dispatch.select import Backend
from scan_registry.kernels.linear_scan.op.baselines import Baseline, installed
from scan_registry.kernels.linear_scan.op.uses import USES
from scan_registry.kernels.model import ITEM_SIZE
from scan_registry.ops.benchmark import (
    Benchmark,
    Call,
    PerformanceTarget,
    SequenceCase,
    lengths,
    whole_number,
)
from scan_registry.ops.operator import DTYPES as DTYPE_WORDS
from scan_registry.ops.operator import MOST_ELEMENTS, PASSES, Option, known

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LAYOUTS = ("channel_last", "time_last")
DTYPES = ("float32", "bfloat16", "float16", "float64", "complex64")
GATES = ("full", "channel")
SEQLENS = {"cuda": "128,256,1024,2048,4096,8192,16384,32768", "cpu": "128,512,2048"}
_FLAGS = ("0", "1")
_SEED = 1  # of the sequences' lengths, which are the same in every run


@dataclass(frozen=True)
class Case(SequenceCase):
    """One scan to time: (batch, channels, time), whatever the layout in memory.

    sequences  how many of random length are packed along time; 0: none are
    gates      one for every element ("full"), or one for each channel ("channel")
    reverse    whether the scan goes from the last step to the first
    state      whether there is an initial state, and the final one is wanted; backward, their gradients
    """

    family: ClassVar[str] = "linear_scan"

    layout: str
    batch: int
    channels: int
    time: int
    dtype: str
    sequences: int = 0
    gates: str = "full"
    reverse: bool = False
    state: bool = False

    @classmethod
    def parse(cls, text: str) -> Case:
        """``time_last:8,1536,4096:bfloat16``, to which ``:sequences=64``, ``:gates=channel``, ``:reverse=1`` and
        ``:state=1`` may be added; ``ValueError`` for anything else."""
        try:
            layout, shape, word, *options = text.split(":")
            dtype = DTYPE_WORDS.get(word, word)
            batch, channels, time = map(int, shape.split(","))
            chosen = dict(option.split("=") for option in options)
            least = int("sequences" in chosen)
            sequences, gates = int(chosen.pop("sequences", 0)), chosen.pop("gates", GATES[0])
            reverse, state = (_FLAGS.index(chosen.pop(name, "0")) for name in ("reverse", "state"))
            if chosen:
                raise ValueError
        except ValueError:
            raise ValueError(
                f"the case is {text!r}; expected layout:batch,channels,time:dtype, and perhaps "
                ":sequences=N, :gates=channel, :reverse=1 and :state=1"
            ) from None
        wrong = {
            f"layout is {layout!r}; layouts are {', '.join(LAYOUTS)}": layout not in LAYOUTS,
            f"dtype is {word!r}; dtypes are {', '.join(DTYPES)}": dtype not in DTYPES,
            f"gates are {gates!r}; accepted are {', '.join(GATES)}": gates not in GATES,
            f"shape is {shape!r}; sizes are above 0": min(batch, channels, time) < 1,
            f"number of sequences is {sequences}; accepted are numbers above 0": sequences < least,
        }
        for what, is_wrong in wrong.items():
            if is_wrong:
                raise ValueError(f"the case is {text!r}, whose {what}")
        flags = bool(reverse), bool(state)
        return cls(layout, batch, channels, time, dtype, sequences, gates, *flags)

    def __str__(self) -> str:
        """What ``parse`` takes."""
        options = f":sequences={self.sequences}" if self.sequences else ""
        options += f":gates={self.gates}" if self.gates != GATES[0] else ""
        options += ":reverse=1" * self.reverse + ":state=1" * self.state
        return f"{self.layout}:{self.sizes.replace(' ', '')}:{self.dtype}{options}"

    @property
    def options(self) -> str:
        """In words, what is not as usual; empty if nothing is."""
        packed = [f"{self.sequences} packed sequences"] if self.sequences else []
        shared = ["a gate per channel"] if self.gates == "channel" else []
        others = ["reverse"] * self.reverse + ["initial and final state"] * self.state
        return ", ".join([*packed, *shared, *others])

    def to_json(self) -> dict[str, Any]:
        """The fields; those of options only where there are any."""
        usual = {"sequences": 0, "gates": GATES[0], "reverse": False, "state": False}
        return {k: v for k, v in vars(self).items() if usual.get(k) != v}

    def sequence(self, device: torch.device | str) -> Tensor:
        """A new random tensor of the shape and dtype."""
        return self.contiguous(device)

    def random_gates(self, device: torch.device | str) -> Tensor:
        """New random gates of the dtype, of |gate| ≤ 1."""
        values = self.sequence(device)
        if self.gates == "channel":
            values = values.select(self.dim, 0)[0].clone()
            values = values if self.dim != -1 else values[:, None]
        return values / (1 + values.abs()) if values.is_complex() else values.sigmoid_()

    def entering(self, device: torch.device | str) -> Tensor | None:
        """A new random state before the first step, or of each packed sequence; None where there is none."""
        import torch

        from scan_registry.kernels.linear_scan.op.problems import StateLayout

        if not self.state:
            return None
        model = torch.empty(self.shape, dtype=getattr(torch, self.dtype), device=device)
        layout = StateLayout.of(model, self.dim, self.bounds("cpu"))
        return layout.empty().normal_()

    def bounds(self, device: torch.device | str) -> Tensor | None:
        """Where the packed sequences begin and end; None where none are packed."""
        import torch

        if not self.sequences:
            return None
        generator = torch.Generator().manual_seed(_SEED)
        cuts = torch.randint(0, self.time + 1, (self.sequences - 1,), generator=generator)
        ends = torch.tensor([0, self.time])
        return torch.cat([ends[:1], cuts.sort().values, ends[1:]]).to(device)

    def tensor_bytes(self) -> int:
        """Of each tensor."""
        return self.batch * self.channels * self.time * ITEM_SIZE[self.dtype]

    def moves(self, direction: str) -> tuple[int, int]:
        """How many tensors must be read and written: gates, tokens and the states; backward gates,
        states and the incoming gradient, and two gradients. A gate per channel is next to nothing."""
        reads, writes = (2, 1) if direction == "forward" else (3, 2)
        if self.gates == "channel":
            return reads - 1, max(1, writes - 1)
        return reads, writes


# --- Targets ----------------------------------------------------------------------------------

_ALL, _TWO, _NARROW = ("float32", "bfloat16", "float16"), ("float32", "bfloat16"), ("bfloat16",)
_LONG = tuple(1 << n for n in range(10, 17))


def _targets() -> Iterator[PerformanceTarget]:
    def targets(
        layout: str,
        shapes: Iterable[tuple[int, int, int]],
        dtypes: Sequence[str],
        ratio: float,
        **options: Any,
    ) -> Iterator[PerformanceTarget]:
        for dtype, (batch, channels, time) in product(dtypes, shapes):
            yield PerformanceTarget(Case(layout, batch, channels, time, dtype, **options), ratio)

    yield from targets("time_last", [(8, 1536, t) for t in _LONG], _ALL, 0.95)
    yield from targets("time_last", [(8, 1536, t) for t in (128, 256, 512)], _TWO, 0.88)
    for batch, channels in ((8, 1024), (4, 2048), (16, 512), (8, 1536)):
        shapes = [(batch, channels, t) for t in _LONG[:-1]]
        yield from targets("channel_last", shapes, _ALL, 0.95)
    few = [(1, 1, 1 << 24), (1, 16, 1 << 20), (1, 64, 1 << 20)]
    yield from targets("time_last", few, _TWO, 0.85)
    yield from targets("channel_last", [(1, 16, 1 << 20), (1, 64, 1 << 17)], _TWO, 0.85)
    yield from targets("channel_last", [(1, 2048, 8192), (2, 1024, 4096)], _NARROW, 0.80)
    yield from targets("time_last", [(4096, 512, 64), (65536, 64, 16)], _TWO, 0.85)
    yield from targets("time_last", [(3, 1537, 4099)], _TWO, 0.80)
    yield from targets("channel_last", [(8, 1001, 4099)], _TWO, 0.80)
    yield from targets("time_last", [(8, 512, 8192)], ("complex64", "float64"), 0.88)
    yield from targets("channel_last", [(1, 1024, 1 << 20)], _NARROW, 0.88, sequences=64)
    yield from targets("channel_last", [(8, 1024, 8192)], _NARROW, 0.90, gates="channel")


#: (batch, channels, time), whatever the layout; the quickest first, of which a budget covers the most.
TARGETS = tuple(sorted(_targets(), key=lambda target: target.case.tensor_bytes()))


#: The cases of each use. All have the same target, 0.55 of the roofline.
USED = tuple(
    PerformanceTarget(Case.parse(text), 0.55, use)
    for use, texts in USES.items()
    for text in texts.split()
)


# --- The benchmark ----------------------------------------------------------------------------


class ScanBenchmark(Benchmark):
    """Scans over a range of sequence lengths, or cases by name."""

    case_type = Case
    subject = "scans"
    description = (
        "Times the forward and the backward pass over a range of sequence lengths: on a GPU both languages of "
        "this package and the baselines that are installed (accelerated-scan, sequential_scan), as CUDA graphs "
        "of kernel launches; on the CPU the calls, beside torch.mul on tensors of the same size."
    )
    case_help = (
        "layout:batch,channels,time:dtype, to which :sequences=N (packed along time), :gates=channel, :reverse=1 "
        "and :state=1 (initial and final) may be added; in place of the sizes above; may repeat"
    )
    columns = ("layout", "B, C, T~", "dtype")
    backends = (("cuda", "triton"), ("auto",))
    sizes = "--seqlens"
    targets, uses = TARGETS, USED
    draws = True
    options = (
        Option(
            *("--d_model", "--d-model"),
            type=int,
            default=1024,
            metavar="N",
            help="channels; default: 1024",
        ),
        Option("--bs", type=int, default=8, metavar="N", help="batch size; default: 8"),
        Option(
            "--seqlens",
            metavar="N,N,…",
            help=f"sequence lengths; default: {SEQLENS['cuda']}, on the CPU {SEQLENS['cpu']}",
        ),
        Option(
            "--layout",
            default=LAYOUTS[0],
            metavar="X",
            help="channel_last: (batch, time, channels), the default; time_last: (batch, channels, time)",
        ),
        Option(
            "--dtype",
            default="bfloat16",
            metavar="X",
            help=f"{' '.join(DTYPE_WORDS)}; default: bfloat16",
        ),
    )

    def cases(self, args: Namespace, kind: str) -> list[Case]:
        named = [Case.parse(text) for text in args.case]
        layout = known("--layout", args.layout, LAYOUTS)
        dtype = DTYPE_WORDS[known("--dtype", args.dtype, [*DTYPE_WORDS])]
        channels, batch = (whole_number(name, getattr(args, name)) for name in ("d_model", "bs"))
        if named:
            return named
        text = SEQLENS[kind] if args.seqlens is None else args.seqlens
        times = lengths(text)
        if batch * channels * max(times) > MOST_ELEMENTS:
            raise ValueError(
                f"--bs {batch} --d_model {channels} --seqlens {text} is a tensor of more than "
                "2**60 elements"
            )
        return [Case(layout, batch, channels, length, dtype) for length in times]

    def draw(self, number: int, seed: int) -> list[Case]:
        from scan_registry.kernels.linear_scan.op import random_cases as linear_scan_random

        return linear_scan_random.draw(number, seed)

    def kind(self, case: Case) -> str:
        from scan_registry.kernels.linear_scan.op import random_cases as linear_scan_random

        return linear_scan_random.kind(case)

    def call(self, case: Case, direction: str, backend: Backend, device: torch.device) -> Call:
        """The operator forward, and backward what autograd calls."""
        from scan_registry.kernels.linear_scan.op import plans
        from scan_registry.kernels.linear_scan.op.arguments import Options
        from scan_registry.kernels.linear_scan.op.function import linear_scan

        gates, tokens = case.random_gates(device), case.sequence(device)
        cu_seqlens, initial = case.bounds(device), case.entering(device)

        def forward() -> Any:
            return linear_scan(
                gates,
                tokens,
                initial,
                dim=case.dim,
                reverse=case.reverse,
                cu_seqlens=cu_seqlens,
                return_final_state=case.state,
                backend=backend,
            )

        if direction == PASSES[0]:
            return forward
        states, last_grad = forward(), case.entering(device)
        states = states[0] if case.state else states
        options = Options(case.dim, case.reverse, backend=backend)
        wanted = True, True, case.state
        return lambda: plans.backward(
            gates, states, tokens, initial, last_grad, cu_seqlens, options, wanted
        )

    def baselines(self, device: torch.device) -> Sequence[Baseline]:
        return installed() if device.type == "cuda" else ()


BENCHMARK = ScanBenchmark()
