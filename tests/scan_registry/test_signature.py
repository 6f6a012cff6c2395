"""The signature of a plain call: all that its plan depends on, and nothing where a call is not plain."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import scan_registry.ops.linear_scan  # noqa: F401 (binds what the signature is read with)
from scan_registry._signature import bind, signature

pytestmark = pytest.mark.skipif(
    not hasattr(Tensor, "__dlpack_c_exchange_api__"), reason="this torch has no table of DLPack's"
)


def memory(*shape: int, dtype: torch.dtype = torch.float32, off: int = 0) -> Tensor:
    """On the 16-byte grid, or ``off`` elements from it."""
    room = torch.zeros(torch.Size(shape).numel() + 16, dtype=dtype)
    first = -room.data_ptr() // room.element_size() % 16 + off
    return room[first:][: torch.Size(shape).numel()].view(shape)


def test_the_addresses_are_those_of_the_tensors() -> None:
    gates, tokens = memory(2, 3)[1:], memory(1, 3, off=1)
    found = signature(gates, tokens)
    assert found is not None
    assert found[1:] == (gates.data_ptr(), tokens.data_ptr())


def test_equal_calls_have_equal_signatures_and_others_have_not() -> None:
    pairs = {
        "plain": (memory(4, 8), memory(4, 8)),
        "another dtype": (memory(4, 8).half(), memory(4, 8).half()),
        "of the same size": (memory(4, 8).bfloat16(), memory(4, 8).bfloat16()),
        "wide": (memory(4, 8, dtype=torch.float64), memory(4, 8, dtype=torch.float64)),
        "another shape": (memory(8, 4), memory(8, 4)),
        "another rank": (memory(32), memory(32)),
        "gates' strides": (memory(8, 4).T, memory(4, 8)),
        "tokens' strides": (memory(4, 8), memory(8, 4).T),
        "gates' alignment": (memory(4, 8, off=1), memory(4, 8)),
        "tokens' alignment": (memory(4, 8), memory(4, 8, off=2)),
    }
    found = {name: signature(*pair) for name, pair in pairs.items()}
    keys = {name: each[0] for name, each in found.items() if each is not None}
    assert set(keys) == set(pairs)
    for one, other in combinations(pairs, 2):
        assert keys[one] != keys[other], (one, other)
    again = signature(torch.nn.Parameter(memory(4, 8)), memory(4, 8))
    assert again is not None
    assert again[0] == keys["plain"]


class Subclass(Tensor):
    pass


PLAIN = memory(2, 3)
OTHERS: dict[str, tuple[Any, Any]] = {
    "shapes that broadcast": (memory(1, 3), PLAIN),
    "shapes of one size": (memory(3, 2), PLAIN),
    "dtypes that mix": (PLAIN, PLAIN.half()),
    "complex": (PLAIN.to(torch.complex64), PLAIN.to(torch.complex64)),
    "integers": (PLAIN.int(), PLAIN.int()),
    "a lazy negation": (PLAIN, torch._neg_view(PLAIN)),
    "zeros without memory": (PLAIN, torch._efficientzerotensor((2, 3))),
    "nothing": (PLAIN[:0], PLAIN[:0]),
    "no memory": (PLAIN.to("meta"), PLAIN.to("meta")),
    "sparse": (PLAIN, PLAIN.to_sparse()),
    "a subclass": (PLAIN, PLAIN.as_subclass(Subclass)),
    "no tensor": (PLAIN, None),
    "many dimensions": (memory(*[1] * 17), memory(*[1] * 17)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_plain_call(name: str) -> None:
    assert signature(*OTHERS[name]) is None


class Mode(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


def test_nobody_may_be_watching() -> None:
    with Mode():
        assert signature(PLAIN, PLAIN) is None
    seen: list[Any] = []

    def look(tensor: Tensor) -> Tensor:
        seen.append(signature(tensor, PLAIN))
        return tensor

    torch.func.vmap(look)(memory(4, 2, 3))
    torch.func.grad(lambda tensor: look(tensor).sum())(PLAIN)
    torch.jit.trace(look, (PLAIN,), check_trace=False)
    assert seen == [None, None, None]
    assert signature(PLAIN, PLAIN) is not None


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: signature(PLAIN), TypeError),  # type: ignore[call-arg]
        (lambda: bind([], (), None, None), TypeError),  # type: ignore[arg-type]
        (lambda: bind((int,) * 9, (), Tensor.is_neg, None), ValueError),
        (lambda: bind((Tensor,), (), Tensor.is_neg, 1), ValueError),
    ],
)
def test_wrong_arguments(call: Callable[[], object], error: type[Exception]) -> None:
    """They leave what is bound as it was."""
    with pytest.raises(error):
        call()
    assert signature(PLAIN, PLAIN) is not None
