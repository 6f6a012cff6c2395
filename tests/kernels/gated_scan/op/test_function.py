"""``gated_scan`` on the CPU, against loops from the kinds' formulas: values and derivatives, layouts and options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gating import FORMULAS, Call, drawn, every_option, loop
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from scan_registry import gated_scan, hgrn, linear_scan, min_gru, min_lstm, rg_lru
from scan_registry.kernels.gated_scan import reference
from scan_registry.kernels.gated_scan.kinds import KINDS
from scan_registry.kernels.gated_scan.op import composed

OPTIONS = [*every_option()]


def run(call: Call, **more: Any) -> tuple[Tensor, Tensor]:
    return gated_scan(
        call.kind, *call.tensors, **call.options, **{"return_final_state": True, **more}
    )


def gradients(outputs: Any, leaves: list[Tensor], **options: Any) -> tuple[Tensor, ...]:
    weights = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape) for x in outputs]
    return torch.autograd.grad(outputs, leaves, weights, **options)


def test_every_kind_has_a_formula() -> None:
    assert FORMULAS.keys() == KINDS.keys()
    for name, kind in KINDS.items():
        assert FORMULAS[name][:2] == (len(kind.inputs), len(kind.parameters))


#: Every option of kinds of two sequences, and of three with values of channels, whose roots resets leave out; of the others,
#: all options together in both layouts, and each option in turn.
CALLS = [
    (kind, options)
    for number, kind in enumerate(KINDS)
    for place, options in enumerate(OPTIONS)
    if kind in ("min_gru", "rg_lru") or place in (1, 7) or place % len(KINDS) == number
]


@pytest.mark.parametrize(("kind", "options"), CALLS, ids=str)
def test_values_and_gradients(kind: str, options: dict[str, Any]) -> None:
    call = drawn(kind, **options)
    found, expected = run(call), loop(kind, *call.tensors, **call.options)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found, call.leaves), gradients(expected, call.leaves))


@pytest.mark.parametrize("options", [OPTIONS[1], OPTIONS[-2]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference(kind: str, options: dict[str, Any]) -> None:
    call = drawn(kind, **options)
    inputs, parameters = call.tensors[: FORMULAS[kind][0]], call.tensors[FORMULAS[kind][0] :]
    found = reference.forward(KINDS[kind], inputs, parameters, **call.options)
    expected = loop(kind, *call.tensors, **call.options)
    torch.testing.assert_close(found, expected)
    weights = [torch.randn_like(x) for x in found]
    of_inputs, of_parameters, of_state = reference.backward(
        KINDS[kind], inputs, parameters, found[0], *weights, **call.options
    )
    grads = torch.autograd.grad(expected, call.leaves, weights)
    theirs = (*of_inputs, *of_parameters, of_state)
    torch.testing.assert_close(theirs[: len(grads)], grads)
    torch.testing.assert_close(run(call, backend="reference"), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_in_both_modes_and_of_second_order(kind: str) -> None:
    call = drawn(kind, (2, 2, 4), initial=True, resets=True)
    options = {name: value for name, value in call.options.items() if name != "initial_state"}

    def of(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        return gated_scan(
            kind, *leaves[:-1], initial_state=leaves[-1], return_final_state=True, **options
        )

    assert gradcheck(of, call.leaves, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(of, call.leaves, fast_mode=True)


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives_with_every_option(kind: str) -> None:
    call = drawn(kind, dim=1, initial=True, resets=True, packed=True, reverse=True)
    found = []
    for made in (run(call), loop(kind, *call.tensors, **call.options)):
        first = gradients(made, call.leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(g.sin().sum() for g in first), call.leaves))
    torch.testing.assert_close(*found)


def test_forward_mode_by_dual_numbers() -> None:
    call = drawn("rg_lru", resets=True)
    x, *others = (t.detach() for t in call.tensors)
    tangent = torch.randn_like(x)
    with forward_ad.dual_level():
        made = rg_lru(forward_ad.make_dual(x, tangent), *others, call.options["reset"])
        found = forward_ad.unpack_dual(made).tangent
    # States are linear in x.
    torch.testing.assert_close(found, rg_lru(tangent, *others, call.options["reset"]))


@pytest.mark.parametrize("options", [OPTIONS[1], OPTIONS[7], {"dim": 1}, {"dim": -1}], ids=str)
@pytest.mark.parametrize(
    ("kind", "room"), [("rg_lru", 1), ("rg_lru", 20), ("rg_lru", 100), ("min_lstm", 20)]
)
def test_pieces(
    kind: str, room: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece of some channels after the other, or of some batches, is what all at once are."""
    call = drawn(kind, (5, 7, 9), **options)
    whole = run(call)
    of_whole = gradients(whole, call.leaves, retain_graph=True)
    of_final = gradients(whole[1:], call.leaves[:1])
    monkeypatch.setattr(composed, "_CHANNELS", 2)
    monkeypatch.setattr(composed, "_PIECE", {False: room})
    made: list[int] = []
    piece = composed._forward

    def noted(given: Any, options: Any) -> Any:
        made.append(given.inputs[0].numel())
        return piece(given, options)

    monkeypatch.setattr(composed, "_forward", noted)
    found = run(call)
    assert sum(made) == 5 * 7 * 9
    assert max(made) <= max(room, 2 * 9)
    torch.testing.assert_close(found, whole)
    of_pieces = gradients(found, call.leaves, retain_graph=True)
    torch.testing.assert_close(of_pieces, of_whole)
    torch.testing.assert_close(gradients(found[1:], call.leaves[:1]), of_final)


