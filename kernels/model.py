"""The words a family's spec is written in: variants, kernels, launches, families.

Everything here is a frozen dataclass over plain numbers and strings, so that describing a kernel
needs no compiler, no GPU and no tensor library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from scan_registry.base.frozen import dataclass
from scan_registry.hardware.target import Target
from scan_registry.kernels.tuning import Model, Shape, Source

Language = Literal["cuda", "triton"]
#: In order of preference on one tier, unless a family says otherwise of a problem.
LANGUAGES: tuple[Language, ...] = ("cuda", "triton")
#: What a call runs that no kernel fits, of most families.
PLAIN_TORCH = "plain torch, step by step along time"
Static: TypeAlias = str | int
#: Static parameters with their values.
Pins: TypeAlias = tuple[tuple[str, Static], ...]

#: Bytes of one element.
ITEM_SIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "complex64": 8}

_LANGUAGES: Mapping[str, Language] = {"cuda": "cuda", "triton": "triton"}


@dataclass(frozen=True)
class Variant:
    """A kernel with everything static pinned.

    Prints as ``family.kernel:cuda:dtype=bfloat16,access=aligned,warps=4`` and
    parses back from that.
    """

    family: str
    kernel: str
    language: Language
    statics: Pins

    def __str__(self) -> str:
        return f"{self.head}:{pinned(self.statics)}"

    @classmethod
    def parse(cls, text: str) -> Variant:
        """The variant that prints as ``text``; ``ValueError`` if there can be none."""
        family, _, rest = text.partition(".")
        kernel, _, rest = rest.partition(":")
        language, _, items = rest.partition(":")
        known = _LANGUAGES.get(language)
        if not (known and family.isidentifier() and kernel.isidentifier()):
            raise ValueError(
                f"{text!r} is not a variant; expected family.kernel:language:name=value,…"
            )
        statics: list[tuple[str, Static]] = []
        for item in items.split(","):
            name, separator, value = item.partition("=")
            if not (name.isidentifier() and separator and value):
                raise ValueError(f"{item!r} in variant {text!r} is not name=value")
            statics.append((name, int(value) if value.isdigit() else value))
        return cls(family, kernel, known, tuple(statics))

    def text(self, name: str) -> str:
        """The static parameter ``name``, which must be a string."""
        return str(dict(self.statics)[name])

    def number(self, name: str) -> int:
        """The static parameter ``name``, which must be an integer."""
        return int(dict(self.statics)[name])

    @property
    def head(self) -> str:
        """What it prints as, before the static parameters."""
        return f"{self.family}.{self.kernel}:{self.language}"

    @property
    def stem(self) -> str:
        """What it prints as, up to the first static parameter, which is the dtype."""
        return f"{self.head}:{pinned(self.statics[:1])}"


def pinned(statics: Pins) -> str:
    """``dtype=bfloat16,warps=4``."""
    return ",".join(f"{name}={value}" for name, value in statics)


@dataclass(frozen=True)
class Space:
    """Variants that there can be of a kernel, as pinnings of its static parameters.

    kinds  what a variant may be for, such as dtypes and access; their parameters come first
    tiles  kind -> every pinning of the other parameters that its constraints allow
    """

    kinds: tuple[Pins, ...]
    tiles: Callable[[Pins], Iterable[Pins]]

    def __iter__(self) -> Iterator[Pins]:
        return ((*kind, *tile) for kind in self.kinds for tile in self.tiles(kind))

    def of(self, kept: Callable[[Pins], bool]) -> Space:
        """Those whose kind is kept."""
        return Space(tuple(filter(kept, self.kinds)), self.tiles)

    def __contains__(self, statics: Pins) -> bool:
        """Looks at one kind alone, and the first time no further than the tile: a first call asks once, and has
        no time for all of them."""
        kind = self.kind_of(statics)
        if kind is None:
            return False
        tile = statics[len(kind) :]
        if kind not in self._tested:
            self._tested.add(kind)
            return any(tile == listed for listed in self.tiles(kind))
        return tile in self._tiles(kind)

    def kind_of(self, statics: Pins) -> Pins | None:
        """The kind that the pinnings begin with; the longest, where a kind begins with another."""
        starts = (statics[:length] for length in self._lengths)
        return next((start for start in starts if start in self._kinds), None)

    @cached_property
    def _kinds(self) -> frozenset[Pins]:
        return frozenset(self.kinds)

    @cached_property
    def _lengths(self) -> tuple[int, ...]:
        return tuple(sorted({len(kind) for kind in self.kinds}, reverse=True))

    def _tiles(self, kind: Pins) -> frozenset[Pins]:
        if kind not in self._known:
            self._known[kind] = frozenset(self.tiles(kind))
        return self._known[kind]

    @cached_property
    def _known(self) -> dict[Pins, frozenset[Pins]]:
        return {}

    @cached_property
    def _tested(self) -> set[Pins]:
        return set()


@dataclass(frozen=True)
class Parameter:
    """One run-time parameter of a kernel: a pointer to a tensor or a 64-bit integer."""

    name: str
    kind: Literal["pointer", "i64"]


@dataclass(frozen=True)
class Launch:
    """How to launch one variant on one problem.

    ``workspace`` bytes are passed as the pointer called ``workspace``, ``zeroed`` on the stream before the
    kernel starts, or with what was there before; 0 passes null. ``pieces`` says how many sums the kernel leaves of each result
    that is to be added up; 0 stands for as many as the problem has room for.
    """

    grid: tuple[int, int, int]
    scalars: Mapping[str, int]
    workspace: int = 0
    zeroed: bool = True
    pieces: int = 0


class Problem(Protocol):
    """What every family's problem says of itself; the rest is between a spec and its kernels."""

    @property
    def kernel(self) -> str:
        """Name of the kernel that solves it."""

    @property
    def dtype(self) -> str:
        """What the static parameter ``dtype`` of a variant that solves it has to be."""


