"""The compiled code of ``gated_scan`` for the CPU: when it runs, how exact it is, what it never does, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gating import drawn
from refusing import check_refused
from torch import Tensor
from watched import levels, using

from scan_registry import gated_scan
from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.gated_scan.kinds import KINDS
from scan_registry.kernels.gated_scan.op import composed, cpu
from scan_registry.kernels.gated_scan.op.arguments import Arguments, Options
from scan_registry.ops import _cpu

COMPILED = [kind for kind in KINDS if KINDS[kind].source in cpu.HEADERS]
#: The input that decides the gate, if that is not the first one.
DECAYING = {"hgrn": 1, "rg_lru": 1}
#: Of inputs in memory, in any layout.
WAYS = ("contiguous", "other way round", "with gaps", "same in all batches", "same at all steps")


def lying(x: Tensor, way: str, dim: int) -> Tensor:
    if way == "other way round":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if way == "with gaps":
        gaps = torch.full((*x.shape, 3), torch.nan, dtype=x.dtype)
        gaps[..., 1] = x
        return gaps[..., 1]
    if way == "same in all batches":
        return x[:1].expand(x.shape)
    if way == "same at all steps":
        return x.narrow(dim, 0, 1).expand(x.shape)
    return x


def passes(kind: str, tensors: list[Tensor], seeds: tuple[Tensor, ...], **options: Any) -> Any:
    """Both outputs, and the gradients of all tensors and of the initial state."""
    initial = options.pop("initial_state")
    leaves = [t.detach().requires_grad_() for t in tensors]
    if initial is not None:
        initial = initial.detach().requires_grad_()
    outputs = gated_scan(kind, *leaves, initial_state=initial, return_final_state=True, **options)
    wanted = [*leaves, *([] if initial is None else [initial])]
    return *outputs, *torch.autograd.grad(outputs, wanted, seeds)


def exact(kind: str, tensors: list[Tensor], seeds: tuple[Tensor, ...], **options: Any) -> Any:
    """The same in float64, which is composed."""
    initial = options.pop("initial_state")
    initial = None if initial is None else initial.detach().double()
    wide = [t.detach().double() for t in tensors], tuple(seed.double() for seed in seeds)
    return passes(kind, *wide, initial_state=initial, **options)


def composed_by(kind: str, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Gates and tokens in float64, from tensors in float32."""
    wide = Arguments.of(kind, [*(t.double() for t in tensors), None, None, None])
    return composed.gates_and_tokens(wide, Options(kind))


@pytest.mark.parametrize("instructions", levels())
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", COMPILED)
def test_every_layout_and_option(kind: str, way: str, instructions: str) -> None:
    """Of sizes that fill neither blocks of channels nor pieces of time."""
    place = [*COMPILED].index(kind) + WAYS.index(way)
    for number, (channels, time) in enumerate(((13, 601), (70, 131), (16, 1), (3, 40))):
        turn, dim = place + number, (-1, 1)[(place + number) % 2]
        call = drawn(
            kind,
            (2, channels, time),
            torch.float32,
            dim=dim,
            initial=turn % 3 > 0,
            resets=turn % 4 > 1,
            packed=turn % 5 > 2,
            reverse=turn % 3 == 1,
        )
        count = len(KINDS[kind].inputs)
        tensors = [t.detach() for t in call.tensors[:count]]
        for n in range(count):
            # If all inputs were the same at all steps, gradients would be differences of equal numbers.
            if way != "same at all steps" or n == DECAYING.get(kind, 0):
                tensors[n] = lying(tensors[n], way, dim)
        tensors += call.tensors[count:]
        with using(instructions):
            outputs = gated_scan(kind, *tensors, return_final_state=True, **call.options)
            seeds = tuple(torch.randn_like(x) for x in outputs)
            actual = passes(kind, tensors, seeds, **call.options)
        expected = exact(kind, tensors, seeds, **call.options)
        for result, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert relative_error(one, other) < 2e-6, (number, result)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", COMPILED)
