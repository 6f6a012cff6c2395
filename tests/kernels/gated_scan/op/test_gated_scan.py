"""The operator ``gated_scan`` on the CPU, against loops of the kinds' formulas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gating import FORMULAS, WRITTEN, drawn, loop
from harness import Call, OperatorTests, results
from torch import Tensor

from scan_registry import gated_scan, hgrn, linear_scan, min_gru, min_lstm, require, rg_lru
from scan_registry.kernels.gated_scan import PUBLIC
from scan_registry.kernels.gated_scan.kinds import KINDS
from scan_registry.kernels.gated_scan.op import composed

OPERATORS = torch.ops.scan_registry
X, A = torch.ones(2, 3, 5), torch.ones(3)
RESET = torch.zeros(2, 5, dtype=torch.bool)
EVERY = {"initial": True, "resets": True, "packed": True, "reverse": True}


class TestGatedScan(OperatorTests):
    """Each kind by itself and with all options in one of the layouts, and two kinds with each option."""

    cases = {
        "min_gru": {},
        **{f"{kind}, all": {"kind": kind, "dim": 1 - 2 * (n % 2), **EVERY} for n, kind in enumerate(KINDS)},
        **{kind: {"kind": kind, "dim": 1 - 2 * ((n + 1) % 2)} for n, kind in enumerate(KINDS) if kind != "min_gru"},
        **{
            f"{kind}, {option}": {"kind": kind, "dim": dim, option: True}
            for kind, dim in (("min_gru", 1), ("rg_lru", -2), ("rg_lru", -1))
            for option in EVERY
        },
        "rg_lru, resets and initial": {"kind": "rg_lru", "resets": True, "initial": True},
    }  # fmt: skip
    few = ("rg_lru, resets and initial", "min_gru, packed", "min_lstm, all")
    same_bits = False  # torch's own sums
    tolerance = {
        torch.float64: 1e-12,
        torch.float32: 2e-6,
        torch.float16: 5e-4,
        torch.bfloat16: 4e-3,
    }
    sizes = ((2, 5, 9), (2, 8, 100), (1, 3, 1))
    small = (2, 3, 5)
    large = (3, 70, 300)
    empty = ((0, 3, 4), (2, 0, 4), (2, 3, 0))
    maps = ("cu_seqlens", "reset")

    def draw(self, case: str, size: Any, dtype: torch.dtype) -> Call:
        spec = {"kind": "min_gru", **self.cases[case]}
        kind = spec.pop("kind")
        call = drawn(kind, size, dtype, **spec)
        options = dict(call.options)
        tensors = {f"tensor {n}": t.detach() for n, t in enumerate(call.tensors)}
        if (initial := options.pop("initial_state")) is not None:
            tensors["initial_state"] = initial.detach()
        return Call(tensors, {"kind": kind, **options})

    def split(self, arguments: dict[str, Any]) -> tuple[str, list[Any], dict[str, Any]]:
        tensors = [t for name, t in arguments.items() if name.startswith("tensor")]
        rest = {n: v for n, v in arguments.items() if not n.startswith("tensor")}
        return rest.pop("kind"), tensors, rest

    def run(self, **arguments: Any) -> tuple[Tensor, ...]:
        kind, tensors, options = self.split(arguments)
        return gated_scan(kind, *tensors, return_final_state=True, **options)

    def right(self, **arguments: Any) -> tuple[Tensor, ...]:
        kind, tensors, options = self.split(arguments)
        return loop(kind, *tensors, **options)

    def dtype_of(self, name: str, arguments: Any, dtype: torch.dtype) -> torch.dtype:
        return dtype if name == "output 0" or dtype == torch.float64 else torch.float32

    def slack(self, name: str, out: Tensor, dtype: torch.dtype) -> float:
        return self.tolerance[dtype] if "gradient" in name else super().slack(name, out, dtype)

    def time(self, call: Call, name: str) -> int | None:
        if name == "reset":
            return -1
        sequences = [f"tensor {n}" for n in range(FORMULAS[call.others["kind"]][0])]
        return call.others["dim"] if name in (*sequences, "output 0") else None

    def _states(self, call: Call) -> int:
        return 1 if call.others["dim"] % 3 == 1 else 2

    def state(self, call: Call, states: Tensor, number: int) -> Tensor:
        return states.select(self._states(call), number)

    def states(self, call: Call, each: list[Tensor]) -> Tensor:
        return torch.stack(each, self._states(call))

    def checks(self, case: str) -> Iterator[Any]:
        call = self.draw(case, self.small, torch.float64)
        small = ("test_schema", "test_faketensor")
        for leaves in (call, call.leaves()):
            kind, tensors, options = self.split(leaves.arguments)
            count = FORMULAS[kind][0]
            dim = (options["dim"] % 3) - 3
            ends = options["reset"], options.get("initial_state"), options["cu_seqlens"]
            inputs = kind, tensors[:count], tensors[count:], *ends
            more = ("test_autograd_registration", "test_aot_dispatch_dynamic")
            yield (
                OPERATORS.gated_scan.default,
                (*inputs, dim, options["reverse"], True, "auto"),
                (*small, *more),
            )
        states, last = (x.detach() for x in self.run(**call.arguments))
        kind, tensors, options = self.split(call.arguments)
        wanted = len(tensors) + 1
        for grads, which in (
            ((states, last), [True] * wanted),
            ((states, None), [True, *[False] * (wanted - 1)]),
        ):
            ends = options["reset"], options.get("initial_state"), options["cu_seqlens"]
            inputs = kind, tensors[:count], tensors[count:], *ends
            yield (
                OPERATORS.gated_scan_backward.default,
                (*inputs, states, *grads, dim, options["reverse"], "auto", which),
                small,
            )

    refused = {
        "kind": ({"kind": "gru"}, ValueError, "kind is 'gru'; accepted are linear, min_gru, min_gru_identity, min_lstm, "),
        "no kind": ({"kind": None}, TypeError, r"kind must be one of linear, .*, not NoneType"),
        "a tensor for a kind": ({"kind": X}, TypeError, r"kind must be one of .* rg_lru, hgrn, not Tensor$"),
        "min_lstm": ({"kind": "min_lstm"}, TypeError, "min_lstm takes 3 tensors, forget, input, hidden; 2 were given"),
        "rg_lru": ({"kind": "rg_lru"}, TypeError, "rg_lru takes 4 tensors, x, recurrence_gate, input_gate, a_param; 2"),
        "linear": ({"kind": "linear", "tensor 2": X}, TypeError, "linear takes 2 tensors, gates, tokens; 3 were given"),
        "number": ({"tensor 1": 0.5}, TypeError, "hidden must be a torch.Tensor, not float"),
        "list": ({"tensor 0": X.tolist()}, TypeError, "gate must be a torch.Tensor, not list"),
        "sparse": ({"tensor 1": X.to_sparse()}, TypeError, r"hidden is sparse; .* hidden.to_dense\(\)"),
        "integers": ({"tensor 0": X.int()}, TypeError, "gate has dtype torch.int32; accepted are float32, bfl"),
        "complex": ({"tensor 0": X.cfloat()}, TypeError, "gate has dtype torch.complex64; accepted are "),
        "mix": ({"tensor 1": X.bfloat16()}, TypeError, "hidden has dtype torch.bfloat16, gate torch.float32; all"),
        "wide": ({"tensor 0": X.double()}, TypeError, "hidden has dtype torch.float32, gate torch.float64; all"),
        "shapes": ({"tensor 1": X[:1]}, ValueError, r"hidden has shape \(1, 3, 5\), gate \(2, 3, 5\); all sequences"),
        "rank": ({"tensor 0": X[0]}, ValueError, r"gate has shape \(3, 5\); it must be \(batch, channels, time"),
        "device": ({"tensor 1": X.to("meta")}, ValueError, "hidden is on meta, gate on cpu; they must be on one"),
        "dim 0": ({"dim": 0}, ValueError, "dim is 0; accepted are -1 or 2, and 1 or -2"),
        "dim 1.0": ({"dim": 1.0}, TypeError, "dim is 1.0; it must be an int"),
        "reverse": ({"reverse": 1}, TypeError, "reverse is 1; it must be a bool"),
        "backend": ({"backend": "cudnn"}, ValueError, "backend is 'cudnn'; accepted are auto, cuda, triton,"),
        "cuda": ({"backend": "cuda"}, ValueError, "backend is 'cuda', which needs a CUDA device; gate is on"),
        "reset": ({"reset": True}, TypeError, "reset must be a torch.Tensor, not bool"),
        "floats": ({"reset": RESET.float()}, TypeError, "reset has dtype torch.float32; accepted is bool"),
        "bytes": ({"reset": RESET.byte()}, TypeError, "reset has dtype torch.uint8; accepted is bool"),
        "one reset": ({"reset": RESET[0]}, ValueError, r"reset has shape \(5,\); it must be \(2, 5\), batch and"),
        "reset of columns": ({"reset": RESET, "dim": 1}, ValueError, r"reset has shape \(2, 5\); it must be \(2, 3\)"),
        "reset's device": ({"reset": RESET.to("meta")}, ValueError, "reset is on meta, gate on cpu"),
        "state": ({"initial_state": torch.ones(3, 2)}, ValueError, r"initial_state has shape \(3, 2\); it m"),
        "integer state": ({"initial_state": A.int()}, TypeError, "initial_state has dtype torch.int32, which does"),
        "complex state": ({"initial_state": A.cfloat()}, TypeError, "initial_state has dtype torch.complex64"),
        "bounds": ({"cu_seqlens": [0, 5]}, TypeError, "cu_seqlens must be a torch.Tensor, not list"),
        "bounds' values": ({"cu_seqlens": torch.tensor([0, 4])}, ValueError, "cu_seqlens runs from 0 to 4"),
        "bounds' dtype": ({"cu_seqlens": torch.tensor([0.0, 5])}, TypeError, "cu_seqlens has dtype torch.float32"),
        "bounds' shape": ({"cu_seqlens": torch.tensor([0])}, ValueError, r"cu_seqlens has shape \(1,\)"),
        **{
            f"a_param: {words}": ({"kind": "rg_lru", "tensor 2": X, "tensor 3": values}, error, f"a_param {words}")
            for values, error, words in (
                (2.0, TypeError, "must be a torch.Tensor, not float"),
                (A.int(), TypeError, "has dtype torch.int32; accepted are float32"),
                (A.double(), TypeError, "has dtype torch.float64, x torch.float32; float64 does not"),
                (torch.ones(5), ValueError, r"has shape \(5,\); for x of shape \(2, 3, 5\) with dim"),
                (torch.ones(3, 1), ValueError, r"has shape \(3, 1\); .* it must be \(3,\), one val"),
                (torch.ones(()), ValueError, r"has shape \(\)"),
            )
        },
    }  # fmt: skip


SCAN = TestGatedScan()


def test_every_kind_of_a_public_function_has_a_formula() -> None:
    """One that shares no code with the package. A kind without a function may have none yet."""
    assert WRITTEN.keys() <= KINDS.keys()
    for name, kind in KINDS.items():
        assert name in WRITTEN or not {name, kind.source} & {"linear", *PUBLIC}
        assert FORMULAS[name][:2] == (len(kind.inputs), len(kind.parameters))


@pytest.mark.parametrize("case", [f"{kind}, all" for kind in KINDS])
def test_plain_torch_runs_if_it_is_asked_for(case: str) -> None:
    call = SCAN.draw(case, SCAN.sizes[0], torch.float64)
    expected = results(SCAN.right, call)
    with require("reference"):
        torch.testing.assert_close([*SCAN.run(**call.arguments)], [*expected.values()][:2])


@pytest.mark.parametrize("case", ["rg_lru, all", "min_lstm, all", "min_lstm", "rg_lru"])
@pytest.mark.parametrize("size", [1, 20, 100])
def test_pieces(case: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece of some channels after the other, or of some batches, is what all at once are."""
    call = SCAN.draw(case, (5, 7, 9), torch.float64)
    expected = results(SCAN.run, call)
    monkeypatch.setattr(composed, "_CHANNELS", 2)
    monkeypatch.setattr(composed, "_PIECE", {False: size})
    sizes: list[int] = []
    piece = composed._forward

    def noted(arguments: Any, options: Any) -> Any:
        sizes.append(arguments.inputs[0].numel())
        return piece(arguments, options)

    monkeypatch.setattr(composed, "_forward", noted)
    SCAN.run(**call.arguments)
    assert sum(sizes) == 5 * 7 * 9
    assert max(sizes) <= max(size, 2 * 9)
    torch.testing.assert_close(results(SCAN.run, call), expected)


