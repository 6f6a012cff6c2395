"""The stand-ins for ``mamba_ssm``: its signatures, and what plain torch gives, one step after the other."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, linear, rms_norm, silu

from scan_registry.compat import mamba_ssm
from scan_registry.compat.mamba_ssm.ops import selective_scan_interface as interface
from scan_registry.compat.mamba_ssm.ops.selective_scan_interface import (
    mamba_inner_fn,
    mamba_inner_ref,
    selective_scan_fn,
    selective_scan_ref,
)
from scan_registry.compat.mamba_ssm.ops.triton.selective_state_update import selective_state_update
from scan_registry.kernels.selective_scan import reference

BATCH, CHANNELS, LENGTH, STATES, RANKS, FEATURES = 2, 6, 11, 4, 2, 5
SCAN = "u delta A B C D=None z=None delta_bias=None delta_softplus=False return_last_state=False"
INNER = (
    "xz conv1d_weight conv1d_bias x_proj_weight delta_proj_weight out_proj_weight out_proj_bias A B=None C=None "
    "D=None delta_bias=None B_proj_bias=None C_proj_bias=None delta_softplus=True"
)
SIGNATURES: dict[Callable[..., Any], str] = {
    selective_scan_fn: SCAN,
    selective_scan_ref: SCAN,
    mamba_inner_ref: INNER,
    mamba_inner_fn: f"{INNER} checkpoint_lvl=1 b_rms_weight=None c_rms_weight=None dt_rms_weight=None "
    "b_c_dt_rms_eps=1e-06",
    selective_state_update: "state x dt A B C D=None z=None dt_bias=None dt_softplus=False "
    "state_batch_indices=None",
    mamba_ssm.Mamba: "d_model d_state=16 d_conv=4 expand=2 dt_rank=auto dt_min=0.001 dt_max=0.1 dt_init=random "
    "dt_scale=1.0 dt_init_floor=0.0001 conv_bias=True bias=False use_fast_path=True layer_idx=None device=None "
    "dtype=None backend=auto",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__name__)
def test_arguments_name_for_name(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters.values()
    result = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert result == SIGNATURES[function].split()


def test_names_are_where_they_were() -> None:
    assert mamba_ssm.selective_scan_fn is selective_scan_fn
    assert mamba_ssm.mamba_inner_fn is mamba_inner_fn
    assert (
        mamba_ssm.ops.triton.selective_state_update.selective_state_update is selective_state_update
    )
    assert mamba_ssm.modules.mamba_simple.Mamba is mamba_ssm.Mamba
    assert mamba_ssm.modules.mamba2.Mamba2 is mamba_ssm.Mamba2


# --- The scan ---------------------------------------------------------------------------------


def scan(*tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Step by step, of u, delta, A, B, C, D, z and delta_bias."""
    return reference.forward(*tensors, True)


def scan_arguments(complex_numbers: bool = False) -> dict[str, Tensor]:
    shape = BATCH, CHANNELS, LENGTH
    A = -torch.rand(CHANNELS, STATES, dtype=torch.float64)
    length = LENGTH
    if complex_numbers:
        A, length = torch.complex(A, torch.randn_like(A)), 2 * LENGTH
    of_time = BATCH, STATES, length
    drawn = {
        "u": torch.randn(shape).double(),
        "delta": torch.randn(shape).double(),
        "A": A,
        "B": torch.randn(of_time).double(),
        "C": torch.randn(of_time).double(),
        "D": torch.randn(CHANNELS).double(),
        "z": torch.randn(shape).double(),
        "delta_bias": torch.randn(CHANNELS).double(),
    }
    return {name: value.requires_grad_() for name, value in drawn.items()}


@pytest.mark.parametrize("complex_numbers", [False, True])
@pytest.mark.parametrize("function", [selective_scan_fn, selective_scan_ref])
def test_it_is_a_scan(function: Callable[..., Any], complex_numbers: bool) -> None:
    arguments = scan_arguments(complex_numbers)
    out, last = function(**arguments, delta_softplus=True, return_last_state=True)
    expected = scan(*arguments.values())
    torch.testing.assert_close((out, last), expected)
    assert torch.equal(function(**arguments, delta_softplus=True), out)
    weight = torch.randn_like(out)
    actual = torch.autograd.grad((out * weight).sum() + last.abs().sum(), [*arguments.values()])
    wanted = torch.autograd.grad(
        (expected[0] * weight).sum() + expected[1].abs().sum(), [*arguments.values()]
    )
    torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_are_the_inputs(dtype: torch.dtype) -> None:
    inputs = {name: value.detach() for name, value in scan_arguments().items()}
    wide = scan(*inputs.values())
    narrow = {
        n: v.to(dtype if n in ("u", "delta", "B", "C", "z") else torch.float32)
        for n, v in inputs.items()
    }
    out, last = selective_scan_fn(**narrow, delta_softplus=True, return_last_state=True)
    assert out.dtype == dtype
    assert last.dtype == torch.float32
    # Where rounded inputs cancel, an element alone may be far off.
    error = (out.double() - wide[0]).norm() / wide[0].norm()
    assert error < {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype]


