"""transformers' RecurrentGemma, small and with random weights, on ``rg_lru`` and on its own loop over time."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import io
import sys
import tokenize
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from generating import greedy
from torch import Tensor

from scan_registry import compat
from scan_registry.compat import recurrent_gemma
from scan_registry.kernels.gated_scan import kinds

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCE = 1e-5
VOCABULARY, WIDTH, HEADS, LENGTH, NEW = 50, 32, 4, 19, 8
CONFIG: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "lru_width": WIDTH,
    "intermediate_size": 96,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 3,  # two of them recurrent
    "attention_window_size": 16,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
#: What transformers' code was when ``recurrent_gemma.forward`` was last compared with it, without comments and texts.
DIGESTS = {
    "RecurrentGemmaRglru.forward": "d4b21202ed37435b",
    "RecurrentGemmaRglru._rnn_scan": "064a739ff4263488",
    "SqrtBoundDerivative.forward": "9b6cae00b28de141",
    "SqrtBoundDerivative.backward": "dd2b0ea0f4c074cb",
    "RecurrentGemmaRecurrentBlock.forward": "5d6fa1cccec7a84d",
}


@pytest.fixture(scope="module")
def gemma() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        return importlib.import_module(recurrent_gemma.MODULE)


@pytest.fixture(autouse=True)
def _taken_back(gemma: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    own = gemma.RecurrentGemmaRglru.forward
    yield
    compat.uninstall()
    assert gemma.RecurrentGemmaRglru.forward is own


def model_of(gemma: ModuleType, device: str = "cpu", **options: Any) -> Any:
    """With the same weights each time."""
    torch.manual_seed(0)
    config = gemma.RecurrentGemmaConfig(**CONFIG | options)
    return gemma.RecurrentGemmaForCausalLM(config).to(device)


def layer_of(gemma: ModuleType, device: str = "cpu") -> Any:
    """One RG-LRU, with biases that are not zero."""
    generator = torch.Generator().manual_seed(0)
    layer = gemma.RecurrentGemmaRglru(gemma.RecurrentGemmaConfig(**CONFIG))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        layer.recurrent_param.sub_(4)  # a in the neighbourhood of 0.9
    return layer.to(device)


def tokens(device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, VOCABULARY, (2, LENGTH), generator=generator).to(device)


def sequence(device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """What a layer takes: activations, and positions of which three are 0, one of them in the middle."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, LENGTH, WIDTH, generator=generator).to(device, dtype)
    positions = torch.arange(LENGTH, device=device).repeat(2, 1)
    positions[1, 7:] -= 7
    return x, positions


def trained(model: Any, **inputs: Any) -> dict[str, Tensor]:
    """The loss, and each gradient."""
    model.zero_grad()
    loss = model(**inputs, labels=inputs["input_ids"], use_cache=False).loss
    loss.backward()
    result = {name: p.grad.clone() for name, p in model.named_parameters()}
    return result | {"the loss": loss.detach()}


