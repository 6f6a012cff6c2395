"""What the families' cases share: how far off a result is, and what commands read of them.

A family's ``cases.py`` draws random problems, with what its float64 reference makes of them; ``selftest`` and
``tools/attest.py`` run the kernels on these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

_Tensor = TypeVar("_Tensor", Tensor, "Tensor | None")
_Setting = TypeVar("_Setting")
_Trial = TypeVar("_Trial")


class Launched(Protocol):
    """Tensors of one launch, by the names of the kernel's pointers; those that are not there are null."""

    @property
    def tensors(self) -> Mapping[str, Tensor | None]: ...


@dataclass(frozen=True)
class Options:
    """Of a problem; printed are those that are not zero."""

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in vars(self).items() if value)


@dataclass(frozen=True)
class Case:
    """One launch to make: every pointer parameter by name, outputs poisoned, and what to expect."""

    problem: Any
    tensors: dict[str, Tensor | None]
    expected: dict[str, Tensor]

    def error(self) -> float:
        """‖out − ref‖ / ‖ref‖ of the worst output; infinite if one was not wholly written."""
        return max(self.errors().values(), default=0.0)

    def errors(self) -> dict[str, float]:
        """Of each output."""
        outputs = {name: there(self.tensors[name]) for name in self.expected}
        return {
            name: self.error_of(name, out, self.expected[name]) for name, out in outputs.items()
        }

    def error_of(self, name: str, out: Tensor, expected: Tensor) -> float:
        """Of one output."""
        return relative_error(out, expected)


class Trial(Protocol):
    """Inputs of one problem in one dtype, and the results in float64."""

    def case(self, kernel: str, *, aligned: bool) -> Case:
        """The launch of ``kernel`` that computes this, in memory laid out as it wants."""

    def launches(self, kernel: str) -> Iterator[Case]:
        """All that ``kernel`` can compute this by."""
        return (self.case(kernel, aligned=aligned) for aligned in (True, False))


@dataclass(frozen=True)
class RandomTrial(Trial, Generic[_Setting]):
    """One of a shape and a setting, which are all that its name says."""

    shape: tuple[int, ...]
    setting: _Setting
    dtype: str
    inputs: dict[str, Tensor | None]
    expected: dict[str, Tensor]

    def __str__(self) -> str:
        return f"{self.shape} {self.setting}".strip()


def in_turn(
    draw: Callable[..., _Trial], settings: Sequence[Any], count: int, dtype: str, shapes: Any, device: Any
) -> Iterator[_Trial]:  # fmt: skip
    """What ``draw`` makes of ``count`` settings for each shape, all in turn."""
    turn = cycle(settings)
    for shape in shapes:
        for _ in range(count):
            yield draw(shape, next(turn), dtype, device)


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


def there(tensor: Tensor | None) -> Tensor:
    """A tensor that must not be null."""
    assert tensor is not None
    return tensor


def on_device(tensors: Mapping[str, _Tensor], device: torch.device | str) -> dict[str, _Tensor]:
    """The tensors there; None stays."""
    return {name: t if t is None else t.to(device) for name, t in tensors.items()}


def in_float64(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Those of floating-point numbers in float64, the others as they are."""
    return {
        n: t.double() if t is not None and t.is_floating_point() else t for n, t in tensors.items()
    }


def random_cu_seqlens(time: int) -> Tensor:
    """Bounds of random sequences, the first of them empty and another one perhaps."""
    cuts = torch.randint(0, time + 1, (min(7, time),)).sort().values
    return torch.cat([torch.tensor([0, 0]), cuts, cuts[-1:], torch.tensor([time])])


def few_cu_seqlens(time: int) -> Tensor:
    """Bounds of four random sequences, the first of them empty."""
    cut = sorted(torch.randint(0, time + 1, (2,)).tolist())
    return torch.tensor([0, 0, *cut, time])


def with_gaps(tensor: Tensor, gap: int, off: int = 1) -> Tensor:
    """A copy with gaps between its rows, and ``off`` elements before the first; of gap 0, without any."""
    *rows, length = tensor.shape
    memory = tensor.new_empty(tensor.numel() // length * (length + gap) + off)
    flat = memory[off:] if gap else memory[: len(memory) - off]
    return flat.view(*rows, length + gap)[..., :length].copy_(tensor)


def placed(tensor: Tensor, turned: bool, gap: int, off: int = 1) -> Tensor:
    """A copy ``with_gaps`` whose last dimension lies together, or if it is ``turned`` the one before."""
    moved = tensor.transpose(-1, -2) if turned else tensor
    copy = with_gaps(moved, gap, off)
    return copy.transpose(-1, -2) if turned else copy


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
