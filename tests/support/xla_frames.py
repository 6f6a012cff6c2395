"""XLA's side of its foreign function interface, for tests of the handlers in ``csrc/xla.h`` without XLA.

Structs are those of xla/ffi/api/c_api.h, version 0.3, written down here a second time: from the header, not from the C code.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import (
    CFUNCTYPE,
    POINTER,
    byref,
    c_char_p,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_void_p,
)
from typing import Any

METADATA, STRING, BUFFER, INITIALIZE, EXECUTE = 1, 4, 1, 2, 3
STREAM = 0x5EED


def struct(*fields: tuple[str, Any], sized: bool = True) -> Any:
    head = [("struct_size", c_size_t), ("extension_start", c_void_p)] if sized else []
    return type("Struct", (ctypes.Structure,), {"_fields_": [*head, *fields]})


Version = struct(("major", c_int), ("minor", c_int))
Buffer = struct(("dtype", c_int), ("data", c_void_p), ("rank", c_int64), ("dims", c_void_p))
Listed = struct(("size", c_int64), ("types", c_void_p), ("items", c_void_p))
Span = struct(("ptr", c_char_p), ("len", c_size_t), sized=False)
Attributes = struct(
    ("size", c_int64), ("types", c_void_p), ("names", c_void_p), ("attrs", c_void_p)
)
ErrorCreate = struct(("message", c_char_p), ("code", c_int))
StreamGet = struct(("ctx", c_void_p), ("stream", c_void_p))
OrdinalGet = struct(("ctx", c_void_p), ("ordinal", c_int32))
Extension = struct(
    ("struct_size", c_size_t),
    ("type", c_int),
    ("next", c_void_p),
    ("metadata", c_void_p),
    sized=False,
)
Metadata = struct(
    ("struct_size", c_size_t),
    ("version", Version),
    ("traits", c_uint32),
    ("state", c_int64),
    sized=False,
)
CREATE = CFUNCTYPE(c_void_p, POINTER(ErrorCreate))
GET_STREAM = CFUNCTYPE(c_void_p, POINTER(StreamGet))
GET_ORDINAL = CFUNCTYPE(c_void_p, POINTER(OrdinalGet))
Api = struct(
    ("version", Version),
    ("internal", c_void_p),
    ("Error_Create", CREATE),
    ("Error_GetMessage", c_void_p),
    ("Error_Destroy", c_void_p),
    ("Handler_Register", c_void_p),
    ("Stream_Get", GET_STREAM),
    ("Type_Register", c_void_p),
    ("ExecutionContext_Get", c_void_p),
    ("State_Set", c_void_p),
    ("State_Get", c_void_p),
    ("DeviceMemory_Allocate", c_void_p),
    ("DeviceMemory_Free", c_void_p),
    ("ThreadPool_Schedule", c_void_p),
    ("ThreadPool_NumThreads", c_void_p),
    ("Future_Create", c_void_p),
    ("Future_SetAvailable", c_void_p),
    ("Future_SetError", c_void_p),
    ("RunId_Get", c_void_p),
    ("DeviceOrdinal_Get", GET_ORDINAL),
)
Frame = struct(
    ("api", POINTER(Api)),
    ("ctx", c_void_p),
    ("stage", c_int),
    ("args", Listed),
    ("rets", Listed),
    ("attrs", Attributes),
    ("future", c_void_p),
)
HANDLER = CFUNCTYPE(c_void_p, POINTER(Frame))


class Xla:
    """Calls a handler as XLA does, on device ``ordinal``. ``minor`` and ``newest`` say how new this XLA is."""

    def __init__(self, ordinal: int = 0, minor: int = 3, newest: bool = True) -> None:
        self.messages: list[str] = []

        def create(arguments: Any) -> int:
            self.messages.append(arguments.contents.message.decode())
            return 1

        def stream(arguments: Any) -> None:
            arguments.contents.stream = STREAM

        def on(arguments: Any) -> None:
            arguments.contents.ordinal = ordinal

        size = ctypes.sizeof(Api) if newest else Api.DeviceOrdinal_Get.offset
        self._api = Api(
            size,
            version=Version(ctypes.sizeof(Version), None, 0, minor),
            Error_Create=CREATE(create),
            Stream_Get=GET_STREAM(stream),
            DeviceOrdinal_Get=GET_ORDINAL(on),
        )

    def metadata(self, handler: int) -> tuple[int, int, int]:
        """The version and the traits that a handler states."""
        stated = Metadata(ctypes.sizeof(Metadata))
        extension = Extension(
            ctypes.sizeof(Extension), METADATA, None, ctypes.cast(byref(stated), c_void_p)
        )
        frame = Frame(ctypes.sizeof(Frame), ctypes.cast(byref(extension), c_void_p))
        frame.api = ctypes.pointer(self._api)
        assert HANDLER(handler)(byref(frame)) is None
        return stated.version.major, stated.version.minor, stated.traits

    def call(
        self,
        handler: int,
        arguments: Sequence[int],
        results: Sequence[int],
        attributes: Mapping[str, str],
        stage: int = EXECUTE,
    ) -> str | None:
        """Call with the addresses of buffers; the message of the error, or None."""
        kept: list[Any] = []

        def listed(addresses: Sequence[int]) -> Any:
            buffers = [Buffer(ctypes.sizeof(Buffer), None, 11, address) for address in addresses]
            pointers = (c_void_p * len(buffers))(*map(ctypes.addressof, buffers))
            types = (c_int * len(buffers))(*[BUFFER] * len(buffers))
            kept.extend([buffers, pointers, types])
            places = (ctypes.cast(array, c_void_p) for array in (types, pointers))
            return Listed(ctypes.sizeof(Listed), None, len(buffers), *places)

        def spans(texts: Sequence[str]) -> Any:
            own = [Span(text.encode(), len(text.encode())) for text in texts]
            pointers = (c_void_p * len(own))(*map(ctypes.addressof, own))
            kept.extend([own, pointers])
            return ctypes.cast(pointers, c_void_p)

        ordered = sorted(attributes.items())
        types = (c_int * len(ordered))(*[STRING] * len(ordered))
        of = Attributes(
            ctypes.sizeof(Attributes),
            None,
            len(ordered),
            ctypes.cast(types, c_void_p),
            spans([name for name, _ in ordered]),
            spans([value for _, value in ordered]),
        )
        api = ctypes.pointer(self._api)
        inputs, outputs = listed(arguments), listed(results)
        frame = Frame(ctypes.sizeof(Frame), None, api, None, stage, inputs, outputs, of)
        before = len(self.messages)
        failed = HANDLER(handler)(byref(frame))
        assert bool(failed) == (len(self.messages) > before)
        return self.messages[-1] if failed else None
