"""The compiled code of ``selective_scan`` for the CPU, against the reference in double precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from placing import PLACES
from torch import Tensor
from watched import levels, using

import scan_registry
from scan_registry.kernels.selective_scan import reference
from scan_registry.kernels.selective_scan.cases import TOLERANCE
from scan_registry.ops import _cpu


@dataclass(frozen=True)
class Case:
    """One scan: what a failure prints."""

    batch: int
    channels: int
    states: int
    time: int
    groups: tuple[int, int] = (1, 1)
    dtype: str = "float32"
    place: str = "time last"
    options: bool = True
    softplus: bool = True
    bounds: tuple[int, ...] | None = None

    def make(self) -> dict[str, Any]:
        """The arguments; those of the sequence in the dtype and place."""
        torch.manual_seed(self.time)
        put, dtype = PLACES[self.place], getattr(torch, self.dtype)

        def sequence(*size: int) -> Tensor:
            return put(torch.randn(size).to(dtype))

        shape, of_state = (
            (self.batch, self.channels, self.time),
            (self.batch, *self._packed, self.channels, self.states),
        )
        projections = [
            put(torch.randn(self.batch * g, self.states, self.time).to(dtype)).unflatten(0, (-1, g))
            for g in self.groups
        ]
        delta = torch.randn(shape) / 2 - 1 if self.softplus else torch.rand(shape) / 4
        given: dict[str, Any] = {
            "u": sequence(*shape),
            "delta": put(delta.to(dtype)),
            "A": -2 * torch.rand(self.channels, self.states) - 0.05,
            "B": projections[0],
            "C": projections[1],
        }
        if self.options:
            given |= {
                "D": torch.randn(self.channels),
                "z": sequence(*shape),
                "delta_bias": torch.randn(self.channels) / 8,
                "initial_state": torch.randn(of_state),
            }
        return given

    @property
    def _packed(self) -> tuple[int, ...]:
        return () if self.bounds is None else (len(self.bounds) - 1,)

    @property
    def how(self) -> dict[str, Any]:
        """The arguments that have no gradients."""
        bounds = None if self.bounds is None else torch.tensor(self.bounds)
        return {"delta_softplus": self.softplus, "cu_seqlens": bounds}


def solved(function: Callable[..., Any], case: Case, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs, and gradients by name; those of the output are of the case's dtype, whatever it is computed in."""
    leaves = {name: t.detach().requires_grad_() for name, t in given.items()}
    out, last = function(**leaves, **case.how)
    torch.manual_seed(1)
    out_grad = torch.randn(out.shape).to(getattr(torch, case.dtype)).to(out.dtype)
    grads = [out_grad, torch.randn(last.shape).to(last.dtype)]
    found = torch.autograd.grad([out, last], list(leaves.values()), grads)
    named = dict(zip(leaves, found, strict=True))
    return {"out": out.detach(), "last": last.detach()} | {f"{n}_grad": g for n, g in named.items()}


