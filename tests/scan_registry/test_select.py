"""Selection over imaginary systems: who wins, and what is said of those who lose."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scan_registry import offers as offering
from scan_registry import select as select_module
from scan_registry.archive import Archive, Binary, Entry, digest
from scan_registry.device import Device
from scan_registry.fit import Rung, Toolchain
from scan_registry.kernels.linear_scan.problem import LinearScanProblem, Strides
from scan_registry.kernels.linear_scan.spec import FAMILY as SHIPPED
from scan_registry.kernels.model import Language, Variant
from scan_registry.kernels.tuning import Row, Tuning
from scan_registry.policy import LEVELS, Level
from scan_registry.select import (
    BACKENDS,
    Backend,
    Candidate,
    Decision,
    NoKernelError,
    Rejected,
    System,
    advice,
    select,
)
from scan_registry.target import FIRST_CUDA, TEGRA, Target

Factory = Callable[..., Archive]
Make = Callable[..., tuple[Binary, bytes]]
Describe = Callable[..., Device]

KERNEL = "time_last_forward"
#: Whatever tables there are.
FAMILY = replace(SHIPPED, kernels=tuple(replace(k, tunings=tuple) for k in SHIPPED.kernels))
EVERY_CUDA = FAMILY.kernel(KERNEL, "cuda").variants
#: What there is machine code of, and PTX.
CODE = [v for v in FAMILY.kernel(KERNEL, "cuda").every if "reverse" not in dict(v.statics)]
CUDA = tuple(v for v in EVERY_CUDA if v in CODE)
ONE_WAY = tuple(v for v in EVERY_CUDA if "reverse" in dict(v.statics))
TRITON = FAMILY.kernel(KERNEL, "triton").variants
NVRTC = Toolchain("nvrtc 12.9.86", (12, 9))
COMPILERS: Mapping[Language, Toolchain | str] = {
    "cuda": NVRTC,
    "triton": Toolchain("triton 3.6.0", (12, 9)),
}
MISSING: Mapping[Language, Toolchain | str] = {
    "cuda": "NVRTC is not installed",
    "triton": "Triton is not installed",
}


def a_problem(time: int = 1024, dtype: str = "float32", alignment: int = 16) -> LinearScanProblem:
    """Forward, time contiguous, two batches of three channels."""
    strides = (*(Strides(0, 3 * time, time, 1),) * 3, Strides(0, 3, 1, 0))
    sizes = (1, 2, 3, time)
    return LinearScanProblem("forward", "time_last", dtype, dtype, *sizes, strides, alignment)


def in_memory(arch: str, binaries: Iterable[Binary], provider: str = "scan-registry") -> Archive:
    """An archive that was never on disk: selection looks at nothing but its entries."""
    target = Target.parse(arch)
    archive = InMemory(Path(provider) / f"{target.label}.scanreg", provider)
    archive.__dict__["binaries"] = tuple(binaries)
    return archive


def facts(binary: Binary) -> tuple[str, ...]:
    variant = binary.variant
    return variant.family, variant.kernel, variant.language, variant.text("dtype")


class InMemory(Archive):
    def of(
        self, family: str, kernel: str, language: str | None = None, dtype: str | None = None
    ) -> tuple[Entry, ...]:
        wanted = family, kernel, language, dtype
        return tuple(
            self._entry(b)
            for b in self.binaries
            if all(w in (None, f) for w, f in zip(wanted, facts(b), strict=True))
        )

    def _entry(self, binary: Binary) -> Entry:
        line = json.dumps({**binary.to_json(), "chunk": 0, "offset": 0}).encode()
        return Entry(str(binary.variant), str(binary.target), {}, line, str(self.path))

    def tunings(self, head: str) -> tuple[Tuning, ...]:
        return self.__dict__.get("tuned", {}).get(head, ())


def decide(
    device: Device | None,
    archives: Iterable[Archive] = (),
    problem: LinearScanProblem | None = None,
    backend: Backend = "auto",
    lowest: Rung = Rung.REFERENCE,
    **system: Any,
) -> Decision:
    there = System(device, tuple(archives), **system)
    return select(there, FAMILY, problem or a_problem(), backend, lowest)


def binary_of(winner: Candidate | None) -> Binary:
    assert winner is not None
    assert winner.binary is not None
    return winner.binary


def variant_of(winner: Candidate | None) -> Variant:
    assert winner is not None
    assert winner.variant is not None
    return winner.variant


def told(decision: Decision, subject: str) -> str:
    """The reasons given for everything that is called so, in one text; there must be one."""
    found = [loser.reason for loser in decision.rejected if subject in loser.subject]
    assert found, f"{subject} is not among {[loser.subject for loser in decision.rejected]}"
    return "\n".join(found)


# --- Rungs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("archs", "capability", "winner", "rung"),
    [
        (("ptx80", "sm80", "sm86", "sm90"), (8, 6), "sm_86", Rung.EXACT),
        (("ptx80", "sm80", "sm90"), (8, 6), "sm_80", Rung.SAME_MAJOR),
        (("sm80",), (8, 6), "sm_80", Rung.SAME_MAJOR),
        (("ptx80", "sm80", "sm86"), (8, 9), "sm_86", Rung.SAME_MAJOR),
        (("ptx80", "sm90"), (8, 6), "compute_80", Rung.PTX),
        (("ptx80", "sm80", "sm90"), (9, 0), "sm_90", Rung.EXACT),
        (("ptx80", "sm80", "sm90"), (10, 0), "compute_80", Rung.PTX),
        (("ptx80", "ptx90"), (10, 0), "compute_90", Rung.PTX),
        (("sm86", "sm80"), (8, 0), "sm_80", Rung.EXACT),
        # 8.7 is a Tegra system: desktop machine code does not run there.
        (("ptx80", "sm80", "sm86"), (8, 7), "compute_80", Rung.PTX),
        (("sm80", "sm86"), (8, 7), "sm_87", Rung.JIT),
        (("ptx80", "sm100", "sm90"), (10, 3), "sm_100", Rung.SAME_MAJOR),
        (("ptx80", "sm90"), (10, 3), "compute_80", Rung.PTX),
        (("sm90",), (10, 3), "sm_103", Rung.JIT),
        (("ptx80", "sm120", "sm100"), (12, 1), "sm_120", Rung.SAME_MAJOR),
        (("ptx80", "sm100"), (12, 1), "compute_80", Rung.PTX),
        ((), (12, 1), "sm_121", Rung.JIT),
        # Later than what the compiler knows: PTX for the latest that it does.
        ((), (13, 0), "compute_121", Rung.JIT),
        (("sm80", "sm86"), (11, 0), "compute_103", Rung.JIT),
    ],
)
def test_the_closest_rung_wins(
    archive_factory: Factory,
    a_device: Describe,
    archs: tuple[str, ...],
    capability: tuple[int, int],
    winner: str,
    rung: Rung,
) -> None:
    archives = [archive_factory(arch) for arch in archs]
    for order in (archives, archives[::-1]):
        chosen = decide(a_device(capability), order, toolchains=COMPILERS).taken()
        assert (str(chosen.target), chosen.rung) == (winner, rung)
        assert variant_of(chosen).language == "cuda"


def test_too_old_a_gpu_gets_the_reference(archive_factory: Factory, a_device: Describe) -> None:
    archives = [archive_factory(arch) for arch in ("ptx80", "sm80", "sm90")]
    decision = decide(a_device((7, 5)), archives, toolchains=COMPILERS)
    assert decision.taken() == Candidate(Rung.REFERENCE)
    assert decision.launch() is None
    assert told(decision, "ptx80.scanreg") == "compute_80 needs 8.0 or later, not 7.5"
    for language in ("cuda", "triton"):
        reason = "the kernels need compute capability 8.0; the device's is 7.5"
        assert told(decision, f"{language} compiled here") == reason


def test_nothing_but_the_reference_is_considered_on_the_cpu(archive_factory: Factory) -> None:
    decision = decide(None, [archive_factory("sm90")], toolchains=COMPILERS)
    assert decision.taken() == Candidate(Rung.REFERENCE)
    assert decision.rejected == ()


@pytest.mark.parametrize(
    ("capability", "archs", "rung", "target"),
    [
        # Triton's machine code from 9.0 up runs on one capability only.
        ((10, 3), ("sm100", "ptx80"), Rung.PTX, "compute_80"),
        ((10, 3), ("sm100",), Rung.JIT, "sm_103"),
        ((12, 1), ("sm120", "ptx80"), Rung.PTX, "compute_80"),
        ((12, 1), ("sm120",), Rung.JIT, "sm_121"),
        ((8, 6), ("sm80",), Rung.SAME_MAJOR, "sm_80"),
    ],
)
def test_the_ladder_for_triton(
    a_binary: Make,
    a_device: Describe,
    capability: tuple[int, int],
    archs: tuple[str, ...],
    rung: Rung,
    target: str,
) -> None:
    specific = {"sm100": "sm100a", "sm120": "sm120a"}
    archives = [
        in_memory(arch, [a_binary(TRITON[0], specific.get(arch, arch))[0]]) for arch in archs
    ]
    chosen = decide(a_device(capability), archives, backend="triton", toolchains=COMPILERS).taken()
    assert (chosen.rung, str(chosen.target)) == (rung, target)


def test_losers_of_a_later_rung_are_told_so(archive_factory: Factory, a_device: Describe) -> None:
    archives = [archive_factory("sm80", variants=CUDA), archive_factory("ptx80", variants=CUDA)]
    decision = decide(a_device((8, 6)), archives, toolchains=COMPILERS)
    assert "rung ptx; the winner's is same-major" in told(decision, "for compute_80")
    assert "rung jit; the winner's is same-major" in told(decision, "for sm_86")
    assert told(decision, "the reference") == "rung reference; the winner's is same-major"


def test_cuda_wins_over_triton_on_one_rung(archive_factory: Factory, a_device: Describe) -> None:
    archive = archive_factory("sm90", variants=[*TRITON, *CUDA])
    decision = decide(a_device(), [archive])
    assert variant_of(decision.taken()).language == "cuda"
    assert "cuda comes first" in told(decision, ":triton:")
    decision = decide(a_device(), toolchains=dict(reversed(COMPILERS.items())))
    assert variant_of(decision.taken()).language == "cuda"
    assert "cuda comes first" in told(decision, ":triton:")


def test_of_equal_rungs_the_later_architecture_wins(
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
        able = [v for v in CUDA if kernel.accepts(v, problem) is None]
        best = min(able, key=lambda v: kernel.cost(v, problem))
        for order in (CUDA, CUDA[::-1]):
            archive = archive_factory("sm90", variants=order)
            decision = decide(a_device(), [archive], problem)
            assert variant_of(decision.taken()) == best
            assert "the spec prefers the winner" in told(decision, "")
            assert decision.taken().cost == kernel.cost(best, problem)
        compiled = decide(a_device(), problem=problem, toolchains=COMPILERS)
        assert variant_of(compiled.taken()) == best


def test_a_closer_rung_beats_the_preferred_language(
    archive_factory: Factory, a_device: Describe
) -> None:
    archives = [archive_factory("ptx80", variants=CUDA), archive_factory("sm90", variants=TRITON)]
    chosen = decide(a_device(), archives, toolchains=COMPILERS).taken()
    assert (variant_of(chosen).language, chosen.rung) == ("triton", Rung.EXACT)


def test_the_launch_is_the_winners(archive_factory: Factory, a_device: Describe) -> None:
    decision = decide(a_device(), [archive_factory("sm90")])
    variant = variant_of(decision.taken())
    launch = FAMILY.kernel(KERNEL, "cuda").launch(variant, a_problem(), a_device().multiprocessors)
    assert decision.launch() == launch


# --- Rejections -------------------------------------------------------------------------------


def test_architecture_specific_code_stays_on_its_architecture(
    archive_factory: Factory, a_device: Describe, a_binary: Make
) -> None:
    """Triton's sm_90a binaries lie in the archive of sm_90, beside CUDA's sm_90."""
    both = [a_binary(TRITON[0], "sm90a"), a_binary(CUDA[0], "sm90")]
    archive = archive_factory("sm90", both)
    chosen = decide(a_device((9, 0)), [archive], backend="triton").taken()
    assert (str(binary_of(chosen).target), chosen.rung) == ("sm_90a", Rung.EXACT)
    # No 9.1 exists; were there one, sm_90 code would run on it and sm_90a code would not.
    problem = a_problem(dtype=both[0][0].variant.text("dtype"))
    decision = decide(a_device((9, 1)), [archive], problem)
    assert str(binary_of(decision.winner).target) == "sm_90"
    assert told(decision, "for sm_90a") == "sm_90a runs on 9.0 only; the device is 9.1"


@pytest.mark.parametrize(
    ("arch", "capability", "reason"),
    [
        ("sm90a", (10, 0), "sm_90a runs on 9.0 only; the device is 10.0"),
        ("sm86", (8, 0), "sm_86 runs on 8.6 and later 8.x; the device is 8.0"),
        ("sm80", (8, 7), "sm_80 and the device's 8.7 are on different sides of Tegra"),
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
    assert decision.taken().rung is Rung.REFERENCE


def test_an_archive_that_cannot_run_is_not_read(
    archive_factory: Factory, a_device: Describe, tmp_path: Path
) -> None:
    (tmp_path / "sm80.scanreg").write_bytes(b"garbage")
    others = [Archive(tmp_path / "sm80.scanreg"), Archive(tmp_path / "missing" / "sm120.scanreg")]
    decision = decide(a_device((9, 0)), [*others, archive_factory("sm90")])
    assert decision.taken().rung is Rung.EXACT
    assert [(loser.subject, loser.damaged) for loser in decision.rejected[:2]] == [
        ("scan-registry's sm80.scanreg", False),
        ("scan-registry's sm120.scanreg", False),
    ]


def test_a_damaged_archive_is_named_and_the_next_rung_taken(
    archive_factory: Factory, a_device: Describe
) -> None:
    archives = [archive_factory("ptx80"), archive_factory("sm90")]
    content = bytearray(archives[1].path.read_bytes())
    content[100] ^= 1
    archives[1].path.write_bytes(content)
    decision = decide(a_device((9, 0)), [archives[0], Archive(archives[1].path, "acme")])
    assert decision.taken().rung is Rung.PTX
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
    assert decision.taken().rung is Rung.REFERENCE
    (loser,) = (loser for loser in decision.rejected if loser.damaged)
    assert str(path) in loser.reason
    assert advice(decision)
    with pytest.raises(NoKernelError, match="is not name=value"):
        decide(a_device(), [Archive(path)], lowest=Rung.PTX).taken()


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
    assert decision.taken() == Candidate(Rung.REFERENCE)
    assert {r.reason for r in decision.rejected} == {"backend='reference' was asked for"}


@pytest.mark.parametrize(
    ("limit", "value", "changes", "reason"),
    [
        ("threads_per_block", 64, {}, "128 threads per block; the device has 64"),
        (
            "shared_memory_per_block",
            100_000,
            {"dynamic_shared": 99_000},
            "100024 bytes of shared memory per block; the device has 100000",
        ),
        ("registers_per_block", 5119, {}, "5120 registers per block; the device has 5119"),
        (
            "driver",
            (12, 4),
            {"format_version": "8", "oldest_driver": (13, 0)},
            "ELF ABI 8 for sm_90 needs a driver for CUDA 13.0; this one supports 12.4",
        ),
    ],
)
def test_a_binary_that_does_not_fit_is_rejected(
    archive_factory: Factory,
    a_device: Describe,
    a_binary: Make,
    limit: str,
    value: object,
    changes: dict[str, Any],
    reason: str,
) -> None:
    archive = archive_factory("sm90", [a_binary(CUDA[0], **changes)])
    problem = a_problem(dtype=CUDA[0].text("dtype"))
    decision = decide(a_device(**{limit: value}), [archive], problem)
    assert decision.rejected == (Rejected(f"{CUDA[0]} for sm_90", reason),)
    assert decide(a_device(), [archive], problem).taken().rung is Rung.EXACT


def test_ptx_that_the_driver_is_too_old_for(
    archive_factory: Factory, a_device: Describe, a_binary: Make
) -> None:
    ptx = [a_binary(v, "ptx80", format_version="8.8", oldest_driver=(12, 9)) for v in CUDA]
    archive = archive_factory("ptx80", ptx)
    decision = decide(a_device((10, 0), driver=(12, 8)), [archive], toolchains=COMPILERS)
    assert decision.taken().rung is Rung.JIT
    reason = "PTX ISA 8.8 for compute_80 needs a driver for CUDA 12.9; this one supports 12.8"
    assert reason in told(decision, "for compute_80")


def test_what_the_spec_does_not_accept(archive_factory: Factory, a_device: Describe) -> None:
    archive = archive_factory("sm90", variants=CUDA)
    problem = a_problem(1023, "float16", alignment=2)
    decision = decide(a_device(), [archive], problem, toolchains=COMPILERS)
    variant = variant_of(decision.taken())
    assert (variant.text("dtype"), variant.text("access")) == ("float16", "generic")
    assert "dtype float32, not float16" in told(decision, "dtype=float32")
    reason = "rows are not made of whole chunks of 8 float16"
    assert reason in told(decision, "dtype=float16,gates=float16,access=aligned")


def test_other_kernels_are_not_mentioned(archive_factory: Factory, a_device: Describe) -> None:
    decision = decide(a_device(), [archive_factory("sm90")])
    assert len(decision.rejected) == len(CUDA)  # the other variants, and the reference
    assert all(KERNEL in loser.subject for loser in decision.rejected[:-1])


def test_more_blocks_than_a_grid_holds(archive_factory: Factory, a_device: Describe) -> None:
    problem = replace(a_problem(), batch=1, channels=2**34)
    decision = decide(a_device(), [archive_factory("sm90")], problem, toolchains=COMPILERS)
    assert decision.taken().rung is Rung.REFERENCE
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


# --- Denied and failed ------------------------------------------------------------------------


def test_a_denied_digest(archive_factory: Factory, a_device: Describe) -> None:
    archives = [archive_factory("sm90"), archive_factory("ptx80")]
    best = binary_of(decide(a_device(), archives).taken())
    decision = decide(a_device(), archives, denied={best.sha256: "denied: it is wrong"})
    chosen = decision.taken()
    assert chosen.rung is Rung.EXACT
    assert binary_of(chosen).sha256 != best.sha256
    assert told(decision, str(best)) == "denied: it is wrong"
    # The digest is about those bytes: the same variant from PTX is not denied.
    everything = {b.sha256: "denied: all" for b in archives[0].binaries}
    assert decide(a_device(), archives, denied=everything).taken().rung is Rung.PTX


def test_a_denied_variant(archive_factory: Factory, a_device: Describe) -> None:
    archives = [archive_factory("sm90"), archive_factory("ptx80")]
    best = variant_of(decide(a_device(), archives).taken())
    denied = {str(best): "denied: it races"}
    decision = decide(a_device(), archives, denied=denied, toolchains=COMPILERS)
    assert variant_of(decision.taken()) != best
    losers = [r for r in decision.rejected if r.subject.startswith(f"{best} for ")]
    assert [r.subject.rpartition(" ")[2] for r in losers] == ["sm_90", "sm_90"]  # and compiled
    assert {r.reason for r in losers} == {"denied: it races"}


def test_to_deny_a_variant_is_to_deny_it_both_ways(
    archive_factory: Factory, a_device: Describe
) -> None:
    """What PTX has one of for each way goes by one name in machine code; either can be denied alone."""
    archives, kernel = [archive_factory("ptx80")], FAMILY.kernel(KERNEL, "cuda")
    best = variant_of(decide(a_device(), archives).taken())
    assert best in ONE_WAY
    general = f"{best.head}:{kernel.label(best)}"
    both = {str(v) for v in ONE_WAY if kernel.label(v) == kernel.label(best)}
    for name, expected in ((general, both), (str(best), {str(best)})):
        decision = decide(a_device(), archives, denied={name: "denied: it races"})
        found = {r.subject for r in decision.rejected if r.reason == "denied: it races"}
        assert found == {f"{variant} for compute_80" for variant in expected}
        assert str(variant_of(decision.winner)) not in expected


def test_a_denied_variant_is_not_compiled_either(a_device: Describe) -> None:
    denied = {str(variant): "denied: all" for variant in (*EVERY_CUDA, *TRITON)}
    decision = decide(a_device(), denied=denied, toolchains=COMPILERS)
    assert decision.taken().rung is Rung.REFERENCE
    assert {r.reason for r in decision.rejected} == {"denied: all"}


def test_what_failed_is_passed_over(archive_factory: Factory, a_device: Describe) -> None:
    archives = [archive_factory("sm90"), archive_factory("ptx80")]
    failed: dict[tuple[str, str], str] = {}
    rungs = []
    for number in range(100):
        decision = decide(a_device(), archives, failed=failed, toolchains=COMPILERS)
        if decision.winner is None:
            break
        rungs.append(decision.winner.rung)
        for key, reason in failed.items():
            assert reason in told(decision, key[0])
        failed[decision.winner.key] = f"failure {number}"
    assert decision.winner is None
    assert rungs == sorted(rungs)
    assert set(rungs) == {Rung.EXACT, Rung.PTX, Rung.JIT, Rung.REFERENCE}


def test_a_failure_is_about_one_archive(a_binary: Make, a_device: Describe) -> None:
    binary, _ = a_binary(CUDA[0], "sm90")
    archives = [in_memory("sm90", [binary], name) for name in ("scan-registry", "another")]
    first = decide(a_device(), archives).taken()
    decision = decide(a_device(), archives, failed={first.key: "it is damaged"})
    assert decision.taken().archive is archives[1]
    assert told(decision, str(binary)) == "it is damaged"


# --- Policy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("lowest", list(Rung))
def test_nothing_below_the_lowest_rung_is_taken(
    archive_factory: Factory, a_device: Describe, lowest: Rung
) -> None:
    """On 8.6 there is sm_80, PTX, a compiler and torch; each is taken down to the lowest rung."""
    archives = [archive_factory(arch) for arch in ("sm80", "ptx80")]
    offers = [
        (archives, COMPILERS, Rung.SAME_MAJOR),
        (archives[1:], COMPILERS, Rung.PTX),
        ([], COMPILERS, Rung.JIT),
        ([], MISSING, Rung.REFERENCE),
    ]
    for there, toolchains, rung in offers:
        decision = decide(a_device((8, 6)), there, lowest=lowest, toolchains=toolchains)
        if rung <= lowest:
            assert decision.taken().rung is rung
        else:
            assert decision.winner is None
        for loser in decision.rejected:
            if "the policy allows none below" in loser.reason:
                assert loser.reason.endswith(f"none below {lowest}")
        if lowest < Rung.REFERENCE:
            reason = f"rung reference; the policy allows none below {lowest}"
            assert told(decision, "the reference") == reason


def test_backend_and_policy_both_hold(archive_factory: Factory, a_device: Describe) -> None:
    archive = archive_factory("sm90", variants=CUDA)
    pinned: Backend = "triton"
    decision = decide(a_device(), [archive], backend=pinned, toolchains=COMPILERS)
    assert decision.taken().rung is Rung.JIT
    decision = decide(
        a_device(), [archive], backend=pinned, lowest=Rung.SAME_MAJOR, toolchains=COMPILERS
    )
    assert decision.winner is None
    assert "rung jit; the policy allows none below same-major" in told(decision, ":triton:")


# --- Compilers --------------------------------------------------------------------------------


def test_missing_compilers_are_named(a_device: Describe) -> None:
    decision = decide(a_device(), toolchains=MISSING)
    assert decision.taken().rung is Rung.REFERENCE
    assert told(decision, "cuda compiled here") == "NVRTC is not installed"
    assert told(decision, "triton compiled here") == "Triton is not installed"


def test_a_compiler_that_is_too_old_is_named(a_device: Describe) -> None:
    old: Mapping[Language, Toolchain | str] = {"triton": Toolchain("triton 3.2.0", (12, 4))}
    decision = decide(a_device((10, 0)), toolchains=old)
    assert decision.taken().rung is Rung.REFERENCE
    assert told(decision, "triton compiled here") == "triton 3.2.0 (CUDA 12.4) does not know 10.0"


@pytest.mark.parametrize(
    ("cuda", "capability", "driver", "target", "needs"),
    [
        ((13, 0), (9, 0), (12, 9), "sm_90", "13.0"),
        ((12, 9), (12, 0), (12, 4), "sm_120", "12.8"),
        ((12, 9), (8, 0), (11, 8), "sm_80", "12.0"),
        ((12, 9), (13, 0), (12, 8), "compute_121", "12.9"),
    ],
)
def test_what_the_driver_would_not_load_is_not_compiled(
    a_device: Describe,
    cuda: tuple[int, int],
    capability: tuple[int, int],
    driver: tuple[int, int],
    target: str,
    needs: str,
) -> None:
    here: Mapping[Language, Toolchain | str] = {"cuda": Toolchain("nvrtc 99.1", cuda)}
    decision = decide(a_device(capability, driver=driver), toolchains=here)
    assert decision.taken().rung is Rung.REFERENCE
    there = ".".join(map(str, driver))
    assert told(decision, "cuda compiled here") == (
        f"what nvrtc 99.1 makes for {target} needs a driver for CUDA {needs}; "
        f"this one supports {there}"
    )
    enough = tuple(map(int, needs.split(".")))
    chosen = decide(a_device(capability, driver=enough), toolchains=here).taken()
    assert (chosen.rung, str(chosen.target)) == (Rung.JIT, target)


def test_only_variants_of_the_kernel_are_compiled(a_device: Describe) -> None:
    decision = decide(a_device(), toolchains=COMPILERS)
    subjects = {r.subject for r in decision.rejected} | {decision.taken().subject}
    assert subjects == {*(f"{v} for sm_90" for v in (*EVERY_CUDA, *TRITON)), "the reference"}
    assert {told(decision, str(v)) for v in ONE_WAY if plain(v)} == {"it is not for sm_90"}


# --- No winner --------------------------------------------------------------------------------


def test_no_winner_lists_what_is_installed_and_what_to_do(
    archive_factory: Factory, a_device: Describe
) -> None:
    device = a_device((7, 5), name="Tesla T4")
    archives = [archive_factory(arch) for arch in ("ptx80", "sm80", "sm90")]
    with pytest.raises(NoKernelError) as caught:
        decide(device, archives, lowest=Rung.JIT, toolchains=MISSING).taken()
    message = str(caught.value)
    assert message.startswith("nothing runs time_last_forward on Tesla T4 (sm_75)")
    for expected in (
        "ptx80.scanreg: compute_80 needs 8.0 or later, not 7.5",
        "sm80.scanreg: sm_80 runs on 8.0 and later 8.x; the device is 7.5",
        "sm90.scanreg: sm_90 runs on 9.0 and later 9.x; the device is 7.5",
        "NVRTC is not installed",
        "the reference: rung reference; the policy allows none below jit",
        "need compute capability 8.0",
    ):
        assert expected in message


@pytest.mark.parametrize(
    ("archs", "capability", "driver", "lowest", "expected"),
    [
        ((), (9, 0), (13, 0), "reference", "Install {wheel} built for sm90 or with PTX (ptx80)"),
        (
            ("sm90",),
            (8, 7),
            (13, 0),
            "reference",
            "Install {wheel} built for sm87 or with PTX (ptx80)",
        ),
        (
            ("sm90",),
            (8, 7),
            (13, 0),
            "aot",
            "Install {wheel} built for sm87, or allow rung reference",
        ),
        (("sm120",), (12, 1), (12, 8), "reference", "Install {wheel} built for sm121"),
        # There is PTX, and the driver is too old for it.
        (
            ("ptx80",),
            (8, 7),
            (12, 4),
            "reference",
            "{driver} 12.9, or install {wheel} built for sm87",
        ),
        (("ptx80",), (13, 0), (12, 4), "reference", "{driver} 12.9"),
        # There is PTX, and it is not allowed.
        (("ptx80",), (8, 7), (13, 0), "aot", "Install {wheel} built for sm87, or allow rung ptx"),
        (("ptx80",), (13, 0), (13, 0), "aot", "Allow rung ptx"),
        # There is PTX, and nothing is closer.
        (("ptx80",), (13, 0), (13, 0), "reference", "No wheel and no driver is known to help"),
    ],
)
def test_advice_fits_what_is_there(
    archive_factory: Factory,
    a_device: Describe,
    archs: tuple[str, ...],
    capability: tuple[int, int],
    driver: tuple[int, int],
    lowest: Level,
    expected: str,
) -> None:
    archives = [archive_factory(arch) for arch in archs]
    device = a_device(capability, driver=driver)
    decision = decide(device, archives, lowest=LEVELS[lowest], toolchains=MISSING)
    assert advice(decision) == expected.format(
        wheel="a scan-registry wheel",
        driver="Update the GPU's driver to one that supports CUDA",
    )


def test_advice_is_about_the_language_that_was_asked_for(
    archive_factory: Factory, a_device: Describe
) -> None:
    """An archive of other kernels, or of the same in another language, is as good as none."""
    archives = [archive_factory("sm90"), archive_factory("ptx80")]  # of CUDA variants
    decision = decide(a_device(), archives, backend="triton")
    assert advice(decision) == "Install a scan-registry wheel built for sm90 or with PTX (ptx80)"
    backward = [v for v in FAMILY.variants() if v.kernel != KERNEL]
    other = decide(a_device(), [archive_factory("sm90", variants=backward)], lowest=Rung.PTX)
    assert advice(other).startswith("Install a scan-registry wheel built for sm90 or with PTX")
    pinned = decide(a_device(), archives, backend="reference", lowest=Rung.JIT)
    assert advice(pinned) == "Allow rung reference"


def test_a_driver_is_advised_for_what_could_be_compiled_here(a_device: Describe) -> None:
    decision = decide(a_device((12, 0), driver=(12, 4)), toolchains=COMPILERS)
    start = "Update the GPU's driver to one that supports CUDA 12.8, or install"
    assert advice(decision).startswith(start)


def test_damage_is_no_archive(archive_factory: Factory, a_device: Describe) -> None:
    held = archive_factory("sm90")
    held.path.write_bytes(b"")
    decision = decide(a_device(), [Archive(held.path), archive_factory("ptx80")])
    assert advice(decision) == "Install a scan-registry wheel built for sm90"


def test_no_archive_at_all(a_device: Describe) -> None:
    with pytest.raises(NoKernelError, match=r"(?s)nothing.*wheel.*sm90.*ptx80"):
        decide(a_device(), lowest=Rung.PTX).taken()


def test_a_kernel_on_the_cpu() -> None:
    with pytest.raises(NoKernelError, match=r"(?s)on the CPU.*need a CUDA device"):
        decide(None, backend="cuda").taken()


# --- Any system -------------------------------------------------------------------------------

CAPABILITIES = st.sampled_from([(7, 5), *(c for c in FIRST_CUDA if c >= (8, 0)), (13, 0)])
ARCHS = st.sampled_from(
    ["ptx80", "ptx90", "sm80", "sm86", "sm87", "sm89", "sm90", "sm90a", "sm100", "sm120", "sm121a"]
)
VERSIONS = st.sampled_from([(11, 4), (12, 0), (12, 4), (12, 8), (12, 9), (13, 0)])
#: One kernel's variants mostly, so that they compete; and some that must be left out.
VARIANTS = st.sampled_from([*CUDA, *TRITON, *FAMILY.variants()[-3:]])
TOOLCHAINS = st.none() | st.fixed_dictionaries(
    {
        "cuda": st.builds(Toolchain, st.just("nvrtc"), VERSIONS) | st.just("no NVRTC"),
        "triton": st.builds(Toolchain, st.just("triton"), VERSIONS) | st.just("no Triton"),
    }
)


@st.composite
def devices(draw: st.DrawFn, describe: Describe) -> Device:
    return describe(
        draw(CAPABILITIES),
        threads_per_block=draw(st.sampled_from([512, 1024])),
        registers_per_block=draw(st.sampled_from([8192, 65_536])),
        shared_memory_per_block=draw(st.sampled_from([49_152, 101_376, 232_448])),
        driver=draw(VERSIONS),
    )


@st.composite
def catalogues(draw: st.DrawFn, make: Make) -> tuple[Archive, ...]:
    """Archives of several providers. Now and then a binary is not of its archive's architecture."""
    archives = []
    origins = st.tuples(ARCHS, st.sampled_from(["scan-registry", "another"]))
    for arch, provider in draw(st.lists(origins, unique=True, max_size=6)):
        binaries = []
        for variant in draw(st.lists(VARIANTS, max_size=6, unique=True)):
            target = draw(st.sampled_from([arch, arch, arch, "sm90a", "ptx80"]))
            ptx = target.startswith("ptx")
            binary, _ = make(
                variant,
                target,
                block=(draw(st.sampled_from([32, 128, 1024])), 1, 1),
                dynamic_shared=draw(st.sampled_from([0, 50_000, 150_000])),
                static_shared=None if ptx else draw(st.sampled_from([0, 40_000])),
                registers=None if ptx else draw(st.sampled_from([16, 61, 64, 255])),
                oldest_driver=draw(VERSIONS),
            )
            binaries.append(binary)
        archives.append(in_memory(arch, binaries, provider))
    return tuple(archives)


