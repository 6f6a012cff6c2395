"""Problems for the CPU kernels, with tensors in memory that is watched.

Every tensor lies inside a larger piece of memory: after a call, nothing around it may have changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from scan_registry.kernels.linear_scan import reference
from scan_registry.kernels.linear_scan.problem import (
    STRIDED,
    Direction,
    Layout,
    LinearScanProblem,
    Strides,
)
from scan_registry.kernels.linear_scan.spec import parameters
from scan_registry.ops import _cpu

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


@contextmanager
def using(instructions: str) -> Iterator[None]:
    """Run the kernels with these vector instructions."""
    usual = _cpu.instructions()
    _cpu.instructions(instructions)
    try:
        yield
    finally:
        _cpu.instructions(usual)


def levels() -> tuple[str, ...]:
    return tuple(dict.fromkeys(("portable", _cpu.instructions())))


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
    problem = LinearScanProblem(
        *("reduction", layout, case.dtype, case.gates_dtype),
        *case.sizes,
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
