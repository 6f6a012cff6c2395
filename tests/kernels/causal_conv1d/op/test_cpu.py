"""The compiled code of ``causal_conv1d`` for the CPU, against the reference in double precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from placing import PLACES
from torch import Tensor
from watched import Memory, levels, using

from scan_registry import causal_conv1d, causal_conv1d_update
from scan_registry.kernels.causal_conv1d import cases as TRIALS
from scan_registry.kernels.causal_conv1d import reference
from scan_registry.kernels.causal_conv1d.op.operator import OPERATOR
from scan_registry.kernels.causal_conv1d.spec import FAMILY
from scan_registry.ops import _cpu

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Case:
    """One convolution: what a failure prints."""

    batch: int
    channels: int
    time: int
    width: int = 4
    dtype: str = "float32"
    weight: str = "float32"
    place: str = "time last"
    silu: bool = True
    options: bool = True
    bounds: tuple[int, ...] | None = None
    indexed: bool = False

    def make(self) -> dict[str, Tensor]:
        """The tensors that have gradients."""
        torch.manual_seed(self.time)
        dtype, weight = getattr(torch, self.dtype), getattr(torch, self.weight)
        x = torch.randn(self.batch, self.channels, self.time).to(dtype)
        given = {
            "x": PLACES[self.place](x),
            "weight": torch.randn(self.channels, self.width).to(weight),
        }
        if self.options:
            rows = self.batch if self.bounds is None else len(self.bounds) - 1
            given["bias"] = torch.randn(self.channels).to(weight)
            given["state"] = torch.randn(rows, self.channels, self.width - 1).to(dtype)
        return given

    @property
    def runs(self) -> reference.Runs:
        """Steps that belong together; some of them are padding."""
        if self.bounds is not None:
            return reference.Runs(cu_seqlens=torch.tensor(self.bounds))
        if not self.indexed:
            return reference.Runs()
        torch.manual_seed(2)
        steps = torch.rand(self.batch, self.time)
        return reference.Runs((steps < 0.2).cumsum(1).int() % 7 - 1)


def ours(case: Case, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    found = causal_conv1d(
        given["x"],
        given["weight"],
        given.get("bias"),
        initial_state=given.get("state"),
        activation="silu" if case.silu else None,
        return_final_state=True,
        **case.runs._asdict(),
    )
    assert isinstance(found, tuple)
    return found


def plain(case: Case, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    y, last = reference.forward(
        given["x"],
        given["weight"],
        given.get("bias"),
        given.get("state"),
        case.runs,
        case.silu,
        True,
    )
    assert last is not None
    return y, last


def solved(
    function: Callable[..., tuple[Tensor, Tensor]], case: Case, given: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Outputs, and gradients by name."""
    leaves = {name: t.detach().requires_grad_() for name, t in given.items()}
    outputs = function(case, leaves)
    torch.manual_seed(1)
    grads = [torch.randn(t.shape).to(getattr(torch, case.dtype)).to(t.dtype) for t in outputs]
    grads[0] = PLACES[case.place](grads[0])
    found = torch.autograd.grad(outputs, list(leaves.values()), grads)
    named = {f"{n}_grad": g for n, g in zip(leaves, found, strict=True)}
    return {"y": outputs[0].detach(), "last": outputs[1].detach(), **named}


def error(out: Tensor, expected: Tensor) -> float:
    scale = float(torch.linalg.vector_norm(expected))
    return float(torch.linalg.vector_norm(out.double() - expected)) / (scale or 1.0)


def check(case: Case) -> None:
    given = case.make()
    expected = solved(plain, case, {name: t.double() for name, t in given.items()})
    for name, found in solved(ours, case, given).items():
        assert found.shape == expected[name].shape
        assert found.dtype == given.get(name.removesuffix("_grad"), given["x"]).dtype
        assert error(found, expected[name]) <= TOLERANCE[found.dtype], (case, name)


@pytest.mark.parametrize("instructions", levels())
@pytest.mark.parametrize("width", range(2, 9))
def test_every_width(width: int, instructions: str) -> None:
    with using(instructions):
        check(Case(2, 21, 137, width))
        check(Case(1, 70, 300, width, silu=False, options=False))
        check(Case(2, 9, 270, width, indexed=True))
        check(Case(2, 8, 3, width))
        check(Case(1, 8, 1, width, indexed=True))
        check(Case(1, 19, 140, width, bounds=(0, 1, 1, 3, 134, 140)))


@pytest.mark.parametrize("instructions", levels())
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("dtype", "weight"),
    [
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
        ("bfloat16", "float32"),
    ],
)
def test_however_tensors_lie(place: str, dtype: str, weight: str, instructions: str) -> None:
    with using(instructions):
        check(Case(2, 21, 131, 4, dtype, weight, place))
        check(Case(1, 16, 64, 3, dtype, weight, place, bounds=(0, 30, 64)))
        check(Case(3, 16, 64, 3, dtype, weight, place, indexed=True))