def runs(target: Target, capability: tuple[int, int]) -> bool:
    """What the CUDA documentation says of where code runs."""
    if target.is_ptx:
        return target.capability <= capability
    if target.capability == capability:
        return True
    return (
        target.suffix == ""
        and target.capability[0] == capability[0]
        and target.capability[1] <= capability[1]
        and target.capability not in TEGRA
        and capability not in TEGRA
    )


def fits(binary: Binary, device: Device) -> bool:
    """``runs``, and the limits of driver and device."""
    threads = binary.block[0] * binary.block[1] * binary.block[2]
    registers = 0 if binary.registers is None else (binary.registers + 7) // 8 * 8
    return (
        runs(binary.target, device.capability)
        and binary.oldest_driver <= device.driver
        and threads <= device.threads_per_block
        and registers * threads <= device.registers_per_block
        and (binary.static_shared or 0) + binary.dynamic_shared <= device.shared_memory_per_block
    )


def rung(binary: Binary, device: Device) -> Rung:
    if binary.target.is_ptx:
        return Rung.PTX
    return Rung.EXACT if binary.target.capability == device.capability else Rung.SAME_MAJOR


def compiled_for(toolchain: Toolchain, language: str, device: Device) -> Target | None:
    """What the compiler would make for the device, if its driver can load it: machine code, or PTX
    from CUDA C++."""
    if device.capability < (8, 0):
        return None
    known = [c for c, first in FIRST_CUDA.items() if first <= toolchain.cuda]
    if device.capability in known:
        # CUDA 13's compilers write machine code for GPUs before 10.0 in a form of their own.
        own_form = toolchain.cuda >= (13, 0) and device.capability < (10, 0)
        oldest = max((13, 0) if own_form else (12, 0), FIRST_CUDA[device.capability])
        return Target(device.capability) if device.driver >= oldest else None
    earlier = [c for c in known if (8, 0) <= c < device.capability and c not in TEGRA]
    if language != "cuda" or not earlier or device.driver < toolchain.cuda:
        return None
    return Target(max(earlier), "compute")


