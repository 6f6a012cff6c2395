"""Which row of which tuning a problem goes by: of what was tuned here, and of what is shipped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from typing import Literal

from scan_registry.artifact.archive import Archive, ArchiveError
from scan_registry.base.frozen import dataclass
from scan_registry.hardware.device import Device
from scan_registry.hardware.target import Target
from scan_registry.kernels.model import Kernel, Problem
from scan_registry.kernels.tuning import Row, Shape, Tuning, arch_distance

#: What decides: a row's times; those, scaled to the problem; or the timing model alone.
Rule = Literal["row", "scaled_row", "timing_model"]
#: Where there is a timing model, a row counts if its distance is at most the first number, and its distance with all weights 1
#: at most the second. Otherwise the model decides alone.
NEAR, NEAR_UNWEIGHTED = 2.0, 4.0


@dataclass(frozen=True)
class Origin:
    """Where rows come from: the GPU that they were measured on, and when; ``source`` is "local" for
    what was tuned on this machine, else "shipped"."""

    arch: str
    gpu: str
    date: str
    source: str

    def __str__(self) -> str:
        source = "tuned here" if self.source == "local" else "the shipped table"
        return f"{source}, {self.arch}, {self.gpu}, {self.date}"


@dataclass(frozen=True)
class TuningMatch:
    """What tuning knows of a problem: the row of the nearest one, in which a variant need not be.

    distance  from the problem to the row's: see ``Row.distance``
    local     whether it was tuned on this machine, rather than shipped
    shape     the problem's
    sm_count  of the GPU that the problem is for; None if that is of another architecture than the tuning's, whose
              timing model then says nothing
    """

    tuning: Tuning
    row: Row
    distance: float
    local: bool
    shape: Shape
    sm_count: int | None

    @cached_property  # of one match, which rates all variants
    def is_near(self) -> bool:
        """Whether the problem is so near to the row's that the row counts. By the weights alone, with which channels count
        little, a row of 256 channels would count for 4 channels, with which most of a tile is empty."""
        unweighted = Shape(self.shape.kind, self.shape.sizes)
        return self.distance <= NEAR and self.row.distance(unweighted) <= NEAR_UNWEIGHTED

    def ms(self, kernel: Kernel, text: str) -> float | None:
        """What the variant that prints as ``text`` counts as: the ``estimate`` where the row is far away, or of another problem and
        does not name it, or else its time in the row, scaled to the problem; None if there is neither."""
        if self.rule(kernel, text) == "timing_model":
            return self.estimate(kernel, text)
        measured = self.row.times.get(kernel.label_in(text))
        return measured and measured * (self.scale(kernel, text) if self.distance else 1)

    def rule(self, kernel: Kernel, text: str) -> Rule:
        """What ``ms`` goes by, if it says anything."""
        row_counts = self.is_near and (not self.distance or kernel.label_in(text) in self.row.times)
        if not row_counts and self.estimate(kernel, text) is not None:
            return "timing_model"
        return "scaled_row" if self.distance else "row"

    def estimate(self, kernel: Kernel, text: str) -> float | None:
        """Milliseconds by the timing model; None if it says nothing of such a variant."""
        if self.sm_count is None:
            return None
        return kernel.tunable.predicted(self.tuning.model, text, self.shape, self.sm_count)

    def scale(self, kernel: Kernel, text: str) -> float:
        """How many times as long the variant takes on the problem as on the row's: by the timing model, or else by how
        full its tiles are."""
        tunable, sizes = kernel.tunable, self.row.sizes
        if here := self.estimate(kernel, text):
            of = Shape(self.shape.kind, sizes)
            there = tunable.predicted(self.tuning.model, text, of, self.tuning.sm_count)
            return here / there if there else 1.0
        return tunable.tile_efficiency(text, sizes) / tunable.tile_efficiency(
            text, self.shape.sizes
        )

    @property
    def origin(self) -> Origin:
        tuning = self.tuning
        source = "local" if self.local else "shipped"
        return Origin(tuning.arch, tuning.gpu, tuning.date, source)


def nearest_row(
    device: Device,
    local: Archive | None,
    archives: Iterable[Archive],
    spec: bool,
    kernel: Kernel,
    problem: Problem,
) -> TuningMatch | None:
    """The one row that all variants of a kernel in a language are compared by, if there is one: from the
    architecture nearest to the device's, of the nearest problem; of equals what was tuned here first, and then
    what is for GPUs of the device's name alone.

    local     what was tuned here
    archives  what may bring tunings; one that is not intact brings none
    spec      whether to look at the tables beside the spec where no archive brings any
    """
    # Archives hold one GPU's rows in different selections, each for the variants that are in it.
    closest = sorted(
        archives, key=lambda a: (a.arch.capability != device.capability, a.arch.is_ptx)
    )
    every = _tunings(local, closest, spec, kernel) if kernel.tunable.shape else ()
    tunings = [pair for pair in every if pair[0].serves(device.name)]
    if kernel.tunable.shape is None or not tunings:
        return None
    shape, matches = kernel.tunable.shape(problem, Target(device.capability)), []
    for tuning, is_local in tunings:
        with suppress(ValueError):  # it is intact, and yet not right: whoever wrote it is not here
            nearest = tuning.nearest(shape)
            if nearest is not None:
                distance, row = nearest
                own = tuning.capability == device.capability
                count = device.sm_count if own and tuning.model else None
                matches.append(TuningMatch(tuning, row, distance, is_local, shape, count))

    def preference(match: TuningMatch) -> tuple[tuple[bool, bool, int], float, bool]:
        general = not (match.local or match.tuning.exclusive)
        return arch_distance(match.tuning, device.capability), match.distance, general

    return min(matches, key=preference, default=None)


def _tunings(
    local: Archive | None, archives: Iterable[Archive], spec: bool, kernel: Kernel
) -> Iterator[tuple[Tuning, bool]]:
    """With whether it is local, in order of preference among equals."""
    brought = False
    for archive in (*((local,) if local else ()), *archives):
        with suppress(ArchiveError):  # among the reasons of what it holds
            for tuning in archive.tunings(kernel.head):
                brought = brought or archive is not local
                yield tuning, archive is local
    if spec and not brought:
        for tuning in kernel.tunable.tunings():
            yield tuning, False
