"""What the CPU kernels must never do."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from watched import LAYOUTS, OUTPUTS, Case, Memory, levels, reduction_case, run, scalars, using

from scan_registry.kernels.linear_scan.problem import Direction
from scan_registry.ops import _cpu


@pytest.mark.parametrize(
    ("order", "sizes", "bounds", "instructions"),
    [
        (order, sizes, bounds, levels()[s % len(levels())])
        for o, order in enumerate(((0, 1, 2, 3), (0, 1, 3, 2)))
        for s, sizes in enumerate(((1, 2, 61, 3800), (1, 1, 5, 92_000), (3, 2, 2560, 30)))
        for bounds in [(o + s) % 2 == 1]
    ],
    ids=str,
)
def test_threads_do_not_change_a_bit(
    order: tuple[int, ...], sizes: tuple[int, int, int, int], bounds: bool, instructions: str
) -> None:
    time = sizes[3]
    ends = (0, time // 5, time // 3, time // 3 + 1, time - 2, time) if bounds else None
    case = Case("complex64", "complex64", sizes, bounds=ends, orders=(order,) * 3)
    narrow = Case("float32", "float32", sizes, bounds=ends, orders=(order,) * 3, repeat="bt")
    layout = LAYOUTS[order == (0, 1, 3, 2)]

    def outputs(threads: int) -> list[Tensor | None]:
        result: list[Tensor | None] = []
        for item in (case, narrow):
            tensors = item.make(Memory())
            for direction in ("forward", "backward"):
                item.run(direction, tensors, threads)
                result += [tensors[name] for name in OUTPUTS[direction]]
        for repeat in ("bt", "c"):
            result.append(reduction_case(replace(narrow, repeat=repeat), layout, threads)[0])
        return result

    with using(instructions):
        alone, *others = (outputs(threads) for threads in (1, 2, 7))
    for other in others:
        for a, b in zip(alone, other, strict=True):
            assert torch.equal(a, b)


def test_calls_at_the_same_time() -> None:
    """Other Python threads run meanwhile, and their calls share nothing."""
    case = Case("float32", "float32", (1, 4, 64, 1000))

    def states(threads: int) -> Tensor:
        tensors: Any = case.make(Memory())
        case.run("forward", tensors, threads)
        return tensors["states"]

    alone = states(1)
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(states, [1, 2, 3, 4] * 4):
            assert torch.equal(result, alone)


@pytest.mark.parametrize("poison", [math.inf, math.nan])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 1, 3, 2)], ids=LAYOUTS)
def test_sequences_do_not_reach_one_another(
    order: tuple[int, ...], reverse: bool, poison: float
) -> None:
    bounds = (0, 7, 7, 40, 41, 90)
    case = Case("float32", "float32", (1, 2, 21, 90), reverse, bounds, (order,) * 3)
    clean: Any = case.make(Memory())
    dirty: Any = case.make(Memory())
    for name, where in (
        ("gates", slice(7, 40)),
        ("tokens", slice(7, 40)),
        ("states_grad", slice(7, 40)),
        ("initial_state", slice(2, 3)),
        ("final_state_grad", slice(2, 3)),
    ):
        poisoned = dirty[name]
        poisoned[..., where] = poison
    times, sequences = [*range(7), *range(40, 90)], [0, 1, 3, 4]
    for direction in ("forward", "backward"):
        case.run(direction, clean)
        case.run(direction, dirty)
        for name in OUTPUTS[direction]:
            a, b = clean[name], dirty[name]
            others = times if a.shape[3] == 90 else sequences
            assert torch.equal(a[..., others], b[..., others]), name
    assert not dirty["states"][..., 7:40].isfinite().any()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 1, 3, 2)], ids=LAYOUTS)
def test_lanes_do_not_reach_one_another(order: tuple[int, ...]) -> None:
    case = Case("complex64", "complex64", (1, 2, 21, 90), orders=(order,) * 3)
    clean: Any = case.make(Memory())
    dirty: Any = case.make(Memory())
    dirty["tokens"][0, 1, 10, 3] = math.nan
    case.run("forward", clean)
    case.run("forward", dirty)
    a, b = clean["states"], dirty["states"]
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
            assert b is None or torch.equal(a, b)


@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0)])
def test_nothing_to_do(sizes: tuple[int, int, int, int]) -> None:
    """No pointer is needed then, and none is looked at."""
    for direction in ("forward", "backward"):
        run(direction, "float32", "float32", scalars(direction, sizes, {}, sequences=2), {})
    integers = scalars("reduction", sizes, {}, groups=1)
    run("reduction", "float32", "float32", integers, {}, 1, ("time_last",))


@pytest.mark.parametrize("bounds", [(0, 7, 5, 90), (1, 90), (0, 91), (-(2**63), 2**63 - 1)])
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
        (1, "bfloat16", ValueError, "gates_dtype 'bfloat16' with dtype 'float32'"),
        (2, (None,) * 6, ValueError, "forward takes 7 pointers, got 6"),
        (2, (-1,) + (None,) * 6, OverflowError, "negative"),
        (2, (None,) * 7, ValueError, "gates of forward is null"),
        (3, (1, 1, 1, 1), ValueError, "forward takes 22 scalars, got 4"),
        (3, (1, 1, -1, 1, 0) + (0,) * 17, ValueError, "channels is -1"),
        (3, (2**40, 2**40, 1, 1, 0) + (0,) * 17, ValueError, "too many elements"),
        (3, (1, 1, 1, 0, 0) + (0,) * 16 + (2,), ValueError, "flags is 2"),
        (4, 0, ValueError, "threads is 0"),
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


@pytest.mark.parametrize(
    ("name", "direction", "words"),
    [
        ("states", "backward", "states of backward is null, which gates_grad needs"),
        ("states_grad", "backward", "states_grad of backward is null"),
        ("offsets", "forward", "offsets of 1 sequences is null"),
    ],
)
def test_tensors_that_are_needed(name: str, direction: Direction, words: str) -> None:
    case = Case("float32", "float32", (1, 1, 2, 3), bounds=(0, 3))
    with pytest.raises(ValueError, match=words):
        case.run(direction, case.make(Memory()) | {name: None})
