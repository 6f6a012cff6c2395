"""Run a model of transformers on scan_registry, and time it beside transformers' own code: Mamba, RecurrentGemma, or one on
Mamba-2's scan (Mamba2, Bamba, Zamba2, NemotronH, GraniteMoeHybrid, FalconH1).

    python examples/transformers_models.py mamba [--device cpu] [--dtype float32] [--json FILE]
    python examples/transformers_models.py recurrent_gemma
    python examples/transformers_models.py mamba2

One line, ``compat.install(…)``, makes the model run on scan_registry. Small models, randomly initialised, compute (8, 512)
tokens, those on Mamba-2's scan (2, 512), as their own code takes much memory: milliseconds of a training step (forward,
backward and AdamW's update), of a forward pass, and of a token that is generated, for one sequence and for 64. Both start from
the same weights, and their losses and their first gradients have to agree. Needs transformers 5.16 or later, and for all but
RecurrentGemma neither mamba-ssm nor causal-conv1d.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from scan_registry import compat

#: The names of models on Mamba-2's scan, as their classes begin.
SECOND = {
    "mamba2": "Mamba2",
    "bamba": "Bamba",
    "zamba2": "Zamba2",
    "nemotron_h": "NemotronH",
    "granitemoehybrid": "GraniteMoeHybrid",
    "falcon_h1": "FalconH1",
}
#: What ``compat.install`` takes for each model.
INSTALLED = {
    **dict.fromkeys(("mamba", *SECOND), ("mamba_ssm", "causal_conv1d")),
    "recurrent_gemma": ("recurrent_gemma",),
}
PATHS = ("its own", "scan_registry")
#: How far the losses of the two paths may be apart, relative to the first; and their first gradients, all as one vector.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
GRADIENTS = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
#: Of the models: features, layers, vocabulary.
SIZES = {"mamba": (768, 2, 50280), "recurrent_gemma": (768, 3, 8192)}
SIZES |= dict.fromkeys(SECOND, (2048, 2, 8192))


def modules(name: str) -> dict[str, ModuleType]:
    """The model's Python module by path: one for Mamba asks for the packages when it is imported."""
    home, by_path = f"transformers.models.{name}.modeling_{name}", {}
    for path in PATHS:
        sys.modules.pop(home, None)
        if path == "scan_registry" and name != "recurrent_gemma":
            compat.install(*INSTALLED[name])
        by_path[path] = importlib.import_module(home)
    return by_path


