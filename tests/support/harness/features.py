"""What else torch does with an operator: compilation, shapes without values, autocast, hooks and checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from .calls import Call, gradients, results
from .operator import Operator


def same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert [*actual] == [*expected]
    for name, out in actual.items():
        torch.testing.assert_close(out, expected[name])
        assert "gradient" in name or out.stride() == expected[name].stride(), name


class Features(Operator):
    @pytest.mark.slow
    @pytest.mark.parametrize("dynamic", [False, True], ids=["", "dynamic"])
    def test_compiled_into_one_graph(self, few: str, dynamic: bool) -> None:
        """With the same results and gradients, and outputs that lie as they did."""
        torch._dynamo.reset()
        call = self.draw(few, self.small, torch.float32)
        compiled = torch.compile(self.run, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        same(results(compiled, call), results(self.run, call))
        torch._dynamo.reset()

    @pytest.mark.thorough  # test_transforms.py has those of two operators
    def test_compiled_autograd(self, first: str) -> None:
        from torch._dynamo import compiled_autograd

        call = self.draw(first, self.small, torch.float32)
        leaves = call.leaves()
        outputs = self.run(**leaves.arguments)
        with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):  # type: ignore[no-untyped-call]
            torch.stack([x.abs().square().sum() for x in outputs]).sum().backward()
        other = call.leaves()
        outputs = self.run(**other.arguments)
        torch.stack([x.abs().square().sum() for x in outputs]).sum().backward()
        for name, t in leaves.tensors.items():
            torch.testing.assert_close(t.grad, other.tensors[name].grad)
        torch._dynamo.reset()

    @pytest.mark.slow
    def test_operators_are_as_torch_wants_them(self, few: str) -> None:
        for operator, arguments, tests in self.checks(few):
            torch.library.opcheck(operator, arguments, test_utils=tests)

    def test_shapes_without_values(self, few: str) -> None:
        """On meta, and of a GPU, which this torch may not be built for; second derivatives on meta, too. ``test_fakes.py`` has
        outputs with all options."""
        call = self.draw(few, self.small, torch.float32)
        expected = results(self.run, call)
        leaves = call.on("meta").changed(lambda t: t.requires_grad_())
        outputs = self.run(**leaves.arguments)
        tensors = [*leaves.tensors.values()]
        grads = torch.autograd.grad(
            sum(x.abs().sum() for x in outputs), tensors, create_graph=True, materialize_grads=True
        )
        for out, right in zip((*outputs, *grads), expected.values(), strict=True):
            assert (out.is_meta, out.shape, out.dtype) == (True, right.shape, right.dtype)
        second = torch.autograd.grad(sum(g.abs().sum() for g in grads), tensors, allow_unused=True)
        assert all(g is None or g.shape == t.shape for g, t in zip(second, tensors, strict=True))
        if not self.on_gpu(call):
            return
        with FakeTensorMode():
            outputs = self.run(**call.on("cuda").arguments)
            for out, right in zip(outputs, expected.values(), strict=False):
                assert (out.device.type, out.shape) == ("cuda", right.shape)
                assert (out.dtype, out.stride()) == (right.dtype, right.stride())

    def test_autocast(self, few: str) -> None:
        """It changes no dtype and no bit."""
        for dtype in (torch.float32, torch.bfloat16):
            call = self.draw(few, self.small, dtype)
            expected = results(self.run, call)
            with torch.autocast("cpu", torch.bfloat16):
                actual = results(self.run, call)
            for name, out in actual.items():
                if self.autocasts:
                    assert out.dtype == (torch.bfloat16 if "output" in name else dtype)
                else:
                    assert torch.equal(out, expected[name])

    def test_saved_tensors(self, few: str) -> None:
        """They may come back as copies that lie otherwise; there are none but inputs and outputs."""
        call = self.draw(few, self.small, torch.float32)
        leaves, expected = call.leaves(), results(self.run, call)
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
            return tensor.detach().mT.contiguous().mT if tensor.dim() > 1 else tensor.clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = self.run(**leaves.arguments)
        grads = gradients(outputs, leaves)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[name])
        if self.keeps:
            own = [t for t in (*leaves.arguments.values(), *outputs) if isinstance(t, Tensor)]
            most = sum(t.untyped_storage().nbytes() for t in own)
            assert sum(saved.values()) <= most
        again = checkpoint(lambda: self.run(**leaves.arguments), use_reentrant=False)
        for name, grad in gradients(again, leaves).items():
            assert torch.equal(grad, expected[name])

    def test_nothing_is_recorded_where_no_gradient_is_wanted(self, case: str) -> None:
        call = self.draw(case, self.small, torch.float32)
        outputs = self.run(**call.arguments)
        assert all(out.grad_fn is None for out in outputs)
        leaves = call.leaves()
        with torch.no_grad():
            assert not any(out.requires_grad for out in self.run(**leaves.arguments))
        with torch.inference_mode():
            assert all(out.is_inference() for out in self.run(**leaves.arguments))

    def test_changes_of_what_is_needed_are_noticed(self, case: str) -> None:
        """A backward pass after a change in place is refused, or does not depend on what was changed."""
        call = self.draw(case, self.small, torch.float32)
        expected = results(self.run, call)
        for name in call.tensors:
            leaves = call.leaves()
            outputs = self.run(**leaves.arguments)
            with torch.no_grad():
                leaves.tensors[name].zero_()
            try:
                grads = gradients(outputs, leaves)
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error)  # noqa: PT017
                continue
            assert all(torch.equal(grad, expected[n]) for n, grad in grads.items()), name


def arguments_of(call: Call, *names: str) -> tuple[Any, ...]:
    """In the order of an operator's own arguments; those that are not there are None."""
    return tuple(call.arguments.get(name) for name in names)