def test_threads_do_not_change_a_bit() -> None:
    usual = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            cases = Case(3, 150, 700), Case(1, 200, 900, bounds=(0, 100, 900))
            found.append([solved(ours, case, case.make()) for case in cases])
    finally:
        torch.set_num_threads(usual)
    alone, *others = found
    for other in others:
        for a, b in zip(alone, other, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("instructions", levels())
@pytest.mark.parametrize("name", ["x", "weight", "bias", "state"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_goes_where_it_does_in_the_reference(
    name: str, value: float, instructions: str
) -> None:
    case = Case(1, 11, 150)
    given = case.make()
    place = {"x": (0, 4, 70), "weight": (4, 1), "bias": (4,), "state": (0, 4, 2)}[name]
    given[name][place] = value
    expected = solved(plain, case, given)
    with using(instructions):
        found = solved(ours, case, given)
    for each in ("y", "last", "x_grad"):
        assert torch.equal(found[each].isnan(), expected[each].isnan()), each
        assert torch.equal(found[each].isinf(), expected[each].isinf()), each
    others = [d for d in range(11) if d != 4]
    assert all(found[f"{n}_grad"][others].isfinite().all() for n in ("weight", "bias"))


@pytest.mark.parametrize("instructions", levels())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize(
    ("width", "length", "time"),
    [(2, 1, 1), (4, 4, 1), (4, 3, 1), (3, 7, 5), (8, 9, 12), (4, 5, 200)],
)
def test_updates(
    width: int, length: int, time: int, step: int, ring: bool, dtype: torch.dtype, instructions: str
) -> None:
    """States in watched memory, each ``step``-th element along time; rows that are there and that are not."""
    torch.manual_seed(time)
    batch, slots, channels = 4, 6, 13
    memory = Memory()
    before = torch.randn(slots, channels, length).to(dtype)
    state = memory.place(before, (0, 1, 2), step)
    x = torch.randn(batch, channels, time).to(dtype)
    weight, bias = torch.randn(channels, width), torch.randn(channels)
    indices = torch.tensor([5, -1, 0, 3], dtype=torch.int32)
    positions = torch.tensor([0, 3, 11, 100], dtype=torch.int32) if ring else None
    expected_state = before.clone()
    given = x, expected_state, weight, bias, positions, indices
    expected = reference.update(*given, True)
    with using(instructions):
        y = causal_conv1d_update(x, state, weight, bias, "silu", positions, indices)
    memory.check([state])
    assert torch.equal(state, expected_state)
    assert error(y, expected.double()) <= TOLERANCE[dtype]


FORWARD: list[Any] = ["float32", "float32", (1024,) * 8, (1, 2, 3, 4, 0, 0, *[0] * 6), 1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({0: "float64"}, "dtype 'float64'; accepted are float32, bfloat16, float16"),
        ({1: "float16"}, "weight_dtype 'float16' with dtype 'float32'"),
        ({2: (1024,) * 7}, "takes 8 pointers, got 7"),
        ({2: (None,) * 8}, "a pointer of causal_conv1d_forward is null"),
        ({3: (1, 2, 3, 4, 0, 0, *[0] * 5)}, "takes 12 scalars, got 11"),
        ({3: (1, 2, 3, 9, 0, 0, *[0] * 6)}, "width is 9; accepted are 2 to 8"),
        ({3: (1, -2, 3, 4, 0, 0, *[0] * 6)}, "size 1 is -2"),
        ({3: (2, 2, 3, 4, 1, 0, *[0] * 6)}, "batch must be 1 and seq_idx null"),
        ({4: 0}, "threads is 0"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[int, Any], words: str) -> None:
    arguments = list(FORWARD)
    for place, value in changes.items():
        arguments[place] = value
    with pytest.raises(ValueError, match=words):
        _cpu.causal_conv1d_forward(*arguments)


def test_offsets_must_rise() -> None:
    x, offsets = torch.zeros(1, 2, 4), torch.tensor([0, 3, 2])
    pointers = (x.data_ptr(),) * 3 + (None,) * 3 + (offsets.data_ptr(), None)
    sizes = (1, 2, 4, 4, 2, 0, *x.stride(), *x.stride())
    with pytest.raises(ValueError, match="offsets do not rise from 0 to time, 4"):
        _cpu.causal_conv1d_forward("float32", "float32", pointers, sizes, 1)


def test_a_state_that_does_not_fit() -> None:
    sizes = (2, 2, 1, 4, 2, 2, 0, *[0] * 9)
    with pytest.raises(
        ValueError, match="a state of 2 slots and 2 inputs, with batch 2 and width 4"
    ):
        _cpu.causal_conv1d_update("float32", "float32", (1024,) * 7, sizes, 1)


@pytest.mark.parametrize("dtype", TRIALS.TOLERANCE)
def test_what_kernels_are_tested_with(dtype: str) -> None:
    """With gaps between rows, in which nothing may be written."""
    for trial in TRIALS.trials(dtype, TRIALS.QUICK[:2], "cpu"):
        for kernel in FAMILY.kernels:
            case = trial.case(kernel.name, aligned=False)
            gaps = {n: around(t) for n, t in case.tensors.items() if t is not None}
            try:
                OPERATOR.run_on_cpu(case.problem, case.tensors)
            except NotImplementedError:
                assert kernel.name == "reduction"
                continue
            assert case.error() <= TRIALS.TOLERANCE[dtype], (kernel.name, trial)
            for name, (before, outside) in gaps.items():
                tensor = case.tensors[name]
                assert tensor is not None
                after, _ = around(tensor)
                assert torch.equal(after[outside], before[outside]), (kernel.name, name)


def around(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """A copy of the memory that a tensor lies in, as integers, and which of it is not the tensor's."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    numbers = whole.view(torch.int16 if tensor.itemsize == 2 else torch.int32)
    outside = torch.ones(len(whole), dtype=torch.bool)
    outside.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(False)
    return numbers.clone(), outside.repeat_interleave(len(numbers) // max(1, len(whole)))