@dataclass(frozen=True)
class Code:
    """What a kernel's source is compiled with, and the block that it is launched with.

    source     file in the family's folder; it may include others of that folder
    entry      symbol of the entry point (CUDA) or name of the function (Triton)
    constants  variant -> preprocessor definitions (CUDA) or constexpr values (Triton)
    warps      variant -> warps per block; its static parameter of that name, if nothing else is said
    shared     variant -> bytes of dynamic shared memory per block (CUDA)
    divisible  variant -> parameters that are promised to be divisible by 16 (Triton)
    elements   variant -> dtype of what each pointer points to (Triton)
    fuses      variant -> whether products and sums may be contracted to one rounding (Triton)
    may_spill  bytes of registers that a thread of a variant may spill, at most; others may spill none. Each is an exception to justify
    headers    files that the source includes by the name of a macro (CUDA)
    exact      compute capabilities whose machine code uses what no later GPU has: it is compiled for ``sm_90a`` and the like (CUDA)
    """

    source: str
    entry: str
    constants: Callable[[Variant], Mapping[str, Static]]
    warps: Callable[[Variant], int] = lambda variant: variant.number("warps")
    shared: Callable[[Variant], int] = lambda variant: 0
    divisible: Callable[[Variant], frozenset[str]] = lambda variant: frozenset()
    elements: Callable[[Variant], Mapping[str, str]] = lambda variant: {}
    fuses: Callable[[Variant], bool] = lambda variant: True
    may_spill: Mapping[Variant, int] = field(default_factory=dict)
    headers: tuple[str, ...] = ()
    exact: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True)
class Rules:
    """Which problems a variant solves, and on which GPUs.

    accepts            variant, problem -> None, or the reason why the variant cannot solve the problem
    kind_mismatch      variant, problem -> None, or the reason why the variant's kind is for other problems, which
                       is found in no time; one of the reasons of ``accepts``
    exceeds_residency  variant, problem, SMs of the GPU -> None, or why they are too few: for kernels whose CTAs
                       wait for each other
    serves             static parameters, target -> whether it is compiled for that, ahead of time or here; of those
                       of a kind, whether any such variant is
    ships              static parameters, target -> whether wheels hold its binary; others are compiled where they are
                       first called
    """

    accepts: Callable[[Variant, Any], str | None]
    kind_mismatch: Callable[[Variant, Any], str | None] = lambda variant, problem: None
    exceeds_residency: Callable[[Variant, Any, int], str | None] = lambda variant, problem, count: (
        None
    )
    serves: Callable[[Pins, Target], bool] = lambda statics, target: True
    ships: Callable[[Pins, Target], bool] = lambda statics, target: True


