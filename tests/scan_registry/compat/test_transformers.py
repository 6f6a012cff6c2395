"""transformers' Mamba, FalconMamba and Jamba, small and with random weights, on the stand-ins and on their own path."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from scan_registry import compat
from scan_registry.compat import causal_conv1d, mamba_ssm

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)
for original in ("mamba_ssm", "causal_conv1d"):
    if importlib.util.find_spec(original) is not None:
        pytest.skip(f"{original} itself is installed here", allow_module_level=True)

pytestmark = pytest.mark.slow

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.gpu),
]
TOLERANCE = 1e-5
VOCABULARY, LENGTH, NEW = 50, 19, 8
SHARED = {"vocab_size": VOCABULARY, "hidden_size": 32, "bos_token_id": 1, "eos_token_id": None}
MAMBA = SHARED | {"state_size": 8, "num_hidden_layers": 2, "pad_token_id": 0, "use_bias": True}
JAMBA = SHARED | {
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_d_state": 8,
    "mamba_dt_rank": 4,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "num_experts": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "pad_token_id": 0,
}
#: By the name of the model's module: its class, and the config of a small one.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("Mamba", MAMBA),
    "falcon_mamba": ("FalconMamba", MAMBA),
    "jamba": ("Jamba", JAMBA),
}
#: What the stand-ins are found by, and where they are.
FUNCTIONS: list[tuple[Any, str]] = [
    (mamba_ssm, "selective_scan_fn"),
    (mamba_ssm, "mamba_inner_fn"),
    (mamba_ssm.ops.selective_scan_interface, "selective_scan_fn"),
    (mamba_ssm.ops.selective_scan_interface, "mamba_inner_fn"),
    (mamba_ssm.ops.triton.selective_state_update, "selective_state_update"),
    (causal_conv1d, "causal_conv1d_fn"),
    (causal_conv1d, "causal_conv1d_update"),
]


@dataclass
class Modules:
    """transformers' modules of models, imported without the stand-ins and with them; how often those were called."""

    own: dict[str, ModuleType]
    ours: dict[str, ModuleType]
    calls: Counter[str]

    def model(self, kind: str, ours: bool, device: str = "cpu") -> Any:
        """With the same weights for each ``kind``."""
        prefix, options = MODELS[kind]
        config = getattr(
            importlib.import_module(f"transformers.models.{kind}.configuration_{kind}"),
            f"{prefix}Config",
        )(**options)
        torch.manual_seed(0)
        modules = self.ours if ours else self.own
        model = getattr(modules[kind], f"{prefix}ForCausalLM")(config).to(device)
        with torch.no_grad():  # biases begin as zeros, which would hide what becomes of them
            for name, parameter in model.named_parameters():
                if name.endswith(("conv1d.bias", "in_proj.bias", "out_proj.bias")):
                    parameter.add_(0.1 * torch.randn(parameter.shape).to(device))
        return model


def import_anew(kind: str) -> ModuleType:
    name = f"transformers.models.{kind}.modeling_{kind}"
    sys.modules.pop(name, None)
    return importlib.import_module(name)


