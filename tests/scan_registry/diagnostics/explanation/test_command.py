"""``explain`` as JSON, and the command."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from explaining import CALL, Capture, Factory, document, explained, valid
from forked import captured
from imaginary import NVRTC

import scan_registry
from scan_registry.artifact.archive import Archive
from scan_registry.catalog.inventory import Catalogue, catalogue
from scan_registry.cli import explain as command
from scan_registry.cli import main
from scan_registry.dispatch import policy
from scan_registry.dispatch.select import System

# --- JSON -------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", [(7, 5), (8, 7), (9, 0), (13, 0)])
def test_whatever_is_installed_has_the_schemas_form(
    capsys: Capture, capability: tuple[int, int]
) -> None:
    arch = "sm_{}{}".format(*capability)
    report = document(capsys, "--arch", arch)
    assert report["device"]["arch"] == arch
    assert report["call"] == {
        "dtype": "bfloat16",
        "shape": [2, 8, 4096],
        "gates_dtype": "bfloat16",
        "gates_shape": [2, 8, 4096],
        "dim": -1,
        "reverse": False,
        "reset": False,
        "sequences": None,
        "backend": "auto",
    }
    archives = [a for a in catalogue().archives if a.arch.misfit(capability) is None]
    for step in report["steps"]:
        if capability < (8, 0):
            assert step["tier"] == "reference"
        elif archives:
            assert step["tier"] in ("exact", "same-major", "ptx")
            assert step["launch"]["block"]
            assert len(step["sha256"]) == 64
        else:
            assert step["tier"] in ("jit", "reference")


def test_every_form_of_a_decision_is_in_the_schema(hopper: System, capsys: Capture) -> None:
    compiled = replace(hopper, archives=(), toolchains={"cuda": NVRTC})
    with policy.require("aot"):
        nothing = explained(compiled)
    systems = [hopper, compiled, replace(hopper, archives=())]
    forms = [*map(explained, systems), nothing, explained(hopper, 0)]
    forms.append(scan_registry.explain(scan_registry.linear_scan, *[torch.rand(2, 8)] * 2))
    tiers = [{step["tier"] for step in form.to_json()["steps"]} for form in forms]
    assert tiers == [{"exact"}, {"jit"}, {"reference"}, {None}, set(), {"reference"}]
    start = document(capsys, "--arch", "sm_75")
    for form in forms:
        valid({**start, **form.to_json()})


# --- The command ------------------------------------------------------------------------------


@pytest.fixture
def installed(archive_factory: Factory, monkeypatch: pytest.MonkeyPatch) -> Catalogue:
    """ptx80 and sm90, of this package, with all CUDA variants."""
    result = Catalogue((archive_factory("ptx80"), archive_factory("sm90")))
    monkeypatch.setattr(command, "catalogue", lambda: result)
    monkeypatch.setattr(
        "scan_registry.runtime.jit.toolchains", lambda: {"cuda": "NVRTC is missing"}
    )
    return result


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--arch", "sm_90"], 0, "forward: exact, "),
        (["--arch", "SM103"], 0, "backward: ptx, "),
        (["--arch", "sm_103", "--driver", "12.4"], 0, "forward: reference, "),
        (
            ["--arch", "sm_103", "--driver", "550.54.15", "--require", "jit"],
            1,
            "needs a driver for",
        ),
        (["--arch", "sm_103", "--require", "aot"], 1, "forward: nothing runs"),
        (["--for", "H100", "--require", "exact"], 0, "forward: exact, "),
        (["--arch", "sm_90", "--backend", "triton"], 1, "forward: nothing runs"),
        (["--arch", "sm_90", "--dim", "0"], 0, "channel_last_forward"),
        (["--arch", "sm_90", "--shared-memory", "1000"], 0, "shared memory per block; the device"),
    ],
)
def test_the_command(
    installed: Catalogue, capsys: Capture, words: list[str], status: int, said: str
) -> None:
    assert main([*CALL, *words]) == status
    out = capsys.readouterr().out
    assert out.endswith("Every fact, and a line for each that was not taken: --all.\n")
    assert len(out.splitlines()) <= 12
    assert main([*CALL, *words, "--all"]) == status
    everything = capsys.readouterr().out
    assert said in (out if ": " in said or "_" in said else everything)
    assert len(everything) > len(out)
    document(capsys, *words, status=status)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["scan"], "operator is 'scan'; accepted are linear_scan"),
        (["--dtype", "int8"], "--dtype is 'int8'; accepted are float32, fp32, bfloat16"),
        (["--backend", "hip"], "--backend is 'hip'; accepted are auto, cuda, triton, reference"),
        (
            ["--require", "fast"],
            "--require is 'fast'; accepted are exact, aot, same-major, ptx, jit",
        ),
        (["--shape", "8x7"], "--shape is '8x7'; accepted are sizes such as"),
        (["--shape", f"{2**40},{2**40}"], "accepted are at most 2**60 elements"),
        (["--sequences", str(2**70)], "accepted are numbers from 1 to 2147483647"),
        (["--dim", "3"], "dim is 3; tensors of 3 dimensions accept -3 to 2"),
        (
            ["--arch", "hopper"],
            "--for is 'hopper'; accepted are a GPU's name, its compute capability",
        ),
        (["--driver", "four"], "--driver is 'four'; accepted are a driver's version"),
        (["--sms", "0"], "--sms is 0; accepted are positive numbers"),
        (["--device", "cuda:0"], "--for and --device both say which GPU"),
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


#: The program's status, output and errors for each of some calls, as JSON.
CALLS = """
import json, sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from scan_registry.cli import main

