"""Modules on this package's operators: ``LSTM``, ``GRU``, ``RNN`` and ``SLSTM`` with the constructors and the state dicts of
torch.nn's, ``Mamba`` and ``Mamba2``, with its norm ``RMSNormGated``, with those of mamba_ssm's, and ``MinGRU``, ``MinLSTM``,
``RGLRU``, ``HGRN``, ``LRU`` and ``S5`` with the state dicts of their public implementations. A model swaps one line."""

from __future__ import annotations

from scan_registry.nn.gated_norm import RMSNormGated
from scan_registry.nn.hgrn import HGRN
from scan_registry.nn.lru import LRU
from scan_registry.nn.mamba import Mamba
from scan_registry.nn.mamba2 import Mamba2
from scan_registry.nn.min_gru import MinGRU, MinLSTM
from scan_registry.nn.modules import GRU, LSTM, RNN, SLSTM
from scan_registry.nn.rg_lru import RGLRU
from scan_registry.nn.s5 import S5

__all__ = [
    "GRU",
    "HGRN",
    "LRU",
    "LSTM",
    "RGLRU",
    "RNN",
    "S5",
    "SLSTM",
    "Mamba",
    "Mamba2",
    "MinGRU",
    "MinLSTM",
    "RMSNormGated",
]
