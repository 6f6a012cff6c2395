"""``selective_scan`` in what torch does with operators: transforms, compilation, training, threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacrev, jvp, vmap

from scan_registry import selective_scan
from scan_registry.kernels.selective_scan import reference

NAMES = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state")


def drawn(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    torch.manual_seed(0)
    sizes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("u", "delta", "z"), (2, 4, 5)),
        "B": (2, 2, 3, 5),
        "C": (2, 3, 5),
        **dict.fromkeys(("D", "delta_bias"), (4,)),
        "initial_state": (2, 4, 3),
    }
    given = {name: torch.randn(size, dtype=dtype) for name, size in sizes.items()}
    given["A"] = -torch.rand(4, 3, dtype=dtype)
    return {name: given[name] for name in NAMES}


def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
    return selective_scan(
        *tensors[:8], delta_softplus=True, initial_state=tensors[8], return_final_state=True
    )


def right(*tensors: Tensor) -> tuple[Tensor, Tensor]:
    return reference.forward(*tensors[:8], True, tensors[8])


def total(function: Any) -> Any:
    def summed(*tensors: Tensor) -> Tensor:
        out, last = function(*tensors)
        found: Tensor = out.sin().sum() + last.cos().sum()
        return found

    return summed


EVERY = tuple(range(len(NAMES)))


# --- torch.func -------------------------------------------------------------------------------


def test_gradients_of_transforms() -> None:
    tensors = tuple(drawn().values())
    found = grad(total(run), EVERY)(*tensors)
    leaves = [t.clone().requires_grad_() for t in tensors]
    expected = torch.autograd.grad(total(right)(*leaves), leaves)
    torch.testing.assert_close(found, tuple(expected))


def test_forward_mode_and_what_is_mixed_of_both() -> None:
    tensors = tuple(drawn().values())
    tangents = tuple(torch.randn_like(t) for t in tensors)
    found, expected = (jvp(function, tensors, tangents) for function in (run, right))
    torch.testing.assert_close(found, expected)

    def of_delta(function: Any) -> Any:
        return lambda delta: total(function)(tensors[0], delta, *tensors[2:])

    curvature, wanted = (hessian(of_delta(function))(tensors[1]) for function in (run, right))
    torch.testing.assert_close(curvature, wanted)


def test_maps() -> None:
    tensors = tuple(drawn().values())
    several = torch.stack([tensors[0], -tensors[0], tensors[0] + 1])
    found = vmap(lambda u: run(u, *tensors[1:]))(several)
    expected = [right(u, *tensors[1:]) for u in several]
    for place in range(2):
        torch.testing.assert_close(found[place], torch.stack([each[place] for each in expected]))
    per_sample = vmap(grad(lambda u: total(run)(u, *tensors[1:])))(several)
    one = grad(lambda u: total(right)(u, *tensors[1:]))(several[2])
    torch.testing.assert_close(per_sample[2], one)


def test_rows_of_a_jacobian_at_once() -> None:
    tensors = tuple(drawn().values())

    def of_B(function: Any) -> Any:
        return lambda B: function(*tensors[:3], B, *tensors[4:])[0]

    torch.testing.assert_close(jacrev(of_B(run))(tensors[3]), jacrev(of_B(right))(tensors[3]))
    leaf = tensors[3].clone().requires_grad_()
    out = of_B(run)(leaf)
    rows = torch.eye(out.numel(), dtype=out.dtype).view(-1, *out.shape)
    (batched,) = torch.autograd.grad(out, leaf, rows, is_grads_batched=True)
    torch.testing.assert_close(
        batched.view(*out.shape, *leaf.shape), jacrev(of_B(right))(tensors[3])
    )


# --- Compilation ------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True], ids=["", "dynamic"])
def test_one_graph(dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(total(run), fullgraph=True, backend="aot_eager", dynamic=dynamic)
    found, expected = [], []
    for function, results in ((compiled, found), (total(run), expected)):
        leaves = [t.requires_grad_() for t in drawn(torch.float32).values()]
        value = function(*leaves)
        results += [value, *torch.autograd.grad(value, leaves)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_one_graph_of_other_forms() -> None:
    torch._dynamo.reset()

    def of(u: Tensor, A: Tensor, B: Tensor, bounds: Tensor) -> Any:
        return selective_scan(u, u, A, B, B, cu_seqlens=bounds)

    compiled = torch.compile(of, fullgraph=True, backend="aot_eager")
    A = -torch.rand(4, 3, dtype=torch.complex64)
    B, bounds = torch.randn(4, 3, dtype=torch.complex64), torch.tensor([0, 2, 5])
    u = torch.randn(2, 4, 5)
    torch.testing.assert_close(compiled(u, A, B, bounds), of(u, A, B, bounds))


def test_one_graph_that_makes_its_projection() -> None:
    """Whose sizes are numbers, where those of arguments are symbols."""
    torch._dynamo.reset()
    u, delta, C = torch.randn(2, 4, 9), torch.rand(2, 4, 9), torch.randn(2, 3, 9)
    A = -torch.rand(4, 3)

    def of(u: Tensor, delta: Tensor, A: Tensor, C: Tensor) -> Any:
        return selective_scan(u, delta, A, torch.ones(4, 3), C)

    compiled = torch.compile(of, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(u, delta, A, C), of(u, delta, A, C))


def test_compiled_autograd_without_a_break() -> None:
    from torch._dynamo import compiled_autograd

    given = [t.requires_grad_() for t in drawn().values()]
    expected = torch.autograd.grad(total(run)(*given), given)
    value = total(run)(*given)
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):  # type: ignore[no-untyped-call]
        value.backward()
    torch.testing.assert_close([t.grad for t in given], [*expected])


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("training", [False, True], ids=["", "training"])
def test_the_operator_is_as_torch_wants_it(packed: bool, training: bool) -> None:
    given = drawn()
    given["C"] = given["C"].unsqueeze(1)
    bounds = None
    if packed:
        given["initial_state"] = torch.randn(2, 2, 4, 3, dtype=torch.float64)
        bounds = torch.tensor([0, 2, 5])
    inputs = tuple(t.requires_grad_(training) for t in given.values())
    torch.library.opcheck(
        torch.ops.scan_registry.selective_scan.default, (*inputs, bounds, True, "auto", training)
    )


def test_the_backward_operator_is_as_torch_wants_it() -> None:
    given = drawn()
    given["C"] = given["C"].unsqueeze(1)
    kept, out_grad = torch.empty(0), torch.randn_like(given["u"])
    for wanted in ([True] * 9, [True, False] * 4 + [False]):
        inputs = (*given.values(), None, kept, out_grad, None, True, "auto", wanted)
        torch.library.opcheck(torch.ops.scan_registry.selective_scan_backward.default, inputs)


def test_tensors_on_meta() -> None:
    given = {name: t.to("meta").requires_grad_() for name, t in drawn(torch.float32).items()}
    out, last = run(*given.values())
    assert (out.shape, last.shape) == ((2, 4, 5), (2, 4, 3))
    (out.sum() + last.sum()).backward()
    for t in given.values():
        assert t.grad is not None
        assert t.grad.shape == t.shape


# --- As users work ----------------------------------------------------------------------------


def test_autocast_changes_nothing() -> None:
    """Tensors are computed in float32, or wider, whatever their dtype; the output has that of ``u``."""
    for dtype in (torch.float32, torch.bfloat16):
        given = drawn(torch.float32)
        for name in ("u", "delta", "B", "C", "z"):
            given[name] = given[name].to(dtype)
        plain = run(*given.values())
        leaf = given["delta"].requires_grad_()
        (expected,) = torch.autograd.grad(run(*given.values())[0].sum(), leaf)
        with torch.autocast("cpu", torch.bfloat16):
            found = run(*given.values())
            (gradient,) = torch.autograd.grad(found[0].sum(), leaf)
        assert found[0].dtype == dtype
        torch.testing.assert_close(found, plain)
        torch.testing.assert_close(gradient, expected)


def test_steps_of_an_optimizer() -> None:
    """A scan that learns what another one does."""
    given = drawn(torch.float32)
    wanted = run(*given.values())[0]
    learnt = {name: t.clone() for name, t in given.items()}
    learnt |= {name: learnt[name] + 0.3 for name in ("B", "D", "delta_bias")}
    parameters = [learnt[name].requires_grad_() for name in ("A", "B", "D", "delta_bias")]
    optimizer = torch.optim.Adam(parameters, lr=0.02)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (run(*learnt.values())[0] - wanted).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 50


def test_inputs_stay_as_they_are_and_changes_are_noticed() -> None:
    given = drawn()
    before = [t.clone() for t in given.values()]
    leaves = [t.requires_grad_() for t in given.values()]
    out, _ = run(*leaves)
    for t, kept in zip(leaves, before, strict=True):
        torch.testing.assert_close(t.detach(), kept, rtol=0, atol=0)
    with torch.no_grad():
        leaves[3].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_strides_of_every_kind() -> None:
    """Transposed, expanded, sliced with steps and gaps, and of one number."""
    given = drawn()
    u, delta, z = (given[name] for name in ("u", "delta", "z"))
    strange = {
        **given,
        "u": u.transpose(1, 2).contiguous().transpose(1, 2),
        "delta": torch.stack([delta, delta], -1)[..., 0],
        "z": torch.cat([z, z], 1)[:, :4],
        "B": given["B"].permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        "D": torch.tensor(2.0, dtype=torch.float64).expand(4),
    }
    plain = {**given, "D": strange["D"].contiguous()}
    torch.testing.assert_close(run(*strange.values()), right(*plain.values()))
    gradients = []
    for tensors in (strange, plain):
        leaves = [t.detach().requires_grad_() for t in tensors.values()]
        gradients.append(torch.autograd.grad(total(run)(*leaves), leaves))
    torch.testing.assert_close(*gradients)


def test_two_threads() -> None:
    given = drawn(torch.float32)
    found: dict[int, list[Any]] = {0: [], 1: []}

    def work(number: int) -> None:
        for step in range(20):
            leaves = [(t[:1] if t.dim() > 2 and number else t).clone() for t in given.values()]
            leaves = [t.requires_grad_() for t in leaves]
            value = total(run)(*leaves)
            found[number].append([value, *torch.autograd.grad(value, leaves)])
            assert step < 20

    threads = [threading.Thread(target=work, args=(number,)) for number in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for results in found.values():
        assert len(results) == 20
        for each in results:
            torch.testing.assert_close(each, results[0], rtol=0, atol=0)


def test_hooks_of_saved_tensors_see_what_is_saved() -> None:
    """As offloading to the CPU does: what is packed is unpacked for the backward pass."""
    leaves = [t.requires_grad_() for t in drawn().values()]
    packed, unpacked = [], []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor.clone()

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        value = total(run)(*leaves)
    found = torch.autograd.grad(value, leaves)
    assert packed
    assert unpacked
    torch.testing.assert_close(found, torch.autograd.grad(total(right)(*leaves), leaves))


def test_checkpointing_of_activations() -> None:
    from torch.utils.checkpoint import checkpoint

    leaves = [t.requires_grad_() for t in drawn().values()]
    value = checkpoint(total(run), *leaves, use_reentrant=False)
    found = torch.autograd.grad(value, leaves)
    torch.testing.assert_close(found, torch.autograd.grad(total(right)(*leaves), leaves))


@pytest.mark.parametrize("training", [False, True], ids=["", "training"])
def test_what_is_kept_of_a_trace_for_a_gpu(training: bool) -> None:
    """Kernels leave a state before every 32 steps; plain torch leaves none."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        for device, kept in (("cuda", (2, 3, 4, 3) if training else (0,)), ("cpu", (0,))):
            u = torch.empty(2, 4, 70, device=device)
            A, B = torch.empty(4, 3, device=device), torch.empty(2, 1, 3, 70, device=device)
            inputs = u, u, A, B, B, None, None, None, None, None
            made = torch.ops.scan_registry.selective_scan(*inputs, True, "auto", training)
            assert [x.device.type for x in made] == [device] * 3
            assert made[2].shape == kept