# --- The functions of kinds -------------------------------------------------------------------


@pytest.mark.parametrize("options", [OPTIONS[1], OPTIONS[7]], ids=str)
def test_functions_are_their_kinds(options: dict[str, Any]) -> None:
    def by_name(kind: str) -> tuple[Call, dict[str, Any]]:
        call = drawn(kind, **options)
        return call, {**call.options, "return_final_state": True}

    for function, name in ((min_gru, "min_gru"), (min_lstm, "min_lstm")):
        call, given = by_name(name)
        torch.testing.assert_close(function(*call.tensors, **given), run(call), rtol=0, atol=0)  # type: ignore[operator]
        identity = Call(f"{name}_identity", call.tensors, call.options)
        found = function(*call.tensors, activation="identity", **given)  # type: ignore[operator]
        torch.testing.assert_close(found, run(identity), rtol=0, atol=0)
    for function, name in ((rg_lru, "rg_lru"), (hgrn, "hgrn")):
        call, given = by_name(name)
        torch.testing.assert_close(function(*call.tensors, **given), run(call), rtol=0, atol=0)  # type: ignore[operator]


@pytest.mark.parametrize("dim", [-1, 1])
@pytest.mark.parametrize("bound", [None, 0.25, 0, 1])
def test_a_lower_bound_that_is_a_number(bound: float | None, dim: int) -> None:
    x, forget = torch.randn(2, 2, 5, 7)
    values = torch.full((x.shape[1 if dim == -1 else 2],), float(bound or 0))
    found = hgrn(x, forget, bound, dim=dim)
    torch.testing.assert_close(found, hgrn(x, forget, values, dim=dim), rtol=0, atol=0)
    expected = loop("hgrn", x, forget, values, dim=dim)[0]
    torch.testing.assert_close(found, expected.float())


def test_linear_is_the_linear_scan() -> None:
    gates, tokens = torch.rand(2, 3, 9), torch.randn(2, 3, 9)
    found = gated_scan("linear", gates, tokens)
    torch.testing.assert_close(found, linear_scan(gates, tokens), rtol=0, atol=0)


# --- Shapes and strides -----------------------------------------------------------------------


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("kind", ["min_gru", "rg_lru"])
def test_few_elements_and_none(kind: str, shape: tuple[int, int, int], resets: bool) -> None:
    call = drawn(kind, shape, torch.float32, initial=True, resets=resets)
    states, last = run(call)
    assert states.shape == shape
    if 0 not in shape:
        expected = loop(kind, *call.tensors, **call.options)
        torch.testing.assert_close((states.double(), last.double()), expected, rtol=1e-6, atol=1e-6)
    else:
        torch.testing.assert_close(last, call.options["initial_state"])
    for leaf, grad in zip(call.leaves, gradients((states, last), call.leaves), strict=True):
        assert grad.shape == leaf.shape
        assert grad.isfinite().all()
    bounds = torch.tensor([0, 0, shape[2], shape[2]])
    packed = gated_scan(kind, *call.tensors, cu_seqlens=bounds, reset=call.options["reset"])
    assert packed.shape == shape


def test_strides_of_every_kind() -> None:
    """Transposed, sliced with steps and gaps, expanded; inputs, reset and states."""
    call = drawn("rg_lru", resets=True, initial=True)
    x, r, i, a = (t.detach() for t in call.tensors)
    strange = (
        x.mT.contiguous().mT,
        torch.stack([r, r], -1)[..., 0],
        torch.cat([i, i], 1)[:, :5],
        torch.stack([a, a], -1)[:, 1],
    )
    reset, initial = call.options["reset"], call.options["initial_state"].detach()
    options = {
        "reset": torch.stack([reset.T, reset.T])[1].T,
        "initial_state": initial.T.contiguous().T,
        "return_final_state": True,
    }
    leaves = [t.requires_grad_() for t in strange]
    found = gated_scan("rg_lru", *leaves, **options)
    assert found[0].stride() == torch.empty_like(strange[0]).stride()
    expected = loop("rg_lru", *leaves, reset=reset, initial_state=initial)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found, leaves), gradients(expected, leaves))
    expanded = x[:1, :, :1].expand(2, 5, 9)
    found, wanted = gated_scan("min_gru", expanded, x), loop("min_gru", expanded, x)
    torch.testing.assert_close(found, wanted[0])


def test_states_that_broadcast() -> None:
    x = torch.randn(2, 3, 9, dtype=torch.float64)
    initial = torch.randn(3, 1, dtype=torch.float64, requires_grad=True)
    bounds = torch.tensor([0, 4, 9])
    found = min_gru(x, x, initial_state=initial, cu_seqlens=bounds)
    expected, _ = loop("min_gru", x, x, initial_state=initial, cu_seqlens=bounds)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients([found], [initial]), gradients([expected], [initial]))


@pytest.mark.parametrize("kind", KINDS)
def test_only_gradients_that_are_wanted(kind: str) -> None:
    call = drawn(kind, initial=True)
    expected = gradients(run(call), call.leaves)
    for number in range(len(call.leaves)):
        for place, leaf in enumerate(call.leaves):
            leaf.grad = None
            leaf.requires_grad_(place == number)
        leaf = call.leaves[0]
        (found,) = gradients(run(call), [leaf])
        torch.testing.assert_close(found, expected[number])
        for each in (*call.tensors, call.options["initial_state"]):
            each.requires_grad_()