def compiled(case: Case, given: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    def function(**arguments: Any) -> Any:
        return scan_registry.selective_scan(**arguments, return_final_state=True)

    return solved(function, case, case.make() if given is None else given)


def error(out: Tensor, expected: Tensor) -> float:
    scale = float(torch.linalg.vector_norm(expected))
    return float(torch.linalg.vector_norm(out.double() - expected)) / (scale or 1.0)


def check(case: Case) -> None:
    given = case.make()
    expected = solved(reference.forward, case, {n: t.double() for n, t in given.items()})
    for name, found in compiled(case, given).items():
        of = given.get(name.removesuffix("_grad"), given["u"])
        assert found.shape == expected[name].shape
        assert found.dtype == (torch.float32 if name == "last" else of.dtype)
        tolerance = TOLERANCE[str(found.dtype).removeprefix("torch.")]
        assert error(found, expected[name]) <= tolerance, (case, name)


CASES = [
    Case(2, 4, 3, 5, (2, 1)),
    Case(2, 24, 16, 70),
    Case(1, 9, 4, 130, (3, 9)),
    Case(1, 130, 17, 67, (1, 2)),
    Case(1, 6, 256, 33, (2, 3)),
    Case(2, 10, 1, 128),
    Case(64, 130, 2, 3),  # so many sequences that a task has more channels than it works on at once
    Case(1, 80, 2, 193, options=False),
    Case(1, 16, 64, 65, softplus=False),
    Case(2, 20, 5, 150, (1, 4), bounds=(0, 50, 50, 51, 150)),
]


@pytest.mark.parametrize("instructions", levels())
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_right(case: Case, instructions: str) -> None:
    with using(instructions):
        check(case)


@pytest.mark.parametrize("instructions", levels())
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_however_tensors_lie(place: str, dtype: str, instructions: str) -> None:
    with using(instructions):
        check(Case(2, 21, 6, 75, (3, 1), dtype, place))


def test_a_long_sequence() -> None:
    check(Case(1, 2, 4, 2001))


@pytest.mark.parametrize("instructions", levels())
def test_threads_do_not_change_a_bit(instructions: str) -> None:
    usual = torch.get_num_threads()
    found = []
    try:
        with using(instructions):
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                found += [compiled(Case(3, 150, 16, 200)) | compiled(Case(1, 40, 8, 900, (2, 4)))]
    finally:
        torch.set_num_threads(usual)
    alone, *others = found
    for other in others:
        assert all(torch.equal(alone[name], other[name]) for name in alone)


@pytest.mark.parametrize("instructions", levels())
@pytest.mark.parametrize("name", ["u", "delta", "z", "B", "C", "A", "D", "initial_state"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_goes_where_it_does_in_the_reference(
    name: str, value: float, instructions: str
) -> None:
    """In channels and steps that it reaches, and none else."""
    case = Case(1, 11, 3, 90)
    given = case.make()
    place = {"A": (4, 1), "D": (4,), "initial_state": (0, 4, 1), "B": (0, 0, 1, 70)}
    place["C"] = place["B"]
    given[name][place.get(name, (0, 4, 70))] = value
    expected, _ = reference.forward(**given, **case.how)
    with using(instructions):
        found = compiled(case, given)
    assert torch.equal(found["out"].isnan(), expected.isnan())
    assert torch.equal(found["out"].isinf(), expected.isinf())
    assert found["out"].isfinite().all() == (value == -math.inf and name in ("delta", "A"))
    if name not in "BC":
        others = [d for d in range(11) if d != 4]
        assert found["u_grad"][:, others].isfinite().all()


def test_extreme_steps() -> None:
    """Gates from 0 to infinity, and step sizes at both ends of softplus."""
    sizes = torch.tensor([-1e30, -200.0, -90.0, -30.0, -1.0, 0.0, 1.0, 15.0, 25.0, 90.0, 1e30])
    u, ones = torch.ones(1, 1, len(sizes)), torch.ones(1, 1, 1, len(sizes))
    for rate in (-1.0, -1e-20, -1e20, 0.0, 1e-3):
        given = u, sizes.expand(1, 1, -1), torch.full((1, 1), rate), ones, ones
        out = scan_registry.selective_scan(*given, delta_softplus=True)
        expected, _ = reference.forward(*(t.double() for t in given), delta_softplus=True)
        torch.testing.assert_close(out, expected.float(), rtol=2e-6, atol=1e-37)


def test_what_is_not_wanted_is_not_there() -> None:
    given = Case(1, 5, 2, 9).make()
    given["D"].requires_grad_()
    out = scan_registry.selective_scan(**given, delta_softplus=True)
    assert isinstance(out, Tensor)
    out.sum().backward()
    expected = (given["u"] * torch.nn.functional.silu(given["z"])).sum((0, 2))
    torch.testing.assert_close(given["D"].grad, expected)


def test_nothing_but_the_inputs_is_kept() -> None:
    given = Case(1, 64, 16, 1000).make()
    leaves = {name: t.requires_grad_() for name, t in given.items()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scan_registry.selective_scan(**leaves)
    assert sum(kept.values()) <= sum(t.numel() for t in leaves.values())


def test_the_reference_when_asked() -> None:
    given = Case(2, 4, 3, 5).make()
    out = scan_registry.selective_scan(**given, backend="reference")
    expected, _ = reference.forward(**given)
    torch.testing.assert_close(out, expected)


SIZES = (1, 2, 3, 4, 1, 1, 0, 0)
FORWARD = "float32", (1024,) * 12, (*SIZES, *[0] * 20), 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({0: "float64"}, "dtype 'float64'; accepted are float32, bfloat16, float16"),
        ({1: (1024,) * 11}, "takes 12 pointers, got 11"),
        ({1: (None,) * 12}, "pointer 0 is null"),
        ({2: (*SIZES, *[0] * 19)}, "takes 28 scalars, got 27"),
        ({2: (1, 2, 3, 257, *SIZES[4:], *[0] * 20)}, "states is 257; accepted are 1 to 256"),
        ({2: (1, -2, *SIZES[2:], *[0] * 20)}, "size 1 is -2"),
        ({2: (*SIZES[:4], 3, 1, 0, 0, *[0] * 20)}, "3 groups do not divide 2 channels"),
        ({3: 0}, "threads is 0"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[int, Any], words: str) -> None:
    arguments: list[Any] = list(FORWARD)
    for place, value in changes.items():
        arguments[place] = value
    with pytest.raises(ValueError, match=words):
        _cpu.selective_scan_forward(*arguments)


def test_offsets_must_rise() -> None:
    given = replace(Case(1, 2, 1, 4), options=False).make()
    sizes = 1, 2, 4, 1, 1, 1, 2, 0
    names = "u", "delta", None, "u", "B", "C", "A"
    pointers = [None if n is None else given[n].data_ptr() for n in names]
    offsets = torch.tensor([0, 3, 2])
    pointers += [None, None, None, offsets.data_ptr(), None]
    strides = (8, 4, 1) * 4 + (4, 4, 4, 1) * 2
    with pytest.raises(ValueError, match="offsets do not rise from 0 to time, 4"):
        _cpu.selective_scan_forward("float32", tuple(pointers), (*sizes, *strides), 1)