def differentiated(
    layer: Any, x: Tensor, positions: Tensor, state: Tensor | None = None
) -> dict[str, Tensor]:
    """What a layer computes: states, the final state, and gradients of all that it is given."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    state = None if state is None else state.detach().requires_grad_()
    layer.recurrent_states = state
    states = layer(x, positions)
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(states.shape, generator=generator).to(states)
    ((states * weights).sum() + layer.recurrent_states.cos().sum()).backward()
    result = {name: p.grad.clone() for name, p in layer.named_parameters()}
    result |= {"x": x.grad, "states": states.detach(), "final": layer.recurrent_states.detach()}
    return result if state is None else result | {"state": state.grad}


def apart(actual: Tensor, expected: Tensor) -> float:
    assert actual.dtype == expected.dtype
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))


def agree(actual: dict[str, Tensor], expected: dict[str, Tensor], most: float = TOLERANCE) -> None:
    assert actual.keys() == expected.keys()
    far = {name: apart(actual[name], expected[name]) for name in actual}
    assert max(far.values()) <= most, far


# --- Whether transformers is what it was ------------------------------------------------------


def digest(function: Any) -> str:
    """Of the names, numbers and operators of its source."""
    source = io.StringIO(inspect.getsource(function))
    kept = [
        token.string
        for token in tokenize.generate_tokens(source.readline)
        if token.type in (tokenize.NAME, tokenize.NUMBER, tokenize.OP)
    ]
    return hashlib.sha256(" ".join(kept).encode()).hexdigest()[:16]


def test_transformers_computes_what_it_did(gemma: ModuleType) -> None:
    version = sys.modules["transformers"].__version__
    for name, expected in DIGESTS.items():
        place, method = name.split(".")
        actual = digest(getattr(getattr(gemma, place), method))
        assert actual == expected, (
            f"transformers {version} changed {name} ({actual}): compare it with recurrent_gemma.forward, "
            "and if that still computes the same, write the new digest here"
        )
    assert kinds.MOST_SLOPE == gemma._MAX_SQRT_GRADIENT


# --- What it computes -------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_losses_and_gradients(gemma: ModuleType, training: bool, device: str) -> None:
    model, ids = model_of(gemma, device).train(training), tokens(device)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    expected = trained(model, input_ids=ids, attention_mask=mask)
    compat.install("recurrent_gemma")
    agree(trained(model, input_ids=ids, attention_mask=mask), expected)
    positions = sequence(device)[1]
    compat.uninstall("recurrent_gemma")
    expected = trained(model, input_ids=ids, position_ids=positions)
    compat.install("recurrent_gemma")
    agree(trained(model, input_ids=ids, position_ids=positions), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_state", [False, True], ids=["from-zero", "from-a-state"])
def test_a_layer(gemma: ModuleType, with_state: bool, device: str) -> None:
    layer = layer_of(gemma, device)
    x, positions = sequence(device)
    positions[0] += 3  # this one goes on
    state = torch.randn(2, WIDTH).to(device) if with_state else None
    for step in (slice(None), slice(1), slice(1, 2)):
        inputs = x[:, step], positions[:, step], state
        expected = differentiated(layer, *inputs)
        compat.install("recurrent_gemma")
        actual = differentiated(layer, *inputs)
        compat.uninstall()
        agree(actual, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_the_roots_slope_is_bounded(gemma: ModuleType, device: str) -> None:
    """Where a is 1 in float32: the slope of √(1 − a²) would be infinite."""
    layer, (x, positions) = layer_of(gemma, device), sequence(device)
    bounded = slice(0, WIDTH // 2)
    with torch.no_grad():
        layer.recurrent_param[bounded] = -30
    expected = differentiated(layer, x, positions)
    steep = expected["recurrent_param"][bounded]
    assert steep.isfinite().all()
    assert (steep != 0).all()
    compat.install("recurrent_gemma")
    actual = differentiated(layer, x, positions)
    agree(actual, expected)
    assert apart(actual["recurrent_param"][bounded], steep) <= TOLERANCE


def test_sixteen_bits_are_as_near_to_float32(gemma: ModuleType) -> None:
    """transformers rounds every gate; here states and gates are float32."""
    for dtype in (torch.bfloat16, torch.float16):
        layer, (x, positions) = layer_of(gemma).to(dtype), sequence(dtype=dtype)
        own = differentiated(layer, x, positions)
        exact = differentiated(layer.float(), x.float(), positions)
        compat.install("recurrent_gemma")
        result = differentiated(layer.to(dtype), x, positions)
        compat.uninstall()
        assert {n: t.dtype for n, t in result.items()} == {n: t.dtype for n, t in own.items()}
        for name in ("states", "final", "x", "recurrent_param"):
            error = apart(result[name].float(), exact[name])
            assert error <= apart(own[name].float(), exact[name]), (name, dtype)
            assert error <= 4 * torch.finfo(dtype).eps, (name, dtype)


# --- Generation -------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_generation_is_the_full_pass(
    gemma: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tokens(device)
    options = greedy(ids, NEW)
    model = model_of(gemma, device).eval()
    own = model.generate(ids, **options)
    lengths = []

    def rg_lru(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        lengths.append(x.shape[1])
        return original(x, *args, **kwargs)

    original = recurrent_gemma.rg_lru
    monkeypatch.setattr(recurrent_gemma, "rg_lru", rg_lru)
    compat.install("recurrent_gemma")
    created = model.generate(ids, **options)
    assert lengths == [LENGTH] * 2 + [1] * (2 * (NEW - 1))  # in two layers
    assert torch.equal(created.sequences, own.sequences)
    assert apart(torch.stack(created.logits), torch.stack(own.logits)) <= TOLERANCE
    with torch.no_grad():
        whole = model(created.sequences, use_cache=False).logits[:, LENGTH - 1 : -1]
    assert apart(torch.stack(created.logits, 1), whole) <= TOLERANCE


def test_torch_compile(gemma: ModuleType) -> None:
    model, ids = model_of(gemma).train(), tokens()
    compat.install("recurrent_gemma")
    expected = trained(model, input_ids=ids)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    loss = compiled(input_ids=ids, labels=ids, use_cache=False).loss
    model.zero_grad()
    loss.backward()
    actual = {name: p.grad for name, p in model.named_parameters()}
    agree(actual | {"the loss": loss.detach()}, expected)
    torch.compiler.reset()


# --- Replacing and undoing --------------------------------------------------------------------


def test_models_made_before_and_after_have_it(
    gemma: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    original = recurrent_gemma.rg_lru
    monkeypatch.setattr(
        recurrent_gemma, "rg_lru", lambda *a, **k: (calls.append(1), original(*a, **k))[1]
    )
    ids = tokens()
    before = model_of(gemma).eval()
    compat.install("recurrent_gemma")
    compat.install("recurrent_gemma")
    after = model_of(gemma).eval()
    for model, expected in ((before, 2), (after, 4)):
        model(ids)
        assert len(calls) == expected
    compat.uninstall()
    compat.uninstall("recurrent_gemma")
    before(ids)
    after(ids)
    assert len(calls) == 4


def test_what_was_put_in_its_place_later_stays(gemma: ModuleType) -> None:
    own = gemma.RecurrentGemmaRglru.forward
    compat.install("recurrent_gemma")
    gemma.RecurrentGemmaRglru.forward = later = lambda *_: None
    compat.uninstall()
    assert gemma.RecurrentGemmaRglru.forward is later
    gemma.RecurrentGemmaRglru.forward = own


def test_another_class_is_not_replaced(gemma: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class Changed:
        def forward(self, activations: Tensor, cache: Any) -> Tensor:
            return activations

    own = Changed.forward
    module: Any = ModuleType("changed")
    module.RecurrentGemmaRglru = Changed
    monkeypatch.setitem(sys.modules, recurrent_gemma.MODULE, module)
    with pytest.raises(ImportError, match=r"takes \(self, activations, cache\), not"):
        compat.install("recurrent_gemma", "mamba_ssm")
    assert Changed.forward is own
    assert importlib.util.find_spec("mamba_ssm") is None
    del module.RecurrentGemmaRglru
    with pytest.raises(ImportError, match="has no RecurrentGemmaRglru"):
        compat.install("recurrent_gemma")


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, recurrent_gemma.MODULE, None)
    with pytest.raises(ImportError, match="recurrent_gemma needs transformers"):
        compat.install("recurrent_gemma")
