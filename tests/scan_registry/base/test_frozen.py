"""Dataclasses that share their methods: they are to be told from the standard library's by nothing else."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from scan_registry.base import frozen


@frozen.dataclass(frozen=True, order=True)
class Shared:
    one: int
    two: str = "two"
    many: Any = dataclasses.field(default_factory=list)


def test_fields_are_given_by_place_or_by_name_or_not_at_all() -> None:
    expected = {"one": 1, "two": "x", "many": [3]}
    for shared in (Shared(1, "x", [3]), Shared(1, many=[3], two="x")):
        assert [*vars(shared).items()] == [*expected.items()]
    assert (Shared(1).two, Shared(1).many) == ("two", [])
    assert Shared(1).many is not Shared(1).many


@pytest.mark.parametrize(
    ("places", "names"),
    [((), {}), ((), {"two": "x"}), ((1, "x", [], 4), {}), ((1,), {"one": 1}), ((1,), {"three": 3})],
)
def test_wrong_arguments(places: tuple[Any, ...], names: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"one|three|4"):
        Shared(*places, **names)


def test_nothing_can_be_set_or_deleted() -> None:
    shared: Any = Shared(1)
    with pytest.raises(dataclasses.FrozenInstanceError, match="other"):
        shared.other = 2
    with pytest.raises(dataclasses.FrozenInstanceError, match="one"):
        del shared.one
    assert shared == Shared(1)


def test_comparisons() -> None:
    assert Shared(1) != Shared(2)
    assert Shared(1) != (1, "two", [])
    assert Shared(1, "a") < Shared(1, "b") <= Shared(1, "b")
    assert Shared(2) > Shared(1, "z") >= Shared(1, "z")
    with pytest.raises(TypeError):
        _ = Shared(1) < (1, "two", [])
    assert len({Shared(1, many=()), Shared(1, many=()), Shared(2, many=())}) == 2


def test_it_is_a_dataclass() -> None:
    shared = Shared(1, many=[1])
    assert dataclasses.asdict(shared) == {"one": 1, "two": "two", "many": [1]}
    assert dataclasses.replace(shared, two="x") == Shared(1, "x", [1])
    assert repr(shared) == "Shared(one=1, two='two', many=[1])"
    match shared:
        case Shared(one, two):
            assert (one, two) == (1, "two")
    assert copy.deepcopy(shared) == pickle.loads(pickle.dumps(shared)) == shared


def test_other_classes_are_not_made() -> None:
    with pytest.raises(ValueError, match="not frozen"):
        frozen.dataclass(frozen=False)
