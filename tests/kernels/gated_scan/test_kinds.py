"""The headers of gated scan's kinds, each alone, compiled for the CPU: what they compute at one step is what the kind's
line of kinds.py says, and its derivatives."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest
import torch
from gating import WRITTEN
from torch import Tensor

from scan_registry.kernels import ROOT
from scan_registry.kernels.gated_scan.kinds import KINDS, Kind

FOLDER = ROOT / "gated_scan"
#: Of each step: gate and token; then the gradients of inputs and of channel parameters, given those of gate and token.
STEPS = """
#include "kind.cuh"
extern "C" __global__ void steps(const float* in, float* out, i64 count, i64 option) {
    for (i64 n = 0; n < count; n++) {
        Kind::Given given{};
        for (int i = 0; i < Kind::INPUTS; i++) given.input[i] = *in++;
        float slope[Kind::PARAMETER_SLOTS];
        for (int p = 0; p < Kind::PARAMETERS; p++) {
            slope[p] = Kind::slope(p, *in);
            given.parameter[p] = Kind::prepared(p, *in++);
        }
        given.reset = *in++ != 0, given.option = option;
        const float gate_grad = *in++, token_grad = *in++;
        const Kind::Values values = Kind::values(given);
        const Step step = Kind::step(values);
        *out++ = step.scale, *out++ = step.shift;
        const Kind::Gradients to = Kind::gradients(given, values, gate_grad, token_grad);
        for (int i = 0; i < Kind::INPUTS; i++) *out++ = to.input[i];
        for (int p = 0; p < Kind::PARAMETERS; p++) *out++ = to.parameter[p] * slope[p];
    }
    for (int i = 0; i < Kind::INPUTS; i++) *out++ = Kind::padding(i);
    *out++ = Kind::PADS;
}
"""

Steps = Callable[[Kind, Tensor], tuple[Tensor, Tensor]]


@pytest.fixture
def steps(cuda_emulator: ModuleType, tmp_path: Path) -> Steps:
    """A kind, and of each step its inputs, channel parameters, reset, and gradients of gate and token -> gate, token and
    gradients; and the padding."""
    files = [*FOLDER.glob("*.cuh"), *FOLDER.glob("kinds/*.cuh")]
    texts = {
        path.relative_to(FOLDER).as_posix(): path.read_text(encoding="utf-8") for path in files
    }
    common = (ROOT / "common").glob("*.cuh")
    texts |= {f"../common/{path.name}": path.read_text(encoding="utf-8") for path in common}

    def run(kind: Kind, rows: Tensor) -> tuple[Tensor, Tensor]:
        constants = {
            "KIND_HEADER": f'"kinds/{kind.source}.cuh"',
            "ELEMENT": "float32",
            "GATE_ELEMENT": "float32",
            "MAY_RESET": 1,
            "MISALIGNED": 0,
        }
        library = cuda_emulator.library_of(
            "steps.cu", "steps", {**texts, "steps.cu": STEPS}, constants, tmp_path
        )
        given = rows.float().contiguous()
        inputs = len(kind.inputs)
        out = torch.full((len(rows) * (2 + inputs + len(kind.parameters)) + inputs + 1,), math.nan)
        values = [
            *(ctypes.c_void_p(each.data_ptr()) for each in (given, out)),
            *(ctypes.c_int64(each) for each in (len(rows), int(kind.option))),
        ]
        arguments = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        cuda_emulator.emulate(library, arguments, (1, 1, 1))
        return out[: -inputs - 1].view(len(rows), -1), out[-inputs - 1 :]

    return run


def expected(kind: Kind, rows: Tensor) -> Tensor:
    """The same in float64, from the kind's line and by autograd."""
    count = len(kind.inputs) + len(kind.parameters)
    columns = [column.clone().requires_grad_() for column in rows.double().T[:count]]
    reset, gate_grad, token_grad = rows.double().T[count:]
    gate, token = kind.gates(*columns, reset=reset != 0)
    total = (gate * gate_grad + token * token_grad).sum()
    grads = torch.autograd.grad(total, columns, allow_unused=True)
    of = [torch.zeros_like(gate) if grad is None else grad for grad in grads]
    return torch.stack([gate.detach(), token.detach(), *of], -1)


def drawn(kind: Kind, count: int, spread: float) -> Tensor:
    parameters = len(kind.parameters)
    inputs = torch.randn(count, len(kind.inputs)) * spread
    channel = (
        torch.rand(count, parameters) if kind.source == "hgrn" else torch.randn(count, parameters)
    )
    reset = (torch.rand(count, 1) < 0.2).float()
    grads = torch.randn(count, 2)
    grads[:, :1] *= 1 - reset  # what the kernels make of it
    return torch.cat([inputs, channel, reset, grads], -1).float()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("spread", [0.01, 1.0, 10.0])
