"""Dataclasses that share their methods: they are to be told from the standard library's by nothing else."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from scan_registry.base import frozen


@frozen.dataclass(frozen=True, order=True)
class Shared:
    one: int
    two: str = "two"
    many: Any = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, order=True)
class Standard:
    one: int
    two: str = "two"
    many: Any = dataclasses.field(default_factory=list)


BOTH = pytest.mark.parametrize("make", [Shared, Standard])


@BOTH
def test_fields_are_given_by_place_or_by_name_or_not_at_all(make: Any) -> None:
    for made in (make(1, "x", [3]), make(1, many=[3], two="x"), make(many=[3], two="x", one=1)):
        assert vars(made) == {"one": 1, "two": "x", "many": [3]}
        assert list(vars(made)) == ["one", "two", "many"]
    assert (make(1).two, make(1).many) == ("two", [])
    assert make(1).many is not make(1).many


@BOTH
@pytest.mark.parametrize(
    "call",
    [
        lambda make: make(),
        lambda make: make(two="x"),
        lambda make: make(1, "x", [], 4),
        lambda make: make(1, one=1),
        lambda make: make(1, three=3),
    ],
)
def test_wrong_arguments(make: Any, call: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"one|three|4"):
        call(make)


@BOTH
def test_nothing_can_be_set_or_deleted(make: Any) -> None:
    made = make(1)
    with pytest.raises(dataclasses.FrozenInstanceError, match="one"):
        made.one = 2
    with pytest.raises(dataclasses.FrozenInstanceError, match="other"):
        made.other = 2
    with pytest.raises(dataclasses.FrozenInstanceError, match="one"):
        del made.one
    assert vars(made) == vars(make(1))


@BOTH
def test_comparisons(make: Any) -> None:
    assert make(1) == make(1)
    assert make(1) != make(2)
    assert make(1) != (1, "two", [])
    assert make(1, "a") < make(1, "b") <= make(1, "b")
    assert make(2) > make(1, "z") >= make(1, "z")
    with pytest.raises(TypeError):
        _ = make(1) < (1, "two", [])
    assert hash(make(1, many=())) == hash(make(1, many=()))
    assert len({make(1, many=()), make(1, many=()), make(2, many=())}) == 2
    with pytest.raises(TypeError, match="unhashable"):
        hash(make(1))


def test_classes_of_equal_fields_are_not_equal() -> None:
    one, other = Shared(1), Standard(1)
    assert one != other


@BOTH
def test_it_is_a_dataclass(make: Any) -> None:
    made = make(1, many=[1])
    assert dataclasses.is_dataclass(made)
    assert [field.name for field in dataclasses.fields(made)] == ["one", "two", "many"]
    assert dataclasses.asdict(made) == {"one": 1, "two": "two", "many": [1]}
    assert dataclasses.replace(made, two="x") == make(1, "x", [1])
    assert repr(made) == f"{make.__name__}(one=1, two='two', many=[1])"
    match made:
        case make(one, two):
            assert (one, two) == (1, "two")


@BOTH
def test_copies_are_equal(make: Any) -> None:
    made = make(1, many=[1])
    assert copy.deepcopy(made) == pickle.loads(pickle.dumps(made)) == made


def test_other_classes_are_not_made() -> None:
    with pytest.raises(ValueError, match="not frozen"):
        frozen.dataclass(frozen=False)
