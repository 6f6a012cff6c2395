"""A family that is one folder and its operator, made here, is one more to every command."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import scan_registry
from scan_registry import kernels
from scan_registry.catalog.inventory import Catalogue
from scan_registry.cli import explain as explain_command
from scan_registry.cli import main
from scan_registry.ops.operator import operators
from scan_registry.tuner.problems import cases, posed, usual_cases

Capture = pytest.CaptureFixture[str]

FILES = {
    "kernels/scale/__init__.py": 'PUBLIC = {"scale": "op.function"}',
    "kernels/scale/op/__init__.py": "",
    "kernels/scale/spec.py": """
from dataclasses import dataclass
from pathlib import Path
from scan_registry.kernels.model import Code, Family, Kernel, Launch, Parameter, Rules, Space, Tunable
from scan_registry.kernels.tuning import Shape

@dataclass(frozen=True)
class ScaleProblem:
    dtype: str
    size: int
    kernel = "scale"

SCALE = Kernel(
    family="scale", name="scale", language="cuda",
    parameters=(Parameter("x", "pointer"), Parameter("y", "pointer"), Parameter("size", "i64")),
    defaults=Space(((("dtype", "float32"),),), lambda kind: ((("threads", 256),),)),
    code=Code("scale.cu", "scale", lambda v: {"THREADS": v.number("threads")}, lambda v: 8),
    rules=Rules(lambda variant, problem: None if problem.dtype == "float32" else "its dtype"),
    cost=lambda variant, problem: 0.0,
    launch=lambda variant, problem, sm_count: Launch((-(-problem.size // 256), 1, 1), {"size": problem.size}),
    tunable=Tunable(
        shape=lambda problem: Shape(f"dtype={problem.dtype}", {"size": float(problem.size)})
    ),
)
FAMILY = Family(
    name="scale", summary="y = 2 · x", folder=Path(__file__).parent, kernels=(SCALE,), on_cpu=True
)
""",
    "kernels/scale/cases.py": """
from dataclasses import dataclass
from typing import Any
import torch
from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.scale.spec import ScaleProblem

TOLERANCE = {"float32": 1e-6}
QUICK, THOROUGH = (1, 300), (1, 300, 70000)

@dataclass(frozen=True)
class Case:
    problem: Any
    tensors: Any
    def error(self):
        return relative_error(self.tensors["y"], 2 * self.tensors["x"].double())

@dataclass(frozen=True)
class Trial:
    x: Any
    def case(self, kernel, *, aligned):
        y = torch.full_like(self.x, torch.nan)
        return Case(ScaleProblem("float32", len(y)), {"x": self.x, "y": y})
    def launches(self, kernel):
        yield self.case(kernel, aligned=True)

def trials(dtype, shapes, device):
    return (Trial(torch.rand(size, device=device)) for size in shapes)
""",
    "kernels/scale/op/function.py": """
from dataclasses import dataclass
from torch import Tensor
from scan_registry.kernels.scale.spec import ScaleProblem
from scan_registry.ops.operator import Unfused

@dataclass(frozen=True)
class Call(Unfused):
    problem: ScaleProblem
    copied: tuple = ()
    def alternatives(self, backend):
        return ((self.problem, backend),)

def scale(x: Tensor, *, reverse: bool = False, backend: str = "auto") -> Tensor:
    return 2 * (x.flip(-1) if reverse else x)

def describe(x, *, reverse=False, backend="auto"):
    return {"forward": Call(ScaleProblem(str(x.dtype).removeprefix("torch."), x.numel()))}
""",
    "kernels/scale/op/bench.py": """
from dataclasses import dataclass
from typing import ClassVar
from scan_registry.ops.benchmark import Benchmark
from scan_registry.ops.operator import Option

@dataclass(frozen=True)
class Case:
    size: int
    dtype: str = "float32"
    family: ClassVar[str] = "scale"
    options: ClassVar[str] = ""
    def __str__(self):
        return f"{self.group}:{self.sizes}:{self.dtype}"
    time = property(lambda self: self.size)
    sizes = property(lambda self: str(self.size))
    group = property(lambda self: "vector")
    cells = property(lambda self: (self.group, self.sizes, self.dtype))
    def moves(self, direction):
        return 1, 1
    def traffic(self, direction):
        return 8 * self.size
    def to_json(self):
        return {"size": self.size}

class ScaleBenchmark(Benchmark):
    subject, description, case_help = "multiplications by two", "Times them.", "vector:N:dtype"
    columns = ("what", "N", "dtype")
    passes = ("forward",)
    options = (Option("--sizes", default="256,1024"),)
    def parse(self, text):
        kind, size, dtype = text.split(":")
        if kind != "vector":
            raise ValueError(f"{text} is no vector")
        return Case(int(size), dtype)
    def cases(self, given, kind):
        return [*map(self.parse, given.case)] or [Case(int(size)) for size in given.sizes.split(",")]
    def call(self, case, direction, backend, device):
        import torch
        from scan_registry.kernels.scale.op.function import scale
        x = torch.rand(case.size, device=device)
        return lambda: scale(x)

BENCHMARK = ScaleBenchmark()
""",
    "kernels/scale/op/operator.py": """
from scan_registry.ops.operator import Operator, Option, ParsedCall, described_tensor

class Scale(Operator):
    name, shape = "scale", "any"
    options = (
        Option("--reverse", action="store_true", help="backwards"),
        Option("--factor", type=int, default=2, help="of the product"),
    )
    tuned_shapes, tuned_dtypes = ("vector:4096",), ("float32",)
    def parse(self, dtype, shape, given):
        how = {"reverse": given.reverse}
        return ParsedCall((described_tensor(shape, dtype),), how, how)
    def run_on_cpu(self, problem, tensors):
        tensors["y"].copy_(2 * tensors["x"])
    def posed(self, case, direction):
        from scan_registry.kernels.scale.spec import ScaleProblem
        return (ScaleProblem(case.dtype, case.size),) if direction == "forward" else ()
    def outputs(self, case, problem):
        return ("y",)

OPERATOR = Scale()
""",
}


@pytest.fixture
def _third(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The family ``scale``, in a folder beside the others'."""
    for folder in Path(kernels.__file__).parent.iterdir():
        if (folder / "spec.py").is_file():
            (tmp_path / "kernels").mkdir(exist_ok=True)
            (tmp_path / "kernels" / folder.name).symlink_to(folder)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(kernels, "ROOT", tmp_path / "kernels")
    path = [*kernels.__path__, str(tmp_path / "kernels")]
    monkeypatch.setattr(kernels, "__path__", path)
    monkeypatch.setenv("COLUMNS", "160")
    caches = (kernels.families, kernels.family, kernels.operators, kernels.public)
    for cached in caches:
        cached.cache_clear()
    importlib.invalidate_caches()
    yield
    for cached in caches:
        cached.cache_clear()
    for name in [module for module in sys.modules if ".scale" in module]:
        del sys.modules[name]
    vars(kernels).pop("scale", None)
    vars(scan_registry).pop("scale", None)


@pytest.mark.usefixtures("_third")
def test_explain_knows_it(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain_command, "catalogue", lambda: Catalogue(()))
    words = ["explain", "scale", "--dtype", "fp32", "--shape", "1000", "--arch", "sm_90"]
    assert main([*words, "--reverse", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["operator"] == "scale"
    assert report["call"]["reverse"] is True
    assert [step["kernel"] for step in report["steps"]] == ["scale"]
    for others in (["--function", "gru"], ["--dim", "0"]):
        assert main([*words, *others]) == 2
        assert f"{others[0]} is no option of scale" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["explain", "--help"])
    messages = capsys.readouterr().out
    families = "linear_scan, causal_conv1d, gated_scan, rnn, scale, selective_scan"
    assert f"one of {families}" in " ".join(messages.split())
    assert "of linear_scan, gated_scan: scan from the end; of scale: backwards" in " ".join(
        messages.split()
    )
    function = scan_registry.scale  # type: ignore[attr-defined]
    assert "scale" in dir(scan_registry)
    assert function is operators()["scale"].function
    assert scan_registry.explain(function, torch.rand(8)).operator == "scale"


@pytest.mark.usefixtures("_third")
def test_an_option_with_a_default_concerns_its_operator_alone(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explain_command, "catalogue", lambda: Catalogue(()))
    words = ["explain", "linear_scan", "--dtype", "fp32", "--shape", "2,8,64", "--arch", "sm_90"]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("linear_scan")
    for factor in ("0", "3"):
        assert main([*words, "--factor", factor]) == 2
        assert "--factor is no option of linear_scan" in capsys.readouterr().err


@pytest.mark.usefixtures("_third")
def test_bench_times_it(capsys: Capture) -> None:
    words = ["bench", "scale", "--device", "cpu"]
    assert main([*words, "--sizes", "64,128", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(timing["case"], timing["who"]) for timing in report["timings"]] == [
        ({"size": size}, who) for size in (64, 128) for who in ("scan-registry cpu", "torch.mul")
    ]
    assert main([*words, "--case", "vector:32:float32"]) == 0
    assert "vector 32 float32 forward scan-registry cpu" in " ".join(
        capsys.readouterr().out.split()
    )
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    assert "time multiplications by two instead" in capsys.readouterr().out


@pytest.mark.usefixtures("_third")
def test_selftest_runs_it(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    only = {"scale": kernels.family("scale")}
    monkeypatch.setattr(kernels, "families", lambda: only)
    assert main(["selftest", "--device", "cpu", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert (result["family"], result["cases"], result["error"]) == ("scale", 2, 0.0)


@pytest.mark.usefixtures("_third")
def test_tune_poses_its_problems() -> None:
    assert [str(case) for case in usual_cases() if case.family == "scale"] == [
        "vector:4096:float32"
    ]
    (result,) = posed(cases(["vector:99"], ["float32"]))
    assert (result.kernel.head, result.outputs) == ("scale.scale:cuda", ("y",))
    with pytest.raises(ValueError, match=r"the case is 'x:9:float32'.*; or x:9:float32 is no vec"):
        cases(["x:9"], ["float32"])


def test_every_operator_is_its_function_and_its_family() -> None:
    for name, operator in operators().items():
        assert operator.name == name
        assert operator.function is getattr(scan_registry, name)
        assert kernels.family(name).name == name
        for text in operator.tuned_cases:
            assert operator.benchmark.parse(text).family == name
