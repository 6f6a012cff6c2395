"""CUDA graphs of what a function launches, recorded so that other threads do not notice.

``torch.cuda.graph`` synchronises the device and puts torch's allocator and random number generator into
capture mode. CUDA calls of other threads can fail during such a capture. Here the driver captures a private
stream in CU_STREAM_CAPTURE_MODE_RELAXED, which restricts no other thread. One conflict remains: if another
thread synchronises the whole device during our capture of some milliseconds, CUDA fails both its call and the
capture. The capture is then discarded, and everything is launched without a graph.

A recorded graph holds the address of cuBLAS's workspace, which torch keeps for each thread and stream. The
workspace is therefore allocated from a private memory pool, whose memory torch never reuses. There is one
capture stream and one pool for each stream of the user's. Graphs that share a workspace are launched on that
user's stream only, so they never overlap. The capture stream is only captured: a kernel that really ran on it
could overlap such a graph and corrupt the workspace.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from scan_registry.hardware import driver


def possible(tensor: Tensor) -> bool:
    """Whether launches on the tensor's device can be recorded: not where somebody records them already."""
    return tensor.is_cuda and not is_capturing(tensor)


def is_capturing(tensor: Tensor) -> bool:
    """Whether what is launched on the tensor's device goes to a graph that somebody records."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


class Graph:
    """A recorded graph; it is destroyed with this object."""

    def __init__(self, ordinal: int, executable: int) -> None:
        self._ordinal, self._executable = ordinal, executable

    def launch(self) -> None:
        """Launch it on the current stream of its device; ``DriverError`` if that fails."""
        stream = torch.cuda.current_stream(self._ordinal).cuda_stream
        driver.launch_graph(self._ordinal, self._executable, stream)

    def __del__(self) -> None:
        try:  # noqa: SIM105  at the end of a process, names of modules such as `suppress` are None
            driver.destroy_graph(self._ordinal, self._executable)
        except Exception:  # the driver may have ended, too
            pass


@dataclass
class _Recorder:
    """A stream for recordings, memory for them, and the lock of whoever uses both."""

    stream: torch.cuda.ExternalStream
    pool: torch.cuda.MemPool = field(default_factory=torch.cuda.MemPool)
    lock: threading.Lock = field(default_factory=threading.Lock)


_recorders: dict[tuple[int, int], _Recorder] = {}
_making = threading.Lock()


def _recorder(device: torch.device) -> _Recorder:
    """Of the current stream."""
    key = device.index, torch.cuda.current_stream(device).cuda_stream
    with _making:
        if key not in _recorders:
            stream = driver.create_stream(device.index)
            _recorders[key] = _Recorder(torch.cuda.ExternalStream(stream, device=device))
        return _recorders[key]


def record(device: torch.device, body: Callable[[], None]) -> Graph | None:
    """What ``body`` launches, as a graph; None if it could not be recorded, and nothing was launched.

    The thread has launched ``body`` before, so that libraries have loaded what no capture may load.
    """
    recorder = _recorder(device)
    if not recorder.lock.acquire(blocking=False):
        return None
    try:
        with (
            torch.cuda.stream(recorder.stream),
            torch.cuda.use_mem_pool(recorder.pool, device),
        ):
            # Gives cuBLAS its memory for this thread and stream, which no capture may allocate.
            torch.cuda.current_blas_handle()
            executable = driver.capture(device.index, recorder.stream.cuda_stream, body)
    except (driver.CaptureError, RuntimeError):
        # Another thread waited for the device, or ``body`` cannot be captured. It is launched as it is
        # instead, and says itself if something is wrong with it.
        _forget_error(device)
        return None
    finally:
        recorder.lock.release()
    return Graph(device.index, executable)


def _forget_error(device: torch.device) -> None:
    """CUDA's runtime reports an error of this thread once more, at the next launch: let it be this one."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device)
