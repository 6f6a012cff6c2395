"""The operator ``linear_scan`` on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import Call, OperatorTests, arguments_of, close, results
from precision import ROUNDING, compute_dtype
from recurrence import plainly
from torch import Tensor

from scan_registry import linear_scan

OP = torch.ops.scan_registry.linear_scan.default
BACKWARD_OP = torch.ops.scan_registry.linear_scan_backward.default
NAMES = ("gates", "tokens", "initial_state")
FLOATS = torch.rand(2, 3, 4)
ACCEPTED = "accepted are float32, bfloat16, float16, float64, complex64, complex128"


class TestLinearScan(OperatorTests):
    """Shapes are named by their dimensions: batch, channels (D), time, sequences, E of 2, and 1."""

    cases = {
        "rows": {},
        "columns": {"gates": "BTD", "tokens": "BTD", "state": "BD", "reverse": True},
        "time first": {"gates": "TBD", "tokens": "TBD", "state": "BD", "wide_gates": True},
        "decay": {"gates": "D1", "state": "BD"},
        "decay of columns": {"gates": "D", "tokens": "BTD", "state": "BD", "wide_gates": True},
        "one decay": {"gates": "1", "state": "D", "reverse": True},
        "decay of steps": {"gates": "1T", "state": "1"},
        "tokens broadcast": {"tokens": "T"},
        "packed": {"state": "BDS", "packed": True},
        "packed columns": {"gates": "T1", "tokens": "BTD", "state": "BSD", "packed": True, "reverse": True},
        "packed, one decay": {"gates": "1", "tokens": "TB", "packed": True},
        "complex": {"state": "BD", "complex": NAMES[:2]},
        "complex gates": {"gates": "D1", "state": "BD", "complex": NAMES[:1]},
        "complex tokens, packed": {"gates": "TB", "tokens": "TB", "state": "SB", "packed": True, "complex": NAMES[1:2]},
        "resets": {"state": "BD", "reset": True},
        "resets of a decay": {"gates": "D11", "tokens": "BDET", "state": "BDE", "reset": True, "reverse": True},
        "resets of complex rows": {"gates": "T", "tokens": "T", "state": "", "reset": True, "complex": NAMES[:2]},
        "resets, time first": {"gates": "TBD", "tokens": "TBD", "state": "BD", "reset": True},
        "resets, packed": {"tokens": "BTD", "gates": "BTD", "state": "BSD", "reset": True, "packed": True, "reverse": True},
    }  # fmt: skip
    few = ("rows", "columns", "decay", "packed columns", "complex gates", "resets, packed")
    #: Batch, channels and time.
    sizes = ((2, 3, 9), (3, 5, 40), (1, 33, 130), (4, 3, 1))
    small = (2, 3, 4)
    large = (4, 65, 513)
    empty = ((0, 3, 4), (2, 3, 0))
    maps = ("cu_seqlens", "reset")

    def draw(self, case: str, size: Any, dtype: torch.dtype) -> Call:
        spec = {"gates": "BDT", "tokens": "BDT", "state": None, "complex": (), **self.cases[case]}
        batch, channels, time = size
        bounds = (
            [0, 0, time // 3, time // 3 + 1 if time > 1 else 0, time]
            if spec.get("packed")
            else None
        )
        sizes = {"B": batch, "D": channels, "T": time, "E": 2, "1": 1, "S": len(bounds or ()) - 1}
        wide = compute_dtype(dtype)
        pairs = wide.to_complex()

        def shape(dims: str) -> list[int]:
            return [sizes[d] for d in dims]

        tokens = torch.randn(
            shape(spec["tokens"]), dtype=pairs if "tokens" in spec["complex"] else wide
        )
        gates = 1.8 * torch.rand(shape(spec["gates"]), dtype=wide) - 0.9
        if "gates" in spec["complex"]:
            gates = torch.polar(gates, 6 * torch.rand_like(gates))
        elif not spec.get("wide_gates"):
            gates = gates.to(dtype)
        tensors = {"gates": gates, "tokens": tokens if tokens.is_complex() else tokens.to(dtype)}
        if spec["state"] is not None:
            states = torch.randn(shape(spec["state"]), dtype=pairs if spec["complex"] else wide)
            tensors["initial_state"] = states
        dims = max(spec["tokens"], spec["gates"], key=len)
        marks = [batch, time] if len(dims) > 1 else [time]
        others = {
            "dim": dims.index("T") - len(dims),
            "reverse": spec.get("reverse", False),
            "cu_seqlens": None if bounds is None else torch.tensor(bounds),
            "reset": torch.rand(marks) < 0.4 if spec.get("reset") else None,
        }
        return Call(tensors, others)

    def run(self, **arguments: Any) -> tuple[Tensor, ...]:
        return linear_scan(**arguments, return_final_state=True)

    def right(self, *, reset: Tensor | None = None, **arguments: Any) -> tuple[Tensor, ...]:
        """Resets are gates of zero, whatever the state is."""
        if reset is not None:
            gates, tokens = torch.broadcast_tensors(arguments["gates"], arguments["tokens"])
            shape = [1] * tokens.dim()
            time = arguments["dim"] % tokens.dim()
            if reset.dim() > 1:
                shape[1 if time == 0 else 0] = reset.shape[0]
            shape[time] = reset.shape[-1]
            marks = (reset.mT if time == 0 < reset.dim() - 1 else reset).reshape(shape)
            arguments |= {"gates": torch.where(marks, 0, gates)}
        return plainly(**arguments)

    def dtype_of(self, name: str, arguments: Any, dtype: torch.dtype) -> torch.dtype:
        gates, tokens = arguments["gates"].dtype, arguments["tokens"].dtype
        states = gates if gates.is_complex and not tokens.is_complex else tokens
        return states if name == "output 0" else compute_dtype(states)

    def slack(self, name: str, out: Tensor, dtype: torch.dtype) -> float:
        """Gradients of gates are products with states as they are rounded."""
        return self.tolerance[dtype] if "gradient" in name else super().slack(name, out, dtype)

    def on_gpu(self, call: Call) -> bool:
        return call.others["reset"] is None

    def time(self, call: Call, name: str) -> int | None:
        dim: int = call.others["dim"]
        if name == "output 0":
            return dim
        if name == "reset":
            return -1
        tensor = call.arguments.get(name)
        if name not in NAMES[:2] or tensor is None or tensor.dim() < -dim:
            return None
        return dim if tensor.shape[dim] > 1 else None

    def state(self, call: Call, states: Tensor, number: int) -> Tensor:
        return states.select(call.others["dim"], number)

    def states(self, call: Call, each: list[Tensor]) -> Tensor:
        return torch.stack(each, call.others["dim"])

    def checks(self, case: str) -> Iterator[Any]:
        call = self.draw(case, self.small, torch.float32)
        if call.others["reset"] is not None or len(self.cases[case].get("complex", "  ")) == 1:
            return
        bounds, *how = arguments_of(call, "cu_seqlens", "dim", "reverse")
        yield (
            OP,
            (*arguments_of(call, *NAMES), bounds, *how, False, "auto"),
            ("test_schema", "test_faketensor"),
        )
        leaves = arguments_of(call.leaves(), *NAMES)
        tests = (
            "test_schema",
            "test_faketensor",
            "test_autograd_registration",
            "test_aot_dispatch_dynamic",
        )
        yield OP, (*leaves, bounds, *how, True, "auto"), tests
        states, last = self.run(**call.arguments)
        gates, _, initial = arguments_of(call, *NAMES)
        for wanted in ([True] * 3, [True, False, False], [False, True, initial is not None]):
            kept = states if wanted[0] else None
            yield (
                BACKWARD_OP,
                (gates, kept, states, initial, last, bounds, *how, "auto", wanted),
                tests[:2],
            )

    refused = {
        "none": ({"gates": None}, TypeError, "gates must be a torch.Tensor, not NoneType"),
        "list": ({"tokens": [1.0]}, TypeError, "tokens must be a torch.Tensor, not list"),
        "integers": ({"gates": FLOATS.int()}, TypeError, f"gates has dtype torch.int32; {ACCEPTED}"),
        "bools": ({"tokens": FLOATS > 0}, TypeError, f"tokens has dtype torch.bool; {ACCEPTED}"),
        "float8": ({"tokens": FLOATS.to(torch.float8_e5m2)}, TypeError, "tokens has dtype torch.float8_e5m2"),
        "mix": ({"tokens": FLOATS.double()}, TypeError, "gates have dtype torch.float32, tokens torch.float64"),
        "shapes": ({"tokens": FLOATS[:, :2]}, ValueError, r"gates have shape \(2, 3, 4\), tokens \(2, 2, 4\).* broadcast"),
        "device": ({"tokens": FLOATS.to("meta")}, ValueError, "gates is on cpu, tokens on meta.* one device"),
        "scalars": (dict.fromkeys(NAMES[:2], FLOATS[0, 0, 0]), ValueError, "scalars.* time dimension"),
        "sparse": ({"gates": FLOATS.to_sparse()}, TypeError, r"gates is sparse; .* so pass gates.to_dense\(\)"),
        "oneDNN": ({"tokens": FLOATS.to_mkldnn()}, TypeError, r"tokens is in oneDNN's layout; .* tokens.to_dense\(\)"),
        "dim 3": ({"dim": 3}, ValueError, "dim is 3; tensors of 3 dimensions accept -3 to 2"),
        "dim -4": ({"dim": -4, "tokens": FLOATS[0]}, ValueError, "dim is -4.*-3 to 2"),
        **{f"dim {d}": ({"dim": d}, TypeError, "dim is .*; it must be an int") for d in ("x", True, 1.0, 1.5, None)},
        "backend": ({"backend": "hip"}, ValueError, "backend is 'hip'; accepted are auto, cuda, triton, reference"),
        "no backend": ({"backend": None}, ValueError, "backend is None"),
        "backends": ({"backend": ["cuda"]}, ValueError, r"backend is \['cuda'\]"),
        "cuda": ({"backend": "cuda"}, ValueError, "'cuda', which needs a CUDA device; tokens are on cpu"),
        "triton": ({"backend": "triton"}, ValueError, "'triton', which needs a CUDA device"),
        "reverse": ({"reverse": 1}, TypeError, "reverse is 1; it must be a bool"),
        "state": ({"initial_state": 1.0}, TypeError, "initial_state must be a torch.Tensor, not float"),
        "state's shape": ({"initial_state": torch.zeros(3, 2)}, ValueError, r"initial_state has shape \(3, 2\); .* state's shape, \(2, 3\)"),
        "state's rank": ({"initial_state": torch.zeros(1, 2, 3)}, ValueError, r"shape \(1, 2, 3\); .* \(2, 3\)"),
        "state of columns": ({"initial_state": torch.zeros(2, 3), "dim": 0}, ValueError, r"shape \(2, 3\); .* \(3, 4\)"),
        "packed state": (
            {"initial_state": torch.zeros(2, 3), "cu_seqlens": torch.tensor([0, 1, 2, 3, 4])}, ValueError, r"\(2, 3\); .* \(2, 3, 4\)",
        ),
        "complex state": ({"initial_state": FLOATS[..., 0] * 1j}, TypeError, "initial_state has dtype torch.complex64, which does not go with states of"),
        "integer state": ({"initial_state": FLOATS[..., 0].long()}, TypeError, "initial_state has dtype torch.int64"),
        "sparse state": ({"initial_state": FLOATS[..., 0].to_sparse()}, TypeError, "initial_state is sparse; accepted are dense"),
        "bounds": ({"cu_seqlens": [0, 4]}, TypeError, "cu_seqlens must be a torch.Tensor, not list"),
        "bounds' dtype": ({"cu_seqlens": torch.tensor([0.0, 4.0])}, TypeError, "cu_seqlens has dtype torch.float32; accepted are int32 and int64"),
        **{
            f"bounds of {list(x.shape)}": ({"cu_seqlens": x}, ValueError, r"cu_seqlens has shape .*; it must be \(sequences \+ 1,\)")
            for x in (torch.tensor([0]), torch.tensor(4), torch.tensor([[0, 4]]), torch.zeros(0).long())
        },
        "bounds' device": ({"cu_seqlens": torch.tensor([0, 4], device="meta")}, ValueError, "cu_seqlens is on meta, tokens on cpu"),
        **{
            str(x): ({"cu_seqlens": torch.tensor(x)}, ValueError, f"cu_seqlens {words}; it must rise from 0 to the 4 steps")
            for x, words in (
                ([0, 3, 1, 4], "falls from .*"), ([0, -1, 4], "falls from .*"), ([4, 0], "falls from .*"),
                ([0, 2**62 + 1, -(2**62), 4], "falls from .*"), ([1, 4], "runs from 1 to 4"), ([0, 3], "runs from 0 to 3"),
                ([0, 5], "runs from 0 to 5"), ([-1, 4], "runs from -1 to 4"), ([0, 2**40], "runs from 0 to 1099511627776"),
                ([-(2**63), 2**63 - 1], "runs from -9223372036854775808 to 9223372036854775807"),
            )
        },
        "reset": ({"reset": 1}, TypeError, "reset must be a torch.Tensor, not int"),
        "reset's dtype": ({"reset": torch.zeros(2, 4)}, TypeError, "reset has dtype torch.float32; accepted is bool"),
        "reset's shape": ({"reset": torch.zeros(4, 2) > 0}, ValueError, r"reset has shape \(4, 2\); it must be \(2, 4\), batch and time"),
        "reset of columns": ({"reset": torch.zeros(2, 4) > 0, "dim": 0}, ValueError, r"reset has shape \(2, 4\); it must be \(3, 2\)"),
    }  # fmt: skip


SCAN = TestLinearScan()


def _any_call(seed: int) -> tuple[Call, torch.dtype]:
    """Of any rank, layout, broadcast and dtypes."""
    torch.manual_seed(seed)

    def chance(count: int) -> int:
        return int(torch.randint(count, ()))

    shape = [(1, 2, 2, 3, 4, 0)[chance(6)] for _ in range(chance(4))]
    place = chance(len(shape) + 1)
    shape.insert(place, time := (5, 1, 2, 3, 9, 0)[chance(6)])
    bounds = torch.cat(
        [torch.zeros(1), torch.randint(0, time + 1, (3,)).sort().values, torch.tensor([time])]
    )
    of_state = [3 + 1 if chance(2) and n == place else size for n, size in enumerate(shape)]
    packed = of_state[place] == 4 and time != 4
    of_state = of_state if packed else [*shape[:place], *shape[place + 1 :]]
    names = [*ROUNDING]
    tokens_dtype = names[chance(len(names))]
    mixed = [
        d
        for d in names
        if (torch.float64 in (compute_dtype(d), compute_dtype(d).to_real()))
        == (tokens_dtype in (torch.float64, torch.complex128))
    ]
    gates_dtype = mixed[chance(len(mixed))]

    def lying(sizes: list[int], dtype: torch.dtype, full: bool = False) -> Tensor:
        """Perhaps broadcast, of dimensions in any order, with steps and gaps."""
        sizes = [1 if not full and chance(4) == 0 else size for size in sizes]
        order = torch.randperm(len(sizes)).tolist() if chance(2) else [*range(len(sizes))]
        step = 1 + chance(2) * chance(2)
        x = torch.randn(
            [sizes[d] * step for d in order],
            dtype=torch.complex128 if dtype.is_complex else torch.float64,
        )
        x = x.permute([order.index(d) for d in range(len(order))])
        return x[tuple(slice(None, None, step) for _ in order)].to(dtype)

    gates = lying(shape, gates_dtype, full=True) if chance(2) else lying(shape, gates_dtype)
    gates = gates / (gates.abs() + 0.1)
    states = torch.promote_types(compute_dtype(gates_dtype), compute_dtype(tokens_dtype))
    tensors = {"gates": gates, "tokens": lying(shape, tokens_dtype, full=True)}
    if chance(2):
        tensors["initial_state"] = lying(of_state, states)
    return Call(tensors, {
        "dim": place - len(shape) if chance(2) else place, "reverse": bool(chance(2)), "cu_seqlens": bounds.long() if packed else None,
    }), max((gates_dtype, tokens_dtype), key=ROUNDING.__getitem__)  # fmt: skip


def test_any_call() -> None:
    """Of drawn shapes, layouts and dtypes."""
    for seed in range(250):
        call, narrow = _any_call(seed)
        expected = results(plainly, call.wide())
        close(results(SCAN.run, call), expected, lambda *_, n=narrow: 32 * ROUNDING[n], seed)  # type: ignore[misc]


#: The dtype of the states, by that of gates (rows) and of tokens (columns); "–" is refused.
RESULTS = """
            float32    bfloat16   float16    float64    complex64  complex128