def either_way(variant: Variant) -> str:
    statics = tuple(pin for pin in variant.statics if pin[0] != "reverse")
    return str(replace(variant, statics=statics))


Offer = tuple[Rung, str, str]


def offers(system: System, problem: LinearScanProblem, backend: Backend) -> list[Offer]:
    """All that solves the problem, derived anew: rung, subject, and where it comes from."""
    found: list[Offer] = []
    device = system.device
    assert device is not None

    def usable(variant: Variant) -> bool:
        kernel = FAMILY.kernel(variant.kernel, variant.language)
        return (
            variant.kernel == problem.kernel
            and backend in ("auto", variant.language)
            and not {str(variant), either_way(variant)} & system.denied.keys()
            and kernel.accepts(variant, problem) is None
        )

    for archive in system.archives:
        for binary in archive.binaries if runs(archive.arch, device.capability) else ():
            if (
                usable(binary.variant)
                and fits(binary, device)
                and binary.sha256 not in system.denied
            ):
                found.append((rung(binary, device), str(binary), str(archive.path)))
    for language, toolchain in (system.toolchains or {}).items():
        if isinstance(toolchain, Toolchain):
            target = compiled_for(toolchain, language, device)
            for variant in FAMILY.kernel(KERNEL, language).variants if target else ():
                if usable(variant):
                    found.append((Rung.JIT, f"{variant} for {target}", "here"))
    if backend in ("auto", "reference"):
        found.append((Rung.REFERENCE, "the reference", "here"))
    return [offer for offer in found if offer[1:] not in system.failed]


