"""Test binaries on a GPU: run each on a GPU against the float64 reference and record its error.

    python tools/attest.py            run every installed binary that this GPU can run, and write
                                      kernels/<family>/attestations/<gpu>.json
    python tools/attest.py --family NAME
                                      those of one family alone
    python tools/attest.py --missing  those alone that the GPU's file has no record of; it keeps its records of installed ones
    python tools/attest.py --report   run every installed binary that this GPU can run, and write one file to send to the project:
                                      attestation-<gpu>.json in this folder
    python tools/attest.py --accept FILE
                                      needs no GPU: put the records of such a file of installed binaries where those of this
                                      repository are
    python tools/attest.py --check    needs no GPU: compare those files with what is installed
    python tools/attest.py --prune    needs no GPU: drop from those files the records of other binaries

Attestations are keyed by the digest of the binary, so they say nothing of any other binary. The
check fails when a file names a digest that is in no archive for its architecture, or when an installed sm90 binary or an
sm_80 PTX has no attestation within tolerance. It is a gate for releases.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from records import write_records

from scan_registry.artifact.archive import Archive, Binary
from scan_registry.catalog.inventory import catalogue, worst_attestations
from scan_registry.hardware.target import Target
from scan_registry.kernels import families
from scan_registry.kernels.model import Family, Kernel, Problem, Variant

if TYPE_CHECKING:
    from scan_registry.kernels.cases import Trial

ROOT = Path(__file__).parents[1]
ISSUES = "https://github.com/scan-registry/scan-registry/issues"
MUST_BE_TESTED = ("sm_90", "compute_80")


def staleness() -> Callable[[str, str], bool]:
    """A function that says of a digest and its target whether archives for such targets are installed, and hold no such binary."""
    installed, archs = set(), set()
    for archive, binary in catalogue():
        installed.add(binary.sha256)
        archs.add((archive.arch.capability, archive.arch.is_ptx))

    def is_stale(digest: str, name: str) -> bool:
        target = Target.parse(name)
        return digest not in installed and (target.capability, target.is_ptx) in archs

    return is_stale


def check(folder: Path) -> int:
    """Print the counts of the attestations in ``folder``; 1 if the gate does not pass."""
    attested, is_stale = worst_attestations(folder), staleness()
    stale = sorted(
        f"{a.variant} {a.target}" for d, a in attested.items() if is_stale(d, str(a.target))
    )
    failed = sorted(f"{a.variant} {a.target}" for a in attested.values() if not a.passed)
    needed = {b.sha256: b for archive, b in catalogue() if str(archive.arch) in MUST_BE_TESTED}
    missing = sorted(f"{b.variant} {b.target}" for d, b in needed.items() if d not in attested)
    for what, names in (("stale", stale), ("failed", failed), ("missing", missing)):
        for name in names:
            print(f"{what}: {name}")
    print(
        f"attestations: {len(needed) - len(missing)} of {len(needed)} binaries attested, "
        f"{len(stale)} stale, {len(failed)} failed"
    )
    return int(bool(stale + failed + missing) or not needed)


def prune(folder: Path) -> int:
    """Drop the records of binaries that are not installed, such as those of kernels that have changed. Those for which no archive is
    installed stay."""
    is_stale = staleness()
    for path in sorted(folder.glob("*/attestations/*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        kept = [
            record
            for record in content["binaries"]
            if not is_stale(record["sha256"], record["target"])
        ]
        print(
            f"{path.relative_to(folder)}: {len(content['binaries']) - len(kept)} of {len(content['binaries'])} dropped"
        )
        if kept:
            write_records(path, {**content, "binaries": kept})
        else:
            path.unlink()
    return 0


def runnable(family: Family) -> Iterator[tuple[Archive, Binary]]:
    """The installed binaries of a family that the GPU can run."""
    from scan_registry.dispatch.fit import misfit
    from scan_registry.hardware.device import device

    gpu = device(0)
    for archive in catalogue().archives:
        if archive.arch.misfit(gpu.capability):
            continue
        for binary in archive.binaries:
            if binary.variant.family == family.name and misfit(binary, gpu) is None:
                yield archive, binary


def takes(kernel: Kernel, variant: Variant, problem: Problem, sm_count: int) -> bool:
    """Whether a variant computes a problem on a GPU of so many SMs."""
    rules = kernel.rules
    return not (
        rules.accepts(variant, problem) or rules.exceeds_residency(variant, problem, sm_count)
    )


def errors_of(
    family: Family, binaries: Sequence[tuple[Archive, Binary]], trial: Trial, sm_count: int
) -> Iterator[tuple[Binary, float]]:
    """Each binary with its error in each case of a trial that it computes."""
    from scan_registry.diagnostics.accuracy import run

    names = dict.fromkeys(binary.variant.kernel for _, binary in binaries)
    posed = {name: [case.problem for case in trial.launches(name)] for name in names}
    for archive, binary in binaries:
        variant = binary.variant
        kernel = family.kernel(variant.kernel, variant.language)
        if any(takes(kernel, variant, problem, sm_count) for problem in posed[kernel.name]):
            for case in trial.launches(kernel.name):
                if takes(kernel, variant, case.problem, sm_count):
                    run(0, binary, partial(archive.read, binary), case)
                    yield binary, case.error()


def attest(family: Family, known: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A record for each binary of ``family`` that the GPU can run: the one that is ``known``, by digest, or a new one."""
    from rich.progress import track

    from scan_registry.diagnostics.accuracy import cases_of
    from scan_registry.hardware.device import device

    cases = cases_of(family.name)
    sm_count = device(0).sm_count
    every = list(runnable(family))
    binaries = [pair for pair in every if pair[1].sha256 not in known]
    errors: dict[str, list[float]] = {binary.sha256: [] for _, binary in binaries}

    present = {binary.variant.text("dtype") for _, binary in binaries}
    for dtype, tolerance in cases.TOLERANCE.items():
        if dtype not in present:
            continue
        print(f"{family.name} {dtype}: drawing", flush=True)
        for trial in track(list(cases.trials(dtype, cases.THOROUGH, "cuda")), dtype):
            for binary, error in errors_of(family, binaries, trial, sm_count):
                errors[binary.sha256].append(error)
                if error > tolerance:
                    print(f"{binary.variant} {binary.target} {trial}: error {error:.2e}")
    return [
        known.get(binary.sha256)
        or {
            "sha256": binary.sha256,
            "variant": str(binary.variant),
            "target": str(binary.target),
            "error": float(f"{max(errors[binary.sha256], default=float('inf')):.3e}"),
            "tolerance": cases.TOLERANCE[binary.variant.text("dtype")],
            "cases": len(errors[binary.sha256]),
        }
        for binary in {b.sha256: b for _, b in every}.values()
    ]


