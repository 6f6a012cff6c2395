"""The operator ``selective_scan`` on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import Call, OperatorTests, arguments_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from scan_registry import selective_scan
from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.selective_scan import reference
from scan_registry.kernels.selective_scan.op import composed
from scan_registry.kernels.selective_scan.op.arguments import Options, normalised

NAMES = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state")
OP = torch.ops.scan_registry.selective_scan.default
BACKWARD_OP = torch.ops.scan_registry.selective_scan_backward.default


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is composed of scans goes in pieces of 16 steps."""
    monkeypatch.setattr(composed, "_PIECE", {False: 1, True: 1})


class TestSelectiveScan(OperatorTests):
    """Shapes of B and C are (D, N), (B, N, L) or (B, G, N, L), named by their dimensions."""

    cases = {
        "groups": {"B": "BGNL", "options": NAMES[5:], "softplus": True},
        "plain": {},
        "gate": {"options": ("z", "D")},
        "packed": {"C": "BGNL", "options": NAMES[5:], "softplus": True, "packed": True},
        "packed, no states": {"packed": True, "options": ("delta_bias",)},
        "constant B": {"B": "DN", "C": "BGNL", "options": ("D", "initial_state")},
        "constant C, packed": {"C": "DN", "packed": True, "options": ("initial_state",)},
        "constant": {"B": "DN", "C": "DN"},
        "complex": {"complex": True, "B": "DN", "options": NAMES[5:], "softplus": True},
        "complex, packed": {"complex": True, "B": "BGNL", "options": NAMES[7:], "packed": True},
        "complex, constant": {"complex": True, "B": "DN", "C": "DN", "packed": True},
    }
    few = ("groups", "packed")
    tolerance = {
        torch.float64: 1e-11,
        torch.float32: 2e-6,
        torch.float16: 2e-3,
        torch.bfloat16: 1e-2,
    }
    #: Batch, channels, time and states.
    sizes = ((2, 6, 50, 3), (4, 6, 1, 5), (1, 10, 131, 17), (2, 70, 33, 4))
    small = (2, 4, 5, 3)
    large = (3, 150, 200, 16)
    empty = ((0, 4, 5, 3), (2, 4, 0, 3))

    def draw(self, case: str, size: Any, dtype: torch.dtype) -> Call:
        options = {"B": "BNL", "C": "BNL", "options": (), **self.cases[case]}
        batch, channels, time, states = size
        real = torch.float64 if dtype == torch.float64 else torch.float32
        pairs = options.get("complex", False)
        of_A = real.to_complex() if pairs else real
        bounds = [0, 0, time // 3, time // 3 + time // 5, time] if options.get("packed") else None
        sequences = () if bounds is None else (len(bounds) - 1,)
        sizes = {
            "DN": (channels, states),
            "BNL": (batch, states, time * (1 + pairs)),
            "BGNL": (batch, 2, states, time * (1 + pairs)),
        }

        def projection(name: str) -> Tensor:
            dims = options[name]
            return torch.randn(sizes[dims], dtype=of_A if dims == "DN" else real).to(
                of_A if dims == "DN" else dtype
            )

        step = torch.randn(batch, channels, time) / 2 - 1
        softplus = options.get("softplus", False)
        tensors = {
            "u": torch.randn(batch, channels, time).to(dtype),
            "delta": (step if softplus else step.exp() / 2).to(dtype),
            "A": -2 * torch.rand(channels, states, dtype=of_A) - 0.05,
            "B": projection("B"),
            "C": projection("C"),
            "D": torch.randn(channels, dtype=real),
            "z": torch.randn(batch, channels, time).to(dtype),
            "delta_bias": torch.rand(channels, dtype=real) / 8,
            "initial_state": torch.randn(batch, *sequences, channels, states, dtype=of_A),
        }
        chosen = {n: t for n, t in tensors.items() if n in NAMES[:5] or n in options["options"]}
        others = {
            "delta_softplus": softplus,
            "cu_seqlens": None if bounds is None else torch.tensor(bounds),
        }
        return Call(chosen, others)

    def run(self, **arguments: Any) -> tuple[Tensor, ...]:
        return selective_scan(**arguments, return_final_state=True)

    def right(self, **arguments: Any) -> tuple[Tensor, ...]:
        return reference.forward(**arguments)

    def dtype_of(self, name: str, arguments: Any, dtype: torch.dtype) -> torch.dtype:
        return dtype if name == "output 0" else reference.state_dtype(dtype, arguments["A"].dtype)

    def time(self, call: Call, name: str) -> int | None:
        if name in ("B", "C"):
            return None if call.tensors[name].dim() == 2 else -1
        return -1 if name in ("u", "delta", "z", "output 0") else None

    def paired(self, call: Call) -> tuple[str, ...]:
        return ("B", "C") if call.tensors["A"].is_complex() else ()

    def state(self, call: Call, states: Tensor, number: int) -> Tensor:
        return states.select(1, number)

    def states(self, call: Call, each: list[Tensor]) -> Tensor:
        return torch.stack(each, 1)

    def checks(self, case: str) -> Iterator[Any]:
        call = self.draw(case, self.small, torch.float64)
        small = ("test_schema", "test_faketensor")
        for leaves in (call, call.leaves()):
            tensors = [
                t.unsqueeze(1) if t is not None and t.dim() == 3 and n in (3, 4) else t
                for n, t in enumerate(arguments_of(leaves, *NAMES, "cu_seqlens"))
            ]
            if leaves is call:
                grad, kept = torch.randn_like(call.tensors["u"]), torch.empty(0)
                for wanted in ([True] * 9, [True, False] * 4 + [False]):
                    yield BACKWARD_OP, (*tensors, kept, grad, None, True, "auto", wanted), small
            tensors = [
                t if t is None or n > 8 else t.detach().requires_grad_(leaves is not call)
                for n, t in enumerate(tensors)
            ]
            more = ("test_autograd_registration", "test_aot_dispatch_dynamic")
            yield OP, (*tensors, True, "auto", leaves is not call), (*small, *more)

    refused = {
        "list": ({"u": [1.0]}, TypeError, "u must be a torch.Tensor, not list"),
        "rank": ({"u": torch.zeros(2, 4)}, ValueError, r"u has shape \(2, 4\)"),
        "integers": ({"u": torch.zeros(2, 4, 5).int()}, TypeError, "u has dtype torch.int32"),
        "sparse": ({"u": torch.zeros(2, 4, 5).to_sparse()}, TypeError, r"u is sparse.*pass u.to_dense\(\)"),
        "A": ({"A": torch.zeros(5, 3)}, ValueError, r"A has shape \(5, 3\).*\(4, states\)"),
        "A of rank 1": ({"A": torch.zeros(4)}, ValueError, r"A has shape \(4,\).*\(4, states\)"),
        "many states": ({"A": torch.zeros(4, 257)}, ValueError, "A has 257 states; accepted are 1 to 256"),
        "no states": ({"A": torch.zeros(4, 0)}, ValueError, "A has 0 states"),
        "pairs": ({"A": -torch.rand(4, 3) * 1j}, ValueError, r"B has shape .*\(2, 3, 10\).*as A is complex, 10 are"),
        "mix": ({"A": torch.zeros(4, 3, dtype=torch.complex128)}, TypeError, "complex128 do not mix"),
        "integer A": ({"A": torch.zeros(4, 3).long()}, TypeError, "A has .* float64 and complex64"),
        "groups": ({"B": torch.zeros(2, 3, 3, 5)}, ValueError, r"B has shape \(2, 3, 3, 5\).*divide 4"),
        "complex B": ({"B": torch.zeros(4, 3) * 1j}, TypeError, "B has dtype torch.complex64.*, as A is real"),
        "B of steps": (
            {"A": -torch.rand(4, 3) * 1j, "B": torch.zeros(2, 3, 5) * 1j}, TypeError,
            r"B has dtype torch.complex64.*pass torch.view_as_real\(B\).flatten\(-2\)",
        ),
        "C": ({"C": torch.zeros(2, 3, 6)}, ValueError, r"C has shape \(2, 3, 6\)"),
        "z": ({"z": torch.zeros(2, 4, 6)}, ValueError, r"z has shape \(2, 4, 6\)"),
        "number": ({"z": 1.0}, TypeError, "z must be a torch.Tensor, not float"),
        "device": ({"z": torch.zeros(2, 4, 5, device="meta")}, ValueError, "z is on meta, u on cpu"),
        "D": ({"D": torch.zeros(3)}, ValueError, r"D has shape \(3,\)"),
        "wide D": ({"D": torch.zeros(4).double()}, TypeError, "D has dtype torch.float64"),
        "delta": ({"delta": torch.zeros(2, 5, 4)}, ValueError, r"delta has shape \(2, 5, 4\).* be \(2, 4, 5\)"),
        "bias": ({"delta_bias": torch.zeros(4, 1)}, ValueError, r"delta_bias has shape \(4, 1\).* \(4,\)"),
        "state": ({"initial_state": torch.zeros(2, 4, 2)}, ValueError, r"initial_state .* be \(2, 4, 3\)"),
        "complex state": ({"initial_state": torch.zeros(2, 4, 3) * 1j}, TypeError, "initial_state has dtype"),
        "bounds' rank": ({"cu_seqlens": torch.tensor([[0, 5]])}, ValueError, r"cu_seqlens has shape \(1, 2\)"),
        "bounds' dtype": ({"cu_seqlens": torch.tensor([0.0, 5.0])}, TypeError, "cu_seqlens has dtype torch.float32"),
        "bounds": ({"cu_seqlens": torch.tensor([0, 4]), "initial_state": None}, ValueError, "cu_seqlens"),
        "softplus": ({"delta_softplus": 1}, TypeError, "delta_softplus is 1; it must be a bool"),
        "backend": ({"backend": "fast"}, ValueError, "backend is 'fast'"),
        "cuda": ({"backend": "cuda"}, ValueError, "needs a CUDA device; u is on cpu"),
        "triton": ({"backend": "triton"}, ValueError, "needs a CUDA device; u is on cpu"),
    }  # fmt: skip


DRAWN = TestSelectiveScan()


def test_a_tensor_alone_is_returned_and_dtypes_mix() -> None:
    call = DRAWN.draw("groups", DRAWN.small, torch.float32)
    call.tensors["u"].bernoulli_()  # as exact in bfloat16
    expected = selective_scan(**call.arguments)
    narrow = selective_scan(**{**call.arguments, "u": call.tensors["u"].bfloat16()})
    assert (type(expected), narrow.dtype) == (Tensor, torch.bfloat16)
    assert relative_error(narrow, expected) <= 1e-2
    with pytest.raises(TypeError, match="return_final_state is 'no'; it must be a bool"):
        selective_scan(**call.arguments, return_final_state="no")  # type: ignore[call-overload]


def test_step_sizes_at_both_ends() -> None:
    """Gates from 0 to infinity, and softplus of any size; of a step of 0 all of the state stays."""
    sizes = torch.tensor([-1e30, -200.0, -90.0, -30.0, -1.0, 0.0, 1.0, 15.0, 25.0, 90.0, 1e30])
    u, ones = torch.ones(1, 1, len(sizes)), torch.ones(1, 1, 1, len(sizes))
    for rate in (-1.0, -1e-20, -1e20, 0.0, 1e-3):
        tensors = u, sizes.expand(1, 1, -1), torch.full((1, 1), rate), ones, ones
        out = selective_scan(*tensors, delta_softplus=True)
        expected, _ = reference.forward(*(t.double() for t in tensors), delta_softplus=True)
        torch.testing.assert_close(out, expected.float(), rtol=2e-6, atol=1e-37)
    state = torch.randn(1, 1, 1)
    _, last = selective_scan(
        u, 0 * u, torch.full((1, 1), -1.0), ones, ones, initial_state=state, return_final_state=True
    )
    torch.testing.assert_close(last, state)


def test_one_graph_that_makes_its_projection() -> None:
    """Whose sizes are numbers, where those of arguments are symbols."""
    torch._dynamo.reset()
    u, delta, C = torch.randn(2, 4, 9), torch.rand(2, 4, 9), torch.randn(2, 3, 9)

    def of(u: Tensor, delta: Tensor, C: Tensor) -> Tensor:
        return selective_scan(u, delta, -torch.ones(4, 3), torch.ones(4, 3), C)

    compiled = torch.compile(of, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(u, delta, C), of(u, delta, C))


@pytest.mark.parametrize("training", [False, True], ids=["", "training"])
def test_what_is_kept_of_a_trace_for_a_gpu(training: bool) -> None:
    """Kernels leave a state before every 32 steps; plain torch leaves none."""
    with FakeTensorMode():
        for device, kept in (("cuda", (2, 3, 4, 3) if training else (0,)), ("cpu", (0,))):
            u = torch.empty(2, 4, 70, device=device)
            A, B = torch.empty(4, 3, device=device), torch.empty(2, 1, 3, 70, device=device)
            outputs = OP(u, u, A, B, B, *[None] * 5, True, "auto", training)
            assert [x.device.type for x in outputs] == [device] * 3
            assert outputs[2].shape == kept


def test_scans_that_it_is_composed_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor has all of the states; and the reference is asked for in scans, too."""
    lengths, backends, scan = set[int](), [], composed.linear_scan

    def watched(gates: Tensor, tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        lengths.add(tokens.shape[-1])
        backends.append(kwargs.get("backend"))
        return scan(gates, tokens, *args, **kwargs)

    monkeypatch.setattr(composed, "linear_scan", watched)
    call = DRAWN.draw("groups", (2, 6, 50, 3), torch.float64)
    DRAWN.run(**call.leaves().arguments)[0].sum().backward()
    assert max(lengths) == 16
    tensors = arguments_of(call, *NAMES[:5])
    for backend in ("auto", "reference"):
        backends.clear()
        normal = normalised(*tensors, None, None, None, None, None, False, backend)
        composed.forward(normal, Options(False, backend))
        assert backends == [backend] * 4
