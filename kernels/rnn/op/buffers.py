"""Buffers for networks that run step by step, and the CUDA graphs that refer to them, kept for reuse.

A call takes buffers for itself alone, so two threads never write to the same ones, and gives them back
when it has launched everything. The next call on the same stream may then have them: the stream
orders what the two launch. What is kept has a bound, and goes with the module whose calls it served.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from scan_registry.ops import recording

_GIGABYTE = 1 << 30


class Key(NamedTuple):
    """What buffers can serve: calls on one stream, of one shape, that launch the same kernels.

    ``options`` are the others that decide about a launch. ``stream`` is the address of a CUDA stream.
    """

    device: torch.device
    stream: int
    function: str
    heads: int
    dim: int
    options: tuple[object, ...] = ()


@dataclass
class StepBuffers:
    """Tensors by name, for ``steps`` time steps, and a graph of all those steps once it is recorded."""

    tensors: dict[str, Tensor]
    steps: int
    graph: recording.Graph | None = None
    #: The last thread that ran all steps without a graph. cuBLAS keeps state for each thread, so only that one records.
    warm: int | None = field(default=None, repr=False)

    @property
    def size(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def run(self, steps: int, body: Callable[[dict[str, Tensor], int], None]) -> None:
        """Launch ``body`` for the first ``steps`` steps.

        Only a run of all steps uses a graph. A thread's first such run launches ``body`` as it is, and its
        next one records the graph. Later runs of all steps, from any thread, replay it.
        """
        states = self.tensors["states"]
        if steps < self.steps or not rnn_buffers.max_size or not recording.possible(states):
            body(self.tensors, steps)
            return
        if self.graph is None and self.warm == threading.get_ident():
            self.graph = recording.record(states.device, lambda: body(self.tensors, steps))
        if self.graph is not None:
            self.graph.launch()
            return
        body(self.tensors, steps)
        self.warm = threading.get_ident()


class BufferPool:
    """Buffers that no call uses at the moment, at most ``max_size`` bytes on each device.

    If more are given back, the least recently used ones are freed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[tuple[Key, StepBuffers]] = []
        self._unwanted: list[tuple[str, int, int]] = []
        self._max_size: int | None = None

    @property
    def size(self) -> int:
        """Bytes that are kept, on all devices together. CUDA graphs come on top, with some 100 kB each, and
        what cuBLAS works in: 33 MB on an H100 for each thread and stream that graphs were recorded for."""
        return sum(buffers.size for _, buffers in [*self._idle])

    @property
    def max_size(self) -> int:
        """Bytes to keep on each device at most: 1 GiB, or a sixteenth of the current device's memory if
        that is less. 0 keeps nothing, and then no CUDA graphs are recorded."""
        if self._max_size is not None:
            return self._max_size
        if not torch.cuda.is_available():
            return _GIGABYTE
        total: int = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        return min(_GIGABYTE, total // 16)

    @max_size.setter
    def max_size(self, value: int) -> None:
        try:
            size = -1 if isinstance(value, bool) else operator.index(value)
        except TypeError:
            size = -1
        if size < 0:
            raise ValueError(
                f"max_size is {value!r}; accepted are whole numbers of bytes from 0 up"
            )
        self._max_size = size
        with self._changing():
            self._shrink(size)

    def clear(self) -> int:
        """Let go of all that no call uses; returns how many bytes that were."""
        with self._changing():
            gone = self.size
            self._idle.clear()
        return gone

    @contextmanager
    def lent(self, key: Key, make: Callable[[], StepBuffers]) -> Iterator[StepBuffers]:
        """Buffers for one call: kept ones of that key, or new ones. They are kept afterwards, unless the
        call failed."""
        idle: StepBuffers | None = None
        with self._changing():
            for place in reversed(range(len(self._idle))):
                if self._idle[place][0] == key:
                    idle = self._idle.pop(place)[1]
                    break
        buffers = make() if idle is None else idle
        yield buffers
        limit = self.max_size
        with self._changing():
            self._idle.append((key, buffers))
            self._shrink(limit)

    def release(self, function: str, heads: int, dim: int) -> None:
        """Let go of what served modules of that kind.

        The garbage collector may call it at any time, also while this thread changes the pool. So it
        never waits for the lock.
        """
        self._unwanted.append((function, heads, dim))
        self._sweep()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._lock:
            yield
        self._sweep()

    def _sweep(self) -> None:
        """Let go of what is unwanted. If the lock is taken, its holder does so once it has released it."""
        while self._unwanted and self._lock.acquire(blocking=False):
            try:
                unwanted = {self._unwanted.pop() for _ in range(len(self._unwanted))}
                self._idle = [
                    (key, buffers)
                    for key, buffers in self._idle
                    if (key.function, key.heads, key.dim) not in unwanted
                ]
            finally:
                self._lock.release()

    def _shrink(self, limit: int) -> None:
        kept: dict[torch.device, int] = {}
        idle: list[tuple[Key, StepBuffers]] = []
        for key, buffers in reversed(self._idle):
            size = kept.get(key.device, 0) + buffers.size
            if size <= limit:
                kept[key.device] = size
                idle.append((key, buffers))
        self._idle = idle[::-1]


#: What ``scan_registry.rnn`` keeps from one call to the next.
rnn_buffers = BufferPool()
