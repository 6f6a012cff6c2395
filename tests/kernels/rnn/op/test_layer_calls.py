"""What a call of a recurrent layer on a GPU does beside its kernel, which is played on the CPU: how it is found again, what is
copied, and what its results share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pretending import Runs, flat, pretend_gpu
from torch import Tensor

from scan_registry import nn
from scan_registry.kernels.rnn.op import layer as rnn_layer
from scan_registry.ops import constants

KINDS = ("LSTM", "GRU", "RNN", "SLSTM")
TIME, BATCH, FEATURES, HIDDEN = 4, 3, 8, 32


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """What kernels were given, which are played on the CPU."""
    return pretend_gpu(monkeypatch)


def make(kind: str, **options: Any) -> Any:
    return getattr(nn, kind)(FEATURES, HIDDEN, **options)


def draw(module: Any) -> Tensor:
    return torch.randn(*((BATCH, TIME) if module.batch_first else (TIME, BATCH)), FEATURES)


@pytest.mark.skipif(
    not hasattr(Tensor, "__dlpack_c_exchange_api__"), reason="torch has no table for C"
)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_calls_without_gradients_are_found_in_c(
    kind: str, batch_first: bool, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unwanted(*_: Any) -> Any:
        raise AssertionError

    module = make(kind, batch_first=batch_first)
    x = draw(module)
    tracked = module(x)
    hx = tracked[1]
    loose = torch.cat((x, x), 2)[..., :FEATURES]
    calls = (x,), (x, hx), (loose, hx)
    with torch.no_grad():
        known = [module(*call) for call in calls]
        monkeypatch.setattr(rnn_layer, "_plan", unwanted)
        monkeypatch.setattr(type(module), "_layers", unwanted)
        found = [module(*call) for call in calls]
        for one, other in zip(flat(found), flat(known), strict=True):
            assert torch.equal(one, other)
    assert torch.equal(found[2][0], found[1][0])
    for one, other in zip(flat(found[0]), flat(tracked), strict=True):
        assert torch.equal(one, other)
        assert not one.requires_grad
        assert other.requires_grad


def test_what_a_plan_depends_on_is_looked_at_in_every_call(runs: Runs) -> None:
    """So that what checks refuse is refused also after a call that they accept."""
    module = make("LSTM")
    x = draw(module)
    with torch.no_grad():
        out, (h, c) = module(x)
        for wrong, error in (
            ((x.double(),), ValueError),
            ((x[..., :-1],), RuntimeError),
            ((x, h), TypeError),
            ((x, (h,)), TypeError),
            ((x, (h, None)), TypeError),
            ((x, (None, None)), TypeError),
            ((x, (h, c[:, :1])), RuntimeError),
            ((x, (h, c.double())), RuntimeError),
        ):
            with pytest.raises(error):
                module(*wrong)
        with pytest.raises(ValueError, match="reset_hx"):
            module(x, reset_hx=(h, c))
        assert torch.equal(module(x)[0], out)


@pytest.mark.parametrize("kind", KINDS)
def test_results_share_no_values(kind: str, runs: Runs) -> None:
    """Results of calls without gradients may be changed in place, in value and in shape."""
    module = make(kind)
    x = draw(module)
    with torch.no_grad():
        results = flat(module(x))
        for k, result in enumerate(results):
            others = [each for j, each in enumerate(results) if j != k]
            before = [each.clone() for each in others]
            result.add_(1)
            for one, other in zip(others, before, strict=True):
                assert torch.equal(one, other)
    assert not any(result._is_view() for result in results)
    with torch.no_grad():
        shapes = [result.unsqueeze_(0).shape[0] for result in results]
    assert shapes == [1] * len(results)


@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_batches_first_is_not_copied(kind: str, runs: Runs) -> None:
    module = make(kind, batch_first=True)
    x = draw(module)
    with torch.no_grad():
        found = module(x)
        module.batch_first = False
        expected = module(x.transpose(0, 1).contiguous())
    assert torch.equal(found[0], expected[0].transpose(0, 1))
    for one, other in zip(flat(found[1]), flat(expected[1]), strict=True):
        assert torch.equal(one, other)
    (first, given), (_, others) = runs
    gates = given["inputs"]
    assert gates.shape[:2] == (BATCH, TIME)
    assert others["inputs"].shape[:2] == (TIME, BATCH)
    assert first.strides[:2] == gates.stride()[:2]


@pytest.mark.parametrize(("batch", "time"), [(1, 1), (1, TIME), (BATCH, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_one_batch_or_one_step(kind: str, batch: int, time: int, runs: Runs) -> None:
    """Of which both orders in memory are the same."""
    module = make(kind, batch_first=True)
    x = torch.randn(batch, time, FEATURES)
    found = module(x)
    with torch.no_grad():
        for _ in range(2):
            again = module(x)
            assert again[0].shape == (batch, time, HIDDEN)
            for one, other in zip(flat(again), flat(found), strict=True):
                assert torch.equal(one, other)
    assert len(runs) == 3


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_of_gru_are_put_in_order_once(dtype: torch.dtype, bias: bool, runs: Runs) -> None:
    """By one operator, whose result the backward pass reads, too."""
    module = make("GRU", bias=bias).to(dtype)
    x = draw(module).to(dtype)
    module(x)[0].sum().backward()
    (_, forward), (_, backward) = runs
    assert backward["recurrent"] is forward["recurrent"]
    r, z, n = module.weight_hh_l0.detach().chunk(3)
    assert torch.equal(forward["recurrent"][: 3 * HIDDEN], torch.cat((n, r, z)))
    expected = torch.zeros(4 * HIDDEN)
    if bias:
        r, z, n = module.bias_hh_l0.detach().float().chunk(3)
        expected[: 3 * HIDDEN] = torch.cat((n, r, z))
    assert torch.equal(forward["bias"].flatten(), expected)


def test_other_cells_take_weights_as_they_lie(runs: Runs) -> None:
    for kind in ("LSTM", "RNN", "SLSTM"):
        module = make(kind)
        module(draw(module))[0].sum().backward()
        for _, given in runs[-2:]:
            assert given["recurrent"].data_ptr() == module.weight_hh_l0.data_ptr()
        assert runs[-2][1]["bias"].data_ptr() == module.bias_hh_l0.data_ptr()


def test_parametrized_weights(runs: Runs) -> None:
    class Half(torch.nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight / 2

    for kind in KINDS:
        module, plain = make(kind), make(kind)
        plain.load_state_dict(module.state_dict())
        with torch.no_grad():
            plain.weight_hh_l0.mul_(0.5)
        torch.nn.utils.parametrize.register_parametrization(module, "weight_hh_l0", Half())
        x = draw(module)
        with torch.no_grad():
            assert torch.equal(module(x)[0], plain(x)[0])
        swapped = torch.func.functional_call(plain, {"bias_hh_l0": plain.bias_hh_l0 + 1}, (x,))[0]
        assert not torch.allclose(swapped, plain(x)[0])


def test_zeros_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "_zeros", {})
    wanted = torch.device("cpu"), torch.float32, 48
    with torch.inference_mode():
        one = constants.zeros(*wanted)
    assert one is constants.zeros(*wanted)
    assert not one.is_inference()
    assert torch.equal(one, torch.zeros(48))
    monkeypatch.setattr(constants, "is_capturing", lambda tensor: True)
    other = torch.device("cpu"), torch.float32, 32
    assert constants.zeros(*other) is not constants.zeros(*other)
    assert constants.zeros(*wanted) is one
    assert constants.zeros(*wanted[:2], 3, 16).shape == (3, 16)


def test_projections_are_left_to_others(runs: Runs) -> None:
    for bias in (False, True):
        module = nn.LSTM(FEATURES, HIDDEN, proj_size=16, bias=bias)
        with torch.no_grad():
            assert module(draw(module))[0].shape == (TIME, BATCH, 16)
    assert not runs
