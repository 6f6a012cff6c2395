"""``Mamba``: mamba_ssm's constructor, parameters and initial values; its output in plain torch; and its caches.
``test_mamba2_generation.py`` has the generation that it shares with ``Mamba2``."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layers import EACH_DTYPE, check_steps_in_a_graph
from torch import Tensor
from torch.nn.functional import conv1d, linear, silu, softplus

from scan_registry import nn

LENGTH = 12
PARAMS = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})


def block(m: nn.Mamba, hidden: Tensor) -> Tensor:
    """What the module computes, from torch's operators and one step after the other."""
    x, z = linear(hidden, m.in_proj.weight, m.in_proj.bias).mT.chunk(2, 1)
    x = conv1d(x, m.conv1d.weight, m.conv1d.bias, padding=m.d_conv - 1, groups=m.d_inner)
    x = silu(x[..., : hidden.shape[1]])
    steps, B, C = m.x_proj(x.mT).split([m.dt_rank, m.d_state, m.d_state], -1)
    sizes, A = softplus(m.dt_proj(steps)), -m.A_log.exp()
    h = torch.zeros(hidden.shape[0], m.d_inner, m.d_state, dtype=hidden.dtype)
    outputs = []
    for t in range(hidden.shape[1]):
        size = sizes[:, t, :, None]
        h = torch.exp(size * A) * h + size * B[:, t, None] * x[:, :, t, None]
        outputs.append((h * C[:, t, None]).sum(-1) + m.D * x[:, :, t])
    return linear(torch.stack(outputs, 1) * silu(z.mT), m.out_proj.weight, m.out_proj.bias)


def wide(**options: Any) -> nn.Mamba:
    """In float64, ``A_log`` and ``D`` too."""
    return nn.Mamba(8, **options).double()


def test_parameters_are_mamba_ssms() -> None:
    m = nn.Mamba(40, d_state=5, d_conv=3, expand=3, bias=True)
    assert {name: tuple(value.shape) for name, value in m.state_dict().items()} == {
        "A_log": (120, 5),
        "D": (120,),
        "in_proj.weight": (240, 40),
        "in_proj.bias": (240,),
        "conv1d.weight": (120, 1, 3),
        "conv1d.bias": (120,),
        "x_proj.weight": (13, 120),
        "dt_proj.weight": (120, 3),
        "dt_proj.bias": (120,),
        "out_proj.weight": (40, 120),
        "out_proj.bias": (40,),
    }
    assert nn.Mamba(40, dt_rank=7).dt_proj.weight.shape == (80, 7)
    assert "conv1d.bias" not in nn.Mamba(8, conv_bias=False).state_dict()
    assert "in_proj.bias" not in nn.Mamba(8).state_dict()


def test_initial_values() -> None:
    torch.manual_seed(1)
    m = nn.Mamba(512, dt_min=0.01, dt_max=0.2, dt_scale=2.0)
    torch.testing.assert_close(m.A_log.exp(), torch.arange(1.0, 17.0).expand(1024, 16))
    assert bool((m.D == 1).all())
    sizes = softplus(m.dt_proj.bias.detach())
    assert 0.01 * 0.999 <= float(sizes.min()) < 0.011
    assert 0.19 < float(sizes.max()) <= 0.2 * 1.001
    assert math.isclose(float(sizes.log().mean()), math.log(0.01 * 0.2) / 2, rel_tol=0.05)
    most = 2 / math.sqrt(m.dt_rank)
    assert 0.99 * most < float(m.dt_proj.weight.detach().abs().max()) <= most
    constant = nn.Mamba(32, dt_init="constant").dt_proj.weight
    torch.testing.assert_close(constant, torch.full((64, 2), 2**-0.5))
    floor = nn.Mamba(32, dt_min=1e-6, dt_max=1e-5, dt_init_floor=1e-4).dt_proj.bias
    torch.testing.assert_close(softplus(floor), torch.full((64,), 1e-4))


