"""Time transformers' RecurrentGemma on ``scan_registry.rg_lru``, and on its own loop over time.

    python tools/recurrent_gemma.py [--device cpu] [--dtype float32] [--steps N] [--compile] [--quick] [--json FILE]

Three layers of 768 features, two of them recurrent, on (8, 512) tokens, randomly initialised: milliseconds of a training
step, forward, backward and AdamW's update; of a forward pass; and of a token that is generated from a cache, for one
sequence and for 64. ``compat.install("recurrent_gemma")`` is called before each call of the one path, and ``uninstall``
after it; the calls of both are interleaved, so that what else the GPU does falls on both. Both models start from the same
weights and train on the same tokens. Their losses have to agree at every step, in float32 to 1e-5 of the loss. With
``--compile`` a third model trains under ``torch.compile``. Needs transformers.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from records import write_records
from rich.console import Console
from rich.table import Table
from stopwatch import milliseconds
from torch import Tensor

from scan_registry import __version__, compat

OWN, OURS, COMPILED = "its own", "scan_registry", "scan_registry, torch.compile"
#: How far the losses of the paths may be apart at any step, relative to the first one.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
WARM_UP = 2  # training steps whose time does not count


@dataclass(frozen=True)
class Size:
    """What is timed."""

    width: int = 768
    heads: int = 8
    layers: int = 3
    batch: int = 8
    time: int = 512
    vocabulary: int = 8192
    new_tokens: int = 32
    prompt: int = 16
    generating: tuple[int, ...] = (1, 64)
    repeats: int = 5


QUICK = Size(
    width=32, heads=4, batch=2, time=16, vocabulary=64, new_tokens=3, prompt=4, generating=(1,),
    repeats=2,
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """Median ms of one thing by one of the paths."""

    what: str
    path: str
    ms: float


@contextmanager
def on(path: str) -> Iterator[None]:
    """With transformers' class as the path has it."""
    if path == OWN:
        yield
        return
    compat.install("recurrent_gemma")
    try:
        yield
    finally:
        compat.uninstall("recurrent_gemma")


def model_of(size: Size, device: torch.device, dtype: torch.dtype) -> Any:
    """The model, with the same weights each time."""
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    config = RecurrentGemmaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        lru_width=size.width,
        intermediate_size=3 * size.width,
        num_attention_heads=size.heads,
        num_hidden_layers=size.layers,
        attention_window_size=size.time,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return RecurrentGemmaForCausalLM(config).to(device, dtype)


def interleaved(
    what: str,
    functions: dict[str, Callable[[], object]],
    repeats: int,
    device: torch.device,
    *,
    per: int = 1,
    warm_up: int = 1,
) -> list[Result]:
    """Medians of calls that alternate between the paths, after some of each whose time does not count."""
    times: dict[str, list[float]] = {path: [] for path in functions}
    for _ in range(warm_up + repeats):
        for path, function in functions.items():
            with on(path):
                times[path].append(milliseconds(function, device) / per)
    return [Result(what, path, statistics.median(each[warm_up:])) for path, each in times.items()]


def measure(
    size: Size, device: torch.device, dtype: torch.dtype, steps: int, compiled: bool
) -> tuple[list[Result], dict[str, list[float]]]:
    """All times, and the losses of each path at every training step."""
    paths = [OWN, OURS]
    models = {path: model_of(size, device, dtype) for path in [*paths, *[COMPILED] * compiled]}
    generator = torch.Generator().manual_seed(1)
    shape = size.batch, size.time
    ids = torch.randint(1, size.vocabulary, shape, generator=generator).to(device)

    def forward(path: str) -> Callable[[], object]:
        def call() -> None:
            with torch.no_grad():
                models[path](input_ids=ids, labels=ids, use_cache=False)

        return call

    def generating(path: str, batch: int) -> Callable[[], object]:
        prompt = ids[:1, : size.prompt].expand(batch, -1)
        mask = torch.ones_like(prompt)

        def call() -> object:
            return models[path].generate(
                prompt, attention_mask=mask, max_new_tokens=size.new_tokens, do_sample=False
            )

        return call

    losses: dict[str, list[float]] = {path: [] for path in models}

    def training(path: str) -> Callable[[], object]:
        optimizer = torch.optim.AdamW(models[path].parameters(), lr=1e-4)
        model = torch.compile(models[path]) if path == COMPILED else models[path]

        def call() -> None:
            loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses[path].append(float(loss.detach()))

        return call

    for model in models.values():
        model.eval()
    done = interleaved("forward pass", {p: forward(p) for p in paths}, size.repeats, device)
    for batch in size.generating:
        what = f"generated token, batch {batch}"
        calls = {path: generating(path, batch) for path in paths}
        done += interleaved(what, calls, size.repeats, device, per=size.new_tokens)
    for model in models.values():
        model.train()
    calls = {path: training(path) for path in models}
    done += interleaved("training step", calls, steps, device, warm_up=WARM_UP)
    return done, losses


def apart(losses: dict[str, list[float]], path: str) -> float:
    """The largest difference from the losses of the model's own path, relative to the first; infinite if one is not finite."""
    own, found = losses[OWN], losses[path]
    if not all(map(math.isfinite, found)):
        return math.inf
    return max(abs(a - b) for a, b in zip(own, found, strict=True)) / abs(own[0])


def show(done: list[Result], losses: dict[str, list[float]], title: str) -> None:
    table = Table(title=title)
    table.add_column("of")
    for path in losses:
        table.add_column(f"{path}, ms", justify="right")
    table.add_column("times as fast", justify="right")
    for what in dict.fromkeys(result.what for result in done):
        of_path = {result.path: result.ms for result in done if result.what == what}
        cells = [f"{of_path[path]:.2f}" if path in of_path else "–" for path in losses]
        table.add_row(what, *cells, f"{of_path[OWN] / of_path[OURS]:.1f}")
    console = Console(width=110)
    console.print(table)
    for path, each in losses.items():
        far = "" if path == OWN else f", at most {apart(losses, path):.1e} apart"
        console.print(
            f"{path}: first loss {each[0]:.6f}, last loss {each[-1]:.6f}{far}", highlight=False
        )


def missing(device: torch.device) -> str | None:
    """Why nothing can be timed."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    if device.type == "cuda" and not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU; with --device cpu it runs on the CPU"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda:0", help="default: cuda:0")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--steps", type=int, default=10, help="training steps; default: 10")
    parser.add_argument(
        "--compile", action="store_true", help="train a third model under torch.compile"
    )
    parser.add_argument("--quick", action="store_true", help="a small model: to see that it works")
    parser.add_argument("--json", type=Path, help="write every number to this file")
    args = parser.parse_args()
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    if why := missing(device):
        print(f"recurrent_gemma: {why}", file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    size = QUICK if args.quick else Size()
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    done, losses = measure(size, device, dtype, args.steps, args.compile)
    title = f"{where}: {size.layers} layers of {size.width}, ({size.batch}, {size.time}), {dtype}"
    show(done, losses, title)
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
    worst = max(apart(losses, path) for path in losses if path != OWN)
    return 0 if worst <= TOLERANCE[dtype] else 1


if __name__ == "__main__":
    sys.exit(main())