float32     float32    bfloat16   float16    –          complex64  –
bfloat16    float32    bfloat16   float16    –          complex64  –
float16     float32    bfloat16   float16    –          complex64  –
float64     –          –          –          float64    –          complex128
complex64   complex64  complex64  complex64  –          complex64  –
complex128  –          –          –          complex128 –          complex128
"""
_COLUMNS, *_ROWS = (line.split() for line in RESULTS.strip().splitlines())


@pytest.mark.parametrize("row", _ROWS, ids=lambda row: row[0])
def test_dtypes_that_mix(row: list[str]) -> None:
    gates = torch.rand(2, 9, dtype=torch.float64).to(getattr(torch, row[0]))
    for name, states in zip(_COLUMNS, row[1:], strict=True):
        tokens = torch.rand(2, 9, dtype=torch.float64).to(getattr(torch, name))
        if states == "–":
            with pytest.raises(TypeError, match="float64 does not mix"):
                linear_scan(gates, tokens)
            continue
        out, last = SCAN.run(gates=gates, tokens=tokens)
        assert (out.dtype, last.dtype) == (getattr(torch, states), compute_dtype(out.dtype))


def test_states_and_gates_are_not_rounded_to_narrow_tokens() -> None:
    """In bfloat16 itself, counting by ones would end at 256, and a decay close to one would be one."""
    ones = torch.ones(2000, dtype=torch.bfloat16)
    assert linear_scan(ones, ones, return_final_state=True)[1] == 2000
    assert linear_scan(ones[:1], ones[:1], torch.tensor(1002.5)) == torch.tensor(1003.5).bfloat16()
    decay = 1 - 2.0**-12
    expected = (1 - decay**2000) * 2.0**12
    assert abs(float(linear_scan(torch.full((2000,), decay), ones)[-1]) / expected - 1) < 2.0**-8
    for dtype in (torch.bfloat16, torch.float64):  # of initial states
        state = torch.ones((), dtype=dtype, requires_grad=True)
        linear_scan(torch.rand(3), torch.rand(3), state).sum().backward()
        assert state.grad is not None
        assert state.grad.dtype == dtype


def test_tokens_are_not_kept_and_states_are_kept_for_gates_alone() -> None:
    gates, tokens = torch.rand(2, 5), torch.randn(2, 5, requires_grad=True)
    states = linear_scan(gates, tokens)
    weight = torch.randn(2, 5)
    (expected,) = torch.autograd.grad(states, tokens, weight, retain_graph=True)
    states.add_(1)
    with torch.no_grad():
        tokens.add_(1)
    assert torch.equal(torch.autograd.grad(states, tokens, weight)[0], expected)


def test_operators_refuse_what_kernels_would_overrun() -> None:
    small, wide = torch.rand(1, 8), torch.rand(2, 8)
    how = None, None, None, -1, False, "auto", [True, True, False]
    with pytest.raises(ValueError, match="shapes"):
        BACKWARD_OP(wide, wide, small, *how)
    with pytest.raises(ValueError, match="dtypes"):
        BACKWARD_OP(wide, wide, wide.bfloat16(), *how)
    with pytest.raises(ValueError, match="do not broadcast"):
        OP(wide, small, None, None, -1, False, False, "auto")
    for bounds in ([0, 5, 3, 8], [1, 8], [0, 9], [0, 2**62 + 1, -(2**62), 8]):
        with pytest.raises(ValueError, match="do not rise from 0 to time, 8"):
            OP(wide, wide, None, torch.tensor(bounds), -1, False, False, "auto")
    gaps = torch.tensor([0, 7, 3, 9, 8])[::2]
    expected = linear_scan(wide, wide, cu_seqlens=gaps.contiguous())
    assert torch.equal(linear_scan(wide, wide, cu_seqlens=gaps), expected)
    with pytest.raises(TypeError, match="operator takes int64 of one dimension, without gaps"):
        OP(wide, wide, None, gaps, -1, False, False, "auto")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_what_is_said_of_nested_tensors_computes_their_scan() -> None:
    parts = [torch.rand(4, 3), torch.rand(0, 3), torch.rand(5, 3)]
    strided = torch.nested.nested_tensor([torch.rand(2), torch.rand(3)])
    with pytest.raises(TypeError, match=r"gates is nested; .* gates.to_padded_tensor\(0.0\)"):
        linear_scan(strided, torch.rand(2, 3))
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    with pytest.raises(
        TypeError, match=r"pass gates.values\(\) with dim=0 and cu_seqlens=gates.offsets\(\)"
    ):
        linear_scan(jagged, jagged)
    states = linear_scan(jagged.values(), jagged.values(), dim=0, cu_seqlens=jagged.offsets())
    for part, out in zip(parts, states.split([4, 0, 5]), strict=True):
        torch.testing.assert_close(out, linear_scan(part, part, dim=0))
