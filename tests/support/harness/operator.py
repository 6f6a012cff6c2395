"""What a family says of its operator for the harness to test it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from .calls import Call


class Operator:
    """A family's test class is one of this and of the classes that have tests, and overrides what is here.

    cases      options that ``draw`` takes, by a name for each; a case has packed sequences if its call has ``cu_seqlens``
    few        the cases for tests that take long, among them one of each kind
    tolerance  the largest relative error of a result by its dtype; its keys are the dtypes to be tested
    sizes      of problems whose values and gradients are compared with the reference
    small      one for derivatives by finite differences
    large      one that is worth several threads
    empty      without elements
    refused    by a name, arguments that are wrong, and the error and its words
    initial    arguments that hold a state for each sequence; a piece of a sequence takes the first of them from the one before
    packing    arguments that a packed sequence by itself does not have
    spoilt     tensors of which one number that is not finite makes what it does in the reference; all of them if None
    maps       arguments without a gradient that ``vmap`` takes
    keeps      whether nothing but inputs and outputs is kept for the backward pass
    same_bits  whether results do not depend on the number of threads at all
    autocasts  whether autocast changes the dtypes
    forward_ad whether there are derivatives in forward mode
    """

    cases: ClassVar[Mapping[str, Mapping[str, Any]]]
    few: ClassVar[tuple[str, ...]]
    tolerance: ClassVar[Mapping[torch.dtype, float]] = {
        torch.float64: 1e-12,
        torch.float32: 2e-6,
        torch.float16: 2e-3,
        torch.bfloat16: 1e-2,
    }
    sizes: ClassVar[tuple[Any, ...]]
    small: ClassVar[Any]
    large: ClassVar[Any]
    empty: ClassVar[tuple[Any, ...]] = ()
    refused: ClassVar[Mapping[str, tuple[Mapping[str, Any], type[Exception], str]]] = {}
    initial: ClassVar[tuple[str, ...]] = ("initial_state",)
    packing: ClassVar[tuple[str, ...]] = ("cu_seqlens",)
    spoilt: ClassVar[tuple[str, ...] | None] = None
    maps: ClassVar[tuple[str, ...]] = ()
    keeps: ClassVar[bool] = True
    same_bits: ClassVar[bool] = True
    autocasts: ClassVar[bool] = False
    forward_ad: ClassVar[bool] = True
    exact: ClassVar[torch.dtype] = torch.float64

    def draw(self, case: str, size: Any, dtype: torch.dtype) -> Call:
        """Random arguments."""
        raise NotImplementedError

    def run(self, **arguments: Any) -> tuple[Tensor, ...]:
        """The operator: its output, and its final state."""
        raise NotImplementedError

    def right(self, **arguments: Any) -> tuple[Tensor, ...]:
        """The reference, which computes in float64 and which torch differentiates."""
        raise NotImplementedError

    def checks(self, case: str) -> Iterator[tuple[Any, tuple[Any, ...], tuple[str, ...]]]:
        """Operators of torch, arguments for ``opcheck`` and which tests."""
        return iter(())

    def dtype_of(self, name: str, arguments: Mapping[str, Any], dtype: torch.dtype) -> torch.dtype:
        """Of an output."""
        return dtype

    def on_gpu(self, call: Call) -> bool:
        """Whether outputs on a GPU have the strides that they have here."""
        return True

    def slack(self, name: str, out: Tensor, dtype: torch.dtype) -> float:
        """The largest error of an output or gradient, in a call of this dtype."""
        return self.tolerance.get(out.dtype, self.tolerance[dtype])

    # --- Sequences: along which dimensions a call is cut ---

    def time(self, call: Call, name: str) -> int | None:
        """The dimension of time of an argument or of output 0."""
        raise NotImplementedError

    def state(self, call: Call, states: Tensor, number: int) -> Tensor:
        """A sequence's own of the states of packed sequences."""
        raise NotImplementedError

    def states(self, call: Call, each: list[Tensor]) -> Tensor:
        """The opposite of ``state``."""
        raise NotImplementedError

    def cut(self, call: Call, begin: int, end: int, number: int | None = None) -> Call:
        """Steps of all sequences, or a packed sequence by itself."""

        def part(name: str, value: Any) -> Any:
            if name in self.initial and value is not None and number is not None:
                return self.state(call, value, number)
            if not isinstance(value, Tensor) or (dim := self.time(call, name)) is None:
                return value
            times = 2 if name in self.paired(call) else 1
            return value.narrow(dim, begin * times, (end - begin) * times)

        others = {n: v for n, v in call.others.items() if n not in self.packing}
        return Call(
            {n: part(n, t) for n, t in call.tensors.items()},
            {n: part(n, v) for n, v in others.items()},
        )

    def paired(self, call: Call) -> tuple[str, ...]:
        """Arguments that have two numbers for each step."""
        return ()

    def in_pieces(self, case: str) -> bool:
        """Whether a piece of a sequence needs no more of those before it than their final state."""
        return True

    def bounds(self, call: Call) -> list[tuple[int, int]]:
        return [*pairwise(call.others["cu_seqlens"].tolist())]

    # --- pytest ---

    def packed(self, case: str) -> bool:
        return self.draw(case, self.small, self.exact).others.get("cu_seqlens") is not None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        values: dict[str, Any] = {
            "case": lambda: [*self.cases],
            "packed": lambda: [case for case in self.cases if self.packed(case)],
            "whole": lambda: [c for c in self.cases if not self.packed(c) and self.in_pieces(c)],
            "dtype": lambda: [*self.tolerance],
            "refusal": lambda: [*self.refused],
            "place": lambda: [*PLACES],
            "few": lambda: [*self.few],
            "first": lambda: [next(iter(self.cases))],
        }
        for name in sorted(values.keys() & {*metafunc.fixturenames}):
            metafunc.parametrize(name, values[name](), ids=str)


def _reversed(x: Tensor) -> Tensor:
    dims = tuple(reversed(range(x.dim())))
    return x.permute(dims).contiguous().permute(dims)


#: How a tensor may lie in memory: in another order of dimensions, with steps and gaps, off 16 bytes, and expanded.
PLACES = {
    "columns": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x,
    "steps": lambda x: torch.stack([x, x], -1)[..., 0],
    "gaps": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "misaligned": lambda x: torch.cat([x[..., :1], x], -1)[..., 1:],
    "reversed": _reversed,
}
