"""What ``doctor`` advises exists, and holds what it is advised for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from diagnosing import Describe, Factory
from imaginary import COMPILERS, MISSING

from scan_registry.diagnostics.doctor import coverage, lacks
from scan_registry.diagnostics.doctor_report import Finding
from scan_registry.dispatch.fit import Tier
from scan_registry.dispatch.select import System, advice, select
from scan_registry.dispatch.shipped import holds
from scan_registry.hardware.device import SUPPORTED, described
from scan_registry.hardware.target import RELEASED, Target
from scan_registry.kernels import families
from scan_registry.kernels.model import Family

MATRIX = json.loads((Path(__file__).parents[4] / "ci" / "matrix.json").read_text(encoding="utf-8"))[
    "archs"
]
OTHERS = ((8, 7), (10, 3), (11, 0), (12, 1), (13, 0))
CAPABILITIES = [*(Target.parse(label).capability for label in MATRIX), *OTHERS]
#: Around the oldest that load machine code, machine code of the latest GPUs, and PTX.
DRIVERS = ((11, 8), (12, 7), (12, 9), (13, 0))
GATED = families()["gated_scan"]


def each_alone() -> Iterator[Family]:
    """Families with one sample: one of every kernel of ``gated_scan`` in every dtype, and the first of every other family."""
    for family in families().values():
        chosen = {(s.problem.kernel, s.dtype): s for s in family.samples}
        kept = chosen.values() if family is GATED else family.samples[:1]
        yield from (replace(family, samples=(sample,)) for sample in kept)


ALONE = tuple(each_alone())


def findings(there: System, family: Family, lowest: Tier = Tier.REFERENCE) -> list[Finding]:
    one = {family.name: family}
    return [*lacks(coverage(there, one, lowest), there, one, lowest)]


def check(remedy: str, family: Family, missing: set[str]) -> None:
    (sample,) = family.samples
    drivers = re.findall(r"driver (\d+) or later, for CUDA ([0-9.]+)", remedy)
    assert all(tuple(map(int, cuda.split("."))) in SUPPORTED for _, cuda in drivers)
    package = re.match(r"`pip install scan-registry-(\w+)`(, and driver .*)?$", remedy)
    built = re.match(
        r"build a wheel for (\w+): `pip wheel \. -C archs=\1`(, and driver .*)?$", remedy
    )
    if package:
        assert package[1] in RELEASED
    if package or built:
        label = (package or built)[1]  # type: ignore[index]
        assert holds(Target.parse(label), family, sample.problem, "auto"), (remedy, sample)
    else:
        known = "install driver ", "allow tier ", "use a GPU of compute capability 8.0 or later"
        assert remedy.startswith(known) or remedy in missing, remedy


@pytest.mark.parametrize(
    "capability",
    [
        pytest.param(
            each, marks=[] if each in ((8, 6), (9, 0), (13, 0), (7, 5)) else [pytest.mark.thorough]
        )
        for each in (*dict.fromkeys(CAPABILITIES), (7, 5))
    ],
    ids=str,
)
def test_all_advice_is_of_what_exists(capability: tuple[int, int]) -> None:
    missing = {str(item) for item in MISSING.values()}
    for driver in DRIVERS:
        device = described(capability, driver=driver)
        for toolchains in (MISSING, COMPILERS):
            there = System(device, (), toolchains)
            for family in ALONE:
                policies = (Tier.REFERENCE, Tier.SAME_MAJOR)
                for lowest in policies if toolchains is MISSING else policies[:1]:
                    for finding in findings(there, family, lowest):
                        for remedy in finding.remedies:
                            check(remedy, family, missing)
                decision = select(there, family, family.samples[0].problem, lowest=Tier.PTX)
                for label in re.findall(r"built for (\w+)|\((ptx80)\)", advice(decision)):
                    target = Target.parse("".join(label))
                    assert holds(target, family, family.samples[0].problem, "auto")


@pytest.mark.parametrize("toolchains", [MISSING, COMPILERS], ids=["none", "compilers"])
def test_what_wheels_leave_to_compilers_is_no_error(
    archive_factory: Factory, a_device: Describe, toolchains: object
) -> None:
    """An image is all right with everything that a wheel holds."""
    sm90, kernels = Target((9, 0)), GATED.kernels
    entries = [v for k in kernels for v in k.variants if k.rules.ships(v.statics, sm90)]
    there = System(a_device(), (archive_factory("sm90", variants=entries),), toolchains)  # type: ignore[arg-type]
    for lowest in (Tier.REFERENCE, Tier.JIT):
        result = [f for f in findings(there, GATED, lowest) if "backend=" not in f.text]
        assert len(result) == 1
        (left,) = result
        assert left.severity == ("warning" if toolchains is MISSING else "note")
        assert "no wheel holds it: " in left.text
        assert left.text.count("(float16)") == len({k.name for k in kernels})
        assert not any("pip install scan-registry" in remedy for remedy in left.remedies)
