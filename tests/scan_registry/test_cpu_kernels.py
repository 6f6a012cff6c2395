"""The CPU kernels against the reference in double precision, and what they must never do.

Every tensor lies inside a larger piece of memory: after a call, nothing around it may have changed.
Run as a program, this file puts tensors next to pages that cannot be touched.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scan_registry import _cpu
from scan_registry.kernels.linear_scan import reference
from scan_registry.kernels.linear_scan.problem import (
    STRIDED,
    Direction,
    Layout,
    LinearScanProblem,
    Strides,
)
from scan_registry.kernels.linear_scan.spec import parameters

DTYPES = ("float32", "bfloat16", "float16", "float64", "complex64", "complex128")
MIXES = (*zip(DTYPES, DTYPES, strict=True), ("bfloat16", "float32"), ("float16", "float32"))
TOLERANCE = {
    "float32": 1e-6,
    "bfloat16": 8e-3,
    "float16": 1e-3,
    "float64": 1e-14,
    "complex64": 2e-6,
    "complex128": 1e-14,
}
LAYOUTS: tuple[Layout, ...] = ("time_last", "channel_last")
OUTPUTS = {
    "forward": ("states", "final_state"),
    "backward": ("gates_grad", "tokens_grad", "initial_state_grad"),
    "reduction": ("gates_grad",),
}


@pytest.fixture(autouse=True, scope="module")
def _one_torch_thread() -> Iterator[None]:
    """Torch's own threads would do little here but wait for one another."""
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(usual)


@contextmanager
def using(instructions: str) -> Iterator[None]:
    """Run the kernels with these vector instructions."""
    usual = _cpu.instructions()
    _cpu.instructions(instructions)
    try:
        yield
    finally:
        _cpu.instructions(usual)


def _levels() -> tuple[str, ...]:
    return tuple(dict.fromkeys(("portable", _cpu.instructions())))


# --- Tensors in memory that is watched --------------------------------------------------------


def torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def state_dtype(name: str) -> str:
    return str(reference.compute_dtype(torch_dtype(name))).removeprefix("torch.")


@dataclass
class Memory:
    """Tensors, each in bytes of its own that are compared with what they were."""

    margin: int = 256
    kept: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def place(
        self, values: Tensor, order: Sequence[int], step: int = 1, repeat: str = ""
    ) -> Tensor:
        """A copy whose dimensions lie in memory in ``order``, every ``step``-th element along the
        last of them; ``repeat`` names dimensions ("obct") of stride 0, along which it is constant."""
        shape = [1 if "obct-"[d] in repeat else size for d, size in enumerate(values.shape)]
        strides, stride = [0] * values.dim(), step
        for d in reversed(order):
            strides[d] = stride
            stride *= shape[d]
        room = self._room(values.dtype, max(1, stride))
        where = torch.as_strided(room, shape, strides, room.storage_offset())
        where.copy_(values[tuple(slice(0, size) for size in shape)])
        whole = room.untyped_storage()
        content = torch.empty(0, dtype=torch.uint8).set_(whole)
        inside = torch.zeros(len(content), dtype=torch.bool)
        item = values.element_size()
        inside.as_strided(
            (*shape, item), (*(s * item for s in strides), 1), room.storage_offset() * item
        ).fill_(True)
        self.kept.append((content, content.clone(), inside))
        return where.expand(values.shape)

    def _room(self, dtype: torch.dtype, count: int) -> Tensor:
        margin = self.margin // dtype.itemsize
        whole = torch.empty(count + 2 * margin, dtype=dtype)
        whole.view(torch.uint8).fill_(0xFF)  # NaN
        return whole[margin : margin + count]

    def check(self, outputs: Sequence[Tensor]) -> None:
        """Nothing has changed, but for the elements of the outputs."""
        written = {tensor.untyped_storage().data_ptr() for tensor in outputs}
        for now, before, inside in self.kept:
            changed = now != before
            if now.data_ptr() in written:
                changed &= ~inside
            assert not changed.any(), "memory outside the outputs was written"