answers = []
for words in json.loads(sys.argv[1]):
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        status = main(words)
    answers.append([status, out.getvalue(), err.getvalue()])
print(json.dumps(answers))
"""


def called(*more: list[str], **variables: str) -> list[tuple[int, str, str]]:
    """What explaining the call prints, with more words each time, in a process that finds other GPUs than this one."""
    calls = json.dumps([[*CALL, *words] for words in more])
    done = captured([sys.executable, "-c", CALLS, calls], cwd="/", env={**os.environ, **variables})
    assert done.returncode == 0, done.stderr
    return [tuple(answer) for answer in json.loads(done.stdout)]


@pytest.mark.slow
def test_a_machine_without_a_gpu_says_so(tmp_path: Path) -> None:
    nowhere = {"SCAN_REGISTRY_LIBCUDA": str(tmp_path / "nothing.so")}
    first, second = called([], ["--driver", "575"], **nowhere)
    assert (first[0], second[0]) == (2, 2)
    assert first[2].startswith("scan-registry: error: no GPU is visible here (the CUDA driver")
    assert "--for H100" in first[2]
    assert "--driver describes a GPU that is not here; it needs --for" in second[2]


#: After the calls: what dispatch decides of the first.
DISPATCH = """
import json, torch
from scan_registry.runtime import loader
from scan_registry.diagnostics.explanation import decision_record
from scan_registry.dispatch.fit import Tier
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.linear_scan.op.function import describe

