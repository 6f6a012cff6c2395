"""The CUDA driver, by ctypes: loading modules, reading device attributes, naming errors.

This is the cold path; launches go through the C extension, which gets its addresses from here.
Nothing happens at import: the library is opened at the first use.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_uint, c_ulonglong, c_void_p
from functools import cache

from scan_registry.hardware import _launcher

_HOT = (
    "cuLaunchKernel",
    "cuMemsetD8Async",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
)
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CU_FUNC_ATTRIBUTE_…
_CAPTURE_MODE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_…
_STREAM_NON_BLOCKING = 1  # CU_STREAM_…

#: Errors of loading that are about the image, and leave the device usable.
UNFIT = frozenset(
    {
        200,  # CUDA_ERROR_INVALID_IMAGE
        209,  # CUDA_ERROR_NO_BINARY_FOR_GPU
        218,  # CUDA_ERROR_INVALID_PTX
        221,  # CUDA_ERROR_JIT_COMPILER_NOT_FOUND
        222,  # CUDA_ERROR_UNSUPPORTED_PTX_VERSION
        223,  # CUDA_ERROR_JIT_COMPILATION_DISABLED
        300,  # CUDA_ERROR_INVALID_SOURCE
        500,  # CUDA_ERROR_NOT_FOUND
    }
)


class DriverError(RuntimeError):
    """A driver call that failed: the call, the driver's name for the error, and its words."""

    def __init__(self, call: str, status: int, subject: object = None) -> None:
        of = f": {subject}" if subject is not None else ""
        super().__init__(f"{call} failed with {error_name(status)}{of}")
        self.status = status


@cache
def library() -> ctypes.CDLL:
    """libcuda, with the launcher bound to it. ``SCAN_REGISTRY_LIBCUDA`` names another file."""
    path = os.environ.get("SCAN_REGISTRY_LIBCUDA", "libcuda.so.1")
    try:
        driver = ctypes.CDLL(path)
    except OSError as error:
        raise RuntimeError(f"the CUDA driver {path} cannot be opened: {error}") from error
    try:
        addresses = [ctypes.cast(getattr(driver, name), c_void_p).value or 0 for name in _HOT]
    except AttributeError as error:
        raise RuntimeError(f"{path} is no CUDA driver of today: {error}") from error
    _launcher.bind(*addresses)
    return driver


def error_name(status: int) -> str:
    """``CUDA_ERROR_OUT_OF_MEMORY (out of memory)`` for 2."""
    name, words = c_char_p(), c_char_p()
    if library().cuGetErrorName(c_int(status), byref(name)) or not name.value:
        return f"error {status}"
    library().cuGetErrorString(c_int(status), byref(words))
    return f"{name.value.decode()} ({(words.value or b'').decode()})"


def _check(call: str, status: int, subject: object = None) -> None:
    if status:
        raise DriverError(call, status, subject)


@cache
def version() -> tuple[int, int]:
    """The CUDA version that the driver supports, such as (13, 0)."""
    number = c_int()
    _check("cuDriverGetVersion", library().cuDriverGetVersion(byref(number)))
    return number.value // 1000, number.value % 1000 // 10


@cache
def _device(ordinal: int) -> c_int:
    driver, device = library(), c_int()
    _check("cuInit", driver.cuInit(0))
    _check("cuDeviceGet", driver.cuDeviceGet(byref(device), c_int(ordinal)))
    return device


@cache
def primary_context(ordinal: int) -> int:
    """The device's primary context, which torch uses too; kept for the life of the process."""
    device, context = _device(ordinal), c_void_p()
    retained = library().cuDevicePrimaryCtxRetain(byref(context), device)
    _check("cuDevicePrimaryCtxRetain", retained)
    return context.value or 0


