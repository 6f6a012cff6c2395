"""The JSON that commands print: every form has a schema, and what is really printed keeps to it."""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from importlib.resources import files
from io import StringIO
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from benching import time_quickly

from scan_registry.aot.compile import compile_variant, recipe
from scan_registry.artifact.archive import Archive
from scan_registry.cache import store as caches
from scan_registry.catalog.inventory import Catalogue, catalogue
from scan_registry.cli import inspect, main, parser, selftest
from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.ops.operator import operators

Schema = dict[str, Any]

DRAFT = "https://json-schema.org/draft/2020-12/schema"


def schemas() -> dict[str, Schema]:
    folder = files("scan_registry").joinpath("schemas")
    paths = {
        path.name.removesuffix(".json"): path
        for path in folder.iterdir()
        if path.name.endswith(".json")
    }
    first, *others = operators()
    for name in (first, *others):
        command = "bench" if name == first else f"bench-{name}"
        paths[command] = files("scan_registry.kernels").joinpath(name, "op", "bench.json")
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items()}


SCHEMAS = schemas()


def commands(program: argparse.ArgumentParser, *words: str) -> Iterator[tuple[str, ...]]:
    """Every command, with the words that call it, that has the option ``--json``."""
    for action in program._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from commands(below, *words, name)
        elif "--json" in action.option_strings:
            yield words


COMMANDS = list(commands(parser()))


def objects(schema: Any, where: str = "") -> Iterator[tuple[str, Schema]]:
    """Every part of a schema that describes an object."""
    if isinstance(schema, dict):
        if schema.get("type") == "object" or "properties" in schema:
            yield where, schema
        for key, value in schema.items():
            yield from objects(value, f"{where}/{key}")
    elif isinstance(schema, list):
        for number, value in enumerate(schema):
            yield from objects(value, f"{where}/{number}")


def test_every_command_that_prints_json_has_a_schema() -> None:
    assert {("inspect",), ("selftest",), ("verify",), ("cache", "list")} <= set(COMMANDS)
    assert {"-".join(words) for words in COMMANDS} <= set(SCHEMAS)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_one(name: str) -> None:
    schema = SCHEMAS[name]
    assert schema["$schema"] == DRAFT
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["type"] == "object"
    assert schema["description"]


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_leaves_nothing_open(name: str) -> None:
    """Objects that are no maps name all of their keys, which are described, at least together."""
    for where, schema in objects(SCHEMAS[name]):
        if "properties" not in schema:
            # A map, such as from the names of a launch's parameters to their values.
            assert isinstance(schema.get("additionalProperties"), dict), where
            continue
        assert schema.get("additionalProperties") is False, where
        assert set(schema.get("required", ())) <= set(schema["properties"]), where
        for key, value in schema["properties"].items():
            described = value.get("description") or schema.get("description")
            assert described, f"{where}/{key} has no description"


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What commands print, with something in the cache."""
    folder = tmp_path_factory.mktemp("printed")
    cache = caches.Cache(folder / "cache")
    variant, target = FAMILY.variants()[0], Target((10, 3))
    cache.put(recipe(variant, target).key, target, compile_variant(variant, target))
    cache.put("ab" * 32, target, compile_variant(variant, target))
    (path,) = (folder / "cache").glob("ab/*/*")
    path.write_bytes(path.read_bytes()[:100])

    def document(*words: str) -> Any:
        with redirect_stdout(StringIO()) as out:
            main([*words, "--json"])
        return json.loads(out.getvalue())

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCAN_REGISTRY_CACHE", str(folder / "cache"))
        patch.setattr(selftest, "_MOST_ON_CPU", 8000)  # which another test runs whole
        time_quickly(patch)
        yield documents(document, folder)


CASES = {
    "rnn": "lstm:1,16:float32",
    "causal_conv1d": "time_last:1,4,9:float32",
    "selective_state_update": "heads:2,3,4,8:float32",
    "selective_scan": "time_last:1,4,9,3:float32",
    "distributed": "channel_last:1,4,9:float32",
    "gated_scan": "hgrn:time_last:1,4,9:float32",
}
#: The words of each call, in the order in which they are printed.
CALLS = {
    "inspect": "inspect",
    "selftest": "selftest --device cpu --dtype float64",
    "bench": "bench --device cpu --bs 1 --d_model 8 --seqlens 16",
    **{f"bench-{name}": f"bench {name} --device cpu --case {case}" for name, case in CASES.items()},
    "verify": "verify",
    "cache-list": "cache list",
    "cache-export": "cache export {folder}/package --wheel",
    "cache-clear": "cache clear",
}
CALLS["bench-rnn"] += " --bs 1 --seqlens 3"
CALLS["bench-gated_scan"] += " --no-peers"  # which torch would have to compile


def documents(document: Callable[..., Any], folder: Path) -> dict[str, Any]:
    archs = [archive.arch.label for archive in catalogue().archives]
    few = {"verify": "verify --arch sm86"} if "sm86" in archs else {}
    calls = {**CALLS, **few}
    return {name: document(*call.format(folder=folder).split()) for name, call in calls.items()}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_printed_keeps_to_its_schema(printed: dict[str, Any], name: str) -> None:
    jsonschema.Draft202012Validator(SCHEMAS[name]).validate(printed[name])
    if name == "cache-list":
        assert {entry["state"] for entry in printed[name]["entries"]} == {"current", "damaged"}
    if name == "cache-export":
        assert printed[name]["left_out"]


@pytest.mark.parametrize("name", CALLS)
def test_a_key_more_or_less_is_noticed(printed: dict[str, Any], name: str) -> None:
    """At every depth: a schema that anything keeps to describes nothing."""
    validator = jsonschema.Draft202012Validator(SCHEMAS[name])

    def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
        if isinstance(value, dict):
            yield path
            for key, inner in value.items():
                yield from places(inner, (*path, key))
        elif isinstance(value, list) and value:
            yield from places(value[0], (*path, 0))

    def at(document: Any, path: tuple[str | int, ...]) -> Any:
        for step in path:
            document = document[step]
        return document

    small = shortened(printed[name])
    validator.validate(small)
    for path in places(small):
        for key in at(small, path):
            less = copy.deepcopy(small)
            del at(less, path)[key]
            assert not validator.is_valid(less), (path, key)
        more = copy.deepcopy(small)
        at(more, path)["unheard-of"] = None
        assert not validator.is_valid(more), path


def shortened(value: Any) -> Any:
    """The first of every list of objects is enough."""
    if isinstance(value, dict):
        return {key: shortened(inner) for key, inner in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [shortened(value[0])]
    return value


def test_a_damaged_archive_keeps_to_the_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``inspect`` then has null for what only the manifest tells."""
    archives = tuple(Archive(tmp_path / f"{label}.scanreg") for label in ("sm90", "sm75"))
    monkeypatch.setattr(inspect, "catalogue", lambda: Catalogue(archives))
    (tmp_path / "sm90.scanreg").write_bytes(b"garbage")
    assert main(["inspect", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(SCHEMAS["inspect"]).validate(document)
    assert [archive["size"] for archive in document["archives"]] == [7, None]
