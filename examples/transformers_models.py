"""Run a model of transformers on scan_registry, and time it beside transformers' own code: Mamba, RecurrentGemma, or one on
Mamba-2's scan (Mamba2, Bamba, Zamba2, NemotronH, GraniteMoeHybrid, FalconH1).

    python examples/transformers_models.py mamba [--device cpu] [--dtype float32] [--json FILE]
    python examples/transformers_models.py recurrent_gemma
    python examples/transformers_models.py mamba2
    python examples/transformers_models.py mamba --graphs

One line, ``compat.install(…)``, makes the model run on scan_registry. If mamba_ssm itself is installed, a third path is timed:
transformers on mamba_ssm's kernels, which need a GPU and are compiled in the first step. If causal-conv1d is not installed
beside it, that path has scan_registry's convolution. Neither is seen by the other paths.

Small models, randomly initialised, compute (8, 512) tokens, those on Mamba-2's scan (2, 512), as their own code takes much
memory: milliseconds of the first training step (forward, backward and AdamW's update; torch has loaded its own kernels in a step
of another model), of a later one, of a forward pass, and of a token that is generated, for one sequence and for 64, or 8 on
Mamba-2's scan. All paths start from the same weights. On scan_registry the losses and the first gradients have to agree with
transformers' own path, and on a GPU nothing may be compiled: a kernel that no wheel holds is an error, unless ``--require``
allows it. Needs transformers 5.16 or later.

With ``--graphs`` it times in their place training steps and tokens of Mamba or Mamba2 on scan_registry, and of a model of the
same size from ``scan_registry.nn``, in three ways, or in those that are named: ``eager``, ``compiled`` by
``torch.compile(mode="reduce-overhead")``, and as one CUDA ``graph``; all with AdamW's fused update, and without what
``generate`` does beside the model. And both passes of a block, on an input so small that the GPU waits for the CPU. See
``model_steps.py``.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import date
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import model_steps
import torch

import scan_registry
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
PACKAGES = ("mamba_ssm", "causal_conv1d")
#: What ``compat.install`` takes for each model.
INSTALLED = {
    **dict.fromkeys(("mamba", *SECOND), PACKAGES),
    "recurrent_gemma": ("recurrent_gemma",),
}
#: The modules of mamba_ssm that each model's functions are in.
ORIGINALS = {
    **dict.fromkeys(SECOND, ("ops.triton.ssd_combined", "ops.triton.selective_state_update")),
    "mamba": ("ops.selective_scan_interface", "ops.triton.selective_state_update"),
    "recurrent_gemma": (),
}
OWN, THEIRS, OURS = "its own", "mamba_ssm", "scan_registry"
#: How far the losses of the two paths may be apart, relative to the first; and their first gradients, all as one vector.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
GRADIENTS = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
#: Of the models: features, layers, vocabulary.
SIZES = {"mamba": (768, 2, 50280), "recurrent_gemma": (768, 3, 8192)}
SIZES |= dict.fromkeys(SECOND, (2048, 2, 8192))


class Hiding:
    """A finder of modules that finds what another one does, but for mamba_ssm and causal_conv1d."""

    def __init__(self, finder: Any) -> None:
        self.finder = finder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in PACKAGES:
            return None
        return self.finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)


@contextmanager
def hidden() -> Iterator[None]:
    """As if mamba_ssm and causal_conv1d were not installed; what ``compat.install`` puts in their places is seen."""
    names = [name for name in sys.modules if name.partition(".")[0] in PACKAGES]
    modules, finders = {name: sys.modules.pop(name) for name in names}, [*sys.meta_path]
    sys.meta_path[:] = [Hiding(finder) for finder in finders]
    try:
        yield
    finally:
        compat.uninstall(*PACKAGES)
        sys.meta_path[:] = finders
        sys.modules.update(modules)


def originals(name: str) -> dict[str, str]:
    """The versions of mamba_ssm and causal_conv1d that the path on mamba_ssm's kernels has; none if there is no such path, as
    mamba_ssm is not installed, or without the module that the model needs."""
    needed = [f"mamba_ssm.{place}" for place in ORIGINALS[name]]
    if not needed or not importlib.util.find_spec("mamba_ssm"):
        return {}
    if not all(importlib.util.find_spec(module) for module in needed):
        return {}
    with stand_in():
        return {package: importlib.metadata.version(package) for package in PACKAGES}


@contextmanager
def stand_in() -> Iterator[None]:
    """With scan_registry's causal_conv1d if it is not installed."""
    missing = [] if importlib.util.find_spec("causal_conv1d") else ["causal_conv1d"]
    if missing:
        compat.install(*missing)
    try:
        yield
    finally:
        if missing:
            compat.uninstall(*missing)


