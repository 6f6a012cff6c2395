"""Triton's interpreter, made fit for running kernels on the CPU in tests.

The interpreter replaces ``triton.jit`` for a whole process, the one that has TRITON_INTERPRET set
when it imports triton; this is for scripts that tests run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.language import core  # noqa: F401 (`mend` has the language replaced in its globals)
from triton.runtime import interpreter


def addresses(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Of the tensor's elements."""
    places = torch.tensor(0)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = places[..., None] + stride * torch.arange(size)
    places = places.flatten() * tensor.element_size() + tensor.data_ptr()
    return places.numpy().astype(np.uint64)


#: The addresses of the elements that a kernel may read, and of those that it may write.
_MEMORY = {"read": np.empty(0, np.uint64), "written": np.empty(0, np.uint64)}


def allow(*, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
    """From here on, an access to anything else is an ``IndexError``."""
    for verb, tensors in (("read", reads), ("written", writes)):
        _MEMORY[verb] = np.concatenate([np.empty(0, np.uint64), *map(addresses, tensors)])


def _watch_memory(builder: Any) -> None:
    load, store = builder.create_masked_load, builder.create_masked_store

    def check(verb: str, pointers: Any, mask: Any) -> None:
        if not np.isin(pointers.data[mask.data != 0], _MEMORY[verb]).all():
            raise IndexError(f"an address is {verb} that is not of an element to be {verb}")

    def masked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        check("read", pointers, mask)
        return load(self, pointers, mask, *rest)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check("written", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store


def mend() -> None:
    """Make Triton 3.6's interpreter fast enough, and fit for numpy 2.4.

    It calls the combining function of a scan or a reduction once per element, which takes 0.2 ms;
    here it is called on whole tiles, a logarithmic number of times. It replaces the language anew in
    every call of a function, which takes 1 ms; here it does so once. And it takes an array of one
    element for an integer, which numpy 2.4 no longer does.

    And every access is checked against what ``allow`` was last told.
    """

    def scan(self: Any, inputs: Any) -> list[Any]:
        values = [np.moveaxis(each.handle.data, self.axis, 0) for each in inputs]
        types = [each.dtype for each in inputs]
        distance = 1
        while distance < len(values[0]):
            # Tensors have to keep their size; what has come round the end is not used.
            earlier = [np.roll(value, distance, axis=0) for value in values]
            combined = self.combine_fn.fn(*map(self.to_tensor, earlier + values, types + types))
            combined = combined if isinstance(combined, tuple) else (combined,)
            values = [
                np.concatenate([value[:distance], tensor.handle.data[distance:]])
                for value, tensor in zip(values, combined, strict=True)
            ]
            distance *= 2
        return list(map(self.to_tensor, [np.moveaxis(v, 0, self.axis) for v in values], types))

    def reduce(self: Any, inputs: Any) -> list[Any]:
        last = [np.take(each.handle.data, [-1], self.axis) for each in scan(self, inputs)]
        kept = last if self.keep_dims else [value.squeeze(self.axis) for value in last]
        return [self.to_tensor(value, each.dtype) for value, each in zip(kept, inputs, strict=True)]

    interpreter.ScanOps.generic_scan = scan
    interpreter.ReduceOps.generic_reduce = reduce
    _watch_memory(interpreter.InterpreterBuilder)
    interpreter._patch_lang(mend)
    tl.tensor.__index__ = lambda self: self.handle.data.item()
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