def test_numbers_are_taken_for_bools() -> None:
    """As the originals take them."""
    torch.manual_seed(0)
    u, A, B = torch.randn(2, 4, 6), -torch.rand(4, 3), torch.randn(2, 3, 6)
    for function in (selective_scan_fn, selective_scan_ref):
        arguments: Any = {"delta_softplus": 1, "return_last_state": 1}
        actual = function(u, u, A, B, B, **arguments)
        expected = function(u, u, A, B, B, delta_softplus=True, return_last_state=True)
        for one, other in zip(actual, expected, strict=True):
            assert torch.equal(one, other)
        arguments = {"delta_softplus": 0, "return_last_state": 0}
        assert torch.equal(function(u, u, A, B, B, **arguments), function(u, u, A, B, B))
    step = u[..., 0], u[..., 0], A, B[..., 0], B[..., 0]
    one, other = (
        selective_state_update(torch.zeros(2, 4, 3), *step, dt_softplus=softplus)  # type: ignore[arg-type]
        for softplus in (1, True)
    )
    assert torch.equal(one, other)


def test_a_step_is_a_scan_of_one() -> None:
    inputs = {name: value.detach() for name, value in scan_arguments().items()}
    state = torch.zeros(BATCH, CHANNELS, STATES).double()
    outputs = []
    for t in range(LENGTH):
        u, delta, B, C, z = (inputs[name][..., t] for name in ("u", "delta", "B", "C", "z"))
        outputs.append(
            selective_state_update(
                state,
                u,
                delta,
                inputs["A"],
                B,
                C,
                inputs["D"],
                z=z,
                dt_bias=inputs["delta_bias"],
                dt_softplus=True,
            )
        )
    out, last = scan(*inputs.values())
    torch.testing.assert_close(torch.stack(outputs, -1), out)
    torch.testing.assert_close(state, last)


def test_a_step_records_no_derivative() -> None:
    inputs = scan_arguments()
    state = torch.zeros(BATCH, CHANNELS, STATES).double()
    u, delta, B, C = (inputs[name][..., 0] for name in ("u", "delta", "B", "C"))
    out = selective_state_update(state, u, delta, inputs["A"], B, C)
    assert not out.requires_grad
    assert bool(state.abs().sum() > 0)


# --- The block --------------------------------------------------------------------------------


def inner_arguments(norms: bool = False, biases: bool = True) -> dict[str, Tensor]:
    drawn = {
        "xz": torch.randn(BATCH, 2 * CHANNELS, LENGTH),
        "conv1d_weight": torch.randn(CHANNELS, 1, 4),
        "conv1d_bias": torch.randn(CHANNELS),
        "x_proj_weight": torch.randn(RANKS + 2 * STATES, CHANNELS),
        "delta_proj_weight": torch.randn(CHANNELS, RANKS),
        "out_proj_weight": torch.randn(FEATURES, CHANNELS),
        "out_proj_bias": torch.randn(FEATURES),
        "A": -torch.rand(CHANNELS, STATES),
        "D": torch.randn(CHANNELS),
        "delta_bias": torch.randn(CHANNELS),
    }
    if biases:
        drawn |= {"B_proj_bias": torch.randn(STATES), "C_proj_bias": torch.randn(STATES)}
    if norms:
        drawn |= {
            "b_rms_weight": torch.rand(STATES),
            "c_rms_weight": torch.rand(STATES),
            "dt_rms_weight": torch.rand(CHANNELS),
        }
    return {name: value.double().requires_grad_() for name, value in drawn.items()}


