"""transformers' models of Mamba and of Mamba-2, small and with random weights, on the stand-ins and on their own path."""

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
from generating import greedy
from torch import Tensor

from scan_registry import compat
from scan_registry.compat import causal_conv1d, mamba_ssm

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)
for original in ("mamba_ssm", "causal_conv1d"):
    if importlib.util.find_spec(original) is not None:
        pytest.skip(f"{original} itself is installed here", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("exact_convolutions")]

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
HYBRID = SHARED | {
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "mamba_proj_bias": True,
    "pad_token_id": 0,
}
#: Of the first generation, by the name of the model's module: its class, and the config of a small one.
FIRST: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("Mamba", MAMBA),
    "falcon_mamba": ("FalconMamba", MAMBA),
    "jamba": ("Jamba", JAMBA),
}
#: Of the second generation. FalconH1 without its norm, with which its own path does not generate. Scans have two groups, also
#: where the norm beside them has one.
SECOND: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": (
        "Mamba2",
        MAMBA
        | {
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 2,
            "chunk_size": 8,
        },
    ),
    "bamba": ("Bamba", HYBRID | {"attn_layer_indices": [1]}),
    "zamba2": (
        "Zamba2",
        SHARED
        | {
            "layers_block_type": ["mamba", "hybrid", "mamba"],
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "n_mamba_heads": 8,
            "mamba_ngroups": 2,
            "mamba_d_state": 8,
            "chunk_size": 8,
            "pad_token_id": 0,
        },
    ),
    "nemotron_h": (
        "NemotronH",
        SHARED
        | {
            "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 8,
            "mamba_proj_bias": True,
            "pad_token_id": 0,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        HYBRID
        | {
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "shared_intermediate_size": 24,
        },
    ),
    "falcon_h1": (
        "FalconH1",
        HYBRID
        | {
            "num_hidden_layers": 2,
            "mamba_d_ssm": 64,
            "projectors_bias": True,
        },
    ),
}
MODELS = FIRST | SECOND
SCAN = dict.fromkeys(FIRST, "selective_scan_fn") | dict.fromkeys(
    SECOND, "mamba_chunk_scan_combined"
)
#: What the stand-ins are found by, and where they are.
FUNCTIONS: list[tuple[Any, str]] = [
    (mamba_ssm, "selective_scan_fn"),
    (mamba_ssm, "mamba_inner_fn"),
    (mamba_ssm.ops.selective_scan_interface, "selective_scan_fn"),
    (mamba_ssm.ops.selective_scan_interface, "mamba_inner_fn"),
    (mamba_ssm.ops.triton.selective_state_update, "selective_state_update"),
    (mamba_ssm.ops.triton.ssd_combined, "mamba_chunk_scan_combined"),
    (mamba_ssm.ops.triton.ssd_combined, "mamba_split_conv1d_scan_combined"),
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
    assert {*modules.calls} == {"causal_conv1d_fn", SCAN[kind]}
    assert apart(found, expected) <= TOLERANCE
    assert ours.keys() == theirs.keys()
    far = {name: apart(ours[name], theirs[name]) for name in ours}
    assert max(far.values()) <= TOLERANCE, far


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", MODELS)
def test_generation_is_the_full_pass(modules: Modules, kind: str, device: str) -> None:
    ids = tokens(device)
    options = greedy(ids, NEW)
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", SECOND)
@pytest.mark.parametrize("beams", [1, 3])
def test_generation_behind_padding(modules: Modules, kind: str, beams: int, device: str) -> None:
    """On the left, greedily and by beams: each row gets what its own path gives it."""
    ids = tokens(device)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    options = {
        "attention_mask": mask,
        "max_new_tokens": NEW,
        "do_sample": False,
        "num_beams": beams,
    }
    sequences = [
        modules.model(kind, ours, device).eval().generate(ids, **options) for ours in (True, False)
    ]
    assert sequences[0].shape == (2, LENGTH + NEW)
    assert torch.equal(*sequences)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", SECOND)
def test_checkpointing(modules: Modules, kind: str, device: str) -> None:
    """What is computed again in the backward pass gives the same gradients."""
    ids, model = tokens(device), modules.model(kind, True, device).train()
    loss, expected = trained(model, ids)
    model.zero_grad(set_to_none=True)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    modules.calls.clear()
    again, gradients = trained(model, ids)
    layers = sum(hasattr(each, "A_log") for each in model.modules())
    assert modules.calls[SCAN[kind]] == 2 * layers
    assert apart(again, loss) <= TOLERANCE
    far = {name: apart(gradients[name], expected[name]) for name in expected}
    assert max(far.values()) <= TOLERANCE, far


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [pytest.param("mamba2", marks=pytest.mark.thorough), "nemotron_h"])
def test_compiled(modules: Modules, kind: str, device: str) -> None:
    ids, model = tokens(device), modules.model(kind, True, device).train()
    _, expected = trained(model, ids)
    model.zero_grad(set_to_none=True)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager")
    compiled(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    far = {
        name: apart(p.grad, expected[name])
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    assert far.keys() == expected.keys()
    assert max(far.values()) <= TOLERANCE, far


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


@pytest.mark.parametrize(
    ("kind", "adapted"),
    [
        *((kind, name) for kind in FIRST for name in (None, "in_proj", "x_proj", "out_proj")),
        *((kind, name) for kind in SECOND for name in (None, "in_proj", "out_proj")),
    ],
)
def test_training_computes_what_evaluation_does(
    modules: Modules, kind: str, adapted: str | None
) -> None:
    """With adapters, which have gradients, and with padding on the left."""
    model, ids = modules.model(kind, True), tokens("cpu")
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    if adapted:
        layers = [each for each in model.modules() if hasattr(each, "A_log")]
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
