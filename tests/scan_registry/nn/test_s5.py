"""``S5``: the paper's formulas in complex128, the parameters of s5-pytorch, and how they begin."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from scan_registry import nn
from scan_registry.nn.hippo import normal_hippo


def loop(
    m: nn.S5, x: Tensor, scale: Tensor | float = 1.0, h: Tensor | None = None, half: int = 0
) -> Tensor:
    """Smith et al. (2023), equations 2 and 3 and appendix A, without D; ``half`` is that of C, 1 goes backwards."""
    B = torch.view_as_complex(m.seq.B)
    C = m.seq.C[:, half * m.state_width : (half + 1) * m.state_width]
    scales = torch.as_tensor(scale, dtype=torch.float64)
    scales = scales.reshape(*scales.shape, *[1] * (2 - scales.dim())).expand(x.shape[:2])
    h = torch.zeros(x.shape[0], m.state_width, dtype=torch.complex128) if h is None else h
    outputs = [x[:, 0]] * x.shape[1]
    for t in range(x.shape[1])[:: -1 if half else 1]:
        step = scales[:, t, None] * m.seq.log_step.exp()
        if m.seq.discretisation == "zoh":
            A = (m.seq.Lambda * step).exp()
            factor = (A - 1) / m.seq.Lambda
        else:
            factor = 1 / (1 - step / 2 * m.seq.Lambda)
            A, factor = factor * (1 + step / 2 * m.seq.Lambda), factor * step
        h = A * h + factor * (x[:, t].to(B.dtype) @ B.T)
        outputs[t] = (h @ C.T).real
    return torch.stack(outputs, 1)


def given(**options: Any) -> tuple[nn.S5, Tensor]:
    torch.manual_seed(0)
    m = nn.S5(5, 6, dt_min=0.01, dt_max=0.5, dtype=torch.float64, **options)
    return m, torch.randn(3, 13, 5).double()


@pytest.mark.parametrize("discretization", ["zoh", "bilinear"])
@pytest.mark.parametrize("bcInit", [None, "complex_normal"])
def test_it_is_the_formula(discretization: Any, bcInit: Any) -> None:
    m, x = given(block_count=2, discretization=discretization, bcInit=bcInit)
    h = torch.randn(3, 6, dtype=torch.complex128)
    torch.testing.assert_close(m(x), loop(m, x) + m.seq.D * x)
    result, last = m(x, initial_state=h, return_final_state=True)
    torch.testing.assert_close(result, loop(m, x, h=h) + m.seq.D * x)
    assert (last.shape, last.dtype) == (h.shape, h.dtype)


def test_both_ways() -> None:
    m, x = given(bidir=True)
    h = torch.randn(3, 12, dtype=torch.complex128)
    expected = loop(m, x, h=h[:, :6]) + loop(m, x, h=h[:, 6:], half=1) + m.seq.D * x
    actual, last = m(x, initial_state=h, return_final_state=True)
    torch.testing.assert_close(actual, expected)
    assert last.shape == h.shape
    torch.testing.assert_close(m(x.flip(1), reverse=True, initial_state=h), actual.flip(1))
    with pytest.raises(RuntimeError, match="a bidirectional layer has no step"):
        m.step(x[:, 0])


@pytest.mark.parametrize("reverse", [False, True])
def test_resets_part_both_scans_at_the_same_place(reverse: bool) -> None:
    m, x = given(bidir=True)
    reset = torch.zeros(3, 13, dtype=torch.bool)
    reset[:, 4] = True
    cut = (
        5 if reverse else 4
    )  # between what is before a reset, in the direction of the first scan, and the reset
    parts = [m(x[:, :cut], reverse=reverse), m(x[:, cut:], reverse=reverse)]
    torch.testing.assert_close(m(x, reset=reset, reverse=reverse), torch.cat(parts, 1))


@pytest.mark.parametrize("discretization", ["zoh", "bilinear"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("size", [(), (3,), (3, 13)])
def test_step_sizes_may_be_scaled(
    size: tuple[int, ...], batch_first: bool, discretization: Any
) -> None:
    m, x = given(discretization=discretization, batch_first=batch_first)
    scale = torch.rand(size).double() + 0.5
    expected = loop(m, x, scale) + m.seq.D * x
    if batch_first:
        torch.testing.assert_close(m(x, scale), expected)
        if not size:
            torch.testing.assert_close(m(x, float(scale)), expected)
    else:
        given_scale = scale.T if len(size) == 2 else scale
        torch.testing.assert_close(m(x.transpose(0, 1), given_scale).transpose(0, 1), expected)
    state, outputs = None, []
    for t in range(13):
        y, state = m.step(x[:, t], state, scale[:, t] if len(size) == 2 else scale)
        outputs.append(y)
    torch.testing.assert_close(torch.stack(outputs, 1), expected)


def test_wide_scales_leave_states_as_they_are() -> None:
    m, x = nn.S5(5), torch.randn(2, 3, 5)
    _, state = m(x, torch.ones(2, 3).double(), return_final_state=True)
    assert state.dtype == torch.complex64
    assert m.step(x[:, 0], None, torch.ones(2).double())[1].dtype == torch.complex64


def test_the_state_dict_is_s5_pytorchs() -> None:
    def contents(m: nn.S5) -> dict[str, tuple[Any, ...]]:
        return {name: (*value.shape, value.dtype) for name, value in m.state_dict().items()}

    narrow = nn.S5(5, 6, dtype=torch.bfloat16)
    assert contents(narrow) == {
        "seq.Lambda": (6, torch.complex64),
        "seq.B": (6, 5, 2, torch.bfloat16),
        "seq.C": (5, 6, torch.complex64),
        "seq.D": (5, torch.bfloat16),
        "seq.log_step": (6, torch.float32),
    }
    assert contents(nn.S5(5, bidir=True))["seq.C"] == (5, 10, torch.complex64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_conversion_keeps_imaginary_parts(dtype: torch.dtype) -> None:
    m = nn.S5(5, 6)
    result = copy.deepcopy(m).to(dtype).seq
    assert result.Lambda.is_complex()
    assert result.B.dtype == dtype
    slack = 0.01 if dtype == torch.bfloat16 else 0
    for one, other in ((result.Lambda, m.seq.Lambda), (result.C, m.seq.C)):
        torch.testing.assert_close(one.to(other.dtype), other, rtol=slack, atol=slack)


def test_eigenvalues_are_hippos() -> None:
    """A + p pᵀ with HiPPO-LegS for A, element by element, is V Λ V*."""
    size = 8
    n = torch.arange(size).double()
    A = -((2 * n[:, None] + 1) * (2 * n + 1)).sqrt().tril(-1) - (n + 1).diag()
    p = (n + 0.5).sqrt()
    values, vectors = normal_hippo(size, torch.device("cpu"))
    rebuilt = vectors @ values.diag() @ vectors.mH
    torch.testing.assert_close(rebuilt.real, A + p[:, None] * p)
    torch.testing.assert_close(rebuilt.imag, torch.zeros_like(A))
    assert torch.all(values.real == -0.5)
    m = nn.S5(3, 16, block_count=2, dtype=torch.float64)
    torch.testing.assert_close(m.seq.Lambda.detach(), values.repeat(2))


def test_matrices_begin_as_random_numbers_in_hippos_coordinates() -> None:
    torch.manual_seed(0)
    m = nn.S5(300, 128, block_count=2, dtype=torch.float64)
    _, vectors = normal_hippo(64, torch.device("cpu"))
    basis = torch.block_diag(vectors, vectors)
    B = basis @ torch.view_as_complex(m.seq.B.detach())
    torch.testing.assert_close(B.imag, torch.zeros_like(B.imag))
    assert float(B.real.std()) == pytest.approx(128**-0.5, rel=0.02)
    C = m.seq.C.detach() @ basis.mH
    for part in (C.real, C.imag):
        assert float(part.std()) == pytest.approx((128 * 300) ** -0.5, rel=0.02)
    normal = nn.S5(300, 128, bcInit="complex_normal").seq.C.detach()
    assert float(normal.abs().square().mean()) == pytest.approx(1, rel=0.03)
    steps = m.seq.log_step.detach().exp()
    assert 0.001 <= float(steps.min()) < 0.0015
    assert 0.08 < float(steps.max()) <= 0.1


def test_scales_that_do_not_fit() -> None:
    m, x = given()
    with pytest.raises(ValueError, match=r"a number or of size \(3,\) or \(3, 13\), got \(13,\)"):
        m(x, torch.ones(13))
    with pytest.raises(ValueError, match=r"a number or of size \(3,\), got \(3, 13\)"):
        m.step(x[:, 0], None, torch.ones(3, 13))
    for scale, error, words in (
        ("1", TypeError, "step_scale to be a number or a Tensor, got str"),
        ([1.0], TypeError, "step_scale to be a number or a Tensor, got list"),
        (torch.ones(3, dtype=torch.complex64), TypeError, "step_scale of real numbers"),
        (torch.ones(3).to_sparse(), TypeError, "step_scale is sparse; "),
        (torch.ones(3, device="meta"), ValueError, "step_scale on the input's device, cpu, got"),
    ):
        for call in (lambda s: m(x, s), lambda s: m.step(x[:, 0], None, s)):
            with pytest.raises(error, match=words):
                call(scale)


def test_initial_states_of_both_ways_broadcast() -> None:
    m, x = given(bidir=True)
    for size in ((), (1,), (3, 1), (1, 12), (12,)):
        state = torch.randn(size, dtype=torch.complex128)
        result = m(x, initial_state=state)
        torch.testing.assert_close(result, m(x, initial_state=state.expand(3, 12).clone()))
    with pytest.raises(ValueError, match=r"of 12 numbers for both scans, got size \(3, 6\)"):
        m(x, initial_state=torch.zeros(3, 6, dtype=torch.complex128))
    with pytest.raises(TypeError, match="Expected initial_state to be a Tensor, got float"):
        m(x, initial_state=0.0)


def test_one_graph_of_scales_that_change() -> None:
    m, x = given()
    compiled = torch.compile(lambda s: m(x, s), fullgraph=True, backend="aot_eager")
    for scale in (1.0, 0.5, 0.25, 2):
        torch.testing.assert_close(compiled(scale), m(x, scale))
