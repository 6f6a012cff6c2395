"""``Mamba2``: mamba_ssm's constructor, parameters and initial values, and its output in a loop over time."""

from __future__ import annotations

import copy
import inspect
import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layers import EACH_DTYPE, check_steps_in_a_graph
from mamba2_blocks import BOUNDS, LENGTH, block, each_option, given, made, numbers
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import softplus
from torch.utils.checkpoint import checkpoint

from scan_registry import nn

# --- The constructor ---------------------------------------------------------------------------


def test_parameters_are_mamba_ssms() -> None:
    m = nn.Mamba2(40, d_state=6, d_conv=3, expand=3, headdim=10, ngroups=2, bias=True)
    assert {name: tuple(value.shape) for name, value in m.state_dict().items()} == {
        "dt_bias": (12,),
        "A_log": (12,),
        "D": (12,),
        "in_proj.weight": (276, 40),
        "in_proj.bias": (276,),
        "conv1d.weight": (144, 1, 3),
        "conv1d.bias": (144,),
        "norm.weight": (120,),
        "out_proj.weight": (40, 120),
        "out_proj.bias": (40,),
    }
    assert nn.Mamba2(64, D_has_hdim=True).D.shape == (128,)
    assert "conv1d.bias" not in nn.Mamba2(64, conv_bias=False).state_dict()
    assert "norm.weight" not in nn.Mamba2(64, rmsnorm=False).state_dict()
    assert {"in_proj.bias", "out_proj.bias"}.isdisjoint(nn.Mamba2(64).state_dict())
    part = nn.Mamba2(64, d_ssm=64, d_state=16, expand=3)
    assert part.in_proj.weight.shape == (2 * 128 + 64 + 96 + 1, 64)
    assert part.out_proj.weight.shape == (64, 192)
    assert part.norm.weight.shape == (64,)


def test_the_constructor_is_mamba_ssms() -> None:
    parameters = inspect.signature(nn.Mamba2).parameters.values()
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == ["backend"]
    found = " ".join(
        p.name if p.default is p.empty else f"{p.name}={p.default}".replace(" ", "")
        for p in parameters
        if p.kind is not p.KEYWORD_ONLY
    )
    assert found == (
        "d_model d_state=128 d_conv=4 conv_init=None expand=2 headdim=64 d_ssm=None ngroups=1 A_init_range=(1,16) "
        "D_has_hdim=False rmsnorm=True norm_before_gate=False dt_min=0.001 dt_max=0.1 dt_init_floor=0.0001 "
        "dt_limit=(0.0,inf) bias=False conv_bias=True chunk_size=256 use_mem_eff_path=True layer_idx=None "
        "process_group=None sequence_parallel=True device=None dtype=None"
    )


def test_initial_values() -> None:
    torch.manual_seed(1)
    m = nn.Mamba2(2048, headdim=4, dt_min=0.01, dt_max=0.2, A_init_range=(2, 8), conv_init=0.5)
    rates = m.A_log.detach().exp()
    assert 2 <= float(rates.min()) < 2.1
    assert 7.9 < float(rates.max()) <= 8.001
    assert bool((m.D == 1).all())
    assert bool((m.norm.weight == 1).all())
    sizes = softplus(m.dt_bias.detach())
    assert 0.01 * 0.999 <= float(sizes.min()) < 0.011
    assert 0.18 < float(sizes.max()) <= 0.2 * 1.001
    assert math.isclose(float(sizes.log().mean()), math.log(0.01 * 0.2) / 2, rel_tol=0.05)
    assert 0.49 < float(m.conv1d.weight.detach().abs().max()) <= 0.5
    floor = nn.Mamba2(64, dt_min=1e-6, dt_max=1e-5, dt_init_floor=1e-4).dt_bias
    torch.testing.assert_close(softplus(floor), torch.full((2,), 1e-4))


