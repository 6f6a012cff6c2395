"""One word for one thing: names that were given up are not used again.

Sources are read token by token, so that comments, messages and English sentences are free to use any word.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
from processes import captured

from scan_registry.kernels import families

ROOT = Path(__file__).resolve().parents[1]

#: Names that were given up, and what is written instead.
NAMES: Mapping[str, str] = {
    "ToldOf": "TileDescriptor",
    "Folder": "LookbackWarp",
    "Fetched": "what was fetched, by its name",
    "Seat": "CtaRank",
    "Carried": "RunningPrefix",
    "Passage": "RunningPrefix",
    "Entrance": "BlockPrefix",
    "Room": "SharedStorage, StepBuffers or StateLayout",
    "StateRoom": "StateLayout",
    "WITH_REST": "COMPENSATED",
    "Share": "KernelCall",
    "reduction_share": "make_reduction_call",
    "Question": "Decision",
    "Asked": "Decision or KernelCall",
    "asked": "request",
    "Offer": "Candidate",
    "offer": "candidate",
    "offers": "candidates",
    "Tuned": "TuningMatch or TuningResult",
    "strangeness": "arch_distance",
    "crowds": "exceeds_residency",
    "differs": "kind_mismatch",
    "filled": "tile_efficiency",
    "nobody_watches": "dispatch_is_trivial",
    "PlainCalls": "FastPath",
    "PlainLaunch": "FastLaunch",
    "plain_scan": "fast_scan",
    "Patience": "AdaptiveBackoff",
    "ragged": "misaligned",
}
#: Words that are no part of any name, and what is written instead.
WORDS: Mapping[str, str] = {
    "rung": "tier",
    "rungs": "tiers",
    "multiprocessor": "SM",
    "multiprocessors": "sm_count",
    "peer": "baseline",
    "peers": "baselines",
    "goal": "target",
    "goals": "targets",
    "proven": "gpu_tested",
    "unproven": "not gpu_tested",
}
#: Static parameters of kernels, and what stands in their place.
STATICS: Mapping[str, str] = {
    "ahead": "prefix_lead",
    "early": "aggregate_lead",
    "once": "single_wave",
    "parts": "ctas_per_column",
    "across": "lanes_across",
    "rest": "compensated",
}
#: What those that have values by name may not be.
ACCESSES: Mapping[str, str] = {"ragged": "misaligned", "packed": "varlen"}
#: Names of files without their endings.
STEMS: Mapping[str, str] = {
    "told": "tile_status",
    "exchange": "tile_state or hidden_state_exchange",
    "tiles": "lookback",
    "once": "single_wave",
    "shared_walk": "multi_cta_column",
    "column_walk": "column_serial",
    "fresh": "workspace_init",
    "offers": "candidates",
    "plain": "fast_path",
    "rungs": "tiers",
    "peers": "baselines",
    "floor": "roofline",
    "goals": "targets",
    "stream": "roofline, for the family",
}
#: A name in a file in which it is right, and why.
ALLOWED: Mapping[tuple[str, str], str] = {
    ("_MULTIPROCESSOR_COUNT", "scan_registry/hardware/device.py"): "CUDA's own name of the number",
    ("filled", "kernels/linear_scan/multi_cta_column.cuh"): "the stage that was filled last",
    ("stream", "kernels/roofline/stream.cu"): "streaming is what that kernel does",
}

PYTHON, C = (".py", ".pyi"), (".c", ".h", ".cu", ".cuh", ".hpp")
#: Comments, strings and characters.
_NO_CODE = re.compile(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.DOTALL)
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


@cache
def sources() -> tuple[str, ...]:
    """Files that belong to the repository, from its root."""
    listed = captured(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT)
    if listed.returncode:
        pytest.skip("this is no git checkout")
    return tuple(
        name
        for name in listed.stdout.splitlines()
        if name.endswith(PYTHON + C) and (ROOT / name).is_file()
    )


def identifiers(name: str) -> Iterator[str]:
    text = (ROOT / name).read_text(encoding="utf-8")
    if name.endswith(PYTHON):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME:
                yield token.string
    else:
        yield from re.findall(r"[A-Za-z_]\w*", _NO_CODE.sub(" ", text))


@cache
def better(identifier: str) -> str | None:
    """What to write in its place; None if it may stay."""
    if identifier in NAMES:
        return NAMES[identifier]
    words = {each.lower() for each in _PARTS.findall(identifier)}
    return next((better for word, better in WORDS.items() if word in words), None)


def test_names_that_were_given_up_are_not_used() -> None:
    """Only files that have such a word somewhere, be it in a comment, are read token by token, which takes long."""
    words = re.compile(r"[^\W\d]\w*")
    found = {
        f"{name}: {each}, which is {instead}"
        for name in sources()
        if any(map(better, words.findall((ROOT / name).read_text(encoding="utf-8"))))
        for each in set(identifiers(name))
        if (instead := better(each)) and (each, name) not in ALLOWED
    }
    assert not found, "\n".join(sorted(found))


def test_files_are_named_by_the_same_words() -> None:
    found = {
        f"{name}, which is {STEMS[stem]}"
        for name in sources()
        if (stem := Path(name).stem.removeprefix("test_")) in STEMS and (stem, name) not in ALLOWED
    }
    assert not found, "\n".join(sorted(found))


def test_static_parameters_are_named_by_the_same_words() -> None:
    for family in families().values():
        for kernel in family.kernels:
            for variant in kernel.variants:
                statics = dict(variant.statics)
                assert not statics.keys() & STATICS.keys(), str(variant)
                assert statics.get("access") not in ACCESSES, str(variant)


def test_macros_of_static_parameters_are_gone() -> None:
    given_up = {each.upper() for each in STATICS}
    for name in sources():
        if name.startswith("kernels/") and name.endswith((".cu", ".cuh")):
            assert not given_up & set(identifiers(name)), name


#: Names that do not say what a variable holds.
EMPTY_NAMES = frozenset({"found", "given", "each", "made", "held", "room", "told"})
#: Fields that documents and other modules know by such a name.
FIELDS = frozenset({("held", "kernels/linear_scan/timing_model.py"), ("given", "kernels/model.py")})


def bindings(name: str) -> Iterator[str]:
    """Names of variables and parameters that a module of Python binds."""
    for node in ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def test_variables_are_named_for_what_they_hold() -> None:
    bound = {
        (each, name)
        for name in sources()
        if name.endswith(PYTHON) and not name.startswith("tests/")
        for each in EMPTY_NAMES.intersection(bindings(name))
    }
    assert bound == FIELDS


def test_what_is_allowed_is_there() -> None:
    for each, name in ALLOWED:
        assert each == Path(name).stem or each in identifiers(name), (each, name)


@pytest.mark.parametrize(
    ("identifier", "instead"),
    [
        ("nearest_rung", "tier"),
        ("RUNGS", "tiers"),
        ("HighestRung", "tier"),
        ("asked", "request"),
        ("wrung", None),
        ("not_asked", None),
        ("share", None),
    ],
)
def test_which_words_are_found(identifier: str, instead: str | None) -> None:
    assert better(identifier) == instead
