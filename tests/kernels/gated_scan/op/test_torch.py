"""``gated_scan`` in what torch does with operators: transforms, compilation, training, memory, threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from gating import FORMULAS, drawn, loop
from torch import Tensor
from torch.func import grad, hessian, jacrev, jvp, vmap

from scan_registry import gated_scan, hgrn, min_gru, require, rg_lru
from scan_registry.kernels.gated_scan.kinds import KINDS

OPERATORS = torch.ops.scan_registry
RESET = torch.tensor([[False, True, False, False, False], [True, False, False, True, False]])


def tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Three sequences, values of channels, and the initial state."""
    call = drawn("rg_lru", (2, 3, 5), dtype, initial=True)
    every = *call.tensors, call.options["initial_state"]
    return tuple(t.detach() for t in every)


def run(*given: Tensor) -> tuple[Tensor, Tensor]:
    return rg_lru(*given[:4], RESET, initial_state=given[4], return_final_state=True)


def right(*given: Tensor) -> tuple[Tensor, Tensor]:
    return loop("rg_lru", *given[:4], reset=RESET, initial_state=given[4])


def total(function: Any) -> Any:
    def summed(*given: Tensor) -> Tensor:
        states, last = function(*given)
        found: Tensor = states.sin().sum() + last.cos().sum()
        return found

    return summed


# --- torch.func -------------------------------------------------------------------------------


def test_gradients_of_transforms() -> None:
    given = tensors()
    found = grad(total(run), (0, 1, 2, 3, 4))(*given)
    leaves = [t.clone().requires_grad_() for t in given]
    torch.testing.assert_close(found, torch.autograd.grad(total(right)(*leaves), leaves))


def test_forward_mode_and_both_mixed() -> None:
    given = tensors()
    tangents = tuple(torch.randn_like(t) for t in given)
    found, expected = (jvp(function, given, tangents) for function in (run, right))
    torch.testing.assert_close(found, expected)

    def of_gate(function: Any) -> Any:
        return lambda gate: total(function)(given[0], gate, *given[2:])

    curvature, wanted = (hessian(of_gate(function))(given[1]) for function in (run, right))
    torch.testing.assert_close(curvature, wanted)


def test_maps() -> None:
    given = tensors()
    several = torch.stack([given[0], -given[0], given[0] + 1])
    found = vmap(lambda x: run(x, *given[1:]))(several)
    for place in range(2):
        expected = [right(x, *given[1:])[place] for x in several]
        torch.testing.assert_close(found[place], torch.stack(expected))
    values = torch.stack([given[3], given[3] + 1])
    by_value = vmap(lambda a: run(*given[:3], a, given[4])[0])(values)
    torch.testing.assert_close(by_value[1], right(*given[:3], values[1], given[4])[0])
    per_sample = vmap(grad(lambda x: total(run)(x, *given[1:])))(several)
    one = grad(lambda x: total(right)(x, *given[1:]))(several[2])
    torch.testing.assert_close(per_sample[2], one)


@pytest.mark.parametrize("dim", [-1, 1])
def test_maps_over_resets(dim: int) -> None:
    gate, hidden = torch.randn(2, 4, 2, 5, 5, dtype=torch.float64)
    resets = torch.rand(4, 2, 5) < 0.4
    bounds = torch.tensor([[0, 2, 5], [0, 0, 5], [0, 5, 5], [0, 1, 5]])

    def loss(function: Any) -> Any:
        def summed(gate: Tensor, hidden: Tensor, reset: Tensor, bounds: Tensor) -> Tensor:
            made = function(
                "min_gru", gate, hidden, reset=reset, cu_seqlens=bounds, dim=dim, reverse=True
            )
            found: Tensor = (made[0] if isinstance(made, tuple) else made).sin().sum()
            return found

        return summed

    found = vmap(grad(loss(gated_scan), (0, 1)))(gate, hidden, resets, bounds)
    for number, each in enumerate(zip(gate, hidden, resets, bounds, strict=True)):
        expected = grad(loss(gated_scan), (0, 1))(*each)
        torch.testing.assert_close(tuple(f[number] for f in found), expected)
        leaves = [t.clone().requires_grad_() for t in each[:2]]
        made = loss(loop)(*leaves, *each[2:])
        torch.testing.assert_close(expected, torch.autograd.grad(made, leaves))
    shared = vmap(lambda reset: min_gru(gate[0], hidden[0], reset=reset, dim=dim))(resets)
    for number, reset in enumerate(resets):
        expected = loop("min_gru", gate[0], hidden[0], reset=reset, dim=dim)[0]
        torch.testing.assert_close(shared[number], expected)


def test_rows_of_a_jacobian_at_once() -> None:
    given = tensors()

    def of_gate(function: Any) -> Any:
        return lambda gate: function(given[0], gate, *given[2:])[0]

    expected = jacrev(of_gate(right))(given[1])
    torch.testing.assert_close(jacrev(of_gate(run))(given[1]), expected)
    leaf = given[1].clone().requires_grad_()
    states = of_gate(run)(leaf)
    rows = torch.eye(states.numel(), dtype=states.dtype).view(-1, *states.shape)
    (batched,) = torch.autograd.grad(states, leaf, rows, is_grads_batched=True)
    torch.testing.assert_close(batched.view(*states.shape, *leaf.shape), expected)