def modules(name: str, paths: list[str]) -> dict[str, ModuleType]:
    """The model's Python module by path: it asks for the packages when it is imported."""
    home, by_path = f"transformers.models.{name}.modeling_{name}", {}
    for path in paths:
        sys.modules.pop(home, None)
        with stand_in() if path == THEIRS else hidden():
            if path == THEIRS:
                # transformers takes its own code for what it cannot import, and does not say why.
                for place in ORIGINALS[name]:
                    importlib.import_module(f"mamba_ssm.{place}")
            if path == OURS and name != "recurrent_gemma":
                compat.install(*INSTALLED[name])
            by_path[path] = importlib.import_module(home)
        if path == OURS and name == "recurrent_gemma":
            # Into the class of this module; that of the path before has another one.
            compat.install(*INSTALLED[name])
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


def at_level(path: str, options: Any) -> AbstractContextManager[Any]:
    """On scan_registry's path, nothing runs but torch's kernels and those of the level that is required. Mamba-2's scan in float32
    is composed of torch's matrix products, which only the lowest level allows."""
    if path != OURS or options.device == "cpu":
        return nullcontext()
    composed = options.model in SECOND and options.dtype == "float32"
    return scan_registry.require("reference" if composed else options.require)


def milliseconds(call: Callable[[], object]) -> float:
    """Of one call."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin)


def interleaved(calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median ms of calls that alternate between the paths, each after one whose time does not count."""
    times: dict[str, list[float]] = {path: [] for path in calls}
    for _ in range(repeats):
        for path, call in calls.items():
            call()
            times[path].append(milliseconds(call))
    return {path: statistics.median(ms) for path, ms in times.items()}


class Trained:
    """A model on one path, with what its training steps leave."""

    def __init__(self, path: str, module: ModuleType, options: Any) -> None:
        self.model = build(options.model, module, options.size)
        self.model.to(options.device, getattr(torch, options.dtype))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.guard = partial(at_level, path, options)
        self.losses: list[float] = []
        self.gradient: torch.Tensor | None = None  # of the first step, all in one vector

    def train(self, ids: torch.Tensor) -> None:
        with self.guard():
            loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        if self.gradient is None:
            grads = (p.grad for p in self.model.parameters())
            self.gradient = torch.cat([g.float().flatten() for g in grads if g is not None])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(float(loss.detach()))

    def forward(self, ids: torch.Tensor) -> None:
        with torch.no_grad(), self.guard():
            self.model(input_ids=ids, labels=ids, use_cache=False)

    def generate(self, ids: torch.Tensor, batch: int, count: int) -> None:
        prompt = ids[:1, :16].expand(batch, -1)
        how = {"attention_mask": torch.ones_like(prompt), "do_sample": False}
        with self.guard():
            self.model.generate(prompt, max_new_tokens=count, **how)


