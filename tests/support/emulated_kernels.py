"""What tests of CUDA kernels in the emulator of a GPU have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from covering import each_value
from torch import Tensor

#: Elements before and after a result, and the number that they hold.
PAD, UNTOUCHED = 1 << 14, 77.0


def check(
    library: Any,
    trials: Iterable[Any],
    tolerance: float,
    turn: int,
    sm_counts: Sequence[int] = (3,),
) -> list[Any]:
    """Launch an emulated variant, and compare the results: of what it takes of the trials, on every shape and kind, every other
    setting, and on inputs placed in every way, for GPUs of few SMs in turn. Variants of other turns meet the other settings, in
    other combinations. Returns the problems."""
    kernel = library.kernel
    taken = [
        (trial, place, case)
        for trial in trials
        for place, case in enumerate(trial.launches(kernel.name))
        if kernel.rules.accepts(library.variant, case.problem) is None
    ]
    assert taken
    settings = {setting: n for n, setting in enumerate(dict.fromkeys(t.setting for t, *_ in taken))}
    values = [
        (
            t.shape,
            getattr(t, "kind", ""),
            place,
            t.setting if settings[t.setting] % 2 == turn % 2 else None,
        )
        for t, place, _ in taken
    ]
    chosen = [taken[number] for number in each_value(values, 7 * turn)]
    for seed, (trial, _, case) in enumerate(chosen):
        library.run(case.problem, case.tensors, seed, sm_counts[seed % len(sm_counts)])
        errors = case.errors()
        assert max(errors.values(), default=0.0) <= tolerance, f"{trial} {errors}"
    return [case.problem for *_, case in chosen]


def surrounded(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Memory full of a number, and in its middle a tensor of this one's shape and strides."""
    extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    around = torch.full((extent + 2 * PAD,), UNTOUCHED, dtype=tensor.dtype)
    return around, around.as_strided(tensor.shape, tensor.stride(), PAD)


def surround(
    tensors: dict[str, Any], names: Iterable[str], parts: Mapping[str, int] | None = None
) -> Callable[[], bool]:
    """Give the named results such memory, of some only so many first parts; the answer says whether all beside them is as it
    was."""
    areas = []
    for name in names:
        around, tensors[name] = surrounded(tensors[name][: (parts or {}).get(name)])
        areas.append((around, tensors[name]))

    def untouched() -> bool:
        for _, result in areas:
            result.fill_(UNTOUCHED)
        return all(bool((around == UNTOUCHED).all()) for around, _ in areas)

    return untouched