def numbers(
    shape: Sequence[int], dtype: str, generator: torch.Generator, gate: bool = False
) -> Tensor:
    """Tokens are normal; gates have moduli up to 1, most of them near it."""
    form = torch.complex64 if dtype.startswith("complex") else torch.float32
    values = torch.randn(*shape, dtype=form, generator=generator)
    if gate:
        values = values / (values.abs() + 0.1)
    return values.to(torch_dtype(dtype))


def scalars(
    direction: Direction, sizes: Sequence[int], tensors: dict[str, Tensor], **others: int
) -> tuple[int, ...]:
    """The integer parameters, with the strides that the tensors have."""
    values = dict(zip(("outer", "batch", "channels", "time"), sizes, strict=True)) | others
    for name in STRIDED[direction]:
        like = {"state": ["initial_state", "final_state", "final_state_grad", "initial_state_grad"]}
        like |= {"grads": ["tokens_grad", "gates_grad"]}
        given = [tensors[n] for n in like.get(name, [name]) if tensors.get(n) is not None]
        strides = given[0].stride() if given else (0, 0, 0, 0)
        for dimension, stride in zip(("outer", "batch", "channel", "time"), strides, strict=True):
            values[f"{name}_{dimension}"] = stride
    return tuple(values.get(p.name, 0) for p in parameters(direction) if p.kind == "i64")


def run(
    direction: Direction,
    dtype: str,
    gates_dtype: str,
    integers: tuple[int, ...],
    tensors: Mapping[str, Tensor | None],
    threads: int = 1,
    layout: tuple[str, ...] = (),
) -> None:
    pointers = []
    for parameter in parameters(direction):
        if parameter.kind == "pointer":
            tensor = tensors.get(parameter.name)
            pointers.append(None if tensor is None else tensor.data_ptr())
    function = getattr(_cpu, direction)
    assert function(dtype, gates_dtype, tuple(pointers), integers, threads, *layout) is None