def inner(eps: float = 1e-6, B: Any = None, C: Any = None, **tensors: Tensor) -> Tensor:
    """The block from torch's operators."""
    x, z = tensors["xz"].chunk(2, 1)
    u = conv1d(x, tensors["conv1d_weight"], tensors["conv1d_bias"], padding=3, groups=CHANNELS)
    u, weight = silu(u[..., :LENGTH]), tensors["x_proj_weight"]
    projected = linear(u.mT, weight).tensor_split([RANKS, (RANKS + len(weight)) // 2], -1)
    delta = linear(projected[0], tensors["delta_proj_weight"])
    if B is None:
        B, C = projected[1:]
        if "B_proj_bias" in tensors:
            B, C = B + tensors["B_proj_bias"], C + tensors["C_proj_bias"]
        if "b_rms_weight" in tensors:
            B = rms_norm(B, (STATES,), tensors["b_rms_weight"], eps)
            C = rms_norm(C, (STATES,), tensors["c_rms_weight"], eps)
            delta = rms_norm(delta, (CHANNELS,), tensors["dt_rms_weight"], eps)
        # A step's complex numbers are (state, part); along time they are to be (time, part).
        B, C = (p.unflatten(-1, (STATES, -1)).permute(0, 2, 1, 3).flatten(2) for p in (B, C))
    y, _ = scan(u, delta.mT, tensors["A"], B, C, tensors["D"], z, tensors["delta_bias"])
    return linear(y.mT, tensors["out_proj_weight"], tensors["out_proj_bias"])


@pytest.mark.filterwarnings("ignore:mamba_inner_fn normalises")
@pytest.mark.parametrize("case", ["plain", "channel last", "norms", "B and C", "complex"])
def test_the_block_is_its_parts(case: str) -> None:
    tensors = inner_arguments(case == "norms", biases=case not in ("B and C", "complex"))
    own = {}
    if case == "channel last":
        own = {"xz": tensors["xz"].mT.contiguous().mT}
    elif case == "B and C":
        own = {name: torch.randn(BATCH, STATES, LENGTH).double() for name in "BC"}
        own["x_proj_weight"] = tensors["x_proj_weight"][:RANKS]
    elif case == "complex":
        A = tensors["A"]
        own = {"A": torch.complex(A, torch.randn_like(A))}
        own["x_proj_weight"] = torch.randn(RANKS + 4 * STATES, CHANNELS).double()
    tensors |= {name: tensor.detach().requires_grad_() for name, tensor in own.items()}
    options: dict[str, Any] = {"b_c_dt_rms_eps": 1e-3} if case == "norms" else {}
    out, expected = mamba_inner_fn(**tensors, **options), inner(eps=1e-3, **tensors)
    torch.testing.assert_close(out, expected)
    weight, leaves = torch.randn_like(out), [*tensors.values()]
    torch.testing.assert_close(
        torch.autograd.grad((out * weight).sum(), leaves),
        torch.autograd.grad((expected * weight).sum(), leaves),
    )
    if case in ("plain", "channel last"):
        torch.testing.assert_close(mamba_inner_ref(**tensors), expected)


@pytest.mark.filterwarnings("ignore:mamba_inner_fn normalises")
def test_the_block_compiles_to_one_graph() -> None:
    arguments = inner_arguments(norms=True)
    compiled = torch.compile(mamba_inner_fn, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**arguments), mamba_inner_fn(**arguments))


def test_under_autocast() -> None:
    arguments = {
        name: value.detach().float() for name, value in inner_arguments(biases=False).items()
    }
    wide = mamba_inner_fn(**arguments)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = mamba_inner_fn(**arguments)
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), wide, rtol=0.1, atol=0.1 * float(wide.abs().max()))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            "xz",
            lambda x: x[0],
            r"xz has shape \(12, 11\); it must be \(batch, 2 \* channels, time\)",
        ),
        ("xz", lambda x: x[:, 1:], "xz has shape"),
        ("conv1d_weight", lambda x: x.squeeze(1), r"conv1d_weight has shape \(6, 4\)"),
        (
            "x_proj_weight",
            lambda x: x[1:],
            r"x_proj_weight has shape \(9, 6\); .* must be \(10, 6\)",
        ),
        ("delta_proj_weight", lambda x: x[1:], "delta_proj_weight has shape"),
        ("out_proj_weight", lambda x: x[:, 1:], r"out_proj_weight .* must be \(5, 6\)"),
        ("out_proj_bias", lambda x: x[1:], r"out_proj_bias has shape .* must be \(5,\)"),
        ("delta_proj_weight", lambda x: x.to("meta"), "delta_proj_weight is on meta, xz on cpu"),
        ("A", lambda x: x[1:], "A has shape"),
        ("D", lambda x: x[1:], r"D has shape \(5,\); for 6 channels"),
        ("delta_bias", lambda x: x[1:], r"delta_bias has shape \(5,\); for 6 channels"),
        ("conv1d_bias", lambda x: x[1:], r"conv1d_bias has shape \(5,\); for 6 channels"),
        ("x_proj_weight", lambda _: torch.tensor(1.0), r"x_proj_weight .* must be \(10, 6\)"),
        ("B_proj_bias", lambda x: x[1:], "B_proj_bias has shape"),
        ("b_rms_weight", lambda x: x[1:], "b_rms_weight has shape"),
        ("checkpoint_lvl", lambda _: 2, "checkpoint_lvl is 2"),
    ],
)
def test_shapes_that_do_not_fit(name: str, change: Callable[[Any], Any], words: str) -> None:
    arguments: dict[str, Any] = inner_arguments(norms=name == "b_rms_weight")
    arguments.pop("dt_rms_weight", None)
    arguments[name] = change(arguments.get(name))
    with pytest.raises(ValueError, match=words):
        mamba_inner_fn(**arguments)


