"""Selection over imaginary systems: who wins, and what is said of those who lose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from imaginary import COMPILERS, FAMILY
from selecting import (
    CUDA,
    EVERY_CUDA,
    KERNEL,
    TRITON,
    Describe,
    Factory,
    Make,
    a_problem,
    decide,
    in_memory,
    told,
    variant_of,
)

from scan_registry.artifact.archive import Archive
from scan_registry.dispatch.fit import Tier
from scan_registry.dispatch.select import (
    Candidate,
    NoKernelError,
    Rejected,
    System,
    _less_liked,
    advice,
    select,
)
from scan_registry.hardware.target import Target
from scan_registry.kernels.model import Language, Variant


@pytest.mark.parametrize(
    ("archs", "capability", "winner", "tier"),
    [
        (("ptx80", "sm80", "sm86", "sm90"), (8, 6), "sm_86", Tier.EXACT),
        (("ptx80", "sm80", "sm90"), (8, 6), "sm_80", Tier.SAME_MAJOR),
        (("ptx80", "sm80", "sm86"), (8, 9), "sm_86", Tier.SAME_MAJOR),
        (("ptx80", "ptx90"), (10, 0), "compute_90", Tier.PTX),
        # 8.7 is a Tegra system: desktop machine code does not run there.
        (("ptx80", "sm80", "sm86"), (8, 7), "compute_80", Tier.PTX),
        (("sm80", "sm86"), (8, 7), "sm_87", Tier.JIT),
        ((), (12, 1), "sm_121", Tier.JIT),
        # Later than what the compiler knows: PTX for the latest that it does.
        ((), (13, 0), "compute_121", Tier.JIT),
    ],
)
def test_the_closest_tier_wins(
    archive_factory: Factory,
    a_device: Describe,
    archs: tuple[str, ...],
    capability: tuple[int, int],
    winner: str,
    tier: Tier,
) -> None:
    archives = [archive_factory(arch) for arch in archs]
    for order in (archives, archives[::-1]):
        chosen = decide(a_device(capability), order, toolchains=COMPILERS).taken()
        assert (str(chosen.target), chosen.tier) == (winner, tier)
        assert variant_of(chosen).language == "cuda"


def test_nothing_but_the_reference_is_considered_on_the_cpu(archive_factory: Factory) -> None:
    decision = decide(None, [archive_factory("sm90")], toolchains=COMPILERS)
    assert decision.taken() == Candidate(Tier.REFERENCE)
    assert decision.rejected == ()


def test_cuda_wins_over_triton_on_one_tier(archive_factory: Factory, a_device: Describe) -> None:
    archive = archive_factory("sm90", variants=[*TRITON, *CUDA])
    decision = decide(a_device(), [archive])
    assert variant_of(decision.taken()).language == "cuda"
    assert "cuda comes first" in told(decision, ":triton:")
    decision = decide(a_device(), toolchains=dict(reversed(COMPILERS.items())))
    assert variant_of(decision.taken()).language == "cuda"
    assert "cuda comes first" in told(decision, ":triton:")


def test_of_equal_tiers_the_later_architecture_wins(
    archive_factory: Factory, a_device: Describe
) -> None:
    archives = [archive_factory(arch, variants=CUDA) for arch in ("sm80", "sm86")]
    decision = decide(a_device((8, 9)), archives)
    assert str(decision.taken().target) == "sm_86"
    assert "sm_86 is closer to the device" in told(decision, "for sm_80")


def test_of_equal_binaries_the_first_wins(a_binary: Make, a_device: Describe) -> None:
    binary, _ = a_binary(CUDA[0], "sm90")
    archives = [in_memory("sm90", [binary], name) for name in ("scan-registry", "another")]
    for order in (archives, archives[::-1]):
        decision = decide(a_device(), order)
        assert decision.taken().archive is order[0]
        assert f"{order[0].provider} has it, too" in told(decision, str(CUDA[0]))


def test_the_spec_decides_among_equals(archive_factory: Factory, a_device: Describe) -> None:
    kernel = FAMILY.kernel(KERNEL, "cuda")
    for time in (1, 100, 1000, 5000, 100_000):
        problem = a_problem(time)
        able = [v for v in CUDA if kernel.rules.accepts(v, problem) is None]
        best = min(able, key=lambda v: kernel.cost(v, problem))
        for order in (CUDA, CUDA[::-1]):
            archive = archive_factory("sm90", variants=order)
            decision = decide(a_device(), [archive], problem)
            assert variant_of(decision.taken()) == best
            assert "the spec prefers the winner" in told(decision, "")
            assert decision.taken().cost == kernel.cost(best, problem)
        compiled = decide(a_device(), problem=problem, toolchains=COMPILERS)
        assert variant_of(compiled.taken()) == best


def test_the_launch_is_the_winners(archive_factory: Factory, a_device: Describe) -> None:
    decision = decide(a_device(), [archive_factory("sm90")])
    variant = variant_of(decision.taken())
    launch = FAMILY.kernel(KERNEL, "cuda").launch(variant, a_problem(), a_device().sm_count)
    assert decision.launch() == launch


@pytest.mark.parametrize(
    ("arch", "capability", "reason"),
    [
        ("sm90a", (10, 0), "sm_90a runs on 9.0 only; the device is 10.0"),
        ("ptx90", (8, 9), "compute_90 needs 9.0 or later, not 8.9"),
    ],
)
def test_an_archive_of_another_architecture_is_rejected_as_a_whole(
    archive_factory: Factory,
    a_device: Describe,
    arch: str,
    capability: tuple[int, int],
    reason: str,
) -> None:
    decision = decide(a_device(capability), [archive_factory(arch)])
    assert decision.rejected == (Rejected(f"scan-registry's {arch}.scanreg", reason),)
    assert decision.taken().tier is Tier.REFERENCE


def test_an_archive_that_cannot_run_is_not_read(
    archive_factory: Factory, a_device: Describe, tmp_path: Path
) -> None:
    (tmp_path / "sm80.scanreg").write_bytes(b"garbage")
    others = [Archive(tmp_path / "sm80.scanreg"), Archive(tmp_path / "missing" / "sm120.scanreg")]
    decision = decide(a_device((9, 0)), [*others, archive_factory("sm90")])
    assert decision.taken().tier is Tier.EXACT
    assert [(loser.subject, loser.damaged) for loser in decision.rejected[:2]] == [
        ("scan-registry's sm80.scanreg", False),
        ("scan-registry's sm120.scanreg", False),
    ]


def test_a_damaged_archive_is_named_and_the_next_tier_taken(
    archive_factory: Factory, a_device: Describe
) -> None:
    archives = [archive_factory("ptx80"), archive_factory("sm90")]
    content = bytearray(archives[1].path.read_bytes())
    content[100] ^= 1
    archives[1].path.write_bytes(content)
    decision = decide(a_device((9, 0)), [archives[0], Archive(archives[1].path, "acme")])
    assert decision.taken().tier is Tier.PTX
    (loser,) = (loser for loser in decision.rejected if loser.damaged)
    assert loser.subject == "acme's sm90.scanreg"
    assert str(archives[1].path) in loser.reason
    assert "SHA-256" in loser.reason


def test_an_entry_that_names_no_variant(
    archive_factory: Factory, archive_parts: Any, a_device: Describe
) -> None:
    """It is rejected alone, and the advice does without it."""
    path = archive_factory("sm90", variants=CUDA[:1]).path
    parts = archive_parts.of(path.read_bytes())
    (document,) = parts.sections.values()
    document["binaries"][0]["variant"] = f"{CUDA[0].stem},bad"
    path.write_bytes(parts.together())
    decision = decide(a_device(), [Archive(path)])
    assert decision.taken().tier is Tier.REFERENCE
    (loser,) = (loser for loser in decision.rejected if loser.damaged)
    assert str(path) in loser.reason
    assert advice(decision)
    with pytest.raises(NoKernelError, match="is not name=value"):
        decide(a_device(), [Archive(path)], lowest=Tier.PTX).taken()


def test_a_file_whose_name_is_no_architecture(a_device: Describe, tmp_path: Path) -> None:
    decision = decide(a_device(), [Archive(tmp_path / "backup.scanreg")])
    (loser,) = decision.rejected
    assert loser.damaged
    assert "not an architecture's" in loser.reason


def test_backend_pins_the_language(archive_factory: Factory, a_device: Describe) -> None:
    archive = archive_factory("sm90", variants=[*CUDA, *TRITON])
    languages: tuple[tuple[Language, Language], ...] = (("cuda", "triton"), ("triton", "cuda"))
    count = {"cuda": len(CUDA) + len(EVERY_CUDA), "triton": 2 * len(TRITON)}
    for backend, other in languages:
        decision = decide(a_device(), [archive], backend=backend, toolchains=COMPILERS)
        assert variant_of(decision.taken()).language == backend
        reason = f"backend={backend!r} was asked for"
        losers = [r.subject for r in decision.rejected if r.reason == reason]
        # Installed, compiled here, and the reference.
        assert len(losers) == count[other] + 1
        assert told(decision, "the reference") == reason
        assert decide(a_device(), backend=backend).winner is None
    decision = decide(a_device(), [archive], backend="reference", toolchains=COMPILERS)
    assert decision.taken() == Candidate(Tier.REFERENCE)
    assert {r.reason for r in decision.rejected} == {"backend='reference' was asked for"}


def test_more_blocks_than_a_grid_holds(archive_factory: Factory, a_device: Describe) -> None:
    problem = replace(a_problem(), batch=1, channels=2**34)
    decision = decide(a_device(), [archive_factory("sm90")], problem, toolchains=COMPILERS)
    assert decision.taken().tier is Tier.REFERENCE
    assert f"blocks; a grid holds {2**31 - 1}" in told(decision, KERNEL)


def test_variants_of_another_version(a_device: Describe, a_binary: Make) -> None:
    """A provider's archive may hold what this version's spec does not know how to launch."""
    other = Variant(FAMILY.name, KERNEL, "cuda", (("dtype", "float32"), ("lanes", 4)))
    decision = decide(a_device(), [in_memory("sm90", [a_binary(other)[0]])])
    reason = "this version's spec has no such variant"
    assert told(decision, str(other)) == reason
    fewer = replace(FAMILY, kernels=tuple(k for k in FAMILY.kernels if k.language == "cuda"))
    archive = in_memory("sm90", [a_binary(TRITON[0])[0]])
    decision = select(System(a_device(), (archive,)), fewer, a_problem())
    assert told(decision, str(TRITON[0])) == "this version has no such kernel in triton"


@pytest.mark.parametrize(
    ("arch", "time", "first"),
    [
        ("sm90", 160_000, "cuda"),
        ("sm100", 160_000, "cuda"),
        ("sm86", 160_000, "triton"),  # blocks have too little shared memory
        ("sm110", 160_000, "triton"),  # it runs PTX, which has no such kernel
        ("sm90", 2560, "triton"),  # rows too short to be cut
    ],
)
def test_aligned_rows_of_packed_sequences_prefer_what_cuts_them(
    arch: str, time: int, first: str
) -> None:
    problem = replace(a_problem(time), batch=1, channels=1, sequences=40)
    assert FAMILY.languages(problem, Target.parse(arch))[0] == first


@pytest.mark.parametrize("available", ["both", "cuda", "compiler"])
def test_a_family_may_prefer_triton_for_a_problem(
    archive_factory: Factory, a_device: Describe, available: str
) -> None:
    """Of one misaligned row of 40 packed sequences, CUDA would have all but a few SMs idle."""
    problem = replace(a_problem(40 * 4000), batch=1, channels=1, sequences=40, alignment=4)
    contents = [*CUDA, *TRITON] if available == "both" else CUDA
    archive = archive_factory("sm90", variants=contents)
    compilers = COMPILERS if available == "compiler" else None
    decision = decide(a_device(), [archive], problem, toolchains=compilers)
    winner = variant_of(decision.taken()).language
    if available == "both":
        assert winner == "triton"
        assert "triton comes first" in told(decision, ":cuda:")
        assert decision.runner_up is not None
        assert ":cuda:" in decision.runner_up.subject
    else:
        assert winner == "cuda"
        assert decision.taken().tier is Tier.EXACT
    pinned = decide(a_device(), [archive], problem, "cuda")
    assert variant_of(pinned.taken()).language == "cuda"
    short = replace(a_problem(400), batch=1, channels=3000, sequences=8, alignment=4)
    many = decide(a_device(), [archive], short, toolchains=compilers)
    assert variant_of(many.taken()).language == "cuda"


@pytest.mark.parametrize(
    ("ms", "words"),
    [
        (None, "equal by the spec's estimate (3); the first in order is taken"),
        (0.5, "equal by the estimate (0.5 ms); the first in order is taken"),
    ],
)
def test_equal_numbers_are_said_to_be_equal(ms: float | None, words: str) -> None:
    winner = Candidate(Tier.EXACT, cost=3.0, ms=ms)
    assert _less_liked(winner, winner) == words
    worse = replace(winner, cost=4.0, ms=None if ms is None else 0.6)
    assert "equal" not in _less_liked(worse, winner)