# --- Problems ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One scan: what hypothesis shrinks and a failure prints."""

    dtype: str
    gates_dtype: str
    sizes: tuple[int, int, int, int]
    reverse: bool = False
    bounds: tuple[int, ...] | None = None
    orders: tuple[tuple[int, ...], ...] = (
        (0, 1, 2, 3),
    ) * 3  # in memory: gates, tokens, the others
    steps: tuple[int, int, int] = (1, 1, 1)
    repeat: str = ""
    initial: bool = True
    final: bool = True
    seed: int = 0

    @property
    def states(self) -> tuple[int, int, int, int]:
        return (*self.sizes[:3], 1 if self.bounds is None else len(self.bounds) - 1)

    def make(self, memory: Memory) -> dict[str, Tensor | None]:
        """All tensors of forward and backward, with states and outputs still to be computed."""
        generator = torch.Generator().manual_seed(self.seed)

        def room(name: str, shape: Sequence[int], dtype: str, which: int) -> Tensor:
            values = numbers(shape, dtype, generator, gate=name == "gates")
            repeat = self.repeat if name == "gates" else ""
            return memory.place(values, self.orders[which], self.steps[which], repeat)

        wide, state = state_dtype(self.dtype), self.states
        tensors: dict[str, Tensor | None] = {
            "gates": room("gates", self.sizes, self.gates_dtype, 0),
            "tokens": room("tokens", self.sizes, self.dtype, 1),
            "states": room("states", self.sizes, self.dtype, 2),
            "states_grad": room("states_grad", self.sizes, self.dtype, 1),
            "gates_grad": room("gates_grad", self.sizes, self.gates_dtype, 2),
            "tokens_grad": room("tokens_grad", self.sizes, self.dtype, 2),
        }
        for name, wanted in (
            ("initial_state", self.initial),
            ("final_state_grad", self.initial),
            ("final_state", self.final),
            ("initial_state_grad", self.final),
        ):
            tensors[name] = room(name, state, wide, 2) if wanted else None
        tensors["offsets"] = None
        if self.bounds is not None:
            values = torch.tensor(self.bounds).reshape(1, 1, 1, -1)
            tensors["offsets"] = memory.place(values, (0, 1, 2, 3))
        for leaving, entering in (
            ("final_state", "initial_state"),
            ("initial_state_grad", "final_state_grad"),
        ):
            if (there := tensors[leaving]) is not None:  # as the caller does for empty sequences
                given = tensors[entering]
                there.copy_(torch.zeros_like(there) if given is None else given)
        for entry, (content, _, inside) in enumerate(memory.kept):
            memory.kept[entry] = (content, content.clone(), inside)
        return tensors

    def integers(self, direction: Direction, tensors: dict[str, Tensor | None]) -> tuple[int, ...]:
        given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        sequences = 0 if self.bounds is None else len(self.bounds) - 1
        return scalars(direction, self.sizes, given, sequences=sequences, flags=int(self.reverse))

    def run(
        self, direction: Direction, tensors: dict[str, Tensor | None], threads: int = 1
    ) -> None:
        integers = self.integers(direction, tensors)
        run(direction, self.dtype, self.gates_dtype, integers, tensors, threads)

    def _state(self, state: Tensor | None) -> Tensor | None:
        if state is None:
            return None
        return exact(state) if self.bounds is not None else exact(state).squeeze(3)

    def _how(self) -> dict[str, Any]:
        bounds = None if self.bounds is None else torch.tensor(self.bounds)
        return {"dim": 3, "reverse": self.reverse, "cu_seqlens": bounds}

    def expected(
        self, direction: Direction, tensors: dict[str, Tensor | None]
    ) -> dict[str, Tensor]:
        """By the reference, in double precision, in the shapes of the tensors."""
        inputs = {name: exact(t) for name, t in tensors.items() if t is not None}
        initial = self._state(tensors["initial_state"])
        found: tuple[Tensor, ...]
        if direction == "forward":
            found = reference.forward(inputs["gates"], inputs["tokens"], initial, **self._how())
        else:
            last = self._state(tensors["final_state_grad"])
            gates, states, grads = inputs["gates"], inputs["states"], inputs["states_grad"]
            found = reference.backward(gates, states, grads, initial, last, **self._how())
        return {
            name: value.reshape(self.sizes if i < len(found) - 1 else self.states)
            for i, (name, value) in enumerate(zip(OUTPUTS[direction], found, strict=True))
        }


def exact(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def error(out: Tensor, expected: Tensor) -> float:
    scale = float(torch.linalg.vector_norm(expected))
    found = float(torch.linalg.vector_norm(exact(out) - expected))
    return found / scale if scale > 0 else found


def check(direction: Direction, case: Case, threads: int = 1) -> None:
    """Compute, compare all outputs with the reference, and look for stray writes."""
    memory = Memory()
    tensors = case.make(memory)
    expected = case.expected(direction, tensors)
    case.run(direction, tensors, threads)
    outputs = {name: tensors[name] for name in OUTPUTS[direction]}
    memory.check([tensor for tensor in outputs.values() if tensor is not None])
    for name, tensor in outputs.items():
        if tensor is not None:
            tolerance = TOLERANCE[str(tensor.dtype).removeprefix("torch.")]
            assert error(tensor, expected[name]) <= tolerance, name


SIZES = st.sampled_from((1, 1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 31, 33, 64, 67, 130))
ORDERS = st.permutations((0, 1, 2, 3)).map(tuple)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dtype, gates_dtype = draw(st.sampled_from(MIXES))
    sizes = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(SIZES),
        draw(SIZES | st.sampled_from((127, 128, 129))),
    )
    bounds = None
    if draw(st.booleans()):
        inner = draw(st.lists(st.integers(0, sizes[3]), max_size=6))
        bounds = (0, *sorted(inner), sizes[3])
    alike = draw(st.booleans())
    orders = [draw(ORDERS)] * 3 if alike else [draw(ORDERS) for _ in range(3)]
    return Case(
        dtype=dtype,
        gates_dtype=gates_dtype,
        sizes=sizes,
        reverse=draw(st.booleans()),
        bounds=bounds,
        orders=tuple(orders),
        steps=tuple(draw(st.sampled_from((1, 1, 1, 2, 3))) for _ in range(3)),  # type: ignore[arg-type]
        repeat="".join(d for d in "obct" if draw(st.integers(0, 3)) == 0),
        initial=draw(st.booleans()),
        final=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )


# --- Right ------------------------------------------------------------------------------------


@pytest.mark.parametrize("instructions", _levels())
@pytest.mark.parametrize("direction", ["forward", "backward"])
@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_any_strides(instructions: str, direction: Direction, case: Case) -> None:
    with using(instructions):
        check(direction, case)


@pytest.mark.parametrize("instructions", _levels())
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 1, 3, 2)], ids=LAYOUTS)
@pytest.mark.parametrize(("dtype", "gates_dtype"), MIXES)
def test_long_sequences(
    dtype: str, gates_dtype: str, order: tuple[int, ...], instructions: str
) -> None:
    bounds = (0, 1500, 1500, 1501, 3001)
    with using(instructions):
        for direction in ("forward", "backward"):
            for reverse, ends in ((False, None), (True, bounds)):
                case = Case(dtype, gates_dtype, (1, 2, 19, 3001), reverse, ends, (order,) * 3)
                check(direction, case, threads=2)


@pytest.mark.parametrize(
    "repeat", ["".join(d for i, d in enumerate("obct") if n >> i & 1) for n in range(16)]
)
def test_broadcast_gates(repeat: str) -> None:
    for order in ((0, 1, 2, 3), (0, 1, 3, 2)):
        case = Case("float32", "float32", (2, 3, 33, 70), repeat=repeat, orders=(order,) * 3)
        check("forward", case)
        check("backward", case)


@pytest.mark.parametrize("instructions", _levels())
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_narrow_number(dtype: str, instructions: str) -> None:
    """Gates are 0, so that the states are the tokens: all 65,536 of them, wide and back."""
    tokens = (
        torch.arange(-(2**15), 2**15).to(torch.int16).view(torch_dtype(dtype)).reshape(1, 1, -1, 1)
    )
    gates, states = torch.zeros_like(tokens), torch.empty_like(tokens)
    tensors = {"gates": gates, "tokens": tokens, "states": states}
    with using(instructions):
        run("forward", dtype, dtype, scalars("forward", tokens.shape, tensors), tensors)
    assert torch.equal(states.isnan(), tokens.isnan())
    assert torch.equal(states.nan_to_num(), tokens.nan_to_num())


@pytest.mark.parametrize("instructions", _levels())
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_to_narrow_numbers(dtype: str, instructions: str) -> None:
    """Gates are 1 and tokens -0: the states are the initial state, any float32, rounded once."""
    generator = torch.Generator().manual_seed(7)
    bits = torch.randint(-(2**31), 2**31, (2**17,), generator=generator)
    near = torch.arange(2**16) << 12  # ties of float16, and what lies between them
    values = torch.cat([bits, near, near + 1, near - 1, near + 0x7FF, -near]).to(torch.int32)
    initial = values.view(torch.float32).reshape(1, 1, -1, 1)
    gates, states = torch.ones_like(initial), torch.empty_like(initial, dtype=torch_dtype(dtype))
    tokens = torch.full_like(states, -0.0)
    tensors = {"gates": gates, "tokens": tokens, "states": states, "initial_state": initial}
    with using(instructions):
        run("forward", dtype, "float32", scalars("forward", gates.shape, tensors), tensors)
    rounded = initial.to(torch_dtype(dtype))
    assert torch.equal(states.isnan(), initial.isnan())
    assert torch.equal(states.nan_to_num(), rounded.nan_to_num())


# --- Reduction --------------------------------------------------------------------------------