def test_a_seed_draws_in_mamba_ssms_order() -> None:
    """Projection, convolution, its other initialisation, step sizes, rates, and the projection back."""
    torch.manual_seed(5)
    m = nn.Mamba2(32, d_state=4, headdim=8, conv_init=1.0)
    torch.manual_seed(5)
    first = torch.nn.Linear(32, 2 * 64 + 8 + 8, bias=False)
    conv = torch.nn.Conv1d(72, 72, 4, groups=72)
    torch.nn.init.uniform_(conv.weight, -1.0, 1.0)
    steps = torch.exp(torch.rand(8) * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
    rates = torch.empty(8).uniform_(1, 16)
    last = torch.nn.Linear(64, 32, bias=False)
    for ours, theirs in zip((m.in_proj, m.conv1d, m.out_proj), (first, conv, last), strict=True):
        assert torch.equal(ours.weight, theirs.weight)
    torch.testing.assert_close(softplus(m.dt_bias), steps)
    assert torch.equal(m.A_log, rates.log())


def test_what_training_programs_ask_parameters_for() -> None:
    kept = [
        name
        for name, p in nn.Mamba2(64).named_parameters()
        if getattr(p, "_no_weight_decay", False)
    ]
    assert kept == ["dt_bias", "A_log", "D"]


def test_dtype_and_device() -> None:
    m = nn.Mamba2(64, d_state=16, dtype=torch.bfloat16, device="cpu")
    dtypes = {name: value.dtype for name, value in m.state_dict().items()}
    assert dtypes.pop("D") == torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}
    assert m(torch.randn(2, 5, 64).bfloat16()).dtype == torch.bfloat16
    meta = nn.Mamba2(64, device="meta")
    assert {value.device.type for value in meta.state_dict().values()} == {"meta"}


# --- What it computes --------------------------------------------------------------------------


