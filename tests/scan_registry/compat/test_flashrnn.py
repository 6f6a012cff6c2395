"""The stand-in for ``flashrnn``: its arguments, layouts and dtypes, against ``rnn``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from scan_registry import rnn
from scan_registry.compat.flashrnn import BACKENDS, FlashRNNConfig, flashrnn
from scan_registry.kernels.rnn.problem import SIZES, Function

B, T, H, D = 2, 5, 3, 4


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def draw(function: Function, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    sizes = SIZES[function]
    shapes = (
        (B, T, sizes.inputs, H, D),
        (sizes.recurrent, H, D, D),
        (sizes.bias, H, D),
        (len(sizes.states), B, 1, H, D),
    )
    return tuple(torch.rand(shape, dtype=dtype, requires_grad=True) for shape in shapes)


def in_order(tensor: Tensor, was: str, wanted: str) -> Tensor:
    return tensor.permute([was.index(letter) for letter in wanted])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", SIZES)
def test_results_and_gradients(function: Function, backend: str) -> None:
    inputs = draw(function)
    for arguments in (inputs[:3], inputs):
        actual = flashrnn(*arguments, function=function, backend=backend, dtype="float32")
        expected = rnn(*arguments, function=function)
        assert torch.equal(actual[0], expected[0])
        assert torch.equal(actual[1], expected[1])
        assert actual[1].shape == (len(SIZES[function].states), B, 1, H, D)
        for got, want in zip(
            torch.autograd.grad(actual[0].square().sum() + actual[1].sum(), arguments),
            torch.autograd.grad(expected[0].square().sum() + expected[1].sum(), arguments),
            strict=True,
        ):
            assert torch.equal(got, want)


def test_it_computes_in_bfloat16_unless_told() -> None:
    wx, r, b, states = draw("lstm")
    result, last = flashrnn(wx, r, b, states)
    narrow = [tensor.bfloat16() for tensor in (wx, r, b, states)]
    assert result.dtype == last.dtype == torch.float32
    assert torch.equal(result, rnn(*narrow)[0].float())


@pytest.mark.parametrize("bias_shape", ["GHD", "HGD", "HDG"])
@pytest.mark.parametrize("recurrent_shape", ["GHDP", "HGDP", "HPGD", "HPDG"])
@pytest.mark.parametrize("output_shape", ["SBTHD", "STBHD", "SBHTD"])
@pytest.mark.parametrize("input_shape", ["BTGHD", "TBGHD"])
def test_layouts(
    input_shape: str, output_shape: str, recurrent_shape: str, bias_shape: str
) -> None:
    wx, r, b, states = draw("gru")
    config = FlashRNNConfig(
        function="gru",
        dtype="float32",
        input_shape=input_shape,
        output_shape=output_shape,
        recurrent_shape=recurrent_shape,
        bias_shape=bias_shape,
    )
    actual = flashrnn(
        in_order(wx, "BTGHD", input_shape),
        in_order(r, "GHDP", recurrent_shape),
        in_order(b, "GHD", bias_shape),
        in_order(states, "SBTHD", output_shape),
        config=config,
    )
    expected = rnn(wx, r, b, states, function="gru")
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, in_order(want, "SBTHD", output_shape))


def test_dtypes_of_each_tensor() -> None:
    wx, r, b, states = draw("slstm")
    config = FlashRNNConfig(
        function="slstm", dtype="float32", dtype_w="bfloat16", dtype_r="float16", dtype_s="float16"
    )
    actual = flashrnn(wx, r, b, states, config=config)
    expected = rnn(
        wx.bfloat16().float(), r.half().float(), b, states.half().float(), function="slstm"
    )
    assert actual[0].dtype == torch.float16
    assert torch.equal(actual[0], expected[0].half())
    strict = FlashRNNConfig(dtype="float32", enable_automatic_mixed_precision=False)
    flashrnn(*draw("lstm"), config=strict)
    with pytest.raises(TypeError, match=r"R has dtype torch\.float64"):
        flashrnn(wx, r.double(), b, config=strict)


def test_initial_values() -> None:
    wx, r, b, _ = draw("lstm")
    same = FlashRNNConfig(dtype="float32", initial_val=0.5)
    start = torch.full((2, B, 1, H, D), 0.5)
    assert torch.equal(flashrnn(wx, r, b, config=same)[0], rnn(wx, r, b, start)[0])
    start[1] = 2
    item = FlashRNNConfig(dtype="float32", initial_val=[0.5, 2.0])
    assert torch.equal(flashrnn(wx, r, b, config=item)[0], rnn(wx, r, b, start)[0])
    with pytest.raises(ValueError, match="initial_val has 1 values; lstm has 2 states"):
        flashrnn(wx, r, b, config=FlashRNNConfig(initial_val=[1.0]))


@pytest.mark.parametrize(
    "option",
    [
        {"gradient_recurrent_cut": True},
        {"gradient_recurrent_clipval": 0.01},
        {"forward_clipval": 0.05},
    ],
)
def test_clips_are_those_that_their_names_say(option: dict[str, Any]) -> None:
    inputs = draw("lstm")
    actual = flashrnn(*inputs, config=FlashRNNConfig(dtype="float32", **option))[0]
    expected, plain = rnn(*inputs, **option)[0], rnn(*inputs)[0]
    assert torch.equal(actual, expected)
    assert torch.equal(actual, plain) == ("forward_clipval" not in option)
    grads = [torch.autograd.grad(out[0].sum(), inputs)[1] for out in (actual, expected, plain)]
    assert torch.equal(grads[0], grads[1])
    assert not torch.equal(grads[0], grads[2])


def test_what_a_config_knows() -> None:
    config = FlashRNNConfig(function="gru", hidden_dim=12, num_heads=3)
    assert (config.head_dim, config.input_dim, config.simple_agg) == (4, 36, False)
    assert (config.num_gates_r, config.num_gates_w, config.num_gates_t) == (3, 3, 4)
    assert FlashRNNConfig(num_heads=3, head_dim=4).hidden_dim == 12
    assert FlashRNNConfig(hidden_dim=12, head_dim=4).num_heads == 3
    config = FlashRNNConfig(dtype="float16", dtype_w="float32")
    assert config.torch_dtype == config.torch_dtype_r == config.torch_dtype_b == torch.float16
    assert config.torch_dtype_w == config.torch_dtype_s == torch.float32


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "cudnn"}, "accepted are cuda_fused, cuda, triton_fused, triton, vanilla"),
        ({"function": "rwkv"}, "accepted are lstm, gru, elman, slstm"),
        ({"dtype_r": "int8"}, "dtype_r is 'int8'; accepted are bfloat16"),
        ({"input_shape": "BTGH"}, "accepted are the letters BTGHD, each once"),
        ({"constants": {"alpha": 1.0}}, "lstm has none"),
        ({"hidden_dim": 12, "num_heads": 5}, "must be the others' product"),
    ],
)
def test_configs_that_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FlashRNNConfig(**options)


def test_tensors_that_are_refused() -> None:
    wx, r, b, states = draw("lstm")
    with pytest.raises(TypeError, match=r"R must be a torch\.Tensor, not list"):
        flashrnn(wx, [1], b)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="it must be B, T, G, H, D"):
        flashrnn(wx[0], r, b)
    with pytest.raises(ValueError, match="num_heads is 2 in the config, and 3 in Wx"):
        flashrnn(wx, r, b, config=FlashRNNConfig(num_heads=2, head_dim=4))
    with pytest.raises(ValueError, match="states has shape"):
        flashrnn(wx, r, b, states[:1])
    with pytest.raises(TypeError, match=r"states must be a torch\.Tensor, not list"):
        flashrnn(wx, r, b, [states])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Wx is in oneDNN's layout; .* pass Wx.to_dense\(\)"):
        flashrnn(wx.detach().float().to_mkldnn(), r, b)
    with pytest.raises(TypeError, match=r"Wx has dtype torch\.int32; accepted are bfloat16"):
        flashrnn(wx.int(), r, b)
    with pytest.raises(TypeError, match="config must be a FlashRNNConfig, not dict"):
        flashrnn(wx, r, b, config={"function": "lstm"})  # type: ignore[arg-type]