def load(context: int, image: bytes, entry: str, dynamic_shared: int, subject: object) -> int:
    """Load ``image`` (a cubin, or PTX for the driver to compile) and return the function ``entry``.

    The module stays loaded for the life of the process. ``subject`` prints as what errors call it.
    """
    driver, module, function, previous = library(), c_void_p(), c_void_p(), c_void_p()
    _check("cuCtxPushCurrent", driver.cuCtxPushCurrent_v2(c_void_p(context)), subject)
    # Loading allocates, which would break off a CUDA graph's capture unless that is told to relax.
    mode = c_int(_CAPTURE_MODE_RELAXED)
    try:
        _check(
            "cuThreadExchangeStreamCaptureMode",
            driver.cuThreadExchangeStreamCaptureMode(byref(mode)),
            subject,
        )
    except DriverError:
        driver.cuCtxPopCurrent_v2(byref(previous))
        raise
    try:
        # PTX has to end with a zero byte; a cubin may.
        _check("cuModuleLoadData", driver.cuModuleLoadData(byref(module), image + b"\0"), subject)
        _check(
            "cuModuleGetFunction",
            driver.cuModuleGetFunction(byref(function), module, entry.encode()),
            subject,
        )
        if dynamic_shared:  # has to be asked for where it is over 48 KiB with what is static
            _check(
                "cuFuncSetAttribute",
                driver.cuFuncSetAttribute(
                    function, c_int(_MAX_DYNAMIC_SHARED_SIZE_BYTES), c_int(dynamic_shared)
                ),
                subject,
            )
    except DriverError:
        if module:
            driver.cuModuleUnload(module)
        raise
    finally:
        driver.cuThreadExchangeStreamCaptureMode(byref(mode))
        driver.cuCtxPopCurrent_v2(byref(previous))
    return function.value or 0


# --- CUDA graphs ------------------------------------------------------------------------------


class CaptureError(RuntimeError):
    """A capture that failed, for example because another thread synchronised the device."""


@contextmanager
def _current(ordinal: int) -> Iterator[ctypes.CDLL]:
    """The driver, with the device's primary context current in this thread."""
    driver, previous = library(), c_void_p()
    _check("cuCtxPushCurrent", driver.cuCtxPushCurrent_v2(c_void_p(primary_context(ordinal))))
    try:
        yield driver
    finally:
        driver.cuCtxPopCurrent_v2(byref(previous))


def create_stream(ordinal: int) -> int:
    """A non-blocking stream, which does not synchronise with the default stream. It stays for the life of the
    process."""
    stream = c_void_p()
    with _current(ordinal) as driver:
        _check("cuStreamCreate", driver.cuStreamCreate(byref(stream), c_uint(_STREAM_NON_BLOCKING)))
    return stream.value or 0


def capture(ordinal: int, stream: int, body: Callable[[], None]) -> int:
    """What ``body`` launches on the stream, as a graph that can be launched. Nothing runs meanwhile.

    ``CaptureError`` if the driver ended the capture; errors of ``body`` are passed on.
    """
    with _current(ordinal) as driver:
        graph, executable, on = c_void_p(), c_void_p(), c_void_p(stream)
        status = driver.cuStreamBeginCapture_v2(on, c_int(_CAPTURE_MODE_RELAXED))
        if status:
            raise CaptureError(f"cuStreamBeginCapture failed with {error_name(status)}")
        try:
            body()
        finally:
            status = driver.cuStreamEndCapture(on, byref(graph))
        if status or not graph.value:
            raise CaptureError(f"cuStreamEndCapture failed with {error_name(status)}")
        status = driver.cuGraphInstantiateWithFlags(byref(executable), graph, c_ulonglong(0))
        driver.cuGraphDestroy(graph)
        if status:
            raise CaptureError(f"cuGraphInstantiate failed with {error_name(status)}")
    return executable.value or 0


def launch_graph(ordinal: int, executable: int, stream: int) -> None:
    """Launch what ``capture`` made."""
    with _current(ordinal) as driver:
        launched = driver.cuGraphLaunch(c_void_p(executable), c_void_p(stream))
        _check("cuGraphLaunch", launched)


def destroy_graph(ordinal: int, executable: int) -> None:
    """Destroy what ``capture`` made; launches of it that still run end as they should."""
    with _current(ordinal) as driver:
        driver.cuGraphExecDestroy(c_void_p(executable))


# --- Devices ----------------------------------------------------------------------------------


def attribute(ordinal: int, number: int) -> int:
    """A device attribute, by its number in the driver API."""
    device, value = _device(ordinal), c_int()
    read = library().cuDeviceGetAttribute(byref(value), c_int(number), device)
    _check("cuDeviceGetAttribute", read)
    return value.value


def device_name(ordinal: int) -> str:
    """The device's marketing name."""
    device, text = _device(ordinal), ctypes.create_string_buffer(256)
    _check("cuDeviceGetName", library().cuDeviceGetName(text, c_int(256), device))
    return text.value.decode()