def counted(function: Callable[..., Any], calls: Counter[str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        calls[function.__name__] += 1
        return function(*args, **kwargs)

    return call


@pytest.fixture(scope="module")
def modules() -> Iterator[Modules]:
    calls: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        own = {kind: import_anew(kind) for kind in MODELS}
        for kind in MODELS:
            del sys.modules[f"transformers.models.{kind}.modeling_{kind}"]
        for module, name in FUNCTIONS:
            patch.setattr(module, name, counted(getattr(module, name), calls))
        compat.install("mamba_ssm", "causal_conv1d")
        try:
            ours = {kind: import_anew(kind) for kind in MODELS}
        finally:
            compat.uninstall()
    yield Modules(own, ours, calls)
    for kind in MODELS:
        sys.modules.pop(f"transformers.models.{kind}.modeling_{kind}", None)


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def tokens(device: str, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (2, LENGTH), generator=generator).to(device)


def trained(model: Any, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and each gradient."""
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), found


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp_min(1e-12))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_losses_and_gradients(modules: Modules, kind: str, training: bool, device: str) -> None:
    ids = tokens(device)
    expected, theirs = trained(modules.model(kind, False, device).train(training), ids)
    modules.calls.clear()
    found, ours = trained(modules.model(kind, True, device).train(training), ids)
    assert {*modules.calls} == {"causal_conv1d_fn", "selective_scan_fn"}
    assert apart(found, expected) <= TOLERANCE
    assert ours.keys() == theirs.keys()
    far = {name: apart(ours[name], theirs[name]) for name in ours}
    assert max(far.values()) <= TOLERANCE, far


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", MODELS)
def test_generation_is_the_full_pass(modules: Modules, kind: str, device: str) -> None:
    ids = tokens(device)
    options = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": NEW,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    model = modules.model(kind, True, device).eval()
    modules.calls.clear()
    made = model.generate(ids, **options)
    assert modules.calls["selective_state_update"] > 0
    assert modules.calls["selective_state_update"] == modules.calls["causal_conv1d_update"]
    assert made.sequences.shape == (2, LENGTH + NEW)
    with torch.no_grad():
        whole = model(made.sequences, use_cache=False).logits[:, LENGTH - 1 : -1]
    assert apart(torch.stack(made.logits, 1), whole) <= TOLERANCE
    own = modules.model(kind, False, device).eval().generate(ids, **options)
    assert torch.equal(made.sequences, own.sequences)


class Adapted(torch.nn.Module):
    """A layer with a low-rank addition that has the weight and the bias of the layer inside, as peft's."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base, self.weight, self.bias = base, base.weight, base.bias
        self.down = torch.nn.Linear(base.in_features, 2, bias=False)
        self.up = torch.nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.base(x) + self.up(self.down(x))
        return added


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("adapted", [None, "in_proj", "x_proj", "out_proj"])
def test_training_computes_what_evaluation_does(
    modules: Modules, kind: str, adapted: str | None
) -> None:
    """With adapters, which have gradients, and with padding on the left."""
    model, ids = modules.model(kind, True), tokens("cpu")
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    if adapted:
        layers = [each for each in model.modules() if hasattr(each, "x_proj")]
        for layer in layers:
            setattr(layer, adapted, Adapted(getattr(layer, adapted)))
    expected = model.eval()(input_ids=ids, attention_mask=mask, use_cache=False).logits
    found = model.train()(input_ids=ids, attention_mask=mask, use_cache=False).logits
    assert apart(found.detach(), expected.detach()) <= TOLERANCE
    if adapted:
        found.square().sum().backward()
        assert all(float(getattr(each, adapted).up.weight.grad.norm()) > 0 for each in layers)


@pytest.mark.parametrize("device", DEVICES)
def test_falcon_mambas_training_is_mamba_ssms(modules: Modules, device: str) -> None:
    """With ``mamba_inner_fn``, which a program may put in: its norm of step sizes after their projection."""
    ids, own = tokens(device), modules.own["falcon_mamba"]

    def inner(*args: Any, **options: Any) -> Tensor:
        norms = {name: options.pop(name) for name in [*options] if "rms" in name}
        xz, conv, conv_bias, x_proj, dt_proj, out_proj, out_bias, A, _, _, D = args
        channels, width, eps = A.shape[0], conv.shape[-1], norms["b_c_dt_rms_eps"]
        x, z = xz.chunk(2, 1)
        x = torch.nn.functional.conv1d(x, conv, conv_bias, padding=width - 1, groups=channels)
        x = torch.nn.functional.silu(x[..., : xz.shape[2]])
        parts = (x.mT @ x_proj.mT).split([dt_proj.shape[1], A.shape[1], A.shape[1]], -1)
        normed = (
            torch.nn.functional.rms_norm(part, part.shape[-1:], norms[name], eps).mT
            for part, name in (
                (parts[0] @ dt_proj.mT, "dt_rms_weight"),
                (parts[1], "b_rms_weight"),
                (parts[2], "c_rms_weight"),
            )
        )
        delta, B, C = normed
        y = own.mamba_selective_scan(x, delta, A, B, C, D=D, z=z, **options)
        return torch.nn.functional.linear(y.mT, out_proj, out_bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own, "mamba_inner_fn", inner)
        patch.setattr(modules.ours["falcon_mamba"], "mamba_inner_fn", mamba_ssm.mamba_inner_fn)
        expected, theirs = trained(modules.model("falcon_mamba", False, device).train(), ids)
        found, ours = trained(modules.model("falcon_mamba", True, device).train(), ids)
    assert apart(found, expected) <= TOLERANCE
    for name, gradient in ours.items():
        assert name.endswith("layernorm.weight") or apart(gradient, theirs[name]) <= TOLERANCE, name
