"""``ssd_scan`` in what torch does with operators: transforms, compilation, meta tensors, counting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ssd_problems import NAMES, draw
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, hessian, jacrev, jvp, vmap
from torch.utils.flop_counter import FlopCounterMode

from scan_registry import StateRows, ssd_scan
from scan_registry.kernels.ssd_scan import reference
from scan_registry.kernels.ssd_scan.op.arguments import normalised

EVERY = tuple(range(len(NAMES)))
LIMIT = (0.1, 2.0)
BOUNDS, NUMBERS = torch.tensor([0, 3, 3, 7]), torch.tensor([[0, 0, 1, 1, 1, 1, 2]])


def drawn(dtype: torch.dtype = torch.float64, sequences: int = 0) -> tuple[Tensor, ...]:
    return tuple(draw(1, 7, 2, 3, 1, 2, sequences, dtype).values())


def run(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    options = {"chunk_size": 4, **options}
    return ssd_scan(*tensors[:8], True, LIMIT, tensors[8], return_final_state=True, **options)


def right(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return reference.forward(*tensors[:8], True, LIMIT, tensors[8], **options)


def total(function: Any) -> Any:
    def summed(*tensors: Tensor) -> Tensor:
        out, final = function(*tensors)
        return out.sin().sum() + final.cos().sum()  # type: ignore[no-any-return]

    return summed


# --- torch.func -------------------------------------------------------------------------------


def test_gradients_of_transforms() -> None:
    tensors = drawn()
    gradients = grad(total(run), EVERY)(*tensors)
    leaves = [t.clone().requires_grad_() for t in tensors]
    expected = torch.autograd.grad(total(right)(*leaves), leaves)
    torch.testing.assert_close(gradients, tuple(expected))


def test_forward_mode_and_what_is_mixed_of_both() -> None:
    tensors = drawn()
    tangents = tuple(torch.randn_like(t) for t in tensors)
    results, expected = (jvp(function, tensors, tangents) for function in (run, right))
    torch.testing.assert_close(results, expected)

    def of_dt(function: Any) -> Any:
        return lambda dt: total(function)(tensors[0], dt, *tensors[2:])

    curvature, wanted = (hessian(of_dt(function))(tensors[1]) for function in (run, right))
    torch.testing.assert_close(curvature, wanted)


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_maps(packed: bool) -> None:
    tensors = drawn(sequences=3 if packed else 0)
    options = {"cu_seqlens": BOUNDS, "seq_idx": NUMBERS} if packed else {}
    several = torch.stack([tensors[0], -tensors[0], tensors[0] + 1])
    results = vmap(lambda x: run(x, *tensors[1:], **options))(several)
    expected = [right(x, *tensors[1:], **options) for x in several]
    for place in range(2):
        torch.testing.assert_close(results[place], torch.stack([row[place] for row in expected]))
    per_sample = vmap(grad(lambda x: run(x, *tensors[1:], **options)[0].sin().sum()))(several)
    one = grad(lambda x: right(x, *tensors[1:], **options)[0].sin().sum())(several[2])
    torch.testing.assert_close(per_sample[2], one)


def test_rows_of_a_jacobian_at_once() -> None:
    tensors = drawn()

    def of_B(function: Any) -> Any:
        return lambda B: function(*tensors[:3], B, *tensors[4:])[0]

    torch.testing.assert_close(jacrev(of_B(run))(tensors[3]), jacrev(of_B(right))(tensors[3]))
    leaf = tensors[3].clone().requires_grad_()
    out = of_B(run)(leaf)
    rows = torch.eye(out.numel(), dtype=out.dtype).view(-1, *out.shape)
    (batched,) = torch.autograd.grad(out, leaf, rows, is_grads_batched=True)
    jacobian = jacrev(of_B(right))(tensors[3])
    torch.testing.assert_close(batched.view(*out.shape, *leaf.shape), jacobian)


def test_penalties_of_gradients() -> None:
    """A derivative of a derivative, through the first one's kernels."""
    penalties = []
    for function in (run, right):
        leaves = [t.clone().requires_grad_() for t in drawn()]
        gradients = torch.autograd.grad(total(function)(*leaves), leaves, create_graph=True)
        penalty = sum((g.square().sum() for g in gradients), torch.zeros(()))
        penalties.append(torch.autograd.grad(penalty, leaves))
    torch.testing.assert_close(*penalties)


# --- Compilation ------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True], ids=["", "dynamic"])
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_one_graph(dynamic: bool, packed: bool) -> None:
    torch._dynamo.reset()
    options = {"cu_seqlens": BOUNDS, "seq_idx": NUMBERS} if packed else {}

    def function(*tensors: Tensor) -> Tensor:
        return total(lambda *t: run(*t, **options))(*tensors)  # type: ignore[no-any-return]

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    results, expected = list[Tensor](), list[Tensor]()
    for fn, values in ((compiled, results), (function, expected)):
        leaves = [t.requires_grad_() for t in drawn(torch.float32, 3 if packed else 0)]
        value = fn(*leaves)
        values += [value, *torch.autograd.grad(value, leaves)]
    torch.testing.assert_close(results, expected)


