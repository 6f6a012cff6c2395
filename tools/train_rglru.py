"""Train a small language model of RG-LRU blocks with its own scan and with linear_scan.

    python tools/train_rglru.py [--json FILE]

The model is transformers' RecurrentGemma, randomly initialised from a small config, in float32, on
sequences whose next token depends on the last two. Three runs start from the same weights and see the
same batches: the model as it is, which scans in a loop over time; with its scan replaced by
``linear_scan``; and that under ``torch.compile``. Their losses have to agree. Needs an NVIDIA GPU and
transformers.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from records import write_records
from rich.console import Console
from rich.table import Table
from torch import Tensor

from scan_registry import __version__, linear_scan

BATCH, TIME, VOCABULARY, STEPS = 8, 512, 512, 50
WARM_UP = 5  # steps whose time does not count
#: How far two loss curves may be apart: rounding, which training amplifies step by step.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Run:
    """The losses of each step, and the median ms of a step after the warm-up."""

    name: str
    losses: list[float]
    ms: float


def registry_scan(
    self: Any,
    hidden_states: Tensor,
    recurrent_gate: Tensor,
    reset: Tensor,
    recurrent_states: Tensor | None,
    acc_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """In the place of ``RecurrentGemmaRglru._rnn_scan``, whose arguments these are."""
    gates = (recurrent_gate * ~reset).to(acc_dtype)
    return linear_scan(gates, hidden_states, recurrent_states, dim=1, return_final_state=True)


def model_of(seed: int) -> Any:
    """A small RecurrentGemma with the same weights for the same seed."""
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    torch.manual_seed(seed)
    config = RecurrentGemmaConfig(
        num_hidden_layers=4,
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_attention_heads=4,
        lru_width=256,
        attention_window_size=TIME,
        block_types=("recurrent",),
        use_cache=False,
    )
    return RecurrentGemmaForCausalLM(config).cuda().train()


def batches(seed: int) -> Iterator[Tensor]:
    """Tokens that follow, nine times out of ten, from the two before them."""
    generator = torch.Generator().manual_seed(seed)
    successor = torch.randint(VOCABULARY, (VOCABULARY, VOCABULARY), generator=generator)
    while True:
        tokens = torch.randint(VOCABULARY, (BATCH, TIME), generator=generator)
        guided = torch.rand(BATCH, TIME, generator=generator) < 0.9
        for t in range(2, TIME):
            follows = successor[tokens[:, t - 2] % 8, tokens[:, t - 1] % 8]
            tokens[:, t] = torch.where(guided[:, t], follows, tokens[:, t])
        yield tokens.cuda()


def train(name: str, model: Any, forward: Any) -> Run:
    """Fifty steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, times = [], []
    for _, tokens in zip(range(STEPS), batches(seed=1), strict=False):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        loss = forward(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss))  # which waits for the GPU
        times.append(1e3 * (time.perf_counter() - begin))
    return Run(name, losses, statistics.median(times[WARM_UP:]))


def runs() -> Iterator[Run]:
    """The model as it is, with linear_scan, and with linear_scan under torch.compile."""
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

    model = model_of(seed=0)
    yield train("its own scan", model, model)
    own = RecurrentGemmaRglru._rnn_scan
    RecurrentGemmaRglru._rnn_scan = registry_scan
    try:
        model = model_of(seed=0)
        yield train("linear_scan", model, model)
        model = model_of(seed=0)
        yield train("linear_scan, torch.compile", model, torch.compile(model))
    finally:
        RecurrentGemmaRglru._rnn_scan = own


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write every number to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("train_rglru needs an NVIDIA GPU, and torch sees none", file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    done = list(runs())
    table = Table(title=f"{torch.cuda.get_device_name()}: ({BATCH}, {TIME}), {STEPS} steps")
    for column in ("scan", "first loss", "last loss", "largest difference", "ms per step"):
        table.add_column(column, justify="left" if column == "scan" else "right")
    worst = 0.0
    for run in done:
        apart = max(abs(a - b) for a, b in zip(run.losses, done[0].losses, strict=True))
        if not all(map(math.isfinite, run.losses)):
            apart = math.inf  # max() passes over a NaN
        worst = max(worst, apart)
        table.add_row(
            run.name,
            f"{run.losses[0]:.4f}",
            f"{run.losses[-1]:.4f}",
            f"{apart:.1e}",
            f"{run.ms:.1f}",
        )
    Console(width=110).print(table)
    if args.json:
        record = {
            "gpu": torch.cuda.get_device_name(),
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "scan_registry": __version__,
            "runs": [asdict(run) for run in done],
        }
        write_records(args.json, record)
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
