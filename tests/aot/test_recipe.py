"""The keys of compiled binaries: all that determines one is in its key, and nothing else."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from covering import rest_thorough

from scan_registry.aot.compile import COMPILERS, Recipe, recipe, source_digest
from scan_registry.artifact.archive import digest
from scan_registry.hardware.target import Target
from scan_registry.kernels import family

SM90 = Target.parse("sm90")
LINEAR_SCAN = family("linear_scan")
CUDA = LINEAR_SCAN.kernel("time_last_forward", "cuda").variants[0]
TRITON = LINEAR_SCAN.kernel("time_last_forward", "triton").variants[0]

#: Every part of a recipe: a value, and others that have to change the key.
KEY_PARTS: dict[str, list[Any]] = {
    "compiler": ["nvrtc 12.9.86", "nvrtc 12.9.87", "triton 3.6.0"],
    "source_sha256": [digest(b"source"), digest(b"sources")],
    "entry": ["f", "g", ""],
    "options": [("-a", "-b"), ("-b", "-a"), ("-a",), ("-a", "-b", "-c"), ("-a -b",), ()],
    "target": [Target.parse(arch) for arch in ("sm90", "sm90a", "sm80", "ptx90")],
    "variant": [CUDA, TRITON, LINEAR_SCAN.variants()[1]],
    "warps": [4, 8],
}


def test_each_part_of_the_key_in_turn() -> None:
    names = [field.name for field in fields(Recipe)]
    base = {name: KEY_PARTS[name][0] for name in names}
    keys = [Recipe(**base).key]
    for name in names:
        keys += [Recipe(**{**base, name: value}).key for value in KEY_PARTS[name][1:]]
    assert len(set(keys)) == len(keys)


def test_the_source_digest() -> None:
    base = source_digest({"a.cu": "x", "b.cuh": "y"})
    assert source_digest({"b.cuh": "y", "a.cu": "x"}) == base
    others = [
        {"a.cu": "y", "b.cuh": "x"},
        {"a.cu": "x"},
        {"a.cu": "x", "b.cuh": "y "},
        {"a.cu": "x", "c.cuh": "y"},
        {"a.cu": "x", "b.cuh": "y", "c.cuh": ""},
    ]
    assert len({base, *map(source_digest, others)}) == 1 + len(others)


@pytest.mark.parametrize("arch", rest_thorough(["sm80", "sm90", "ptx80"], ["sm90"]))
def test_no_two_variants_share_a_key(arch: str) -> None:
    """They would evict each other from the cache, build after build."""
    for kernel in LINEAR_SCAN.kernels:
        keys = {recipe(variant, Target.parse(arch)).key for variant in kernel.variants}
        assert len(keys) == len(kernel.variants), f"{kernel.name}, {kernel.language}"


@pytest.mark.parametrize("language", ["cuda", "triton"])
def test_the_recorded_options_tell_variants_apart(language: str) -> None:
    """They are what a reader of the manifest has, to compile the same again."""
    for kernel in LINEAR_SCAN.kernels:
        if kernel.language == language:
            compiler = COMPILERS[kernel.language]
            options = {compiler.options(kernel, variant, SM90) for variant in kernel.variants}
            assert len(options) == len(kernel.variants), kernel.name