def considered(system: System) -> list[str]:
    """The subject of every binary, compiler or whole archive that there is something to say of."""
    device = system.device
    assert device is not None
    subjects = ["the reference"]
    for archive in system.archives:
        if runs(archive.arch, device.capability):
            subjects += [str(b) for b in archive.binaries if b.variant.kernel == KERNEL]
        else:
            subjects.append(f"{archive.provider}'s {archive.path.name}")
    for language, toolchain in (system.toolchains or {}).items():
        target = (
            compiled_for(toolchain, language, device) if isinstance(toolchain, Toolchain) else None
        )
        if target is None:
            subjects.append(f"{language} compiled here")
        else:
            subjects += [f"{v} for {target}" for v in FAMILY.kernel(KERNEL, language).variants]
    return subjects


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_any_system(data: st.DataObject, a_device: Describe, a_binary: Make) -> None:
    """The winner fits and is allowed, nothing that is allowed is closer, and all else has a reason."""
    archives = data.draw(catalogues(a_binary), label="archives")
    held = [binary for archive in archives for binary in archive.binaries]
    subjects = st.sampled_from([digest(b"unknown"), *(b.sha256 for b in held), *map(str, CUDA)])
    system = System(
        device=data.draw(devices(a_device), label="device"),
        archives=archives,
        toolchains=data.draw(TOOLCHAINS, label="toolchains"),
        denied=data.draw(st.dictionaries(subjects, st.just("denied: no"), max_size=3)),
    )
    problem = a_problem(
        data.draw(st.integers(1, 5000)),
        data.draw(st.sampled_from(["float32", "bfloat16"])),
        data.draw(st.sampled_from([4, 16])),
    )
    backend: Backend = data.draw(st.sampled_from(BACKENDS), label="backend")
    lowest = data.draw(st.sampled_from(Rung), label="lowest")
    able = offers(system, problem, backend)
    if able:
        failures = st.sets(st.sampled_from(sorted({offer[1:] for offer in able})), max_size=2)
        system = replace(system, failed=dict.fromkeys(data.draw(failures), "it failed"))
    allowed = [offer for offer in offers(system, problem, backend) if offer[0] <= lowest]

    decision = select(system, FAMILY, problem, backend, lowest)

    winner = decision.winner
    assert (winner is None) == (not allowed)
    if winner is None:
        with pytest.raises(NoKernelError):
            decision.taken()
    else:
        assert (winner.rung, *winner.key) in allowed
        assert winner.rung == min(offer[0] for offer in allowed)
        assert decision.taken() is winner
        if winner.binary is not None:
            assert winner.archive is not None
            assert winner.binary in winner.archive.binaries
        assert (decision.launch() is None) == (winner.rung is Rung.REFERENCE)
    every = [
        offering.checked(decision, each)
        for language in offering.LANGUAGES
        for each in offering.offers(decision, language, all_dtypes=True)
        if isinstance(each, offering.Offer)
    ]
    found = [outcome for outcome in every if isinstance(outcome, Candidate)]
    if winner is not None and winner.rung < Rung.REFERENCE:
        assert winner == min(found, key=lambda candidate: candidate.order)
    accounted = [r.subject for r in decision.rejected] + ([winner.subject] if winner else [])
    assert sorted(accounted) == sorted(considered(system))
    assert all(loser.reason.strip() and not loser.damaged for loser in decision.rejected)

    if winner is None or winner.rung < Rung.JIT:
        blind = select(replace(system, toolchains=None), FAMILY, problem, backend, lowest)
        assert blind.winner == winner


