"""Generation with ``Mamba2``: by steps, by calls of many steps, by packed sequences, and as mamba_ssm does it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mamba2_blocks import LENGTH, block, each_option, given, made, numbers
from torch import Tensor

from scan_registry import nn


@each_option
def test_steps_are_the_whole(options: dict[str, Any]) -> None:
    m, hidden = made(**options), given()
    expected = block(m, hidden)
    conv, ssm = m.allocate_inference_cache(2, LENGTH)
    outputs = []
    for x in hidden.split(1, 1):
        y, conv_after, ssm_after = m.step(x, conv, ssm)
        assert conv_after is conv
        assert ssm_after is ssm
        assert not y.requires_grad
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), expected)
    states = m.allocate_inference_cache(2, LENGTH)
    with torch.no_grad():
        calls = [m(x, states=states) for x in hidden.split([5, 1, 2, 0, 4], 1)]
    torch.testing.assert_close(torch.cat(calls, 1), expected)
    torch.testing.assert_close(states, (conv, ssm))


def test_a_norm_with_a_hook_sees_the_gate() -> None:
    """Without one, kernels multiply by the gate before the norm."""
    m, hidden = made(), given()
    states = [m.allocate_inference_cache(2, 0) for _ in range(2)]
    with torch.no_grad():
        expected = m(hidden), m.step(hidden[:, :1], *states[0])[0]
        inputs: list[tuple[Tensor, ...]] = []
        m.norm.register_forward_pre_hook(lambda _, args: inputs.append(args))
        outputs = m(hidden), m.step(hidden[:, :1], *states[1])[0]
    torch.testing.assert_close(outputs, expected)
    assert [isinstance(gate, Tensor) for _, gate in inputs] == [True, True]


def test_the_caches_shapes_and_dtypes() -> None:
    m = nn.Mamba2(64, d_state=16, headdim=32, ngroups=2, dtype=torch.bfloat16)
    states = m.allocate_inference_cache(3, 1)
    assert [tuple(state.shape) for state in states] == [(3, 192, 4), (3, 4, 32, 16)]
    assert [state.dtype for state in states] == [torch.bfloat16, torch.float32]
    narrow = m.allocate_inference_cache(1, 1, dtype=torch.float16)
    assert {state.dtype for state in narrow} == {torch.float16}
    assert {state.dtype for state in made().allocate_inference_cache(1, 1)} == {torch.float64}


def test_packed_sequences_go_on_from_their_states() -> None:
    m, hidden = made(ngroups=2), given(4, 9)
    lengths = [[3, 0, 1, 4], [2, 5, 0, 1], [0, 2, 6, 1]]
    states = m.allocate_inference_cache(4, 0)
    outputs: list[list[Tensor]] = [[] for _ in range(4)]
    position = [0] * 4
    for call in lengths:
        pieces = [
            hidden[row : row + 1, p : p + n]
            for row, (p, n) in enumerate(zip(position, call, strict=True))
        ]
        position = [p + n for p, n in zip(position, call, strict=True)]
        bounds = torch.tensor([0, *call]).cumsum(0)
        y = m(torch.cat(pieces, 1), cu_seqlens=bounds, states=states).detach()
        for row, piece in enumerate(y.split(call, 1)):
            outputs[row].append(piece)
    for row, end in enumerate(position):
        alone = m.allocate_inference_cache(1, 0)
        expected = m(hidden[row : row + 1, :end], states=alone)
        torch.testing.assert_close(torch.cat(outputs[row], 1), expected.detach())
        for ours, theirs in zip(states, alone, strict=True):
            torch.testing.assert_close(ours[row : row + 1], theirs)


def test_the_states_after_numbered_sequences_are_the_last_ones() -> None:
    """Also where its number was that of an earlier one, and where it is shorter than the convolution."""
    m, hidden = made(), given(1)
    for marks in (numbers(), torch.tensor([[2] * 4 + [1] * 6 + [2] * 2])):
        states, alone = m.allocate_inference_cache(1, 0), m.allocate_inference_cache(1, 0)
        for state in states:
            state.normal_()
        first = [state.clone() for state in states]
        y = m(hidden, seq_idx=marks, states=states)
        begin = int((marks[0] != marks[0, -1]).nonzero().max()) + 1
        torch.testing.assert_close(y[:, begin:], m(hidden[:, begin:], states=alone))
        torch.testing.assert_close(states, alone)
        end = int((marks[0] != marks[0, 0]).nonzero().min())
        torch.testing.assert_close(y[:, :end], m(hidden[:, :end], states=first))


# --- With Mamba, too ---------------------------------------------------------------------------


def mamba(**options: Any) -> nn.Mamba:
    torch.manual_seed(0)
    return nn.Mamba(8, **options).to(options.get("dtype", torch.float64))


EITHER = pytest.mark.parametrize("new", [mamba, made], ids=["Mamba", "Mamba2"])


@pytest.mark.parametrize(
    ("new", "packed"),
    [(mamba, False), (made, False), (made, True)],
    ids=["Mamba", "Mamba2", "packed"],
)
def test_inference_params_are_mamba_ssms(new: Any, packed: bool) -> None:
    m, hidden = new(layer_idx=3), given()
    params = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})
    with torch.no_grad():
        for _ in range(2):  # the second time from states that are to be forgotten
            params.seqlen_offset = 0
            prompt = hidden[:, :5]
            if packed:
                packing = {"cu_seqlens": torch.tensor([0, 5, 10])}
                prompt = m(prompt.reshape(1, 10, 8), inference_params=params, **packing)
                outputs = [prompt.view(2, 5, 8)]
            else:
                outputs = [m(prompt, inference_params=params)]
            for t in range(5, LENGTH):
                params.seqlen_offset = t
                outputs.append(m(hidden[:, t : t + 1], inference_params=params))
            torch.testing.assert_close(torch.cat(outputs, 1), m(hidden))
    assert [*params.key_value_memory_dict] == [3]


@EITHER
def test_derivatives_end_at_states(new: Any) -> None:
    m, hidden = new(), given().requires_grad_()
    states = m.allocate_inference_cache(2, LENGTH)
    m(hidden[:, :5], states=states)
    later = m(hidden[:, 5:], states=states)
    torch.testing.assert_close(later, m(hidden)[:, 5:])
    (gradient,) = torch.autograd.grad(later.sum(), hidden)
    assert not gradient[:, :5].any()
    (whole,) = torch.autograd.grad(m(hidden)[:, 5:].sum(), hidden)
    torch.testing.assert_close(gradient[:, 8:], whole[:, 8:])


@EITHER
def test_under_autocast(new: Any) -> None:
    m, hidden = new(dtype=torch.float32), given().float()
    expected = m(hidden)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = m(hidden)
        states = m.allocate_inference_cache(2, LENGTH)
        with torch.no_grad():
            steps = [m(x, states=states) for x in hidden.split(1, 1)]
    assert outputs.dtype == torch.bfloat16
    scale = float(expected.detach().abs().max())
    torch.testing.assert_close(outputs.float(), expected, rtol=0.05, atol=0.02 * scale)
    torch.testing.assert_close(torch.cat(steps, 1).float(), expected, rtol=0.05, atol=0.02 * scale)
