"""Derivatives of ``linear_scan`` in both modes, of any order, and what ``torch.func`` makes of it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from scan_registry import linear_scan

Oracle = Callable[..., tuple[Tensor, Tensor]]
Function = Callable[..., Any]

REAL, COMPLEX = torch.float64, torch.complex128
#: Shapes of gates, tokens and initial state (None: none), dim, bounds and whether in reverse.
CASES = {
    "plain": ((2, 4), (2, 4), None, -1, None, False),
    "columns": ((4, 2), (4, 2), (2,), 0, None, True),
    "decay per channel": ((2, 1), (2, 2, 3), (2, 2), -1, None, False),
    "one decay": ((1,), (2, 3), (2,), 0 - 1, None, True),
    "decay per step": ((1, 4), (2, 4), (1,), 1, None, False),
    "tokens broadcast": ((2, 3), (3,), None, -1, None, False),
    "packed": ((2, 5), (2, 5), (2, 4), -1, (0, 0, 2, 3, 5), False),
    "packed columns": ((5, 1), (5, 2), (3, 2), 0, (0, 2, 2, 5), True),
    "packed, one decay": ((1,), (4, 2), None, 0, (0, 3, 4), False),
    "one step": ((2, 1), (2, 1), (2,), 1, None, False),
}


def disc(*shape: int, dtype: torch.dtype = REAL) -> Tensor:
    """Random gates of |gate| ≤ 1."""
    if dtype.is_complex:
        return torch.polar(0.9 * torch.rand(shape, dtype=REAL), 6.3 * torch.rand(shape, dtype=REAL))
    return 1.8 * torch.rand(shape, dtype=dtype) - 0.9


def prepared(
    case: str, gates_dtype: torch.dtype = REAL, tokens_dtype: torch.dtype = REAL
) -> tuple[Function, list[Tensor]]:
    """The scan of a case, with its final state, and its inputs, which want gradients."""
    torch.manual_seed(len(case))
    of_gates, of_tokens, of_state, dim, bounds, reverse = CASES[case]
    options = {"dim": dim, "reverse": reverse, "return_final_state": True}
    if bounds is not None:
        options["cu_seqlens"] = torch.tensor(bounds)
    inputs = [disc(*of_gates, dtype=gates_dtype), torch.randn(of_tokens, dtype=tokens_dtype)]
    if of_state is not None:
        dtype = torch.promote_types(gates_dtype, tokens_dtype)
        inputs.append(torch.randn(of_state, dtype=dtype))
    return partial(linear_scan, **options), [t.requires_grad_() for t in inputs]


# --- Against finite differences ---------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [REAL, COMPLEX], ids=["real", "complex"])
def test_first_derivatives(case: str, dtype: torch.dtype) -> None:
    """In both modes; where the gradient of one output is undefined, too."""
    function, inputs = prepared(case, dtype, dtype)
    assert gradcheck(function, inputs, check_forward_ad=True)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [REAL, COMPLEX], ids=["real", "complex"])
def test_second_derivatives(case: str, dtype: torch.dtype) -> None:
    """Reverse over reverse, and forward over reverse."""
    function, inputs = prepared(case, dtype, dtype)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize(("gates", "tokens"), [(REAL, COMPLEX), (COMPLEX, REAL)], ids=str)
@pytest.mark.parametrize("case", ["plain", "decay per channel", "packed columns"])
def test_derivatives_of_mixes(case: str, gates: torch.dtype, tokens: torch.dtype) -> None:
    function, inputs = prepared(case, gates, tokens)
    assert gradcheck(function, inputs, check_forward_ad=True)
    assert gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [REAL, COMPLEX], ids=["real", "complex"])
def test_gradients_that_can_be_differentiated_are_the_same(case: str, dtype: torch.dtype) -> None:
    """They come from other operators than the kernels, and so do those of ``torch.func``."""
    function, inputs = prepared(case, dtype, dtype)
    outputs = function(*inputs)
    weights = tuple(torch.randn_like(out) for out in outputs)
    for used in (slice(0, 2), slice(0, 1), slice(1, 2)):
        of_loss = outputs[used], inputs, weights[used]
        grads = torch.autograd.grad(*of_loss, retain_graph=True)
        differentiable = torch.autograd.grad(*of_loss, create_graph=True)
        torch.testing.assert_close(differentiable, grads)
    pulled = torch.func.vjp(function, *(t.detach() for t in inputs))[1](weights)
    torch.testing.assert_close(pulled, torch.autograd.grad(outputs, inputs, weights))


@pytest.mark.parametrize("wanted", [0, 1, 2])
@pytest.mark.parametrize("case", ["columns", "packed columns", "decay per channel"])
def test_second_derivatives_in_one_input(case: str, wanted: int) -> None:
    function, inputs = prepared(case)
    for number, tensor in enumerate(inputs):
        tensor.requires_grad_(number == wanted)
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs, fast_mode=True)


def test_without_the_final_state() -> None:
    """The shortest way through the operator has a derivative of its own."""
    inputs = [t.requires_grad_() for t in (disc(2, 3, 4), torch.randn(2, 3, 4, dtype=REAL))]
    for dim in range(3):
        assert gradcheck(partial(linear_scan, dim=dim), inputs, check_forward_ad=True)
        function = partial(linear_scan, dim=dim)
        assert gradgradcheck(function, inputs, check_fwd_over_rev=True, fast_mode=True)


def test_the_backward_operator_is_differentiable() -> None:
    """In everything that it takes."""
    step = torch.ops.scan_registry.linear_scan_backward
    tensors = [disc(3, 1), *(torch.randn(2, 3, 4, dtype=REAL) for _ in range(2))]
    tensors += [torch.randn(2, 3, dtype=REAL) for _ in range(2)]
    inputs = [t.requires_grad_() for t in tensors]

    def function(*given: Tensor) -> Any:
        return step(*given, None, -1, False, "auto", [True, True, True])

    assert gradcheck(function, inputs)


@pytest.mark.parametrize("case", CASES)
def test_batches_of_gradients(case: str) -> None:
    """``is_grads_batched``, with which vectorised Jacobians are made."""
    function, inputs = prepared(case)
    assert gradcheck(function, inputs, check_batched_grad=True, fast_mode=True)


def test_vectorised_jacobian(plainly: Oracle) -> None:
    gates, tokens = disc(5), torch.randn(5, dtype=REAL)
    jacobian = partial(torch.autograd.functional.jacobian, inputs=gates, vectorize=True)
    expected = jacobian(lambda x: plainly(x, tokens)[0])
    for strategy in ("reverse-mode", "forward-mode"):
        found = jacobian(lambda x: linear_scan(x, tokens), strategy=strategy)
        torch.testing.assert_close(found, expected)


# --- Forward mode -----------------------------------------------------------------------------

SUBSETS = [subset for subset in product((False, True), repeat=3) if any(subset)]


@pytest.mark.parametrize("moving", SUBSETS, ids=str)
@pytest.mark.parametrize("case", ["columns", "packed columns", "decay per channel"])
def test_directional_derivatives(
    plainly: Oracle, case: str, moving: tuple[bool, bool, bool]
) -> None:
    """In some of the inputs, through ``torch.func`` and through dual numbers."""
    function, inputs = prepared(case)
    inputs = [t.detach() for t in inputs]
    chosen = [t for t, moves in zip(inputs, moving, strict=True) if moves]
    directions = [torch.randn_like(t) for t in chosen]

    def of_chosen(*values: Tensor, scan: Function = function) -> Any:
        given = iter(values)
        return scan(*(next(given) if m else t for t, m in zip(inputs, moving, strict=True)))

    options = {k: v for k, v in function.keywords.items() if k != "return_final_state"}
    by_hand = partial(of_chosen, scan=partial(plainly, **options))
    outputs, tangents = torch.func.jvp(of_chosen, tuple(chosen), tuple(directions))
    expected = torch.func.jvp(by_hand, tuple(chosen), tuple(directions))
    torch.testing.assert_close((outputs, tangents), expected)
    with forward_ad.dual_level():
        duals = map(forward_ad.make_dual, chosen, directions)
        unpacked = [forward_ad.unpack_dual(out) for out in of_chosen(*duals)]
    torch.testing.assert_close(tuple(dual.primal for dual in unpacked), outputs)
    torch.testing.assert_close(tuple(dual.tangent for dual in unpacked), tangents)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_tangents_have_the_dtypes_of_outputs(dtype: torch.dtype) -> None:
    gates = torch.rand(2, 5).to(dtype)
    pair = (gates, gates)

    def function(*inputs: Tensor) -> Any:
        return linear_scan(*inputs, return_final_state=True)

    outputs, tangents = torch.func.jvp(function, pair, pair)
    assert [t.dtype for t in tangents] == [out.dtype for out in outputs]
    exact = [t.to(torch.complex128 if dtype.is_complex else REAL) for t in pair]
    expected = torch.func.jvp(function, tuple(exact), tuple(exact))[1]
    for found, ref in zip(tangents, expected, strict=True):
        torch.testing.assert_close(found.to(ref.dtype), ref, rtol=2e-2, atol=2e-2)


# --- torch.func -------------------------------------------------------------------------------


def test_gradients_as_functions(plainly: Oracle) -> None:
    gates, tokens, state = (
        disc(3, 1),
        torch.randn(2, 3, 4, dtype=REAL),
        torch.randn(2, 3, dtype=REAL),
    )

    def loss(scan: Function, *inputs: Tensor) -> Tensor:
        states, last = scan(*inputs)
        return states.square().sum() + last.sin().sum()

    ours = partial(loss, partial(linear_scan, return_final_state=True))
    by_hand = partial(loss, plainly)
    inputs = gates, tokens, state
    everything = (0, 1, 2)
    for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        found = transform(ours, argnums=everything)(*inputs)
        torch.testing.assert_close(found, transform(by_hand, argnums=everything)(*inputs))
    leaves = [t.clone().requires_grad_() for t in inputs]
    expected = torch.autograd.grad(ours(*leaves), leaves)
    torch.testing.assert_close(torch.func.grad(ours, argnums=everything)(*inputs), expected)


def test_derivatives_of_every_order(plainly: Oracle) -> None:
    """The fourth, each transform over the ones before it."""
    tokens = torch.randn(6, dtype=REAL)
    grad, jacfwd, jacrev = torch.func.grad, torch.func.jacfwd, torch.func.jacrev
    for transforms in ((grad, grad, grad, grad), (jacfwd, jacrev, jacfwd, grad)):
        found: Function = lambda x: linear_scan(x, tokens).square().sum()  # noqa: E731
        expected: Function = lambda x: plainly(x, tokens)[0].square().sum()  # noqa: E731
        for transform in reversed(transforms):
            found, expected = transform(found), transform(expected)
        decay = torch.tensor(0.7, dtype=REAL)
        torch.testing.assert_close(found(decay), expected(decay))


def test_the_hessian_in_the_initial_state_is_that_of_a_linear_function() -> None:
    gates, tokens = disc(4), torch.randn(4, dtype=REAL)

    def last(state: Tensor) -> Tensor:
        return linear_scan(gates, tokens, state, return_final_state=True)[1]

    slope = torch.func.jacrev(last)(torch.tensor(0.3, dtype=REAL))
    torch.testing.assert_close(slope, gates.prod())
    curvature = torch.func.hessian(last)(torch.tensor(0.3, dtype=REAL))
    assert float(curvature) == 0.0


# --- vmap -------------------------------------------------------------------------------------

PLACES = [
    (0, 0, 0),
    (1, 0, None),
    (None, 0, None),
    (0, None, None),
    (None, None, 0),
    (-1, 1, 1),
    (None, 2, -1),
]


def mapped(
    function: Function, in_dims: tuple[int | None, ...], tensors: list[Tensor], count: int
) -> Any:
    """What ``vmap`` is to give: the function of one slice after the other, stacked."""
    outputs = [
        function(
            *(
                t if place is None else t.select(place, index)
                for t, place in zip(tensors, in_dims, strict=True)
            )
        )
        for index in range(count)
    ]
    return tuple(torch.stack(each) for each in zip(*outputs, strict=True))


@pytest.mark.parametrize("in_dims", PLACES, ids=str)
@pytest.mark.parametrize(
    ("of_gates", "dim", "bounds", "reverse"),
    [
        ((2, 3, 4), -1, None, False),
        ((2, 3, 4), 0, None, True),
        ((3, 1), 2, None, True),
        ((1,), 1, (0, 1, 1, 3), False),
        ((2, 3, 4), -1, (0, 4, 4), True),
    ],
)
def test_vmap(
    of_gates: tuple[int, ...],
    dim: int,
    bounds: tuple[int, ...] | None,
    reverse: bool,
    in_dims: tuple[int | None, ...],
) -> None:
    """Over any of the tensors at any place; its derivatives are those of the slices."""
    torch.manual_seed(0)
    shape, count = [2, 3, 4], 3
    of_state = [*shape]
    of_state[dim % 3 : dim % 3 + 1] = [] if bounds is None else [len(bounds) - 1]
    whole = []
    for given_, place in zip((of_gates, shape, of_state), in_dims, strict=True):
        slices = [disc(*given_) for _ in range(count)]
        at = None if place is None else min(place, len(given_))
        whole.append(slices[0] if at is None else torch.stack(slices, at))
    places = tuple(
        None if p is None else min(p, t.dim() - 1) for p, t in zip(in_dims, whole, strict=True)
    )
    cu_seqlens = None if bounds is None else torch.tensor(bounds)

    def function(*tensors: Tensor) -> Any:
        options = {"dim": dim, "reverse": reverse, "cu_seqlens": cu_seqlens}
        return linear_scan(*tensors, **options, return_final_state=True)

    by_vmap = torch.func.vmap(function, in_dims=places)(*whole)
    torch.testing.assert_close(by_vmap, mapped(function, places, whole, count))

    def loss(*tensors: Tensor) -> tuple[Tensor]:
        return (sum(out.square().sum() for out in function(*tensors)),)  # type: ignore[return-value]

    leaves = [t.requires_grad_() for t in whole]
    expected = torch.autograd.grad(mapped(loss, places, leaves, count)[0].sum(), leaves)
    outputs = torch.func.vmap(function, in_dims=places)(*leaves)
    found = torch.autograd.grad(sum(out.square().sum() for out in outputs), leaves)
    torch.testing.assert_close(found, expected)


def test_gradients_per_sample() -> None:
    """``vmap`` of ``grad``, with gates that all samples share, and ``grad`` of ``vmap``."""
    gates, tokens = disc(3, 1), torch.randn(5, 3, 4, dtype=REAL)

    def loss(gates: Tensor, tokens: Tensor) -> Tensor:
        return linear_scan(gates, tokens).square().sum()

    both = (0, 1)
    per_sample = torch.func.vmap(torch.func.grad(loss, argnums=both), in_dims=(None, 0))
    found = per_sample(gates, tokens)
    one_by_one = [torch.func.grad(loss, argnums=both)(gates, each) for each in tokens]
    torch.testing.assert_close(found, tuple(map(torch.stack, zip(*one_by_one, strict=True))))
    summed = torch.func.grad(lambda g: torch.func.vmap(partial(loss, g))(tokens).sum())(gates)
    torch.testing.assert_close(summed, found[0].sum(0))


def test_vmap_within_vmap() -> None:
    gates, tokens = disc(2, 3, 4, 5), torch.randn(3, 4, 5, dtype=REAL)
    inner = torch.func.vmap(linear_scan, in_dims=(0, 0))
    outer = torch.func.vmap(inner, in_dims=(0, None))
    torch.testing.assert_close(outer(gates, tokens), linear_scan(gates, tokens.expand(2, 3, 4, 5)))
    in_pieces = torch.func.vmap(lambda g: linear_scan(g, tokens), chunk_size=1)
    torch.testing.assert_close(in_pieces(gates), linear_scan(gates, tokens.expand(2, 3, 4, 5)))


@pytest.mark.parametrize("reverse", [False, True])
def test_vmap_over_bounds(reverse: bool) -> None:
    gates, tokens, initial = disc(3, 4), torch.randn(2, 3, 4, 5, dtype=REAL), disc(2, 3, 2, 5)
    bounds = torch.tensor([[0, 2, 4], [0, 0, 4]])

    def loss(gates: Tensor, tokens: Tensor, initial: Tensor, bounds: Tensor) -> Tensor:
        states, last = linear_scan(
            *(gates.unsqueeze(-1), tokens, initial),
            dim=1,
            reverse=reverse,
            cu_seqlens=bounds,
            return_final_state=True,
        )
        return states.sin().sum() + last.cos().sum()

    for function in (loss, torch.func.grad(loss, argnums=(0, 1, 2))):
        found = torch.func.vmap(function, in_dims=(None, 0, 0, 0))(gates, tokens, initial, bounds)
        each = [function(gates, *one) for one in zip(tokens, initial, bounds, strict=True)]
        expected = (
            tuple(map(torch.stack, zip(*each, strict=True)))
            if isinstance(each[0], tuple)
            else torch.stack(each)
        )
        torch.testing.assert_close(found, expected)


def test_vmap_with_bounds_that_all_share() -> None:
    bounds = torch.tensor([[0, 2, 5], [0, 3, 5]])
    tokens = torch.randn(5, dtype=REAL)
    together = torch.func.vmap(lambda t: linear_scan(t, t, cu_seqlens=bounds[0]))
    assert together(tokens.expand(3, 5)).shape == (3, 5)
    with pytest.raises(ValueError, match="cu_seqlens runs from 0 to 4"):
        torch.func.vmap(lambda t: linear_scan(t, t, cu_seqlens=torch.tensor([0, 4])))(
            tokens.expand(3, 5)
        )


def test_one_graph_is_walked_by_several_threads() -> None:
    gates, tokens = (t.requires_grad_() for t in (disc(4, 64), torch.randn(4, 64, dtype=REAL)))
    states, weight = linear_scan(gates, tokens), torch.randn(4, 64, dtype=REAL)
    expected = torch.autograd.grad(states, (gates, tokens), weight, retain_graph=True)
    with ThreadPoolExecutor(4) as pool:
        walks = [
            pool.submit(torch.autograd.grad, states, (gates, tokens), weight, retain_graph=True)
            for _ in range(400)
        ]
    for walk in walks:
        torch.testing.assert_close(walk.result(), expected, rtol=0, atol=0)


def test_a_backward_pass_that_failed_fails_alike_again() -> None:
    gates, tokens = disc(2, 4), torch.randn(2, 4, dtype=REAL, requires_grad=True)
    states = linear_scan(gates.requires_grad_(), tokens)
    with torch.no_grad():
        gates.zero_()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            states.sum().backward(retain_graph=True)
