"""The stand-ins for mamba_ssm's functions of Mamba-2: its signatures, and what plain torch gives, one step after the other."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, linear, silu

from scan_registry.compat import mamba_ssm
from scan_registry.compat.mamba_ssm.ops.triton import layernorm_gated
from scan_registry.compat.mamba_ssm.ops.triton.layernorm_gated import layernorm_fn, rmsnorm_fn
from scan_registry.compat.mamba_ssm.ops.triton.selective_state_update import (
    selective_state_update,
)
from scan_registry.compat.mamba_ssm.ops.triton.ssd_combined import (
    mamba_chunk_scan_combined,
    mamba_split_conv1d_scan_combined,
)
from scan_registry.kernels.ssd_scan import reference

BATCH, LENGTH, HEADS, SIZE, GROUPS, STATES, FEATURES = 2, 11, 4, 3, 2, 5, 6
CHANNELS, WIDTH = HEADS * SIZE, 4
NO_LIMIT = (0.0, float("inf"))
SIGNATURES: dict[Callable[..., Any], str] = {
    mamba_chunk_scan_combined: "x dt A B C chunk_size D=None z=None dt_bias=None initial_states=None seq_idx=None "
    "cu_seqlens=None dt_softplus=False dt_limit=(0.0,inf) return_final_states=False return_varlen_states=False "
    "state_dtype=None",
    mamba_split_conv1d_scan_combined: "zxbcdt conv1d_weight conv1d_bias dt_bias A D chunk_size initial_states=None "
    "seq_idx=None dt_limit=(0.0,inf) return_final_states=False activation=silu rmsnorm_weight=None rmsnorm_eps=1e-06 "
    "outproj_weight=None outproj_bias=None headdim=None ngroups=1 norm_before_gate=True",
    layernorm_fn: "x weight bias z=None eps=1e-06 group_size=None norm_before_gate=True is_rms_norm=False",
    rmsnorm_fn: "x weight bias z=None eps=1e-06 group_size=None norm_before_gate=True",
    layernorm_gated.RMSNorm: "hidden_size eps=1e-05 group_size=None norm_before_gate=True device=None dtype=None",
    layernorm_gated.LayerNorm: "hidden_size eps=1e-05 group_size=None norm_before_gate=True device=None dtype=None",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__name__)
def test_arguments_name_for_name(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters.values()
    names = [
        p.name if p.default is p.empty else f"{p.name}={p.default}".replace(" ", "")
        for p in parameters
    ]
    assert names == SIGNATURES[function].split()


# --- The scan ---------------------------------------------------------------------------------


def scan(
    *tensors: Any,
    limit: Any = NO_LIMIT,
    softplus_too: bool = True,
    initial_states: Any = None,
    **named: Any,
) -> tuple[Tensor, Tensor]:
    """Step by step, of x, dt, A, B, C, D, z and dt_bias."""
    how = {"dt_softplus": softplus_too, "dt_limit": limit, "initial_state": initial_states}
    return reference.forward(*tensors, **named, **how)


def scan_arguments(batch: int = BATCH, D_of_channels: bool = False) -> dict[str, Tensor]:
    of_heads = batch, LENGTH, HEADS
    drawn = {
        "x": torch.randn(*of_heads, SIZE),
        "dt": torch.randn(of_heads),
        "A": -torch.rand(HEADS),
        "B": torch.randn(batch, LENGTH, GROUPS, STATES),
        "C": torch.randn(batch, LENGTH, GROUPS, STATES),
        "D": torch.randn(HEADS, SIZE) if D_of_channels else torch.randn(HEADS),
        "z": torch.randn(*of_heads, SIZE),
        "dt_bias": torch.randn(HEADS),
        "initial_states": torch.randn(batch, HEADS, SIZE, STATES),
    }
    return {name: value.double().requires_grad_() for name, value in drawn.items()}


def assert_same_gradients(outputs: Any, expected: Any, leaves: list[Tensor]) -> None:
    weights = [torch.randn_like(part) for part in outputs]
    losses = [
        sum((part * weight).sum() for part, weight in zip(parts, weights, strict=True))
        for parts in (outputs, expected)
    ]
    torch.testing.assert_close(*(torch.autograd.grad(loss, leaves) for loss in losses))


@pytest.mark.parametrize("limit", [NO_LIMIT, (0.2, 0.9)])
@pytest.mark.parametrize("D_of_channels", [False, True])
def test_it_is_a_scan(D_of_channels: bool, limit: tuple[float, float]) -> None:
    given = scan_arguments(D_of_channels=D_of_channels)
    options: dict[str, Any] = {"chunk_size": 4, "dt_softplus": True, "dt_limit": limit}
    outputs = mamba_chunk_scan_combined(**given, **options, return_final_states=True)
    expected = scan(**given, limit=limit)
    torch.testing.assert_close(outputs, expected)
    alone = mamba_chunk_scan_combined(**given, **options)
    assert isinstance(alone, Tensor)
    torch.testing.assert_close(alone, expected[0])
    assert_same_gradients(outputs, expected, [*given.values()])


def test_a_step_size_below_zero_is_zero() -> None:
    """Without softplus, as in the original."""
    given = {name: value.detach() for name, value in scan_arguments().items()}
    bare = {name: given[name] for name in ("x", "dt", "A", "B", "C")}
    expected, _ = scan(**bare, softplus_too=False)
    assert bool((given["dt"] < 0).any())
    torch.testing.assert_close(mamba_chunk_scan_combined(**bare, chunk_size=256), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_are_the_inputs(dtype: torch.dtype) -> None:
    given = {name: value.detach() for name, value in scan_arguments().items()}
    wide = scan(**given)
    narrow = {
        name: value.to(dtype if name in ("x", "dt", "B", "C", "z") else torch.float32)
        for name, value in given.items()
    }
    out, last = mamba_chunk_scan_combined(
        **narrow, chunk_size=8, dt_softplus=True, return_final_states=True
    )
    assert out.dtype == dtype
    assert last.dtype == torch.float32
    tolerance = {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for one, other in zip((out, last), wide, strict=True):
        assert (one.double() - other).norm() / other.norm() < tolerance


BOUNDS = [0, 4, 4, 5, LENGTH]


def of_sequence(given: dict[str, Tensor], begin: int, end: int) -> dict[str, Tensor]:
    """The arguments of one packed sequence; states precede the first one alone."""
    timed = ("x", "dt", "B", "C", "z")
    part = {name: v[:, begin:end] if name in timed else v for name, v in given.items()}
    if begin:
        del part["initial_states"]
    return part


@pytest.mark.parametrize("numbered", [False, True])
def test_packed_sequences_are_each_alone(numbered: bool) -> None:
    given = scan_arguments(1)
    bounds = torch.tensor(BOUNDS)
    seq_idx = torch.arange(4).repeat_interleave(bounds.diff())[None].int() if numbered else None
    options: dict[str, Any] = {
        "chunk_size": 4,
        "dt_softplus": True,
        "seq_idx": seq_idx,
        "cu_seqlens": bounds,
    }
    parts = [
        scan(**of_sequence(given, begin, end)) for begin, end in pairwise(BOUNDS) if begin < end
    ]
    each = torch.cat([state for _, state in parts])
    each = torch.cat([each[:1], torch.zeros_like(each[:1]), each[1:]])
    expected = torch.cat([y for y, _ in parts], 1), parts[-1][1], each
    outputs = mamba_chunk_scan_combined(
        **given, **options, return_final_states=True, return_varlen_states=True
    )
    torch.testing.assert_close(outputs, expected)
    assert_same_gradients(outputs, expected, [*given.values()])
    short = mamba_chunk_scan_combined(**given, **options, return_varlen_states=True)
    torch.testing.assert_close(short, (expected[0], each))
    torch.testing.assert_close(mamba_chunk_scan_combined(**given, **options), expected[0])


def test_numbered_sequences_are_each_alone() -> None:
    given = scan_arguments(1)
    seq_idx = torch.tensor([5, 2, 5]).repeat_interleave(torch.tensor([4, 1, 6]))[None].int()
    parts = [scan(**of_sequence(given, *bounds)) for bounds in ((0, 4), (4, 5), (5, LENGTH))]
    out, last = mamba_chunk_scan_combined(
        **given, chunk_size=4, dt_softplus=True, seq_idx=seq_idx, return_final_states=True
    )
    torch.testing.assert_close(out, torch.cat([y for y, _ in parts], 1))
    torch.testing.assert_close(last, parts[-1][1])


def test_numbers_are_taken_for_bools() -> None:
    """As the originals take them."""
    given = scan_arguments()
    numbers: Any = {"dt_softplus": 1, "return_final_states": 1, "return_varlen_states": 0}
    outputs = mamba_chunk_scan_combined(**given, chunk_size=4, **numbers)
    torch.testing.assert_close(outputs, scan(**given))


def test_a_step_of_mamba_2_is_a_scan_of_one() -> None:
    """With what does not change along a head expanded, as mamba_ssm's and transformers' modules give it."""
    given = {name: value.detach() for name, value in scan_arguments().items()}
    state = given["initial_states"].clone()
    shape = HEADS, SIZE
    A = given["A"][:, None, None].expand(*shape, STATES)
    D, bias = (given[name][:, None].expand(shape) for name in ("D", "dt_bias"))
    outputs = []
    for t in range(LENGTH):
        x, dt, B, C, z = (given[name][:, t] for name in ("x", "dt", "B", "C", "z"))
        step = dt.unsqueeze(-1).expand(BATCH, *shape)
        outputs.append(selective_state_update(state, x, step, A, B, C, D, z, bias, True))
    torch.testing.assert_close((torch.stack(outputs, 1), state), scan(**given))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"return_varlen_states": True}, ValueError, "return_varlen_states needs it"),
        (
            {"cu_seqlens": torch.tensor([0, LENGTH])},
            ValueError,
            r"with cu_seqlens it must be \(1, time",
        ),
        ({"x": [1.0]}, TypeError, "x must be a torch.Tensor, not list"),
        ({"dt": torch.zeros(1)}, ValueError, "dt has shape"),
        ({"dt_limit": (1.0, 0.0)}, ValueError, "dt_limit"),
    ],
)
def test_arguments_of_the_scan_that_do_not_fit(
    changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    given: dict[str, Any] = {name: value.float() for name, value in scan_arguments().items()}
    with pytest.raises(error, match=words):
        mamba_chunk_scan_combined(**given | changes, chunk_size=4)


def test_states_before_packed_sequences_that_do_not_fit() -> None:
    given = scan_arguments(1)
    given["initial_states"] = given["initial_states"].expand(3, -1, -1, -1)
    with pytest.raises(ValueError, match=r"initial_states has shape .* must be \(1, heads"):
        mamba_chunk_scan_combined(**given, chunk_size=4, cu_seqlens=torch.tensor(BOUNDS))


# --- The block --------------------------------------------------------------------------------


def block_arguments(
    beside: int = 0, norm: bool = True, D_of_channels: bool = False
) -> dict[str, Any]:
    channels = CHANNELS + 2 * GROUPS * STATES
    drawn = {
        "zxbcdt": torch.randn(BATCH, LENGTH, 2 * beside + CHANNELS + channels + HEADS),
        "conv1d_weight": torch.randn(channels, WIDTH),
        "conv1d_bias": torch.randn(channels),
        "dt_bias": torch.randn(HEADS),
        "A": -torch.rand(HEADS),
        "D": torch.randn(HEADS, SIZE) if D_of_channels else torch.randn(HEADS),
        "initial_states": torch.randn(BATCH, HEADS, SIZE, STATES),
        "outproj_weight": torch.randn(FEATURES, beside + CHANNELS),
        "outproj_bias": torch.randn(FEATURES),
    }
    if norm:
        drawn["rmsnorm_weight"] = torch.randn(CHANNELS)
    return {name: value.double().requires_grad_() for name, value in drawn.items()}


def block(
    given: dict[str, Any], first: bool, limit: tuple[float, float], activation: str | None
) -> tuple[Tensor, Tensor]:
    """The block from torch's operators."""
    projected, weight = given["zxbcdt"], given["conv1d_weight"]
    channels = weight.shape[0]
    beside = (projected.shape[-1] - CHANNELS - channels - HEADS) // 2
    gate, inputs, z, u, dt = projected.split((beside, beside, CHANNELS, channels, HEADS), -1)
    u = conv1d(u.mT, weight[:, None], given["conv1d_bias"], padding=WIDTH - 1, groups=channels)
    u = u[..., :LENGTH].mT
    x, B, C = (u if activation is None else silu(u)).split((CHANNELS, *[GROUPS * STATES] * 2), -1)
    B, C = (part.unflatten(-1, (GROUPS, STATES)) for part in (B, C))
    y, last = scan(
        *(x.unflatten(-1, (HEADS, SIZE)), dt, given["A"], B, C, given["D"]),
        *(None, given["dt_bias"]),
        initial_states=given["initial_states"],
        limit=limit,
    )
    y = y.flatten(2)
    if "rmsnorm_weight" not in given:
        y = y * silu(z)
    else:
        y = y if first else y * silu(z)
        parts = [p / (p.square().mean(-1, keepdim=True) + 1e-3).sqrt() for p in y.chunk(GROUPS, -1)]
        y = torch.cat(parts, -1) * given["rmsnorm_weight"]
        y = y * silu(z) if first else y
    y = torch.cat([silu(gate) * inputs, y], -1)
    return linear(y, given["outproj_weight"], given["outproj_bias"]), last