def test_narrow_dtypes_round_once(kind: str, dtype: torch.dtype) -> None:
    """States are those of float32, rounded; gradients are those of float32 from rounded states."""
    for dim in (-1, 1):
        call = drawn(kind, (2, 21, 300), dtype, dim=dim, initial=True, resets=True, reverse=dim > 0)
        wide = [t.detach().float() for t in call.tensors]
        narrow = gated_scan(kind, *call.tensors, return_final_state=True, **call.options)
        states, last = gated_scan(kind, *wide, return_final_state=True, **call.options)
        torch.testing.assert_close(narrow[0], states.to(dtype), rtol=0, atol=0)
        torch.testing.assert_close(narrow[1], last, rtol=0, atol=0)
        seeds = torch.randn_like(narrow[0]), torch.randn_like(last)
        actual = passes(kind, [*call.tensors], seeds, **call.options)
        expected = exact(kind, [*call.tensors], seeds, **call.options)
        for one, other in zip(actual[2:], expected[2:], strict=True):
            assert relative_error(one, other) < 2 * torch.finfo(dtype).eps


def test_when_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """For float32 and narrower; other dtypes, backends and kinds are composed."""
    assert set(COMPILED) == set(KINDS) - {"linear"}
    composed_calls: list[str] = []
    forward = composed.forward

    def noted(arguments: Any, options: Any) -> Any:
        composed_calls.append(options.kind)
        return forward(arguments, options)

    monkeypatch.setattr(composed, "forward", noted)
    for kind in COMPILED:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            call = drawn(kind, (1, 3, 7), dtype, initial=True, resets=True, packed=True)
            gated_scan(kind, *call.tensors, **call.options).sum().backward()
        assert not composed_calls
    options = {"backend": "reference"}
    for kind, dtype, how in (
        ("min_gru", torch.float64, {}),
        ("min_gru", torch.float32, options),
        ("linear", torch.float32, {"reset": torch.ones(1, 7, dtype=torch.bool)}),
    ):
        composed_calls.clear()
        gated_scan(kind, *drawn(kind, (1, 3, 7), dtype).tensors, **how)  # type: ignore[arg-type]
        assert composed_calls == [kind]


# --- How exact gates are ----------------------------------------------------------------------


def every_exponent() -> Tensor:
    """Numbers of both signs with every exponent up to 1e30, and those around where exponentials overflow and vanish."""
    powers = torch.tensor([2.0**e for e in range(-149, 100)])
    sizes = torch.cat([powers * m for m in (1, 1.2345678, 1.9999999)])
    edges = torch.linspace(86, 105, 400)
    sizes = torch.cat([torch.zeros(1), sizes[sizes <= 1e30], edges, torch.linspace(0, 30, 3001)])
    return torch.cat([-sizes.flip(0), sizes])


