"""The words that specs are written in, and what every spec has to keep to."""

from __future__ import annotations

from dataclasses import replace

import pytest
from changing import changed

from scan_registry.kernels import families, family
from scan_registry.kernels.model import Kernel, Pins, Variant

KERNELS = [kernel for found in families().values() for kernel in found.kernels]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: f"{k.family}.{k.name}:{k.language}")
def test_a_kernel_of_a_spec(kernel: Kernel) -> None:
    names = [parameter.name for parameter in kernel.parameters]
    assert len(set(names)) == len(names)
    kinds = [parameter.kind for parameter in kernel.parameters]
    assert kinds == sorted(kinds, key=lambda kind: kind != "pointer")  # pointers come first
    assert len(set(kernel.variants)) == len(kernel.variants) > 0
    assert (family(kernel.family).folder / kernel.code.source).is_file()
    for variant in kernel.variants:
        assert (variant.family, variant.kernel) == (kernel.family, kernel.name)
        assert variant.language == kernel.language
        assert 1 <= kernel.code.warps(variant) <= 32
        assert kernel.code.divisible(variant) <= set(names)
        if kernel.language == "triton":
            assert tuple(kernel.code.elements(variant)) == kernel.pointers
        assert Variant.parse(str(variant)) == variant
    assert kernel.code.may_spill.keys() <= set(kernel.variants)


@pytest.mark.slow
def test_variants_differ_in_what_the_compiler_sees() -> None:
    """Two variants with equal constants, warps and promises would be one binary under two names. Of each kernel all
    numbers with the first words, such as a dtype, and all words with the first numbers."""
    for kernel in KERNELS:
        words: dict[object, object] = {}
        tried = []
        for variant in kernel.every:
            word = tuple(each for each in variant.statics if isinstance(each[1], str))
            if word not in words or word == next(iter(words)):
                tried.append(variant)
            words.setdefault(word, None)
        seen = {
            (
                tuple(kernel.code.constants(variant).items()),
                kernel.code.warps(variant),
                kernel.code.divisible(variant),
                tuple(kernel.code.elements(variant).items()),
            )
            for variant in tried
        }
        assert len(seen) == len(tried)


@pytest.mark.parametrize(
    "text",
    ["", "linear_scan", "a.b:cuda:", "a.b:hip:c=1", "a.b:cuda:c", "a.b:cuda:c=", "a.b:cuda:=1",
     "a.b:cuda:c=1,", "a.b:cuda:c=1,,d=2", "a.b:cuda:1c=1", " a.b:cuda:c=1"],
)  # fmt: skip
def test_what_is_no_variant_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="variant") as caught:
        Variant.parse(text)
    assert repr(text) in str(caught.value)


def test_a_variant_that_parses() -> None:
    variant = Variant.parse("linear_scan.x:triton:dtype=float16,warps=4,mode=a=b")
    assert variant.text("dtype") == "float16"
    assert variant.number("warps") == 4
    assert dict(variant.statics)["mode"] == "a=b"


def test_names_that_do_not_exist() -> None:
    with pytest.raises(
        KeyError,
        match="no kernel family 'attention'; there are: causal_conv1d, gated_scan, linear_scan",
    ):
        family("attention")
    with pytest.raises(KeyError, match="has no triton kernel 'x'"):
        family("linear_scan").kernel("x", "triton")


def test_kinds_for_other_problems_are_told_apart_without_their_tiles() -> None:
    """What an archive holds may be another version's, and most of it is for other problems."""
    scans = family("linear_scan")
    kernel = scans.kernel("time_last_forward", "cuda")
    sample = next(
        s for s in scans.samples if s.problem.kernel == kernel.name and s.dtype == "float32"
    )

    def tiles(kind: Pins) -> tuple[Pins, ...]:
        raise AssertionError(f"enumerates {kind}")

    quick = changed(kernel, space=replace(kernel.tunable.space, tiles=tiles))
    tuned = [variant for variant in kernel.every if variant.statics not in kernel.defaults]
    other = next(variant for variant in tuned if variant.text("dtype") == "float64")
    reason = quick.mistakes(other, sample.problem)
    assert reason is not None
    assert reason == kernel.rules.accepts(other, sample.problem)
    same = next(variant for variant in tuned if variant.text("dtype") == "float32")
    assert kernel.mistakes(same, sample.problem) is None
    for statics in ((*same.statics[:3], ("gone", 1)), (("gone", 1),)):
        unknown = replace(same, statics=statics)
        assert kernel.mistakes(unknown, sample.problem) == "this version's spec has no such variant"