@pytest.mark.parametrize(
    ("options", "beside", "norm", "D_of_channels"),
    [
        ({}, 0, True, False),
        ({"norm_before_gate": False, "activation": "swish"}, 0, True, True),
        ({"norm_before_gate": False, "dt_limit": (0.1, 0.5)}, 3, True, False),
        ({"activation": None}, 2, False, False),
    ],
)
def test_the_block_is_its_parts(
    options: dict[str, Any], beside: int, norm: bool, D_of_channels: bool
) -> None:
    given = block_arguments(beside, norm, D_of_channels)
    sizes = {"ngroups": GROUPS, "headdim": None if D_of_channels else SIZE}
    outputs = mamba_split_conv1d_scan_combined(
        **given, **sizes, chunk_size=4, rmsnorm_eps=1e-3, return_final_states=True, **options
    )
    first, limit = options.get("norm_before_gate", True), options.get("dt_limit", NO_LIMIT)
    expected = block(given, first, limit, options.get("activation", "silu"))
    torch.testing.assert_close(outputs, expected)
    assert_same_gradients(outputs, expected, [*given.values()])


def test_the_block_without_its_projection() -> None:
    given = block_arguments(3)
    del given["outproj_weight"], given["outproj_bias"]
    y = mamba_split_conv1d_scan_combined(
        **given, chunk_size=4, headdim=SIZE, ngroups=GROUPS, rmsnorm_eps=1e-3
    )
    identity = {"outproj_weight": torch.eye(CHANNELS + 3).double(), "outproj_bias": None}
    torch.testing.assert_close(y, block(given | identity, True, NO_LIMIT, "silu")[0])


