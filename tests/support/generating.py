"""How tests have models of transformers generate tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def greedy(ids: Tensor, count: int) -> dict[str, Any]:
    """Arguments of ``generate`` for so many of the likeliest tokens, with their logits."""
    return {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": count,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
