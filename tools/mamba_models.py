"""Time transformers' Mamba with the stand-ins of ``scan_registry.compat``, and on its own path.

    python tools/mamba_models.py [--device cpu] [--dtype float32] [--fused] [--quick] [--json FILE]

Two layers of 768 features on (8, 512) tokens in bfloat16, randomly initialised: milliseconds of a training step, forward,
backward and AdamW's update; of a forward pass; and of a token that is generated from a cache, for one sequence and for
64. The modules of the model are imported twice, without the stand-ins and with them; both take turns, so that what else
the GPU does falls on both. The losses have to agree. With ``--fused`` a third model's training step calls ``mamba_inner_fn``,
which ``compat.install`` hides from transformers. Compare ``fused`` with the stand-ins to see what that costs. Needs
transformers 5.16 or later, and neither mamba-ssm nor causal-conv1d installed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from records import write_records
from rich.console import Console
from rich.table import Table
from stopwatch import milliseconds
from torch import Tensor

from scan_registry import __version__, compat

NAME = "transformers.models.mamba.modeling_mamba"
PACKAGES = ("mamba_ssm", "causal_conv1d")
#: How far the losses of the two may be apart, relative to one of them.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Size:
    """What is timed."""

    width: int = 768
    layers: int = 2
    batch: int = 8
    time: int = 512
    vocabulary: int = 50280
    new_tokens: int = 32
    prompt: int = 16
    generating: tuple[int, ...] = (1, 64)
    repeats: int = 5


QUICK = Size(
    width=32, batch=2, time=16, vocabulary=64, new_tokens=3, prompt=4, generating=(1,), repeats=2
)


@dataclass(frozen=True)
class Result:
    """Median ms of one thing by one of the paths."""

    what: str
    path: str
    ms: float


def modules(fused: bool) -> dict[str, ModuleType]:
    """The model's Python module: without stand-ins, with them, and with ``fused`` also with ``mamba_inner_fn``."""
    sys.modules.pop(NAME, None)
    found = {"its own": importlib.import_module(NAME)}
    del sys.modules[NAME]
    compat.install(*PACKAGES)
    found["scan_registry"] = importlib.import_module(NAME)
    if fused:
        del sys.modules[NAME]
        found["fused"] = importlib.import_module(NAME)
        vars(found["fused"])["mamba_inner_fn"] = compat.mamba_ssm.mamba_inner_fn
    return found


def model_of(module: ModuleType, size: Size, device: torch.device, dtype: torch.dtype) -> Any:
    """The model, with the same weights each time."""
    from transformers import MambaConfig

    config = MambaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return module.MambaForCausalLM(config).to(device, dtype)


def interleaved(
    what: str,
    functions: dict[str, Callable[[], object]],
    size: Size,
    device: torch.device,
    per: int = 1,
) -> list[Result]:
    """Medians of calls that take turns. Before each that is timed comes one that is not: what another path has left in caches
    and in the allocator must not count."""
    times: dict[str, list[float]] = {path: [] for path in functions}
    for _ in range(size.repeats):
        for path, function in functions.items():
            function()
            times[path].append(milliseconds(function, device) / per)
    return [Result(what, path, statistics.median(each)) for path, each in times.items()]


def measure(
    size: Size, device: torch.device, dtype: torch.dtype, fused: bool
) -> tuple[list[Result], dict[str, float]]:
    """All times, and the first loss of each path."""
    models = {
        path: model_of(module, size, device, dtype) for path, module in modules(fused).items()
    }
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, size.vocabulary, (size.batch, size.time), generator=generator).to(device)
    losses: dict[str, float] = {}

    def forward(path: str) -> Callable[[], object]:
        def call() -> None:
            with torch.no_grad():
                loss: Tensor = models[path](input_ids=ids, labels=ids, use_cache=False).loss
            losses.setdefault(path, float(loss))

        return call

    def training(path: str) -> Callable[[], object]:
        optimizer = torch.optim.AdamW(models[path].parameters(), lr=1e-4)

        def call() -> None:
            models[path](input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return call

    def generating(path: str, batch: int) -> Callable[[], object]:
        prompt = ids[:1, : size.prompt].expand(batch, -1)
        mask = torch.ones_like(prompt)

        def call() -> object:
            return models[path].generate(
                prompt, attention_mask=mask, max_new_tokens=size.new_tokens, do_sample=False
            )

        return call

    for model in models.values():
        model.eval()
    done = interleaved("forward pass", {path: forward(path) for path in models}, size, device)
    for batch in size.generating:
        calls = {path: generating(path, batch) for path in models}
        done += interleaved(
            f"generated token, batch {batch}", calls, size, device, per=size.new_tokens
        )
    for model in models.values():
        model.train()
    done += interleaved("training step", {path: training(path) for path in models}, size, device)
    return done, losses


def show(done: list[Result], where: str, size: Size, dtype: torch.dtype) -> None:
    table = Table(
        title=f"{where}: {size.layers} layers of {size.width}, ({size.batch}, {size.time}), {dtype}"
    )
    table.add_column("of")
    paths = dict.fromkeys(result.path for result in done)
    for name in (*(f"{path}, ms" for path in paths), "times as fast"):
        table.add_column(name, justify="right")
    for what in dict.fromkeys(result.what for result in done):
        times = [result.ms for result in done if result.what == what]
        table.add_row(what, *(f"{ms:.2f}" for ms in times), f"{times[0] / times[1]:.1f}")
    Console(width=110).print(table)


def missing() -> str | None:
    """Why nothing can be timed."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    for name in PACKAGES:
        if importlib.util.find_spec(name) is not None:
            return f"{name} itself is installed, so there is no path of transformers' own to time"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda:0", help="default: cuda:0")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--fused", action="store_true", help="time mamba_inner_fn in training, too")
    parser.add_argument("--quick", action="store_true", help="a small model: to see that it works")
    parser.add_argument("--json", type=Path, help="write every number to this file")
    args = parser.parse_args()
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    why = missing()
    if device.type == "cuda" and not torch.cuda.is_available():
        why = "torch sees no NVIDIA GPU; with --device cpu it runs on the CPU"
    if why:
        print(f"mamba_models: {why}", file=sys.stderr)
        return 2
    size = QUICK if args.quick else Size()
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    try:
        done, losses = measure(size, device, dtype, args.fused)
    finally:
        compat.uninstall()
    show(done, where, size, dtype)
    own, *others = losses.values()
    apart = max(abs(own - x) / abs(own) if math.isfinite(x) else math.inf for x in others)
    print(f"first losses {', '.join(f'{x:.6f}' for x in losses.values())}, {apart:.1e} apart")
    if args.json:
        record = {
            "device": where,
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "transformers": importlib.import_module("transformers").__version__,
            "scan_registry": __version__,
            "dtype": args.dtype,
            "size": asdict(size),
            "losses": losses,
            "runs": [asdict(result) for result in done],
        }
        write_records(args.json, record)
    return 0 if apart <= TOLERANCE[dtype] else 1


if __name__ == "__main__":
    sys.exit(main())
