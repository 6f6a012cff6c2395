"""What each registered operator promises torch's compilers of its outputs, against what it returns: shapes, dtypes, strides
and memory of their own, for tensors of all layouts and for each choice of optional arguments."""

from __future__ import annotations

import importlib
import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from scan_registry import kernels, nn
from scan_registry.kernels.gated_scan.kinds import KINDS
from scan_registry.kernels.rnn.problem import SIZES
from scan_registry.ops.registration import NAMESPACE

# Operators are registered by the modules that define them.
for module in sorted({*kernels.public().values(), nn.Mamba.__module__}):
    importlib.import_module(module)
OPERATORS = getattr(torch.ops, NAMESPACE)
DRAWS, FEW = 24, 8  # each layout in each dtype, or in one
EVERY_DYNAMIC = 12  # of so many draws one has symbols for sizes, which take long
B, D, N, W, SEQUENCES = 2, 6, 4, 3, 3
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

pytestmark = pytest.mark.usefixtures("one_thread")


# --- Layouts ----------------------------------------------------------------------------------


def inside(x: Tensor, *where: slice) -> Tensor:
    """As a part of a larger tensor, whose first elements it does not have."""
    larger = x.new_zeros([2 * size + 3 for size in x.shape])
    return larger[(*where,) * x.dim()][tuple(map(slice, x.shape))].copy_(x)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "last two turned": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x,
    "first last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "last first": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    "sliced": lambda x: inside(x, slice(1, None)),
    "every other": lambda x: inside(x, slice(2, None, 2)),
    "first expanded": lambda x: x[:1].expand(x.shape),
    "all expanded": lambda x: x[(slice(1),) * x.dim()].expand(x.shape),
}


