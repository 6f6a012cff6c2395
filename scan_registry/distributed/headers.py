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
#: Words of 64 bits before the text: digest, failed, number, count of local numbers, local numbers.
WORDS = 12
#: The most local numbers.
LOCAL = WORDS - 4


class Terms(NamedTuple):
    """What a rank's header says about its call.

    operator  name of the operator
    common    names and values that have to be equal on all ranks; the values' text is compared
    local     at most eight numbers that may differ between ranks; all ranks receive them
    spelled   what else has to be equal, in words for error messages; ``common`` has a digest of it
    number    a number that has to be equal on all ranks, but is no part of the call's kind: in a backward pass the number of
              the forward call that it belongs to
    digest    a number that has to be equal on all ranks, but is no part of the call's kind: of bounds, for example
    """

    operator: str
    common: tuple[tuple[str, Any], ...]
    local: tuple[int, ...] = ()
    number: int = 0
    digest: int = 0
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
        digest = (digest + terms.digest) % (1 << 62) + 1
        failed, local, number = 0, terms.local, terms.number
        text = _cut(f"{terms.operator}: {terms.spelled}{', ' * bool(terms.spelled)}{said}")
        assert len(local) <= LOCAL
    words = [digest, failed, number, len(local), *local]
    numbers = b"".join(int(w).to_bytes(8, "little", signed=True) for w in words)
    return numbers.ljust(8 * WORDS, b"\0") + text.ljust(HEADER - 8 * WORDS, b"\0")


@lru_cache(maxsize=1024)
def _described(operator: str, common: tuple[tuple[str, Any], ...]) -> tuple[int, str]:
    """The digest of operator and values, and the values in words."""
    words = ", ".join(f"{name} {value}" for name, value in common)
    digest = blake2b(f"{operator}: {words}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little"), words


def _cut(text: str) -> bytes:
    return text.encode()[: HEADER - 8 * WORDS]


def read_headers(headers: Tensor, terms: Terms | Exception) -> tuple[tuple[int, ...], ...]:
    """The local numbers of each rank. Raises the errors that ``agree`` describes. ``headers`` are 64-bit words, those of a
    header and more for each rank."""
    numbers = headers[:, :WORDS].tolist()
    if isinstance(terms, Exception):
        raise terms
    failed = [rank for rank, words in enumerate(numbers) if words[1]]
    if failed:
        texts = _texts(headers)
        what = "; ".join(f"rank {rank}: {texts[rank]}" for rank in failed)
        raise RuntimeError(
            f"{terms.operator} was not run, as it failed on {len(failed)} of {len(numbers)} ranks: {what}"
        )
    (digest, _, number, *_), *others = numbers
    if any(words[0] != digest or words[2] != number for words in others):
        raise ValueError(_differences(_texts(headers), numbers, terms))
    return tuple([tuple(words[4 : 4 + words[3]]) for words in numbers])


def _texts(headers: Tensor) -> list[str]:
    words = headers[:, WORDS : HEADER // 8].tolist()
    raw = [b"".join(word.to_bytes(8, "little", signed=True) for word in row) for row in words]
    return [text.rstrip(b"\0").decode(errors="ignore") for text in raw]


def _differences(texts: list[str], numbers: list[list[int]], terms: Terms) -> str:
    """An error message that says which ranks gave which terms."""
    groups: dict[str, list[int]] = {}
    for rank, (text, words) in enumerate(zip(texts, numbers, strict=True)):
        of_call = f", of call {words[2]}" if words[2] else ""
        groups.setdefault(text + of_call, []).append(rank)
    parts = [
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in groups.items()
    ]
    return (
        f"{terms.operator} was not run, as the {len(texts)} ranks of the group do not agree: "
        + "; ".join(parts)
    )