def test_a_seed_draws_in_mamba_ssms_order() -> None:
    """Projection, convolution, two projections, step sizes, and the projection back."""
    torch.manual_seed(5)
    m = nn.Mamba(32)
    torch.manual_seed(5)
    drawn = [torch.nn.Linear(32, 128, bias=False), torch.nn.Conv1d(64, 64, 4, groups=64)]
    drawn.append(torch.nn.Linear(64, 34, bias=False))
    torch.nn.Linear(2, 64)
    steps = torch.empty(64, 2).uniform_(-(2**-0.5), 2**-0.5)
    uniform = torch.rand(64)
    drawn.append(torch.nn.Linear(64, 32, bias=False))
    for ours, theirs in zip((m.in_proj, m.conv1d, m.x_proj, m.out_proj), drawn, strict=True):
        assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(m.dt_proj.weight, steps)
    sizes = torch.exp(uniform * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
    torch.testing.assert_close(softplus(m.dt_proj.bias), sizes)


def test_what_training_programs_ask_parameters_for() -> None:
    m = nn.Mamba(8)
    kept = [n for n, p in m.named_parameters() if getattr(p, "_no_weight_decay", False)]
    assert kept == ["A_log", "D"]
    assert m.dt_proj.bias._no_reinit


def test_dtype_and_device() -> None:
    m = nn.Mamba(8, dtype=torch.bfloat16, device="cpu")
    result = {name: value.dtype for name, value in m.state_dict().items()}
    assert result.pop("A_log") == result.pop("D") == torch.float32
    assert set(result.values()) == {torch.bfloat16}
    assert m(torch.randn(2, 5, 8).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "options", [{}, {"conv_bias": False}, {"d_conv": 2, "d_state": 3, "expand": 1}], ids=str
)
def test_it_is_the_block(options: dict[str, Any]) -> None:
    m = wide(**options)
    hidden = torch.randn(2, LENGTH, 8).double().requires_grad_()
    actual, expected = m(hidden), block(m, hidden)
    torch.testing.assert_close(actual, expected)
    weight = torch.randn_like(actual)
    leaves = [hidden, *m.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad((actual * weight).sum(), leaves),
        torch.autograd.grad((expected * weight).sum(), leaves),
    )


# --- Generation -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((-1, 5), ValueError, "Expected batch_size of 0 or more, got -1"),
        ((2, -5), ValueError, "Expected max_seqlen of 0 or more, got -5"),
        ((2.5, 5), TypeError, "batch_size is 2.5; it must be an int"),
        ((2, None), TypeError, "max_seqlen is None; it must be an int"),
        (
            (2, 5, torch.int32),
            TypeError,
            "Expected dtype to be one of torch.float32, .* got torch.int32",
        ),
    ],
)
def test_a_cache_that_cannot_be_is_refused(
    arguments: tuple[Any, ...], error: type[Exception], words: str
) -> None:
    for block in (nn.Mamba(8), nn.Mamba2(16, headdim=16)):
        with pytest.raises(error, match=words):
            block.allocate_inference_cache(*arguments)


def test_the_caches_dtypes() -> None:
    m = nn.Mamba(8, dtype=torch.bfloat16)
    assert [s.dtype for s in m.allocate_inference_cache(1, 1)] == [torch.bfloat16, torch.float32]
    inputs = m.allocate_inference_cache(1, 1, dtype=torch.float16)
    assert {s.dtype for s in inputs} == {torch.float16}
    assert {s.dtype for s in wide().allocate_inference_cache(1, 1)} == {torch.float64}


def test_a_step_of_float64_parameters() -> None:
    """``A_log`` and ``D`` are float32 beside them."""
    m, hidden = nn.Mamba(8, dtype=torch.float64), torch.randn(2, LENGTH, 8).double()
    states = m.allocate_inference_cache(2, LENGTH)
    with torch.no_grad():
        first = m(hidden[:, :-2], states=states)
        then, *_ = m.step(hidden[:, -2:-1], *states)
        last = m(hidden[:, -1:], states=states)
    result = torch.cat([first, then, last], 1)
    assert m.A_log.dtype == m.D.dtype == torch.float32
    torch.testing.assert_close(result, m(hidden))
    torch.testing.assert_close(result, copy.deepcopy(m).double()(hidden))


