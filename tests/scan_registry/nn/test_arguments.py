"""What constructors and calls of the modules accept and refuse, beside torch.nn's; and what they print."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from scan_registry import nn

KINDS = ("LSTM", "GRU", "RNN", "SLSTM")
X = torch.randn(7, 3, 5)
H = torch.zeros(1, 3, 6)


def error_of(function: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the type is what is looked at
        function()
    return caught.value


@pytest.mark.parametrize("kind", KINDS)
def test_signatures_are_torchs_with_keywords_of_our_own(kind: str) -> None:
    theirs = [*inspect.signature(torch.nn.RNNBase).parameters]
    theirs.remove("mode")
    if kind != "LSTM":
        theirs.remove("proj_size")
    if kind == "RNN":
        theirs.insert(3, "nonlinearity")
    ours = inspect.signature(getattr(nn, kind)).parameters
    keywords = [name for name, item in ours.items() if item.kind is item.KEYWORD_ONLY]
    assert [name for name in ours if name not in keywords] == theirs
    assert keywords == (["num_heads", "backend"] if kind == "SLSTM" else ["backend"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {"input_size": 0},
        {"hidden_size": -1},
        {"num_layers": 1.5},
        {"bias": "no"},
        {"batch_first": 1},
        {"dropout": 2},
        {"dropout": "x"},
        {"dropout": True},
        {"device": "nope"},
        {"dtype": "float32"},
        {"foo": 1},
    ],
    ids=str,
)
def test_wrong_arguments_raise_what_torch_raises(kind: str, options: dict[str, Any]) -> None:
    arguments = {"input_size": 5, "hidden_size": 6, **options}
    theirs = error_of(lambda: getattr(torch.nn, kind.removeprefix("S"))(**arguments))
    ours = error_of(lambda: getattr(nn, kind)(**arguments))
    assert type(ours) is type(theirs)
    (name,) = options
    assert name in str(ours) or str(ours) == str(theirs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"dropout": "x"}, ValueError, r"dropout should be a number in range \[0, 1\], got: 'x'"),
        ({"dtype": torch.complex64}, TypeError, "dtype should be one of torch.float32, .*, got: torch.complex64"),
        ({"backend": "cudnn"}, ValueError, "backend should be one of auto, cuda, .*, got: 'cudnn'"),
    ],
)  # fmt: skip
def test_arguments_that_torch_would_let_pass(
    kind: str, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        getattr(nn, kind)(5, 6, **options)


def test_what_only_torch_has_names_torch() -> None:
    with pytest.raises(TypeError, match="proj_size should be of type int, got: str"):
        nn.LSTM(5, 6, 1, True, False, 0.0, False, "cpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"should be 'tanh', got: 'relu'; .* torch\.nn\.RNN"):
        nn.RNN(5, 6, nonlinearity="relu")
    with pytest.raises(ValueError, match="Unknown nonlinearity True"):
        nn.RNN(5, 6, 2, True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("heads", "error", "words"),
    [
        (4, ValueError, r"hidden_size \(6\) must be divisible by num_heads \(4\)"),
        (0, ValueError, "num_heads must be greater than zero"),
        (2.0, TypeError, "num_heads should be of type int, got: float"),
        (True, TypeError, "num_heads should be of type int, got: bool"),
    ],
)
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_heads_that_are_refused(heads: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        nn.SLSTM(5, 6, num_heads=heads)
    gc.collect(1)  # what is left of the module, which is new, is let go of without a second error


def test_repr_says_all_that_is_not_the_default() -> None:
    options: dict[str, Any] = {
        "num_layers": 2,
        "bias": False,
        "dropout": 0.5,
        "bidirectional": True,
    }
    for kind in ("LSTM", "GRU", "RNN"):
        assert repr(getattr(nn, kind)(5, 6)) == repr(getattr(torch.nn, kind)(5, 6))
        assert repr(getattr(nn, kind)(5, 6, **options)) == repr(
            getattr(torch.nn, kind)(5, 6, **options)
        )
    assert repr(nn.GRU(5, 6, backend="reference")) == "GRU(5, 6, backend='reference')"
    module = nn.SLSTM(5, 6, batch_first=True, num_heads=3, backend="cuda")
    assert repr(module) == "SLSTM(5, 6, batch_first=True, num_heads=3, backend='cuda')"
    assert repr(eval(repr(module), {"SLSTM": nn.SLSTM})) == repr(module)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        ([1], TypeError, "Expected input to be a Tensor or a PackedSequence, got list"),
        (torch.randn(5), ValueError, "Expected input to be 2D or 3D, got 1D instead"),
        (X[..., :4], RuntimeError, r"Expected input.size\(-1\) to be input_size, 5, got 4"),
        (X.double(), TypeError, r"input.to\(torch.float32\), or the module: module.to\(torch.float64\)"),
        (X.long(), ValueError, r"got torch.int64. Convert the input: input.to\(torch.float32\)$"),
        (X.to("meta"), RuntimeError, "got input on meta and parameters on cpu"),
        (X.to_sparse(), TypeError, r"input is sparse; .* input.to_dense\(\)"),
        (X.to_mkldnn(), TypeError, r"input is in oneDNN's layout; .* input.to_dense\(\)"),
        (pack_sequence([torch.randn(4, 4)]), RuntimeError, r"input.data.size\(-1\) to be input_size, 5, got 4"),
        (pack_sequence([torch.randn(4, 5).double()]), TypeError, "Expected input.data of dtype torch.float32"),
        (pack_sequence([torch.randn(4, 2, 5)]), RuntimeError, "Expected input.data to be 2D, got 3D"),
    ],
)  # fmt: skip
def test_wrong_inputs_are_named(kind: str, x: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        getattr(nn, kind)(5, 6)(x)
    assert kind in str(caught.value) or "so pass" in str(caught.value)


def test_a_wrong_dtype_is_a_type_error_and_as_torch_has_it() -> None:
    """``TypeError``, as functions raise, and what torch.nn raises in its place."""
    module, torchs = nn.LSTM(5, 6), torch.nn.LSTM(5, 6)
    for kind in (TypeError, ValueError):
        with pytest.raises(kind, match="Expected input of dtype"):
            module(X.double())
        with pytest.raises(kind, match="Expected reset of dtype"):
            module(X, reset=torch.zeros(X.shape[:2]))
    with pytest.raises(ValueError, match="dtype"):
        torchs(X.double())
    for kind in (TypeError, RuntimeError):
        with pytest.raises(kind, match=r"Expected hx\[0\] .* of the input's dtype"):
            module(X, (H.double(), H))


def test_what_is_said_of_jagged_inputs_runs() -> None:
    parts = [torch.randn(4, 5), torch.randn(7, 5)]
    input, module = torch.nested.nested_tensor(parts, layout=torch.jagged), nn.LSTM(5, 6)
    with pytest.raises(TypeError, match="input is jagged") as caught:
        module(input)
    instead = "torch.nn.utils.rnn.pack_sequence([*input.unbind()], enforce_sorted=False)"
    assert f"pass {instead}" in str(caught.value)
    _, (h, _) = module(eval(instead))
    torch.testing.assert_close(h[0, 1], module(parts[1])[1][0][0])


def test_parameters_of_a_dtype_that_no_kernel_has() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = nn.GRU(5, 6).to(torch.complex64)
    with pytest.raises(TypeError, match=r"GRU: Expected parameters of .*, got torch.complex64"):
        module(X.to(torch.complex64))


def test_autocast_takes_what_it_converts_and_nothing_else() -> None:
    module = nn.LSTM(5, 6).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, states = module(X)
        again = module(X, states)[0]
        with pytest.raises(ValueError, match=r"got torch.float64"):
            module(X.double())
        with pytest.raises(ValueError, match=r"got torch.int64"):
            module(X.long())
    assert out.dtype == again.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"of dtype torch.bfloat16, as the parameters are"):
        module(X)


@pytest.mark.parametrize(
    ("kind", "hx", "words"),
    [
        ("LSTM", (H, H[:, :2]), r"Expected hx\[1\] \(c\) of size \(1, 3, 6\), got \(1, 2, 6\)"),
        ("LSTM", (H.double(), H), r"Expected hx\[0\] \(h\) of the input's dtype, torch.float32, got torch.float64"),
        ("LSTM", (H.int(), H), "got torch.int32"),
        ("LSTM", (H[0], H[0]), r"batched input, expected hx\[0\] \(h\) to be 3-D, \(1, 3, 6\), got 2-D"),
        ("GRU", H[:, :2], r"GRU: Expected hx of size \(1, 3, 6\), got \(1, 2, 6\)"),
        ("SLSTM", (H, H, H, H[..., :2]), r"Expected hx\[3\] \(m\) of size \(1, 3, 6\)"),
    ],
)  # fmt: skip
def test_wrong_states_are_named(kind: str, hx: Any, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        getattr(nn, kind)(5, 6)(X, hx)


@pytest.mark.parametrize(
    ("kind", "hx", "words"),
    [
        ("LSTM", H, r"Expected hx to be a tuple of 2 Tensors, \(h, c\), got Tensor"),
        ("LSTM", (H,), r"Expected hx to be a tuple of .*, got tuple of Tensor"),
        ("LSTM", (H, None), r"Expected hx to be a tuple of .*, got tuple of Tensor, NoneType"),
        ("LSTM", 3, r"Expected hx to be a tuple of .*, got int"),
        ("GRU", (H,), "Expected hx to be a Tensor, got tuple of Tensor"),
        (
            "SLSTM",
            (H, H),
            r"Expected hx to be a tuple of 4 Tensors, \(h, c, n, m\), got tuple of Tensor, Tensor",
        ),
    ],
)
def test_states_that_are_none(kind: str, hx: Any, words: str) -> None:
    with pytest.raises(TypeError, match=f"{kind}: {words}"):
        getattr(nn, kind)(5, 6)(X, hx)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_pickles(kind: str) -> None:
    options = {"num_heads": 2} if kind == "SLSTM" else {}
    module = getattr(nn, kind)(5, 6, backend="reference", **options)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        assert repr(other) == repr(module)
        assert torch.equal(other(X)[0], module(X)[0])
        assert other.weight_hh_l0 is not module.weight_hh_l0