def gates(kind: str, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Gates, which take a state of 1 to what they are where the token is zero, of (1, channels, 1); and those in float64."""
    initial = torch.ones(tensors[0].shape[:2])
    return gated_scan(kind, *tensors, initial_state=initial).double(), composed_by(kind, *tensors)[
        0
    ]


@pytest.mark.parametrize("instructions", levels())
def test_gates_and_tokens_of_every_exponent(instructions: str) -> None:
    """Within 4 units in the last place, of gates and of what they leave over; what is below float32's normal numbers may be
    zero."""
    x = every_exponent().view(1, -1, 1)
    zero, one = torch.zeros_like(x), torch.ones_like(x)
    bound = torch.zeros(x.shape[1])
    close: dict[str, Any] = {"rtol": 4 * 2.0**-23, "atol": 2.0**-126}
    with using(instructions):
        for kind, tensors in {
            "min_gru_identity": (x, zero),
            "min_lstm_identity": (x, zero, zero),
            "hgrn": (zero, x, bound),
        }.items():
            torch.testing.assert_close(*gates(kind, *tensors), **close)
        for kind, tensors in {
            "min_gru_identity": (x, one),
            "min_lstm_identity": (x, zero + 0.3, one),
            "min_gru": (100 * one, x),
            "min_lstm": (-100 * one, 100 * one, x),
            "hgrn": (one, x, bound),
            "rg_lru": (one, one, x, bound),
        }.items():
            _, expected = composed_by(kind, *tensors)
            torch.testing.assert_close(gated_scan(kind, *tensors).double(), expected, **close)
        # Where both are far below zero, their difference counts.
        for low in (-17.5, -20.0, -50.0, -103.0, -1000.0):
            apart = torch.linspace(-20, 20, 4001).view(1, -1, 1)
            actual, expected = gates("min_lstm_identity", low + apart, low - apart, 0 * apart)
            # Of a share below 1e-13 the exponent's own rounding counts.
            torch.testing.assert_close(actual, expected, rtol=8 * 2.0**-23, atol=1e-19)


@pytest.mark.parametrize("instructions", levels())
def test_decays_of_every_exponent(instructions: str) -> None:
    """RG-LRU's gate is exp(-m), so m's rounding counts m times; and the root of 1 - gate² has all digits."""
    for one_gate, parameters in (
        (every_exponent(), torch.tensor(-4.0)),
        (torch.tensor(0.0), every_exponent().clamp(-80)),
        (torch.tensor(1.0), torch.linspace(-20, 20, 4001)),
    ):
        gates_of, a_param = (t.contiguous() for t in torch.broadcast_tensors(one_gate, parameters))
        gate = gates_of.view(1, -1, 1)
        zero, one = torch.zeros_like(gate), torch.ones_like(gate)
        with using(instructions):
            actual, expected = gates("rg_lru", zero, gate, zero, a_param)
            tokens = gated_scan("rg_lru", one, gate, 100 * one, a_param).double()
        m = -expected.clamp_min(1e-300).log()
        allowed = expected * (4 + 4 * m) * 2.0**-23 + 2.0**-126
        assert ((actual - expected).abs() <= allowed).all()
        _, root = composed_by("rg_lru", one, gate, 100 * one, a_param)
        # Below a gate of -88 its sigmoid is zero.
        far = gate.double() < -87
        torch.testing.assert_close(tokens[~far], root[~far], rtol=6 * 2.0**-23, atol=1e-18)
        assert (tokens[far] <= 1e-15).all()


@pytest.mark.parametrize("instructions", levels())
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", COMPILED)
def test_what_is_not_finite_stays_in_its_row(kind: str, bad: float, instructions: str) -> None:
    """Forwards and backwards, among rows of one block; and no input that is NaN gives a finite state."""
    call = drawn(kind, (2, 11, 20), torch.float32, initial=True)
    clean = [t.detach() for t in call.tensors]
    seeds = torch.randn(2, 11, 20), torch.randn(2, 11)
    with using(instructions):
        expected = passes(kind, clean, seeds, **call.options)
        for place in range(len(KINDS[kind].inputs)):
            spoilt = [t.clone() for t in clean]
            spoilt[place][1, 4, 7] = bad
            actual = passes(kind, spoilt, seeds, **call.options)
            for one, other in zip(actual, expected, strict=True):
                others = torch.ones(one.shape[: min(one.dim(), 2)], dtype=torch.bool)
                # What is of a channel is summed over batches.
                others[4 if one.dim() == 1 else (1, 4)] = False
                torch.testing.assert_close(one[others], other[others], rtol=0, atol=0)
            if math.isnan(bad):
                assert actual[0][1, 4, 7:].isnan().all()
            torch.testing.assert_close(actual[0][1, 4, :7], expected[0][1, 4, :7], rtol=0, atol=0)


# --- Threads ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [-1, 1])
@pytest.mark.parametrize("kind", ["hgrn", "min_lstm", "rg_lru"])
def test_threads_do_not_change_a_bit(kind: str, dim: int) -> None:
    usual = torch.get_num_threads()
    for shape in ((1, 40, 9000), (3, 1100, 70)):
        call = drawn(kind, shape, torch.float32, dim=dim, initial=True, resets=True, packed=True)
        seeds = tuple(
            torch.randn_like(x)
            for x in gated_scan(kind, *call.tensors, return_final_state=True, **call.options)
        )
        results = []
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            try:
                results.append(passes(kind, [*call.tensors], seeds, **call.options))
            finally:
                torch.set_num_threads(usual)
        for others in results[1:]:
            for one, other in zip(results[0], others, strict=True):
                assert torch.equal(one, other)


# --- What is refused --------------------------------------------------------------------------

SIZES = (1, 2, 3, 0, 0, 0)
FORWARD = "min_gru", "float32", (1024,) * 10, (*SIZES, *[0] * 21), 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({0: "linear"}, "kind 'linear' has no code for CPUs"),
        ({1: "float64"}, "dtype 'float64'; accepted are float32, bfloat16, float16"),
        ({2: (1024,) * 9}, "takes 10 pointers, got 9"),
        ({2: (None,) * 10}, "pointer 0 is null"),
        ({0: "hgrn", 2: (*[1024] * 7, None, None, None)}, "parameters is null"),
        ({3: (*SIZES, *[0] * 20)}, "takes 27 scalars, got 26"),
        ({3: (1, -2, *SIZES[2:], *[0] * 21)}, "channels is -2"),
        ({3: (2**40, 2**40, *SIZES[2:], *[0] * 21)}, "the sizes multiply to too many elements"),
        ({3: (*SIZES[:5], 4, *[0] * 21)}, "flags is 4; accepted are 0 to 3"),
        ({4: 0}, "threads is 0"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[int, Any], words: str) -> None:
    check_refused(_cpu.gated_scan_forward, FORWARD, changes, words)


@pytest.mark.parametrize("reverse", [0, 1])
def test_offsets_must_rise(reverse: int) -> None:
    x, offsets = torch.zeros(1, 2, 4), torch.tensor([0, 3, 2])
    at = x.data_ptr()
    pointers = (at, at, None, None, at, None, None, None, None, offsets.data_ptr())
    scalars = (1, 2, 4, 2, 0, reverse, *(8, 4, 1) * 7)
    with pytest.raises(ValueError, match="offsets do not rise from 0 to time, 4"):
        _cpu.gated_scan_forward("min_gru", "float32", pointers, scalars, 1)


OPERATORS = torch.ops.scan_registry


@pytest.mark.parametrize("kind", ["min_gru", "rg_lru", "linear"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64], ids=["compiled", "by torch's operators"]
)
def test_the_operator_refuses_what_does_not_fit_together(kind: str, dtype: torch.dtype) -> None:
    """Whoever calls it directly: nothing is read or written beyond a tensor."""
    x, state, of = torch.zeros(2, 3, 5, dtype=dtype), torch.zeros(2, 3, dtype=dtype), KINDS[kind]
    inputs = [x] * len(of.inputs)
    parameters = [torch.zeros(3, dtype=dtype)] * len(of.parameters)
    tensors = {"inputs": inputs, "parameters": parameters, "reset": torch.zeros(2, 5).bool()}
    tensors |= {"initial_state": state, "cu_seqlens": None}
    back = {"states": x, "states_grad": x, "final_grad": state}
    wanted = [True] * (len(inputs) + len(parameters) + 1)
    wrong: list[tuple[str, Any]] = [
        ("inputs", [*inputs[:-1], x[..., :3]]),
        ("inputs", [*inputs[:-1], x.half()]),
        ("initial_state", state[:, :1]),
        ("initial_state", state.bfloat16()),
        ("reset", torch.zeros(1, 5).bool()),
        ("states", x[:1]),
        ("states_grad", x.half()),
        ("final_grad", state[:, :1]),
        ("final_grad", state.half()),
    ]
    if parameters:
        wrong += [("parameters", [torch.zeros(4, dtype=dtype)] * len(parameters))]
        wrong += [("parameters", [torch.zeros(3).half()] * len(parameters))]
    for name, value in wrong:
        changed = tensors | back | {name: value}
        forwards = [changed[each] for each in tensors]
        with pytest.raises(ValueError, match="the operator takes torch"):
            OPERATORS.gated_scan_backward(
                kind, *forwards, *(changed[each] for each in back), -1, False, "auto", wanted
            )
        if name in tensors:
            with pytest.raises(ValueError, match="the operator takes torch"):
                OPERATORS.gated_scan(kind, *forwards, -1, False, True, "auto")
