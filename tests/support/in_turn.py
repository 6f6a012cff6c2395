"""Fewer cases than all combinations of what is varied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any


def in_turn(values: Sequence[Any], *lists: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Every combination of the lists' items, after one of ``values``, which take turns: with two lists or more, each value comes
    with each item, if the lists have as many items as there are values."""
    for places in product(*(range(len(items)) for items in lists)):
        chosen = values[sum(places) % len(values)]
        yield chosen, *(items[place] for items, place in zip(lists, places, strict=True))