tensor = torch.empty(2, 8, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
for call in describe(tensor, tensor).values():
    decision = loader.decide(0, FAMILY, call.problem, "auto", Tier.REFERENCE)
    print(json.dumps(decision_record(decision)))
"""


@pytest.mark.slow
def test_a_gpu_of_this_machine(stub_driver: Any) -> None:
    """What it says is what dispatch decides."""
    stub_driver.gpu((9, 0), name="Imaginary A").gpu((7, 5), name="Imaginary B")
    more = ["--json"], ["--device", "cuda:1"], ["--device", "cuda:2"]
    calls = json.dumps([[*CALL, *words] for words in more])
    said, *lines = stub_driver.run(CALLS + DISPATCH, calls, start=captured).stdout.splitlines()
    first, second, third = json.loads(said)
    assert (first[0], second[0], third[0]) == (0, 0, 2)
    report = json.loads(first[1])
    valid(report)
    assert report["device"] == {
        "name": "Imaginary A",
        "arch": "sm_90",
        "sm_count": 132,
        "shared_memory_per_block": 232_448,
        "registers_per_block": 65_536,
        "threads_per_block": 1024,
        "driver": "13.0",
    }
    assert second[1].startswith("linear_scan on Imaginary B (sm_75), driver for CUDA 13.0\n")
    assert "--device is 'cuda:2'; accepted are cuda:0, cuda:1" in third[2]
    assert not stub_driver.calls("cuDevicePrimaryCtxRetain", "cuModuleLoadData")
    losers = {"rejected"}  # dispatch does not look for compilers where something else fits
    assert len(lines) == len(report["steps"]) == 2
    for line, step in zip(map(json.loads, lines), report["steps"], strict=True):
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


# --- Functions that are kinds of an operator --------------------------------------------------


def test_a_kind_may_be_named_by_its_function(capsys: Capture) -> None:
    how = ("--dtype", "fp32", "--shape", "2,8,64", "--device", "cpu")
    for name in ("min_gru", "hgrn"):
        assert main(["explain", name, *how]) == 0
        printed = capsys.readouterr().out
        assert main(["explain", "gated_scan", "--kind", name, *how]) == 0
        assert capsys.readouterr().out == printed
    assert main(["explain", "min_gru", "--kind", "hgrn", *how]) == 2
    assert "--kind is no option of min_gru" in capsys.readouterr().err
    assert main(["explain", "min_lstm_identity", *how]) == 2
    advice = "min_lstm_identity is a kind: explain gated_scan --kind min_lstm_identity"
    assert advice in capsys.readouterr().err


def test_functions_of_kinds_are_explained() -> None:
    x, channels = torch.rand(2, 8, 64, requires_grad=True), torch.rand(8)
    explain, as_text = scan_registry.explain, str
    for function, inputs, options, kind in (
        (scan_registry.min_gru, (x, x), {}, "min_gru"),
        (scan_registry.min_gru, (x, x), {"activation": "identity"}, "min_gru_identity"),
        (scan_registry.min_lstm, (x, x, x), {"reverse": True}, "min_lstm"),
        (scan_registry.rg_lru, (x, x, x, channels), {}, "rg_lru"),
    ):
        shared = {name: value for name, value in options.items() if name != "activation"}
        expected = explain(scan_registry.gated_scan, kind, *inputs, **shared)
        assert as_text(explain(function, *inputs, **options)) == as_text(expected)
    assert len(explain(scan_registry.hgrn, x, x, lower_bound=0.5).steps) == 2
    with pytest.raises(TypeError, match="missing a required argument: 'hidden'"):
        explain(scan_registry.min_gru, x)


def test_a_module_is_told_what_is_explained() -> None:
    with pytest.raises(
        TypeError, match="Linear is a module, and explain takes a function"
    ) as error:
        scan_registry.explain(torch.nn.Linear(4, 4), torch.rand(1, 2, 4))
    assert "gated_scan" in str(error.value)
    assert "min_lstm" in str(error.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("MinGRU", "MinGRU calls min_gru; explain this"),
        ("Mamba2", "Mamba2 calls causal_conv1d and ssd_scan; explain these"),
    ],
)
def test_a_module_of_this_package_names_what_it_calls(name: str, words: str) -> None:
    module = {
        "MinGRU": lambda: scan_registry.nn.MinGRU(4),
        "Mamba2": lambda: scan_registry.nn.Mamba2(8, headdim=8),
    }[name]()
    with pytest.raises(TypeError, match=words):
        scan_registry.explain(module, torch.rand(1, 2, 4))


def test_a_device_is_not_an_argument_of_a_call() -> None:
    x = torch.rand(2, 3, 4)
    with pytest.raises(TypeError, match="`scan-registry explain min_gru --for H100"):
        scan_registry.explain(scan_registry.min_gru, x, x, device="H100")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["min_gru", "--dim", "1"], "--dim is no option of min_gru; --shape is always batch, "),
        (["min_gru", "--dim", "1"], "of (batch, time, channels), say --channel-last"),
        (["gated_scan", "--dim", "1"], "--dim is no option of gated_scan; --shape is always"),
        (["selective_scan", "--dim", "1"], "say --channel-last"),
        (["causal_conv1d", "--dim", "1"], "say --channel-last"),
        (["linear_scan", "--channel-last"], "for tensors of (batch, time, channels) say --dim 1"),
        (["min_gru", "--width", "4"], "--width is no option of min_gru. "),
    ],
)
def test_another_operators_option_is_refused_with_what_to_say(
    installed: Catalogue, capsys: Capture, words: list[str], message: str
) -> None:
    how = ["--dtype", "bf16", "--shape", "2,8,4096", "--arch", "sm_90"]
    assert main(["explain", *words, *how]) == 2
    said = capsys.readouterr().err.strip()
    assert message in f"{said}. "


def test_a_device_that_is_no_name_of_one_is_refused_first(
    capsys: Capture,
) -> None:
    words = ["explain", "linear_scan", "--dtype", "fp32", "--shape", "2,8,64", "--device", "gpu"]
    assert main(words) == 2
    assert "--device is 'gpu'; accepted are cpu, cuda and cuda:N" in capsys.readouterr().err


def test_a_damaged_archive_is_named(
    archive_factory: Factory, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """The explanation is printed all the same, as a call passes over the archive."""
    intact, damaged = archive_factory("ptx80"), archive_factory("sm90")
    damaged.path.write_bytes(b"")
    archives = intact, Archive(damaged.path)
    monkeypatch.setattr(command, "catalogue", lambda: Catalogue(archives))
    for words, shown in (([], "linear_scan on H100"), (["--json"], '"steps"')):
        assert main([*CALL, "--for", "H100", *words]) == 2
        caught = capsys.readouterr()
        assert shown in caught.out
        assert caught.err.startswith(f"scan-registry: warning: {damaged.path}: ")
        assert caught.err.count("\n") == 1
