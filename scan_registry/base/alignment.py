"""How far addresses are aligned."""

from __future__ import annotations

from collections.abc import Iterable


def common_alignment(addresses: Iterable[int]) -> int:
    """Bytes, at most 16, that divide every address."""
    together = 16
    for address in addresses:
        together |= address
    return together & -together