# --- The functions of kinds -------------------------------------------------------------------


@pytest.mark.parametrize("case", ["all", "resets"])
def test_functions_are_their_kinds(case: str) -> None:
    for function, name in (
        (min_gru, "min_gru"),
        (min_lstm, "min_lstm"),
        (rg_lru, "rg_lru"),
        (hgrn, "hgrn"),
    ):
        call = drawn(name, dim=1, **(EVERY if case == "all" else {"resets": True}))
        kinds: dict[str, Any] = {name: {}}
        if name in ("min_gru", "min_lstm"):
            kinds[f"{name}_identity"] = {"activation": "identity"}
        for kind, more in kinds.items():
            actual = function(*call.tensors, **call.options, **more)  # type: ignore[operator]
            expected = gated_scan(kind, *call.tensors, **call.options)
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    x = torch.rand(2, 3, 9)
    torch.testing.assert_close(gated_scan("linear", x, x), linear_scan(x, x), rtol=0, atol=0)


@pytest.mark.parametrize("dim", [-1, 1])
@pytest.mark.parametrize("bound", [None, 0.25, 0, 1])
def test_a_lower_bound_that_is_a_number(bound: float | None, dim: int) -> None:
    numpy = pytest.importorskip("numpy")
    x, forget = torch.randn(2, 2, 5, 7)
    values = torch.full((x.shape[1 if dim == -1 else 2],), float(bound or 0))
    expected = hgrn(x, forget, values, dim=dim)
    for number in (bound, *(() if bound is None else (numpy.float32(bound), numpy.float64(bound)))):
        torch.testing.assert_close(hgrn(x, forget, number, dim=dim), expected, rtol=0, atol=0)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: hgrn(x, x, bound, dim=dim), fullgraph=True, backend="eager", dynamic=True
    )
    torch.testing.assert_close(compiled(x), hgrn(x, x, bound, dim=dim))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((X, X, 1.5), ValueError, "lower_bound is 1.5; accepted are numbers from 0 to 1"),
        ((X, X, float("nan")), ValueError, "lower_bound is nan"),
        (
            (X, X, "half"),
            TypeError,
            "lower_bound must be a number, a torch.Tensor or None, not str",
        ),
        ((X, X, True), TypeError, "lower_bound must be a number, .* not bool"),
        ((X, X, torch.ones(5)), ValueError, r"lower_bound has shape \(5,\)"),
        ((None, X), TypeError, r"x must be a torch\.Tensor, not NoneType"),
        (
            (X[0], X[0], 0.5),
            ValueError,
            r"x has shape \(3, 5\); it must be \(batch, channels, time",
        ),
        ((X.to_sparse(), X), TypeError, r"x is sparse; .* x.to_dense\(\)"),
        ((torch.nested.nested_tensor([X[0], X[1]]), X, 0.5), TypeError, "x is nested; "),
    ],
    ids=str,
)
def test_lower_bounds_that_are_none(arguments: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        hgrn(*arguments)


@pytest.mark.parametrize("activation", ["relu", ["positive"], None, {}])
def test_activations_that_are_none(activation: Any) -> None:
    for function, count in ((min_gru, 2), (min_lstm, 3)):
        with pytest.raises(ValueError, match=r"activation is .*; accepted are positive, identity"):
            function(*[X] * count, activation=activation)  # type: ignore[operator]
    with pytest.raises(TypeError, match="return_final_state is 'yes'; it must be a"):
        min_gru(X, X, return_final_state="yes")  # type: ignore[call-overload]


def test_values_of_channels_go_with_the_layout_and_are_widened() -> None:
    assert rg_lru(X, X, X, torch.ones(5), dim=1).shape == X.shape
    with pytest.raises(ValueError, match=r"it must be \(5,\)"):
        rg_lru(X, X, X, A, dim=1)
    values = torch.rand(3, dtype=torch.bfloat16, requires_grad=True)
    out = rg_lru(X, X, X, values)
    torch.testing.assert_close(out, rg_lru(X, X, X, values.float()), rtol=0, atol=0)
    assert torch.autograd.grad(out.sum(), values)[0].dtype == torch.bfloat16


def test_states_that_broadcast() -> None:
    x = torch.randn(2, 3, 9, dtype=torch.float64)
    call = Call(
        {"initial_state": torch.randn(3, 1).double()}, {"cu_seqlens": torch.tensor([0, 4, 9])}
    )
    actual, expected = (
        results(lambda f=f, **how: f("min_gru", x, x, **how)[:1], call)  # type: ignore[misc]
        for f in (lambda *a, **k: gated_scan(*a, **k, return_final_state=True), loop)
    )
    torch.testing.assert_close(actual, expected)


def test_the_final_state_keeps_no_states() -> None:
    """It is no view of them."""
    x = torch.randn(2, 3, 50)
    for options in ({}, {"reset": torch.rand(2, 50) < 0.2}):
        states, last = min_gru(x, x, return_final_state=True, **options)  # type: ignore[arg-type]
        assert last.untyped_storage().nbytes() == 4 * 6
        torch.testing.assert_close(last, states[..., -1])