def tokens(options: Any) -> torch.Tensor:
    """The same in each call."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, options.size[2], options.shape, generator=generator)
    return ids.to(options.device)


def in_words(what: str, times: Mapping[str, float]) -> str:
    """A line of the output."""
    return f"{what}: " + ", ".join(f"{path} {ms:.2f} ms" for path, ms in times.items())


def measure(
    paths: list[str], options: Any
) -> tuple[dict[str, dict[str, float]], dict[str, Trained]]:
    """Times by what is timed and by path, which are printed as they come, and the models."""
    ids, by_path = tokens(options), modules(options.model, paths)
    Trained(OWN, by_path[OWN], options).train(ids)
    models = {path: Trained(path, module, options) for path, module in by_path.items()}
    runs: dict[str, dict[str, float]] = {}

    def tell(what: str, times: Mapping[str, float], count: int = 1) -> None:
        runs[what] = {path: ms / count for path, ms in times.items()}
        print(in_words(what, runs[what]), flush=True)

    def timed(what: str, call: Callable[[Trained], object], count: int = 1) -> None:
        calls = {path: partial(call, model) for path, model in models.items()}
        tell(what, interleaved(calls, options.repeats), count)

    first = {path: milliseconds(partial(model.train, ids)) for path, model in models.items()}
    tell("first training step", first)
    timed("training step", lambda model: model.train(ids))
    timed("forward pass", lambda model: model.forward(ids))
    # transformers' own scan of Mamba-2 takes some 2 GB for each sequence of a prompt.
    for batch in (1, 8 if options.model in SECOND else 64):
        generate = partial(Trained.generate, ids=ids, batch=batch, count=32)
        timed(f"generated token, batch {batch}", generate, 32)
    return runs, models


def measure_ways(options: Any) -> dict[str, dict[str, float]]:
    """Times of each way to run steps, by what is timed and by path, which are printed as they come."""
    dtype, module = getattr(torch, options.dtype), modules(options.model, [OURS])[OURS]
    runs: dict[str, dict[str, float]] = {}

    def own() -> Any:
        return build(options.model, module, options.size).to(options.device, dtype)

    sizes = options.model, options.size, dtype, tokens(options)
    for step in model_steps.steps(*sizes, own, options.graphs or model_steps.WAYS):
        torch.compiler.reset()
        with at_level(OURS, options):
            ms = interleaved({step.path: step.make()}, 4 * options.repeats)[step.path] / step.count
        runs.setdefault(step.what, {})[step.path] = ms
        print(in_words(step.what, {step.path: ms}), flush=True)
    return runs


def apart(one: Trained, other: Trained) -> tuple[float, float]:
    """How far the losses are apart at most, relative to the first; and the first gradients."""
    pairs = zip(one.losses, other.losses, strict=True)
    assert one.gradient is not None
    assert other.gradient is not None
    gradients = (other.gradient - one.gradient).norm() / one.gradient.norm()
    return max(abs(a - b) for a, b in pairs) / abs(one.losses[0]), float(gradients)


def record(
    options: Any,
    versions: dict[str, str],
    runs: dict[str, dict[str, float]],
    models: dict[str, Trained],
) -> dict[str, Any]:
    """Every number, and where and when it was measured."""
    gpu = options.device != "cpu"
    return {
        "model": options.model,
        "device": torch.cuda.get_device_name() if gpu else platform.machine(),
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        **{name: importlib.metadata.version(name) for name in ("transformers", "scan_registry")},
        **versions,
        "dtype": options.dtype,
        "size": options.size,
        "shape": options.shape,
        "losses": {path: model.losses for path, model in models.items()},
        "apart": {path: apart(models[OWN], model) for path, model in models.items()},
        "runs": [
            {"what": what, "path": path, "ms": ms}
            for what, times in runs.items()
            for path, ms in times.items()
        ],
    }


def save(options: Any, record: Mapping[str, Any]) -> None:
    """Write every number to the file that is asked for."""
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def parsed() -> argparse.Namespace:
    """The options, with the size of the model and the shape of its input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", choices=INSTALLED)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=TOLERANCE)
    parser.add_argument("--repeats", type=int, default=5, help="of each call; default: 5")
    parser.add_argument("--quick", action="store_true", help="a small model: to see that it works")
    parser.add_argument(
        "--require",
        default="aot",
        choices=("aot", "ptx", "jit", "reference"),
        help="the level of scan_registry.require on a GPU; default: aot, which compiles nothing",
    )
    parser.add_argument(
        "--without-mamba-ssm", action="store_true", help="leave its kernels out if it is installed"
    )
    parser.add_argument(
        "--graphs",
        nargs="*",
        choices=model_steps.WAYS,
        help="time steps in these ways instead; default: all",
    )
    parser.add_argument("--json", type=Path, help="write every number to this file")
    options = parser.parse_args()
    if options.graphs is not None and options.model not in model_steps.BLOCKS:
        parser.error(f"--graphs takes {' or '.join(model_steps.BLOCKS)}")
    if (
        options.graphs is not None
        and options.device == "cpu"
        and options.graphs != [model_steps.EAGER]
    ):
        parser.error(f"--graphs needs a GPU, but for --graphs {model_steps.EAGER}")
    options.size, options.shape = SIZES[options.model], (2 if options.model in SECOND else 8, 512)
    if options.quick:
        options.size, options.shape = (32, options.size[1], 64), (2, 16)
    return options


def main() -> int:
    options = parsed()
    # Whose rounding is larger than the differences of losses.
    torch.backends.cudnn.allow_tf32 = False
    if options.graphs is not None:
        save(options, record(options, {}, measure_ways(options), {}))
        return 0
    versions = {} if options.without_mamba_ssm else originals(options.model)
    paths = [OWN, THEIRS, OURS] if versions else [OWN, OURS]
    if "scan.registry" in versions.get("causal_conv1d", ""):
        print("mamba_ssm: with scan_registry's causal_conv1d, as causal-conv1d is not installed")
    with tempfile.TemporaryDirectory() as cache:
        # Empty, so that a first step includes what it takes to compile.
        os.environ["TRITON_CACHE_DIR"] = cache
        try:
            runs, models = measure(paths, options)
        finally:
            compat.uninstall()
    for path in paths[1:]:
        loss, gradient = apart(models[OWN], models[path])
        steps = f"losses of {len(models[path].losses)} training steps at most {loss:.1e}"
        print(f"{path} and {OWN}: {steps} apart, first gradients {gradient:.1e}")
    save(options, record(options, versions, runs, models))
    # Those of the last path, which is scan_registry's.
    return 0 if loss <= TOLERANCE[options.dtype] and gradient <= GRADIENTS[options.dtype] else 1


if __name__ == "__main__":
    sys.exit(main())
