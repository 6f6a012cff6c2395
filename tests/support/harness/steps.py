"""The tests of every function that makes one step: it changes its state in place and has no derivative."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor


class StepTests:
    """A family's test class is one of this, and overrides what is here.

    name     of the function
    state    the argument that is changed
    learned  an argument that a derivative would be wanted of
    refused  by a name, arguments that are wrong, and the error and its words
    """

    name: ClassVar[str]
    state: ClassVar[str] = "state"
    learned: ClassVar[str]
    refused: ClassVar[Mapping[str, tuple[Mapping[str, Any], type[Exception], str]]] = {}

    def draw(self) -> dict[str, Any]:
        """Random arguments, two of whose tensors at the least have a batch of 2."""
        raise NotImplementedError

    def run(self, **arguments: Any) -> Tensor:
        raise NotImplementedError

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "refusal" in metafunc.fixturenames:
            metafunc.parametrize("refusal", [*self.refused])

    def drawn(self) -> tuple[dict[str, Any], Tensor]:
        """Arguments, and a copy of the state."""
        arguments = self.draw()
        return arguments, arguments[self.state].clone()

    def test_compiled_as_a_whole(self) -> None:
        arguments, before = self.drawn()
        others = arguments | {self.state: before.clone()}

        def called(**arguments: Any) -> Tensor:
            return self.run(**arguments) * 2

        compiled = torch.compile(called, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(**arguments), called(**others))
        assert torch.equal(arguments[self.state], others[self.state])
        assert not torch.equal(arguments[self.state], before)

    def test_derivatives_are_refused(self) -> None:
        """Rather than lost without a word, and before the state changes."""
        arguments, before = self.drawn()
        arguments[self.learned].requires_grad_()
        with pytest.raises(RuntimeError, match=r"no derivative.*no_grad"):
            self.run(**arguments)
        assert torch.equal(arguments[self.state], before)
        with torch.no_grad():
            assert not self.run(**arguments).requires_grad
        with torch.inference_mode():
            self.run(**arguments)

    def test_a_state_made_for_inference_is_not_changed_outside_of_it(self) -> None:
        with torch.inference_mode():
            arguments = self.draw()
            self.run(**arguments)
            before = arguments[self.state].clone()
        for mode in (torch.no_grad(), torch.enable_grad()):
            with mode, pytest.raises(RuntimeError, match=rf"pass {self.state}.clone\(\)"):
                self.run(**arguments)
        assert torch.equal(arguments[self.state].clone(), before.clone())

    def test_vmap_is_refused(self) -> None:
        """Over the state or another argument."""
        arguments = self.draw()
        for name in (self.state, self.learned):
            many = torch.stack([arguments[name]] * 3)
            with pytest.raises(RuntimeError, match=f"{self.name} changes {self.state} in place"):
                torch.vmap(lambda t, name=name: self.run(**(arguments | {name: t})))(many)

    def test_autograd_knows_that_the_state_changed(self) -> None:
        arguments, before = self.drawn()
        product = arguments[self.state] * torch.rand_like(before).requires_grad_()
        self.run(**arguments)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()

    def test_refuses(self, refusal: str) -> None:
        changes, error, words = self.refused[refusal]
        with pytest.raises(error, match=words):
            self.run(**{**self.draw(), **changes})