def test_a_header_computes_its_line(kind: Kind, spread: float, steps: Steps) -> None:
    torch.manual_seed(0)
    rows = drawn(kind, 20_000, spread)
    out, _ = steps(kind, rows)
    wanted = expected(kind, rows)
    for column, (got, right) in enumerate(zip(out.double().T, wanted.T, strict=True)):
        scale = right.norm()
        assert (got - right).norm() <= 4e-7 * scale, column
        # No number is far off by itself, but for differences of products of inputs and gradients.
        assert ((got - right).abs() <= 2e-6 * right.abs() + 3e-7 * max(1, spread)).all(), column


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_small_numbers_are_as_exact_as_large_ones(kind: Kind, steps: Steps) -> None:
    """Where all gates are shut, or open, what is left of them counts: none comes of a difference."""
    torch.manual_seed(0)
    signs = product((-1.0, 1.0), repeat=len(kind.inputs))
    for sign in signs:
        rows = drawn(kind, 200, 1.0)
        inputs = len(kind.inputs)
        rows[:, :inputs] = torch.tensor(sign) * (18 + rows[:, :inputs])
        rows[:, -3] = 0
        out, _ = steps(kind, rows)
        for got, right in zip(out.double().T, expected(kind, rows).T, strict=True):
            assert (got - right).norm() <= 2e-6 * right.norm() + 1e-30, sign


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_nothing_overflows(kind: Kind, steps: Steps) -> None:
    """Of any inputs up to 1e30 gate and token are finite and right, and gradients finite."""
    extremes = (0.0, 1e-30, 1.0, 50.0, 88.0, 200.0, 1e4, 1e30)
    values = sorted({sign * value for sign in (-1, 1) for value in extremes})
    inputs, parameters = len(kind.inputs), len(kind.parameters)
    bounds = (0.0, 0.5, 1.0) if kind.source == "hgrn" else (-1e30, -50.0, 0.0, 50.0, 1e30)
    every = [
        (*given, *(bound,) * parameters, reset, 0.0 if reset else 1.0, 1.0)
        for given in product(values, repeat=inputs)
        for bound in (bounds if parameters else (0.0,))
        for reset in (0.0, 1.0)
    ]
    rows = torch.tensor(every)
    out, _ = steps(kind, rows)
    assert out.isfinite().all(), rows[~out.isfinite().all(1)][0]
    right = expected(kind, rows)
    # Sigmoids below 1e-38 are 0, whatever they multiply.
    largest = rows[:, :inputs].abs().amax(1, keepdim=True).clamp_min(1)
    close = (out.double() - right).abs() <= 2e-6 * right.abs() + 1e-6 * largest
    assert close[:, :2].all(), rows[~close[:, :2].all(1)][0]


def test_rg_lru_is_exact_where_a_is_close_to_1(steps: Steps) -> None:
    """1 - a * a is no difference there, and its root's derivative counts as at most 1000."""
    kind = KINDS["rg_lru"]
    torch.manual_seed(0)
    rows = drawn(kind, 5000, 1.0)
    rows[:, 3] = torch.linspace(-40, 0, 5000)  # softplus from 4e-18 on
    rows[:, 4:] = torch.tensor([0.0, 0.0, 1.0])
    out, _ = steps(kind, rows)
    right = expected(kind, rows)
    assert (out[:, 0] > 1 - 1e-6).any()
    for column in range(1, 6):
        assert ((out[:, column] - right[:, column]).abs() <= 3e-6 * right[:, column].abs()).all(), (
            column
        )


def test_rg_lru_takes_the_largest_parameters(steps: Steps) -> None:
    """A decay that is no longer a float32 number is so fast that nothing is left of a state, unless a gate is shut."""
    kind = KINDS["rg_lru"]
    every = product(
        (-2.0, 3.0),
        (-200.0, -50.0, 0.0, 50.0),
        (0.5,),
        (3e37, 1e38, 3.4e38),
        (0.0, 1.0),
        (0.0, 1.0),
        (1.0,),
    )
    rows = torch.tensor([row for row in every if row[4] + row[5] < 2])
    out, _ = steps(kind, rows)
    torch.testing.assert_close(out, expected(kind, rows).float(), rtol=2e-6, atol=1e-6)
    rows[:, 3] = math.nan  # of which no number is made
    out, _ = steps(kind, rows)
    assert out[:, 0].isnan().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rg_lru_ignores_what_does_not_count_at_a_reset(bad: float, steps: Steps) -> None:
    """The recurrence gate, whatever it is; and no input's NaN becomes a gradient of it or of the parameter."""
    kind = KINDS["rg_lru"]
    torch.manual_seed(0)
    rows = drawn(kind, 50, 1.0)
    rows[:, 4], rows[:, 5] = 1, 0
    right, _ = steps(kind, rows)
    assert not right[:, [3, 5]].any()
    spoilt = rows.clone()
    spoilt[:, 1] = bad
    out, _ = steps(kind, spoilt)
    assert torch.equal(out[:, 1:], right[:, 1:])
    spoilt = rows.clone()
    spoilt[:, 0] = bad
    out, _ = steps(kind, spoilt)
    assert not out[:, [3, 5]].any()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_padding_leaves_states_and_gradients_as_they_are(kind: Kind, steps: Steps) -> None:
    parameters = len(kind.parameters)
    row = torch.zeros(1, len(kind.inputs) + parameters + 3)
    _, padding = steps(kind, row)
    if not padding[-1]:  # PADS is false: kernels take no inputs past the end of a sequence
        assert kind.name not in WRITTEN
        pytest.skip("the kind has no padding")
    rows = torch.cat([padding[:-1].expand(50, -1), drawn(kind, 50, 1.0)[:, len(kind.inputs) :]], -1)
    rows[:, -3:] = torch.tensor([0.0, 0.0, 1.0])
    out, _ = steps(kind, rows)
    assert (out[:, 0] == 1).all()
    assert (out[:, 1] == 0).all()
    assert (out[:, 2 + len(kind.inputs) :] == 0).all()
    for dtype in (torch.bfloat16, torch.float16):
        assert padding[:-1].to(dtype).isfinite().all()