def build(name: str, module: ModuleType, size: tuple[int, int, int]) -> Any:
    """The model, with the same weights each time."""
    import transformers

    width, layers, vocabulary = size
    settings = {"vocab_size": vocabulary, "hidden_size": width, "num_hidden_layers": layers}
    settings |= {"eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(0)
    if name == "mamba":
        return module.MambaForCausalLM(transformers.MambaConfig(**settings))
    if name in SECOND:
        settings |= second(name, width)
        config = getattr(transformers, f"{SECOND[name]}Config")(**settings)
        return getattr(module, f"{SECOND[name]}ForCausalLM")(config)
    settings |= {"lru_width": width, "intermediate_size": 3 * width, "num_attention_heads": 8}
    return module.RecurrentGemmaForCausalLM(transformers.RecurrentGemmaConfig(**settings))


def second(name: str, width: int) -> dict[str, Any]:
    """Settings of two layers, of which one has attention where transformers does not generate without, and of heads of 64
    channels and 128 states unless they are narrow."""
    size, states, groups = (64, 128, 8) if width >= 512 else (8, 8, 2)
    heads = 2 * width // size
    if name == "mamba2":
        return {"num_heads": heads, "head_dim": size, "state_size": states, "n_groups": 1}
    common = {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 3 * width}
    if name == "zamba2":
        own = {
            "n_mamba_heads": heads,
            "mamba_d_state": states,
            "layers_block_type": ["mamba", "hybrid"],
        }
    elif name == "nemotron_h":
        own = {"mamba_num_heads": heads, "mamba_head_dim": size, "ssm_state_size": states}
        own |= {
            "n_groups": groups,
            "layers_block_type": ["mamba", "attention"],
            "head_dim": width // 8,
        }
    else:
        own = {"mamba_n_heads": heads, "mamba_d_state": states}
        own |= {
            "bamba": {"attn_layer_indices": [1]},
            "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
            "falcon_h1": {"mamba_d_ssm": 2 * width},
        }[name]
    return common | own


def interleaved(
    name: str, calls: dict[str, Callable[[], object]], repeats: int
) -> dict[str, float]:
    """Median ms of calls that alternate between the paths, each after one whose time does not count."""
    times: dict[str, list[float]] = {path: [] for path in calls}
    for _ in range(repeats):
        for path, call in calls.items():
            if name == "recurrent_gemma" and path == "scan_registry":
                compat.install(*INSTALLED[name])
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[path].append(1e3 * (time.perf_counter() - begin))
            if name == "recurrent_gemma":
                compat.uninstall(*INSTALLED[name])
    return {path: statistics.median(ms) for path, ms in times.items()}


def measure(name: str, size: tuple[int, int, int], shape: tuple[int, int], options: Any) -> Any:
    """Times by what is timed and by path, the losses of each path's training steps, and how far the first gradients of the
    paths are apart."""
    models = {path: build(name, module, size) for path, module in modules(name).items()}
    for model in models.values():
        model.to(options.device, getattr(torch, options.dtype))
    ids = torch.randint(1, size[2], shape, generator=torch.Generator().manual_seed(1))
    ids, losses, runs = ids.to(options.device), {path: [] for path in PATHS}, {}

    def forward(path: str) -> None:
        with torch.no_grad():
            models[path](input_ids=ids, labels=ids, use_cache=False)

    def generate(path: str, batch: int, count: int = 32) -> None:
        prompt = ids[:1, :16].expand(batch, -1)
        how = {"attention_mask": torch.ones_like(prompt), "do_sample": False}
        models[path].generate(prompt, max_new_tokens=count, **how)

    def train(path: str, optimizer: torch.optim.Optimizer) -> None:
        loss = models[path](input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses[path].append(float(loss.detach()))

    gradients = [gradient(models[path], ids) for path in PATHS]
    calls = {path: lambda path=path: forward(path) for path in PATHS}
    runs["forward pass"] = interleaved(name, calls, options.repeats)
    for batch in (1, 64):
        calls = {path: lambda path=path, batch=batch: generate(path, batch) for path in PATHS}
        times = interleaved(name, calls, options.repeats)
        runs[f"generated token, batch {batch}"] = {path: ms / 32 for path, ms in times.items()}
    optimizers = {p: torch.optim.AdamW(models[p].parameters(), lr=1e-4) for p in PATHS}
    calls = {path: lambda path=path: train(path, optimizers[path]) for path in PATHS}
    runs["training step"] = interleaved(name, calls, options.repeats)
    return runs, losses, float((gradients[1] - gradients[0]).norm() / gradients[0].norm())


def gradient(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """All gradients of the loss as one vector."""
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    vector = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return torch.cat(vector)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", choices=INSTALLED)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=TOLERANCE)
    parser.add_argument("--repeats", type=int, default=5, help="of each call; default: 5")
    parser.add_argument("--quick", action="store_true", help="a small model: to see that it works")
    parser.add_argument("--json", type=Path, help="write every number to this file")
    options = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = (
        False  # whose rounding is larger than the differences of losses
    )
    size, shape = SIZES[options.model], (2 if options.model in SECOND else 8, 512)
    if options.quick:
        size, shape = (32, size[1], 64), (2, 16)
    try:
        runs, losses, far = measure(options.model, size, shape, options)
    finally:
        compat.uninstall()
    for what, times in runs.items():
        print(f"{what}: " + ", ".join(f"{path} {ms:.2f} ms" for path, ms in times.items()))
    own, ours = losses.values()
    apart = max(abs(a - b) for a, b in zip(own, ours, strict=True)) / abs(own[0])
    print(
        f"losses of {len(own)} training steps: at most {apart:.1e} apart; first gradients: {far:.1e}"
    )
    if options.json:
        record = {"torch": torch.__version__, "size": size, "shape": shape, "dtype": options.dtype}
        record |= {"losses": losses, "gradients apart": far, "runs": runs}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if apart <= TOLERANCE[options.dtype] and far <= GRADIENTS[options.dtype] else 1


if __name__ == "__main__":
    sys.exit(main())