# --- Tuning -----------------------------------------------------------------------------------


def plain(variant: Variant) -> bool:
    """Whether it is for aligned problems in float32."""
    return (variant.text("dtype"), variant.text("access")) == ("float32", "aligned")


#: In no wheel.
SPARE = next(v for v in CODE if plain(v) and v not in CUDA)


def a_tuning(
    arch: str = "sm_90", rows: Iterable[tuple[float, Mapping[Variant, float]]] = ()
) -> Tuning:
    """Of the float32 kernel on aligned problems, by time."""
    kernel = FAMILY.kernel(KERNEL, "cuda")
    assert kernel.shape is not None
    shape = kernel.shape(a_problem())
    made = [
        Row({**shape.sizes, "time": time}, {kernel.label(v): ms for v, ms in times.items()})
        for time, times in rows
    ]
    return Tuning.of(arch, "Imaginary", "2026-01-31", {shape.kind: made})


def tuned_archive(arch: str, binaries: Iterable[Binary], *tunings: Tuning) -> Archive:
    archive = in_memory(arch, binaries)
    archive.__dict__["tuned"] = {FAMILY.kernel(KERNEL, "cuda").head: tunings}
    return archive


def aligned() -> list[Variant]:
    """The float32 variants for aligned problems; the spec likes the last most where T is 1024."""
    problem = a_problem()
    kernel = FAMILY.kernel(KERNEL, "cuda")
    found = [v for v in CUDA if plain(v) and kernel.accepts(v, problem) is None]
    return sorted(found, key=lambda v: -kernel.cost(v, problem))


