"""What is known of a tensor without its values: all that a problem for kernels depends on."""

from __future__ import annotations

from dataclasses import replace

from scan_registry.base.frozen import dataclass
from scan_registry.base.strides import dense_strides


@dataclass(frozen=True)
class TensorFacts:
    """A tensor of any array library.

    dtype    by its name, such as ``bfloat16``
    strides  in elements
    device   the device's type, such as ``cpu`` or ``cuda``
    address  of the first element, as far as it is known; a number that says how far the address is aligned will do
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str
    address: int = 0

    @classmethod
    def dense(cls, shape: tuple[int, ...], dtype: str, device: str) -> TensorFacts:
        """A tensor without gaps, its dimensions in order, as arrays of JAX are."""
        return cls(shape, dense_strides(shape), dtype, device)

    def expanded(self, shape: tuple[int, ...]) -> TensorFacts:
        """The tensor broadcast to ``shape``, with strides of 0 where one element serves many."""
        if self.shape == shape:
            return self
        missing = len(shape) - len(self.shape)
        own = zip(self.shape, self.strides, shape[missing:], strict=True)
        strides = [stride if size == wanted else 0 for size, stride, wanted in own]
        return replace(self, shape=shape, strides=(*(0,) * missing, *strides))
