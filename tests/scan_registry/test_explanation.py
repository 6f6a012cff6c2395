"""``explain``, in Python and on the command line: what is said of the winner and of every loser."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator

import scan_registry
from scan_registry import archive, explanation, policy
from scan_registry.archive import Archive, Binary
from scan_registry.cli import explain as command
from scan_registry.cli import main
from scan_registry.device import Device
from scan_registry.explanation import Explanation, called, explain_for, grouped
from scan_registry.fit import Toolchain
from scan_registry.inventory import Attestation, Catalogue, catalogue
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.tuning import Row, Tuning
from scan_registry.providers import ProviderError
from scan_registry.select import Rejected, System
from scan_registry.target import Target

Factory = Callable[..., Archive]
Make = Callable[..., tuple[Binary, bytes]]
Describe = Callable[..., Device]
Capture = pytest.CaptureFixture[str]

SCHEMA = json.loads(files("scan_registry").joinpath("schemas", "explain.json").read_text())
CALL = ("explain", "linear_scan", "--dtype", "bf16", "--shape", "2,8,4096")
NVRTC = Toolchain("nvrtc 12.9.86", (12, 9))


def valid(document: Mapping[str, Any]) -> None:
    Draft202012Validator(SCHEMA).validate(document)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def explained(there: System, *shape: int, **options: Any) -> Explanation:
    tensor = meta(*(shape or (2, 8, 4096)))
    return explain_for(there, "linear_scan", tensor, tensor, **options)


def facts(text: str, step: str) -> dict[str, str]:
    """The labelled lines of one step."""
    (block,) = [block for block in text.split("\n\n") if block.startswith(f"{step}: ")]
    lines = [line for line in block.splitlines()[1:] if not line.startswith("    ")]
    return {line[2:].partition(" ")[0]: line[13:] for line in lines}


@pytest.fixture
def hopper(archive_factory: Factory, a_device: Describe) -> System:
    """A 9.0 with all CUDA variants as machine code and as PTX, and no compiler."""
    return System(a_device(), (archive_factory("ptx80"), archive_factory("sm90")))


# --- Words ------------------------------------------------------------------------------------


def test_the_winner_is_described(hopper: System) -> None:
    found = explained(hopper)
    text = str(found)
    assert text.startswith("linear_scan on Imaginary 9.0 (sm_90), driver for CUDA 13.0\n\n")
    for step in found.steps:
        winner = step.decision.taken()
        assert winner.archive is not None
        assert winner.binary is not None
        assert f"\n{step.name}: rung exact\n" in text
        said = facts(text, step.name)
        assert said["variant"] == str(winner.variant)
        assert said["target"] == f"sm_90, from scan-registry, {winner.archive.path}"
        assert said["sha256"] == winner.binary.sha256
        assert said["proven"].startswith("no; ")
        assert said["launch"] == (
            "grid 16 × 1 × 1, block 128 × 1 × 1, shared memory 1024 + 0 bytes per block, "
            "workspace 0 bytes"
        )
        assert said["copies"] == "none"
        assert f"the spec's estimate decided ({winner.cost:g}, smaller is better)" in said["tuning"]
        assert "batch 1, channels 16, time 4096" in said["problem"]
        assert "help" not in said
    assert [step.name for step in found.steps] == ["forward", "backward"]


@pytest.mark.parametrize(("error", "words"), [(1e-3, "yes; "), (1e-1, "no, it failed; ")])
def test_what_a_gpu_has_measured(
    hopper: System, monkeypatch: pytest.MonkeyPatch, error: float, words: str
) -> None:
    winner = explained(hopper).steps[0].decision.taken()
    assert winner.binary is not None
    binary = winner.binary
    measured = Attestation(
        binary.sha256, str(binary.variant), "sm_90", error, 8e-3, 38, "Imaginary H", "2026-01-31"
    )
    monkeypatch.setattr(explanation, "_attestations", lambda: {binary.sha256: measured})
    found = explained(hopper)
    assert facts(str(found), "forward")["proven"] == (
        f"{words}error {error:.1e}, tolerance 8.0e-03, on Imaginary H, 2026-01-31"
    )
    forward, backward = found.to_json()["steps"]
    assert forward["proven"] is (error < 8e-3)
    assert forward["attestation"]["gpu"] == "Imaginary H"
    assert (backward["proven"], backward["attestation"]) == (False, None)


def a_row(there: System, arch: str, named: bool = True) -> Tuning:
    """Of the forward kernel, at four times the time; names what the spec likes the least."""
    kernel = FAMILY.kernel("time_last_forward", "cuda")
    decision = explained(there).steps[0].decision
    assert kernel.shape is not None
    shape = kernel.shape(decision.problem)
    taken = [v for v in kernel.variants if kernel.accepts(v, decision.problem) is None]
    least = max(taken, key=lambda v: kernel.cost(v, decision.problem))
    times = {kernel.label(least) if named else "gone=1": 0.25}
    row = Row({**shape.sizes, "time": 4 * shape.sizes["time"]}, times)
    return Tuning.of(arch, "Imaginary T", "2026-02-01", {shape.kind: [row]})


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("local", [True, False])
def test_the_row_is_named(
    hopper: System, tmp_path: Path, a_binary: Make, arch: str, local: bool, capsys: Capture
) -> None:
    start = document(capsys, "--arch", "sm_75")
    for named in (True, False):
        tuning = a_row(replace(hopper, tuned=None), arch, named)
        path = tmp_path / "more" / "sm90.scanreg"
        binaries = [a_binary(v) for v in FAMILY.kernel("time_last_forward", "cuda").variants]
        tunings = {binaries[0][0].variant.head: [tuning]}
        archive.write(path, Target.parse("sm90"), binaries, {}, tunings)
        more = Archive(path)
        there = replace(hopper, tuned=more) if local else replace(hopper, archives=(more,))
        found = explained(there)
        said = facts(str(found), "forward")["tuning"]
        source = "tuned here" if local else "the shipped table"
        assert f"the row of lines 16, time 16384 ({source}, {arch}, Imaginary T, 2026-02-01" in said
        other = "another architecture's, as there is none for sm_90"
        assert (other in said) == (arch != "sm_90")
        assert ("0.25 ms there" if named else "which names nothing that runs here") in said
        record = found.to_json()["steps"][0]["tuning"]
        assert record["ms"] == (0.25 if named else None)
        assert (record["source"] == "local") == local
        assert (record["own_arch"], record["distance"]) == (arch == "sm_90", 2.0)
        valid({**start, **found.to_json()})


def test_losers_are_grouped_or_listed(hopper: System) -> None:
    found = explained(hopper)
    short, long = str(found), found.text(everything=True)
    assert "    17 variants for compute_80, sm_90: dtype float32, not bfloat16\n" in short
    assert "    5 variants for compute_80: it scans the other way\n" in short
    assert "    the reference: rung reference; the winner's is exact" in short
    for step in found.steps:
        losers = step.decision.rejected
        assert losers
        for loser in losers:
            assert f": {loser.reason}" in short
            assert f"    {loser.subject}: {loser.reason}" in long
    rows = [line for line in long.splitlines() if line.startswith("    ")]
    assert len(rows) == sum(len(step.decision.rejected) for step in found.steps)


def test_groups() -> None:
    first, second = FAMILY.variants()[:2]
    subjects = (f"{first} for sm_90", f"{second} for sm_90", f"{first} for compute_80")
    assert called(subjects) == "2 variants for sm_90, compute_80"
    assert called(subjects[:1]) == subjects[0]
    assert called((subjects[0], subjects[2])) == f"{first} for sm_90, compute_80"
    assert called((*subjects, "the reference")) == (
        "2 variants for sm_90, compute_80, the reference"
    )
    assert called(("cuda compiled here", "a thing for sm_90")) == (
        "cuda compiled here, a thing for sm_90"
    )
    losers = [Rejected("a", "x"), Rejected("b", "y"), Rejected("c", "x")]
    assert list(grouped(losers).items()) == [("x", ("a", "c")), ("y", ("b",))]


def test_copies_are_named(hopper: System) -> None:
    gates, tokens = meta(2, 4096, 8).transpose(1, 2), meta(2, 8, 4096)
    found = explain_for(hopper, "linear_scan", gates, tokens)
    assert facts(str(found), "forward")["copies"] == "gates first"
    assert found.to_json()["steps"][0]["copied"] == ["gates"]


def test_the_reference_copies_nothing(a_device: Describe) -> None:
    gates, tokens = meta(2, 4096, 8).transpose(1, 2), meta(2, 8, 4096)
    found = explain_for(System(a_device()), "linear_scan", gates, tokens)
    said = facts(str(found), "forward")
    assert said["runs"].startswith("plain torch")
    assert "scan-registry doctor" in said["help"]
    assert [step["copied"] for step in found.to_json()["steps"]] == [[], []]
    asked = explain_for(System(a_device()), "linear_scan", gates, tokens, backend="reference")
    assert "help" not in facts(str(asked), "forward")


def test_what_is_compiled_here(a_device: Describe) -> None:
    found = explained(System(a_device(), (), {"cuda": NVRTC, "triton": "Triton is missing"}))
    said = facts(str(found), "forward")
    assert said["target"] == "sm_90, compiled here, at its first use or taken from the cache"
    assert "known once it is compiled" in said["launch"]
    assert "sha256" not in said
    assert "    triton compiled here: Triton is missing\n" in str(found)
    step = found.to_json()["steps"][0]
    assert (step["rung"], step["proven"], step["archive"]) == ("jit", None, None)
    assert step["launch"]["block"] is None


def test_where_nothing_runs(archive_factory: Factory, a_device: Describe) -> None:
    there = System(a_device((8, 7)), (archive_factory("ptx80"),))
    with policy.require("aot"):
        found = explained(there)
    assert not found.runs
    said = facts(str(found), "backward")
    assert said["outcome"] == "the call raises NoKernelError"
    assert "5 variants for compute_80: rung ptx; the policy allows none below same-major" in str(
        found
    )
    step = found.to_json()["steps"][1]
    assert (step["rung"], step["launch"], step["lowest_rung"]) == (None, None, "same-major")


def test_empty_tensors(hopper: System) -> None:
    found = explained(hopper, 2, 0, 8)
    assert found.steps == ()
    assert found.runs
    assert str(found).endswith("\n\nnothing runs: the tensors are empty")


# --- Calls ------------------------------------------------------------------------------------


def test_tensors_on_the_cpu() -> None:
    tensor = torch.rand(2, 8)
    found = scan_registry.explain(scan_registry.linear_scan, tensor, tensor)
    assert str(found).startswith("linear_scan on the CPU\n\nforward: rung reference\n")
    assert [step.name for step in found.steps] == ["forward"]  # no derivative is asked for
    assert found.device is None
    assert "help" not in facts(str(found), "forward")


def test_what_only_the_reference_takes(hopper: System) -> None:
    """float64, on the CPU and where the reference is asked for."""
    tensor = torch.rand(2, 8, dtype=torch.float64, requires_grad=True)
    found = scan_registry.explain(scan_registry.linear_scan, tensor, tensor)
    assert [str(step.decision.taken().rung) for step in found.steps] == ["reference"] * 2
    for step in ("forward", "backward"):
        assert "dtype float64" in facts(str(found), step)["problem"]
    assert "float64" in json.dumps(found.to_json())
    assert explain_for(hopper, "linear_scan", tensor, tensor, backend="reference").runs


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_language_may_be_asked_for_whatever_the_tensors_are_on(
    hopper: System, backend: str
) -> None:
    found = explained(hopper, backend=backend)
    assert found.runs == (backend == "cuda")
    assert f"backend='{backend}' was asked for" in str(found)


def test_what_cannot_be_explained(hopper: System) -> None:
    tensor = torch.rand(2, 8)
    with pytest.raises(TypeError, match="cannot be explained; accepted are linear_scan"):
        scan_registry.explain(torch.cumsum, tensor, 0)
    with pytest.raises(ValueError, match="on meta; accepted are the CPU and CUDA devices"):
        scan_registry.explain(scan_registry.linear_scan, meta(2, 8), meta(2, 8))
    with pytest.raises(TypeError, match=r"tokens must be a torch\.Tensor, not list"):
        scan_registry.explain(scan_registry.linear_scan, tensor, [1.0])
    with pytest.raises(TypeError, match="missing a required argument: 'tokens'"):
        scan_registry.explain(scan_registry.linear_scan, tensor)
    with pytest.raises(TypeError, match="'axis'"):
        scan_registry.explain(scan_registry.linear_scan, tensor, tensor, axis=0)
    with pytest.raises(ValueError, match="they must broadcast to one shape"):
        scan_registry.explain(scan_registry.linear_scan, tensor, torch.rand(2, 9))
    with pytest.raises(ValueError, match="'scan'; accepted are linear_scan"):
        explain_for(hopper, "scan", tensor, tensor)
    with pytest.raises(ValueError, match="'hip'; accepted are auto, cuda, triton, reference"):
        explained(hopper, backend="hip")
    with pytest.raises(ValueError, match="needs a CUDA device"):
        explained(System(None), backend="cuda")


# --- JSON -------------------------------------------------------------------------------------


def document(capsys: Capture, *words: str, status: int = 0) -> dict[str, Any]:
    """What the command prints as JSON, which its schema describes."""
    assert main([*CALL, *words, "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    valid(found)
    return found


CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 7), (9, 0), (10, 3), (12, 1), (13, 0)]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_whatever_is_installed_has_the_schemas_form(
    capsys: Capture, capability: tuple[int, int]
) -> None:
    arch = "sm_{}{}".format(*capability)
    found = document(capsys, "--arch", arch)
    assert found["device"]["arch"] == arch
    assert found["call"] == {
        "dtype": "bfloat16",
        "shape": [2, 8, 4096],
        "gates_dtype": "bfloat16",
        "gates_shape": [2, 8, 4096],
        "dim": -1,
        "reverse": False,
        "sequences": None,
        "backend": "auto",
    }
    archives = [a for a in catalogue().archives if a.arch.misfit(capability) is None]
    for step in found["steps"]:
        if capability < (8, 0):
            assert step["rung"] == "reference"
        elif archives:
            assert step["rung"] in ("exact", "same-major", "ptx")
            assert step["launch"]["block"]
            assert len(step["sha256"]) == 64
        else:
            assert step["rung"] in ("jit", "reference")


def test_every_form_of_a_decision_is_in_the_schema(hopper: System, capsys: Capture) -> None:
    compiled = replace(hopper, archives=(), toolchains={"cuda": NVRTC})
    with policy.require("aot"):
        nothing = explained(compiled)
    systems = [hopper, compiled, replace(hopper, archives=())]
    forms = [*map(explained, systems), nothing, explained(hopper, 0)]
    forms.append(scan_registry.explain(scan_registry.linear_scan, *[torch.rand(2, 8)] * 2))
    rungs = [{step["rung"] for step in form.to_json()["steps"]} for form in forms]
    assert rungs == [{"exact"}, {"jit"}, {"reference"}, {None}, set(), {"reference"}]
    start = document(capsys, "--arch", "sm_75")
    for form in forms:
        valid({**start, **form.to_json()})


def test_the_schema_is_strict(capsys: Capture) -> None:
    found = document(capsys, "--arch", "sm_75")
    assert list(Draft202012Validator(SCHEMA).iter_errors({**found, "more": 1}))
    found["steps"][0]["rung"] = "fast"
    assert list(Draft202012Validator(SCHEMA).iter_errors(found))


# --- The command ------------------------------------------------------------------------------


@pytest.fixture
def installed(archive_factory: Factory, monkeypatch: pytest.MonkeyPatch) -> Catalogue:
    """ptx80 and sm90, of this package, with all CUDA variants."""
    found = Catalogue((archive_factory("ptx80"), archive_factory("sm90")))
    monkeypatch.setattr(command, "catalogue", lambda: found)
    monkeypatch.setattr("scan_registry.jit.toolchains", lambda: {"cuda": "NVRTC is missing"})
    return found


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--arch", "sm_90"], 0, "forward: rung exact"),
        (["--arch", "SM103"], 0, "backward: rung ptx"),
        (["--arch", "sm_103", "--driver", "12.4"], 0, "forward: rung reference"),
        (
            ["--arch", "sm_103", "--driver", "550.54.15", "--require", "jit"],
            1,
            "needs a driver for",
        ),
        (["--arch", "sm_103", "--require", "aot"], 1, "forward: nothing runs"),
        (["--arch", "sm_90", "--backend", "triton"], 1, "forward: nothing runs"),
        (["--arch", "sm_90", "--dim", "0"], 0, "channel_last_forward"),
        (["--arch", "sm_90", "--shared-memory", "1000"], 0, "shared memory per block; the device"),
        (["--arch", "sm_90", "--sms", "7"], 0, "forward: rung exact"),
    ],
)
def test_the_command(
    installed: Catalogue, capsys: Capture, words: list[str], status: int, said: str
) -> None:
    assert main([*CALL, *words]) == status
    out = capsys.readouterr().out
    assert said in out
    assert out.endswith("One line for each that was not taken: --all.\n")
    assert main([*CALL, *words, "--all"]) == status
    assert len(capsys.readouterr().out) > len(out)
    document(capsys, *words, status=status)


@pytest.mark.parametrize(("name", "dtype"), command.DTYPES.items())
def test_names_of_dtypes(installed: Catalogue, capsys: Capture, name: str, dtype: str) -> None:
    words = ["explain", "linear_scan", "--dtype", name, "--shape", "7", "--arch", "sm_90", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["call"]["dtype"] == dtype
    assert f"dtype={dtype}," in found["steps"][0]["variant"]


def test_a_denied_binary_is_not_taken(installed: Catalogue, capsys: Capture) -> None:
    winner = document(capsys, "--arch", "sm_90")["steps"][0]
    installed.__dict__["denied"] = {winner["sha256"]: "denied: a race"}
    other = document(capsys, "--arch", "sm_90")["steps"][0]
    assert other["variant"] != winner["variant"]
    subject = f"{winner['variant']} for sm_90"
    assert {"subject": subject, "reason": "denied: a race", "damaged": False} in other["rejected"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["scan"], "operator is 'scan'; accepted are linear_scan"),
        (["--dtype", "int8"], "--dtype is 'int8'; accepted are float32, fp32, bfloat16"),
        (["--backend", "hip"], "--backend is 'hip'; accepted are auto, cuda, triton, reference"),
        (["--require", "fast"], "--require is 'fast'; accepted are aot, ptx, jit, reference"),
        (["--shape", "8x7"], "--shape is '8x7'; accepted are sizes such as"),
        (["--shape", "8,,7"], "--shape is '8,,7'"),
        (["--shape", "-1,7"], "--shape is '-1,7'"),
        (["--shape", f"{2**40},{2**40}"], "accepted are at most 2**60 elements"),
        (["--shape", "9" * 5000], "accepted are sizes such as 8,1536,4096"),
        (["--sequences", str(2**70)], "accepted are numbers from 1 to 2147483647"),
        (["--shape", f"{2**70},0"], "accepted are at most 2**60 elements"),
        (["--dim", "3"], "dim is 3; tensors of 3 dimensions accept -3 to 2"),
        (["--arch", "hopper"], "--arch is 'hopper'; accepted is a GPU's architecture, such as"),
        (["--arch", "ptx80"], "--arch is 'ptx80'"),
        (["--arch", "sm_90a"], "--arch is 'sm_90a'"),
        (["--driver", "four"], "--driver is 'four'; accepted are a driver's version"),
        (["--driver", "12"], "--driver is '12'"),
        (["--sms", "0"], "--sms is 0; accepted are positive numbers"),
        (["--shared-memory", "-1"], "--shared-memory is -1"),
        (["--device", "cuda:0"], "--arch and --device both say which GPU"),
    ],
)
def test_wrong_arguments(
    installed: Catalogue, capsys: Capture, words: list[str], message: str
) -> None:
    arguments = {"--dtype": "bf16", "--shape": "2,8,4096", "--arch": "sm_90"}
    operator = ["linear_scan"] if len(words) == 2 else words
    if len(words) == 2:
        arguments[words[0]] = words[1]
    pairs = [f"{name}={value}" for name, value in arguments.items()]
    assert main(["explain", *operator, *pairs]) == 2
    caught = capsys.readouterr()
    assert caught.out == ""
    assert caught.err.startswith("scan-registry: error: ")
    assert message in caught.err


def test_a_wrong_variable(
    installed: Catalogue, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(policy.VARIABLE, "sometimes")
    policy._default.cache_clear()
    try:
        assert main([*CALL, "--arch", "sm_90"]) == 2
    finally:
        policy._default.cache_clear()
    assert "SCAN_REGISTRY_REQUIRE is 'sometimes'; accepted are" in capsys.readouterr().err


def test_a_provider_that_does_not_fit(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Catalogue:
        raise ProviderError("archives 2.0 is made for scan-registry >=2")

    monkeypatch.setattr(command, "catalogue", refuse)
    assert main([*CALL, "--arch", "sm_90"]) == 2
    assert "archives 2.0 is made for" in capsys.readouterr().err


def shell(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scan_registry", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env={**os.environ, **variables},
    )


def test_a_machine_without_a_gpu_says_so(tmp_path: Path) -> None:
    nowhere = {"SCAN_REGISTRY_LIBCUDA": str(tmp_path / "nothing.so")}
    result = shell(*CALL, **nowhere)
    assert result.returncode == 2
    assert result.stderr.startswith("scan-registry: error: no GPU is visible here (the CUDA driver")
    assert "--arch sm_90" in result.stderr
    result = shell(*CALL, "--driver", "575", **nowhere)
    assert result.returncode == 2
    assert "--driver describes a GPU that is not here; it needs --arch" in result.stderr


def test_a_gpu_of_this_machine(stub_driver: Any) -> None:
    stub_driver.gpu((9, 0), name="Imaginary A").gpu((7, 5), name="Imaginary B")
    variables = stub_driver.environment()
    first, second, third = (
        shell(*CALL, *words, **variables)
        for words in (["--json"], ["--device", "cuda:1"], ["--device", "cuda:2"])
    )
    assert (first.returncode, second.returncode, third.returncode) == (0, 0, 2)
    found = json.loads(first.stdout)
    valid(found)
    assert found["device"] == {
        "name": "Imaginary A",
        "arch": "sm_90",
        "multiprocessors": 132,
        "shared_memory_per_block": 232_448,
        "registers_per_block": 65_536,
        "threads_per_block": 1024,
        "driver": "13.0",
    }
    assert second.stdout.startswith("linear_scan on Imaginary B (sm_75), driver for CUDA 13.0\n")
    assert "--device is 'cuda:2'; accepted are cuda:0, cuda:1" in third.stderr
    assert not stub_driver.calls("cuDevicePrimaryCtxRetain", "cuModuleLoadData")


DISPATCH = """
import json, torch
from scan_registry import loader
from scan_registry.explanation import decision_record
from scan_registry.fit import Rung
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.ops.linear_scan import describe

tensor = torch.empty(2, 8, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
for share in describe(tensor, tensor).values():
    decision = loader.decide(0, FAMILY, share.problem, "auto", Rung.REFERENCE)
    print(json.dumps(decision_record(decision)))
"""


def test_what_it_says_is_what_dispatch_decides(stub_driver: Any) -> None:
    stub_driver.gpu((9, 0), name="Imaginary A")
    lines = stub_driver.run(DISPATCH).stdout.splitlines()
    found = json.loads(shell(*CALL, "--json", **stub_driver.environment()).stdout)
    losers = {"rejected"}  # dispatch does not look for compilers where something else fits
    assert len(lines) == len(found["steps"]) == 2
    for line, step in zip(map(json.loads, lines), found["steps"], strict=True):
        assert {k: v for k, v in line.items() if k not in losers} == {
            k: v for k, v in step.items() if k not in {*losers, "step", "copied"}
        }


def test_levels_concern_gpus_alone() -> None:
    """A call on the CPU runs whatever is required, and so it is explained."""
    tensor = torch.rand(2, 8)
    with policy.require("aot"):
        scan_registry.linear_scan(tensor, tensor)
        assert scan_registry.explain(scan_registry.linear_scan, tensor, tensor).runs
        assert explained(System(None)).runs