# --- What it refuses and prints ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda m, x, c, s: m.step(x, c[..., 1:], s), ValueError, r"conv_state of size \(2, 16, 4\)"),
        (lambda m, x, c, s: m(x, states=(c, s[:1])), ValueError, r"ssm_state of size .* \(1, 16, 16\)"),
        (lambda m, x, c, s: m(x, states=(c, None)), TypeError, "ssm_state to be a Tensor, got None"),
        (lambda m, x, c, s: m(x, states=3), TypeError, r"states to be \(conv_state, .* got int"),
        (lambda m, x, c, s: m(x, states=(c,)), TypeError, "states to be .* got 1 of them"),
        (lambda m, x, c, s: m.step(x.repeat(1, 2, 1), c, s), ValueError, "of one step, got 2"),
        (lambda m, x, c, s: nn.Mamba(8)(x, PARAMS), ValueError, "Expected layer_idx in the"),
        (lambda m, x, c, s: m(x, PARAMS, states=(c, s)), ValueError, "or states, got both"),
        (lambda m, x, c, s: m(x[0]), ValueError, r"of size \(batch, time, 8\), got \(1, 8\)"),
        (lambda m, x, c, s: m([1.0]), TypeError, "hidden_states to be a Tensor, got list"),
        (lambda m, x, c, s: m(x.double()), TypeError, "of dtype torch.float32, as the parameters"),
        (lambda m, x, c, s: m(x.to("meta")), ValueError, "on one device"),
        (lambda m, x, c, s: m(x.double().to("meta")), TypeError, "of dtype"),
    ],
)  # fmt: skip
def test_inputs_and_states_that_do_not_fit(call: Any, error: type[Exception], words: str) -> None:
    m, x = nn.Mamba(8, layer_idx=0), torch.zeros(2, 1, 8)
    with pytest.raises(error, match=words):
        call(m, x, *m.allocate_inference_cache(2, 1))


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (torch.zeros(2, 16, 16).double(), TypeError, "Expected ssm_state of dtype torch.float32, "),
        (torch.zeros(2, 16, 16).int(), TypeError, "of torch.float32, got torch.int32"),
        (torch.zeros(1, 16, 16).expand(2, 16, 16), ValueError, "ssm_state is expanded"),
    ],
    ids=["wide", "integers", "expanded"],
)
def test_states_that_do_not_fit_leave_the_others_alone(
    length: int, wrong: Tensor, error: type[Exception], words: str
) -> None:
    m = nn.Mamba(8)
    conv, _ = m.allocate_inference_cache(2, length)
    with torch.no_grad(), pytest.raises(error, match=words):
        m(torch.randn(2, length, 8), states=(conv, wrong))
    assert not conv.any()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated")
def test_it_exports_and_is_not_scripted() -> None:
    m, x = nn.Mamba(8), torch.randn(2, 5, 8)
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("time")}
    exported = torch.export.export(m, (x,), dynamic_shapes=(sizes,)).module()
    several = torch.randn(m.d_inner, 7, 8)  # as many rows as channels
    torch.testing.assert_close(exported(several), m(several))
    with pytest.raises(
        RuntimeError, match=r"torch.jit.script cannot compile scan_registry.nn.Mamba"
    ):
        torch.jit.script(m)


# --- On a GPU ---------------------------------------------------------------------------------


class TestOnAGpu:
    pytestmark = pytest.mark.gpu

    @EACH_DTYPE
    @pytest.mark.usefixtures("exact_convolutions")
    def test_it_is_the_block(self, dtype: torch.dtype, tolerance: float) -> None:
        torch.manual_seed(0)
        m = nn.Mamba(64, bias=True, device="cuda", dtype=dtype)
        exact = copy.deepcopy(m).double().cpu()
        hidden = torch.randn(3, 50, 64, device="cuda").to(dtype).requires_grad_()
        wide_hidden = hidden.detach().double().cpu().requires_grad_()
        actual, expected = m(hidden), block(exact, wide_hidden)
        weight = torch.randn_like(expected)
        ours = torch.autograd.grad((actual * weight.to(actual)).sum(), [hidden, *m.parameters()])
        theirs = torch.autograd.grad((expected * weight).sum(), [wide_hidden, *exact.parameters()])
        for one, other in zip((actual, *ours), (expected, *theirs), strict=True):
            assert float(((one.double().cpu() - other).norm() / other.norm()).detach()) <= tolerance

    def test_steps_in_a_graph(self) -> None:
        m = nn.Mamba(64, device="cuda")
        hidden = torch.randn(4, LENGTH, 64, device="cuda")
        check_steps_in_a_graph(m, hidden)

    def test_gradients_are_the_same_in_every_run(self) -> None:
        m, hidden = nn.Mamba(64, device="cuda"), torch.randn(4, 300, 64, device="cuda")
        runs = [torch.autograd.grad(m(hidden).square().sum(), [*m.parameters()]) for _ in range(3)]
        for run in runs[1:]:
            for one, other in zip(run, runs[0], strict=True):
                assert torch.equal(one, other)