class Draw:
    """Random choices, and tensors of random layouts, many of them of one layout. The layouts and dtypes take turns."""

    def __init__(self, seed: int, device: str) -> None:
        self.random, self.device = random.Random(seed), device
        self.generator = torch.Generator().manual_seed(seed)
        self.layout = [*LAYOUTS][seed % len(LAYOUTS)]
        self.dtype = [torch.float32, torch.bfloat16, torch.float64][seed % 3]
        self.wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.backend = self.random.choice(["auto", "auto", "reference"])
        self.batch = self.random.choice([1, B, B, B])
        self.time = self.random.choice([0, 1, 5, 5, 5, 5])

    def flag(self) -> bool:
        return self.random.random() < 0.5

    def flags(self, count: int) -> list[bool]:
        result = [self.random.random() < 0.7 for _ in range(count)]
        return result if any(result) else [True] * count

    def tensor(self, *shape: int, dtype: torch.dtype | None = None, apart: bool = False) -> Tensor:
        """``apart``: no two elements share memory."""
        drawn = torch.rand(shape, generator=self.generator).to(self.device, dtype or self.dtype)
        layout = self.layout if self.random.random() < 0.7 else self.random.choice([*LAYOUTS])
        return drawn if apart and "expanded" in layout else LAYOUTS[layout](drawn)

    def like(self, model: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return self.tensor(*model.shape, dtype=dtype or model.dtype)

    def perhaps(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor | None:
        return self.tensor(*shape, dtype=dtype) if self.flag() else None

    def integers(self, *numbers: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=self.device)

    def bounds(self) -> Tensor | None:
        """Of ``SEQUENCES``, of which the first has no step."""
        ends = 0, 0, min(2, self.time), self.time
        return self.integers(*ends) if self.flag() else None

    def reset(self) -> Tensor:
        return self.tensor(self.batch, self.time, dtype=torch.float32) < 0.3


# --- Calls ------------------------------------------------------------------------------------

Calls = Iterable[tuple[str, tuple[Any, ...]]]


def called(name: str, *args: Any) -> Any:
    return getattr(OPERATORS, name).default(*args)


def linear_scan(draw: Draw) -> Calls:
    """A scan along a dimension of three, its backward pass, and the summary."""
    shape = [draw.batch, D, draw.time]
    draw.random.shuffle(shape)
    dim = shape.index(draw.time) - 3
    of_gates = [size if draw.random.random() < 0.7 else 1 for size in shape]
    if draw.dtype == torch.float32 and draw.flag():
        draw.dtype = torch.complex64
    narrow = draw.dtype == torch.bfloat16 and draw.flag()
    gates = draw.tensor(*of_gates, dtype=torch.float32 if narrow else None)
    tokens, bounds = draw.tensor(*shape), draw.bounds()
    wide = torch.float32 if draw.dtype == torch.bfloat16 else draw.dtype
    of_state = [*shape]
    of_state[dim : dim + 1 or None] = [] if bounds is None else [SEQUENCES]
    state, reverse = draw.perhaps(*of_state, dtype=wide), draw.flag()
    how = dim, reverse, draw.flag(), draw.backend
    yield "linear_scan", (gates, tokens, state, bounds, *how)
    yield "linear_scan_summary", (gates, tokens, dim, reverse, draw.backend)
    states, _ = called("linear_scan", gates, tokens, state, bounds, *how)
    wanted = draw.flags(3)
    grads = draw.like(tokens), draw.perhaps(*of_state, dtype=wide)
    known = (states, grads[0], state, grads[1]) if wanted[0] else (None, grads[0], None, grads[1])
    yield "linear_scan_backward", (gates, *known, bounds, dim, reverse, draw.backend, wanted)


def gated_scan(draw: Draw) -> Calls:
    kind = draw.random.choice([*KINDS.values()])
    shape, dim = draw.random.choice(
        [((draw.batch, D, draw.time), -1), ((draw.batch, draw.time, D), -2)]
    )
    inputs = [draw.tensor(*shape) for _ in kind.inputs]
    parameters = [draw.tensor(D, dtype=draw.wide) for _ in kind.parameters]
    reset = draw.reset() if draw.flag() else None
    bounds = None if reset is not None else draw.bounds()
    of_state = (draw.batch, D) if bounds is None else (draw.batch, SEQUENCES, D)
    if bounds is not None and dim == -1:
        of_state = (draw.batch, D, SEQUENCES)
    state = draw.perhaps(*of_state, dtype=draw.wide)
    tensors = kind.name, inputs, parameters, reset, state, bounds
    how = dim, draw.flag()
    yield "gated_scan", (*tensors, *how, draw.flag(), draw.backend)
    states, last = called("gated_scan", *tensors, *how, True, draw.backend)
    grads = draw.random.choice(
        [(draw.like(states), None), (None, draw.like(last)), (draw.like(states), draw.like(last))]
    )
    wanted = draw.flags(len(inputs) + len(parameters) + 1)
    yield "gated_scan_backward", (*tensors, states, *grads, *how, draw.backend, wanted)


def rnn(draw: Draw) -> Calls:
    function, sizes = draw.random.choice([*SIZES.items()])
    heads, units = draw.random.choice([(2, 4), (1, 16), (1, 3)])
    unit, count = (heads, units), len(sizes.states)
    inputs = draw.tensor(draw.batch, draw.time, sizes.inputs, *unit)
    recurrent = draw.tensor(sizes.recurrent, *unit, units)
    bias = draw.tensor(sizes.bias, *unit, dtype=draw.wide)
    initial, reset = draw.perhaps(count, draw.batch, *unit), draw.reset() if draw.flag() else None
    anew = None if reset is None else draw.perhaps(count, draw.batch, *unit)
    options = function, draw.backend, math.inf, math.inf, False
    arguments = inputs, recurrent, bias, initial, reset, anew, *options
    yield "rnn", (*arguments, draw.flag())
    states, last, cache = called("rnn", *arguments, True)
    grads = draw.like(states), draw.like(last) if draw.flag() else None
    yield "rnn_backward", (recurrent, states, initial, reset, anew, cache, *grads, *options)


def causal_conv1d(draw: Draw) -> Calls:
    bounds = draw.bounds()
    packed = bounds is not None
    batch, rows = (1, SEQUENCES) if packed else (draw.batch, draw.batch)
    of_weight = draw.random.choice([draw.dtype, draw.wide])
    x, weight = draw.tensor(batch, D, draw.time), draw.tensor(D, W, dtype=of_weight)
    state = draw.perhaps(rows, D, W - 1)
    seq_idx = None
    if not packed and draw.flag():
        seq_idx = draw.integers(*range(draw.time), dtype=torch.int32).expand(batch, -1).contiguous()
    tensors = (
        *(
            x,
            weight,
            draw.perhaps(D, dtype=of_weight),
            None if state is None else state.contiguous(),
        ),
        *(seq_idx, bounds),
    )
    silu = draw.flag()
    yield "causal_conv1d", (*tensors, silu, draw.flag(), draw.backend)
    grads = draw.like(x), draw.perhaps(rows, D, W - 1)
    wanted = draw.flags(4)
    wanted[2] &= tensors[2] is not None
    yield "causal_conv1d_backward", (*tensors, *grads, silu, draw.backend, wanted)
    slots = draw.batch + 1
    indices = draw.integers(*range(draw.batch, 0, -1), dtype=torch.int32) if draw.flag() else None
    positions = draw.integers(*range(draw.batch), dtype=torch.int32) if draw.flag() else None
    state = draw.tensor(draw.batch if indices is None else slots, D, W + 1, apart=True)
    one = draw.tensor(draw.batch, D, draw.random.choice([1, 2]))
    update = one, state, weight.contiguous(), tensors[2], positions, indices
    yield "causal_conv1d_update", (*update, silu, draw.backend)


def selective_scan(draw: Draw) -> Calls:
    complex_numbers = draw.random.random() < 0.3
    of_states = draw.wide.to_complex() if complex_numbers else draw.wide
    bounds, length = draw.bounds(), 2 * draw.time if complex_numbers else draw.time

    def projection() -> Tensor:
        if draw.random.random() < 0.2:
            return draw.tensor(D, N, dtype=of_states)
        return draw.tensor(draw.batch, draw.random.choice([1, 2]), N, length)

    between = () if bounds is None else (SEQUENCES,)
    of_state = draw.batch, *between, D, N
    sequence = draw.batch, D, draw.time
    tensors = (
        *(draw.tensor(*sequence), draw.tensor(*sequence), draw.tensor(D, N, dtype=of_states)),
        *(projection(), projection(), draw.perhaps(D, dtype=draw.wide), draw.perhaps(*sequence)),
        *(draw.perhaps(D, dtype=draw.wide), draw.perhaps(*of_state, dtype=of_states), bounds),
    )
    how = draw.flag(), draw.backend
    yield "selective_scan", (*tensors, *how, draw.flag())
    out, last, kept = called("selective_scan", *tensors, *how, True)
    grads = draw.like(out), draw.like(last) if draw.flag() else None
    yield "selective_scan_backward", (*tensors, kept, *grads, *how, draw.flags(9))


def selective_state_update(draw: Draw) -> Calls:
    heads = draw.random.choice([(), (2,)])
    row, groups = (draw.batch, *heads, D), draw.random.choice([(), (2,)])
    indices = draw.integers(*range(draw.batch)) if draw.flag() else None
    state = draw.tensor(draw.batch + (indices is not None), *heads, D, N, apart=True)
    projection = draw.batch, *groups, N
    yield (
        "selective_state_update",
        (
            *(state, draw.tensor(*row), draw.tensor(*row), draw.tensor(*heads, D, N)),
            *(draw.tensor(*projection), draw.tensor(*projection), draw.perhaps(*heads, D)),
            *(draw.perhaps(*row), draw.perhaps(*heads, D), indices, *[None] * 5),
            *(draw.flag(), -1, draw.backend),
        ),
    )


def ssd_scan(draw: Draw) -> Calls:
    bounds, groups = draw.bounds(), draw.random.choice([1, 2])
    between = () if bounds is None else (SEQUENCES,)
    head = draw.batch, draw.time, 2
    of_state = draw.batch, *between, 2, D, N
    numbers = torch.zeros(head[:2], dtype=torch.int32, device=draw.device) if draw.flag() else None
    projection = draw.batch, draw.time, groups, N
    tensors = (
        *(draw.tensor(*head, D), draw.tensor(*head), draw.tensor(2, dtype=draw.wide)),
        *(draw.tensor(*projection), draw.tensor(*projection), draw.perhaps(2, dtype=draw.wide)),
        *(draw.perhaps(*head, D), draw.perhaps(2, dtype=draw.wide)),
        *(draw.perhaps(*of_state, dtype=draw.wide), numbers),
        None if bounds is None else bounds.int(),
    )
    final = draw.flag()
    how = draw.flag(), 0.1, 0.8, draw.random.choice([0, 2]), final, draw.backend
    training = draw.flag()
    yield "ssd_scan", (*tensors, *how, training)
    out, last, ungated = called("ssd_scan", *tensors, *how, training)
    grads = draw.like(out), draw.like(last) if final and draw.flag() else None
    yield "ssd_scan_backward", (*tensors, ungated, *grads, *how, draw.flags(9))


def state_copy(draw: Draw) -> Calls:
    """Of a state that ``nn.Mamba`` saves for a backward pass."""
    yield "state_copy", (draw.tensor(draw.batch, D, N),)


FAMILIES: Sequence[Callable[[Draw], Calls]] = (
    linear_scan,
    gated_scan,
    rnn,
    causal_conv1d,
    selective_scan,
    selective_state_update,
    ssd_scan,
    state_copy,
)


# --- Promises ---------------------------------------------------------------------------------


def flat(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [*result]


def described(tensor: Tensor) -> tuple[Any, ...]:
    """What inductor relies on. Strides of tensors without elements, and along single ones, say nothing."""
    shape = tuple(map(int, tensor.shape))
    strides = tuple(
        int(stride) if size != 1 and 0 not in shape else None
        for size, stride in zip(shape, tensor.stride(), strict=True)
    )
    return shape, strides, tensor.dtype, tensor.device, int(tensor.storage_offset())


def promised(name: str, args: Any, dynamic: bool) -> list[tuple[Any, ...]]:
    """The outputs that the operator's fake implementation describes; with ``dynamic`` of sizes that are symbols."""
    mode = FakeTensorMode(shape_env=ShapeEnv() if dynamic else None)

    def fake(tensor: Tensor) -> Any:
        symbols = None
        if dynamic:
            symbols = StatelessSymbolicContext([DimDynamic.DYNAMIC] * tensor.dim())
        return mode.from_tensor(tensor, symbolic_context=symbols)

    inputs = torch.utils._pytree.tree_map_only(Tensor, fake, args)
    with mode:
        return [described(item) for item in flat(called(name, *inputs))]


def check(name: str, args: Any, dynamic: bool) -> None:
    expected = promised(name, args, dynamic)
    returned = flat(called(name, *args))
    assert [described(item) for item in returned] == expected, f"{name}: {given(args)}"
    tensors = [
        x for x in torch.utils._pytree.tree_leaves((args, returned)) if isinstance(x, Tensor)
    ]
    for output in returned:
        shared = [x for x in tensors if x is not output and x.numel() and output.numel()
                  and x.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()]  # fmt: skip
        assert not shared, f"{name}: an output shares memory; {given(args)}"


def given(args: Any) -> Any:
    """The arguments, tensors by what is known of them."""
    return torch.utils._pytree.tree_map_only(
        Tensor, lambda x: (x.dtype, tuple(x.shape), x.stride()), args
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_outputs_are_as_promised(
    family: Callable[[Draw], Calls], device: str, pytestconfig: pytest.Config
) -> None:
    with torch.no_grad():
        for seed in range(DRAWS if pytestconfig.getoption("--thorough") else FEW):
            for name, args in family(Draw(seed, device)):
                check(name, args, seed % EVERY_DYNAMIC == 0)


def test_every_registered_operator_is_drawn() -> None:
    registered = {
        name.removeprefix(f"{NAMESPACE}::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(f"{NAMESPACE}::")
    }
    calls = itertools.chain.from_iterable(family(Draw(0, "cpu")) for family in FAMILIES)
    assert registered == {name for name, _ in calls}