def short_name(gpu: str) -> str:
    """A GPU's name as files have it: ``h100-80gb-hbm3``."""
    return re.sub(r"\W+", "-", gpu.lower().removeprefix("nvidia ")).strip("-")


def place(family: str, gpu: str, folder: Path) -> Path:
    """The file of a GPU for a family."""
    return folder / family / "attestations" / f"{short_name(gpu)}.json"


def recorded(path: Path) -> dict[str, dict[str, Any]]:
    """The records of a file by digest; none if there is no file."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"binaries": ()}
    return {record["sha256"]: record for record in content["binaries"]}


def circumstances() -> dict[str, str]:
    """What ran the binaries: nothing else of the machine is written down."""
    import torch

    from scan_registry import __version__
    from scan_registry.hardware import driver

    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": ".".join(map(str, driver.version())),
        "torch": torch.__version__,
        "version": __version__,
        "date": date.today().isoformat(),
    }


def shapes(family: str) -> list[str]:
    """The shapes that are run."""
    from scan_registry.diagnostics.accuracy import cases_of

    return [str(shape) for shape in cases_of(family).THOROUGH]


def write(path: Path, family: str, ran: Mapping[str, str], records: Sequence[Any]) -> None:
    """A family's file of one GPU."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_records(path, {**ran, "shapes": shapes(family), "binaries": records})


def passed(record: Mapping[str, Any]) -> bool:
    return bool(record["error"] <= record["tolerance"])


