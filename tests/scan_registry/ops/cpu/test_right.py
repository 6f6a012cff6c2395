"""The CPU kernels against the reference in double precision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from watched import (
    LAYOUTS,
    MIXES,
    TOLERANCE,
    Case,
    cases,
    check,
    exact,
    levels,
    reduction_case,
    run,
    scalars,
    state_dtype,
    torch_dtype,
    using,
)

from scan_registry.kernels.linear_scan.problem import Direction, Layout


@pytest.mark.parametrize("instructions", levels())
@pytest.mark.parametrize("direction", ["forward", "backward"])
@settings(max_examples=30, deadline=None)
@given(case=cases())
def test_any_strides(instructions: str, direction: Direction, case: Case) -> None:
    with using(instructions):
        check(direction, case)


@pytest.mark.parametrize("number", range(2), ids=LAYOUTS)
@pytest.mark.parametrize("instructions", levels())
@pytest.mark.parametrize(("dtype", "gates_dtype"), MIXES)
def test_long_sequences(dtype: str, gates_dtype: str, instructions: str, number: int) -> None:
    """Of more steps than a panel has, 1,024 of float32; in one direction, and packed in the other."""
    order, bounds = ((0, 1, 2, 3), (0, 1, 3, 2))[number], (0, 1200, 1200, 1201, 2101)
    # By turns, so that each layout at each level has both.
    turned = (MIXES.index((dtype, gates_dtype)) + number + levels().index(instructions)) % 2
    reverse, ends = ((False, None), (True, bounds))[turned]
    with using(instructions):
        for direction in ("forward", "backward"):
            case = Case(dtype, gates_dtype, (1, 2, 19, 2101), reverse, ends, (order,) * 3)
            check(direction, case, threads=2)


@pytest.mark.parametrize(
    "repeat", ["".join(d for i, d in enumerate("obct") if n >> i & 1) for n in range(16)]
)
def test_broadcast_gates(repeat: str) -> None:
    for order in ((0, 1, 2, 3), (0, 1, 3, 2)):
        case = Case("float32", "float32", (2, 3, 33, 70), repeat=repeat, orders=(order,) * 3)
        check("forward", case)
        check("backward", case)


@pytest.mark.parametrize("instructions", levels())
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


@pytest.mark.parametrize("instructions", levels())
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


def check_reduction(case: Case, layout: Layout) -> None:
    """Terms may cancel, so errors are measured against the sums of their moduli."""
    partial, expected, moduli = reduction_case(case, layout)
    actual = torch.linalg.vector_norm(exact(partial).sum(0) - expected)
    tolerance = TOLERANCE[state_dtype(case.dtype)]
    assert float(actual) <= tolerance * float(torch.linalg.vector_norm(moduli))


@pytest.mark.parametrize("instructions", levels())
@settings(max_examples=30, deadline=None)
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