def test_the_block_of_numbered_sequences() -> None:
    given = block_arguments()
    del given["initial_states"]
    options = {"chunk_size": 4, "headdim": SIZE, "ngroups": GROUPS}
    seq_idx = torch.tensor([[0] * 2 + [1] * 9, [3] * 10 + [4]])
    y = mamba_split_conv1d_scan_combined(**given, **options, seq_idx=seq_idx)
    for row, (begin, end) in ((0, (0, 2)), (0, (2, LENGTH)), (1, (0, 10)), (1, (10, LENGTH))):
        part = given | {"zxbcdt": given["zxbcdt"][row : row + 1, begin:end]}
        expected = mamba_split_conv1d_scan_combined(**part, **options)
        torch.testing.assert_close(y[row : row + 1, begin:end], expected)


def test_the_block_is_the_modules() -> None:
    """What ``Mamba2`` computes, from its parameters."""
    torch.manual_seed(2)
    m = mamba_ssm.Mamba2(8, d_state=4, headdim=4, ngroups=2, d_ssm=8, bias=True).double()
    hidden = torch.randn(2, 9, 8).double()
    y = mamba_split_conv1d_scan_combined(
        *(m.in_proj(hidden), m.conv1d.weight.squeeze(1), m.conv1d.bias, m.dt_bias, -m.A_log.exp()),
        *(m.D, 256),
        rmsnorm_weight=m.norm.weight,
        rmsnorm_eps=m.norm.eps,
        outproj_weight=m.out_proj.weight,
        outproj_bias=m.out_proj.bias,
        headdim=4,
        ngroups=2,
        norm_before_gate=False,
    )
    torch.testing.assert_close(y, m(hidden))


