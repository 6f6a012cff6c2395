"""``selective_state_update`` on the CPU: one step against a loop in float64, what it refuses, and torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import StepTests
from torch import Tensor

from scan_registry import selective_scan, selective_state_update

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float64: 1e-12}
TENSORS = ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias")


def drawn(batch: int, channels: tuple[int, ...], states: int, groups: int = 0) -> dict[str, Tensor]:
    """Arguments; without a dimension of groups if they are 0."""
    of_projection = (batch, groups, states) if groups else (batch, states)
    return {
        "state": torch.randn(batch, *channels, states),
        "x": torch.randn(batch, *channels),
        "dt": torch.rand(batch, *channels) / 2,
        "A": -torch.rand(*channels, states) * 4,
        "B": torch.randn(of_projection),
        "C": torch.randn(of_projection),
        "D": torch.randn(channels),
        "z": torch.randn(batch, *channels),
        "dt_bias": torch.rand(channels),
    }


def plainly(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The new state and the output in float64, one batch, head and channel after the other."""
    wide = {n: t.double() if n in TENSORS else t for n, t in given.items() if t is not None}
    state = wide["state"].clone()
    x, z, bias, D, indices = (
        wide.get(name) for name in ("x", "z", "dt_bias", "D", "state_batch_indices")
    )
    assert x is not None
    out = torch.zeros_like(x)
    for b in range(x.shape[0]):
        row = b if indices is None else int(indices[b])
        if not 0 <= row < state.shape[0]:
            continue
        for place in torch.cartesian_prod(*map(torch.arange, x.shape[1:])).reshape(-1, x.dim() - 1):
            at = tuple(place.tolist())
            size = wide["dt"][b][at] + (0 if bias is None else bias[at])
            if given.get("dt_softplus"):
                size = torch.log1p(torch.exp(size)) if size <= 20 else size

            def projection(name: str, at: tuple[int, ...] = at, b: int = b) -> Tensor:
                found = wide[name][b]
                if found.dim() == 1:
                    return found
                return found[at[0] // (x.shape[1] // found.shape[0])]

            new = torch.exp(size * wide["A"][at]) * state[row][at]
            new = new + size * projection("B") * x[b][at]
            state[row][at] = new
            y = (projection("C") * new).sum() + (0 if D is None else D[at] * x[b][at])
            out[b][at] = y if z is None else y * z[b][at] * torch.sigmoid(z[b][at])
    return state, out


def assert_close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    assert got.shape == expected.shape
    assert (got.double() - expected).norm() <= TOLERANCE[dtype] * expected.norm().clamp_min(1e-9)


SHAPES: dict[str, tuple[int, tuple[int, ...], int, int]] = {
    "channels": (3, (6,), 16, 0),
    "groups of channels": (2, (6,), 5, 3),
    "heads": (2, (4, 3), 8, 0),
    "groups of heads": (2, (4, 3), 17, 2),
    "one of each": (1, (1,), 1, 1),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_matches_a_loop(shape: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    given: dict[str, Any] = {name: t.to(dtype) for name, t in drawn(*shape).items()}
    for left_out in ((), ("z",), ("D", "dt_bias"), ("z", "D", "dt_bias")):
        for softplus in (True, False):
            call = {n: t for n, t in given.items() if n not in left_out}
            call["dt_softplus"] = softplus
            state, out = plainly(call)
            call["state"] = call["state"].clone()
            found = selective_state_update(**call)
            assert_close(found, out, dtype)
            assert_close(call["state"], state, dtype)


def test_each_tensor_has_a_dtype_of_its_own() -> None:
    torch.manual_seed(0)
    given = drawn(2, (4, 3), 8, 2)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for shift in range(3):
        call: dict[str, Any] = {
            name: t.to(dtypes[(number + shift) % 3])
            for number, (name, t) in enumerate(given.items())
        }
        state, out = plainly(call)
        found = selective_state_update(**call)
        assert_close(found, out, call["x"].dtype)
        assert_close(call["state"], state, call["state"].dtype)


@pytest.mark.parametrize("number", [torch.int32, torch.int64], ids=str)
def test_indices_choose_rows_and_skip(number: torch.dtype) -> None:
    torch.manual_seed(0)
    given: dict[str, Any] = drawn(4, (5,), 7)
    given["state"] = torch.randn(6, 5, 7)
    given["state_batch_indices"] = torch.tensor([5, -1, 0, -9], dtype=number)
    before = given["state"].clone()
    state, out = plainly(given)
    found = selective_state_update(**given)
    assert_close(found, out, torch.float32)
    assert_close(given["state"], state, torch.float32)
    assert (found[[1, 3]] == 0).all()
    assert torch.equal(given["state"][1:5], before[1:5])
    assert not torch.equal(given["state"], before)


def test_expanded_as_in_mamba_2() -> None:
    """A, dt, dt_bias and D have one number for each head."""
    torch.manual_seed(0)
    given: dict[str, Any] = drawn(2, (4, 3), 8, 1)
    given["A"] = given["A"][:, :1, :1].expand(-1, 3, 8)
    given["dt"] = given["dt"][:, :, :1].expand(-1, -1, 3)
    for name in ("dt_bias", "D"):
        given[name] = given[name][:, :1].expand(-1, 3)
    dense = {name: t.clone() for name, t in given.items()}
    out = selective_state_update(**given, dt_softplus=True)
    assert torch.equal(selective_state_update(**dense, dt_softplus=True), out)
    assert torch.equal(dense["state"], given["state"])


def test_strides_do_not_matter() -> None:
    torch.manual_seed(0)
    given = drawn(3, (4, 5), 6, 2)
    spread = {
        name: t.transpose(0, -1).contiguous().transpose(0, -1).repeat_interleave(2, 0)[::2]
        for name, t in given.items()
    }
    out = selective_state_update(**given, dt_softplus=True)
    torch.testing.assert_close(selective_state_update(**spread, dt_softplus=True), out)
    torch.testing.assert_close(spread["state"], given["state"])


@pytest.mark.parametrize("softplus", [False, True])
def test_steps_are_those_of_a_selective_scan(softplus: bool) -> None:
    torch.manual_seed(0)
    batch, channels, time, states = 2, 6, 9, 4
    u, delta, z = torch.randn(3, batch, channels, time)
    if not softplus:
        delta = delta.abs() / 4
    B, C = torch.randn(2, batch, 2, states, time)
    A, D, bias = -torch.rand(channels, states), torch.randn(channels), torch.rand(channels)
    expected, last = selective_scan(
        u, delta, A, B, C, D, z, bias, softplus, return_final_state=True
    )
    state = torch.zeros(batch, channels, states)
    found = [
        selective_state_update(
            *(state, u[..., t], delta[..., t], A, B[..., t], C[..., t], D, z[..., t], bias),
            dt_softplus=softplus,
        )
        for t in range(time)
    ]
    torch.testing.assert_close(torch.stack(found, -1), expected)
    torch.testing.assert_close(state, last)


@pytest.mark.parametrize("shape", [(0, (3,), 4, 0), (2, (0,), 4, 0), (2, (2, 0), 4, 1)], ids=str)
def test_empty(shape: Any) -> None:
    given: dict[str, Any] = drawn(*shape)
    assert selective_state_update(**given).shape == given["x"].shape
    if shape[0] == 0:
        given["state"] = torch.randn(3, *shape[1], shape[2])
        given["state_batch_indices"] = torch.zeros(0, dtype=torch.int32)
        before = given["state"].clone()
        assert selective_state_update(**given).shape == given["x"].shape
        assert torch.equal(given["state"], before)


# --- In torch ---------------------------------------------------------------------------------


def positional(given: dict[str, Any], indices: Tensor | None = None) -> tuple[Any, ...]:
    return (*(given.get(name) for name in TENSORS), indices, *[None] * 5)


@pytest.mark.parametrize("indices", [None, torch.tensor([2, -1])], ids=["rows", "indices"])
def test_opcheck(indices: Tensor | None) -> None:
    given = drawn(2, (4, 3), 8, 2)
    if indices is not None:
        given["state"] = torch.randn(3, 4, 3, 8)
    operator = torch.ops.scan_registry.selective_state_update.default
    torch.library.opcheck(operator, (*positional(given, indices), True, -1, "auto"))


def test_the_operator_refuses_derivatives() -> None:
    tensors = drawn(2, (6,), 8)
    tensors["A"].requires_grad_()
    operator = torch.ops.scan_registry.selective_state_update.default
    with pytest.raises(RuntimeError, match=r"no derivative.*no_grad"):
        operator(*positional(tensors), False, -1, "auto")


class TestStep(StepTests):
    name, learned = "selective_state_update", "A"

    def draw(self) -> dict[str, Any]:
        return drawn(2, (6,), 8)

    def run(self, **arguments: Any) -> Tensor:
        return selective_state_update(**arguments)

    refused = {
        "no tensor": ({"x": 3.0}, TypeError, "x must be a torch.Tensor, not float"),
        "nothing": ({"B": None}, TypeError, "B must be a torch.Tensor, not NoneType"),
        "dtype": ({"dt": torch.zeros(2, 6).int()}, TypeError, "dt has dtype int32; accepted are"),
        "complex": (
            {"A": torch.zeros(6, 8, dtype=torch.complex64)},
            TypeError,
            "A has dtype complex64; accepted are float32",
        ),
        "float64 beside others": (
            {"state": torch.zeros(2, 6, 8).double()},
            TypeError,
            "x has dtype float32; accepted are float64 with a state of float64",
        ),
        "indices": (
            {"state_batch_indices": torch.zeros(2)},
            TypeError,
            "state_batch_indices has dtype float32; accepted are int32, int64",
        ),
        "shape of indices": (
            {"state_batch_indices": torch.full((2, 1, 1), -1)},
            ValueError,
            r"state_batch_indices has shape \(2, 1, 1\); it must be \(batch,\) or \(batch, tokens\)",
        ),
        "rank": (
            {"state": torch.zeros(6, 8)},
            ValueError,
            r"state has shape \(6, 8\); it must be",
        ),
        "states": (
            {"state": torch.zeros(2, 6, 257)},
            ValueError,
            "accepted are 1 to 256 states",
        ),
        "expanded": (
            {"state": torch.zeros(2, 6, 1).expand(-1, -1, 8)},
            ValueError,
            "state is expanded.*state.clone",
        ),
        "x": ({"x": torch.zeros(2, 5)}, ValueError, r"x has shape \(2, 5\).*must be \(2, 6\)"),
        "batch": (
            {"state_batch_indices": torch.full((3,), -1)},
            ValueError,
            r"x has shape \(2, 6\); for .* and 3 state_batch_indices it must be \(3, 6\)",
        ),
        "A": ({"A": torch.zeros(6, 4)}, ValueError, r"A has shape \(6, 4\).*must be \(6, 8\)"),
        "D": ({"D": torch.zeros(5)}, ValueError, r"D has shape \(5,\).*must be \(6,\)"),
        "B": (
            {"B": torch.zeros(2, 4, 8)},
            ValueError,
            r"B has shape \(2, 4, 8\).*groups that divide the 6 channels",
        ),
        "groups": (
            {"B": torch.zeros(2, 3, 8), "C": torch.zeros(2, 2, 8)},
            ValueError,
            "B has 3 groups, C 2",
        ),
        "device": ({"z": torch.zeros(2, 6, device="meta")}, ValueError, "z is on meta, state on"),
        "layout": ({"x": torch.zeros(2, 6).to_sparse()}, TypeError, r"sparse; .*x\.to_dense\(\)"),
        "backend": ({"backend": "rocm"}, ValueError, "backend is 'rocm'; accepted are auto"),
        "cuda": ({"backend": "cuda"}, ValueError, "needs a CUDA device; state is on cpu"),
        "softplus": ({"dt_softplus": "yes"}, TypeError, "dt_softplus is 'yes'; it must be a bool"),
    }