def test_one_graph_without_options() -> None:
    torch._dynamo.reset()
    tensors = drawn(torch.bfloat16)[:5]
    compiled = torch.compile(ssd_scan, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors), ssd_scan(*tensors))


@pytest.mark.parametrize("final", [False, True], ids=["", "final"])
def test_the_operator_is_as_torch_wants_it(final: bool) -> None:
    tensors = [t.requires_grad_() for t in drawn(torch.float32)]
    arguments, options = normalised(*tensors, None, None, True, LIMIT, 4, final, "auto")
    operators = torch.ops.scan_registry
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        operators.ssd_scan.default, (*arguments, *options, True), test_utils=utils
    )
    out, last, ungated = operators.ssd_scan(*arguments, *options, True)
    grads = torch.randn_like(out).mT.contiguous().mT, torch.randn_like(last) if final else None
    saved = [None if t is None else t.detach() for t in (*arguments, ungated)]
    back = (*saved, *grads, *options, [True] * 9)
    torch.library.opcheck(operators.ssd_scan_backward.default, back, test_utils=utils)


def test_shapes_on_meta() -> None:
    tensors = [t.to("meta") for t in drawn(torch.bfloat16, 3)]
    out, final = run(*tensors, cu_seqlens=BOUNDS.to("meta"))
    assert (out.shape, out.dtype) == (tensors[0].shape, torch.bfloat16)
    assert (final.shape, final.dtype) == (tensors[8].shape, torch.float32)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_what_is_gated_is_returned_for_kernels_alone(backend: str) -> None:
    """Of tensors that stand for some on a GPU, when a call is traced."""
    real = drawn(torch.bfloat16)
    with FakeTensorMode():
        tensors = [torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in real]
        arguments, options = normalised(*tensors, None, None, True, LIMIT, None, False, backend)
        for z, training in ((arguments.z, True), (arguments.z, False), (None, True)):
            called = *arguments._replace(z=z), *options, training
            ungated = torch.ops.scan_registry.ssd_scan(*called)[2]
            kept = z is not None and training and backend == "auto"
            assert ungated.shape == (arguments.x.shape if kept else (0,))


def test_maps_on_meta() -> None:
    tensors = [t.to("meta") for t in drawn(torch.bfloat16)]
    several = torch.stack([tensors[0]] * 3)
    out, final = vmap(lambda x: run(x, *tensors[1:]))(several)
    assert (out.shape, final.shape) == (several.shape, (3, *tensors[8].shape))


def test_products_are_counted() -> None:
    problem = draw(2, 128, 4, 8, 2, 16, dtype=torch.float32)
    problem["x"].requires_grad_()
    with FlopCounterMode(display=False) as counter:
        ssd_scan(**problem).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    forward = 2 * 2 * 128 * (2 * 64 * 16 + 4 * 64 * 8 + 2 * 4 * 8 * 16)
    backward = 2 * 2 * 128 * (3 * 2 * 64 * 16 + 2 * 4 * 64 * 8 + 5 * 4 * 8 * 16)
    assert counts[torch.ops.scan_registry.ssd_scan] == forward
    assert counts[torch.ops.scan_registry.ssd_scan_backward] == backward


def test_one_tensor_as_several_arguments() -> None:
    leaf = torch.randn(2, 9, 3, 4, dtype=torch.float64, requires_grad=True)
    dt, A = torch.rand(2, 9, 3, dtype=torch.float64), -torch.ones(3, dtype=torch.float64)

    def of(function: Any) -> Tensor:
        out = function(leaf, dt, A, leaf, leaf)
        (gradient,) = torch.autograd.grad(out.sin().sum(), leaf)
        return gradient

    torch.testing.assert_close(of(ssd_scan), of(lambda *t: reference.forward(*t)[0]))


def test_compiles_where_equal_sizes_are_symbolic_and_known() -> None:
    """Sequences have a symbolic number in the inputs, and a known one in the rows of a pool."""
    x, dt, projection = torch.randn(2, 2, 2, 4), torch.rand(2, 2, 2), torch.randn(2, 2, 1, 8)
    A, pool = -torch.rand(2), torch.randn(8, 2, 4, 8)

    def run(pool: Tensor, *tensors: Tensor) -> Tensor:
        rows = StateRows(pool, torch.tensor([3, -1]))
        out: Tensor = ssd_scan(*tensors, initial_state=rows)
        return out

    copy, tensors = pool.clone(), (x, dt, A, projection, projection)
    compiled = torch.compile(run, backend="eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(copy, *tensors), run(pool, *tensors))
    torch.testing.assert_close(copy, pool)
