"""``tools/tune.py``: the tables that it writes."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from by_path import load_tool

from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan.op.bench import Case
from scan_registry.kernels.tables import Measured, Run, Table, Timing
from scan_registry.tuner.engine import TuningResult
from scan_registry.tuner.problems import posed

RUN = Run("Imaginary", "580.1", {}, {"cuda": "nvrtc 12.9.86"}, "9.9.9", "2026-01-31")


@pytest.fixture(scope="module")
def tool() -> types.ModuleType:
    return load_tool("tune")


def tuned(text: str, ms: float, number: int = 0, run: Run = RUN) -> TuningResult:
    (item,) = posed([Case.parse(text)], ["cuda"], ["forward"])
    label = item.kernel.label(item.variants(Target((9, 0)))[number])
    timings = {label: Timing(ms, 0.1, 11)}
    return TuningResult(
        item, Measured(item.kernel.head, str(item), item.shape, timings, run), label
    )


def test_tables_grow_and_measurements_are_replaced(tool: Any, tmp_path: Path) -> None:
    first, second = "time_last:2,8,512:float32", "channel_last:2,8,512:float32"
    (path,) = tool.save(tmp_path, "sm_90", [tuned(first, 1.0)])
    assert path == tmp_path / "linear_scan" / "tuning" / "sm90.json"
    assert tool.save(tmp_path, "sm_90", [tuned(second, 2.0)]) == [path]
    tool.save(tmp_path, "sm_90", [tuned(first, 3.0)])
    table = Table.read(path)
    times = {item.problem: [t.ms for t in item.timings.values()] for item in table.measured}
    assert times == {f"{first} forward": [3.0], f"{second} forward": [2.0]}
    assert [*path.parent.iterdir()] == [path]
    assert set(table.tunings()) == {
        "linear_scan.time_last_forward:cuda",
        "linear_scan.channel_last_forward:cuda",
    }


def test_another_gpu_gets_a_table_for_itself(tool: Any, tmp_path: Path) -> None:
    problem, run = "time_last:2,8,512:float32", replace(RUN, gpu="NVIDIA H100 80GB HBM3")
    (general,) = tool.save(tmp_path, "sm_90", [tuned(problem, 1.0)])
    before = general.read_bytes()
    for ms in (2.0, 3.0):
        (path,) = tool.save(tmp_path, "sm_90", [tuned(problem, ms, run=run)])
        assert path.name == "sm90-h100-80gb-hbm3.json"
        table = Table.read(path)
        assert (table.exclusive, table.gpus) == (True, (run.gpu,))
        assert [t.ms for item in table.measured for t in item.timings.values()] == [ms]
    assert general.read_bytes() == before
    assert tool.save(tmp_path, "sm_90", [tuned(problem, 4.0)]) == [general]
    assert tool.known(tmp_path, "sm_90") == [Case.parse(problem)]
    with pytest.raises(tool.UsageError, match=r"no table in .* is for sm_80"):
        tool.known(tmp_path, "sm_80")


def test_what_was_left_out_keeps_its_times(tool: Any, tmp_path: Path) -> None:
    problem = "time_last:2,8,512:float32"
    before, now = (tuned(problem, ms, number) for number, ms in enumerate((1.0, 2.0)))
    tool.save(tmp_path, "sm_90", [before])
    for only, kept in ((now.best, {1.0, 2.0}), (before.best, {2.0})):
        (path,) = tool.save(
            tmp_path, "sm_90", [now], only=lambda v, only=only: str(v).endswith(only)
        )
        (row,) = Table.read(path).measured
        assert {time.ms for time in row.timings.values()} == kept


def test_times_of_variants_that_are_gone_go(tool: Any, tmp_path: Path) -> None:
    first, second = "time_last:2,8,512:float32", "time_last:2,8,1024:float32"
    now = tuned(first, 1.0)
    gone = now.best.replace("warps=", "warps=9")
    timings = {**now.measured.timings, gone: Timing(0.5, 0.1, 11)}
    (path,) = tool.save(tmp_path, "sm_90", [now])
    table = Table.read(path)
    written = replace(table, measured=(replace(table.measured[0], timings=timings),))
    path.write_text(written.text(), encoding="utf-8")
    assert gone in Table.read(path).measured[0].timings
    tool.save(tmp_path, "sm_90", [tuned(second, 2.0)])
    assert [[*item.timings] for item in Table.read(path).measured] == [[now.best]] * 2


def test_a_run(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine is that of ``scan-registry tune``; its results are kept as they come."""
    actual = tuned("time_last:2,8,512:float32", 1.0)

    class Tuner:
        device = types.SimpleNamespace(name="Imaginary", arch="sm_90", capability=(9, 0))
        run, tuned, left_out, refused = RUN, [actual], (), types.MappingProxyType({})

        def tune(self, problems: Any) -> None:
            assert {problem.case.dtype for problem in problems} == {
                "float32" if "--known" in sys.argv else "bfloat16"
            }
            self.keep()
            assert (tmp_path / "linear_scan" / "tuning" / "sm90.json").is_file()

    tuner: Any = Tuner()
    monkeypatch.setattr(tool, "tuner_for", lambda *_: tuner)
    words = ["tune", "--dtype", "bf16", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    assert tool.main() == 0
    out = capsys.readouterr().out
    assert "geometric mean 1.000, worst 1.000" in out
    assert f"wrote {tmp_path / 'linear_scan' / 'tuning' / 'sm90.json'}" in out
    monkeypatch.setattr(sys, "argv", ["tune", "--dtype", "int8"])
    assert tool.main() == 2
    assert "--dtype is 'int8'" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*words, "--only", "steps=2"])
    assert tool.main() == 0
    wanted = {v for v in actual.posed.variants(Target((9, 0))) if tuner.only(v)}
    assert (
        wanted == {v for v in actual.posed.variants(Target((9, 0))) if "steps=2" in str(v)} != set()
    )
    contents = next(v for v in actual.posed.variants(Target((9, 0))))
    archive = types.SimpleNamespace(arch=Target((9, 0)))
    binaries = [(archive, types.SimpleNamespace(variant=contents))]
    monkeypatch.setattr(tool, "catalogue", lambda: binaries)
    monkeypatch.setattr(sys, "argv", [*words, "--installed"])
    assert tool.main() == 0
    assert [v for v in actual.posed.variants(Target((9, 0))) if tuner.only(v)] == [contents]
    monkeypatch.setattr(sys, "argv", ["tune", "--known", "--folder", str(tmp_path)])
    assert tool.main() == 0  # of the one case in the table
    monkeypatch.setattr(sys, "argv", [*words, "--known"])
    assert tool.main() == 2
    assert "without --shapes and --dtype" in capsys.readouterr().err