def test_the_block_under_autocast() -> None:
    given = {name: value.detach().float() for name, value in block_arguments().items()}
    options = {"chunk_size": 4, "headdim": SIZE, "ngroups": GROUPS}
    wide = mamba_split_conv1d_scan_combined(**given, **options)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = mamba_split_conv1d_scan_combined(**given, **options)
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), wide, rtol=0.05, atol=0.05 * float(wide.abs().max()))


def test_the_block_compiles_to_one_graph() -> None:
    given = block_arguments(3)
    options = {"chunk_size": 4, "headdim": SIZE, "ngroups": GROUPS}
    compiled = torch.compile(mamba_split_conv1d_scan_combined, fullgraph=True, backend="aot_eager")
    expected = mamba_split_conv1d_scan_combined(**given, **options)
    torch.testing.assert_close(compiled(**given, **options), expected)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("zxbcdt", lambda x: x[0], r"zxbcdt has shape .* must be \(batch, L, features\)"),
        ("zxbcdt", lambda x: x[..., 1:], "zxbcdt has shape .* its last dimension must be 48"),
        (
            "conv1d_weight",
            lambda x: x[:, None],
            r"conv1d_weight .* must be \(channels \+ 2 \* ngroups \* states, width\)",
        ),
        ("conv1d_weight", lambda x: x[1:], r"conv1d_weight .* be \(12 \+ 4 \* states, width\)"),
        ("conv1d_weight", lambda x: x.to("meta"), "conv1d_weight is on meta, zxbcdt on cpu"),
        ("rmsnorm_weight", lambda x: x[1:], r"rmsnorm_weight has shape .* must be \(12,\)"),
        ("outproj_weight", lambda x: x[:, 1:], r"outproj_weight has shape .* must be \(6, 12\)"),
        ("outproj_weight", lambda _: None, "outproj_bias is there without outproj_weight"),
        ("dt_bias", lambda x: x[1:], "dt_bias has shape"),
        ("conv1d_bias", lambda x: x[1:], "conv1d_bias has shape"),
        ("D", lambda x: x[None, None], r"D has shape .* must be \(heads,\) or \(heads, headdim\)"),
        ("headdim", lambda _: None, "headdim is None"),
        ("headdim", lambda _: 0, "headdim is 0"),
        ("ngroups", lambda _: 3, "ngroups is 3; it must divide the 4 heads"),
        ("activation", lambda _: "relu", "activation is 'relu'"),
        ("initial_states", lambda x: x[1:], "initial_states has shape"),
    ],
)
def test_arguments_of_the_block_that_do_not_fit(
    name: str, change: Callable[[Any], Any], words: str
) -> None:
    given = block_arguments() | {"headdim": SIZE, "ngroups": GROUPS}
    given[name] = change(given.get(name))
    with pytest.raises(ValueError, match=words):
        mamba_split_conv1d_scan_combined(**given, chunk_size=4)


@pytest.mark.parametrize("name", block_arguments())
def test_dtypes_of_the_block_that_do_not_fit_are_named(name: str) -> None:
    arguments: dict[str, Any] = {
        key: value.detach().float() for key, value in block_arguments().items()
    }
    options = {"headdim": SIZE, "ngroups": GROUPS, "chunk_size": 4}
    dtypes = [torch.int32, torch.complex64, torch.float64]
    for dtype in [*dtypes, *[torch.bfloat16] * (name == "outproj_weight")]:
        as_input = name == "zxbcdt" and dtype.is_floating_point
        with pytest.raises(
            TypeError, match=rf"zxbcdt {dtype}" if as_input else f"{name} has dtype"
        ):
            mamba_split_conv1d_scan_combined(
                **arguments | {name: arguments[name].to(dtype)}, **options
            )