def tell(family: str, records: Sequence[dict[str, Any]]) -> None:
    """Print the worst error of each dtype, and how many binaries passed."""
    for dtype in dict.fromkeys(r["variant"].split("dtype=")[1].split(",")[0] for r in records):
        worst = max(r["error"] for r in records if f"dtype={dtype}," in r["variant"])
        print(f"{family} {dtype}: worst error {worst:.2e}")
    tested = sum(map(passed, records))
    print(f"{family}: {tested} of {len(records)} binaries GPU-tested", flush=True)


# --- A GPU of somebody else -------------------------------------------------------------------


def report(names: Sequence[str], folder: Path) -> int:
    """Run the families on this GPU and write one file; 1 if an error exceeds its tolerance."""
    ran = circumstances()
    records = []
    for name in names:
        own = attest(families()[name], {})
        tell(name, own)
        records += own
    path = folder / f"attestation-{short_name(ran['gpu'])}.json"
    shapes_of = {name: shapes(name) for name in names}
    write_records(path, {**ran, "shapes": shapes_of, "binaries": records})
    print(f"{path}: attach this file to an issue at {ISSUES}")
    return int(not all(map(passed, records)))


def accept(path: Path, folder: Path) -> int:
    """Put a report's records beside those that a family has of this GPU. Left out, and counted, are the records of binaries that are
    not installed (a digest stands for its bytes, whoever sent it), of other shapes than this package's, and of no case. 1 if none
    is left, 2 if the file is no report."""
    from scan_registry.diagnostics.accuracy import cases_of

    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        ran = {key: str(content[key]) for key in ("gpu", "driver", "torch", "version", "date")}
        shapes_of = dict(content["shapes"])
        sent = [(r["sha256"], float(r["error"]), int(r["cases"])) for r in content["binaries"]]
    except (KeyError, TypeError, ValueError) as fault:
        print(f"error: {path} is not what --report writes: {fault!r}", file=sys.stderr)
        return 2
    installed = {binary.sha256: binary for _, binary in catalogue()}
    of_family: dict[str, dict[str, dict[str, Any]]] = {}
    for digest, error, count in sent:
        binary = installed.get(digest)
        if binary is None or not (0 <= error < math.inf and count > 0):
            continue
        variant = binary.variant
        if shapes_of.get(variant.family) == shapes(variant.family):
            of_family.setdefault(variant.family, {})[digest] = {
                "sha256": digest,
                "variant": str(variant),
                "target": str(binary.target),
                "error": error,
                "tolerance": cases_of(variant.family).TOLERANCE[variant.text("dtype")],
                "cases": count,
            }
    for family, records in of_family.items():
        file = place(family, ran["gpu"], folder)
        write(file, family, ran, [*(recorded(file) | records).values()])
        tell(family, [*records.values()])
    taken = sum(map(len, of_family.values()))
    print(f"{taken} of {len(sent)} records taken; the others are of other binaries or other cases")
    return int(not taken)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with what is installed")
    parser.add_argument(
        "--missing", action="store_true", help="run binaries without a record alone"
    )
    parser.add_argument(
        "--prune", action="store_true", help="drop the records of binaries that are not installed"
    )
    parser.add_argument("--report", action="store_true", help="write one file to send, here")
    parser.add_argument(
        "--accept", type=Path, metavar="FILE", help="take what another machine has reported"
    )
    parser.add_argument(
        "--family", choices=families(), action="append", help="may repeat; default: every family"
    )
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "kernels", help="where the families' files are"
    )
    args = parser.parse_args()
    if args.check:
        return check(args.folder)
    if args.prune:
        return prune(args.folder)
    if args.accept:
        return accept(args.accept, args.folder)

    import torch

    if not torch.cuda.is_available():
        print("attest needs an NVIDIA GPU, and torch sees none", file=sys.stderr)
        return 2
    names = args.family or list(families())
    if args.report:
        return report(names, Path.cwd())
    failed = 0
    for name in names:
        ran = circumstances()
        path = place(name, ran["gpu"], args.folder)
        records = attest(families()[name], recorded(path) if args.missing else {})
        write(path, name, ran, records)
        tell(name, records)
        failed += sum(not passed(record) for record in records)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