@each_option
def test_it_is_the_block(options: dict[str, Any]) -> None:
    m, exact = made(**options), made(**options)
    hidden = given()
    ours, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    outputs, expected = m(ours), block(exact, theirs)
    torch.testing.assert_close(outputs, expected)
    weight = torch.randn_like(outputs)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (m, exact)]
    (outputs * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    for (name, one), other in zip(m.named_parameters(), exact.parameters(), strict=True):
        assert one.grad is not None, name
        torch.testing.assert_close(one.grad, other.grad, msg=name)
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(m(hidden), block(exact, hidden))


def test_batch_and_time_in_one_dimension() -> None:
    m, hidden = made(), given()
    y = m(hidden.flatten(0, 1), seqlen=LENGTH)
    assert torch.equal(y, m(hidden).flatten(0, 1))
    with pytest.raises(
        ValueError, match=r"u of size \(batch \* seqlen, 8\) with seqlen=5, got \(24, 8\)"
    ):
        m(hidden.flatten(0, 1), seqlen=5)


def parts(hidden: Tensor) -> list[Tensor]:
    """Those that are not empty."""
    return [hidden[:, begin:end] for begin, end in pairwise(BOUNDS) if begin < end]


@pytest.mark.parametrize("way", ["seq_idx", "cu_seqlens", "both"])
def test_packed_sequences_are_each_alone(way: str) -> None:
    m, hidden = made(ngroups=2), given(1).requires_grad_()
    packing = {"seq_idx": numbers(), "cu_seqlens": torch.tensor(BOUNDS)}
    if way != "both":
        packing = {way: packing[way]}
    outputs = m(hidden, **packing)
    expected = torch.cat([block(m, part) for part in parts(hidden)], 1)
    torch.testing.assert_close(outputs, expected)
    weight = torch.randn_like(outputs)
    leaves = [hidden, *m.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad((outputs * weight).sum(), leaves),
        torch.autograd.grad((expected * weight).sum(), leaves),
    )


def test_padding_reaches_no_step() -> None:
    m, hidden = made(), given(1)
    marked = torch.tensor([-1, -1, *([0] * (LENGTH - 2))]).unsqueeze(0)
    other = torch.cat([torch.full((1, 2, 8), 9.0).double(), hidden[:, 2:]], 1)
    outputs = m(hidden, seq_idx=marked)[:, 2:]
    torch.testing.assert_close(outputs, block(m, hidden[:, 2:]))
    torch.testing.assert_close(m(other, seq_idx=marked)[:, 2:], outputs)


def test_a_wrapped_convolution_takes_one_sequence_a_row() -> None:
    m, hidden = made(), given(1)
    expected = m(hidden)
    m.conv1d.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(m(hidden), expected)
    with pytest.raises(ValueError, match="conv1d is wrapped, hooked or no Conv1d"):
        m(hidden, cu_seqlens=torch.tensor(BOUNDS))


# --- What it refuses and prints ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"d_model": 0}, ValueError, "d_model must be greater than zero"),
        ({"d_state": 257}, ValueError, "d_state should be at most 256, got: 257"),
        ({"d_conv": 9}, ValueError, "d_conv should be from 2 to 8, got: 9"),
        ({"headdim": 7}, ValueError, r"headdim should divide expand \* d_model, got: 7 and 128"),
        ({"headdim": 64.0}, TypeError, "headdim should be of type int, got: float"),
        ({"d_ssm": 96}, ValueError, "headdim should divide d_ssm, got: 64 and 96"),
        (
            {"d_ssm": 192},
            ValueError,
            r"d_ssm should be at most expand \* d_model, here 128, got: 192",
        ),
        ({"d_ssm": "all"}, TypeError, "d_ssm should be of type int or None, got: str"),
        ({"ngroups": 3}, ValueError, "ngroups should divide the heads, got: 3 and 2"),
        ({"A_init_range": (0, 1)}, ValueError, "A_init_range should be two numbers above 0"),
        ({"A_init_range": 1}, TypeError, "A_init_range should be two numbers, got: 1"),
        ({"dt_limit": (1.0, 0.5)}, ValueError, "dt_limit should not begin above its end"),
        ({"conv_init": "zeros"}, TypeError, "conv_init should be a number or None"),
        ({"conv_init": -1}, ValueError, "conv_init should be 0 or more"),
        ({"dt_min": 0.2}, ValueError, "dt_min should be at most dt_max, got: 0.2 and 0.1"),
        ({"rmsnorm": 1}, TypeError, "rmsnorm should be of type bool, got: int"),
        ({"process_group": object()}, ValueError, "process_group should be None"),
        ({"dtype": torch.int32}, TypeError, "dtype should be one of"),
        ({"backend": "metal"}, ValueError, "backend should be one of"),
    ],
)
def test_constructors_refuse(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        nn.Mamba2(**{"d_model": 64} | options)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"u": [1.0]}, TypeError, "Mamba2: Expected u to be a Tensor, got list"),
        ({"u": torch.zeros(3, 8)}, ValueError, r"u of size \(batch, time, 8\), got \(3, 8\)"),
        (
            {"u": torch.zeros(2, 3, 8).float()},
            TypeError,
            "of dtype torch.float64, as the parameters",
        ),
        ({"seqlen": True}, TypeError, "Expected seqlen of type int, got bool"),
        (
            {"seq_idx": torch.zeros(2, 4).int()},
            ValueError,
            r"seq_idx of size \(2, 3\), got \(2, 4\)",
        ),
        ({"seq_idx": torch.zeros(2, 3)}, TypeError, "seq_idx of dtype torch.int32, torch.int64"),
        ({"seq_idx": [0]}, TypeError, "Expected seq_idx to be a Tensor, got list"),
        (
            {"cu_seqlens": torch.tensor([0, 3])},
            ValueError,
            r"Mamba2: Expected u of one batch row with cu_seqlens, got 2 rows of 3 steps, \(2, 3, 8\)",
        ),
        (
            {"cu_seqlens": torch.tensor([0, 2, 6])},
            ValueError,
            r"seq_idx of shape \(2, 3\) .* u.reshape\(1, 6, 8\), and add 3 times the number",
        ),
        (
            {"u": torch.zeros(1, 3, 8).double(), "cu_seqlens": torch.tensor([0, 4])},
            ValueError,
            "cu_seqlens",
        ),
    ],
)
def test_inputs_that_do_not_fit(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        made()(**{"u": torch.zeros(2, 3, 8).double()} | arguments)


def test_states_that_do_not_fit() -> None:
    m, x = made(), torch.zeros(2, 1, 8).double()
    conv, ssm = m.allocate_inference_cache(2, 1)
    with pytest.raises(ValueError, match=r"conv_state of size \(2, 26, 4\), got \(2, 26, 3\)"):
        m.step(x, conv[..., 1:], ssm)
    with pytest.raises(ValueError, match=r"ssm_state of size \(2, 4, 4, 5\), got \(1, 4, 4, 5\)"):
        m(x, states=(conv, ssm[:1]))
    with pytest.raises(ValueError, match=r"conv_state of size \(3, 26, 4\), got \(2, 26, 4\)"):
        m(x[:1], cu_seqlens=torch.tensor([0, 0, 1, 1]), states=(conv, ssm))
    with pytest.raises(ValueError, match="Expected hidden_states of one step, got 2"):
        m.step(torch.zeros(2, 2, 8).double(), conv, ssm)
    params = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})
    with pytest.raises(ValueError, match="Expected layer_idx in the constructor"):
        m(x, inference_params=params)