def test_the_nearest_row_decides(a_binary: Make, a_device: Describe) -> None:
    slow, *_, liked = aligned()
    rows = [(1024, {slow: 0.1, liked: 0.2}), (65536, {liked: 3.0, slow: 4.0})]
    archive = tuned_archive("sm90", [a_binary(v)[0] for v in CUDA], a_tuning(rows=rows))
    near = decide(a_device(), [archive])
    assert variant_of(near.winner) == slow
    assert near.winner is not None
    assert near.winner.tuned is not None
    assert (near.winner.ms, near.winner.tuned.local) == (0.1, False)
    assert "tuning found the winner faster (0.1 ms against 0.2)" in told(near, str(liked))
    others = [v for v in aligned() if v not in (slow, liked)]
    assert "names the winner, and not this" in told(near, str(others[0]))
    far = decide(a_device(), [archive], a_problem(30_000))
    assert variant_of(far.winner) == liked
    untold = decide(a_device(), [archive], a_problem(alignment=4))
    assert untold.winner is not None
    assert (untold.winner.tuned, untold.winner.ms) == (None, None)
    assert "the spec prefers" in json.dumps([asdict(loser) for loser in untold.rejected])


def test_those_that_rank_after_the_winner_are_looked_at_when_somebody_asks(
    a_binary: Make, a_device: Describe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first call has no time for them."""
    slow, *_, liked = aligned()
    tuning = a_tuning(rows=[(1024, {slow: 0.1, liked: 0.2})])
    archive = tuned_archive("sm90", [a_binary(v)[0] for v in CUDA], tuning)
    seen: list[str] = []
    real = select_module.checked
    monkeypatch.setattr(
        select_module, "checked", lambda asked, each: seen.append(each.text) or real(asked, each)
    )
    decision = decide(a_device(), [archive])
    assert variant_of(decision.winner) == slow
    assert seen == [str(slow)]
    best = binary_of(decision.winner).sha256
    second = decide(a_device(), [archive], denied={best: "denied: it races"})
    assert variant_of(second.winner) == liked
    assert seen[1:] == [str(slow), str(liked)]
    assert told(second, str(slow)) == "denied: it races"
    assert len(decision.rejected) == len(CUDA)  # the others and the reference


def test_a_row_for_another_architecture(a_binary: Make, a_device: Describe) -> None:
    """It counts where there is no other, and its variants have to fit all the same."""
    slow, *_, liked = aligned()
    row = [(1024, {slow: 0.1, liked: 0.2})]
    binaries = [a_binary(v, "sm90")[0] for v in CUDA]
    device = a_device(shared_memory_per_block=1000)
    small = [replace(b, static_shared=0) if b.variant == liked else b for b in binaries]
    decision = decide(device, [tuned_archive("sm90", small, a_tuning("sm_100", row))])
    assert variant_of(decision.winner) == liked
    assert decision.winner is not None
    assert decision.winner.tuned is not None
    assert decision.winner.tuned.tuning.arch == "sm_100"
    assert "bytes of shared memory" in told(decision, str(slow))
    both = tuned_archive(
        "sm90", binaries, a_tuning("sm_100", row), a_tuning(rows=[(9999, {liked: 1.0})])
    )
    assert variant_of(decide(a_device(), [both]).winner) == liked


def test_what_was_tuned_here_comes_first(a_binary: Make, a_device: Describe) -> None:
    slow, middle, *_, liked = aligned()
    shipped = tuned_archive(
        "sm90", [a_binary(v)[0] for v in CUDA], a_tuning(rows=[(1024, {liked: 1.0, slow: 2.0})])
    )
    local = tuned_archive(
        "sm90", [a_binary(SPARE)[0]], a_tuning(rows=[(1024, {SPARE: 0.5, middle: 0.6})])
    )
    decision = decide(a_device(), [shipped], tuned=local)
    assert variant_of(decision.winner) == SPARE
    assert decision.winner is not None
    assert decision.winner.archive is local
    assert decision.winner.tuned is not None
    assert decision.winner.tuned.local
    # The row is the machine's for the wheel's variants, too; a nearer one of the wheel's counts.
    assert "(0.5 ms against 0.6)" in told(decision, str(middle))
    local.__dict__["tuned"] = {
        FAMILY.kernel(KERNEL, "cuda").head: (a_tuning(rows=[(65536, {SPARE: 0.5})]),)
    }
    assert variant_of(decide(a_device(), [shipped], tuned=local).winner) == liked


def test_what_was_tuned_here_and_is_damaged_counts_as_missing(
    archive_factory: Factory, a_device: Describe, a_binary: Make, tmp_path: Path
) -> None:
    liked = aligned()[-1]
    shipped = tuned_archive("sm90", [a_binary(v)[0] for v in CUDA])
    broken = tmp_path / "sm90.scanreg"
    broken.write_bytes(b"broken")
    decision = decide(a_device(), [shipped], tuned=Archive(broken))
    assert variant_of(decision.winner) == liked
    assert any(loser.damaged for loser in decision.rejected)


def test_rows_that_are_not_right_count_as_missing(a_binary: Make, a_device: Describe) -> None:
    kind = next(iter(a_tuning(rows=[(1, {SPARE: 1.0})]).kinds))
    wrong = Tuning("sm_90", "x", "d", [], [], {kind: "[3]"})
    decision = decide(a_device(), [tuned_archive("sm90", [a_binary(v)[0] for v in CUDA], wrong)])
    assert variant_of(decision.winner) == aligned()[-1]
    assert decision.taken().tuned is None


def test_what_is_compiled_here_goes_by_the_specs_tables(a_device: Describe) -> None:
    kernel = FAMILY.kernel(KERNEL, "cuda")
    tuning = a_tuning(rows=[(1024, {SPARE: 0.5})])
    changed = replace(kernel, tunings=lambda: (tuning,))
    family = replace(FAMILY, kernels=(changed, *(k for k in FAMILY.kernels if k is not kernel)))
    there = System(a_device(), toolchains=COMPILERS)
    decision = select(there, family, a_problem())
    assert decision.taken().rung == Rung.JIT
    assert variant_of(decision.winner) == SPARE
    assert decision.taken().ms == 0.5


def test_a_pinned_variant_runs_or_nothing_does(a_binary: Make, a_device: Describe) -> None:
    slow, *_, liked = aligned()
    archive = in_memory("sm90", [a_binary(v)[0] for v in CUDA])
    decision = decide(a_device(), [archive], pinned=slow, toolchains=COMPILERS, backend="cuda")
    assert (variant_of(decision.winner), decision.taken().rung) == (slow, Rung.EXACT)
    assert f"{slow} is pinned" in told(decision, str(liked))
    spare = decide(a_device(), [archive], pinned=SPARE, toolchains=COMPILERS, backend="cuda")
    assert (variant_of(spare.winner), spare.taken().rung) == (SPARE, Rung.JIT)
    with pytest.raises(NoKernelError):
        decide(a_device(), [archive], pinned=TRITON[0], backend="cuda").taken()


def test_blocks_that_wait_for_each_other_have_to_fit_the_gpu(
    archive_factory: Factory, a_device: Describe
) -> None:
    """Which a kernel tells by the number of multiprocessors."""
    kernels = tuple(
        replace(k, crowds=lambda v, p, count: None if count >= 100 else f"{count} are too few")
        for k in FAMILY.kernels
    )
    family = replace(FAMILY, kernels=kernels)
    archive = archive_factory("sm90", variants=CUDA)
    for count, rung in ((100, Rung.EXACT), (99, Rung.REFERENCE)):
        there = System(a_device(multiprocessors=count), (archive,))
        decision = select(there, family, a_problem(), "auto", Rung.REFERENCE)
        assert decision.taken().rung is rung
        assert ("99 are too few" in told(decision, KERNEL)) == (count == 99)


def test_what_is_for_other_architectures_is_not_compiled(a_device: Describe) -> None:
    kernels = tuple(
        replace(k, serves=lambda statics, target: target.capability >= (9, 0))
        for k in FAMILY.kernels
    )
    family = replace(FAMILY, kernels=kernels)
    for capability, rung in (((9, 0), Rung.JIT), ((8, 9), Rung.REFERENCE)):
        there = System(a_device(capability), toolchains=COMPILERS)
        decision = select(there, family, a_problem(), "auto", Rung.REFERENCE)
        assert decision.taken().rung is rung
        assert ("it is not for sm_89" in told(decision, KERNEL)) == (rung != Rung.JIT)
