"""``scan-registry tune``: what it asks for, what it prints, and that selection goes by what it saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from scan_registry.cache import tuned
from scan_registry.cli import main
from scan_registry.cli import tune as command
from scan_registry.dispatch.select import System, select
from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan.op.operator import OPERATOR
from scan_registry.tuner import engine

Capture = pytest.CaptureFixture[str]

SM90 = Target((9, 0))
TINY = ("tune", "--shapes", "time_last:2,8,512", "--dtype", "fp32")


@pytest.fixture
def here(workshop: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A machine with the workshop's GPU, on which the last variant of each is the fastest."""
    monkeypatch.setenv("SCAN_REGISTRY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    tuned.archive_of.cache_clear()

    def tuner_for(name: str | None, budget: float | None) -> Any:
        return workshop.tuner(budget=budget)

    monkeypatch.setattr(command, "tuner_for", tuner_for)
    (problem, *_) = command.chosen(_arguments("--kernel", "time_last_forward"))
    fastest = problem.variants(SM90)[-1]
    workshop.ms = lambda variant: 0.5 if variant == fastest else 1.0
    workshop.problem, workshop.fastest = problem, fastest
    return workshop


def _arguments(*words: str) -> Any:
    from scan_registry.cli import parser

    return parser().parse_args([*TINY, *words])


def test_what_is_found_is_used_from_then_on(here: Any, capsys: Capture) -> None:
    assert main([*TINY, "--kernel", "time_last_forward", "--language", "cuda"]) == 0
    captured = capsys.readouterr()
    assert "regret of what is shipped" in captured.out
    assert "on 1 problems: geometric mean 2.000, worst 2.000" in captured.out
    tile = here.problem.kernel.label(here.fastest).removeprefix(f"{here.problem.shape.kind},")
    assert tile in captured.out
    assert f"best 0.5000 ms ({tile}), regret 2.000" in captured.err
    result = tuned.archive_of(here.device)
    assert result is not None
    assert f"saved in {result.path}" in captured.out
    assert [binary.variant for binary in result.binaries] == [here.fastest]
    there = System(here.device, tuned=result)
    winner = select(there, here.problem.family, here.problem.problem).taken()
    assert (winner.variant, winner.ms) == (here.fastest, 0.5)
    assert winner.tuned is not None
    assert winner.tuned.local


def test_a_dry_run_saves_nothing(here: Any, capsys: Capture, tmp_path: Path) -> None:
    assert main([*TINY, "--dry-run"]) == 0
    assert "nothing was saved" in capsys.readouterr().out
    assert not (tmp_path / "cache").exists()


def test_a_part_of_the_variants_can_be_tried(here: Any, capsys: Capture) -> None:
    words = [*TINY, "--kernel", "time_last_forward", "--language", "cuda", "--dry-run"]
    only = dict(here.fastest.statics)
    assert main([*words, "--only", f"warps={only['warps']},rows={only['rows']},"]) == 0
    assert "on 1 problems: geometric mean 2.000, worst 2.000" in capsys.readouterr().out
    (shipped,) = {variant for variant in here.started if not _has(variant, only)}
    assert shipped == engine.untuned(0, here.problem)
    assert here.fastest in here.started


def _has(variant: Any, pins: Any) -> bool:
    return all(dict(variant.statics).get(name) == pins[name] for name in ("warps", "rows"))


def test_what_there_was_no_time_for_is_listed(here: Any, capsys: Capture) -> None:
    assert main([*TINY, "--budget", "-1"]) == 2
    assert "nothing was timed on Imaginary 9.0: no problem was begun" in capsys.readouterr().err
    here.missing = set(here.problem.variants(SM90)[:2])
    assert main([*TINY, "--kernel", "time_last_forward", "--language", "cuda"]) == 0
    assert "not timed: " in capsys.readouterr().err


def test_a_folder_that_cannot_be_used(here: Any, capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    assert main([*TINY]) == 2
    assert "what was found cannot be saved: others can write" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dtype", "int8"], "--dtype is 'int8'; accepted are float32, fp32, "),
        (
            ["--shapes", "time_last:2,8,64", "--kernel", "channel_last_forward"],
            "--kernel is 'channel_last_forward'; accepted with these shapes are time_last_forward, "
            "time_last_backward",
        ),
        (["--only", "stages=99", "--dry-run"], "--only is 'stages=99', which is in no variant for"),
        (
            ["--only", "steps=2"],
            "--only leaves variants out, and what is saved is to be the fastest",
        ),
    ],
)
def test_arguments_that_cannot_be_meant(words: list[str], message: str, capsys: Capture) -> None:
    assert main(["tune", *words]) == 2
    assert message in capsys.readouterr().err


def test_without_a_gpu(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([*TINY]) == 2
    assert "tuning needs an NVIDIA GPU, and torch sees none here" in capsys.readouterr().err


def test_the_usual_choice_can_be_narrowed() -> None:
    from scan_registry.cli import parser

    def chosen(*words: str) -> Any:
        return command.chosen(parser().parse_args(["tune", *words]))

    every, narrow = chosen(), chosen("--dtype", "bf16", "--language", "cuda")
    assert len(every) > len(narrow) > len(OPERATOR.tuned_shapes)
    assert {item.case.dtype for item in narrow} == {"bfloat16"}
    assert {item.kernel.language for item in narrow} == {"cuda"}
    assert engine.NEAR > 1


@pytest.mark.gpu
def test_on_a_gpu(capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SCAN_REGISTRY_CACHE", str(tmp_path / "cache"))
    tuned.archive_of.cache_clear()
    words = ("--kernel", "time_last_forward", "--language", "cuda", "--json")
    assert main([*TINY, *words]) == 0
    report = json.loads(capsys.readouterr().out)
    (problem,) = report["problems"]
    assert problem["regret"] >= 1
    assert len(problem["timings"]) > 3
    assert Path(report["saved"]).is_file()
    tensors = [torch.rand(2, 8, 512, device="cuda") for _ in range(2)]
    import scan_registry

    explained = scan_registry.explain(scan_registry.linear_scan, *tensors, backend="cuda")
    tuning = explained.to_json()["steps"][0]["tuning"]
    assert (tuning["source"], tuning["distance"]) == ("local", 0.0)
    tuned.archive_of.cache_clear()
