"""Headers: what each rank tells the others about a call, in a fixed number of bytes.

Ranks compare the numbers of a header. Its text is for error messages.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

from torch import Tensor

#: Bytes of a header.
HEADER = 512
_WORDS = 12  # of 64 bits each, before the text: digest, failed, number, count of local numbers, local numbers
_LOCAL = 8


class Terms(NamedTuple):
    """What a rank's header says about its call.

    operator  name of the operator
    common    names and values that have to be equal on all ranks; the values' text is compared
    local     at most eight numbers that may differ between ranks; all ranks receive them
    number    a number that has to be equal on all ranks, but is no part of the call's kind, such as the number of the
              forward call that a backward pass belongs to
    spelled   ``number`` in words, for error messages
    """

    operator: str
    common: tuple[tuple[str, Any], ...]
    local: tuple[int, ...] = ()
    number: int = 0
    spelled: str = ""

    @property
    def kind(self) -> tuple[str, tuple[tuple[str, Any], ...]]:
        return self.operator, self.common


def encoded(terms: Terms | Exception) -> bytes:
    """The bytes of a rank's header."""
    local: tuple[int, ...] = ()
    if isinstance(terms, Exception):
        digest, failed, number = 0, 1, 0
        text = _cut(f"{type(terms).__name__}: {terms}")
    else:
        digest, said = _described(terms.operator, terms.common)
        failed, local, number = 0, terms.local, terms.number
        text = _cut(f"{terms.operator}: {terms.spelled}{', ' * bool(terms.spelled)}{said}")
        assert len(local) <= _LOCAL
    words = [digest, failed, number, len(local), *local]
    numbers = b"".join(int(w).to_bytes(8, "little", signed=True) for w in words)
    return numbers.ljust(8 * _WORDS, b"\0") + text.ljust(HEADER - 8 * _WORDS, b"\0")


@lru_cache(maxsize=1024)
def _described(operator: str, common: tuple[tuple[str, Any], ...]) -> tuple[int, str]:
    """The digest of operator and values, and the values in words."""
    words = ", ".join(f"{name} {value}" for name, value in common)
    digest = blake2b(f"{operator}: {words}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little") + 1, words


def _cut(text: str) -> bytes:
    return text.encode()[: HEADER - 8 * _WORDS]


def read_headers(headers: Tensor, terms: Terms | Exception) -> tuple[tuple[int, ...], ...]:
    """The local numbers of each rank. Raises the errors that ``group.agree`` describes."""
    found = [bytes(each) for each in headers.cpu().tolist()]
    numbers = [_numbers(each) for each in found]
    failed = [rank for rank, words in enumerate(numbers) if words[1]]
    if isinstance(terms, Exception):
        raise terms
    if failed:
        what = "; ".join(f"rank {rank}: {_text(found[rank])}" for rank in failed)
        raise RuntimeError(
            f"{terms.operator} was not run, as it failed on {len(failed)} of {len(found)} ranks: {what}"
        )
    if len({(words[0], words[2]) for words in numbers}) > 1:
        raise ValueError(_differences(found, numbers, terms))
    return tuple(tuple(words[4 : 4 + words[3]]) for words in numbers)


def _numbers(header: bytes) -> list[int]:
    return [
        int.from_bytes(header[8 * at : 8 * at + 8], "little", signed=True) for at in range(_WORDS)
    ]


def _text(header: bytes) -> str:
    return header[8 * _WORDS :].rstrip(b"\0").decode(errors="ignore")


def _differences(headers: list[bytes], numbers: list[list[int]], terms: Terms) -> str:
    """An error message that says which ranks gave which terms."""
    groups: dict[tuple[str, int], list[int]] = {}
    for rank, header in enumerate(headers):
        groups.setdefault((_text(header), numbers[rank][2]), []).append(rank)
    parts = [
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}"
        for (text, _), ranks in groups.items()
    ]
    return (
        f"{terms.operator} was not run, as the {len(headers)} ranks of the group do not agree: "
        + "; ".join(parts)
    )