def reduction_case(case: Case, layout: Layout, threads: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Partial sums as computed; what they should add up to; and the same with moduli for terms."""
    memory = Memory()
    tensors = case.make(memory)
    grads, states, initial = tensors["tokens_grad"], tensors["states"], tensors["initial_state"]
    assert grads is not None
    assert states is not None
    shape = [1 if d in case.repeat else s for d, s in zip("obct", case.sizes, strict=True)]
    dense = torch.empty(shape).expand(case.sizes).stride()
    named = {
        "tokens_grad": grads.stride(),
        "states": states.stride(),
        "gates_grad": dense,
        "state": (0, 0, 0, 0) if initial is None else initial.stride(),
    }
    outer, batch, channels, time = case.sizes
    problem = LinearScanProblem(
        direction="reduction",
        layout=layout,
        dtype=case.dtype,
        gates_dtype=case.gates_dtype,
        outer=outer,
        batch=batch,
        channels=channels,
        time=time,
        strides=tuple(Strides(*named[name]) for name in STRIDED["reduction"]),
        alignment=1,
        sequences=0 if case.bounds is None else len(case.bounds) - 1,
        reverse=case.reverse,
    )
    pieces, wide = problem.reduction().pieces, torch_dtype(state_dtype(case.dtype))
    partial = memory.place(torch.full((pieces, *shape), math.nan, dtype=wide), range(5))
    values = problem.scalars()
    integers = tuple(values[p.name] for p in parameters("reduction") if p.kind == "i64")
    pointers = {**tensors, "gates_grad": partial}
    run("reduction", case.dtype, case.gates_dtype, integers, pointers, threads, (layout,))
    memory.check([partial])
    products = exact(grads) * earlier_states(case, states, initial).conj()
    return partial, products.sum_to_size(shape), products.abs().sum_to_size(shape)


def earlier_states(case: Case, states: Tensor, initial: Tensor | None) -> Tensor:
    """The state before each step."""
    earlier = torch.zeros_like(exact(states))
    bounds = case.bounds or (0, case.sizes[3])
    for s, (begin, end) in enumerate(pairwise(bounds)):
        if begin == end:
            continue
        inside, first = exact(states[..., begin:end]), end - 1 if case.reverse else begin
        if case.reverse:
            earlier[..., begin : end - 1] = inside[..., 1:]
        else:
            earlier[..., begin + 1 : end] = inside[..., :-1]
        earlier[..., first] = 0 if initial is None else exact(initial[..., s])
    return earlier


def check_reduction(case: Case, layout: Layout) -> None:
    """Terms may cancel, so errors are measured against the sums of their moduli."""
    partial, expected, moduli = reduction_case(case, layout)
    found = torch.linalg.vector_norm(exact(partial).sum(0) - expected)
    tolerance = TOLERANCE[state_dtype(case.dtype)]
    assert float(found) <= tolerance * float(torch.linalg.vector_norm(moduli))


@pytest.mark.parametrize("instructions", _levels())
@settings(max_examples=60, deadline=None)
@given(case=cases(), layout=st.sampled_from(LAYOUTS))
def test_reduction(instructions: str, case: Case, layout: Layout) -> None:
    with using(instructions):
        check_reduction(case, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "gates_dtype"), MIXES)
def test_reduction_of_many(dtype: str, gates_dtype: str, layout: Layout) -> None:
    """Sums over thousands of terms, in groups and tiles."""
    order = (0, 1, 2, 3) if layout == "time_last" else (0, 1, 3, 2)
    for repeat in ("o", "ob", "bt", "ct", "obct"):
        case = Case(dtype, gates_dtype, (3, 9, 70, 131), repeat=repeat, orders=(order,) * 3)
        check_reduction(case, layout)


# --- The same, however it is run ------------------------------------------------------------


@pytest.mark.parametrize("instructions", _levels())
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 1, 3, 2)], ids=LAYOUTS)
@pytest.mark.parametrize("sizes", [(1, 2, 61, 3800), (1, 1, 5, 92_000), (3, 2, 2560, 30)])
@pytest.mark.parametrize("bounds", [False, True], ids=["one", "packed"])
def test_threads_do_not_change_a_bit(
    order: tuple[int, ...], sizes: tuple[int, int, int, int], bounds: bool, instructions: str
) -> None:
    time = sizes[3]
    ends = (0, time // 5, time // 3, time // 3 + 1, time - 2, time) if bounds else None
    case = Case("complex64", "complex64", sizes, bounds=ends, orders=(order,) * 3)
    narrow = Case("float32", "float32", sizes, bounds=ends, orders=(order,) * 3, repeat="bt")
    layout = LAYOUTS[order == (0, 1, 3, 2)]

    def outputs(threads: int) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for each in (case, narrow):
            tensors = each.make(Memory())
            for direction in ("forward", "backward"):
                each.run(direction, tensors, threads)
                found += [tensors[name] for name in OUTPUTS[direction]]
        for repeat in ("bt", "c"):
            found.append(reduction_case(replace(narrow, repeat=repeat), layout, threads)[0])
        return found

    with using(instructions):
        alone, *others = (outputs(threads) for threads in (1, 2, 7))
    for other in others:
        for a, b in zip(alone, other, strict=True):
            assert a is not None
            assert b is not None
            assert torch.equal(a, b)


def test_calls_at_the_same_time() -> None:
    """Other Python threads run meanwhile, and their calls share nothing."""
    case = Case("float32", "float32", (1, 4, 64, 1000))

    def states(threads: int) -> Tensor:
        tensors = case.make(Memory())
        case.run("forward", tensors, threads)
        assert tensors["states"] is not None
        return tensors["states"]

    alone = states(1)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(states, [1, 2, 3, 4] * 4):
            assert torch.equal(found, alone)


# --- Apart ------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [math.inf, math.nan])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 1, 3, 2)], ids=LAYOUTS)
def test_sequences_do_not_reach_one_another(
    order: tuple[int, ...], reverse: bool, poison: float
) -> None:
    bounds = (0, 7, 7, 40, 41, 90)
    case = Case("float32", "float32", (1, 2, 21, 90), reverse, bounds, (order,) * 3)
    clean, dirty = case.make(Memory()), case.make(Memory())
    for name, where in (
        ("gates", slice(7, 40)),
        ("tokens", slice(7, 40)),
        ("states_grad", slice(7, 40)),
        ("initial_state", slice(2, 3)),
        ("final_state_grad", slice(2, 3)),
    ):
        poisoned = dirty[name]
        assert poisoned is not None
        poisoned[..., where] = poison
    times, sequences = [*range(7), *range(40, 90)], [0, 1, 3, 4]
    for direction in ("forward", "backward"):
        case.run(direction, clean)
        case.run(direction, dirty)
        for name in OUTPUTS[direction]:
            a, b = clean[name], dirty[name]
            assert a is not None
            assert b is not None
            others = times if a.shape[3] == 90 else sequences
            assert torch.equal(a[..., others], b[..., others]), name
    assert dirty["states"] is not None
    assert not dirty["states"][..., 7:40].isfinite().any()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 1, 3, 2)], ids=LAYOUTS)
def test_lanes_do_not_reach_one_another(order: tuple[int, ...]) -> None:
    case = Case("complex64", "complex64", (1, 2, 21, 90), orders=(order,) * 3)
    clean, dirty = case.make(Memory()), case.make(Memory())
    assert dirty["tokens"] is not None
    dirty["tokens"][0, 1, 10, 3] = math.nan
    case.run("forward", clean)
    case.run("forward", dirty)
    a, b = clean["states"], dirty["states"]
    assert a is not None
    assert b is not None
    assert b[0, 1, 10, 3:].isnan().all()
    b[0, 1, 10, 3:] = a[0, 1, 10, 3:]
    assert torch.equal(a, b)


def test_what_is_not_wanted_is_not_needed() -> None:
    case = Case("float32", "float32", (1, 2, 21, 90))
    everything = case.make(Memory())
    case.run("backward", everything)
    for names in (
        ("gates_grad", "states"),
        ("tokens_grad",),
        ("gates_grad", "states", "tokens_grad"),
        ("gates_grad", "tokens_grad", "initial_state_grad"),
    ):
        tensors = case.make(Memory()) | dict.fromkeys(names)
        case.run("backward", tensors)
        for name in OUTPUTS["backward"]:
            a, b = everything[name], tensors[name]
            assert a is not None
            assert b is None or torch.equal(a, b)


@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0)])
def test_nothing_to_do(sizes: tuple[int, int, int, int]) -> None:
    """No pointer is needed then, and none is looked at."""
    for direction in ("forward", "backward"):
        run(direction, "float32", "float32", scalars(direction, sizes, {}, sequences=2), {})
    integers = scalars("reduction", sizes, {}, groups=1)
    run("reduction", "float32", "float32", integers, {}, 1, ("time_last",))


# --- Refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bounds",
    [(0, 7, 5, 90), (1, 90), (0, 89), (0, 91), (-1, 90), (0, 2**62, 90), (-(2**63), 2**63 - 1)],
)
@pytest.mark.parametrize("direction", ["forward", "backward", "reduction"])
def test_malformed_offsets(direction: Direction, bounds: tuple[int, ...]) -> None:
    case, memory = Case("float32", "float32", (1, 2, 5, 90), bounds=bounds), Memory()
    tensors = case.make(memory)
    integers = case.integers(direction, tensors)
    layout: tuple[str, ...] = ()
    if direction == "reduction":
        integers, layout = (*integers[:-2], 1, 0), ("time_last",)
    with pytest.raises(ValueError, match="offsets do not rise from 0 to time, 90"):
        run(direction, "float32", "float32", integers, tensors, 1, layout)
    memory.check([])


FORWARD: tuple[Any, ...] = ("float32", "float32", (None,) * 7, (1, 1, 1, 1, 0) + (0,) * 17, 1)


@pytest.mark.parametrize(
    ("at", "value", "kind", "words"),
    [
        (0, "float8", ValueError, "dtype 'float8'; accepted are float32, bfloat16"),
        (0, 32, TypeError, "dtype and gates_dtype must be str"),
        (1, "bfloat16", ValueError, "gates_dtype 'bfloat16' with dtype 'float32'"),
        (2, (None,) * 6, ValueError, "forward takes 7 pointers, got 6"),
        (2, [None] * 7, TypeError, "pointers must be a tuple"),
        (2, ("0",) + (None,) * 6, TypeError, "integer"),
        (2, (-1,) + (None,) * 6, OverflowError, "negative"),
        (2, (2**64,) + (None,) * 6, OverflowError, "too (large|big)"),
        (2, (None,) * 7, ValueError, "gates of forward is null"),
        (3, (1, 1, 1, 1), ValueError, "forward takes 22 scalars, got 4"),
        (3, (1, 1, -1, 1, 0) + (0,) * 17, ValueError, "channels is -1"),
        (3, (1, 1, 1, 1, -1) + (0,) * 17, ValueError, "sequences is -1"),
        (3, (2**40, 2**40, 1, 1, 0) + (0,) * 17, ValueError, "too many elements"),
        (3, (1, 1, 1, 0, 0) + (0,) * 16 + (2,), ValueError, "flags is 2"),
        (3, (None,) * 22, TypeError, "int"),
        (4, 0, ValueError, "threads is 0"),
        (4, "2", TypeError, "int"),
    ],
)
def test_wrong_arguments(at: int, value: Any, kind: type[Exception], words: str) -> None:
    arguments = [*FORWARD]
    arguments[at] = value
    with pytest.raises(kind, match=words):
        _cpu.forward(*arguments)


def test_wrong_numbers_of_arguments() -> None:
    with pytest.raises(TypeError, match=r"forward takes .* got 6 arguments"):
        _cpu.forward(*FORWARD, "time_last")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"reduction takes .*, layout; got 5 arguments"):
        _cpu.reduction(*FORWARD)


@pytest.mark.parametrize("layout", ["", "time", 3])
def test_wrong_layouts(layout: Any) -> None:
    with pytest.raises(ValueError, match="accepted are 'time_last' and 'channel_last'"):
        _cpu.reduction("float32", "float32", (None,) * 5, (1,) * 22 + (0,), 1, layout)


def test_states_are_needed_for_the_gradient_of_gates() -> None:
    case = Case("float32", "float32", (1, 1, 2, 3))
    tensors = case.make(Memory())
    with pytest.raises(ValueError, match="states of backward is null, which gates_grad needs"):
        case.run("backward", tensors | {"states": None})
    with pytest.raises(ValueError, match="states_grad of backward is null"):
        case.run("backward", tensors | {"states_grad": None})


def test_offsets_that_are_not_there() -> None:
    case = Case("float32", "float32", (1, 1, 2, 3), bounds=(0, 3))
    tensors = case.make(Memory())
    with pytest.raises(ValueError, match="offsets of 1 sequences is null"):
        case.run("forward", tensors | {"offsets": None})


def test_more_sequences_than_there_is_memory_for() -> None:
    case, memory = Case("float32", "float32", (1, 1, 2, 3), bounds=(0, 3)), Memory()
    tensors = case.make(memory)
    sizes = (*case.integers("forward", tensors)[:4], 2**62)
    integers = (*sizes, *case.integers("forward", tensors)[5:])
    with pytest.raises(MemoryError):
        run("forward", "float32", "float32", integers, tensors)
    memory.check([])


def test_unknown_instructions() -> None:
    with pytest.raises(ValueError, match="instructions sse9 do not run on this processor"):
        _cpu.instructions("sse9")


# --- Next to pages that cannot be touched --------------------------------------------------------


def test_nothing_outside_is_touched() -> None:
    done = subprocess.run([sys.executable, __file__], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "untouched\n"


class Guarded(Memory):
    """Tensors that end, or begin, where memory that may be used does."""

    def __init__(self, at_end: bool) -> None:
        super().__init__()
        self.at_end = at_end
        self.maps: list[mmap.mmap] = []

    def _room(self, dtype: torch.dtype, count: int) -> Tensor:
        page = mmap.PAGESIZE
        usable = -(-count * dtype.itemsize // page) * page
        whole = mmap.mmap(-1, usable + 2 * page)
        self.maps.append(whole)
        room = torch.frombuffer(memoryview(whole)[page : page + usable], dtype=torch.uint8)
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        for guard in (room.data_ptr() - page, room.data_ptr() + usable):
            if protect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        elements = room.view(dtype)
        return elements[-count:] if self.at_end else elements[:count]


def touch_everything() -> None:
    """Runs that end the process if they touch what they should not."""
    chosen = random.Random(0)
    for i in range(100):
        dtype, gates_dtype = MIXES[i % len(MIXES)]
        time = chosen.choice((1, 5, 8, 61, 130, 1100))
        case = Case(
            dtype=dtype,
            gates_dtype=gates_dtype,
            sizes=(chosen.choice((1, 2)), 1, chosen.choice((1, 3, 8, 17, 70)), time),
            reverse=chosen.random() < 0.5,
            bounds=chosen.choice((None, (0, time // 2, time // 2, time))),
            orders=(chosen.choice(((0, 1, 2, 3), (0, 1, 3, 2), (3, 0, 2, 1))),) * 3,
            steps=(1, chosen.choice((1, 1, 3)), 1),
            repeat=chosen.choice(("", "", "c", "t")),
        )
        with using(chosen.choice(_levels())):
            for at_end in (False, True):
                tensors = case.make(Guarded(at_end))
                case.run("forward", tensors)
                case.run("backward", tensors)


if __name__ == "__main__":
    touch_everything()
    print("untouched")