# --- Compilation ------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True], ids=["", "dynamic"])
def test_one_graph(dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(total(run), fullgraph=True, backend="aot_eager", dynamic=dynamic)
    found, expected = [], []
    for function, results in ((compiled, found), (total(run), expected)):
        leaves = [t.requires_grad_() for t in tensors(torch.float32)]
        torch.manual_seed(1)
        leaves = [torch.randn_like(t).requires_grad_() for t in leaves]
        value = function(*leaves)
        results += [value, *torch.autograd.grad(value, leaves)]
    assert all(x.any() for x in found)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["linear", "hgrn"])  # without values of channels and with them
def test_one_graph_of_packed_sequences(kind: str) -> None:
    torch._dynamo.reset()
    call = drawn(kind, dtype=torch.float32, dim=1, packed=True, initial=True, reverse=True)

    def of(*leaves: Tensor) -> Tensor:
        return gated_scan(kind, *leaves, **call.options)

    compiled = torch.compile(of, fullgraph=True, backend="aot_eager")
    results = []
    for function in (compiled, of):
        made = function(*call.tensors)
        results.append([made, *torch.autograd.grad(made.sin().sum(), call.leaves)])
    torch.testing.assert_close(*results)


def test_one_graph_of_transforms() -> None:
    """Of gradients within maps, and of forward mode."""
    gate, hidden = torch.randn(2, 3, 2, 4, 5)

    def loss(gate: Tensor, hidden: Tensor) -> Tensor:
        return min_gru(gate, hidden).sin().sum()

    def tangent(gate: Tensor, hidden: Tensor) -> Tensor:
        found: Tensor = jvp(loss, (gate, hidden), (hidden, gate))[1]
        return found

    for function in (vmap(grad(loss, (0, 1))), vmap(tangent)):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(gate, hidden), function(gate, hidden))


def test_one_graph_of_a_bound_that_is_a_number() -> None:
    torch._dynamo.reset()
    x = torch.randn(2, 3, 5)
    compiled = torch.compile(
        lambda x: hgrn(x, x, 0.5), fullgraph=True, backend="aot_eager", dynamic=True
    )
    torch.testing.assert_close(compiled(x), hgrn(x, x, 0.5))


def test_compiled_autograd_without_a_break() -> None:
    from torch._dynamo import compiled_autograd

    given = [t.requires_grad_() for t in tensors()]
    expected = torch.autograd.grad(total(run)(*given), given)
    value = total(run)(*given)
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):  # type: ignore[no-untyped-call]
        value.backward()
    torch.testing.assert_close([t.grad for t in given], [*expected])


@pytest.mark.parametrize(
    ("training", "channel_last"), [(False, True), (True, False)], ids=["", "training"]
)
def test_the_operator_is_as_torch_wants_it(training: bool, channel_last: bool) -> None:
    *sequences, values, initial = tensors()
    if channel_last:
        sequences = [x.mT.contiguous().mT for x in sequences]
    sequences, (values, initial) = (
        [t.requires_grad_(training) for t in each] for each in (sequences, (values, initial))
    )
    for reset, bounds, final in ((RESET, None, True), (None, torch.tensor([0, 2, 5]), False)):
        before = initial if bounds is None else None
        torch.library.opcheck(
            OPERATORS.gated_scan.default,
            ("rg_lru", sequences, [values], reset, before, bounds, -1, False, final, "auto"),
        )


def test_the_backward_operator_is_as_torch_wants_it() -> None:
    *sequences, values, initial = tensors()
    states, last = run(*sequences, values, initial)
    weights = torch.randn_like(states), torch.randn_like(last)
    small = "test_schema", "test_faketensor"
    for grads, wanted, tests in (
        (weights, [True] * 5, (*small, "test_autograd_registration", "test_aot_dispatch_dynamic")),
        ((weights[0], None), [True, False, True, False, True], small),
        ((None, weights[1]), [False, True, False, True, False], small),
    ):
        given = sequences, [values], RESET, initial, None, states, *grads, -1, False, "auto", wanted
        torch.library.opcheck(
            OPERATORS.gated_scan_backward.default, ("rg_lru", *given), test_utils=tests
        )


def test_tensors_on_meta() -> None:
    given = [t.to("meta").requires_grad_() for t in tensors(torch.bfloat16)]
    states, last = rg_lru(
        *given[:4], RESET.to("meta"), initial_state=given[4], return_final_state=True
    )
    assert (states.shape, states.dtype) == ((2, 3, 5), torch.bfloat16)
    assert (last.shape, last.dtype) == ((2, 3), torch.float32)
    (states.sum() + last.sum()).backward()
    for t in given:
        assert t.grad is not None
        assert (t.grad.shape, t.grad.dtype) == (t.shape, t.dtype)