INNER_MATRICES = ("x_proj_weight", "delta_proj_weight", "out_proj_weight")


@pytest.mark.parametrize("name", [*inner_arguments(norms=True), "B", "C"])
def test_dtypes_that_do_not_fit_are_named(name: str) -> None:
    """Before anything is computed, and whatever torch would say of a product."""
    drawn = inner_arguments(norms=name not in ("A", "B", "C"))
    arguments: dict[str, Any] = {key: value.detach().float() for key, value in drawn.items()}
    dtypes = [torch.int32, torch.float64] + [torch.complex64] * (name != "A")
    if name in ("B", "C"):
        arguments[name] = torch.randn(BATCH, STATES, LENGTH)
    dtypes += [torch.bfloat16] * (name in INNER_MATRICES)
    for dtype in dtypes:
        words = rf"xz {dtype}" if name == "xz" and dtype.is_floating_point else rf"{name} has dtype"
        with pytest.raises(TypeError, match=words):
            mamba_inner_fn(**arguments | {name: arguments[name].to(dtype)})


def test_narrow_weights_go_with_a_wide_input_under_autocast() -> None:
    arguments = {
        name: value.detach().float() for name, value in inner_arguments(biases=False).items()
    }
    narrow = {name: arguments[name].bfloat16() for name in INNER_MATRICES}
    with torch.autocast("cpu", torch.bfloat16):
        expected = mamba_inner_fn(**arguments)
        torch.testing.assert_close(mamba_inner_fn(**arguments | narrow), expected)
        wide = {"out_proj_weight": arguments["out_proj_weight"].double()}
        with pytest.raises(TypeError, match=r"out_proj_weight .*; float64 does not mix"):
            mamba_inner_fn(**arguments | wide)


def test_what_is_no_tensor_is_named() -> None:
    for name in (*inner_arguments(norms=True), "B", "C"):
        arguments: dict[str, Any] = {**inner_arguments(norms=True), name: [1.0]}
        with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor, not list"):
            mamba_inner_fn(**arguments)


@pytest.mark.parametrize("along", ["channels", "time"])
def test_large_tensors_of_another_layout_are_copied(
    along: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers gives them: copies have unit stride where the inputs have it, and gradients are the same."""
    lying = {"channels": lambda x: x, "time": lambda x: x.contiguous()}
    across = {"channels": "time", "time": "channels"}[along]
    u, delta, z = (torch.randn(2, 9, 4).mT for _ in range(3))
    inputs = [
        lying[where](x).detach().requires_grad_()
        for x, where in ((u, along), (delta, across), (z, across))
    ]
    A, B, C = -torch.rand(4, 3), torch.randn(2, 3, 9), torch.randn(2, 3, 9)

    def gradients() -> list[torch.Tensor]:
        u, delta, z = inputs
        out = interface.selective_scan_fn(u, delta, A, B, C, z=z, delta_softplus=True)
        return [out, *torch.autograd.grad(out.square().sum(), inputs)]

    expected = gradients()
    seen = []
    scan = interface.selective_scan
    monkeypatch.setattr(interface, "_WORTH_A_COPY", 1)
    monkeypatch.setattr(
        interface, "selective_scan", lambda *a, **k: seen.extend(a) or scan(*a, **k)
    )
    for actual, right in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(actual, right)
    inner = {"channels": 1, "time": 2}[along]
    assert [seen[place].stride(inner) for place in (0, 1, 6)] == [1, 1, 1]
