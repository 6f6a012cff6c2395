"""What the families' cases share: how far off a result is, and what commands read of them.

A family's ``cases.py`` draws random problems, with what its float64 reference makes of them; ``selftest`` and
``tools/attest.py`` run the kernels on these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor


class Launched(Protocol):
    """Tensors of one launch, by the names of the kernel's pointers; those that are not there are null."""

    @property
    def tensors(self) -> Mapping[str, Tensor | None]: ...


class Case(Launched, Protocol):
    """One launch to make: every pointer parameter by name, outputs poisoned, and what to expect."""

    @property
    def problem(self) -> Any: ...

    def error(self) -> float:
        """‖out − ref‖ / ‖ref‖ of the worst output; infinite if one was not wholly written."""


class Trial(Protocol):
    """Inputs of one problem in one dtype, and the results in float64."""

    def case(self, kernel: str, *, aligned: bool) -> Case:
        """The launch of ``kernel`` that computes this, in memory laid out as it wants."""

    def launches(self, kernel: str) -> Iterator[Case]:
        """All that ``kernel`` can compute this by."""


class Cases(Protocol):
    """A family's module. TOLERANCE: the largest error, by dtype, of a binary that counts as GPU-tested; QUICK and
    THOROUGH: the shapes of a quick check and of an attestation; SMALL: few shapes that reach every kernel, for
    ``tools/sanitize.py``."""

    TOLERANCE: Mapping[str, float]
    QUICK: tuple[Any, ...]
    THOROUGH: tuple[Any, ...]
    SMALL: tuple[Any, ...]

    def trials(self, dtype: str, shapes: Any, device: torch.device | str) -> Iterator[Trial]:
        """A few for each shape, between them with every option."""


def relative_error(
    out: Tensor, expected: Tensor, among: Tensor | None = None, terms: Tensor | None = None
) -> float:
    """‖out − expected‖ / ‖expected‖; infinite where ``out`` holds a NaN. What is expected may be a few numbers
    that happen to cancel, of the size of those ``among`` which they are: then that size counts. Where numbers are
    sums, ``terms`` is the root of the sum of the squares of each one's terms: then that size counts if it is larger,
    as a sum of terms that cancel is no more exact than they are. Numbers below the smallest normal one of out's dtype
    are as exact as that one."""
    size = expected.norm()
    if out.is_floating_point():
        size = size.clamp_min(torch.finfo(out.dtype).tiny * expected.numel() ** 0.5)
    if terms is not None:
        size = torch.maximum(size, terms.norm())
    if among is not None:
        size = torch.maximum(size, among.norm() * (expected.numel() / among.numel()) ** 0.5)
    error = (out.detach().to(expected.dtype) - expected).norm() / size.clamp_min(1e-30)
    return float(error.nan_to_num(nan=torch.inf))
