"""Triton's interpreter, made fit for running kernels on the CPU in tests.

The interpreter replaces ``triton.jit`` for a whole process, the one that has TRITON_INTERPRET set
when it imports triton; this is for scripts that tests run.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.language import core
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


def _remember_types() -> None:
    """The interpreter makes types and shapes anew for each tensor, which takes most of its time: here, once for each name."""
    np_dtype_of, make_block, make_tensor = (
        interpreter._get_np_dtype,
        core.block_type.__init__,
        core.tensor.__init__,
    )
    np_dtypes = dict[str, Any]()
    blocks = dict[tuple[str, tuple[int, ...]], dict[str, Any]]()
    shapes = dict[str, dict[str, Any]]()

    def get_np_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.name not in np_dtypes:
            np_dtypes[scalar.name] = np_dtype_of(scalar)
        return np_dtypes[scalar.name]

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple(int(getattr(size, "value", size)) for size in shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = vars(self)
        self.__dict__ = blocks[key]

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in shapes:
            make_tensor(self, handle, type)
            shapes[type.name] = {"shape": self.shape, "numel": self.numel, "dtype": self.dtype}
        vars(self).update(shapes[type.name], handle=handle, type=type)

    interpreter._get_np_dtype = get_np_dtype
    core.block_type.__init__, core.tensor.__init__ = block_type, tensor


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
    _remember_types()
    interpreter._patch_lang(mend)
    gc.disable()  # which would go through ever more tensors, of which none is part of a cycle
    tl.tensor.__index__ = lambda self: self.handle.data.item()
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