@dataclass(frozen=True)
class Tunable:
    """What tuning may choose from, and what it has found.

    space            the variants that there are, beside the defaults
    shape            problem, and what a GPU's archive is for unless it is that of a GPU that was tuned -> where it lies among
                     those that the kernel is tuned for; None: it never is
    worth            variant, problem -> whether tuning should time a variant that accepts the problem
    tile_efficiency  what a variant prints as, sizes of a shape -> how much of what the variant then works through
                     is the problem; 1 where the padding costs nothing
    predicted        coefficients, what a variant prints as, a shape, SMs of the GPU -> milliseconds by the
                     timing model, which is fitted to rows and estimates problems that are far from them; None where it
                     says nothing of such a variant
    given            static parameters that the problem decides, and not tuning
    tunings          () -> what wheels need of what tuning found, on each architecture that has a table
    timings          () -> all that it found, where there are tables; wheels have none
    """

    space: Space = Space((), lambda kind: ())
    shape: Callable[..., Shape] | None = None
    worth: Callable[[Variant, Any], bool] = lambda variant, problem: True
    tile_efficiency: Callable[[str, Mapping[str, float]], float] = lambda text, sizes: 1.0
    predicted: Callable[[Model, str, Shape, int], float | None] = lambda model, text, shape, count: (
        None
    )
    given: frozenset[str] = frozenset()
    tunings: Source = tuple
    timings: Source = tuple


@dataclass(frozen=True)
class Kernel:
    """One entry point of a family in one language.

    parameters  in the order of the entry point's signature; pointers come first
    defaults    the variants that wheels hold of kinds for which they have no tunings
    code        what is compiled
    rules       which problems a variant solves, and on which GPUs
    launch      variant, problem, SMs of the GPU -> grid, scalars, workspace
    cost        variant, problem -> smaller is better, among variants that accept
    tunable     the variants that tuning may choose from, and what it has found
    not_on_cpu  why nothing does on the CPU what it does; None if something does
    """

    family: str
    name: str
    language: Language
    parameters: tuple[Parameter, ...]
    defaults: Space
    code: Code
    rules: Rules
    launch: Callable[[Variant, Any, int], Launch]
    cost: Callable[[Variant, Any], float] = lambda variant, problem: 0.0
    tunable: Tunable = Tunable()
    not_on_cpu: str | None = None

    @property
    def head(self) -> str:
        """What its variants print as, before the static parameters."""
        return f"{self.family}.{self.name}:{self.language}"

    @cached_property
    def by_text(self) -> Mapping[str, Variant]:
        """The defaults by what they print as."""
        return {str(variant): variant for variant in self._of(self.defaults)}

    @cached_property
    def variants(self) -> tuple[Variant, ...]:
        """What wheels hold: the defaults, and what a table names. Reads the tables."""
        return self._held(self.defaults, self.tunable.space)

    def held(self, dtype: str, target: Target) -> tuple[Variant, ...]:
        """Of ``variants`` those of one dtype for one target, without a look at most of the others."""

        def kept(kind: Pins) -> bool:
            return dict(kind).get("dtype", dtype) == dtype and self.rules.serves(kind, target)

        if (dtype, target) not in self._known:
            spaces = self.defaults.of(kept), self.tunable.space.of(kept)
            self._known[dtype, target] = self._held(*spaces)
        return self._known[dtype, target]

    @cached_property
    def _known(self) -> dict[tuple[str, Target], tuple[Variant, ...]]:
        return {}

    def _held(self, defaults: Space, space: Space) -> tuple[Variant, ...]:
        named = {label for tuning in self.tunable.tunings() for label in tuning.labels}
        others = space if named else ()
        tuned = (statics for statics in others if self._label(pinned(statics)) in named)
        return self._of(dict.fromkeys((*defaults, *tuned)))

    @cached_property
    def every(self) -> tuple[Variant, ...]:
        """The whole space, defaults first."""
        return self._of(dict.fromkeys((*self.defaults, *self.tunable.space)))

    def allows(self, variant: Variant) -> bool:
        """Whether there can be such a variant; enumerates no more than its kind."""
        if (variant.family, variant.kernel, variant.language) != (
            self.family,
            self.name,
            self.language,
        ):
            return False
        return variant.statics in self.defaults or variant.statics in self.tunable.space

    def mistakes(self, variant: Variant, problem: Any) -> str | None:
        """Why a variant that is none of the defaults, and may be another version's, is not to be asked whether it
        accepts the problem. A first call has no time to enumerate kinds that are for other problems."""
        known = self.tunable.space.kind_of(variant.statics) is not None
        if known and (reason := self.rules.kind_mismatch(variant, problem)):
            return reason
        return None if self.allows(variant) else "this version's spec has no such variant"

    def label(self, variant: Variant) -> str:
        """What tunings call a variant: its static parameters but for what the problem decides."""
        return self._label(pinned(variant.statics))

    def label_in(self, text: str) -> str:
        """The same of what a variant prints as."""
        return self._label(text[len(self.head) + 1 :])

    def _label(self, statics: str) -> str:
        if not any(f",{name}=" in statics for name in self.tunable.given):
            return statics
        pins = statics.split(",")
        return ",".join(pin for pin in pins if pin.partition("=")[0] not in self.tunable.given)

    def _of(self, space: Iterable[Pins]) -> tuple[Variant, ...]:
        return tuple(Variant(self.family, self.name, self.language, statics) for statics in space)

    @property
    def pointers(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.parameters if p.kind == "pointer")