def test_it_says_what_it_is() -> None:
    m = nn.Mamba2(64, d_ssm=64, layer_idx=2, backend="reference")
    assert m.extra_repr() == (
        "64, d_state=128, d_conv=4, expand=2, headdim=64, ngroups=1, d_ssm=64, layer_idx=2, backend='reference'"
    )


@pytest.mark.parametrize("way", ["plain", "checkpointed", "compiled"])
def test_it_trains_in_mixed_precision(way: str) -> None:
    """Parameters and gradients stay in float32, and the loss falls as it does in float32. What was trained is copied whole."""
    hidden = given().detach().float()
    target = torch.randn_like(hidden)

    def train(m: nn.Mamba2, call: Any, mixed: bool) -> list[float]:
        optimizer, losses = torch.optim.AdamW(m.parameters(), lr=3e-2), []
        for _ in range(12):
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                loss = functional.mse_loss(call(hidden).float(), target)
            loss.backward()
            assert {p.grad.dtype for p in m.parameters() if p.grad is not None} == {torch.float32}
            assert all(p.grad is not None for p in m.parameters())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        return losses

    m = made(dtype=torch.float32)
    calls = {
        "plain": m,
        "checkpointed": lambda x: checkpoint(m, x, use_reentrant=False),
        "compiled": torch.compile(m, fullgraph=True, backend="aot_eager"),
    }
    exact = copy.deepcopy(m)
    losses, expected = train(m, calls[way], True), train(exact, exact, False)
    assert expected[-1] < 0.6 * expected[0]
    assert losses == pytest.approx(expected, rel=0.05)
    other = made(1, dtype=torch.float32)
    other.load_state_dict(m.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(other(hidden), m(hidden))
        assert torch.equal(copy.deepcopy(m)(hidden), m(hidden))


# --- On a GPU ---------------------------------------------------------------------------------


class TestOnAGpu:
    pytestmark = pytest.mark.gpu

    @EACH_DTYPE
    @pytest.mark.usefixtures("exact_convolutions")
    def test_it_is_the_block(self, dtype: torch.dtype, tolerance: float) -> None:
        torch.manual_seed(0)
        m = nn.Mamba2(64, d_state=64, headdim=32, ngroups=2, bias=True, device="cuda", dtype=dtype)
        exact = copy.deepcopy(m).double().cpu()
        hidden = torch.randn(3, 150, 64, device="cuda").to(dtype).requires_grad_()
        wide_hidden = hidden.detach().double().cpu().requires_grad_()
        # The module on the CPU, by torch's functions: gradients of few numbers that are sums over all steps err by more.
        plain, plain_hidden = copy.deepcopy(m).cpu(), hidden.detach().cpu().requires_grad_()
        expected = block(exact, wide_hidden)
        weight = torch.randn_like(expected)
        (expected * weight).sum().backward()
        results: list[list[Tensor]] = []
        for module, x in ((m, hidden), (plain, plain_hidden)):
            out = module(x)
            (out * weight.to(out)).sum().backward()
            gradients = [leaf.grad for leaf in (x, *module.parameters()) if leaf.grad is not None]
            results.append([t.detach().double().cpu() for t in (out, *gradients)])
        wanted = [expected, *(leaf.grad for leaf in (wide_hidden, *exact.parameters()))]
        for right, ours, of_torch in zip(wanted, *results, strict=True):
            assert right is not None
            size = right.detach().norm()
            errors = [float((result - right).norm() / size) for result in (ours, of_torch)]
            assert errors[0] <= max(tolerance, 2 * errors[1])

    def test_steps_in_a_graph(self) -> None:
        m = nn.Mamba2(64, d_state=64, headdim=32, device="cuda")
        hidden = torch.randn(4, LENGTH, 64, device="cuda")
        check_steps_in_a_graph(m, hidden)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_gradients_are_the_same_in_every_run(self, dtype: torch.dtype) -> None:
        m = nn.Mamba2(64, d_state=64, headdim=32, device="cuda", dtype=dtype)
        hidden = torch.randn(4, 300, 64, device="cuda", dtype=dtype)
        runs: list[list[Tensor]] = []
        for _ in range(3):
            m.zero_grad(set_to_none=True)
            m(hidden).float().square().sum().backward()
            runs.append([p.grad.clone() for p in m.parameters() if p.grad is not None])
        for run in runs[1:]:
            for one, other in zip(run, runs[0], strict=True):
                assert torch.equal(one, other)
