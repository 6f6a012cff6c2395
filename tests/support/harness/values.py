"""Values and first derivatives against the reference, over dtypes, layouts, packed sequences and what is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor
from watched import levels, using

from .calls import Call, close, gradients, results, weights
from .operator import PLACES, Operator


def exactly(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert [*actual] == [*expected]
    for name, out in actual.items():
        assert out.shape == expected[name].shape, name
        assert torch.isclose(out, expected[name], rtol=1e-9, atol=1e-9).all(), name


class Values(Operator):
    def test_values_and_gradients(self, case: str, dtype: torch.dtype) -> None:
        """Of problems of several sizes, by every set of vector instructions."""
        for number, size in enumerate(self.sizes):
            torch.manual_seed(number)
            call = self.draw(case, size, dtype)
            expected = results(self.right, call.wide())
            for level in levels():
                with using(level):
                    actual = results(self.run, call)
                close(actual, expected, lambda n, out: self.slack(n, out, dtype), (size, level))
                for name, out in actual.items():
                    of = name.removeprefix("gradient of ")
                    like = call.tensors.get(of)
                    assert out.dtype == (
                        self.dtype_of(of, call.arguments, dtype) if like is None else like.dtype
                    )

    def test_other_strides(self, few: str, place: str) -> None:
        """Of each argument by itself; of all of them in every dtype; and of gradients of outputs."""
        torch.manual_seed(0)
        call = self.draw(few, self.sizes[0], self.exact)
        expected = results(self.run, call)
        for name, t in call.arguments.items():
            if isinstance(t, Tensor) and t.dim() and t.numel():
                exactly(self.lying(call, place, [name]), expected)
        for dtype in self.tolerance:
            call = self.draw(few, self.sizes[0], dtype)
            exact = results(self.right, call.wide())
            for level in levels():
                with using(level):
                    actual = self.lying(call, place, call.arguments)
                close(actual, exact, lambda n, out: self.slack(n, out, dtype), (dtype, level))  # noqa: B023

    def lying(self, call: Call, place: str, names: Iterable[str]) -> dict[str, Tensor]:
        """The results if some arguments, and gradients of outputs, lie elsewhere in memory."""

        def put(t: Any) -> Any:
            fits = isinstance(t, Tensor) and t.dim() and t.numel()
            return PLACES[place](t).detach() if fits else t

        arguments = {n: put(x) if n in names else x for n, x in call.arguments.items()}
        tensors = {n: arguments[n].detach().requires_grad_() for n in call.tensors}
        leaves = Call(tensors, {n: arguments[n] for n in call.others})
        outputs = self.run(**leaves.arguments)
        grads = gradients(outputs, leaves, map(put, weights(outputs)))
        return {f"output {n}": x.detach() for n, x in enumerate(outputs)} | grads

    def test_only_what_is_wanted(self, case: str) -> None:
        """Gradients of one output, and in one tensor, are those that all have together."""
        call = self.draw(case, self.small, self.exact)
        leaves, exact = call.leaves(), call.wide().leaves()
        outputs, expected = self.run(**leaves.arguments), self.right(**exact.arguments)
        for number, seed in enumerate(weights(outputs)):
            grads, wanted = (
                torch.autograd.grad(
                    results[number],
                    [*on.tensors.values()],
                    seed,
                    retain_graph=True,
                    materialize_grads=True,
                )
                for results, on in ((outputs, leaves), (expected, exact))
            )
            torch.testing.assert_close(grads, wanted)
        every = gradients(outputs, leaves)
        for name in call.tensors:
            one = call.leaves([name])
            (grad,) = gradients(self.run(**one.arguments), one).values()
            torch.testing.assert_close(grad, every[f"gradient of {name}"])

    def test_nothing_to_do(self, case: str) -> None:
        """Without elements final states are initial ones, and gradients have the shapes of their tensors."""
        for size in self.empty:
            call = self.draw(case, size, self.exact)
            exactly(results(self.run, call), results(self.right, call))

    def test_every_element_is_written(self, case: str) -> None:
        """Memory that is not initialized is full of NaN here."""
        torch.use_deterministic_algorithms(True)
        try:
            assert torch.empty(3).isnan().all()
            actual = results(self.run, self.draw(case, self.sizes[0], torch.float32))
        finally:
            torch.use_deterministic_algorithms(False)
        assert all(out.isfinite().all() for out in actual.values())

    def test_nothing_shares_memory(self, case: str) -> None:
        leaves = self.draw(case, self.small, torch.float32).leaves()
        outputs = self.run(**leaves.arguments)
        seeds = weights(outputs)
        grads = gradients(outputs, leaves, seeds)
        tensors = [*leaves.tensors.values(), *outputs, *seeds, *grads.values()]
        storages = [t.untyped_storage().data_ptr() for t in tensors if t.numel()]
        assert len(set(storages)) == len(storages)

    # --- What is not finite ---

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_what_is_not_finite_goes_where_it_does_in_the_reference(
        self, few: str, value: float
    ) -> None:
        """And gradients are finite where those of the reference are."""
        every = self.draw(few, self.small, torch.float32).tensors
        for name in every if self.spoilt is None else every.keys() & {*self.spoilt}:
            call = self.draw(few, self.sizes[0], torch.float32)
            spoilt = call.tensors[name]
            if not spoilt.numel():
                continue
            place = spoilt.numel() // 2
            spoilt.view(-1)[place] = value
            expected = results(self.right, call.wide())
            for level in levels():
                with using(level):
                    actual = results(self.run, call)
                for result, out in actual.items():
                    right = expected[result]
                    if result.startswith("output"):
                        assert torch.equal(out.isfinite(), right.isfinite()), (name, result)
                        assert out.is_complex() or torch.equal(out.isnan(), right.isnan()), name
                        continue
                    fine = out.isfinite() | ~right.isfinite()
                    if result == f"gradient of {name}":
                        fine = fine.reshape(-1)
                        fine[place] = True
                    assert fine.all(), (name, result)

    # --- Threads ---

    def test_threads_share_the_work(self, few: str) -> None:
        call = self.draw(few, self.large, torch.float32)
        usual, runs = torch.get_num_threads(), []
        with ExitStack() as after:
            after.callback(torch.set_num_threads, usual)
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                runs.append(results(self.run, call))
        slack = 0.0 if self.same_bits else 1e-4
        for other in runs[1:]:
            for name, out in runs[0].items():
                torch.testing.assert_close(other[name], out, rtol=slack, atol=slack)

    def test_calls_in_several_threads(self, few: str) -> None:
        call = self.draw(few, self.small, torch.float32)
        leaves = call.leaves()
        outputs = self.run(**leaves.arguments)
        seeds = weights(outputs)
        expected = gradients(outputs, leaves, seeds)

        def work(_: int) -> dict[str, Tensor]:
            return gradients(self.run(**leaves.arguments), leaves, seeds)

        with ThreadPoolExecutor(3) as pool:
            for actual in pool.map(work, range(12)):
                assert all(torch.equal(actual[name], out) for name, out in expected.items())

    # --- What is refused ---

    @pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
    def test_refuses(self, refusal: str, grad: bool, first: str) -> None:
        """With an error that names the argument, and what is accepted."""
        changes, error, words = self.refused[refusal]
        call = self.draw(first, self.small, torch.float32)
        arguments = (call.leaves() if grad else call).arguments
        with pytest.raises(error, match=words):
            self.run(**{**arguments, **changes})