@dataclass(frozen=True)
class Sample:
    """A typical problem, in the dtype and with the word, such as ``aligned``, that it stands for. ``size``, which may be empty,
    decides which GPUs have a kernel for it (``128 states``). ``by_memory``: bytes of shared memory per block -> what calls pose."""

    problem: Problem
    dtype: str
    access: str
    size: str = ""
    by_memory: Callable[[int], Problem] | None = None


@dataclass(frozen=True)
class Family:
    """Kernels that compute one thing.

    samples    problems that between them call for every kernel, in every dtype, with inputs that are
               aligned and not, of sizes that not every GPU has a kernel for: what ``doctor`` asks selection about
    on_cpu     whether this package has compiled code for the CPU, too; else plain torch runs there
    by_torch   the dtypes that plain torch computes on the CPU all the same
    stand_in   what a call runs on a GPU that no kernel fits
    languages  problem, the target of a GPU's capability -> languages in order of preference on one tier
    """

    name: str
    summary: str
    folder: Path
    kernels: tuple[Kernel, ...]
    samples: tuple[Sample, ...] = ()
    on_cpu: bool = False
    by_torch: tuple[str, ...] = ()
    stand_in: str = PLAIN_TORCH
    languages: Callable[[Any, Target], tuple[Language, ...]] = lambda problem, target: LANGUAGES

    def compiled_for_cpu(self, dtype: str) -> bool:
        """Whether this package's compiled code computes the dtype on the CPU, and not plain torch."""
        return self.on_cpu and dtype not in self.by_torch

    def variants(self) -> tuple[Variant, ...]:
        """Every variant that wheels hold, of every kernel, in the spec's order."""
        return tuple(variant for kernel in self.kernels for variant in kernel.variants)

    def kernel(self, name: str, language: Language) -> Kernel:
        """The kernel ``name`` in ``language``; ``KeyError`` if there is none."""
        for kernel in self.kernels:
            if (kernel.name, kernel.language) == (name, language):
                return kernel
        raise KeyError(f"family {self.name} has no {language} kernel {name!r}")
