"""``linear_scan_summary`` on the CPU: the map of all steps, its derivatives, and what torch makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from harness import Call, Derivatives, Features, close, results
from recurrence import plainly
from torch import Tensor

from scan_registry import linear_scan, linear_scan_summary

OPERATOR = torch.ops.scan_registry.linear_scan_summary.default


class TestSummary(Derivatives, Features):
    """Shapes of gates and tokens, named by their dimensions."""

    cases = {
        "rows": {},
        "columns": {"gates": "BTD", "tokens": "BTD", "reverse": True},
        "one step": {"gates": "B1", "tokens": "B1", "dim": -1},
        "decay": {"gates": "D1", "reverse": True},
        "decay of steps": {"gates": "T1", "tokens": "BTD"},
        "tokens broadcast": {"gates": "DT", "tokens": "T"},
        "complex": {"complex": True},
    }
    few = ("rows", "columns", "decay")
    small = (2, 3, 4)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}

    def draw(self, case: str, size: Any, dtype: torch.dtype) -> Call:
        """With gates of both signs, among them a zero."""
        spec = {"gates": "BDT", "tokens": "BDT", **self.cases[case]}
        sizes = dict(zip("BDT1", (*size, 1), strict=True))
        wide = dtype.to_complex() if spec.get("complex") else dtype
        gates, tokens = (
            torch.randn([sizes[d] for d in spec[name]], dtype=wide) for name in ("gates", "tokens")
        )
        gates.view(-1)[gates.numel() // 2] = 0
        dims = max(spec["gates"], spec["tokens"], key=len)
        dim = spec.get("dim") or dims.index("T") - len(dims)
        others = {"dim": dim, "reverse": spec.get("reverse", False)}
        return Call({"gates": gates, "tokens": tokens}, others)

    def run(self, **arguments: Any) -> tuple[Tensor, ...]:
        return linear_scan_summary(**arguments)

    def right(self, gates: Tensor, tokens: Tensor, **how: Any) -> tuple[Tensor, ...]:
        """Final states from one without tokens, which is the product of the gates, and from zero."""
        how.pop("backend", None)
        gates, tokens = torch.broadcast_tensors(gates, tokens)
        _, final_state = plainly(gates, tokens, **how)
        ones = torch.ones_like(final_state)
        return plainly(gates, torch.zeros_like(tokens), ones, **how)[1], final_state

    def checks(self, case: str) -> Iterator[Any]:
        call = self.draw(case, self.small, torch.float32).leaves()
        how = call.others["dim"], call.others["reverse"], "auto"
        tests = "test_schema", "test_faketensor", "test_autograd_registration"
        yield OPERATOR, (*call.tensors.values(), *how), (*tests, "test_aot_dispatch_dynamic")

    @pytest.mark.parametrize("backend", ["auto", "reference"])
    def test_is_the_map_of_all_steps(self, case: str, dtype: torch.dtype, backend: str) -> None:
        call = self.draw(case, (2, 3, 7), torch.float32 if dtype.itemsize < 4 else dtype)
        if not self.cases[case].get("complex"):
            call = call.changed(lambda t: t.to(dtype))
        call.others["backend"] = backend  # type: ignore[index]
        actual, exact = results(self.run, call), results(self.right, call.wide())
        close(
            actual,
            exact,
            lambda name, out: self.tolerance[
                dtype if "grad" in name else out.dtype.to_real() if out.is_complex() else out.dtype
            ],
        )


@pytest.mark.parametrize("reverse", [False, True])
def test_pieces_give_the_whole(reverse: bool) -> None:
    """Each piece starts from the state that the summaries of those before it make."""
    gates, tokens = (torch.randn(3, 101, dtype=torch.float64) for _ in range(2))
    initial = torch.randn(3, dtype=torch.float64)
    bounds = [0, 13, 13, 14, 61, 101]
    pieces = [slice(*pair) for pair in pairwise(bounds)]
    state = initial
    for piece in reversed(pieces) if reverse else pieces:
        gate, shift = linear_scan_summary(gates[:, piece], tokens[:, piece], reverse=reverse)
        state = gate * state + shift
    _, expected = linear_scan(gates, tokens, initial, reverse=reverse, return_final_state=True)
    torch.testing.assert_close(state, expected, rtol=1e-12, atol=1e-12)


def test_no_steps_change_nothing() -> None:
    gates, tokens = (torch.randn(2, 0, 3, requires_grad=True) for _ in range(2))
    final_gate, final_state = linear_scan_summary(gates, tokens, dim=1)
    assert torch.equal(final_gate, torch.ones(2, 3))
    assert torch.equal(final_state, torch.zeros(2, 3))
    (final_gate.sum() + final_state.sum()).backward()
    assert gates.grad is not None
    assert gates.grad.shape == gates.shape
    assert linear_scan_summary(torch.ones(0, 4), torch.ones(0, 4))[0].shape == (0,)


def test_errors_of_like_gates_do_not_add_up() -> None:
    gates = torch.full((1, 100_000), 1 - 1e-5)
    final_gate, _ = linear_scan_summary(gates, torch.zeros_like(gates))
    assert abs(final_gate / gates[0, 0].double() ** 100_000 - 1) < 1e-6


@pytest.mark.parametrize(
    ("error", "words", "given"),
    [
        (TypeError, "tokens must be a torch.Tensor, not int", {"tokens": 3}),
        (ValueError, "must broadcast to one shape", {"tokens": torch.ones(2, 4)}),
        (ValueError, "dim is 2", {"dim": 2}),
        (TypeError, "reverse is 3", {"reverse": 3}),
        (ValueError, "needs a CUDA device", {"backend": "cuda"}),
        (ValueError, "backend is 'best'", {"backend": "best"}),
    ],
)
def test_bad_arguments(error: type[Exception], words: str, given: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"gates": torch.ones(2, 3), "tokens": torch.ones(2, 3), **given}
    with pytest.raises(error, match=words):
        linear_scan_summary(**arguments)
