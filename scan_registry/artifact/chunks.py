"""Chunks: neighbouring binaries of an archive, compressed together (raw LZMA2).

Binaries of one family are much alike, so a chunk of them is a fraction of its parts compressed alone.
A chunk is small, which bounds the time to get at the last binary in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

try:
    import lzma
except ImportError:
    lzma = None  # type: ignore[assignment]

__all__ = ["SIZE", "SMALL", "Opened", "compress", "decompress"]

#: Bytes of binaries in a chunk, unless a single one is larger. Larger chunks make smaller archives, but it takes
#: longer to reach the last binary of a chunk: 10 ms a megabyte. Small chunks are for the binaries that are used most.
SIZE, SMALL = 1 << 21, 3 << 17

#: LZMA settings. Machine code repeats itself at multiples of 16 bytes, the size of an instruction; PTX is text. With
#: these settings each is some percent smaller. A chunk says itself how it was compressed.
_CODE, _TEXT = {"lc": 0, "lp": 4, "pb": 4}, {"pb": 0}

_MISSING = "needs the module lzma, which this Python was built without"


def compress(content: bytes) -> bytes:
    """A chunk of ``content``; ``OSError`` where Python lacks the module lzma."""
    if lzma is None:
        raise OSError(_MISSING)
    settings = _CODE if content.startswith(b"\x7fELF") else _TEXT
    return lzma.compress(content, lzma.FORMAT_RAW, filters=_filters(settings))


def decompress(chunk: bytes, size: int) -> bytes:
    """The first ``size`` bytes of a chunk's content, or all if there are not as many.

    ``ValueError`` if it is damaged before their end, or where Python lacks the module lzma.
    """
    return Opened(chunk).part(0, size)


class Opened:
    """A chunk, decompressed as far as anything was asked of it; errors are those of ``decompress``."""

    def __init__(self, chunk: bytes) -> None:
        if lzma is None:
            raise ValueError(_MISSING)
        self._decompressor = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=_filters({}))
        self._rest, self._content = chunk, bytearray()

    def part(self, start: int, size: int) -> bytes:
        """So many bytes of the content from ``start`` on, or less if it ends before."""
        missing = start + size - len(self._content)
        if missing > 0 and not self._decompressor.eof:
            rest, self._rest = self._rest, b""
            try:
                self._content += self._decompressor.decompress(rest, missing)
            except (lzma.LZMAError, OverflowError) as error:
                raise ValueError(f"cannot be decompressed: {error}") from error
        return bytes(self._content[start : start + size])


def _filters(settings: Mapping[str, int]) -> list[dict[str, Any]]:
    search = {"nice_len": 273, "depth": 1000}  # as long as it may take
    return [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": SIZE, **search, **settings}]
