"""Train the two models of the page on a character model, and write their losses.

    python tools/character_model.py [--steps N] [--device cpu] [--json FILE]

The models and their training are the code blocks of docs/pages/guides/character-model.md, which are run as they stand
there. Both models then begin anew, and train for the steps that are asked for. ``python tools/docs.py`` draws the picture of
the page from tools/results/cpu-character-model.json.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import torch
from records import write_records

from scan_registry import __version__

PAGE = Path(__file__).resolve().parents[1] / "docs" / "pages" / "guides" / "character-model.md"
#: What the page's recurrent layers are called, by the class of their blocks.
NETWORKS = {"Block": "scan_registry.nn.MinGRU", "GRUBlock": "torch.nn.GRU"}
_BLOCK = re.compile(r"^(<!-- skip: [^\n]*-->\n)?```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@contextmanager
def hidden_gpus(device: str) -> Iterator[None]:
    """The page takes a GPU where torch sees one; with ``cpu`` it is to see none."""
    original = torch.cuda.is_available
    if device == "cpu":
        torch.cuda.is_available = lambda: False
    try:
        yield
    finally:
        torch.cuda.is_available = original


def program() -> str:
    """The page's blocks, but for those that say ``skip``."""
    found = _BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    return "\n".join(text for skip, text in found if not skip)


def trained(names: dict[str, Any], block: str, steps: int) -> dict[str, Any]:
    """The record of one model: its losses at every step, and the time that CPU cores spent on them."""
    torch.manual_seed(0)
    model = names["Model"](names[block]).to(names["device"])
    begin = time.process_time()
    losses = names["train"](model, steps)
    seconds = time.process_time() - begin
    weights = sum(parameter.numel() for parameter in model.parameters())
    return {
        "network": NETWORKS[block],
        "weights": weights,
        "cpu_seconds": round(seconds, 1),
        "losses": [round(loss, 4) for loss in losses],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="default: 300")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu"))
    parser.add_argument("--json", type=Path, help="write every loss to this file")
    args = parser.parse_args()
    names: dict[str, Any] = {"__name__": "__page__"}
    with hidden_gpus(args.device):
        exec(compile(program(), str(PAGE), "exec", dont_inherit=True), names)
    runs = []
    for block in NETWORKS:
        runs.append(trained(names, block, args.steps))
        last = statistics.mean(runs[-1]["losses"][-10:])
        print(
            f"{runs[-1]['network']}: {runs[-1]['weights']} weights, loss {last:.3f} over the last ten of "
            f"{args.steps} steps, {runs[-1]['cpu_seconds']} s of CPU cores",
            flush=True,
        )
    if args.json:
        on_gpu = names["device"] == "cuda"
        record = {
            "device": torch.cuda.get_device_name() if on_gpu else "CPU",
            "cores": os.cpu_count(),
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "scan_registry": __version__,
            "runs": runs,
        }
        write_records(args.json, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
