"""``linear_scan`` on the CPU: what is computed, what is kept, and what shares memory with what."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from scan_registry import linear_scan

Oracle = Callable[..., tuple[Tensor, Tensor]]

WANTED = [(g, t, s) for g in (False, True) for t in (False, True) for s in (False, True)]


def leaves_of(wanted: tuple[bool, bool, bool], *gate_shape: int) -> tuple[Tensor, Tensor, Tensor]:
    tensors = torch.rand(gate_shape or (2, 3, 7)), torch.randn(2, 3, 7), torch.randn(2, 3)
    gates, tokens, initial = (
        t.requires_grad_(want) for t, want in zip(tensors, wanted, strict=True)
    )
    return gates, tokens, initial


class Calls(TorchDispatchMode):
    """Notes which of this package's operators are called, and the last argument of each."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "scan_registry":
            self.seen.append((func.name(), args[-1]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("wanted", WANTED[1:], ids=str)
@pytest.mark.parametrize("gate_shape", [(2, 3, 7), (3, 1)])
def test_only_gradients_asked_for(
    plainly: Oracle, gate_shape: tuple[int, ...], wanted: tuple[bool, bool, bool]
) -> None:
    """The others are neither given nor computed."""
    inputs = leaves_of(wanted, *gate_shape)
    linear_scan(*inputs).square().sum().backward()
    copies = [t.detach().double().requires_grad_(t.requires_grad) for t in inputs]
    plainly(*copies)[0].square().sum().backward()
    for leaf, copy, want in zip(inputs, copies, wanted, strict=True):
        assert (leaf.grad is not None) == want
        if leaf.grad is not None and copy.grad is not None:
            torch.testing.assert_close(leaf.grad.double(), copy.grad, rtol=1e-5, atol=1e-5)
    with Calls() as calls_made:
        linear_scan(*inputs).square().sum().backward()
    names = ["scan_registry::linear_scan", "scan_registry::linear_scan_backward"]
    assert [name for name, _ in calls_made.seen] == names
    assert calls_made.seen[-1] == (names[-1], [*wanted])


@pytest.mark.parametrize("wanted", WANTED, ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_only_what_is_needed_is_saved(packed: bool, wanted: tuple[bool, bool, bool]) -> None:
    """Tokens never; states and initial states only for the gradient of gates."""
    gates, tokens, initial = leaves_of(wanted)
    bounds = torch.tensor([0, 2, 7]) if packed else None
    if packed:
        initial = torch.randn(2, 3, 2, requires_grad=wanted[2])
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        states = linear_scan(gates, tokens, initial, cu_seqlens=bounds)
    expected = {gates.data_ptr()} if any(wanted) else set()
    if wanted[0]:
        expected |= {states.data_ptr(), initial.data_ptr()}
    if bounds is not None and any(wanted):
        expected.add(bounds.data_ptr())
    assert {tensor.data_ptr() for tensor in saved} == expected
    assert len(saved) == len(expected)


@pytest.mark.parametrize("wanted", WANTED, ids=str)
def test_a_loss_of_the_final_state_alone(plainly: Oracle, wanted: tuple[bool, bool, bool]) -> None:
    if not any(wanted):
        assert linear_scan(*leaves_of(wanted), return_final_state=True)[1].grad_fn is None
        return
    inputs = leaves_of(wanted)
    _, last = linear_scan(*inputs, return_final_state=True)
    last.square().sum().backward()
    copies = [t.detach().double().requires_grad_(t.requires_grad) for t in inputs]
    plainly(*copies)[1].square().sum().backward()
    for leaf, copy in zip(inputs, copies, strict=True):
        assert (leaf.grad is None) == (copy.grad is None)
        if leaf.grad is not None and copy.grad is not None:
            torch.testing.assert_close(leaf.grad.double(), copy.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gate_shape", [(2, 3, 7), (3, 1), (1,)])
@pytest.mark.parametrize("time", [7, 1, 0])
@pytest.mark.parametrize("packed", [False, True])
def test_nothing_that_is_returned_shares_memory(
    packed: bool, time: int, gate_shape: tuple[int, ...]
) -> None:
    """Neither with an argument, nor with a saved tensor that is written to, nor with one another."""
    gates = torch.rand([min(n, time) if n == 7 else n for n in gate_shape], requires_grad=True)
    tokens = torch.randn(2, 3, time, requires_grad=True)
    initial = torch.randn((2, 3, 2) if packed else (2, 3), requires_grad=True)
    bounds = torch.tensor([0, 0, time]) if packed else None
    run = partial(linear_scan, cu_seqlens=bounds, return_final_state=True)
    states, last = run(gates, tokens, initial)
    weights_of = torch.ones_like(states), torch.ones_like(last)
    grads = torch.autograd.grad((states, last), (gates, tokens, initial), weights_of)
    tensors = [gates, tokens, initial, states, last, *weights_of, *grads]
    storages = [t.untyped_storage().data_ptr() for t in tensors if t.untyped_storage().nbytes()]
    assert len(set(storages)) == len(storages)
    # A final state may be written to; states that the gradient of gates needs may not, unnoticed.
    states, last = run(gates, tokens, initial)
    last.detach().fill_(torch.nan)
    again = torch.autograd.grad(states, (gates, tokens, initial), weights_of[0], retain_graph=True)
    assert all(grad.isfinite().all() for grad in again)
    states.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(states, gates, weights_of[0])


def test_states_may_be_written_to_where_gates_want_no_gradient() -> None:
    gates, tokens = torch.rand(2, 5), torch.randn(2, 5, requires_grad=True)
    states = linear_scan(gates, tokens)
    weight = torch.randn(2, 5)
    (expected,) = torch.autograd.grad(states, tokens, weight, retain_graph=True)
    states.add_(1)
    assert torch.equal(torch.autograd.grad(states, tokens, weight)[0], expected)


# --- Bits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("gate_shape", [(4, 65, 513), (65, 1), (1,), (4, 1, 513)])
@pytest.mark.parametrize(("dim", "reverse", "packed"), [(-1, False, False), (1, True, True)])
def test_bits_do_not_depend_on_threads(
    gate_shape: tuple[int, ...], dtype: torch.dtype, dim: int, reverse: bool, packed: bool
) -> None:
    generator = torch.Generator().manual_seed(3)
    gates = torch.rand(gate_shape, generator=generator).to(dtype).requires_grad_()
    tokens = torch.randn(4, 65, 513, generator=generator).to(dtype).requires_grad_()
    bounds = torch.tensor([0, 1, 20, 20, tokens.shape[dim]]) if packed else None
    weight = torch.randn(tokens.shape, generator=generator).to(dtype)

    def outputs() -> list[Tensor]:
        run = partial(linear_scan, dim=dim, reverse=reverse, cu_seqlens=bounds)
        states, last = run(gates, tokens, return_final_state=True)
        return [states, last, *torch.autograd.grad(states, (gates, tokens), weight)]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = outputs()
        for threads in (2, 3, 8):
            torch.set_num_threads(threads)
            assert all(map(torch.equal, alone, outputs()))
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("gate_shape", [(2, 3, 9), (3, 1), (1,), (2, 1, 9)])
@pytest.mark.parametrize("bounds", [None, [0, 0, 4, 4, 9, 9]], ids=["", "packed"])
@pytest.mark.parametrize("initial", [False, True], ids=["", "initial"])
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_every_element_of_the_outputs_is_written(
    transposed: bool, initial: bool, bounds: list[int] | None, gate_shape: tuple[int, ...]
) -> None:
    """Uninitialised memory is full of NaN here."""
    assert torch.empty(3).isnan().all()
    gates = torch.rand(gate_shape, requires_grad=True)
    tokens = torch.randn(2, 3, 9).requires_grad_()
    if transposed:
        tokens = tokens.mT.contiguous().mT
    state = torch.randn(2, 3, 5) if bounds else torch.randn(2, 3)
    inputs = [gates, tokens, *([state.requires_grad_()] if initial else [])]
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    for reverse in (False, True):
        run = partial(linear_scan, reverse=reverse, cu_seqlens=cu_seqlens)
        found = run(*inputs, return_final_state=True)
        weights_of = [torch.randn_like(out) for out in found]
        for outputs, given_ in ((found, weights_of), (found[1:], weights_of[1:])):
            grads = torch.autograd.grad(outputs, inputs, given_, retain_graph=True)
            assert all(out.isfinite().all() for out in (*outputs, *grads))