def test_second_derivatives_on_meta() -> None:
    given = [t.to("meta").requires_grad_() for t in tensors(torch.float32)]
    states = rg_lru(*given[:4], RESET.to("meta"), initial_state=given[4])
    first = torch.autograd.grad(states.sum(), given, create_graph=True)
    second = torch.autograd.grad(sum(g.sum() for g in first), given[:4])
    assert [g.shape for g in second] == [t.shape for t in given[:4]]


def test_fake_tensors() -> None:
    """Of the CPU, with gradients; of a GPU, which this torch may not be built for."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        for device, wanted in (("cpu", True), ("cuda", False)):
            x = torch.empty(2, 5, 3, device=device, dtype=torch.float16, requires_grad=wanted)
            reset = torch.empty(2, 5, device=device, dtype=torch.bool)
            states, last = min_gru(x, x, reset=reset, dim=1, return_final_state=True)
            assert (states.device.type, states.stride()) == (device, (15, 3, 1))
            assert (last.device.type, last.dtype) == (device, torch.float32)
            if wanted:
                (grad,) = torch.autograd.grad(states.sum(), x)
                assert grad.stride() == x.stride()


# --- As users work ----------------------------------------------------------------------------


def test_autocast_changes_nothing() -> None:
    """Everything is computed in float32, or wider, whatever autocast would have; results have the sequences' dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        given = [t.requires_grad_() for t in tensors(dtype)]
        plain = run(*given)
        expected = torch.autograd.grad(plain[0].sum(), given)
        with torch.autocast("cpu", torch.bfloat16):
            found = run(*given)
            gradients = torch.autograd.grad(found[0].sum(), given)
        assert [x.dtype for x in found] == [dtype, torch.float32]
        torch.testing.assert_close(found, plain, rtol=0, atol=0)
        torch.testing.assert_close(gradients, expected, rtol=0, atol=0)


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_inputs_and_states_are_all_that_is_saved(
    kind: str, dtype: torch.dtype, resets: bool
) -> None:
    """Not gates and tokens in float32, nor what they are made by."""
    call = drawn(kind, (2, 4, 64), dtype, resets=resets, initial=True)
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        states = gated_scan(kind, *call.tensors, **call.options)
    size = 2 * 4 * 64
    sequences = (FORMULAS[kind][0] + 1) * size * dtype.itemsize
    others = 4 * 4 * FORMULAS[kind][1] + 4 * 2 * 4 + (2 * 64 if resets else 0)
    assert sum(saved.values()) == sequences + others
    states.sum().backward()
    assert all(leaf.grad is not None for leaf in call.leaves)


def test_nothing_is_saved_without_derivatives() -> None:
    given = tensors()
    states = run(*given)[0]
    assert not states.requires_grad
    leaf = given[0].requires_grad_()
    with torch.no_grad():
        assert not run(leaf, *given[1:])[0].requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(run(leaf, *given[1:])[0], states)


def test_inputs_stay_as_they_are_and_changes_are_noticed() -> None:
    given = tensors()
    before = [t.clone() for t in given]
    leaves = [t.requires_grad_() for t in given]
    states, _ = run(*leaves)
    torch.testing.assert_close([t.detach() for t in leaves], before, rtol=0, atol=0)
    with torch.no_grad():
        leaves[1].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        states.sum().backward()


def test_the_final_state_keeps_no_states() -> None:
    """It is no view of them."""
    x = torch.randn(2, 3, 50)
    for options in ({}, {"reset": torch.rand(2, 50) < 0.2}):
        states, last = min_gru(x, x, return_final_state=True, **options)  # type: ignore[arg-type]
        assert last.untyped_storage().nbytes() == 4 * 6
        torch.testing.assert_close(last, states[..., -1])


def test_steps_of_an_optimizer() -> None:
    """A recurrence that learns what another one does."""
    given = list(tensors(torch.float32))
    wanted = run(*given)[0]
    learnt = [t + 0.5 for t in given]
    parameters = [t.requires_grad_() for t in learnt]
    optimizer = torch.optim.Adam(parameters, lr=0.05)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (run(*parameters)[0] - wanted).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 20


def test_threads() -> None:
    given = [t.requires_grad_() for t in tensors(torch.float32)]
    value = total(run)(*given)
    expected = torch.autograd.grad(value, given)
    barrier = threading.Barrier(4)

    def work(_: int) -> Any:
        barrier.wait()
        return [torch.autograd.grad(total(run)(*given), given) for _ in range(10)]

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(work, range(4)):
            for each in found:
                torch.testing.assert_close(each, expected, rtol=0, atol=0)


def test_checkpointing_and_hooks_of_saved_tensors() -> None:
    from torch.utils.checkpoint import checkpoint

    leaves = [t.requires_grad_() for t in tensors()]
    expected = torch.autograd.grad(total(right)(*leaves), leaves)
    value = checkpoint(total(run), *leaves, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(value, leaves), expected)
    with torch.autograd.graph.save_on_cpu():
        value = total(run)(*leaves)
    torch.testing.assert_close(torch.autograd.grad(value, leaves), expected)


def test_plain_torch_may_be_asked_for() -> None:
    given = tensors()
    with require("reference"):
        torch.testing.assert_close(run(*given), right(*given))
