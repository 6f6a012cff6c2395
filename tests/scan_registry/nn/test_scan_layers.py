"""What ``MinGRU``, ``MinLSTM``, ``RGLRU``, ``HGRN``, ``LRU`` and ``S5`` have in common."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from graphs import recorded
from layers import BATCH, EVERY, FEATURES, LENGTH, MAKERS, STEPPING
from torch import Tensor


@pytest.fixture
def _nothing_compiled() -> None:
    torch.compiler.reset()  # modules share their code, and torch compiles one so many times only


ONE_WAY = STEPPING


def wide(name: str, **how: Any) -> Any:
    torch.manual_seed(5)
    return MAKERS[name](dtype=torch.float64, **how)


def given(batch: int = BATCH) -> Tensor:
    torch.manual_seed(6)
    return torch.randn(batch, LENGTH, FEATURES).double()


def state_of(m: Any, *sizes: int) -> Tensor:
    dtype = torch.complex128 if m.is_complex else torch.float64
    return torch.randn(*(sizes or (BATCH,)), m.channels, dtype=dtype)


def marks(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    reset = torch.rand(BATCH, LENGTH, generator=generator) < 0.4
    reset[0] = False
    reset[1, 0] = True
    return reset


# --- One step and many ------------------------------------------------------------------------


@STEPPING
@pytest.mark.parametrize("with_state", [False, True])
def test_steps_are_the_sequence(name: str, with_state: bool) -> None:
    """With resets and all derivatives; test_streaming has steps without them."""
    m, x, reset = wide(name), given().requires_grad_(), marks()
    first = state_of(m).requires_grad_() if with_state else None
    whole, last = m(x, initial_state=first, reset=reset, return_final_state=True)
    outputs, state = [], first
    for t in range(LENGTH):
        before = None if state is None else state.detach().clone()
        y, after = m.step(x[:, t], state, reset=reset[:, t])
        assert before is None or torch.equal(before, state)  # which is not written to
        outputs.append(y)
        state = after
    torch.testing.assert_close((torch.stack(outputs, 1), state), (whole, last))
    leaves = [x, *m.parameters(), *([] if first is None else [first])]
    weight, end = torch.randn_like(whole), torch.randn_like(last)

    def gradients(y: Tensor, h: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad((y * weight).sum() + (h * end.conj()).real.sum(), leaves)

    expected = gradients(whole, last)
    torch.testing.assert_close(gradients(torch.stack(outputs, 1), state), expected)


@STEPPING
def test_narrow_parameters_have_wide_states(name: str) -> None:
    torch.manual_seed(0)
    m = MAKERS[name](dtype=torch.bfloat16)
    x = given().bfloat16()
    y, last = m(x, return_final_state=True)
    assert y.dtype == torch.bfloat16
    assert last.dtype == (torch.complex64 if m.is_complex else torch.float32)
    stepped, after = m.step(x[:, 0], last)
    assert (stepped.dtype, after.dtype) == (y.dtype, last.dtype)


# --- Options ----------------------------------------------------------------------------------


@EVERY
def test_time_comes_first_if_asked(name: str) -> None:
    m, other = wide(name), wide(name, batch_first=False)
    x, reset, state = given(), marks(), state_of(m)
    y, last = m(x, initial_state=state, reset=reset, return_final_state=True)
    result, end = other(
        x.transpose(0, 1), initial_state=state, reset=reset.T, return_final_state=True
    )
    torch.testing.assert_close(result, y.transpose(0, 1))
    torch.testing.assert_close(end, last)
    torch.testing.assert_close(other(x.transpose(0, 1)), m(x).transpose(0, 1))


@ONE_WAY
def test_backwards_is_forwards_on_the_flipped_sequence(name: str) -> None:
    m, x, reset, state = wide(name), given(), marks(), state_of(wide(name))
    y, last = m(x, initial_state=state, reset=reset, reverse=True, return_final_state=True)
    flipped = m(x.flip(1), initial_state=state, reset=reset.flip(1), return_final_state=True)
    torch.testing.assert_close(y, flipped[0].flip(1))
    torch.testing.assert_close(last, flipped[1])


@EVERY
def test_packed_sequences_do_not_see_each_other(name: str) -> None:
    m, x = wide(name), given(1)
    bounds = torch.tensor([0, 4, 4, LENGTH])
    state = state_of(m, 1, 3)
    y, last = m(x, initial_state=state, cu_seqlens=bounds, return_final_state=True)
    assert last.shape == state.shape
    for k, (begin, end) in enumerate([(0, 4), (4, 4), (4, LENGTH)]):
        if begin == end:
            continue
        alone = m(x[:, begin:end], initial_state=state[:, k], return_final_state=True)
        torch.testing.assert_close(y[:, begin:end], alone[0])
        torch.testing.assert_close(last[:, k], alone[1])


@ONE_WAY
def test_a_reset_drops_whatever_came_before(name: str) -> None:
    m, x = wide(name), given()
    reset = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    reset[:, 4] = True
    spoiled = state_of(m).fill_(float("nan"))
    y = m(x, initial_state=spoiled, reset=reset)
    assert y[:, :4].isnan().any()
    # At a reset RG-LRU leaves its root out, so the first step of the rest is a reset, too.
    torch.testing.assert_close(y[:, 4:], m(x[:, 4:], reset=reset[:, 4:]))
    stepped, after = m.step(x[:, 4], spoiled, reset=reset[:, 4])
    torch.testing.assert_close(stepped, y[:, 4])
    assert after.isfinite().all()


@EVERY
def test_derivatives_pass_the_states(name: str) -> None:
    m, x = wide(name), given()[:, :3].requires_grad_()
    state = state_of(m).requires_grad_()
    reset = marks()[:, :3]

    def run(x: Tensor, state: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        values = dict(zip([n for n, _ in m.named_parameters()], parameters, strict=True))
        options = {"initial_state": state, "reset": reset, "return_final_state": True}
        y, last = torch.func.functional_call(m, values, (x,), options)
        return y, last

    assert torch.autograd.gradcheck(run, (x, state, *m.parameters()), fast_mode=True)


# --- What modules are to torch ----------------------------------------------------------------


@pytest.mark.usefixtures("_nothing_compiled")
@pytest.mark.parametrize("name", ["RGLRU", "S5"])
def test_it_exports_with_any_batch_and_time(name: str) -> None:
    m, x = MAKERS[name](), given().float()
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("time")}
    exported = torch.export.export(m, (x,), dynamic_shapes={"x": sizes}).module()
    other = torch.randn(m.channels, 5, FEATURES)  # as many sequences as channels
    torch.testing.assert_close(exported(other), m(other))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated")
@EVERY
def test_it_is_not_scripted(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"torch.jit.script cannot compile scan_registry.nn"):
        torch.jit.script(MAKERS[name]())


@EVERY
def test_it_says_what_is_not_the_default(name: str) -> None:
    said = MAKERS[name](batch_first=False, backend="reference").extra_repr()
    assert said.endswith("batch_first=False, backend='reference'")
    assert "batch_first" not in MAKERS[name]().extra_repr()


@STEPPING
def test_a_steps_output_may_be_changed_in_place(name: str) -> None:
    """As by a residual connection; the state stays as it is."""
    m = MAKERS[name]()
    with torch.no_grad():
        y, state = m.step(torch.randn(2, FEATURES))
        before = state.clone()
        y += 1
    torch.testing.assert_close(state, before, rtol=0, atol=0)


# --- On a GPU ---------------------------------------------------------------------------------


class TestOnAGpu:
    pytestmark = pytest.mark.gpu

    @EVERY
    @pytest.mark.parametrize(
        ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=str
    )
    def test_it_is_what_the_cpu_has(self, name: str, dtype: torch.dtype, tolerance: float) -> None:
        torch.manual_seed(0)
        m = MAKERS[name](device="cuda", dtype=dtype)
        exact = copy.deepcopy(m).double().cpu()
        x = torch.randn(BATCH, 100, FEATURES, device="cuda").to(dtype).requires_grad_()
        wide_x = x.detach().double().cpu().requires_grad_()
        reset = torch.rand(BATCH, 100) < 0.1
        actual, expected = m(x, reset=reset.cuda()), exact(wide_x, reset=reset)
        weight = torch.randn_like(expected)
        (ours,) = torch.autograd.grad((actual * weight.to(actual)).sum(), x)
        (theirs,) = torch.autograd.grad((expected * weight).sum(), wide_x)
        for one, other in ((actual, expected), (ours, theirs)):
            assert float(((one.double().cpu() - other).norm() / other.norm()).detach()) <= tolerance

    @STEPPING
    def test_steps_in_a_graph(self, name: str) -> None:
        m = MAKERS[name](device="cuda")
        x = torch.randn(BATCH, LENGTH, FEATURES, device="cuda")
        with torch.no_grad():
            expected, last = m(x, return_final_state=True)
            state, now = torch.zeros_like(last), x[:, 0].clone()

            def step() -> Tensor:
                y, after = m.step(now, state)
                state.copy_(after)
                return y

            graph, y = recorded(step)
            state.zero_()
            outputs = []
            for token in x.unbind(1):
                now.copy_(token)
                graph.replay()
                outputs.append(y.clone())
        torch.testing.assert_close(torch.stack(outputs, 1), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-5)
